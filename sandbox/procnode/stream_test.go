package procnode_test

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/tls"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/refit-run/refit/activities/kube"
)

// endless is an input that a client never closes.
type endless struct{ ctx context.Context }

func (e endless) Read([]byte) (int, error) {
	<-e.ctx.Done()
	return 0, io.EOF
}

func TestExecTellsTheTruth(t *testing.T) {
	s := newSpace(t)
	s.create("exec", member(image1).Spec)
	s.ready(1)
	large := make([]byte, 4<<20)
	_, err := rand.Read(large)
	require.NoError(t, err)
	for _, webSocket := range []bool{false, true} {
		t.Run(fmt.Sprintf("webSocket=%t", webSocket), func(t *testing.T) {
			run := func(in io.Reader, line ...string) (string, string, int) {
				return s.exec(webSocket, "exec", in, line...)
			}
			for _, code := range []int{0, 3, 127} {
				out, errOut, got := run(nil, "/bin/sh", "-c", fmt.Sprintf("echo out; echo err >&2; exit %d", code))
				require.Equal(t, []any{"out\n", "err\n", code}, []any{out, errOut, got})
			}
			_, errOut, code := run(nil, "no-such-command")
			require.Equal(t, 127, code)
			require.Contains(t, errOut, "no-such-command")
			_, _, code = run(nil, "sh", "-c", "kill -9 $$")
			require.Equal(t, 137, code)
			out, _, code := run(strings.NewReader("hello\nworld\n"), "sh", "-c", "wc -c; echo the end was seen")
			require.Equal(t, "12\nthe end was seen\n", out)
			require.Zero(t, code)
			ctx, cancel := context.WithCancel(t.Context())
			out, _, code = run(endless{ctx}, "sh", "-c", "echo done; exit 5")
			cancel()
			require.Equal(t, "done\n", out)
			require.Equal(t, 5, code)
			out, _, code = run(bytes.NewReader(large), "cat")
			require.True(t, out == string(large), "4 MiB came back as they went")
			require.Zero(t, code)
			var group sync.WaitGroup
			began := time.Now()
			for i := range 20 {
				group.Go(func() {
					out, _, code := run(strings.NewReader(fmt.Sprint(i)), "sh", "-c", fmt.Sprintf("cat; exit %d", i))
					if out != fmt.Sprint(i) || code != i {
						t.Errorf("exec %d: output %q, code %d", i, out, code)
					}
				})
			}
			group.Wait()
			t.Logf("20 execs side by side in %s", time.Since(began))
		})
	}
}

func TestExecNeedsARunningContainer(t *testing.T) {
	s := newSpace(t)
	spec := one(shell, "exit 0")
	spec.RestartPolicy = corev1.RestartPolicyNever
	s.create("over", spec)
	s.phase("over", corev1.PodSucceeded)
	request := s.kube.CoreV1().RESTClient().Post().Resource("pods").Namespace(s.name).Name("over").SubResource("exec")
	require.Error(t, request.Param("command", "true").Param("stdout", "true").Do(t.Context()).Error())
}

// The product's own dialer, against this node.
func TestPortForwardCarriesManyStreamsUnchanged(t *testing.T) {
	s := newSpace(t)
	s.create("echo", member(image1).Spec)
	s.ready(1)
	client, err := kube.NewClient(s.config)
	require.NoError(t, err)
	var group sync.WaitGroup
	began := time.Now()
	const streams, size = 8, 2 << 20
	for range streams {
		group.Go(func() {
			if err := there(t.Context(), client, s.name, size); err != nil {
				t.Error(err)
			}
		})
	}
	group.Wait()
	t.Logf("%d streams of %d MiB each way in %s", streams, size>>20, time.Since(began))
	conn, err := client.DialPod(t.Context(), s.name, "echo", 9999)
	if err == nil {
		_, err = conn.Read(make([]byte, 1))
		_ = conn.Close()
	}
	require.ErrorContains(t, err, "refused")
	require.NoError(t, there(t.Context(), client, s.name, 1000), "the next tunnel works")
}

