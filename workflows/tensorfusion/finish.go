package tensorfusion

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"go.temporal.io/sdk/workflow"

	"github.com/refit-run/refit/activities/tensorfusion"
	"github.com/refit-run/refit/workflows/protocol"
	"github.com/refit-run/refit/workflows/release"
	"github.com/refit-run/refit/workflows/rollout"
	"github.com/refit-run/refit/workflows/stage"
)

// receipt is the record of the run as it stands now.
func (e *engine) receipt(outcome protocol.Outcome) protocol.Receipt {
	return e.complete(e.run.Receipt(outcome))
}

// complete adds to the sequencer's record what only this workflow knows.
func (e *engine) complete(r protocol.Receipt) protocol.Receipt {
	r.Started = e.started
	r.PlanDigest = e.plan.Digest
	r.Before, r.After = versions(e.pre.Source), versions(e.after)
	r.Acknowledged = e.acknowledge
	r.Probes = e.probes
	r.Rollback = e.child
	if e.plan.Digest != "" {
		r.Plan = &e.plan
	}
	r.LeftBehind = append(r.LeftBehind, e.left...)
	if r.Outcome == protocol.OutcomeAborted {
		r.LeftBehind = append(r.LeftBehind, e.leftBehind()...)
	}
	if e.child != nil { // a rollback that ended well has undone the rest
		for _, l := range e.child.LeftBehind {
			if !slices.Contains(r.LeftBehind, l) {
				r.LeftBehind = append(r.LeftBehind, l)
			}
		}
	}
	done := r.Outcome == protocol.OutcomeDone || r.Outcome == protocol.OutcomeNoChange // which a rollback holds before, too
	if done && e.policy != tensorfusion.PolicyKeepOff {
		r.LeftBehind = append(r.LeftBehind, e.heldPools()...)
	}
	if names := e.rolled.LeftHosts; r.Outcome == protocol.OutcomeDone && len(names) > 0 {
		shown := names[:min(len(names), shownHosts)]
		r.LeftBehind = append(r.LeftBehind, fmt.Sprintf("their batch was skipped, they keep the hypervisor they had: %s (%d of %d shown)",
			strings.Join(shown, ", "), len(shown), len(names)))
	}
	if r.Outcome == protocol.OutcomeDone && e.kind == protocol.TensorFusionRollback {
		r.LeftBehind = append(r.LeftBehind, notUndone...)
	}
	return r
}

// leftBehind lists what a run that did not reach its end leaves in the cluster.
func (e *engine) leftBehind() []string {
	left := e.heldPools()
	if e.upgraded.Revision != 0 {
		left = append(left, fmt.Sprintf("release %s stands at revision %d (%s)", e.release.Name, e.upgraded.Revision, e.upgraded.Chart))
	}
	if n := e.proven(); n > 0 {
		left = append(left, fmt.Sprintf("%d nodes run the hypervisor of the plan", n))
	}
	return left
}

// heldPools lists where this run leaves auto update off.
func (e *engine) heldPools() []string {
	var left []string
	if e.restored {
		for _, o := range e.off {
			left = append(left, o.String())
		}
		return left
	}
	if !e.held {
		return nil
	}
	for _, p := range e.before {
		left = append(left, fmt.Sprintf("pool %s: auto update stays off (it was hypervisor=%t, worker=%t, client=%t)",
			p.Pool, p.AutoHypervisor, p.AutoWorker, p.AutoClient))
	}
	return left
}

// proven counts the hosts that a rollout found or brought on target.
func (e *engine) proven() (n int) {
	for _, h := range e.rows {
		if h.Outcome == tensorfusion.OutcomeReplaced || h.Outcome == tensorfusion.OutcomeAlready {
			n++
		}
	}
	return n
}

// storeReceipt writes the receipt as artifact and ConfigMap (contract 16).
func (e *engine) storeReceipt(ctx workflow.Context, s *stage.Scope) error {
	r, err := e.stored(ctx, protocol.OutcomeDone).Store(func(summary string, req tensorfusion.ReceiptRequest, out *tensorfusion.ReceiptResult) error {
		return e.do(ctx, s, tensorfusion.ReceiptActivity, summary, time.Minute, req, out)
	})
	if err == nil {
		s.Note("%s and ConfigMap %s", r.Artifact.URL, r.ConfigMap)
	}
	return err
}

// stored is what is kept of the run; its diff is an artifact of its own.
func (e *engine) stored(ctx workflow.Context, outcome protocol.Outcome) release.Record[rollout.HostRow] {
	return release.Record[rollout.HostRow]{Run: e.run, Scope: e.scope, Key: release.Key(ctx), Rows: e.rows, Receipt: func() any {
		doc := e.receipt(outcome)
		doc.Plan = nil
		return doc
	}}
}

// finish closes the run: the Lease goes back, the receipt is the result.
func (e *engine) finish(err error) (protocol.Receipt, error) {
	outcome := protocol.OutcomeDone
	switch {
	case e.locked != nil:
		e.run.Close(protocol.OutcomeAborted)
		return protocol.Receipt{}, e.locked
	case errors.Is(err, stage.ErrAborted):
		outcome = protocol.OutcomeAborted
	case errors.Is(err, stage.ErrRolledBack):
		outcome = protocol.OutcomeRolledBack
	case err != nil:
		e.unlock()
		e.run.Close(protocol.OutcomeAborted)
		return protocol.Receipt{}, err
	case e.planOnly:
		outcome = protocol.OutcomePlanned
	case e.pre.NoChange:
		outcome = protocol.OutcomeNoChange
	}
	if e.held && outcome != protocol.OutcomeDone {
		e.stored(e.run.Context(), outcome).Close("closing-receipt")
	}
	e.unlock()
	return e.complete(e.run.Close(outcome)), nil
}
