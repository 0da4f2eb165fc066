package openbao_test

import (
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// command runs bao as a container would.
func (c *cluster) command(s *server, args ...string) (string, int) {
	c.Helper()
	cmd := exec.Command(os.Args[0], args...)
	cmd.Env = append(os.Environ(), role+"="+c.versions[newer], "BAO_ADDR="+s.api, "BAO_TOKEN="+c.token)
	out, err := cmd.Output()
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		return string(out), exit.ExitCode()
	}
	require.NoError(c, err)
	return string(out), 0
}

// What the chart's containers and the guide's commands ask of bao, with its
// exit codes.
func TestCommandsOfTheChart(t *testing.T) {
	t.Parallel()
	if newer.real() != "" {
		t.Skip("the commands of a real binary are its own")
	}
	c := newCluster(t, one, false)
	s := c.members[0]
	c.run(s, newer)
	out, code := c.command(s, "status")
	require.Equal(t, 2, code, "sealed")
	require.Regexp(t, `(?m)^Initialized +false$`, out)
	out, code = c.command(s, "operator", "init", "-key-shares=1", "-key-threshold=1", "-format=json")
	require.Zero(t, code)
	var made struct {
		Keys  []string `json:"unseal_keys_b64"`
		Token string   `json:"root_token"`
	}
	require.NoError(t, json.Unmarshal([]byte(out), &made))
	require.Len(t, made.Keys, 1)
	c.token = made.Token
	_, code = c.command(s, "operator", "unseal", "AAAA")
	require.Equal(t, 1, code, "a wrong key")
	_, code = c.command(s, "operator", "unseal", made.Keys[0])
	require.Zero(t, code)
	out, code = c.command(s, "status", "-format=json")
	require.Zero(t, code, "unsealed")
	require.Contains(t, out, `"sealed":false`)
	c.eventually("it is active", func() error { _, err := c.active(); return err })
	file := filepath.Join(t.TempDir(), "bao.snap")
	_, code = c.command(s, "operator", "raft", "snapshot", "save", file)
	require.Zero(t, code)
	data, err := os.ReadFile(file)
	require.NoError(t, err)
	require.Len(t, c.archive(data), 4)
	_, code = c.command(s, "operator", "step-down")
	require.Zero(t, code)
	_, code = c.command(s, "secrets", "list")
	require.Equal(t, 1, code, "no command of the double")
}
