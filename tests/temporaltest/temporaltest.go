// Package temporaltest runs a development server of Temporal for the tests that
// need one. It must hold no double of it.
package temporaltest

import (
	"errors"
	"fmt"
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
		if path == "" {
			continue
		}
		if path, err := filepath.Abs(path); err == nil {
			if _, err := os.Stat(path); err == nil {
				return path
			}
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

// Server is one that runs, with a client.
type Server struct {
	Address string
	Client  client.Client

	process *exec.Cmd
	exited  chan struct{}
}

const (
	startLimit = time.Minute
	startLook  = 50 * time.Millisecond
)

// Serve runs a server until Stop: for a TestMain, whose tests share it.
func Serve(binary string) (*Server, error) {
	ports, err := freeport.Get(2)
	if err != nil {
		return nil, err
	}
	port, ui := strconv.Itoa(ports[0]), strconv.Itoa(ports[1])
	s := &Server{Address: "127.0.0.1:" + port, exited: make(chan struct{}),
		process: exec.Command(binary, "server", "start-dev", "--headless", "--ip", "127.0.0.1", "--port", port, "--http-port", ui, "--log-level", "never")}
	s.process.Stderr = os.Stderr
	if err := s.process.Start(); err != nil {
		return nil, err
	}
	go func() {
		_ = s.process.Wait()
		close(s.exited)
	}()
	late, look := time.After(startLimit), time.NewTicker(startLook)
	defer look.Stop()
	for {
		s.Client, err = client.Dial(client.Options{HostPort: s.Address, Logger: log.NewStructuredLogger(slog.New(slog.DiscardHandler))})
		if err == nil {
			return s, nil
		}
		select {
		case <-s.exited:
			return nil, fmt.Errorf("dev server at %s: ended at once: %s", s.Address, s.process.ProcessState)
		case <-late:
			s.kill()
			return nil, errors.Join(fmt.Errorf("dev server at %s: expected an answer within %s", s.Address, startLimit), err)
		case <-look.C:
		}
	}
}

func (s *Server) kill() {
	_ = s.process.Process.Kill()
	<-s.exited
}

// Stop ends the server. Nothing of it is kept, so it is not asked politely.
func (s *Server) Stop() {
	s.Client.Close()
	s.kill()
}

// Start runs a server until the end of the test and returns its address and a
// client.
func Start(t testing.TB, binary string) (address string, c client.Client) {
	t.Helper()
	s, err := Serve(binary)
	require.NoError(t, err)
	t.Cleanup(s.Stop)
	return s.Address, s.Client
}
