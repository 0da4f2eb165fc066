package openbao

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"sync"
	"time"
)

// Dial reaches an address by its name.
type Dial func(ctx context.Context, network, address string) (net.Conn, error)

// Server is one process of the cluster. It serves the API from its start;
// until it is unsealed it has no part in Raft.
type Server struct {
	config  Config
	version Version
	log     *slog.Logger
	dial    Dial
	client  *http.Client

	mu sync.Mutex
	// keep is nil until the member is initialised or has found a cluster.
	keep *keep
	// member is nil while the server is sealed.
	member *member
}

// keep is what a member remembers of its cluster while it is sealed.
type keep struct {
	ClusterID string `json:"cluster_id"`
	// Key and Token are hashes.
	Key   digest `json:"key"`
	Token digest `json:"token"`
	// Joined says that Raft has the member.
	Joined bool `json:"joined"`
}

const keepFile = "seal.json"

// New is a server that serves nothing yet.
func New(config Config, version Version, dial Dial, log *slog.Logger) (*Server, error) {
	s := &Server{
		config: config, version: version, log: log, dial: dial,
		client: &http.Client{Transport: &http.Transport{DialContext: dial, DisableKeepAlives: true}, Timeout: joinLimit},
	}
	data, err := os.ReadFile(s.path(keepFile))
	if errors.Is(err, fs.ErrNotExist) {
		return s, nil
	}
	if err == nil {
		s.keep = &keep{}
		err = json.Unmarshal(data, s.keep)
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w", s.path(keepFile), err)
	}
	return s, nil
}

func (s *Server) path(name string) string { return filepath.Join(s.config.Path, name) }

// save writes what the member knows; a crash leaves the old or the new.
func (s *Server) save(k keep) error {
	data, err := json.Marshal(k)
	if err != nil {
		return err
	}
	next := s.path(keepFile + ".next")
	if err := os.WriteFile(next, data, 0o600); err != nil {
		return err
	}
	if err := os.Rename(next, s.path(keepFile)); err != nil {
		return err
	}
	s.keep = &k
	return nil
}

// Time limits of the API: for reading a request and for ending.
const (
	headerLimit   = 10 * time.Second
	shutdownLimit = 3 * time.Second
)

// Serve is the server until ctx ends; then it hands its leadership over, as
// the real one does on SIGTERM.
func (s *Server) Serve(ctx context.Context, out io.Writer) error {
	listener, err := net.Listen("tcp", s.config.Listen)
	if err != nil {
		return fmt.Errorf("listener: %w", err)
	}
	api := &http.Server{Handler: s.handler(), ReadHeaderTimeout: headerLimit}
	failed := make(chan error, 1)
	go func() { failed <- api.Serve(listener) }()
	fmt.Fprintf(out, "==> OpenBao server double %s: API %s, cluster %s, node %s\n", s.version, s.config.APIAddr, s.config.ClusterAddr, s.config.NodeID)
	joining, stop := context.WithCancel(ctx)
	var joins sync.WaitGroup
	joins.Go(func() { s.retryJoin(joining) })
	select {
	case <-ctx.Done():
	case err = <-failed:
	}
	stop()
	joins.Wait()
	s.mu.Lock()
	m := s.member
	s.mu.Unlock()
	if m != nil {
		m.handOver()
	}
	late, cancel := context.WithTimeout(context.Background(), shutdownLimit)
	defer cancel()
	err = errors.Join(err, api.Shutdown(late))
	s.mu.Lock()
	defer s.mu.Unlock()
	return errors.Join(err, s.leaveRaft())
}

// leaveRaft is called under the lock.
func (s *Server) leaveRaft() error {
	if s.member == nil {
		return nil
	}
	err := s.member.close()
	s.member = nil
	return err
}

// status is a consistent look at the two halves.
func (s *Server) status() (*keep, *member) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.keep, s.member
}
