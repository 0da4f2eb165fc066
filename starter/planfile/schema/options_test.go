package schema

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/refit-run/refit/starter/planfile"
)

const workersPlan = `kind: Rollout
scope:
  target: {cluster: prod}
  release: {name: tf, namespace: tf}
component: worker
pool: tf-shared
entry: shared
workers:
  acknowledgeLostSessions: true
  batchPercentage: 50
`

// TestLimitsOutOfRangeHaveTheirPlace refuses what the controller would take
// for something else, such as 0 % for one batch of everything (T27).
func TestLimitsOutOfRangeHaveTheirPlace(t *testing.T) {
	_, err := planfile.Load(Kinds(), "plan.yaml", []byte(workersPlan), nil)
	require.NoError(t, err)
	for set, want := range map[string]string{"0": "1 or more", "-1": "1 or more", "101": "100 or less"} {
		_, err := planfile.Load(Kinds(), "plan.yaml", []byte(workersPlan), []string{"workers.batchPercentage=" + set})
		require.ErrorContains(t, err, "workers.batchPercentage is the number "+set+": want "+want)
	}
	_, err = planfile.Load(Kinds(), "plan.yaml", []byte(workersPlan), []string{"workers.stall=0s"})
	require.ErrorContains(t, err, "workers.stall is 0s")
	_, err = planfile.Load(Kinds(), "plan.yaml", []byte(workersPlan), []string{"component=client", "clients.perOwner=0"})
	require.ErrorContains(t, err, "clients.perOwner is the number 0: want 1 or more")
}
