package kube_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/httpstream"
	"k8s.io/apimachinery/pkg/util/httpstream/spdy"
	"k8s.io/apimachinery/pkg/util/remotecommand"

	"github.com/refit-run/refit/activities/finding"
	"github.com/refit-run/refit/activities/internal/apiservertest"
	"github.com/refit-run/refit/activities/kube"
)

// execution is the server's side of one exec, as a kubelet speaks it: a stream
// per channel, and a Status on the error stream at the end.
func execution(w http.ResponseWriter, r *http.Request) {
	if _, err := httpstream.Handshake(r, w, []string{remotecommand.StreamProtocolV4Name}); err != nil {
		return
	}
	query := r.URL.Query()
	streams := make(chan httpstream.Stream, 4)
	conn := spdy.NewResponseUpgrader().UpgradeResponse(w, r, func(s httpstream.Stream, _ <-chan struct{}) error { streams <- s; return nil })
	if conn == nil {
		return
	}
	defer conn.Close()
	byType := map[string]httpstream.Stream{}
	for want := 1 + len(query["input"]) + len(query["output"]) + len(query["error"]); len(byType) < want; {
		select {
		case s := <-streams:
			byType[s.Headers().Get(corev1.StreamType)] = s
		case <-conn.CloseChan():
			return
		}
	}
	status := run(r.Context(), query, byType)
	if status.Status == "" {
		return
	}
	_ = json.NewEncoder(byType[corev1.StreamTypeError]).Encode(status)
	for _, s := range byType {
		s.Close()
	}
	<-conn.CloseChan()
}

// run runs the command on this machine, in place of a container. A command that
// a signal ends takes the kubelet's connection with it: there is no status.
func run(ctx context.Context, query url.Values, byType map[string]httpstream.Stream) metav1.Status {
	argv := query["command"]
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	cmd.Stdout, cmd.Stderr = byType[corev1.StreamTypeStdout], byType[corev1.StreamTypeStderr]
	if in := byType[corev1.StreamTypeStdin]; in != nil {
		all, _ := io.ReadAll(in)
		cmd.Stdin = bytes.NewReader(all)
	}
	err := cmd.Run()
	var failed *exec.ExitError
	switch {
	case err == nil:
		return metav1.Status{Status: metav1.StatusSuccess}
	case errors.As(err, &failed) && failed.ExitCode() < 0:
		return metav1.Status{}
	case errors.As(err, &failed):
		return metav1.Status{Status: metav1.StatusFailure, Reason: remotecommand.NonZeroExitCodeReason, Message: err.Error(),
			Details: &metav1.StatusDetails{Causes: []metav1.StatusCause{{Type: remotecommand.ExitCodeCauseType, Message: strconv.Itoa(failed.ExitCode())}}}}
	}
	return metav1.Status{Status: metav1.StatusFailure, Reason: metav1.StatusReasonInternalError, Message: err.Error()}
}

// podBehindKubelet is a pod on a node whose kubelet is the double, reached
// through a real API server, which proxies and translates between protocols.
func podBehindKubelet(t *testing.T) (*kube.Client, string) {
	server := apiservertest.Shared(t)
	c, ns := server.Client(t), server.Namespace(t)
	kubelet := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/exec/"+ns+"/db-0/db" {
			http.NotFound(w, r)
			return
		}
		execution(w, r)
	}))
	t.Cleanup(kubelet.Close)
	address, err := url.Parse(kubelet.URL)
	require.NoError(t, err)
	port, err := strconv.Atoi(address.Port())
	require.NoError(t, err)
	node := "node-" + ns
	nodes := c.Typed.CoreV1().Nodes()
	_, err = nodes.Create(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: node}}, metav1.CreateOptions{})
	require.NoError(t, err)
	_, err = nodes.UpdateStatus(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: node}, Status: corev1.NodeStatus{
		Addresses:       []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: "127.0.0.1"}},
		DaemonEndpoints: corev1.NodeDaemonEndpoints{KubeletEndpoint: corev1.DaemonEndpoint{Port: int32(port)}},
	}}, metav1.UpdateOptions{})
	require.NoError(t, err)
	pods := c.Typed.CoreV1().Pods(ns)
	_, err = pods.Create(t.Context(), &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "db-0"}, Spec: corev1.PodSpec{
		NodeName: node, Containers: []corev1.Container{{Name: "db", Image: "db"}},
	}}, metav1.CreateOptions{})
	require.NoError(t, err)
	return c, ns
}

