// Package cassandrad is the real Apache Cassandra as a program of the process
// node: it writes the configuration from the pod's environment, as the chart's
// image does, and becomes the server. It also knows where the jars are, makes
// nodetool, and prepares the data of a first member once. It must not know
// Kubernetes objects.
package cassandrad

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"github.com/refit-run/refit/sandbox/procnode/pod"
)

// HomeVariable names the folder that tools/cassandra.sh fills; without it the
// folder `cassandra` beside this program is taken.
const HomeVariable = "REFIT_SANDBOX_CASSANDRA"

// Variables of the chart, in the container's environment.
const (
	SeedsVariable = "CASSANDRA_SEEDS"
	DCVariable    = "CASSANDRA_DC"
	// ClusterVariable is the cluster's name, which all members must share.
	ClusterVariable = "CASSANDRA_CLUSTER_NAME"
)

// preparedVariable names the data that member 0 begins with.
const preparedVariable = "SANDBOX_CASSANDRA_PREPARED"

// Volumes that the pod must have.
const (
	DataVolume = "data"
	ConfVolume = "conf"
)

// InitArgument makes Run lay down the static part of the configuration: the
// chart's init container.
const InitArgument = "init"

// ErrNoJars says that Cassandra was not fetched.
var ErrNoJars = errors.New("Apache Cassandra is not there")

// Home is Cassandra on this machine.
type Home struct {
	dir, java string
}

// Find looks for the jars and a Java runtime.
func Find() (Home, error) {
	dir := os.Getenv(HomeVariable)
	if dir == "" {
		self, err := os.Executable()
		if err != nil {
			return Home{}, err
		}
		dir = filepath.Join(filepath.Dir(self), "cassandra")
	}
	jars, err := filepath.Glob(filepath.Join(dir, "lib", "cassandra-all-*.jar"))
	if err != nil {
		return Home{}, err
	}
	java, lost := exec.LookPath("java")
	if len(jars) != 1 || lost != nil {
		return Home{}, fmt.Errorf("%w: expected its jars in %s (or the folder that %s names) and java in PATH, found %d jars of it, java %q: run `make cassandra`",
			ErrNoJars, filepath.Join(dir, "lib"), HomeVariable, len(jars), java)
	}
	return Home{dir: dir, java: java}, nil
}

// Env is the image's part of the environment.
func (h Home) Env(prepared string) map[string]string {
	return map[string]string{HomeVariable: h.dir, preparedVariable: prepared}
}

// Run is the member until it ends, or the init container.
func Run(args []string) error {
	m, err := memberOf(os.Getenv)
	if err != nil {
		return err
	}
	if len(args) == 1 && args[0] == InitArgument {
		return m.initialise()
	}
	h, err := Find()
	if err != nil {
		return err
	}
	if err := m.configure(); err != nil {
		return err
	}
	if err := m.adopt(os.Getenv(preparedVariable)); err != nil {
		return err
	}
	line := h.server(m)
	if err := syscall.Exec(line[0], line, os.Environ()); err != nil {
		return fmt.Errorf("cassandra: %s: %w", line[0], err)
	}
	return nil
}

// memberOf reads the environment of a container.
func memberOf(env func(string) string) (member, error) {
	m := member{
		ip: env(pod.IPVariable), hosts: env(pod.HostsVariable), data: env("VOLUME_" + DataVolume), conf: env("VOLUME_" + ConfVolume),
		seeds: env(SeedsVariable), dc: env(DCVariable), cluster: env(ClusterVariable),
	}
	for name, value := range map[string]string{
		pod.IPVariable: m.ip, "volume " + DataVolume: m.data, "volume " + ConfVolume: m.conf,
		SeedsVariable: m.seeds, DCVariable: m.dc, ClusterVariable: m.cluster,
	} {
		if value == "" {
			return m, fmt.Errorf("cassandra: expected %s in the container's environment, found none", name)
		}
	}
	host := env("HOSTNAME")
	_, ordinal, _ := strings.Cut(host, "-")
	var err error
	if m.ordinal, err = strconv.Atoi(ordinal); err != nil {
		return m, fmt.Errorf("cassandra: expected a host name such as cassandra-0, found %q", host)
	}
	return m, nil
}

// adopt copies the prepared data where member 0 of the data centre it was made
// for has none yet.
func (m member) adopt(prepared string) error {
	if m.ordinal != 0 || m.dc != DataCenter || prepared == "" {
		return nil
	}
	target := filepath.Join(m.data, "data")
	if _, err := os.Stat(target); !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	// A copy that was broken off is not mistaken for a whole one.
	next := filepath.Join(m.data, "next")
	if err := os.RemoveAll(next); err != nil {
		return err
	}
	if err := os.CopyFS(next, os.DirFS(filepath.Join(prepared, "data"))); err != nil {
		return fmt.Errorf("cassandra: prepared data: %w", err)
	}
	return os.Rename(next, target)
}
