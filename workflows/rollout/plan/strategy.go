// Package plan decides, as a pure function, which hosts a rollout touches
// next and why: from what was observed and a strategy it returns the next
// step. It must do no I/O, read no clock and know no component.
package plan

import (
	"bytes"
	"encoding/json"
	"fmt"
	"time"

	"github.com/refit-run/refit/workflows/window"
)

// Gates says where a person is asked.
type Gates string

const (
	GateAfterCanary Gates = "afterCanary"
	GateEachBatch   Gates = "eachBatch"
	GateNone        Gates = "none"
)

// Order of the hosts within a pool.
type Order string

const (
	// ByName sorts by host name, digits as numbers.
	ByName Order = "name"
	// ByAge is the controller's own order: oldest GPUNode first, then name.
	ByAge Order = "age"
)

// Amount is a count or a share in percent, rounded up; exactly one is set.
type Amount struct {
	Count   int `json:"count,omitempty"`
	Percent int `json:"percent,omitempty"`
}

// Canary selects the hosts that go first: a count, names or a label selector.
// An empty Canary asks for none; a missing one takes the default of one host.
type Canary struct {
	Count    int               `json:"count,omitempty"`
	Nodes    []string          `json:"nodes,omitempty"`
	Selector map[string]string `json:"selector,omitempty"`
}

// Budget is how many hosts may fail before the rollout parks. Failures of the
// canary always park. A share is rounded down, because a budget that grows by
// rounding would tolerate a failure nobody asked for. Where only one of the
// two is set, it alone limits; where none is set, the first failure parks.
type Budget struct {
	PerBatch Amount `json:"perBatch,omitzero"`
	Total    Amount `json:"total,omitzero"`
}

// Strategy of one rollout. Zero values take the defaults of WithDefaults.
type Strategy struct {
	Canary *Canary `json:"canary,omitempty"`
	Batch  Amount  `json:"batch,omitzero"`
	// MaxUnavailable is how many hosts are away at a time: a batch goes in
	// waves of that size. Missing, a whole batch goes at once.
	MaxUnavailable Amount `json:"maxUnavailable,omitzero"`
	Order          Order  `json:"order,omitempty" jsonschema:"enum=name,enum=age"`
	// SoakCanary and SoakBatch are waits after a proven batch, Interval
	// between a batch's proof and the next batch (the longer of soak and
	// interval applies).
	SoakCanary window.Duration `json:"soakCanary,omitempty"`
	SoakBatch  window.Duration `json:"soakBatch,omitempty"`
	Interval   window.Duration `json:"interval,omitempty"`
	Budget     Budget          `json:"budget,omitzero"`
	Gates      Gates           `json:"gates,omitempty" jsonschema:"enum=afterCanary,enum=eachBatch,enum=none"`
	// Approvers is how many different people a gate asks for (default 1).
	Approvers int `json:"approvers,omitempty"`
	// HostTimeout is the deadline of one host from delete to proof.
	HostTimeout window.Duration `json:"hostTimeout,omitempty"`
	// MaxDuration parks the rollout when it is exceeded.
	MaxDuration window.Duration `json:"maxDuration,omitempty"`

	// zeros are the paths of explicit zeros in the JSON this was read from:
	// "0 %" is refused, while a missing amount takes its default.
	zeros []string
}

// Defaults that do not depend on the pool.
const (
	defaultCanary       = 1
	defaultBatchPercent = 10
	// defaultHostTimeout covers an image pull over a slow link and the
	// controller's own requeue intervals of a few seconds.
	defaultHostTimeout = 10 * time.Minute
)

// WithDefaults fills what the plan left out.
func (s Strategy) WithDefaults() Strategy {
	if s.Canary == nil {
		s.Canary = &Canary{Count: defaultCanary}
	}
	if s.Batch == (Amount{}) {
		s.Batch = Amount{Percent: defaultBatchPercent}
	}
	if s.Order == "" {
		s.Order = ByName
	}
	if s.Gates == "" {
		s.Gates = GateAfterCanary
		if s.Canary.none() {
			s.Gates = GateEachBatch
		}
	}
	if s.Approvers == 0 {
		s.Approvers = 1
	}
	if s.HostTimeout == 0 {
		s.HostTimeout = window.Duration(defaultHostTimeout)
	}
	return s
}

// Labels lists the node labels that the canary's selector needs to see.
func (s Strategy) Labels() []string {
	if s.Canary == nil {
		return nil
	}
	return sortedKeys(s.Canary.Selector)
}

func (c *Canary) none() bool {
	return c.Count == 0 && len(c.Nodes) == 0 && len(c.Selector) == 0
}

// of is the amount in hosts of a total; shares are rounded up.
func (a Amount) of(total int) int {
	if a.Percent > 0 {
		return (a.Percent*total + 99) / 100
	}
	return a.Count
}

// floor is the amount in hosts of a total; shares are rounded down.
func (a Amount) floor(total int) int {
	if a.Percent > 0 {
		return a.Percent * total / 100
	}
	return a.Count
}

func (a Amount) String() string {
	if a.Percent != 0 {
		return fmt.Sprintf("%d %%", a.Percent)
	}
	return fmt.Sprint(a.Count)
}

// UnmarshalJSON reads a strategy strictly and remembers explicit zeros, which
// Validate refuses where they make no sense.
func (s *Strategy) UnmarshalJSON(b []byte) error {
	type plain Strategy // without this method
	var p plain
	d := json.NewDecoder(bytes.NewReader(b))
	d.DisallowUnknownFields()
	if err := d.Decode(&p); err != nil {
		return fmt.Errorf("strategy: %w", err)
	}
	var seen map[string]json.RawMessage
	if err := json.Unmarshal(b, &seen); err != nil {
		return fmt.Errorf("strategy: %w", err)
	}
	*s = Strategy(p)
	for _, key := range []string{"batch", "maxUnavailable"} {
		s.noteAmount(key, seen[key])
	}
	for _, key := range []string{"hostTimeout", "maxDuration"} {
		if v, ok := seen[key]; ok && string(v) != "null" && durationOf(*s, key) == 0 {
			s.zeros = append(s.zeros, key)
		}
	}
	if v, ok := seen["approvers"]; ok && string(v) == "0" {
		s.zeros = append(s.zeros, "approvers")
	}
	var budget map[string]json.RawMessage
	if raw, ok := seen["budget"]; ok && json.Unmarshal(raw, &budget) == nil {
		s.noteAmount("budget.perBatch", budget["perBatch"])
		s.noteAmount("budget.total", budget["total"])
	}
	return nil
}

func durationOf(s Strategy, key string) window.Duration {
	if key == "hostTimeout" {
		return s.HostTimeout
	}
	return s.MaxDuration
}

// noteAmount remembers an explicit zero of an amount.
func (s *Strategy) noteAmount(path string, raw json.RawMessage) {
	var a struct{ Count, Percent *int }
	if len(raw) == 0 || json.Unmarshal(raw, &a) != nil {
		return
	}
	if a.Count != nil && *a.Count == 0 {
		s.zeros = append(s.zeros, path+".count")
	}
	if a.Percent != nil && *a.Percent == 0 {
		s.zeros = append(s.zeros, path+".percent")
	}
}
