package tensorfusion

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	"go.temporal.io/sdk/workflow"

	"github.com/refit-run/refit/activities/tensorfusion"
	"github.com/refit-run/refit/workflows/protocol"
	"github.com/refit-run/refit/workflows/release"
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
	r.Rollback = e.child
	if e.plan.Digest != "" {
		r.Plan = &e.plan
	}
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
	if r.Outcome == protocol.OutcomeDone && e.policy != tensorfusion.PolicyKeepOff {
		r.LeftBehind = append(r.LeftBehind, e.heldPools()...)
	}
	if r.Outcome == protocol.OutcomeDone && e.kind == protocol.TensorFusionRollback {
		r.LeftBehind = append(r.LeftBehind, notUndone...)
	}
	return r
}

// leftBehind lists what a run that did not reach its end leaves in the cluster.
func (e *engine) leftBehind() []string {
	left := append(slices.Clone(e.left), e.heldPools()...)
	if e.upgraded.Revision != 0 {
		left = append(left, fmt.Sprintf("release %s stands at revision %d (%s)", e.release.Name, e.upgraded.Revision, e.upgraded.Chart))
	}
	if n := e.proven(); n > 0 {
		left = append(left, fmt.Sprintf("%d nodes run the hypervisor of the plan", n))
	}
	return left
}

// heldPools lists the pools whose auto update this run leaves off.
func (e *engine) heldPools() []string {
	if !e.held || e.restored {
		return nil
	}
	var left []string
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
	req, err := e.receiptRequest(ctx, protocol.OutcomeDone)
	if err != nil {
		return err
	}
	var r tensorfusion.ReceiptResult
	if err := e.do(ctx, s, tensorfusion.ReceiptActivity, "store the receipt", time.Minute, req, &r); err != nil {
		return err
	}
	e.recorded(r)
	s.Note("%s and ConfigMap %s", r.Artifact.URL, r.ConfigMap)
	return nil
}

// recorded lists what the receipt was stored as.
func (e *engine) recorded(r tensorfusion.ReceiptResult) {
	e.run.Artifact(r.Artifact)
	if r.Hosts.URL != "" {
		e.run.Artifact(r.Hosts)
	}
}

func (e *engine) receiptRequest(ctx workflow.Context, outcome protocol.Outcome) (tensorfusion.ReceiptRequest, error) {
	doc := e.receipt(outcome)
	doc.Plan = nil // its diff is an artifact of its own; a ConfigMap holds 1 MiB
	body, err := json.Marshal(doc)
	if err != nil {
		return tensorfusion.ReceiptRequest{}, err
	}
	rows, err := json.Marshal(e.rows)
	if err != nil {
		return tensorfusion.ReceiptRequest{}, err
	}
	return tensorfusion.ReceiptRequest{Scope: e.scope, Key: e.key(ctx), JSON: body, Hosts: rows}, nil
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
		e.run.Cleanup("closing-receipt", "store the record of a run that ended early", func(ctx workflow.Context) error {
			req, err := e.receiptRequest(ctx, outcome)
			if err != nil {
				return err
			}
			var r tensorfusion.ReceiptResult
			if err := release.Last(ctx, e.cluster, tensorfusion.ReceiptActivity, "store the receipt", req, &r); err != nil {
				return err
			}
			e.recorded(r)
			return nil
		})
	}
	e.unlock()
	return e.complete(e.run.Close(outcome)), nil
}
