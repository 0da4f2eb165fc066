// Package temporaltest runs a development server of Temporal for the tests of
// the agent that need one. It must hold no double of it.
package temporaltest

import (
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.temporal.io/sdk/client"
	"go.temporal.io/sdk/log"

	"github.com/refit-run/refit/tests/freeport"
)

// Missing says how to get a binary where there is none.
const Missing = "no Temporal CLI: make it with `make build`, or name it in REFIT_TEST_TEMPORAL"

// Binary is the server's: the one named in the environment, or that of the
// repository; empty where there is none.
func Binary() string {
	for _, path := range []string{os.Getenv("REFIT_TEST_TEMPORAL"), filepath.Join(repository(), "bin", "temporal")} {
		if _, err := os.Stat(path); path != "" && err == nil {
			return path
		}
	}
	return ""
}

// repository is the folder of go.mod, above the one that go test runs in.
func repository() string {
	dir, _ := os.Getwd()
	for dir != filepath.Dir(dir) {
		if _, err := os.Stat(filepath.Join(dir, "go.mod")); err == nil {
			break
		}
		dir = filepath.Dir(dir)
	}
	return dir
}

// Start runs a server until the end of the test and returns its address and a
// client.
func Start(t testing.TB, binary string) (address string, c client.Client) {
	t.Helper()
	ports, err := freeport.Get(2)
	require.NoError(t, err)
	port, ui := strconv.Itoa(ports[0]), strconv.Itoa(ports[1])
	server := exec.Command(binary, "server", "start-dev", "--headless", "--ip", "127.0.0.1", "--port", port, "--http-port", ui, "--log-level", "never")
	require.NoError(t, server.Start())
	t.Cleanup(func() {
		_ = server.Process.Kill()
		_ = server.Wait()
	})
	address = "127.0.0.1:" + port
	require.Eventually(t, func() bool {
		c, err = client.Dial(client.Options{HostPort: address, Logger: log.NewStructuredLogger(slog.New(slog.DiscardHandler))})
		return err == nil
	}, time.Minute, 50*time.Millisecond)
	t.Cleanup(c.Close)
	return address, c
}
