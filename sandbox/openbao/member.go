package openbao

import (
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"os"
	"sync"
	"time"

	"github.com/hashicorp/go-hclog"
	"github.com/hashicorp/raft"
)

// member is the part of a server that lives while it is unsealed: its place in
// Raft and in the choice of the active member.
type member struct {
	config  Config
	version Version
	token   digest
	log     *slog.Logger

	raft  *raft.Raft
	state *state
	logs  *logStore
	port  *port
	// passOn brings requests to the active member, inner takes them.
	passOn *http.Transport
	inner  *http.Server

	leads chan bool
	steps chan struct{}
	done  chan struct{}
	group sync.WaitGroup

	mu sync.Mutex
	// since is when it became active; zero while it is not.
	since time.Time
	// until is when it may become active again after a step-down.
	until time.Time
	// stepping says that a step-down is under way.
	stepping bool
	// heard is what the active member was told by the others.
	heard map[string]*heard
}

const (
	transportPool  = 3
	transportLimit = 10 * time.Second
	keptSnapshots  = 3
)

func (s *Server) raftConfig() *raft.Config {
	c := raft.DefaultConfig()
	c.LocalID = raft.ServerID(s.config.NodeID)
	c.HeartbeatTimeout, c.ElectionTimeout, c.LeaderLeaseTimeout = s.config.contact(), s.config.contact(), s.config.lease()
	// The state is on disk.
	c.NoSnapshotRestoreOnStart = true
	c.Logger = hclog.New(&hclog.LoggerOptions{Name: "raft", Level: hclog.Info, Output: os.Stderr})
	return c
}

func (s *Server) snapshots() (*raft.FileSnapshotStore, error) {
	return raft.NewFileSnapshotStoreWithLogger(s.config.Path, keptSnapshots, hclog.NewNullLogger())
}

// bootstrap writes the first configuration: this member alone. What a crash
// left of an earlier attempt says the same.
func (s *Server) bootstrap() error {
	logs, err := openLog(s.path("raft.db"))
	if err != nil {
		return err
	}
	snapshots, err := s.snapshots()
	if err == nil {
		_, transport := raft.NewInmemTransport("")
		err = raft.BootstrapCluster(s.raftConfig(), logs, logs, snapshots, transport, raft.Configuration{Servers: []raft.Server{
			{ID: raft.ServerID(s.config.NodeID), Address: raft.ServerAddress(s.config.raftAddress())},
		}})
	}
	if errors.Is(err, raft.ErrCantBootstrap) {
		err = nil
	}
	return errors.Join(err, logs.db.Close())
}

// enterRaft is called under the server's lock.
func (s *Server) enterRaft() (m *member, err error) {
	notify := make(chan bool, 8)
	m = &member{
		config: s.config, version: s.version, token: s.keep.Token, log: s.log,
		leads: notify, steps: make(chan struct{}, 1), done: make(chan struct{}), heard: map[string]*heard{},
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, m.closeFiles())
		}
	}()
	if m.state, err = openState(s.config.Path); err != nil {
		return nil, err
	}
	if m.logs, err = openLog(s.path("raft.db")); err != nil {
		return nil, err
	}
	snapshots, err := s.snapshots()
	if err != nil {
		return nil, err
	}
	if m.port, err = openPort(s.config.ClusterListen, s.config.raftAddress(), s.dial); err != nil {
		return nil, err
	}
	config := s.raftConfig()
	config.NotifyCh = notify
	transport := raft.NewNetworkTransportWithConfig(&raft.NetworkTransportConfig{
		Stream: m.port, MaxPool: transportPool, Timeout: transportLimit, Logger: config.Logger,
	})
	if m.raft, err = raft.NewRaft(config, m.state, m.logs, m.logs, snapshots, transport); err != nil {
		return nil, fmt.Errorf("raft: %w", err)
	}
	m.passOn = m.port.client()
	m.inner = &http.Server{Handler: s.passedOn(), ReadHeaderTimeout: headerLimit}
	m.group.Go(func() { _ = m.inner.Serve(requestsOnly{m.port}) })
	m.group.Go(m.lead)
	m.group.Go(m.echo)
	m.hurryAlone(transport)
	return m, nil
}

// hurryAlone spares the only member of a cluster the wait for a leader that
// can't exist: it is told to stand for election at once, as in a transfer.
func (m *member) hurryAlone(transport raft.Transport) {
	servers := m.servers()
	if len(servers) != 1 || servers[0].ID != raft.ServerID(m.config.NodeID) {
		return
	}
	request := &raft.TimeoutNowRequest{RPCHeader: raft.RPCHeader{ProtocolVersion: raft.ProtocolVersionMax}}
	if err := transport.TimeoutNow(servers[0].ID, servers[0].Address, request, &raft.TimeoutNowResponse{}); err != nil {
		m.log.Info("the only member waits for its election", "error", err)
	}
}

func (m *member) servers() []raft.Server {
	f := m.raft.GetConfiguration()
	if f.Error() != nil {
		return nil
	}
	return f.Configuration().Servers
}

// close ends the member's part; its files can be opened again afterwards.
func (m *member) close() error {
	close(m.done)
	err := m.raft.Shutdown().Error()
	err = errors.Join(err, m.inner.Close())
	m.passOn.CloseIdleConnections()
	m.group.Wait()
	return errors.Join(err, m.closeFiles())
}

func (m *member) closeFiles() error {
	var errs []error
	if m.port != nil {
		errs = append(errs, m.port.Close())
	}
	if m.logs != nil {
		errs = append(errs, m.logs.db.Close())
	}
	if m.state != nil {
		errs = append(errs, m.state.db.Close())
	}
	return errors.Join(errs...)
}

// put changes the state on all members.
func (m *member) put(name string, value []byte) error {
	data, err := json.Marshal(change{Name: name, Value: value})
	if err != nil {
		return err
	}
	f := m.raft.Apply(data, applyLimit)
	if err := f.Error(); err != nil {
		return err
	}
	if err, ok := f.Response().(error); ok {
		return err
	}
	return nil
}

const applyLimit = 5 * time.Second
