package tensorfusion

import (
	"encoding/json"
	"fmt"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	commonpb "go.temporal.io/api/common/v1"
	"go.temporal.io/sdk/converter"

	"github.com/refit-run/refit/workflows/protocol"
	"github.com/refit-run/refit/workflows/rollout"
	"github.com/refit-run/refit/workflows/rollout/plan"
)

// podUID is as long as every UID.
const podUID = "0b9d6c1e-5a52-4c39-9a52-3e8f1d6c7b42"

// Temporal's limits: of one payload, and of a history.
const (
	payloadLimit = 2 << 20
	historyLimit = 50 << 20
)

// scales weighs everything that goes through the run's history.
type scales struct {
	converter.DataConverter
	mu            sync.Mutex
	heaviest, all int
}

func (s *scales) ToPayload(value any) (*commonpb.Payload, error) {
	p, err := s.DataConverter.ToPayload(value)
	s.weigh(p)
	return p, err
}

func (s *scales) ToPayloads(values ...any) (*commonpb.Payloads, error) {
	ps, err := s.DataConverter.ToPayloads(values...)
	s.weigh(ps.GetPayloads()...)
	return ps, err
}

func (s *scales) weigh(payloads ...*commonpb.Payload) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, p := range payloads {
		s.heaviest = max(s.heaviest, len(p.GetData()))
		s.all += len(p.GetData())
	}
}

// What grows with the hosts: the observations of a pool, the snapshots around
// every stage, the child's result and the receipt. Nothing of it may outgrow a
// payload, nor all of it the history.
func TestAnUpgradeOf5000HostsFitsIntoItsHistory(t *testing.T) {
	i := newInstallation(t)
	for n := range plan.MaxHosts - 2 { // beside the two of every pool
		i.fleet = append(i.fleet, fmt.Sprintf("gpu-%04d.rack-%02d.dc-north.example.com", n, n/40))
	}
	h := newHarness(t, i)
	s := &scales{DataConverter: converter.GetDefaultDataConverter()}
	h.SetDataConverter(s)
	r := h.upgrade(upgradeInput())
	require.Equal(t, protocol.OutcomeDone, r.Outcome)
	assert.Less(t, s.heaviest, payloadLimit)
	assert.Less(t, s.all, historyLimit)
	t.Logf("heaviest payload %d KiB, all %d KiB", s.heaviest>>10, s.all>>10)

	var rows []rollout.HostRow
	require.Len(t, i.receipts, 3, "two pages, then the receipt")
	for n, page := range i.receipts[:2] {
		var part []rollout.HostRow
		require.NoError(t, json.Unmarshal(page.Hosts, &part))
		rows = append(rows, part...)
		assert.Equal(t, n+1, page.Page)
		assert.Contains(t, fmt.Sprint(r.Artifacts), fmt.Sprintf("hosts-%d.json", n+1))
	}
	assert.Len(t, rows, len(i.fleet)+2, "every host once")
	last := i.receipts[2]
	assert.Empty(t, last.Hosts)
	assert.Equal(t, []string{"file:///hosts-1.json", "file:///hosts-2.json"}, last.Pages)
	assert.Contains(t, string(last.JSON), "hosts-2.json")
}
