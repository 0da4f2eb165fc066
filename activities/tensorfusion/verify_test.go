package tensorfusion

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

func rowsNotOK(checks []Check) []string {
	var out []string
	for _, c := range checks {
		if !c.OK {
			out = append(out, c.Row)
		}
	}
	return out
}

// settle gives the world a running controller, phases and a proven pod per node.
func (i *installation) settle(nodes ...string) {
	i.t.Helper()
	for _, n := range nodes {
		i.addNode(n)
	}
	i.world.control()
	i.runController()
	i.hosts()
	clusters := i.admin.Dynamic.Resource(clustersGVR)
	u, err := clusters.Get(i.t.Context(), i.cluster, metav1.GetOptions{})
	require.NoError(i.t, err)
	u.Object["status"] = map[string]any{"phase": phaseRunning}
	_, err = clusters.UpdateStatus(i.t.Context(), u, metav1.UpdateOptions{})
	require.NoError(i.t, err)
}

func TestVerifyPassesASettledInstallationAndNamesWhatIsMissing(t *testing.T) {
	i := install(t)
	i.settle("a", "b")
	request := VerifyRequest{Scope: i.scope, Goal: testGoal(), Rolled: Rolled{Hypervisors: []string{i.pool}, Workers: []string{i.pool}, Clients: []string{i.pool}}, Limit: 20 * time.Second}
	out, err := i.activities.Verify(t.Context(), request)
	require.NoError(t, err)
	assert.Empty(t, rowsNotOK(out.Checks))
	assert.Equal(t, "2.16.3", out.After.Controller)
	assert.Equal(t, newHypervisor, out.After.Hypervisor)

	request.Goal.HypervisorImage = "registry.test/hypervisor:2.18.0"
	request.Limit = time.Second
	out, err = i.activities.Verify(t.Context(), request)
	require.NoError(t, err, "past its deadline it reports instead of failing")
	assert.Equal(t, []string{"T14", "T19"}, rowsNotOK(out.Checks))

	request.Rolled = Rolled{}
	request.Snapshot = Snapshot{GPUs: 9, Inventory: "another"}
	out, err = i.activities.Verify(t.Context(), request)
	require.NoError(t, err)
	assert.Equal(t, []string{"P14"}, rowsNotOK(out.Checks))
}

func TestForecastTellsWhatTheHoldCannotPrevent(t *testing.T) {
	for _, tc := range []struct {
		world  string
		change func(*Observation)
		says   string
	}{
		{"nothing known", func(*Observation) {}, ""},
		{"the isolation policy flips between 2.17 controllers", func(o *Observation) {
			o.Source.Controller, o.Source.IsolationPolicy, o.Target.IsolationPolicy = o.Target.Controller, "static", "dynamic"
		}, "isolation policy"},
		{"the line before 2.14", func(o *Observation) { o.Source.Controller = imageVersion("x:2.13.0") }, "same host port"},
		{"a target below 2.11.2", func(o *Observation) { o.Target.Controller = imageVersion("x:2.9.0") }, "when they start"},
		{"another worker template", func(o *Observation) {
			o.Target.Clusters[0].Spec.GPUPools[0].Spec.Components.Worker = map[string]any{"image": "new"}
		}, "deleted together"},
		{"an unknown version", func(o *Observation) { o.Target.Controller = nil }, "not known"},
	} {
		t.Run(tc.world, func(t *testing.T) {
			o := soundWorld()
			tc.change(o)
			found := forecast(o)
			if tc.says == "" {
				assert.Empty(t, found)
				return
			}
			require.NotEmpty(t, found)
			text := ""
			for _, f := range found {
				assert.Equal(t, "P11", f.Row)
				text += f.Found
			}
			assert.Contains(t, text, tc.says)
		})
	}
}
