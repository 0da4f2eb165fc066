package tensorfusion

import (
	"crypto/sha256"
	"encoding/hex"
	"slices"
	"time"

	"go.temporal.io/sdk/workflow"

	"github.com/refit-run/refit/activities/tensorfusion"
	"github.com/refit-run/refit/workflows/protocol"
	"github.com/refit-run/refit/workflows/release"
	"github.com/refit-run/refit/workflows/stage"
)

func (e *engine) verify(ctx workflow.Context, s *stage.Scope) error {
	var r tensorfusion.VerifyResult
	if err := e.do(ctx, s, tensorfusion.VerifyActivity, "verify "+e.release.Name, e.limits.Verify.D(), tensorfusion.VerifyRequest{
		Scope: e.scope, Goal: e.goal, Snapshot: e.snapshot, Rolled: e.rolled, Limit: e.limits.Verify.D(), Endpoint: true,
	}, &r); err != nil {
		return err
	}
	e.after = r.After
	if err := blocked("the cluster is not what the upgrade promises", "A workload scheduled now may fail.", r.Checks); err != nil {
		return err
	}
	if e.validation.CanaryImage == "" {
		s.Note("%d checks met; no CUDA call in a workload, as acknowledged (T20)", met(r.Checks))
		return nil
	}
	pools := e.touchedPools()
	for _, pool := range pools {
		if err := e.canaryJob(ctx, s, pool); err != nil {
			return err
		}
	}
	s.Note("%d checks met; CUDA probe passed in %d pools", met(r.Checks), len(pools))
	return nil
}

// touchedPools are the GPUPools of which a rollout took some component, in the
// plan's order.
func (e *engine) touchedPools() []string {
	var out []string
	for _, pool := range slices.Concat(e.rolled.Hypervisors, e.rolled.Workers, e.rolled.Clients) {
		out = union(out, pool)
	}
	return out
}

// canaryJob runs the CUDA probe inside a workload of the pool (T20): on the
// first host that was proven there. Where no hypervisor was replaced no host
// stands out, and the pool's scheduler chooses one that has room.
func (e *engine) canaryJob(ctx workflow.Context, s *stage.Scope, pool string) error {
	var r tensorfusion.CanaryJobResult
	if err := e.do(ctx, s, tensorfusion.CanaryJobActivity, "CUDA probe in pool "+pool, 10*time.Minute, tensorfusion.CanaryJobRequest{
		Scope: e.scope, Pool: pool, Node: e.canary[pool], Image: e.validation.CanaryImage,
		Key: probeKey(release.Key(ctx), pool), Limit: 10 * time.Minute,
	}, &r); err != nil {
		return err
	}
	e.probed(protocol.Probe{Pool: pool, Node: r.Node, Result: r.Result})
	return blocked("the CUDA probe in pool "+pool+" did not pass", "T20: a Running pod does not prove the GPU path.", r.Checks)
}

// probed keeps the last answer of each pool: one that did not pass stays in the
// record of a run that ends there.
func (e *engine) probed(p protocol.Probe) {
	e.probes = append(slices.DeleteFunc(e.probes, func(q protocol.Probe) bool { return q.Pool == p.Pool }), p)
}

// probeKeyLength leaves room for the Job's and its pod's names.
const probeKeyLength = 40

// probeKey is a part of an object's name, unique per run and pool; a long pool
// name is cut and told apart by a digest.
func probeKey(run, pool string) string {
	key := run[:8] + "-" + pool
	if len(key) <= probeKeyLength {
		return key
	}
	sum := sha256.Sum256([]byte(pool))
	return key[:probeKeyLength-9] + "-" + hex.EncodeToString(sum[:4])
}
