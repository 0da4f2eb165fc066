package kube

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/tools/remotecommand"
	"k8s.io/client-go/util/exec"
	streaming "k8s.io/streaming/pkg/httpstream"

	"github.com/refit-run/refit/activities/finding"
)

// execOutput is how much of each output stream Exec keeps by default.
const execOutput = 1 << 20

// Command is what Exec runs in a pod. It is never given to a shell.
type Command struct {
	Namespace, Pod, Container string
	Argv                      []string
	// Stdin is sent and then closed; nil sends none. What is secret goes here,
	// never into Argv, which every process on the node can read.
	Stdin io.Reader
	// Limit is the deadline; 0 leaves it to the context.
	Limit time.Duration
	// Output is how many bytes of each output stream are kept (default 1 MiB).
	// The rest is read and dropped, so that the command never blocks on it.
	Output int
}

func (c Command) String() string {
	return fmt.Sprintf("%q in Pod/%s/%s container %q", strings.Join(c.Argv, " "), c.Namespace, c.Pod, c.Container)
}

// Exit is how a command ended.
type Exit struct {
	Code           int
	Stdout, Stderr string
	// Cut says that one of the streams was longer than Output.
	Cut bool
}

// Exec runs a command in a container and waits for its end. A command that
// ran and failed is no error: its caller reads Exit.Code. An error means that
// it was not started, or that nobody knows how it ended. After the limit, and
// after a lost connection, the command may still run, because the kubelet does
// not kill it. A connection that breaks between the API server and the node comes
// through as code 0: who relies on that code looks for the command's last words.
func (c *Client) Exec(ctx context.Context, cmd Command) (Exit, error) {
	what := cmd.String()
	if cmd.Output <= 0 {
		cmd.Output = execOutput
	}
	if cmd.Limit > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, cmd.Limit)
		defer cancel()
	}
	executor, err := c.executor(cmd)
	if err != nil {
		return Exit{}, Wrap(err, what)
	}
	stdout, stderr := &bounded{room: cmd.Output}, &bounded{room: cmd.Output}
	err = executor.StreamWithContext(ctx, remotecommand.StreamOptions{Stdin: cmd.Stdin, Stdout: stdout, Stderr: stderr})
	out, outCut := stdout.text()
	complaints, complaintsCut := stderr.text()
	exit := Exit{Stdout: out, Stderr: complaints, Cut: outCut || complaintsCut}
	var failed exec.CodeExitError
	switch {
	case err == nil:
		return exit, nil
	case errors.As(err, &failed):
		exit.Code = failed.Code
		return exit, nil
	case errors.Is(ctx.Err(), context.DeadlineExceeded):
		within := "its caller's deadline"
		if cmd.Limit > 0 {
			within = cmd.Limit.String()
		}
		return exit, finding.Finding{
			Object: what, Expected: "an end within " + within, Found: "none; the last it said: " + lastLine(exit),
			Why: "it may still run in the container", Next: "observe what it has done before it is run again",
		}.Error(finding.Retry)
	case ctx.Err() != nil:
		return exit, context.Cause(ctx)
	}
	return exit, Wrap(err, what)
}

// executor prefers a WebSocket, which proxies let through, and falls back to
// SPDY for API servers that do not know it, like tunnel.
func (c *Client) executor(cmd Command) (remotecommand.Executor, error) {
	url := c.Typed.CoreV1().RESTClient().Post().Resource("pods").Namespace(cmd.Namespace).Name(cmd.Pod).SubResource("exec").
		VersionedParams(&corev1.PodExecOptions{
			Container: cmd.Container, Command: cmd.Argv, Stdin: cmd.Stdin != nil, Stdout: true, Stderr: true,
		}, scheme.ParameterCodec).URL()
	webSocket, err := remotecommand.NewWebSocketExecutor(c.Config, "GET", url.String())
	if err != nil {
		return nil, err
	}
	plain, err := remotecommand.NewSPDYExecutor(c.Config, "POST", url)
	if err != nil {
		return nil, err
	}
	return remotecommand.NewFallbackExecutor(webSocket, plain, func(err error) bool {
		return streaming.IsUpgradeFailure(err) || streaming.IsHTTPSProxyError(err)
	})
}

// bounded keeps the beginning of a stream and takes the rest without a word.
// After a deadline the stream may still be written to while it is read.
type bounded struct {
	mu     sync.Mutex
	buffer bytes.Buffer
	room   int
	cut    bool
}

func (b *bounded) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	keep := min(len(p), b.room-b.buffer.Len())
	b.buffer.Write(p[:keep])
	b.cut = b.cut || keep < len(p)
	return len(p), nil
}

func (b *bounded) text() (text string, cut bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buffer.String(), b.cut
}

func lastLine(e Exit) string {
	for _, text := range []string{e.Stderr, e.Stdout} {
		if lines := strings.Split(strings.TrimSpace(text), "\n"); lines[len(lines)-1] != "" {
			return lines[len(lines)-1]
		}
	}
	return "nothing"
}
