package plan

import (
	"encoding/json"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/refit-run/refit/workflows/window"
)

func TestValidateRefusesNonsense(t *testing.T) {
	for _, c := range []struct{ name, json, path, says string }{
		{"batch of 0 %", `{"batch":{"percent":0}}`, "s.batch.percent", "is 0"},
		{"batch of 0 hosts", `{"batch":{"count":0}}`, "s.batch.count", "is 0"},
		{"max unavailable 0 %", `{"maxUnavailable":{"percent":0}}`, "s.maxUnavailable.percent", "is 0"},
		{"batch above 100 %", `{"batch":{"percent":101}}`, "s.batch.percent", "is 101"},
		{"negative batch", `{"batch":{"count":-1}}`, "s.batch.count", "is -1"},
		{"count and percent", `{"batch":{"count":1,"percent":10}}`, "s.batch", "give one"},
		{"budget share of 0", `{"budget":{"perBatch":{"percent":0}}}`, "s.budget.perBatch.percent", "is 0"},
		{"budget 0 per batch next to a total", `{"budget":{"perBatch":{"count":0},"total":{"count":3}}}`, "s.budget.perBatch.count", "leave one"},
		{"canary by count and name", `{"canary":{"count":1,"nodes":["a"]}}`, "s.canary", "2 ways"},
		{"canary named twice", `{"canary":{"nodes":["a","b","a"]}}`, "s.canary.nodes[2]", "once"},
		{"negative canary", `{"canary":{"count":-2}}`, "s.canary.count", "is -2"},
		{"gate after no canary", `{"canary":{},"gates":"afterCanary"}`, "s.gates", "the canary is empty"},
		{"unknown gates", `{"gates":"sometimes"}`, "s.gates", "want one of"},
		{"unknown order", `{"order":"random"}`, "s.order", "want one of"},
		{"negative approvers", `{"approvers":-1}`, "s.approvers", "is -1"},
		{"no approvers", `{"approvers":0}`, "s.approvers", "is 0"},
		{"negative soak", `{"soakBatch":"-1s"}`, "s.soakBatch", "positive"},
		{"host timeout of 0s", `{"hostTimeout":"0s"}`, "s.hostTimeout", "positive"},
		{"max duration of 0s", `{"maxDuration":"0s"}`, "s.maxDuration", "positive"},
		{"max duration below the host's", `{"hostTimeout":"2h","maxDuration":"1h"}`, "s.maxDuration", "shorter"},
	} {
		t.Run(c.name, func(t *testing.T) {
			var s Strategy
			require.NoError(t, json.Unmarshal([]byte(c.json), &s))
			ps := s.Validate("s")
			require.Len(t, ps, 1, "%v", ps)
			require.Equal(t, c.path, ps[0].Path)
			require.Contains(t, ps[0].Message, c.says)
		})
	}
}

func TestSoundStrategiesAreAccepted(t *testing.T) {
	for _, text := range []string{
		`{}`,
		`{"soakCanary":"0s","interval":"0s","budget":{"total":{"count":0}}}`,
		`{"canary":{},"gates":"none"}`,
		`{"canary":{"selector":{"zone":"a"}},"batch":{"percent":25},"maxUnavailable":{"count":2},"order":"age","gates":"eachBatch","approvers":2}`,
	} {
		var s Strategy
		require.NoError(t, json.Unmarshal([]byte(text), &s))
		require.Empty(t, s.Validate("s"), text)
		require.Empty(t, s.WithDefaults().Validate("s"), text)
	}
}

func TestUnknownKeysOfAStrategyAreRefused(t *testing.T) {
	var s Strategy
	require.ErrorContains(t, json.Unmarshal([]byte(`{"batchSize":3}`), &s), "batchSize")
}

func TestStrategySurvivesJSON(t *testing.T) {
	in := Strategy{
		Canary: &Canary{Nodes: []string{"a"}}, Batch: Amount{Percent: 20}, MaxUnavailable: Amount{Count: 2},
		SoakBatch: window.Duration(time.Minute), Budget: Budget{Total: Amount{Count: 1}},
	}.WithDefaults()
	b, err := json.Marshal(in)
	require.NoError(t, err)
	var out Strategy
	require.NoError(t, json.Unmarshal(b, &out))
	require.Equal(t, in, out)
}
