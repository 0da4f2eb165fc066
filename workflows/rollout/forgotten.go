package rollout

import (
	"errors"
	"fmt"
	"slices"

	"go.temporal.io/sdk/workflow"

	"github.com/refit-run/refit/workflows/gpunode"
	"github.com/refit-run/refit/workflows/stage"
)

// remind gives foreign automation the hosts back that a GPUNode kept it off and
// was ended by force before it could. Without such hosts there is no stage.
func (h *hypervisors) remind(ctx workflow.Context) error {
	names := workflow.DeterministicKeys(h.seen)
	names = slices.DeleteFunc(names, func(name string) bool { return !h.seen[name].KeptOff })
	if len(names) == 0 {
		return nil
	}
	return h.Execute(ctx, stage.Stage{
		Name:    h.name("give-back"),
		Purpose: fmt.Sprintf("give foreign automation %s back that a run which was ended has kept it off", hosts(len(names))),
		Mutates: true, Skippable: true,
		Do: func(ctx workflow.Context, s *stage.Scope) error {
			var failed error
			for _, name := range names {
				failed = errors.Join(failed, gpunode.GiveBack(ctx, s, h.in.Scope.Target, name))
			}
			return failed
		},
	})
}
