package tensorfusion

import (
	"encoding/json"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/refit-run/refit/activities/kube"
	"github.com/refit-run/refit/activities/tensorfusion"
	"github.com/refit-run/refit/workflows/protocol"
	"github.com/refit-run/refit/workflows/rollout"
	"github.com/refit-run/refit/workflows/rollout/plan"
	"github.com/refit-run/refit/workflows/stage"
)

func paths(ps []plan.Problem) []string {
	var out []string
	for _, p := range ps {
		out = append(out, p.Path)
	}
	return out
}

// Whatever the rollout's own run would refuse, the plan is refused for, at its
// place there: a child that fails in mid-run leaves a half upgraded cluster.
func TestAPlanIsRefusedForWhatItsRolloutsWouldRefuse(t *testing.T) {
	for doc, path := range map[string]string{
		`{"component":"worker"}`: "workers.acknowledgeLostSessions",
		`{"component":"worker","workers":{"acknowledgeLostSessions":true,"batchPercentage":150}}`:       "workers.batchPercentage",
		`{"component":"worker","workers":{"acknowledgeLostSessions":true,"batchPercentage":0}}`:         "workers.batchPercentage",
		`{"component":"worker","workers":{"acknowledgeLostSessions":true,"batchPercentage":-5}}`:        "workers.batchPercentage",
		`{"component":"worker","workers":{"acknowledgeLostSessions":true,"stall":"0s"}}`:                "workers.stall",
		`{"component":"worker","workers":{"acknowledgeLostSessions":true,"batchInterval":"-1m"}}`:       "workers.batchInterval",
		`{"component":"worker","workers":{"acknowledgeLostSessions":true},"strategy":{"approvers":-1}}`: "strategy.approvers",
		`{"component":"worker","workers":{"acknowledgeLostSessions":true},"prepare":{}}`:                "prepare",
		`{"component":"client","clients":{"perOwner":0}}`:                                               "clients.perOwner",
		`{"component":"client","clients":{"limit":"-1s"}}`:                                              "clients.limit",
		`{"component":"client","clients":{"leave":["web"]}}`:                                            "clients.leave[0]",
		`{"component":"client","strategy":{"maxDuration":"0s"}}`:                                        "strategy.maxDuration",
		`{"component":"hypervisor","strategy":{"batch":{"percent":0}}}`:                                 "strategy.batch.percent",
		`{"component":"hypervisor","prepare":{}}`:                                                       "prepare",
		`{"component":"driver"}`: "component",
	} {
		var planned Rollout
		require.NoError(t, json.Unmarshal([]byte(doc), &planned), doc)
		in := upgradeInput()
		in.Rollouts = []Rollout{{Component: Hypervisor, Pools: []string{"other"}}, planned}
		in.Rollouts[1].Pools = []string{"shared"}
		require.Contains(t, paths(in.Validate()), "rollouts[1]."+path, doc)

		child := rollout.Input{
			Scope:     tensorfusion.Scope{Target: kube.Target{Cluster: "prod"}, Release: in.Release},
			Component: planned.Component, Pool: "tf-shared", Strategy: planned.Strategy, Prepare: planned.Prepare,
			Workers: planned.Workers, Clients: planned.Clients, Parent: &protocol.Parent{},
			Goal: tensorfusion.Goal{HypervisorImage: newImage, PodName: "tf-hypervisor-"},
		}
		require.Len(t, in.Validate(), len(child.Validate()), doc)
		require.Contains(t, paths(child.Validate()), path, doc)
	}
	require.Empty(t, upgradeInput().Validate())
}

func TestNoComponentOfAPoolIsRolledTwice(t *testing.T) {
	hypervisors := func(pools ...string) Rollout { return Rollout{Component: Hypervisor, Pools: pools} }
	clients := func(pools ...string) Rollout { return Rollout{Component: Client, Pools: pools} }
	for _, c := range []struct {
		name     string
		rollouts []Rollout
		want     []string
	}{
		{"every pool after a named one", []Rollout{hypervisors("shared"), hypervisors()}, []string{"rollouts[1].pools hypervisor of pool shared is rolled by rollouts[0] already: roll each pool once"}},
		{"a named pool after every one", []Rollout{hypervisors(), hypervisors("shared")}, []string{"rollouts[1].pools hypervisor of pool shared is rolled by rollouts[0] already: roll each pool once"}},
		{"every pool twice", []Rollout{clients(), hypervisors(), clients()}, []string{"rollouts[2].pools client of every pool is rolled by rollouts[0] already: roll each pool once"}},
		{"one of several pools", []Rollout{hypervisors("a", "b"), hypervisors("c", "b")}, []string{"rollouts[1].pools hypervisor of pool b is rolled by rollouts[0] already: roll each pool once"}},
		{"a pool named twice", []Rollout{hypervisors("a", "a")}, []string{"rollouts[0].pools[1] is a, which is named already"}},
		{"no name", []Rollout{hypervisors("*")}, []string{`rollouts[0].pools[0] is "*": want the name of an entry of spec.gpuPools; leave pools out to roll every pool`}},
		{"two components of every pool", []Rollout{hypervisors(), clients()}, nil},
		{"different pools", []Rollout{hypervisors("a"), hypervisors("b"), clients("a"), clients("b")}, nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			in := upgradeInput()
			in.Rollouts = c.rollouts
			var got []string
			for _, p := range in.Validate() {
				got = append(got, p.String())
			}
			require.Equal(t, c.want, got)
		})
	}
}

// What only the cluster shows parks, because a run has stages of one name once.
func TestTwoPoolsOfOneEntryPark(t *testing.T) {
	e := &engine{settings: settings{rollouts: []Rollout{{Component: Hypervisor}}}}
	pools := []tensorfusion.Pool{{Name: "a-shared", Entry: "shared", Nodes: 1}, {Name: "b-shared", Entry: "shared"}}
	require.NoError(t, e.aim(pools), "a pool without nodes is not rolled")
	require.Len(t, e.targets, 1)
	pools[1].Nodes = 1
	err := e.aim(pools)
	w := stage.Explain(err)
	require.Equal(t, []string{protocol.Retry, protocol.Abort}, w.Answers, "it must park with answers, not fail: %v", err)
	require.Contains(t, w.Found, `entry "shared" stands for GPUPool a-shared and GPUPool b-shared`)
}
