package rollout

import (
	"encoding/json"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/refit-run/refit/activities/gpu"
	"github.com/refit-run/refit/activities/tensorfusion"
	"github.com/refit-run/refit/workflows/rollout/plan"
)

// payloadLimit is Temporal's for one input or result.
const payloadLimit = 2 << 20

// A rollout carries a row, a state and a place in the layout per host through
// every continue-as-new, and its result has the rows.
func TestTheMostHostsThatARolloutTakesFitIntoAPayload(t *testing.T) {
	const uid = "0b9d6c1e-5a52-4c39-9a52-3e8f1d6c7b42"
	in := input(plan.Strategy{Batch: plan.Amount{Percent: 10}, MaxUnavailable: plan.Amount{Percent: 10}})
	var hosts []plan.Host
	for n := range plan.MaxHosts {
		hosts = append(hosts, plan.Host{Name: fmt.Sprintf("gpu-%04d.rack-%02d.dc-north.example.com", n, n/40)})
	}
	layout, err := plan.Build(in.Strategy.WithDefaults(), hosts, false)
	require.NoError(t, err)
	in.Resume = &State{Layout: layout, Rows: map[string]HostRow{}, Plan: plan.State{Hosts: map[string]plan.HostState{}}}
	var out Result
	for _, h := range hosts {
		row := HostRow{Name: h.Name, Outcome: tensorfusion.OutcomeReplaced, OldUID: uid, NewUID: uid, Seconds: 41.5, Verdict: gpu.Pass}
		in.Resume.Rows[h.Name] = row
		in.Resume.Plan.Hosts[h.Name] = plan.HostState{Status: plan.Proven}
		out.Hosts = append(out.Hosts, row)
	}
	_, err = plan.Build(in.Strategy, append(hosts, plan.Host{Name: "one-more"}), false)
	require.ErrorContains(t, err, "at most 5000", "more would fail in mid-run")
	for name, value := range map[string]any{"input of the next run": in, "result": out} {
		text, err := json.Marshal(value)
		require.NoError(t, err)
		t.Logf("%s: %d KiB", name, len(text)>>10)
		require.Less(t, len(text), payloadLimit, name)
	}
}
