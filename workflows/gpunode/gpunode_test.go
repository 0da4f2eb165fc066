package gpunode

import (
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/mock"
	"github.com/stretchr/testify/require"
	"go.temporal.io/sdk/temporal"
	"go.temporal.io/sdk/workflow"

	"github.com/refit-run/refit/activities/gpu"
	"github.com/refit-run/refit/activities/lease"
	"github.com/refit-run/refit/activities/tensorfusion"
	"github.com/refit-run/refit/workflows/protocol"
	"github.com/refit-run/refit/workflows/stage"
	"github.com/refit-run/refit/workflows/window"
)

func retry() protocol.Answer { return protocol.Answer{By: "ann"} }

func TestAHostIsPreparedProvenAndGivenBack(t *testing.T) {
	h := &host{}
	r := newHarness(t, h).run(input())
	require.Equal(t, protocol.OutcomeDone, r.Outcome)
	require.Equal(t, []string{"lock", "plan", "keep off", "cordon node-uid", "baseline", "prepare", "validate", "uncordon", "give back", "receipt", "unlock"}, h.log)
	require.Empty(t, h.cordoned)
	require.Empty(t, h.label)
	require.Len(t, r.Prepared.Actions, 1)
	require.Equal(t, gpu.Pass, r.Validation.Verdict)
	require.Empty(t, r.LeftBehind)

	own := lease.Held{Namespace: "kube-system", Release: "gpunode-gpu-1", Holder: "me"}
	require.Equal(t, []lease.Held{own, own, own, own}, h.leases, "what changes the Node looks at the Lease")

	require.Equal(t, gpu.Standard, h.validated[0].Level)
	require.Equal(t, map[string]string{"VBIOS": "96.00"}, h.validated[0].Baseline.Devices[0].Readings,
		"what was changed on purpose is not compared")

	var stored Result
	require.NoError(t, json.Unmarshal(h.stored[0].JSON, &stored))
	require.Equal(t, tensorfusion.Release{Name: "gpunode-gpu-1", Namespace: "kube-system"}, h.stored[0].Release)
	require.Equal(t, r.Outcome, stored.Outcome)
	require.Equal(t, r.Validation, stored.Validation)
	require.Equal(t, "receipt.json", r.Artifacts[0].Name)
}

// One ConfigMap for every host of a rollout would be a thousand of them.
func TestWhoIsSpokenForByAnotherRunStoresNoReceipt(t *testing.T) {
	h := &host{}
	in := input()
	in.Unattended = true
	require.Equal(t, protocol.OutcomeDone, newHarness(t, h).run(in).Outcome)
	require.Empty(t, h.stored)
}

func TestAHostThatIsRightIsOnlyValidatedAndComparedInFull(t *testing.T) {
	h := &host{layout: true}
	r := newHarness(t, h).run(input())
	require.Empty(t, r.Prepared.Actions)
	require.Contains(t, h.validated[0].Baseline.Devices[0].Readings, "MIG layout")
}

func TestWithoutPrepareAndCordonTheHostIsOnlyValidated(t *testing.T) {
	h := &host{}
	in := input()
	in.Prepare, in.Cordon = nil, false
	in.Baseline = &gpu.Baseline{Node: "gpu-1", Driver: "570"}
	newHarness(t, h).run(in)
	require.Equal(t, []string{"lock", "keep off", "validate", "give back", "receipt", "unlock"}, h.log)
	require.Equal(t, "570", h.validated[0].Baseline.Driver, "the baseline given is the one compared with")
}

func TestPlanOnlyShowsTheActionsAndTouchesNothing(t *testing.T) {
	h := &host{}
	in := input()
	in.PlanOnly = true
	r := newHarness(t, h).run(in)
	require.Equal(t, protocol.OutcomePlanned, r.Outcome)
	require.Len(t, r.Planned.Actions, 1)
	require.Equal(t, []string{"lock", "plan", "unlock"}, h.log)
}

