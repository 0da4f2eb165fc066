package plan

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func pool(n int) []Host {
	out := make([]Host, n)
	for i := range out {
		out[i] = Host{Name: fmt.Sprintf("gpu-%d", i+1), Created: time.Unix(int64(1000-i), 0)}
	}
	return out
}

func batches(l Layout) [][]string {
	var out [][]string
	for _, b := range l.Batches {
		out = append(out, append([]string{b.Name}, b.Hosts...))
	}
	return out
}

func TestBuildLaysOutCanaryThenBatches(t *testing.T) {
	for _, c := range []struct {
		name     string
		strategy Strategy
		fixFirst bool
		hosts    func() []Host
		want     [][]string
		done     []string
	}{
		{
			name: "default: one canary, batches of 10 % of the pool rounded up", hosts: func() []Host { return pool(12) },
			want: [][]string{{"canary", "gpu-1"}, {"batch-1", "gpu-2", "gpu-3"}, {"batch-2", "gpu-4", "gpu-5"},
				{"batch-3", "gpu-6", "gpu-7"}, {"batch-4", "gpu-8", "gpu-9"}, {"batch-5", "gpu-10", "gpu-11"}, {"batch-6", "gpu-12"}},
		},
		{
			name: "by age, oldest first", strategy: Strategy{Order: ByAge, Batch: Amount{Count: 2}}, hosts: func() []Host { return pool(4) },
			want: [][]string{{"canary", "gpu-4"}, {"batch-1", "gpu-3", "gpu-2"}, {"batch-2", "gpu-1"}},
		},
		{
			name: "named canary", strategy: Strategy{Canary: &Canary{Nodes: []string{"gpu-3"}}, Batch: Amount{Count: 5}}, hosts: func() []Host { return pool(4) },
			want: [][]string{{"canary", "gpu-3"}, {"batch-1", "gpu-1", "gpu-2", "gpu-4"}},
		},
		{
			name: "selected canary", strategy: Strategy{Canary: &Canary{Selector: map[string]string{"zone": "a", "tier": "x"}}, Batch: Amount{Percent: 100}},
			hosts: func() []Host {
				h := pool(4)
				h[1].Labels = map[string]string{"zone": "a", "tier": "x"}
				h[2].Labels = map[string]string{"zone": "a"}
				return h
			},
			want: [][]string{{"canary", "gpu-2"}, {"batch-1", "gpu-1", "gpu-3", "gpu-4"}},
		},
		{
			name: "no canary", strategy: Strategy{Canary: &Canary{}, Batch: Amount{Percent: 50}}, hosts: func() []Host { return pool(3) },
			want: [][]string{{"batch-1", "gpu-1", "gpu-2"}, {"batch-2", "gpu-3"}},
		},
		{
			name: "hosts on target are done, broken ones go last", strategy: Strategy{Batch: Amount{Count: 2}},
			hosts: func() []Host {
				h := pool(4)
				h[0].Broken = "GPUNode Pending"
				h[1].OnTarget = true
				return h
			},
			want: [][]string{{"canary", "gpu-3"}, {"batch-1", "gpu-4", "gpu-1"}}, done: []string{"gpu-2"},
		},
		{
			name: "fix first: broken ones go first, even on target", strategy: Strategy{Batch: Amount{Count: 2}}, fixFirst: true,
			hosts: func() []Host {
				h := pool(4)
				h[2].Broken = "GPUNode Pending"
				h[3].Broken, h[3].OnTarget = "GPU missing", true
				return h
			},
			want: [][]string{{"canary", "gpu-3"}, {"batch-1", "gpu-4", "gpu-1"}, {"batch-2", "gpu-2"}},
		},
		{
			name: "a named canary on target needs no second turn", strategy: Strategy{Canary: &Canary{Nodes: []string{"gpu-1"}}, Batch: Amount{Count: 9}},
			hosts: func() []Host { h := pool(2); h[0].OnTarget = true; return h },
			want:  [][]string{{"batch-1", "gpu-2"}}, done: []string{"gpu-1"},
		},
		{
			name: "everything on target", hosts: func() []Host { h := pool(1); h[0].OnTarget = true; return h },
			done: []string{"gpu-1"},
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			l, err := Build(c.strategy, c.hosts(), c.fixFirst)
			require.NoError(t, err)
			require.Equal(t, c.want, batches(l))
			require.Equal(t, c.done, l.Done)
		})
	}
}

func TestBuildRefusesWhatDoesNotFitThePool(t *testing.T) {
	for _, c := range []struct {
		name     string
		strategy Strategy
		says     string
	}{
		{"canary larger than the pool", Strategy{Canary: &Canary{Count: 5}}, "canary.count is 5, more than the pool's 4 hosts"},
		{"canary outside the pool", Strategy{Canary: &Canary{Nodes: []string{"gpu-2", "db-1"}}}, "canary.nodes[1] is db-1, which is no host of the pool: gpu-1, gpu-2, gpu-3, gpu-4"},
		{"selector that matches nothing", Strategy{Canary: &Canary{Selector: map[string]string{"zone": "z"}}}, "matches none of the pool's 4 hosts"},
		{"what Validate refuses", Strategy{Batch: Amount{Percent: 200}}, "batch.percent is 200"},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := Build(c.strategy, pool(4), false)
			var invalid *Invalid
			require.ErrorAs(t, err, &invalid)
			require.ErrorContains(t, err, c.says)
		})
	}
	_, err := Build(Strategy{}, nil, false)
	require.ErrorContains(t, err, "the pool has no hosts")
}

func TestLimitsAreLaidOutInHosts(t *testing.T) {
	for _, c := range []struct {
		name                      string
		strategy                  Strategy
		unavailable, batch, total int
	}{
		{"missing budget tolerates nothing", Strategy{Batch: Amount{Count: 4}}, 4, 0, 0},
		{"budget shares are rounded down", Strategy{Batch: Amount{Count: 4}, Budget: Budget{PerBatch: Amount{Percent: 30}, Total: Amount{Percent: 30}}}, 4, 1, 3},
		{"only a total", Strategy{Batch: Amount{Count: 4}, Budget: Budget{Total: Amount{Count: 2}}}, 4, 4, 2},
		{"only per batch", Strategy{Batch: Amount{Count: 4}, Budget: Budget{PerBatch: Amount{Count: 2}}}, 4, 2, 10},
		{"max unavailable share is rounded up", Strategy{Batch: Amount{Count: 4}, MaxUnavailable: Amount{Percent: 15}}, 2, 0, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			l, err := Build(c.strategy, pool(10), false)
			require.NoError(t, err)
			require.Equal(t, c.unavailable, l.MaxUnavailable)
			require.Equal(t, c.batch, l.Batches[1].Budget)
			require.Equal(t, c.total, l.Budget)
		})
	}
}
