package kube

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/util/httpstream"
	"k8s.io/client-go/tools/portforward"
	"k8s.io/client-go/transport/spdy"
	streaming "k8s.io/streaming/pkg/httpstream"
)

// complaintGrace is how long the end of a data stream waits for the reason on
// the error stream.
const complaintGrace = 200 * time.Millisecond

// Dial opens a connection to a pod's port. The zero value is Client.DialPod; a
// test replaces it where pods have no kubelet.
type Dial func(ctx context.Context, c *Client, namespace, pod string, port int) (net.Conn, error)

// Pod opens the connection.
func (d Dial) Pod(ctx context.Context, c *Client, namespace, pod string, port int) (net.Conn, error) {
	if d == nil {
		return c.DialPod(ctx, namespace, pod, port)
	}
	return d(ctx, c, namespace, pod, port)
}

// straightLimit is for a pod of the worker's own cluster to answer: within one
// network that takes milliseconds, and a policy that forbids it says nothing.
const straightLimit = time.Second

// DialPod opens a TCP connection to a pod's port: through the API server, so
// that nothing but the Kubernetes API need be reachable, or straight to the pod
// where the worker runs in the same cluster and nothing is in the way.
func (c *Client) DialPod(ctx context.Context, namespace, pod string, port int) (net.Conn, error) {
	if c.inside {
		if conn, err := c.dialStraight(ctx, namespace, pod, port); err == nil {
			return conn, nil
		}
	}
	return c.dialTunnel(ctx, namespace, pod, port)
}

// dialStraight connects to the address of a pod that runs: one that has ended
// keeps the address that another may have by now.
func (c *Client) dialStraight(ctx context.Context, namespace, pod string, port int) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, straightLimit)
	defer cancel()
	found, err := c.Typed.CoreV1().Pods(namespace).List(ctx, metav1.ListOptions{FieldSelector: fields.OneTermEqualSelector(metav1.ObjectNameField, pod).String()})
	if err != nil {
		return nil, err
	}
	for _, p := range found.Items {
		if p.Status.Phase == corev1.PodRunning && p.Status.PodIP != "" {
			return new(net.Dialer).DialContext(ctx, "tcp", net.JoinHostPort(p.Status.PodIP, strconv.Itoa(port)))
		}
	}
	return nil, fmt.Errorf("Pod/%s/%s does not run", namespace, pod)
}

// dialTunnel gives each connection its own tunnel: a refused port ends the
// whole tunnel it happens on.
func (c *Client) dialTunnel(ctx context.Context, namespace, pod string, port int) (net.Conn, error) {
	what := fmt.Sprintf("port-forward to Pod/%s/%s port %d", namespace, pod, port)
	dialer, err := c.tunnel(namespace, pod)
	if err != nil {
		return nil, Wrap(err, what)
	}
	type dialed struct {
		conn net.Conn
		err  error
	}
	// The dialer knows no context; a dial that outlives it closes what it got.
	result := make(chan dialed, 1)
	go func() {
		conn, err := dialStream(dialer, what, port)
		result <- dialed{conn, err}
	}()
	select {
	case d := <-result:
		if d.err != nil {
			return nil, Wrap(d.err, what)
		}
		return d.conn, nil
	case <-ctx.Done():
		go func() {
			if d := <-result; d.conn != nil {
				d.conn.Close()
			}
		}()
		return nil, fmt.Errorf("%s: %w", what, ctx.Err())
	}
}

// tunnel prefers SPDY inside a WebSocket, which proxies let through, and falls
// back to plain SPDY for API servers that do not know it.
func (c *Client) tunnel(namespace, pod string) (httpstream.Dialer, error) {
	url := c.Typed.CoreV1().RESTClient().Post().Resource("pods").Namespace(namespace).Name(pod).SubResource("portforward").URL()
	transport, upgrader, err := spdy.RoundTripperFor(c.Config)
	if err != nil {
		return nil, err
	}
	plain := spdy.NewDialer(upgrader, &http.Client{Transport: transport}, http.MethodPost, url)
	webSocket, err := portforward.NewSPDYOverWebsocketDialer(url, c.Config)
	if err != nil {
		return nil, err
	}
	return portforward.NewFallbackDialer(webSocket, plain, func(err error) bool {
		// The dialers speak apimachinery's httpstream, but fail with errors of
		// the module it moved to; only that one's predicate knows them.
		return streaming.IsUpgradeFailure(err) || streaming.IsHTTPSProxyError(err)
	}), nil
}

func dialStream(dialer httpstream.Dialer, what string, port int) (net.Conn, error) {
	tunnel, protocol, err := dialer.Dial(portforward.PortForwardProtocolV1Name)
	if err != nil {
		return nil, err
	}
	if protocol != portforward.PortForwardProtocolV1Name {
		tunnel.Close()
		return nil, fmt.Errorf("the server speaks %q, expected %q", protocol, portforward.PortForwardProtocolV1Name)
	}
	headers := http.Header{}
	headers.Set(corev1.PortHeader, strconv.Itoa(port))
	headers.Set(corev1.PortForwardRequestIDHeader, "0")
	headers.Set(corev1.StreamType, corev1.StreamTypeError)
	complaints, err := tunnel.CreateStream(headers)
	if err != nil {
		tunnel.Close()
		return nil, err
	}
	// We never write to the error stream; closing our half says so.
	complaints.Close()
	headers.Set(corev1.StreamType, corev1.StreamTypeData)
	data, err := tunnel.CreateStream(headers)
	if err != nil {
		tunnel.Close()
		return nil, err
	}
	return newPodConn(tunnel, data, complaints, what, port), nil
}

// podConn gives a data stream deadlines (by an in-memory pipe) and turns what
// the kubelet says on the error stream into the error of Read.
type podConn struct {
	net.Conn
	far    net.Conn
	tunnel httpstream.Connection
	what   string
	port   int
	once   sync.Once
	mu     sync.Mutex
	broken error
}

func newPodConn(tunnel httpstream.Connection, data, complaints httpstream.Stream, what string, port int) *podConn {
	near, far := net.Pipe()
	c := &podConn{Conn: near, far: far, tunnel: tunnel, what: what, port: port}
	complained := make(chan struct{})
	go func() {
		defer close(complained)
		if message, _ := io.ReadAll(complaints); len(message) > 0 {
			c.mu.Lock()
			c.broken = errors.New(strings.TrimSpace(string(message)))
			c.mu.Unlock()
			c.shut()
		}
	}()
	go func() {
		io.Copy(far, data)
		// The pod closed its side. A complaint was sent before that, but is
		// read by another goroutine; without one the error stream stays open.
		patience := time.NewTimer(complaintGrace)
		defer patience.Stop()
		select {
		case <-complained:
		case <-tunnel.CloseChan():
		case <-patience.C:
		}
		far.Close()
	}()
	go func() {
		io.Copy(data, far)
		data.Close()
	}()
	return c
}

func (c *podConn) shut() {
	c.once.Do(func() {
		c.far.Close()
		c.tunnel.Close()
	})
}

// RemoteAddr is that of the port as the pod sees it: clients such as gocql
// expect a TCP address and panic at any other.
func (c *podConn) RemoteAddr() net.Addr {
	return &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: c.port}
}

// Read reads from the pod.
func (c *podConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	if errors.Is(err, io.EOF) {
		c.mu.Lock()
		defer c.mu.Unlock()
		if c.broken != nil {
			return n, fmt.Errorf("%s: %w", c.what, c.broken)
		}
	}
	return n, err
}

// Close ends the connection and its tunnel.
func (c *podConn) Close() error {
	err := c.Conn.Close()
	c.shut()
	return err
}
