package openbao

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// node is one member's process, and where it is reached.
type node struct {
	name, ip, dir, config string
	port                  int
	process               *exec.Cmd
	ended                 chan struct{}
}

// programs are the servers that stand behind the images: real ones where they
// are named, else the double in versions of two lines.
func programs(t *testing.T) map[string][]string {
	t.Helper()
	if now := os.Getenv(realBao); now != "" {
		old := now
		if other := os.Getenv(realBaoOld); other != "" {
			old = other
		}
		return map[string][]string{oldImage: {old}, newImage: {now}}
	}
	folder := os.Getenv("REFIT_BIN")
	for at, err := os.Getwd(); folder == "" && err == nil && at != filepath.Dir(at); at = filepath.Dir(at) {
		if _, none := os.Stat(filepath.Join(at, "bin", "refit-sandbox")); none == nil {
			folder = filepath.Join(at, "bin")
		}
	}
	if folder == "" {
		t.Skipf("skipped: no OpenBao server; build bin/refit-sandbox or set REFIT_BIN or %s", realBao)
	}
	double := filepath.Join(folder, "refit-sandbox")
	return map[string][]string{oldImage: {double, "bao", "--as=2.5.5"}, newImage: {double, "bao", "--as=2.6.3"}}
}

// run starts a member and returns when it answers.
func (c *cluster) run(n *node, image string) error {
	program := append(append([]string{}, c.programs[image]...), "server", "-config="+n.config)
	cmd := exec.Command(program[0], program[1:]...)
	log, err := os.OpenFile(n.config+".log", os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer log.Close()
	cmd.Stdout, cmd.Stderr = log, log
	if err := cmd.Start(); err != nil {
		return err
	}
	ended := make(chan struct{})
	c.mu.Lock()
	n.process, n.ended = cmd, ended
	c.mu.Unlock()
	go func() {
		_ = cmd.Wait()
		close(ended)
	}()
	return c.eventually(n.name+" answers", func() error {
		_, err := c.ask(n, http.MethodGet, "sys/seal-status", nil)
		return err
	})
}

func (c *cluster) end(n *node, signal syscall.Signal) {
	c.mu.Lock()
	cmd, ended := n.process, n.ended
	n.process = nil
	c.mu.Unlock()
	if cmd != nil {
		_ = cmd.Process.Signal(signal)
		<-ended
	}
}

func (c *cluster) eventually(what string, f func() error) error {
	over := time.NewTimer(patience)
	defer over.Stop()
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for {
		err := f()
		if err == nil {
			return nil
		}
		select {
		case <-over.C:
			return fmt.Errorf("%s: %w", what, err)
		case <-tick.C:
		}
	}
}

func (c *cluster) ask(n *node, method, path string, body any) (map[string]any, error) {
	text, err := json.Marshal(body)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	r, err := http.NewRequestWithContext(ctx, method, fmt.Sprintf("http://%s:%d/v1/%s", n.ip, n.port, path), bytes.NewReader(text))
	if err != nil {
		return nil, err
	}
	reply, err := http.DefaultClient.Do(r)
	if err != nil {
		return nil, err
	}
	defer reply.Body.Close()
	var out map[string]any
	if err := json.NewDecoder(reply.Body).Decode(&out); err != nil {
		return nil, err
	}
	if reply.StatusCode != http.StatusOK {
		return out, fmt.Errorf("%s answers %d: %v", path, reply.StatusCode, out)
	}
	return out, nil
}

// initialise makes the cluster and its two Secrets.
func (c *cluster) initialise() {
	made, err := c.ask(c.nodes[0], http.MethodPut, "sys/init", map[string]int{"secret_shares": 1, "secret_threshold": 1})
	require.NoError(c.t, err)
	c.key = made["keys"].([]any)[0].(string)
	for name, data := range map[string]map[string]string{
		"openbao-server-unseal": {"unseal_key": c.key}, "openbao-server-root-token": {"root_token": made["root_token"].(string) + "\n"},
	} {
		_, err := c.client.Typed.CoreV1().Secrets(c.place.Namespace).Create(c.t.Context(),
			&corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: name}, StringData: data}, metav1.CreateOptions{})
		require.NoError(c.t, err)
	}
}

// unseal tries again until a joining member has found the cluster.
func (c *cluster) unseal(n *node) error {
	return c.eventually(n.name+" is unsealed", func() error {
		status, err := c.ask(n, http.MethodPut, "sys/unseal", map[string]string{"key": c.key})
		if err == nil {
			status, err = c.ask(n, http.MethodGet, "sys/seal-status", nil)
		}
		if err == nil && status["sealed"] != false {
			err = errors.New("sealed")
		}
		return err
	})
}

func (c *cluster) version(image string) string {
	c.t.Helper()
	program := append(append([]string{}, c.programs[image]...), "version")
	said, err := exec.Command(program[0], program[1:]...).Output()
	require.NoError(c.t, err)
	return strings.TrimPrefix(strings.Fields(string(said))[1], "v") // OpenBao v2.6.3 ...
}
