package procnode

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"strconv"
	"time"

	"k8s.io/cri-streaming/pkg/streaming/portforward"
	"k8s.io/cri-streaming/pkg/streaming/remotecommand"

	"github.com/refit-run/refit/sandbox/procnode/pod"
)

const (
	// idleTimeout is the kubelet's: a tunnel may be silent for long.
	idleTimeout = 4 * time.Hour
	// creationTimeout is how long a client may take to open its streams.
	creationTimeout = 30 * time.Second
	// dialTimeout bounds a connection on loopback.
	dialTimeout = 5 * time.Second
)

// routes are the part of the kubelet's API that the API server uses.
func (p *provider) routes() http.Handler {
	mux := http.NewServeMux()
	for pattern, serve := range map[string]func(http.ResponseWriter, *http.Request, *pod.Pod){
		"/exec/{namespace}/{pod}/{container}":              serveExec,
		"/portForward/{namespace}/{pod}":                   servePortForward,
		"GET /containerLogs/{namespace}/{pod}/{container}": serveLogs,
	} {
		mux.HandleFunc(pattern, func(w http.ResponseWriter, r *http.Request) {
			one, err := p.current(r.PathValue("namespace"), r.PathValue("pod"))
			if err != nil {
				http.Error(w, err.Error(), http.StatusNotFound)
				return
			}
			serve(w, r, one)
		})
	}
	return mux
}

func serveExec(w http.ResponseWriter, r *http.Request, one *pod.Pod) {
	options, err := remotecommand.NewOptions(r)
	line := r.URL.Query()["command"]
	if err == nil && len(line) == 0 {
		err = errors.New("exec: expected a command, found none")
	}
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	remotecommand.ServeExec(w, r, streams{one}, "", "", r.PathValue("container"), line, options,
		idleTimeout, creationTimeout, remotecommand.SupportedStreamingProtocols)
}

func servePortForward(w http.ResponseWriter, r *http.Request, one *pod.Pod) {
	options, err := portforward.NewV4Options(r)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	portforward.ServePortForward(w, r, streams{one}, "", "", options, idleTimeout, creationTimeout, portforward.SupportedProtocols)
}

// streams joins the streams of a request with a pod.
type streams struct{ pod *pod.Pod }

// ExecInContainer runs a command. There are no terminals: a wish for one is
// granted without.
func (s streams) ExecInContainer(
	ctx context.Context, _, _, container string, line []string, in io.Reader, out, errOut io.WriteCloser, _ bool,
	_ <-chan remotecommand.TerminalSize, _ time.Duration,
) error {
	var stdout, stderr io.Writer
	if out != nil {
		stdout = out
	}
	if errOut != nil {
		stderr = errOut
	}
	return s.pod.Exec(ctx, container, line, in, stdout, stderr)
}

// PortForward joins a stream with a connection to the pod.
func (s streams) PortForward(ctx context.Context, _, _ string, port int32, stream io.ReadWriteCloser) error {
	dialer := net.Dialer{Timeout: dialTimeout}
	conn, err := dialer.DialContext(ctx, "tcp", net.JoinHostPort(s.pod.IP().String(), strconv.Itoa(int(port))))
	if err != nil {
		return fmt.Errorf("port %d of the pod: %w", port, err)
	}
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { _ = conn.Close() })()
	go func() {
		// Its end is the client's: the server is told, and may still answer.
		_, _ = io.Copy(conn, stream)
		_ = conn.(*net.TCPConn).CloseWrite()
	}()
	_, err = io.Copy(stream, conn)
	return err
}

func serveLogs(w http.ResponseWriter, r *http.Request, one *pod.Pod) {
	options, err := logOptions(r)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	log, err := one.Logs(r.Context(), r.PathValue("container"), options)
	if err != nil {
		code := http.StatusInternalServerError
		if errors.Is(err, fs.ErrNotExist) {
			code = http.StatusNotFound
		}
		http.Error(w, err.Error(), code)
		return
	}
	defer log.Close()
	// The client's end is not an error of ours.
	_, _ = io.Copy(flusher{w, http.NewResponseController(w)}, log)
}

func logOptions(r *http.Request) (o pod.LogOptions, err error) {
	query := r.URL.Query()
	if v := query.Get("timestamps"); v != "" && v != "false" {
		return o, errors.New("logs: this node keeps no time of each line; leave timestamps out")
	}
	number := func(name string, into *int) {
		if v := query.Get(name); v != "" && err == nil {
			if *into, err = strconv.Atoi(v); err != nil || *into < 0 {
				err = fmt.Errorf("logs: %s: expected a number, found %q", name, v)
			}
		}
	}
	truth := func(name string, into *bool) {
		if v := query.Get(name); v != "" && err == nil {
			*into, err = strconv.ParseBool(v)
		}
	}
	if v := query.Get("sinceTime"); v != "" {
		if o.Since, err = time.Parse(time.RFC3339, v); err != nil {
			return o, fmt.Errorf("logs: sinceTime: expected a time as 2006-01-02T15:04:05Z, found %q", v)
		}
	}
	if query.Has("sinceSeconds") {
		seconds := 0
		number("sinceSeconds", &seconds)
		o.Since = time.Now().Add(-time.Duration(seconds) * time.Second)
	}
	o.Tail = -1
	number("tailLines", &o.Tail)
	number("limitBytes", &o.Limit)
	truth("follow", &o.Follow)
	truth("previous", &o.Previous)
	return o, err
}

// flusher sends each piece at once: a followed log is read as it grows.
type flusher struct {
	io.Writer
	controller *http.ResponseController
}

func (f flusher) Write(data []byte) (int, error) {
	n, err := f.Writer.Write(data)
	if err == nil {
		err = f.controller.Flush()
	}
	return n, err
}
