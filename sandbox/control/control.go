// Package control is the sandbox's control API: what a command asks of the
// running daemon over its unix socket. It holds messages and transport; what
// they do is decided by the server's handler.
package control

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"

	"github.com/refit-run/refit/sandbox/process"
)

// Status is what the daemon knows about itself.
type Status struct {
	Name       string           `json:"name"`
	Folder     string           `json:"folder"`
	Ready      bool             `json:"ready"`
	PID        int              `json:"pid"`
	Chart      string           `json:"chart"`
	Components []process.Status `json:"components"`
	Nodes      int              `json:"nodes"`
	NodesReady int              `json:"nodesReady"`
	Agents     int              `json:"agents"`
	// AgentKind is simulated or real.
	AgentKind string `json:"agentKind"`
	// Controller is the real TensorFusion controller's program; empty with the
	// double.
	Controller string `json:"controller,omitempty"`
	// Notes say what could not be found out.
	Notes []string `json:"notes,omitempty"`
}

// FaultRequest injects one fault by name.
type FaultRequest struct {
	Name string   `json:"name"`
	Args []string `json:"args"`
}

// Handler does what is asked.
type Handler interface {
	Status(ctx context.Context) Status
	Fault(ctx context.Context, name string, args []string) error
}

// Server is the listening API.
type Server struct {
	http   *http.Server
	socket string
}

// Serve listens on the socket; one left by a dead daemon is replaced.
func Serve(socket string, h Handler) (*Server, error) {
	if err := os.Remove(socket); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("control socket: %w", err)
	}
	l, err := net.Listen("unix", socket)
	if err != nil {
		return nil, fmt.Errorf("control socket: %w", err)
	}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /status", func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(h.Status(r.Context()))
	})
	mux.HandleFunc("POST /fault", func(w http.ResponseWriter, r *http.Request) {
		var req FaultRequest
		if err := json.NewDecoder(r.Body).Decode(&req); err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		if err := h.Fault(r.Context(), req.Name, req.Args); err != nil {
			http.Error(w, err.Error(), http.StatusUnprocessableEntity)
			return
		}
		w.WriteHeader(http.StatusNoContent)
	})
	s := &Server{http: &http.Server{Handler: mux}, socket: socket}
	go func() { _ = s.http.Serve(l) }()
	return s, nil
}

// Close ends the API and removes its socket.
func (s *Server) Close() {
	_ = s.http.Close()
	_ = os.Remove(s.socket)
}

// Client talks to a daemon.
type Client struct {
	http *http.Client
}

// Dial returns a client of the socket; it connects on first use.
func Dial(socket string) *Client {
	return &Client{http: &http.Client{Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			var d net.Dialer
			return d.DialContext(ctx, "unix", socket)
		},
	}}}
}

// Status asks for the daemon's status.
func (c *Client) Status(ctx context.Context) (Status, error) {
	var s Status
	body, err := c.do(ctx, http.MethodGet, "/status", nil)
	if err != nil {
		return s, err
	}
	return s, json.Unmarshal(body, &s)
}

// Fault injects a fault and returns when it is in force.
func (c *Client) Fault(ctx context.Context, name string, args []string) error {
	_, err := c.do(ctx, http.MethodPost, "/fault", FaultRequest{Name: name, Args: args})
	return err
}

func (c *Client) do(ctx context.Context, method, path string, in any) ([]byte, error) {
	var body io.Reader
	if in != nil {
		data, err := json.Marshal(in)
		if err != nil {
			return nil, err
		}
		body = bytes.NewReader(data)
	}
	req, err := http.NewRequestWithContext(ctx, method, "http://sandbox"+path, body)
	if err != nil {
		return nil, err
	}
	resp, err := c.http.Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	out, err := io.ReadAll(resp.Body)
	if err != nil {
		return nil, err
	}
	if resp.StatusCode >= http.StatusMultipleChoices {
		return nil, errors.New(string(bytes.TrimSpace(out)))
	}
	return out, nil
}