func TestExecTellsExitCodesAndBothStreams(t *testing.T) {
	c, ns := podBehindKubelet(t)
	sh := func(script string) kube.Command {
		return kube.Command{Namespace: ns, Pod: "db-0", Container: "db", Argv: []string{"sh", "-c", script}, Limit: 30 * time.Second}
	}
	exit, err := c.Exec(t.Context(), sh("echo out; echo err >&2"))
	require.NoError(t, err)
	require.Equal(t, kube.Exit{Stdout: "out\n", Stderr: "err\n"}, exit)

	exit, err = c.Exec(t.Context(), sh("echo half; exit 3"))
	require.NoError(t, err, "a command that ran and failed is the caller's to judge")
	require.Equal(t, kube.Exit{Code: 3, Stdout: "half\n"}, exit)

	withInput := sh("cat; echo end")
	withInput.Stdin = strings.NewReader("fake-password\n")
	exit, err = c.Exec(t.Context(), withInput)
	require.NoError(t, err)
	require.Equal(t, "fake-password\nend\n", exit.Stdout, "stdin is sent and closed")

	var all sync.WaitGroup
	for code := range 4 {
		all.Go(func() {
			exit, err := c.Exec(t.Context(), sh("exit "+strconv.Itoa(code)))
			if assertNoError(t, err) && exit.Code != code {
				t.Errorf("exit code %d came back as %d", code, exit.Code)
			}
		})
	}
	all.Wait()
}

func TestExecCutsOutputAndKeepsReading(t *testing.T) {
	c, ns := podBehindKubelet(t)
	exit, err := c.Exec(t.Context(), kube.Command{Namespace: ns, Pod: "db-0", Container: "db", Limit: 30 * time.Second, Output: 10,
		Argv: []string{"sh", "-c", "head -c 3000000 /dev/zero | tr '\\0' x; echo done >&2; exit 4"}})
	require.NoError(t, err)
	require.Equal(t, kube.Exit{Code: 4, Stdout: strings.Repeat("x", 10), Stderr: "done\n", Cut: true}, exit)
}

func TestExecHasADeadlineAndSaysThatTheCommandMayStillRun(t *testing.T) {
	c, ns := podBehindKubelet(t)
	_, err := c.Exec(t.Context(), kube.Command{Namespace: ns, Pod: "db-0", Container: "db", Limit: time.Second,
		Argv: []string{"sh", "-c", "echo repairing; read never"}, Stdin: neverEnding(t)})
	f, class, ok := finding.Of(err)
	require.True(t, ok, err)
	require.Equal(t, finding.Retry, class)
	require.Contains(t, f.Why, "may still run")
	require.Contains(t, f.Expected, "1s")

	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err = c.Exec(ctx, kube.Command{Namespace: ns, Pod: "db-0", Container: "db", Argv: []string{"true"}})
	require.ErrorIs(t, err, context.Canceled)
}

func TestAConnectionThatIsLostBehindTheAPIServerLooksLikeExitCodeZero(t *testing.T) {
	c, ns := podBehindKubelet(t)
	exit, err := c.Exec(t.Context(), kube.Command{Namespace: ns, Pod: "db-0", Container: "db", Argv: []string{"sh", "-c", "echo repairing; kill -9 $$"}, Limit: 30 * time.Second})
	require.NoError(t, err, "this is why a repair is believed by its last words only")
	require.Equal(t, kube.Exit{Stdout: "repairing\n"}, exit)
}

// neverEnding is a stdin that stays open until the test ends.
func neverEnding(t *testing.T) io.Reader {
	r, w := io.Pipe()
	t.Cleanup(func() { w.Close() })
	return r
}

func TestExecThatCannotStartIsAnError(t *testing.T) {
	c, ns := podBehindKubelet(t)
	_, err := c.Exec(t.Context(), kube.Command{Namespace: ns, Pod: "db-0", Container: "db", Argv: []string{"no-such-tool"}, Limit: 30 * time.Second})
	require.ErrorContains(t, err, "no-such-tool")
	_, err = c.Exec(t.Context(), kube.Command{Namespace: ns, Pod: "absent", Container: "db", Argv: []string{"true"}, Limit: 30 * time.Second})
	require.ErrorContains(t, err, `pods "absent" not found`)
}