func TestTenantsInstancesAreSparedWhateverThePlanSays(t *testing.T) {
	h := &host{tenants: "GPUPool/shared has defaultIsolationMode partitioned"}
	r := newHarness(t, h).run(input())
	require.Len(t, h.prepared, 2, "plan and set-up")
	for _, p := range h.prepared {
		require.True(t, p.MIG.ModeOnly)
		require.Equal(t, input().Prepare.MIG.Config, p.MIG.Config)
	}
	require.Equal(t, 1, strings.Count(strings.Join(r.Warnings, "\n"), h.tenants), "told once: %q", r.Warnings)

	// They may come while the run is parked.
	h = &host{verdict: gpu.Unfit}
	w := newHarness(t, h)
	w.at(time.Hour, func() {
		w.waits("validate")
		h.do(func() { h.verdict, h.tenants = "", "GPU/gpu-0 has status.isolationMode partitioned" })
		w.SignalWorkflow(protocol.Retry, retry())
	})
	require.Equal(t, protocol.OutcomeDone, w.run(input()).Outcome)
	require.Len(t, h.prepared, 3)
	require.False(t, h.prepared[1].MIG.ModeOnly)
	require.True(t, h.prepared[2].MIG.ModeOnly)
}

func TestABadVerdictParksAndTheNodeStaysCordoned(t *testing.T) {
	h := &host{verdict: gpu.Unfit}
	w := newHarness(t, h)
	w.at(time.Hour, func() {
		waiting := w.waits("validate")
		require.Contains(t, waiting.Found, "CUDA call GPU-1: expected pass, found wrong result")
		require.NotContains(t, waiting.Answers, protocol.Skip, "there is no way around the proof")
		require.Equal(t, "us", h.cordoned)
		require.Equal(t, "ours", h.label)
		// The host is repaired, which takes a reboot: its layout is gone.
		h.do(func() { h.verdict, h.layout = "", false })
		w.SignalWorkflow(protocol.Retry, retry())
	})
	r := w.run(input())
	require.Equal(t, protocol.OutcomeDone, r.Outcome)
	require.Equal(t, []string{"prepare", "validate", "prepare", "validate", "uncordon", "give back", "receipt", "unlock"}, h.log[5:])
	require.True(t, h.layout)
}

func TestAResetIsReportedAndThePersonDoesIt(t *testing.T) {
	h := &host{needs: []gpu.Need{{Kind: gpu.NeedsReset, Device: "GPU-1", Why: "the MIG mode is pending until the GPU is reset"}}}
	w := newHarness(t, h)
	w.at(time.Hour, func() {
		require.Contains(t, w.waits("prepare").Helps, "reset the GPU")
		h.do(func() { h.needs = nil })
		w.SignalWorkflow(protocol.Retry, retry())
	})
	r := w.run(input())
	require.Equal(t, protocol.OutcomeDone, r.Outcome)
	require.Len(t, r.Prepared.Actions, 2, "what both attempts did")
}

func TestDegradedIsAWarningUnlessStrict(t *testing.T) {
	h := &host{verdict: gpu.Degraded}
	r := newHarness(t, h).run(input())
	require.Equal(t, protocol.OutcomeDone, r.Outcome)
	require.Contains(t, r.Warnings[len(r.Warnings)-1], "degraded")

	strict := input()
	strict.Strict = true
	w := newHarness(t, &host{verdict: gpu.Degraded})
	w.at(time.Hour, func() {
		w.waits("validate")
		w.SignalWorkflow(protocol.Abort, retry())
	})
	require.Equal(t, protocol.OutcomeAborted, w.run(strict).Outcome)
}

func TestANodeThatAnotherRunWorksOnIsRefused(t *testing.T) {
	h := &host{locked: true}
	w := newHarness(t, h)
	w.ExecuteWorkflow(protocol.GPUNode, input())
	var app *temporal.ApplicationError
	require.ErrorAs(t, w.GetWorkflowError(), &app)
	require.Equal(t, protocol.Locked, app.Type())
	require.Empty(t, h.log, "nothing was touched")
}

func TestBadInputIsToldAtOnceAndInFull(t *testing.T) {
	in := Input{Level: "deep", PlanOnly: true, Baseline: &gpu.Baseline{Node: "other"}}
	w := newHarness(t, &host{})
	w.ExecuteWorkflow(protocol.GPUNode, in)
	var app *temporal.ApplicationError
	require.ErrorAs(t, w.GetWorkflowError(), &app)
	require.Equal(t, protocol.BadInput, app.Type())
	for _, path := range []string{"target.cluster", "node", "level", "baseline.node", "planOnly"} {
		require.Contains(t, app.Message(), path)
	}
}

