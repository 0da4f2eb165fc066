package kube_test

import (
	"context"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/httpstream"
	"k8s.io/apimachinery/pkg/util/httpstream/spdy"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/portforward"

	"github.com/refit-run/refit/activities/kube"
)

// kubelet speaks the server's side of port-forward, as a real one does behind
// an API server: it connects each data stream to a local port, and complains on
// the error stream when that is refused. It tunnels to db-0 alone; the pods are
// those that the API server lists.
func kubelet(t *testing.T, pods ...corev1.Pod) *kube.Client {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if name, ok := strings.CutPrefix(r.URL.Query().Get("fieldSelector"), "metadata.name="); ok && r.URL.Path == "/api/v1/namespaces/ns/pods" {
			w.Header().Set("Content-Type", "application/json")
			_ = json.NewEncoder(w).Encode(corev1.PodList{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "PodList"},
				Items: slices.DeleteFunc(slices.Clone(pods), func(p corev1.Pod) bool { return p.Name != name })})
			return
		}
		if r.URL.Path != "/api/v1/namespaces/ns/pods/db-0/portforward" {
			http.NotFound(w, r)
			return
		}
		if _, err := httpstream.Handshake(r, w, []string{portforward.PortForwardProtocolV1Name}); err != nil {
			return
		}
		streams := make(chan httpstream.Stream, 8)
		conn := spdy.NewResponseUpgrader().UpgradeResponse(w, r, func(s httpstream.Stream, _ <-chan struct{}) error { streams <- s; return nil })
		if conn == nil {
			return
		}
		defer conn.Close()
		var complaints httpstream.Stream
		for {
			select {
			case <-conn.CloseChan():
				return
			case s := <-streams:
				if s.Headers().Get(corev1.StreamType) == corev1.StreamTypeError {
					complaints = s
					continue
				}
				go join(s, complaints)
			}
		}
	}))
	t.Cleanup(server.Close)
	c, err := kube.NewClient(&rest.Config{Host: server.URL})
	require.NoError(t, err)
	return c
}

func join(data, complaints httpstream.Stream) {
	defer complaints.Close()
	defer data.Close()
	remote, err := net.Dial("tcp", "127.0.0.1:"+data.Headers().Get(corev1.PortHeader))
	if err != nil {
		_, _ = io.WriteString(complaints, "forwarding: "+err.Error())
		return
	}
	defer remote.Close()
	var both sync.WaitGroup
	both.Go(func() { _, _ = io.Copy(remote, data); _ = remote.(*net.TCPConn).CloseWrite() })
	both.Go(func() { _, _ = io.Copy(data, remote); data.Close() })
	both.Wait()
}

// echo answers every connection with what it gets, in upper case, and closes
// after a line "bye".
func echo(t *testing.T) int {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer conn.Close()
				buffer := make([]byte, 64<<10)
				for {
					n, err := conn.Read(buffer)
					text := strings.ToUpper(string(buffer[:n]))
					if _, werr := io.WriteString(conn, text); err != nil || werr != nil || strings.HasSuffix(text, "BYE\n") {
						return
					}
				}
			}()
		}
	}()
	return l.Addr().(*net.TCPAddr).Port
}

func TestDialPodIsAConnection(t *testing.T) {
	c, port := kubelet(t), echo(t)
	var all sync.WaitGroup
	for range 8 {
		all.Go(func() {
			conn, err := c.DialPod(t.Context(), "ns", "db-0", port)
			if !assertNoError(t, err) {
				return
			}
			defer conn.Close()
			body := strings.Repeat("x", 200<<10) + "bye\n"
			go func() { _, _ = io.WriteString(conn, body) }()
			got := make([]byte, len(body))
			_, err = io.ReadFull(conn, got)
			if assertNoError(t, err) && string(got) != strings.ToUpper(body) {
				t.Error("another text came back")
			}
			// The pod closes: that is the end, and no error.
			n, err := conn.Read(got)
			if n != 0 || err != io.EOF {
				t.Errorf("expected EOF, found %d bytes and %v", n, err)
			}
		})
	}
	all.Wait()
}

// Clients take the port from the address: gocql panics where it is no TCP one.
func TestDialPodHasATCPAddress(t *testing.T) {
	c, port := kubelet(t), echo(t)
	conn, err := c.DialPod(t.Context(), "ns", "db-0", port)
	require.NoError(t, err)
	defer conn.Close()
	address, ok := conn.RemoteAddr().(*net.TCPAddr)
	require.True(t, ok, "%T", conn.RemoteAddr())
	require.Equal(t, port, address.Port)
}

func assertNoError(t *testing.T, err error) bool {
	if err != nil {
		t.Error(err)
	}
	return err == nil
}

func TestDialPodTellsWhatTheKubeletSays(t *testing.T) {
	c := kubelet(t)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	port := l.Addr().(*net.TCPAddr).Port
	l.Close()
	conn, err := c.DialPod(t.Context(), "ns", "db-0", port)
	require.NoError(t, err)
	defer conn.Close()
	_, err = conn.Read(make([]byte, 1))
	require.ErrorContains(t, err, "connection refused")
	require.ErrorContains(t, err, "Pod/ns/db-0")

	_, err = c.DialPod(t.Context(), "ns", "absent", port)
	require.Error(t, err)
}

func TestDialPodHasDeadlinesAndObeysTheContext(t *testing.T) {
	c, port := kubelet(t), echo(t)
	conn, err := c.DialPod(t.Context(), "ns", "db-0", port)
	require.NoError(t, err)
	require.NoError(t, conn.SetReadDeadline(time.Now().Add(50*time.Millisecond)))
	_, err = conn.Read(make([]byte, 1))
	require.ErrorIs(t, err, os.ErrDeadlineExceeded)
	require.NoError(t, conn.Close())
	_, err = conn.Write([]byte("x"))
	require.Error(t, err)

	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err = c.DialPod(ctx, "ns", "db-0", port)
	require.ErrorIs(t, err, context.Canceled)
}

func TestInsideItsClusterAPodIsDialledStraightUnlessSomethingIsInTheWay(t *testing.T) {
	pod := func(name, address string, phase corev1.PodPhase) corev1.Pod {
		return corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name}, Status: corev1.PodStatus{Phase: phase, PodIP: address}}
	}
	port := echo(t) // on 127.0.0.1 alone
	pods := []corev1.Pod{pod("near-0", "127.0.0.1", corev1.PodRunning), pod("ended-0", "127.0.0.1", corev1.PodFailed), pod("db-0", "127.0.0.2", corev1.PodRunning)}
	answers := func(c *kube.Client, name string) error {
		conn, err := c.DialPod(t.Context(), "ns", name, port)
		if err != nil {
			return err
		}
		defer conn.Close()
		require.NoError(t, conn.SetDeadline(time.Now().Add(10*time.Second)))
		_, err = io.WriteString(conn, "x")
		require.NoError(t, err)
		_, err = io.ReadFull(conn, make([]byte, 1))
		return err
	}
	inside := kube.Inside(kubelet(t, pods...))
	require.NoError(t, answers(inside, "near-0"), "no tunnel leads there")
	require.NoError(t, answers(inside, "db-0"), "nobody listens at its address: the tunnel is left")
	require.Error(t, answers(inside, "ended-0"), "another pod may have its address by now")
	require.Error(t, answers(kubelet(t, pods...), "near-0"), "a worker elsewhere knows no way but the tunnel")
}
