package tensorfusion

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/refit-run/refit/activities/gpu"
	"github.com/refit-run/refit/workflows/gpunode"
)

func TestTheSetUpOfAPlanReachesItsRolloutAndNoOther(t *testing.T) {
	i := newInstallation(t)
	in := upgradeInput()
	in.Rollouts = []Rollout{
		{Component: Hypervisor, Pools: []string{"shared"}},
		{Component: Hypervisor, Pools: []string{"training"}, Prepare: &gpunode.Prepare{MIG: &gpu.MIGRequest{Config: "version: v1"}}},
	}
	newHarness(t, i).upgrade(in)
	require.Len(t, i.rolled, 2)
	require.Nil(t, i.rolled[0].Prepare)
	require.Equal(t, "training", i.rolled[1].Entry)
	require.Equal(t, "version: v1", i.rolled[1].Prepare.MIG.Config)
}

func TestASetUpOfAnotherComponentIsRefusedWithItsPath(t *testing.T) {
	in := upgradeInput()
	in.Rollouts = append(in.Rollouts, Rollout{Component: Client, Prepare: &gpunode.Prepare{MIG: &gpu.MIGRequest{Config: "version: v1"}}})
	problems := in.Validate()
	require.Len(t, problems, 1)
	require.Equal(t, "rollouts[1].prepare", problems[0].Path)
}
