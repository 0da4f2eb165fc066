package tensorfusion

import (
	"encoding/json"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/refit-run/refit/activities/kube"
)

func TestWhatAReleaseMakesOutdatedIsToldPerPool(t *testing.T) {
	for _, tc := range []struct {
		name   string
		change func(*Observation)
		want   []Outdated
	}{
		{"nothing", func(*Observation) {}, nil},
		{"the hypervisors alone", func(o *Observation) {
			o.Target.Clusters[0].Spec.GPUPools[0].Spec.Components.Hypervisor.Image = "another"
		}, nil},
		{"the worker template", func(o *Observation) {
			o.Target.Clusters[0].Spec.GPUPools[0].Spec.Components.Worker = map[string]any{"image": "another"}
		}, []Outdated{{Pool: "tensor-fusion-shared", Workers: true}}},
		{"the client's images", func(o *Observation) {
			o.Target.Clusters[0].Spec.GPUPools[0].Spec.Components.Client = map[string]any{"remoteModeImage": "another"}
		}, []Outdated{{Pool: "tensor-fusion-shared", Clients: true}}},
		{"the image of workers in the ProviderConfig", func(o *Observation) {
			p := FusionProvider{}
			p.Spec.Vendor, p.Spec.Images.RemoteWorker = nvidiaVendor, "another"
			o.Target.Providers = []FusionProvider{p}
		}, []Outdated{{Pool: "tensor-fusion-shared", Workers: true}}},
		{"a cluster that the chart does not manage", func(o *Observation) { o.Target.Clusters = nil }, nil},
	} {
		t.Run(tc.name, func(t *testing.T) {
			o := soundWorld()
			tc.change(o)
			assert.Equal(t, tc.want, outdated(o))
		})
	}
}

// A person left it as it was; that it still serves is judged all the same.
func TestAHostThatWasLeftIsNotJudgedByTheTarget(t *testing.T) {
	o := soundWorld()
	require.NotEmpty(t, o.Hosts)
	host := &o.Hosts[0]
	host.pods[0].Spec.Containers[0].Image = oldHypervisor
	o.Rolled.Hypervisors = []string{"tensor-fusion-shared"}
	require.NotEmpty(t, checkHosts(o))
	require.NotEmpty(t, checkOnePod(o))
	o.Rolled.LeftHosts = []string{host.name}
	assert.Empty(t, checkHosts(o))
	assert.Empty(t, checkOnePod(o))
	host.pods[0].Status.Conditions = nil
	assert.NotEmpty(t, checkOnePod(o))
}

// A pool that stays off never says synced: sealing must not wait for it.
func TestSealingWaitsOnlyForThePoolsThatAreSwitchedOn(t *testing.T) {
	w := newWorld(t)
	w.create("gpupools", w.pool, map[string]any{
		"spec": map[string]any{}, "status": map[string]any{"readyNodes": int64(1), "componentStatus": map[string]any{"hypervisorConfigSynced": false}},
	})
	said := func(want PoolPolicy) string {
		var found string
		require.NoError(t, w.client.Await(t.Context(), kube.Wait{What: "pools", Limit: holdLimit}, func(objects kube.Objects) (bool, string, error) {
			var err error
			found, err = poolsSealed(objects[0], map[string]PoolPolicy{w.pool: want})
			return true, "", err
		}, kube.Selection{Resource: poolsGVR}))
		return found
	}
	assert.Contains(t, said(PoolPolicy{AutoHypervisor: true}), "GPUPool/"+w.pool+" is at 0 %, not synced")
	assert.Empty(t, said(PoolPolicy{}))
}

// The flags are off because an earlier run was ended in the middle: what comes
// back is what that run found.
func TestThePolicyOfAnEarlierHoldIsTheOneThatComesBack(t *testing.T) {
	o := soundWorld()
	c := &o.Clusters[0]
	found := o.policies()
	require.True(t, found[0].AutoHypervisor)
	note, err := json.Marshal(found)
	require.NoError(t, err)
	c.Annotations = map[string]string{annotationPolicyBefore: string(note)}
	policy := c.Spec.GPUPools[0].Spec.Policy()
	policy.AutoHypervisor = false
	assert.Equal(t, found, o.policies())
	policy.AutoClient = true
	assert.True(t, o.policies()[0].AutoClient, "somebody has set it since")
}
