package tensorfusion

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/refit-run/refit/activities/finding"
	"github.com/refit-run/refit/activities/tensorfusion"
	"github.com/refit-run/refit/workflows/protocol"
)

func TestWhatChangesBesideTheHelmStepParksAndRetryTakesItAsItIs(t *testing.T) {
	i := newInstallation(t)
	i.objects, i.present = map[string]string{"ConfigMap/tf/rules": "before"}, map[string]string{"ConfigMap/tf/rules": "after"}
	i.controller = []tensorfusion.Check{{Row: "T10", Class: finding.Wait, Findings: []finding.Finding{{Row: "T10", Object: "ConfigMap/tf/rules", Found: "changed"}}}}
	i.told = []string{"digest"}
	h := newHarness(t, i)
	h.at(time.Minute, func() {
		require.Contains(t, h.waits(protocol.WaitParked, "helm").Found, "T10 ConfigMap/tf/rules")
		i.controller = nil
		h.answer(protocol.Retry)
	})
	require.Equal(t, protocol.OutcomeDone, h.upgrade(upgradeInput()).Outcome)
	require.Len(t, i.awaited, 2)
	require.Equal(t, i.objects, i.awaited[0].Snapshot.Objects)
	require.Equal(t, i.present, i.awaited[1].Snapshot.Objects, "who answered had been told")
	require.Empty(t, i.awaited[0].Told)
	require.Equal(t, i.told, i.awaited[1].Told)
	for _, r := range i.awaited {
		require.Equal(t, i.revision, r.FromRevision)
	}
	require.Empty(t, i.drifts[len(i.drifts)-1].Snapshot.Objects, "later steps compare no objects")
}
