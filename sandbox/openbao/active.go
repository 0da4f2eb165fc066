package openbao

import (
	"encoding/json"
	"math/rand/v2"
	"time"

	"github.com/hashicorp/raft"
)

// Times of the real servers, as measured.
var (
	// linger is how long a member goes on as the active one after it accepted
	// a step-down.
	linger = span{500 * time.Millisecond, 700 * time.Millisecond}
	// arise is how long a new leader takes to become active: nobody is
	// meanwhile.
	arise = span{30 * time.Millisecond, 200 * time.Millisecond}
)

// holdOff is how long a member that stepped down may not be active again.
const holdOff = 10 * time.Second

// span is a range of durations.
type span struct{ from, to time.Duration }

func (s span) draw() time.Duration { return s.from + rand.N(s.to-s.from) }

// leader is what the active member writes for the others.
type leader struct {
	ID      string  `json:"id"`
	API     string  `json:"api"`
	Cluster string  `json:"cluster"`
	Version Version `json:"version"`
}

// lead follows Raft's leadership: who has it becomes active after a while, who
// loses it is not active from that moment on.
func (m *member) lead() {
	timer := time.NewTimer(0)
	timer.Stop()
	defer timer.Stop()
	leads := false
	for {
		select {
		case <-m.done:
			return
		case leads = <-m.leads:
			if m.resign(); leads {
				timer.Reset(max(arise.draw(), m.held()))
			}
		case <-m.steps:
			m.stepDown()
			if leads = m.raft.State() == raft.Leader; leads {
				timer.Reset(m.held())
			}
		case <-timer.C:
			if leads {
				if err := m.activate(); err != nil {
					m.log.Warn("a leader could not become active and tries again", "error", err)
					timer.Reset(arise.to)
				}
			}
		}
	}
}

func (m *member) held() time.Duration {
	m.mu.Lock()
	defer m.mu.Unlock()
	return time.Until(m.until)
}

func (m *member) isActive() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return !m.since.IsZero()
}

func (m *member) activeSince() time.Time {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.since
}

func (m *member) resign() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.since, m.stepping = time.Time{}, false
}

func (m *member) activate() error {
	if err := m.raft.Barrier(applyLimit).Error(); err != nil {
		return err
	}
	if m.state.get(nameToken) == nil {
		token, err := json.Marshal(m.token)
		if err != nil {
			return err
		}
		if err := m.put(nameToken, token); err != nil {
			return err
		}
	}
	record, err := json.Marshal(leader{ID: m.config.NodeID, API: m.config.APIAddr, Cluster: m.config.ClusterAddr, Version: m.version})
	if err != nil {
		return err
	}
	if err := m.put(nameLeader, record); err != nil {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.since = time.Now().UTC()
	m.heard = map[string]*heard{}
	for _, server := range m.servers() {
		m.heard[string(server.ID)] = &heard{at: m.since, stable: m.since, Version: m.version, silent: true}
	}
	return nil
}

// ask requests a step-down, which is carried out later; a second request while
// one is under way changes nothing.
func (m *member) ask() {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.since.IsZero() || m.stepping {
		return
	}
	m.stepping = true
	since := m.since
	time.AfterFunc(linger.draw(), func() {
		m.mu.Lock()
		same := m.stepping && m.since.Equal(since)
		m.mu.Unlock()
		if same {
			select {
			case m.steps <- struct{}{}:
			case <-m.done:
			}
		}
	})
}

// stepDown hands the leadership to another member. Without one the member
// stays Raft's leader and nobody is active until the hold-off is over.
func (m *member) stepDown() {
	m.mu.Lock()
	m.since, m.stepping, m.until = time.Time{}, false, time.Now().Add(holdOff)
	m.mu.Unlock()
	if err := m.raft.LeadershipTransfer().Error(); err != nil {
		m.log.Warn("the leadership stays with a member that stepped down", "error", err)
	}
}

// handOver is the end of an active member that can take its leave.
func (m *member) handOver() {
	if !m.isActive() {
		return
	}
	m.resign()
	if err := m.raft.LeadershipTransfer().Error(); err != nil {
		m.log.Warn("no member took the leadership over", "error", err)
	}
}

// active finds the active member as this one knows it: itself, or whom the
// leader's record names as long as Raft has the same leader.
func (m *member) active() (leader, bool) {
	var l leader
	if m.isActive() {
		return leader{ID: m.config.NodeID, API: m.config.APIAddr, Cluster: m.config.ClusterAddr, Version: m.version}, true
	}
	record := m.state.get(nameLeader)
	if record == nil || json.Unmarshal(record, &l) != nil {
		return leader{}, false
	}
	_, id := m.raft.LeaderWithID()
	return l, string(id) == l.ID && l.ID != m.config.NodeID
}
