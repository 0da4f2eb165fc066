package rollout

import (
	"fmt"
	"slices"

	"go.temporal.io/sdk/workflow"

	"github.com/refit-run/refit/activities/finding"
	"github.com/refit-run/refit/activities/gpu"
	"github.com/refit-run/refit/workflows/gpunode"
	"github.com/refit-run/refit/workflows/protocol"
	"github.com/refit-run/refit/workflows/rollout/plan"
	"github.com/refit-run/refit/workflows/stage"
)

// proofStage names the stage that follows the batches.
const proofStage = "proof"

// proofs validates the hosts that are on target without a batch having proven
// them: replaced by themselves, or by an earlier run that was ended before
// their verdict. A new pod of the right image is not the proof of a node
// (design, contract 15). Without such hosts there is no stage.
func (h *hypervisors) proofs(ctx workflow.Context) error {
	open := h.unvalidated()
	if h.in.Validation != ValidateAgent || len(open) == 0 {
		return nil
	}
	return h.Execute(ctx, stage.Stage{
		Name:    h.name(proofStage),
		Purpose: fmt.Sprintf("validate %s that came on target without a batch of this run", hosts(len(open))),
		Mutates: true,
		Do:      h.prove,
	})
}

// unvalidated lists the hosts on target that have no good verdict yet, in the
// order of the layout.
func (h *hypervisors) unvalidated() []string {
	var out []string
	add := func(name string) {
		if v := h.rows[name].Verdict; v != gpu.Pass && v != gpu.Degraded {
			out = append(out, name)
		}
	}
	for _, b := range h.layout.Batches {
		for _, name := range b.Hosts {
			if h.plan.Hosts[name].Status == plan.Already {
				add(name)
			}
		}
	}
	for _, name := range h.layout.Done {
		add(name)
	}
	return out
}

// prove runs the open hosts through shards, which find their pods on target
// and ask the agents alone. Retry takes those that are still open.
func (h *hypervisors) prove(ctx workflow.Context, s *stage.Scope) error {
	if _, err := h.look(ctx, s); err != nil {
		return err
	}
	for part := range slices.Chunk(h.unvalidated(), ShardSize) {
		h.waves++
		if err := s.Section(ctx, "validation of hosts on target", gpunode.ValidationLimit(h.in.Level, h.in.Expect), func(ctx workflow.Context) error {
			s.Current(part...)
			_, err := h.shards(ctx, s, plan.Decision{Batch: proofStage, Hosts: part})
			return err
		}); err != nil {
			return err
		}
	}
	open := h.unvalidated()
	if len(open) == 0 {
		s.Note("every host that was on target has a verdict of its agent")
		return nil
	}
	var found []finding.Finding
	for _, name := range open {
		if f := h.rows[name].Failure; f != nil {
			found = append(found, *f)
		}
	}
	return stage.Parking(fmt.Sprintf("%s on target without a good verdict: %s", hosts(len(open)), shorten(open)),
		"their pods are of the target, but nothing proves that their GPUs compute",
		"repair the hosts, then answer retry: they are validated again", []string{protocol.Retry}, found...)
}
