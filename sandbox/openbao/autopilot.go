package openbao

import (
	"net/http"
	"slices"
	"time"

	"github.com/hashicorp/raft"
)

// What autopilot thinks healthy: the real defaults.
const (
	contactThreshold = 10 * time.Second
	maxTrailing      = 1000
)

type autopilotServer struct {
	ID          string    `json:"id"`
	Name        string    `json:"name"`
	Address     string    `json:"address"`
	NodeStatus  string    `json:"node_status"`
	LastContact string    `json:"last_contact"`
	LastTerm    uint64    `json:"last_term"`
	LastIndex   uint64    `json:"last_index"`
	Healthy     bool      `json:"healthy"`
	StableSince time.Time `json:"stable_since"`
	Status      string    `json:"status"`
	Version     Version   `json:"version"`
	NodeType    string    `json:"node_type"`
}

type autopilotState struct {
	Tolerance int                        `json:"failure_tolerance"`
	Healthy   bool                       `json:"healthy"`
	Leader    string                     `json:"leader"`
	Servers   map[string]autopilotServer `json:"servers"`
	Voters    []string                   `json:"voters"`
}

// autopilot says what the active member believes: it goes by the last word of
// the others, so that one which is sealed counts as healthy until its silence
// has lasted.
func (m *member) autopilot() autopilotState {
	servers := m.servers()
	m.mu.Lock()
	defer m.mu.Unlock()
	now := time.Now().UTC()
	a := autopilotState{Healthy: true, Leader: m.config.NodeID, Servers: map[string]autopilotServer{}}
	healthy, voters := 0, 0
	for _, server := range servers {
		x := m.judge(server, now)
		a.Servers[x.ID] = x
		a.Healthy = a.Healthy && x.Healthy
		if server.Suffrage != raft.Voter {
			continue
		}
		a.Voters = append(a.Voters, x.ID)
		voters++
		if x.Healthy {
			healthy++
		}
	}
	a.Tolerance = max(0, healthy-(voters/2+1))
	// The leader comes first.
	slices.SortStableFunc(a.Voters, func(x, y string) int {
		switch {
		case x == a.Leader:
			return -1
		case y == a.Leader:
			return 1
		}
		return 0
	})
	return a
}

// judge is called under the lock.
func (m *member) judge(server raft.Server, now time.Time) autopilotServer {
	x := autopilotServer{
		ID: string(server.ID), Name: string(server.ID), Address: string(server.Address), NodeStatus: "alive", Status: "voter", NodeType: "voter",
	}
	if x.ID == m.config.NodeID {
		x.LastContact, x.LastTerm, x.LastIndex = "0s", m.raft.CurrentTerm(), m.applied()
		x.Healthy, x.StableSince, x.Status, x.Version = true, m.since, "leader", m.version
		return x
	}
	h := m.heard[x.ID]
	if h == nil {
		h = &heard{at: now, stable: now, Version: m.version, silent: true}
		m.heard[x.ID] = h
	}
	contact := now.Sub(h.at)
	x.LastContact, x.LastTerm, x.LastIndex, x.Version = contact.String(), h.Term, h.Applied, h.Version
	x.Healthy = contact < contactThreshold && h.Term == m.raft.CurrentTerm() && m.applied() < h.Applied+maxTrailing
	if x.Healthy && h.sick {
		h.stable = now
	}
	h.sick = !x.Healthy
	x.StableSince = h.stable
	return x
}

func autopilotDefaults() map[string]any {
	return map[string]any{
		"cleanup_dead_servers": false, "dead_server_last_contact_threshold": "24h0m0s", "last_contact_threshold": contactThreshold.String(),
		"max_trailing_logs": maxTrailing, "min_quorum": 0, "server_stabilization_time": "10s",
	}
}

func (s *Server) autopilotState(m *member, w http.ResponseWriter, _ *http.Request) {
	logical(w, m.autopilot(), nil)
}

func (s *Server) autopilotConfiguration(_ *member, w http.ResponseWriter, _ *http.Request) {
	logical(w, autopilotDefaults(), nil)
}

type raftServer struct {
	NodeID          string `json:"node_id"`
	Address         string `json:"address"`
	Leader          bool   `json:"leader"`
	ProtocolVersion string `json:"protocol_version"`
	Voter           bool   `json:"voter"`
}

func (s *Server) raftConfiguration(m *member, w http.ResponseWriter, _ *http.Request) {
	_, id := m.raft.LeaderWithID()
	servers := []raftServer{}
	for _, x := range m.servers() {
		servers = append(servers, raftServer{
			NodeID: string(x.ID), Address: string(x.Address), Leader: x.ID == id, ProtocolVersion: "3", Voter: x.Suffrage == raft.Voter,
		})
	}
	logical(w, map[string]any{"config": map[string]any{"servers": servers, "index": 0}}, nil)
}

type haNode struct {
	Hostname       string     `json:"hostname"`
	APIAddress     string     `json:"api_address"`
	ClusterAddress string     `json:"cluster_address"`
	Active         bool       `json:"active_node"`
	LastEcho       *time.Time `json:"last_echo"`
	Version        Version    `json:"version"`
	UpgradeVersion Version    `json:"upgrade_version"`
}

// haStatus lists the active member and the standbys that it heard of lately.
func (s *Server) haStatus(m *member, w http.ResponseWriter, _ *http.Request) {
	nodes := []haNode{{
		Hostname: hostname(), APIAddress: m.config.APIAddr, ClusterAddress: m.config.ClusterAddr, Active: true,
		Version: m.version, UpgradeVersion: m.version,
	}}
	servers := m.servers()
	m.mu.Lock()
	for _, server := range servers {
		h := m.heard[string(server.ID)]
		if h == nil || h.silent || time.Since(h.at) > forgetAfter {
			continue
		}
		nodes = append(nodes, haNode{
			Hostname: h.Hostname, APIAddress: h.API, ClusterAddress: h.Cluster, LastEcho: &h.at, Version: h.Version, UpgradeVersion: h.Version,
		})
	}
	m.mu.Unlock()
	data := map[string]any{"nodes": nodes}
	logical(w, data, data)
}
