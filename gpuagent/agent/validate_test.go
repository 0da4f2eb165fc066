package agent

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/refit-run/refit/activities/gpu"
)

func TestAHealthyHostPassesEveryLevelAgainstItsBaseline(t *testing.T) {
	w := newWorld(t)
	b := w.baseline()
	require.Len(t, b.Devices, 2)
	for _, level := range []gpu.Level{gpu.Quick, gpu.Standard} {
		r := w.validate(gpu.ValidateRequest{Level: level, Baseline: b})
		require.Empty(t, failing(r), "level %s", level)
		require.Equal(t, gpu.Pass, r.Verdict, "level %s: %+v", level, r.Checks)
		require.Greater(t, r.Passed, 50)
		require.Len(t, r.Devices, 2)
	}
}
