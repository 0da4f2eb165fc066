package tensorfusion

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/mock"
	"github.com/stretchr/testify/require"
	"go.temporal.io/sdk/activity"
	"go.temporal.io/sdk/converter"
	"go.temporal.io/sdk/workflow"

	"github.com/refit-run/refit/workflows/protocol"
)

// holders listens to what every activity on the installation is told of the
// Lease.
func (h *harness) holders() map[string]string {
	told := map[string]string{}
	h.SetOnActivityStartedListener(func(info *activity.Info, _ context.Context, args converter.EncodedValues) {
		if !strings.HasPrefix(info.ActivityType.Name, "tensorfusion.") {
			return
		}
		var request struct {
			Holder string `json:"holder"`
		}
		if err := args.Get(&request); err != nil {
			request.Holder = err.Error()
		}
		told[info.ActivityType.Name] = request.Holder
	})
	return told
}

func TestEveryActivityOnTheInstallationIsToldWhoHoldsTheLease(t *testing.T) {
	for name, run := range map[string]func(*harness) string{
		"an upgrade, and its rollouts": func(h *harness) string {
			h.upgrade(upgradeInput())
			require.NotEmpty(h.t, h.i.rolled)
			for _, in := range h.i.rolled {
				require.Equal(h.t, holder, in.Scope.Holder)
			}
			return holder
		},
		"a rollback": func(h *harness) string {
			h.at(time.Minute, func() { h.answer(protocol.Approve) })
			h.rollback(rollbackInput())
			return holder
		},
		"a rollback under its parent's Lease": func(h *harness) string {
			in := rollbackInput()
			in.Of = &Answered{Holder: "parent", Policy: asFound, Parent: protocol.Parent{WorkflowID: "p", RunID: "r", Prefix: "rollback"}}
			h.RegisterWorkflowWithOptions(Rollback, workflow.RegisterOptions{Name: protocol.TensorFusionRollback})
			h.OnSignalExternalWorkflow("default-test-namespace", "p", "r", protocol.SignalReport, mock.Anything).Maybe().Return(nil)
			h.at(time.Minute, func() { h.answer(protocol.Approve) })
			h.run(protocol.TensorFusionRollback, in)
			return "parent"
		},
	} {
		t.Run(name, func(t *testing.T) {
			h := newHarness(t, newInstallation(t))
			told := h.holders()
			want := run(h)
			require.Greater(t, len(told), 5)
			for name, got := range told {
				require.Equal(t, want, got, name)
			}
		})
	}
}
