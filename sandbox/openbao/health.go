package openbao

import (
	"net/http"
	"strconv"
	"time"
)

type healthAnswer struct {
	Initialized        bool   `json:"initialized"`
	Sealed             bool   `json:"sealed"`
	Standby            bool   `json:"standby"`
	PerformanceStandby *bool  `json:"performance_standby,omitempty"`
	PerformanceMode    string `json:"replication_performance_mode"`
	DRMode             string `json:"replication_dr_mode"`
	Time               int64  `json:"server_time_utc"`
	Version            string `json:"version"`
	ClusterName        string `json:"cluster_name,omitempty"`
	ClusterID          string `json:"cluster_id,omitempty"`
}

// health tells the member's state by its code; the query can ask for others.
func (s *Server) health(w http.ResponseWriter, r *http.Request) {
	k, m := s.status()
	a := healthAnswer{
		Initialized: k != nil, Sealed: m == nil, Standby: true, PerformanceMode: "unknown", DRMode: "unknown",
		Time: time.Now().Unix(), Version: string(s.version),
	}
	if s.version.old() {
		a.PerformanceStandby = new(bool)
	}
	name, code := "standbycode", http.StatusTooManyRequests
	switch {
	case k == nil:
		name, code = "uninitcode", http.StatusNotImplemented
	case m == nil:
		name, code = "sealedcode", http.StatusServiceUnavailable
	default:
		a.ClusterName, a.ClusterID = s.config.ClusterName, k.ClusterID
		if _, ok := m.active(); ok {
			a.PerformanceMode, a.DRMode = "primary", "disabled"
		}
		if m.isActive() {
			name, code, a.Standby = "activecode", http.StatusOK, false
		}
	}
	query := r.URL.Query()
	// A parameter for another state has to be right all the same.
	for _, other := range []string{"uninitcode", "sealedcode", "standbycode", "activecode"} {
		if !query.Has(other) {
			continue
		}
		n, err := strconv.Atoi(query.Get(other))
		if err != nil || n < 100 || n > 999 {
			fail(w, http.StatusBadRequest)
			return
		}
		if other == name {
			code = n
		}
	}
	if query.Has("standbyok") && query.Get("standbyok") != "false" && name == "standbycode" {
		code = http.StatusOK
		if query.Has("activecode") {
			code, _ = strconv.Atoi(query.Get("activecode"))
		}
	}
	if r.Method == http.MethodHead {
		w.WriteHeader(code)
		return
	}
	respond(w, code, a)
}

type leaderAnswer struct {
	HAEnabled      bool       `json:"ha_enabled"`
	IsSelf         bool       `json:"is_self,omitempty"`
	ActiveTime     *time.Time `json:"active_time,omitempty"`
	LeaderAddress  string     `json:"leader_address,omitempty"`
	ClusterAddress string     `json:"leader_cluster_address,omitempty"`
	Committed      uint64     `json:"raft_committed_index,omitempty"`
	Applied        uint64     `json:"raft_applied_index,omitempty"`
}

// oldLeaderAnswer is that of 2.5, which leaves nothing out.
type oldLeaderAnswer struct {
	HAEnabled      bool      `json:"ha_enabled"`
	IsSelf         bool      `json:"is_self"`
	ActiveTime     time.Time `json:"active_time"`
	LeaderAddress  string    `json:"leader_address"`
	ClusterAddress string    `json:"leader_cluster_address"`
	Committed      uint64    `json:"raft_committed_index,omitempty"`
	Applied        uint64    `json:"raft_applied_index,omitempty"`
}

func (s *Server) leader(w http.ResponseWriter, _ *http.Request) {
	_, m := s.status()
	if m == nil {
		fail(w, http.StatusServiceUnavailable, "Vault is sealed")
		return
	}
	l, ok := m.active()
	if !ok {
		l = leader{}
	}
	since := m.activeSince()
	old := oldLeaderAnswer{
		HAEnabled: true, IsSelf: !since.IsZero(), ActiveTime: since, LeaderAddress: l.API, ClusterAddress: l.Cluster,
		Committed: m.raft.CommitIndex(), Applied: m.applied(),
	}
	if s.version.old() {
		respond(w, http.StatusOK, old)
		return
	}
	a := leaderAnswer{
		HAEnabled: true, IsSelf: old.IsSelf, LeaderAddress: old.LeaderAddress, ClusterAddress: old.ClusterAddress,
		Committed: old.Committed, Applied: old.Applied,
	}
	if !since.IsZero() {
		a.ActiveTime = &since
	}
	respond(w, http.StatusOK, a)
}
