package rollout

import (
	"time"

	"go.temporal.io/sdk/workflow"

	"github.com/refit-run/refit/activities/finding"
	"github.com/refit-run/refit/activities/gpu"
	"github.com/refit-run/refit/activities/tensorfusion"
	"github.com/refit-run/refit/workflows/gpunode"
)

// knownLimit is the deadline of a few lists.
const knownLimit = time.Minute

// expect returns what the agent of a host is told to expect: the plan's
// declaration, with what it leaves out of TensorFusion asked of the cluster for
// all hosts at once. When the cluster does not tell, no host is proven.
func (s *shard) expect(ctx workflow.Context) func(host string) *gpu.Expect {
	declared := func(string) *gpu.Expect { return s.in.Expect }
	if !gpunode.Incomplete(s.in.Expect) {
		return declared
	}
	req := tensorfusion.GPUHostsRequest{Target: s.in.Scope.Target}
	var open []int
	for i, h := range s.in.Hosts {
		if s.rows[i].Outcome != tensorfusion.OutcomeFailed {
			req.Nodes, open = append(req.Nodes, h.Name), append(open, i)
		}
	}
	if len(open) == 0 {
		return declared
	}
	var known tensorfusion.GPUHostsResult
	if err := s.cluster(ctx, tensorfusion.GPUHostsActivity, "ask for the hypervisors' ports and the client pods of "+shorten(req.Nodes), knownLimit, req, &known); err != nil {
		f, _, told := finding.Of(err)
		if !told {
			f = finding.Finding{Object: "cluster " + s.in.Scope.Target.Cluster, Expected: "the hypervisors' ports and the client pods", Found: message(err),
				Next: "look at the worker's log, then answer retry: the hosts are validated again"}
		}
		for _, i := range open {
			s.unproven(i, f)
		}
		return declared
	}
	return func(host string) *gpu.Expect { return gpunode.Complete(s.in.Expect, known.Hosts[host]) }
}