// there sends random bytes to the echo and compares what comes back.
func there(ctx context.Context, client *kube.Client, namespace string, size int) error {
	data := make([]byte, size)
	if _, err := rand.Read(data); err != nil {
		return err
	}
	conn, err := client.DialPod(ctx, namespace, "echo", 9000)
	if err != nil {
		return err
	}
	defer conn.Close()
	sent := make(chan error, 1)
	go func() {
		_, err := conn.Write(data)
		sent <- err
	}()
	back := make([]byte, size)
	if _, err := io.ReadFull(conn, back); err != nil {
		return err
	}
	if !bytes.Equal(data, back) {
		return fmt.Errorf("%d bytes came back changed", size)
	}
	return <-sent
}

func TestLogsCanBeCutAndFollowed(t *testing.T) {
	s := newSpace(t)
	s.create("log", one(shell, `for i in 1 2 3 4 5; do echo line $i; done; while ! test -e "$HOME/go"; do sleep 0.02; done; echo last; exec sleep 600`))
	s.ready(1)
	s.eventually("five lines are there", func(context.Context) error {
		if out := s.logs("log", corev1.PodLogOptions{}); strings.Count(out, "\n") != 5 {
			return fmt.Errorf("found %q", out)
		}
		return nil
	})
	require.Equal(t, "line 4\nline 5\n", s.logs("log", corev1.PodLogOptions{TailLines: ptr.To[int64](2)}))
	require.Equal(t, "line 1\nline 2\nline 3\nline 4\nline 5\n", s.logs("log", corev1.PodLogOptions{TailLines: ptr.To[int64](100)}))
	require.Equal(t, "line", s.logs("log", corev1.PodLogOptions{LimitBytes: ptr.To[int64](4)}))
	require.Empty(t, s.logs("log", corev1.PodLogOptions{TailLines: ptr.To[int64](0)}))
	stream, err := s.kube.CoreV1().Pods(s.name).GetLogs("log", &corev1.PodLogOptions{Follow: true, TailLines: ptr.To[int64](1)}).Stream(t.Context())
	require.NoError(t, err)
	defer stream.Close()
	first := make([]byte, len("line 5\n"))
	_, err = io.ReadFull(stream, first)
	require.NoError(t, err)
	require.Equal(t, "line 5\n", string(first))
	s.exec(false, "log", nil, "sh", "-c", `: > "$HOME/go"`)
	rest := make([]byte, len("last\n"))
	_, err = io.ReadFull(stream, rest)
	require.NoError(t, err)
	require.Equal(t, "last\n", string(rest))
	_, err = s.kube.CoreV1().Pods(s.name).GetLogs("log", &corev1.PodLogOptions{Timestamps: true}).DoRaw(t.Context())
	require.True(t, apierrors.IsBadRequest(err), "what is not there is refused: %v", err)
}

func TestLogsCanBeReadSinceAMoment(t *testing.T) {
	s := newSpace(t)
	s.create("log", one(shell, `echo old; printf 'begun '; while ! test -e "$HOME/go"; do sleep 0.02; done; echo and ended; echo new; exec sleep 600`))
	s.ready(1)
	var moment metav1.Time
	s.eventually("the old line has its age", func(context.Context) error {
		moment = metav1.Now()
		if out := s.logs("log", corev1.PodLogOptions{SinceTime: &moment}); out != "begun " {
			return fmt.Errorf("found %q", out)
		}
		return nil
	})
	s.exec(false, "log", nil, "sh", "-c", `: > "$HOME/go"`)
	s.eventually("two lines came since", func(context.Context) error {
		if out := s.logs("log", corev1.PodLogOptions{SinceTime: &moment}); out != "begun and ended\nnew\n" {
			return fmt.Errorf("found %q", out)
		}
		return nil
	})
	require.Equal(t, "new\n", s.logs("log", corev1.PodLogOptions{SinceTime: &moment, TailLines: ptr.To[int64](1)}))
	require.Equal(t, "old\nbegun and ended\nnew\n", s.logs("log", corev1.PodLogOptions{SinceSeconds: ptr.To[int64](3600)}))
	s.eventually("a second later nothing came since", func(context.Context) error {
		if out := s.logs("log", corev1.PodLogOptions{SinceSeconds: ptr.To[int64](1)}); out != "" {
			return fmt.Errorf("found %q", out)
		}
		return nil
	})
}

// exec on this machine is for those with the API server's certificate.
func TestNodeRefusesStrangers(t *testing.T) {
	s := newSpace(t)
	stranger := http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}}}
	response, err := stranger.Get("https://" + s.address().String() + ":12250/containerLogs/a/b/c")
	if err == nil {
		_ = response.Body.Close()
	}
	require.ErrorContains(t, err, "certificate required")
}
