package openbao_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/refit-run/refit/sandbox/openbao"
)

const (
	// role makes the test binary be a server of the version it holds.
	role = "REFIT_OPENBAO_TEST"

	// limit bounds a wait on a busy machine; look is how often it is looked.
	limit = 2 * time.Minute
	look  = 20 * time.Millisecond
)

func TestMain(m *testing.M) {
	version := os.Getenv(role)
	if version == "" {
		os.Exit(m.Run())
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	err := openbao.Program(ctx, append([]string{"--as=" + version}, os.Args[1:]...), os.Stdout)
	stop()
	var exit *openbao.ExitError
	if errors.As(err, &exit) {
		log.Print(err)
		os.Exit(exit.Code)
	}
	if err != nil {
		log.Fatal(err)
	}
}

// age says which of two versions a member runs.
type age int

const (
	newer age = iota
	older
)

// cluster is three members on loopback.
type cluster struct {
	*testing.T
	dir        string
	members    []*server
	versions   map[age]string
	key, token string
}

type server struct {
	name, api, dir, config string
	cmd                    *exec.Cmd
}

// real names the binary that takes the double's place; empty where none does.
func (a age) real() string {
	if a == older {
		return os.Getenv(openbao.RealOldVariable)
	}
	return os.Getenv(openbao.RealVariable)
}

var reported = regexp.MustCompile(`v(\d+\.\d+)\.\d+`)

// versionsOf are the versions that run: the wanted ones of the double, or those
// of the real binaries where these are named and fit.
func versionsOf(t *testing.T, want map[age]string) map[age]string {
	t.Helper()
	if newer.real() == "" {
		return want
	}
	found, lines := map[age]string{}, map[string]bool{}
	wanted := map[string]bool{}
	for a, version := range want {
		if a.real() == "" {
			t.Skipf("%s: expected a real binary of an older version, found none", openbao.RealOldVariable)
		}
		out, err := exec.Command(a.real(), "version").Output()
		require.NoError(t, err)
		match := reported.FindStringSubmatch(string(out))
		require.NotNil(t, match, "%s", out)
		found[a], lines[match[1]], wanted[version[:strings.LastIndex(version, ".")]] = match[0][1:], true, true
	}
	if len(lines) != len(wanted) {
		t.Skipf("expected binaries of %d lines of versions, found %v", len(wanted), found)
	}
	return found
}

// newCluster makes members that do not run yet.
func newCluster(t *testing.T, versions map[age]string, standbyReads bool) *cluster {
	t.Helper()
	c := &cluster{T: t, dir: t.TempDir(), versions: versionsOf(t, versions)}
	var joins, apis, clusters []string
	for range 3 {
		ip := ownAddress()
		apis, clusters = append(apis, ip+":8200"), append(clusters, ip+":8201")
		joins = append(joins, fmt.Sprintf("  retry_join {\n    leader_api_addr = %q\n  }\n", "http://"+apis[len(apis)-1]))
	}
	for i := range 3 {
		name := "openbao-" + strconv.Itoa(i)
		s := &server{name: name, api: "http://" + apis[i], dir: filepath.Join(c.dir, name), config: filepath.Join(c.dir, name+".hcl")}
		require.NoError(t, os.Mkdir(s.dir, 0o700))
		text := fmt.Sprintf(`# As the chart's, on loopback.
disable_standby_reads = %t
disable_mlock = true
cluster_name = "nvcf-openbao"
api_addr = %q
cluster_addr = %q

listener "tcp" {
  address = %q
  cluster_address = %q
  tls_disable = true
}

storage "raft" {
  path = %q
  node_id = %q
%s}
`, !standbyReads, s.api, "https://"+clusters[i], apis[i], clusters[i], s.dir, name, joins[0]+joins[1]+joins[2])
		require.NoError(t, os.WriteFile(s.config, []byte(text), 0o600))
		c.members = append(c.members, s)
	}
	t.Cleanup(func() {
		for _, s := range c.members {
			c.kill(s)
		}
	})
	return c
}

var members atomic.Int32

// ownAddress is a loopback address that no other member of any test has. Ports
// that the system hands out may be taken by a client before a member is there.
func ownAddress() string {
	pid := os.Getpid()
	return netip.AddrFrom4([4]byte{127, byte(128 + members.Add(1)%100), byte(pid >> 8), byte(pid)}).String()
}

// run starts a member of the given version and returns when it answers.
func (c *cluster) run(s *server, a age) {
	c.Helper()
	program, variables := os.Args[0], []string{role + "=" + c.versions[a]}
	if real := a.real(); real != "" {
		program, variables = real, nil
	}
	out, err := os.OpenFile(s.config+".log", os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	require.NoError(c, err)
	defer out.Close()
	s.cmd = exec.Command(program, "server", "-config="+s.config)
	s.cmd.Env = append(os.Environ(), variables...)
	s.cmd.Stdout, s.cmd.Stderr = out, out
	require.NoError(c, s.cmd.Start())
	c.eventually(s.name+" answers", func() error {
		_, err := c.ask(s, "/v1/sys/seal-status", nil)
		return err
	})
}

// kill ends a member at once, stop as a kubelet does.
func (c *cluster) kill(s *server) { c.end(s, syscall.SIGKILL) }
func (c *cluster) stop(s *server) { c.end(s, syscall.SIGTERM) }

func (c *cluster) end(s *server, signal syscall.Signal) {
	if s.cmd == nil {
		return
	}
	_ = s.cmd.Process.Signal(signal)
	_ = s.cmd.Wait()
	s.cmd = nil
}

// replace is what a pod's replacement does to its member, up to the unsealing.
func (c *cluster) replace(s *server, a age) {
	c.Helper()
	c.stop(s)
	c.run(s, a)
}

// begin starts, initialises and unseals all members; the first is active.
func (c *cluster) begin(a age) {
	c.Helper()
	for _, s := range c.members {
		c.run(s, a)
	}
	c.init()
	for _, s := range c.members {
		c.unseal(s)
	}
	c.settled()
}

func (c *cluster) init() {
	c.Helper()
	var made struct {
		Keys  []string `json:"keys"`
		Token string   `json:"root_token"`
	}
	r := c.send(c.members[0], http.MethodPut, "/v1/sys/init", map[string]int{"secret_shares": 1, "secret_threshold": 1})
	require.Equal(c, http.StatusOK, r.code, string(r.body))
	require.NoError(c, json.Unmarshal(r.body, &made))
	c.key, c.token = made.Keys[0], made.Token
}

// unseal tries again until a joining member has found the cluster.
func (c *cluster) unseal(s *server) {
	c.Helper()
	c.eventually(s.name+" is unsealed", func() error {
		r := c.send(s, http.MethodPut, "/v1/sys/unseal", map[string]string{"key": c.key})
		if r.code != http.StatusOK {
			return fmt.Errorf("%d %s", r.code, r.body)
		}
		status, err := c.ask(s, "/v1/sys/seal-status", nil)
		if err == nil && status["sealed"] != false {
			err = errors.New("sealed")
		}
		return err
	})
}

// settled waits until every running member names the same active one, and that
// one has heard of all.
func (c *cluster) settled() {
	c.Helper()
	c.eventually("the members agree", func() error {
		active, err := c.active()
		if err != nil {
			return err
		}
		running := 0
		for _, s := range c.members {
			if s.cmd == nil {
				continue
			}
			running++
			l, err := c.ask(s, "/v1/sys/leader", nil)
			if err != nil || l["leader_address"] != active.api {
				return fmt.Errorf("%s: expected %s as the leader, found %v (%v)", s.name, active.api, l, err)
			}
		}
		state, err := c.ask(active, "/v1/sys/storage/raft/autopilot/state", nil)
		if err != nil {
			return err
		}
		healthy := 0
		for _, x := range state["data"].(map[string]any)["servers"].(map[string]any) {
			if x.(map[string]any)["healthy"] == true {
				healthy++
			}
		}
		if healthy < running {
			return fmt.Errorf("expected %d healthy members, found %d", running, healthy)
		}
		return nil
	})
}

// active is the one member that says so of itself.
func (c *cluster) active() (*server, error) {
	var found []*server
	for _, s := range c.members {
		if l, err := c.ask(s, "/v1/sys/leader", nil); err == nil && l["is_self"] == true {
			found = append(found, s)
		}
	}
	if len(found) != 1 {
		return nil, fmt.Errorf("expected one active member, found %d", len(found))
	}
	return found[0], nil
}

// standbys are the members that are not active, in their order.
func (c *cluster) standbys() []*server {
	c.Helper()
	active, err := c.active()
	require.NoError(c, err)
	var rest []*server
	for _, s := range c.members {
		if s != active {
			rest = append(rest, s)
		}
	}
	return rest
}

type reply struct {
	code   int
	header http.Header
	body   []byte
	coding []string
}

// direct follows no redirect, as a client that wants to know who answers.
var direct = &http.Client{
	Timeout:       10 * time.Second,
	Transport:     &http.Transport{DisableKeepAlives: true, DisableCompression: true},
	CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
}

func (c *cluster) try(s *server, method, path, token string, header map[string]string, body any) (reply, error) {
	var r io.Reader
	if body != nil {
		data, err := json.Marshal(body)
		if err != nil {
			return reply{}, err
		}
		r = bytes.NewReader(data)
	}
	request, err := http.NewRequest(method, s.api+path, r)
	if err != nil {
		return reply{}, err
	}
	if token != "" {
		request.Header.Set("X-Vault-Token", token)
	}
	for name, value := range header {
		request.Header.Set(name, value)
	}
	response, err := direct.Do(request)
	if err != nil {
		return reply{}, err
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	return reply{response.StatusCode, response.Header, text, response.TransferEncoding}, err
}

func (c *cluster) send(s *server, method, path string, body any) reply {
	c.Helper()
	r, err := c.try(s, method, path, c.token, nil, body)
	require.NoError(c, err)
	return r
}

// ask reads an answer of any code; without a body it is an error.
func (c *cluster) ask(s *server, path string, header map[string]string) (map[string]any, error) {
	r, err := c.try(s, http.MethodGet, path, c.token, header, nil)
	if err != nil {
		return nil, err
	}
	var fields map[string]any
	err = json.Unmarshal(r.body, &fields)
	return fields, err
}

func (c *cluster) eventually(what string, check func() error) {
	c.Helper()
	deadline := time.After(limit)
	every := time.NewTicker(look)
	defer every.Stop()
	for {
		err := check()
		if err == nil {
			return
		}
		select {
		case <-deadline:
			c.logs()
			require.NoError(c, err, what)
		case <-every.C:
		}
	}
}

func (c *cluster) logs() {
	for _, s := range c.members {
		if text, err := os.ReadFile(s.config + ".log"); err == nil {
			c.Logf("%s:\n%s", s.name, text[max(0, len(text)-4000):])
		}
	}
}