func TestASetUpThatSaysNothingIsRefusedWithItsPlace(t *testing.T) {
	never := window.Duration(0)
	for _, c := range []struct {
		prepare Prepare
		want    []string
	}{
		{Prepare{}, []string{"prepare"}},
		{Prepare{MIG: &gpu.MIGRequest{Config: " "}}, []string{"prepare.mig.config"}},
		{Prepare{MIG: &gpu.MIGRequest{Config: strings.Repeat("#", maxConfig+1)}}, []string{"prepare.mig.config"}},
		{Prepare{VGPU: &gpu.VGPURequest{Scheduler: "fair"}, Limit: &never}, []string{"prepare.vgpu.config", "prepare.vgpu.scheduler", "prepare.limit"}},
	} {
		in := input()
		in.Prepare = &c.prepare
		var paths []string
		for _, p := range in.Validate() {
			paths = append(paths, p.Path)
		}
		require.Equal(t, c.want, paths)
	}
}

func TestAStressOfLessThanAMinuteIsRefused(t *testing.T) {
	in := input()
	in.Expect = &gpu.Expect{StressFor: window.Duration(10 * time.Second)}
	problems := in.Validate()
	require.Len(t, problems, 1)
	require.Equal(t, "expect.stressFor", problems[0].Path)
	require.Contains(t, problems[0].Message, "is 10s")
	in.Expect.StressFor = window.Duration(time.Minute)
	require.Empty(t, in.Validate())
}

func TestCancelInTheMiddleOfTheSetUpEndsItAndGivesTheNodeBack(t *testing.T) {
	h := &host{}
	w := newHarness(t, h)
	w.OnActivity(gpu.PrepareActivity, mock.Anything, mock.Anything).After(10 * time.Minute).Return(h.prepare)
	w.at(15*time.Minute, func() { // the plan took the first ten
		require.Equal(t, "prepare", w.status().Section)
		require.Equal(t, "ours", h.label)
		w.CancelWorkflow()
	})
	w.at(16*time.Minute, func() { require.Equal(t, protocol.Abort, w.status().Deferred) })
	r := w.run(input())
	require.Equal(t, protocol.OutcomeAborted, r.Outcome)
	require.Equal(t, []string{"prepare", "give back", "receipt", "unlock"}, h.log[5:], "what was begun was ended, and nothing after it was begun")
	require.Empty(t, h.label)
	require.Equal(t, "us", h.cordoned, "nothing has proven the host")
	require.Len(t, r.LeftBehind, 1)
	require.Contains(t, r.LeftBehind[0], "by hand it is kubectl uncordon gpu-1")
}

// again parks a run at a bad verdict and lets a person answer retry an hour in:
// the set-up of the second pass takes ten minutes, and f is called during it.
func again(t *testing.T, h *host, f func(w *harness)) Result {
	t.Helper()
	h.verdict = gpu.Unfit
	w := newHarness(t, h)
	w.OnActivity(gpu.PrepareActivity, mock.Anything, mock.Anything).After(10 * time.Minute).Return(h.prepare)
	w.at(time.Hour, func() {
		w.waits("validate")
		h.do(func() { h.layout = false })
		w.SignalWorkflow(protocol.Retry, retry())
	})
	w.at(time.Hour+5*time.Minute, func() {
		require.Equal(t, "prepare", w.status().Section)
		f(w)
	})
	return w.run(input())
}

func TestWhatStopsARunWaitsForTheSetUpOfTheSecondPassToo(t *testing.T) {
	for verb, stop := range map[string]func(*harness){
		"cancel": func(w *harness) { w.CancelWorkflow() },
		"abort":  func(w *harness) { w.SignalWorkflow(protocol.Abort, retry()) },
	} {
		t.Run(verb, func(t *testing.T) {
			h := &host{}
			r := again(t, h, func(w *harness) {
				stop(w)
				w.at(time.Minute, func() { require.Equal(t, protocol.Abort, w.status().Deferred) })
			})
			require.Equal(t, protocol.OutcomeAborted, r.Outcome)
			require.Equal(t, []string{"prepare", "validate", "prepare", "give back", "receipt", "unlock"}, h.log[5:],
				"what was begun was ended, and nothing after it was begun")
			require.True(t, h.layout)
			require.Equal(t, "us", h.cordoned)
			require.Empty(t, h.label)
		})
	}
}

