package e2e

import (
	"context"
	"math/rand/v2"
	"os"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/refit-run/refit/workflows/protocol"
)

// TestKills kills the worker with -9 at every stage boundary and at seeded
// points in between. The run must end as an undisturbed one: same stages, same
// versions, every node replaced exactly once.
func TestKills(t *testing.T) {
	w := up(t)
	o := observe(t, w)
	seed := uint64(20260301)
	if s := os.Getenv("REFIT_TEST_SEED"); s != "" {
		n, err := strconv.ParseUint(s, 10, 64)
		require.NoError(t, err, "REFIT_TEST_SEED")
		seed = n
	}
	t.Logf("seed %d", seed)
	rnd := rand.New(rand.NewPCG(seed, 1))

	run := w.start(append(quickPlan, "rollouts[0].strategy.gates=none")...)
	killed := map[string]bool{}
	seeded := 0
	var last protocol.Status
	err := wait.PollUntilContextTimeout(context.Background(), 50*time.Millisecond, 10*time.Minute, true, func(context.Context) (bool, error) {
		s, err := w.status(run)
		if err != nil {
			return false, nil
		}
		last = s
		if s.WaitingFor != nil && s.WaitingFor.Kind == protocol.WaitParked {
			return false, assert.AnError
		}
		if s.Phase == protocol.PhaseDone || s.Phase == protocol.PhaseAborted {
			return true, nil
		}
		switch {
		case !killed[s.Stage]:
			killed[s.Stage] = true
		case seeded < 5 && s.Section != "" && rnd.IntN(10) == 0:
			seeded++
		default:
			return false, nil
		}
		t.Logf("kill -9 in stage %s, section %q", s.Stage, s.Section)
		w.killWorker()
		w.startWorker()
		return false, nil
	})
	require.NoError(t, err, "last status: %+v", last)
	r := w.receipt(run)
	assert.Equal(t, protocol.OutcomeDone, r.Outcome)
	assert.Equal(t, "2.17.0", r.After["controller"])
	assert.Equal(t, newImage, r.After["hypervisor"])
	for _, s := range r.Stages {
		assert.Equal(t, protocol.Done, s.State, s.Name)
	}
	assert.Equal(t, 4, o.deletions(), "every node exactly once, however often the worker died")
	assert.Empty(t, o.violations(1, 2))
	assert.GreaterOrEqual(t, len(killed), 8, "stages at which the worker was killed: %v", killed)
	w.replay(run)
}
