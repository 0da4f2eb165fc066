package cassandrad

import (
	_ "embed"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"text/template"

	"github.com/refit-run/refit/sandbox/folder"
)

// member is one server: its address, volumes and settings.
type member struct {
	ip, hosts          string
	data, conf         string
	seeds, dc, cluster string
	ordinal            int
}

//go:embed cassandra.yaml
var yamlText string

var yaml = template.Must(template.New("cassandra.yaml").Parse(yamlText))

// logback writes to the container's log; nodetool says nothing but its answer.
const (
	logback = `<configuration><appender name="OUT" class="ch.qos.logback.core.ConsoleAppender">` +
		`<encoder><pattern>%-5level %date{ISO8601} %F:%L - %msg%n</pattern></encoder></appender>` +
		`<root level="INFO"><appender-ref ref="OUT"/></root></configuration>`
	logbackTools = `<configuration/>`
)

func (m member) file(name string) string { return filepath.Join(m.conf, name) }

func (m member) initialise() error {
	for name, text := range map[string]string{"logback.xml": logback, "logback-tools.xml": logbackTools} {
		if err := folder.WriteFile(m.file(name), []byte(text), 0o644); err != nil {
			return fmt.Errorf("cassandra: configuration: %w", err)
		}
	}
	return nil
}

// configure writes what depends on the environment. A member's rack is named
// by its ordinal, as the chart's image does it.
func (m member) configure() error {
	var text strings.Builder
	err := yaml.Execute(&text, map[string]string{
		"Cluster": m.cluster, "Data": m.data, "IP": m.ip, "Seeds": m.seeds,
		"TokenCount": strconv.Itoa(tokenCount), "Tokens": tokens(m.ordinal),
	})
	if err != nil {
		return fmt.Errorf("cassandra: configuration: %w", err)
	}
	rack := fmt.Sprintf("dc=%s\nrack=rack%d\n", m.dc, m.ordinal)
	for name, text := range map[string]string{"cassandra.yaml": text.String(), "cassandra-rackdc.properties": rack} {
		if err := folder.WriteFile(m.file(name), []byte(text), 0o644); err != nil {
			return fmt.Errorf("cassandra: configuration: %w", err)
		}
	}
	return os.MkdirAll(m.data, 0o755)
}

// tokenCount is the chart's.
const tokenCount = 8

// tokens are fixed, where a real member's are random, so that what an
// expansion does is the same each time: the second member takes over two
// thirds of each range of the first, the third half of that. The
// administrator's role then lies with the second. Members beyond these choose
// their own.
func tokens(ordinal int) string {
	const width = 1 << 61 // a range of member 0: the ring has 8 of it
	below, ok := map[int]int64{0: 0, 1: width / 3, 2: width / 3 * 2}[ordinal]
	if !ok {
		return ""
	}
	list := make([]string, tokenCount)
	for i := range list {
		list[i] = strconv.FormatInt(int64(i-tokenCount/2)*width+width/2-below, 10)
	}
	return strings.Join(list, ",")
}