func TestTheSetUpOfTheSecondPassHeedsPauseAndWindows(t *testing.T) {
	h := &host{verdict: gpu.Unfit}
	in := input()
	in.Windows = []window.Spec{{Opens: "0 0 * * *", Duration: window.Duration(4 * time.Hour)}}
	w := newHarness(t, h)
	w.SetStartTime(time.Date(2026, 3, 1, 0, 0, 0, 0, time.UTC))
	w.at(5*time.Hour, func() {
		w.waits("validate")
		h.do(func() { h.verdict = "" })
		w.SignalWorkflow(protocol.Retry, retry())
	})
	w.at(6*time.Hour, func() {
		require.Equal(t, protocol.WaitWindow, w.status().WaitingFor.Kind)
		h.do(func() { h.say("pause") })
		w.SignalWorkflow(protocol.Pause, retry())
	})
	w.at(25*time.Hour, func() {
		require.Equal(t, protocol.WaitPaused, w.status().WaitingFor.Kind)
		h.do(func() { h.say("resume") })
		w.SignalWorkflow(protocol.Resume, retry())
	})
	require.Equal(t, protocol.OutcomeDone, w.run(in).Outcome)
	require.Equal(t, []string{"prepare", "validate", "pause", "resume", "prepare", "validate", "uncordon", "give back", "receipt", "unlock"}, h.log[5:])
}

func TestTheResultIsAReceiptWithThePlan(t *testing.T) {
	in := input()
	in.PlanOnly = true
	r := newHarness(t, &host{}).run(in)
	require.Equal(t, protocol.GPUNode, r.Kind)
	require.Equal(t, "prod", r.Cluster)
	require.Equal(t, "gpu-1", r.Object)
	require.Equal(t, []protocol.PlannedChange{{Action: "create GPU instance 7g.80gb at 0", Object: "GPU GPU-1"}}, r.Plan.Changes)
}

func TestUnattendedItEndsWhereItWouldPark(t *testing.T) {
	h := &host{verdict: gpu.Unfit}
	in := input()
	in.Unattended = true
	r := newHarness(t, h).run(in)
	require.Equal(t, protocol.OutcomeAborted, r.Outcome)
	require.Equal(t, "stage validate done", r.Failure.Expected)
	require.Contains(t, r.Failure.Found, "verdict unfit: CUDA call GPU-1")
	require.Contains(t, r.Failure.Next, "repair the host")
	require.Equal(t, "us", h.cordoned)
	require.Empty(t, h.label)
	require.Contains(t, r.LeftBehind[0], "stays cordoned")
	require.Equal(t, "unlock", h.log[len(h.log)-1])

	h = &host{silent: true}
	r = newHarness(t, h).run(in)
	require.Contains(t, r.Failure.Found, "gpu/prod/gpu-1")
	require.Empty(t, h.cordoned, "nothing was begun")
	require.Empty(t, r.LeftBehind)

	h = &host{busy: true}
	r = newHarness(t, h).run(in)
	require.Contains(t, r.Failure.Found, "2 clients")
	require.Len(t, h.prepared, 5, "plan and set-up, asked again for two minutes: a host of a rollout has its turn and no more")
	require.Empty(t, h.cordoned, "it was never touched")
}

func TestALockedNodeIsRefusedUnattendedToo(t *testing.T) {
	w := newHarness(t, &host{locked: true})
	in := input()
	in.Unattended = true
	w.ExecuteWorkflow(protocol.GPUNode, in)
	var app *temporal.ApplicationError
	require.ErrorAs(t, w.GetWorkflowError(), &app)
	require.Equal(t, protocol.Locked, app.Type())
}

func TestAsAChildItsStagesAndAnswersGoThroughTheParent(t *testing.T) {
	h := &host{verdict: gpu.Unfit}
	w := newHarness(t, h)
	const prefix = "rollout.hypervisor.shared.gpu-1"
	parent := func(ctx workflow.Context, in Input) (Result, error) {
		run, err := stage.New(ctx, stage.Options{Kind: "upgrade", Cluster: "prod", Object: "o"})
		if err != nil {
			return Result{}, err
		}
		var out Result
		err = run.Execute(run.Context(), stage.Stage{Name: prefix, Do: func(ctx workflow.Context, s *stage.Scope) error {
			return s.Child(ctx, prefix, func(ctx workflow.Context, p protocol.Parent) workflow.ChildWorkflowFuture {
				in.Parent = &p
				return workflow.ExecuteChildWorkflow(ctx, protocol.GPUNode, in)
			}, &out)
		}})
		return out, err
	}
	w.RegisterWorkflowWithOptions(parent, workflow.RegisterOptions{Name: "upgrade"})
	w.at(time.Hour, func() {
		w.waits(prefix + ".validate")
		h.do(func() { h.verdict = "" })
		w.SignalWorkflow(protocol.Retry, protocol.Answer{Stage: prefix + ".validate"})
	})
	w.ExecuteWorkflow("upgrade", input())
	require.NoError(t, w.GetWorkflowError())
	require.Empty(t, h.cordoned)
}
