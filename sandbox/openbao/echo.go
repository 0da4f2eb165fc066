package openbao

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"strings"
	"time"
)

const (
	// echoEvery is how often a standby tells the active member of itself.
	echoEvery = 5 * time.Second
	// forgetAfter is how long ha-status lists a standby after its last word.
	forgetAfter = 3 * echoEvery
	// lookEvery is how often a standby looks whether another member is active.
	lookEvery = 200 * time.Millisecond
	echoLimit = 3 * time.Second
)

// heard is what a standby last said.
type heard struct {
	ID       string  `json:"id"`
	Hostname string  `json:"hostname"`
	API      string  `json:"api"`
	Cluster  string  `json:"cluster"`
	Version  Version `json:"version"`
	Term     uint64  `json:"term"`
	Applied  uint64  `json:"applied"`

	at time.Time
	// stable is since when autopilot counts it as healthy; sick says that it
	// did not when it last looked.
	stable time.Time
	sick   bool
	// silent says that it has not spoken to this active member yet.
	silent bool
}

// echo speaks to the active member: when there is a new one and from then on
// at intervals. One of another line does not understand it.
func (m *member) echo() {
	look := time.NewTicker(lookEvery)
	defer look.Stop()
	var last time.Time
	var term uint64
	for {
		select {
		case <-m.done:
			return
		case now := <-look.C:
			l, ok := m.active()
			if !ok || l.ID == m.config.NodeID || l.Version.line() != m.version.line() {
				continue
			}
			current := m.raft.CurrentTerm()
			if current == term && now.Sub(last) < echoEvery {
				continue
			}
			term, last = current, now
			if err := m.tell(l); err != nil {
				m.log.Info("the active member was not told of this one", "active", l.ID, "error", err)
			}
		}
	}
}

func (m *member) tell(l leader) error {
	ctx, cancel := context.WithTimeout(context.Background(), echoLimit)
	defer cancel()
	data, err := json.Marshal(heard{
		ID: m.config.NodeID, Hostname: hostname(), API: m.config.APIAddr, Cluster: m.config.ClusterAddr,
		Version: m.version, Term: m.raft.CurrentTerm(), Applied: m.applied(),
	})
	if err != nil {
		return err
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+hostOf(l.Cluster)+echoPath, bytes.NewReader(data))
	if err != nil {
		return err
	}
	response, err := m.passOn.RoundTrip(request)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	if response.StatusCode != http.StatusNoContent {
		return fmt.Errorf("expected 204, found %d", response.StatusCode)
	}
	return nil
}

// listen is the active member's side of an echo.
func (m *member) listen(w http.ResponseWriter, r *http.Request) {
	var h heard
	if !decode(w, r, &h) {
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.since.IsZero() {
		w.WriteHeader(http.StatusServiceUnavailable)
		return
	}
	h.at = time.Now().UTC()
	h.stable = h.at
	if old := m.heard[h.ID]; old != nil {
		h.stable, h.sick = old.stable, old.sick
		if old.silent {
			h.stable = h.at
		}
	}
	m.heard[h.ID] = &h
	w.WriteHeader(http.StatusNoContent)
}

// applied is the last entry that the member has; after a restart its disk
// knows it before Raft does.
func (m *member) applied() uint64 { return max(m.raft.AppliedIndex(), m.state.applied()) }

func hostOf(address string) string {
	_, host, _ := strings.Cut(address, "://")
	return host
}

func hostname() string {
	if h := os.Getenv("HOSTNAME"); h != "" {
		return h
	}
	h, err := os.Hostname()
	if err != nil {
		return "unknown"
	}
	return h
}
