package stage_test

import (
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.temporal.io/sdk/temporal"
	"go.temporal.io/sdk/workflow"

	"github.com/refit-run/refit/workflows/protocol"
	"github.com/refit-run/refit/workflows/stage"
	"github.com/refit-run/refit/workflows/window"
)

func TestPauseHoldsAtTheNextStage(t *testing.T) {
	w := newWorld(t, stage.Options{})
	withStages(w, stage.Stage{Name: "one", Do: w.act("one", 10*m)}, stage.Stage{Name: "two", Do: w.act("two", 0)})
	reply := w.updateAt(2*m, protocol.Pause, protocol.Answer{By: "ann", Comment: "lunch"})
	pending := w.statusAt(3 * m)
	held := w.statusAt(20 * m)
	twice := w.updateAt(21*m, protocol.Pause, ann(""))
	w.signalAt(30*m, protocol.Resume, ann(""))
	w.run()
	require.NotNil(t, reply.accepted)
	assert.Equal(t, "takes effect at the next safe boundary", reply.accepted.Effect)
	assert.Equal(t, protocol.PhaseRunning, pending.Phase)
	assert.Equal(t, protocol.Pause, pending.Deferred)
	assert.Equal(t, protocol.PhasePaused, held.Phase)
	assert.Equal(t, "the run is paused by ann: lunch", held.WaitingFor.Found)
	assert.Equal(t, []string{"resume", "abort"}, held.WaitingFor.Answers)
	assert.Empty(t, held.Deferred)
	assert.ErrorContains(t, twice.rejected, "paused already")
	assert.Equal(t, []string{"0s one", "10m0s one ends", "30m0s two"}, w.journal)
}

func soak(w *world) stage.Stage {
	return stage.Stage{Name: "soak", Do: func(ctx workflow.Context, s *stage.Scope) error {
		if err := s.Sleep(ctx, 10*m, "soak after the canary"); err != nil {
			return err
		}
		w.note(ctx, "soaked")
		return nil
	}}
}

func TestPauseDuringSoakHoldsAtItsEnd(t *testing.T) {
	for _, c := range []struct {
		resume time.Duration
		want   string
	}{{5 * m, "10m0s soaked"}, {25 * m, "25m0s soaked"}} {
		w := newWorld(t, stage.Options{})
		withStages(w, soak(w))
		w.signalAt(2*m, protocol.Pause, ann(""))
		w.signalAt(c.resume, protocol.Resume, ann(""))
		during := w.statusAt(m)
		w.run()
		assert.Equal(t, []string{c.want}, w.journal)
		assert.Equal(t, "soak after the canary until 2026-03-02T08:10:00Z", during.Stages[0].Note)
	}
}

func TestAbortDuringSoakEndsItAtOnce(t *testing.T) {
	w := newWorld(t, stage.Options{})
	withStages(w, soak(w))
	w.signalAt(2*m, protocol.Abort, ann(""))
	r := w.run()
	assert.Equal(t, protocol.OutcomeAborted, r.Outcome)
	assert.Equal(t, start.Add(2*m), r.Ended.UTC())
	assert.Empty(t, w.journal)
}

func TestAbortWhilePausedNeedsNoResume(t *testing.T) {
	w := newWorld(t, stage.Options{})
	withStages(w, soak(w))
	w.signalAt(1*m, protocol.Pause, ann(""))
	w.signalAt(12*m, protocol.Abort, ann(""))
	assert.Equal(t, protocol.OutcomeAborted, w.run().Outcome)
}

func TestAbortAtAGateCleansUpAndRefusesWhatFollows(t *testing.T) {
	w := newWorld(t, stage.Options{})
	withStages(w, gated(w, stage.Gate{}), stage.Stage{Name: "later", Do: w.act("later", 0)})
	w.cleanup = func(ctx workflow.Context) error {
		w.note(ctx, "cleanup")
		return workflow.Sleep(ctx, 5*m)
	}
	w.signalAt(1*m, protocol.Abort, ann(""))
	during := w.statusAt(2 * m)
	late := w.updateAt(2*m, protocol.Approve, ann("canary"))
	again := w.updateAt(2*m, protocol.Abort, ann(""))
	r := w.run()
	assert.Equal(t, protocol.PhaseAborted, during.Phase)
	assert.Error(t, late.rejected)
	assert.Error(t, again.rejected)
	assert.Equal(t, []string{"1m0s cleanup"}, w.journal)
	assert.Equal(t, map[string]protocol.StageState{
		"canary": protocol.Aborted, "later": protocol.Pending, "cleanup": protocol.Done,
	}, states(r.Stages))
}

func TestFailedCleanupIsLeftBehind(t *testing.T) {
	w := newWorld(t, stage.Options{})
	withStages(w, stage.Stage{Name: "one", Do: w.act("one", 0)})
	w.cleanup = func(workflow.Context) error {
		return temporal.NewNonRetryableApplicationError("lease is gone", "x", nil)
	}
	assert.Equal(t, []string{"cleanup failed: lease is gone"}, w.run().LeftBehind)
}

// nightly opens at 22:00 UTC for two hours: 14 hours after the start.
var nightly = []window.Spec{{Opens: "0 22 * * *", Duration: window.Duration(2 * time.Hour)}}

const h = time.Hour

func TestOnlyMutatingStagesWaitForTheWindow(t *testing.T) {
	w := newWorld(t, stage.Options{Windows: nightly})
	withStages(w,
		stage.Stage{Name: "look", Do: w.act("look", 0)},
		stage.Stage{Name: "change", Mutates: true, Do: w.act("change", 3*h)},
		stage.Stage{Name: "change more", Mutates: true, Do: w.act("more", 0)})
	waiting := w.statusAt(h)
	w.run()
	assert.Equal(t, protocol.PhaseWindow, waiting.Phase)
	assert.Equal(t, protocol.WaitingForWindow, waiting.Stages[1].State)
	assert.Equal(t, start.Add(14*h), waiting.WaitingFor.Until.UTC())
	assert.Equal(t, []string{"0s look", "14h0m0s change", "17h0m0s change ends", "38h0m0s more"}, w.journal)
}

func TestSafeHoldsWhenTheWindowClosesInTheMiddleOfAStage(t *testing.T) {
	w := newWorld(t, stage.Options{Windows: nightly})
	withStages(w, stage.Stage{Name: "batches", Mutates: true, Do: func(ctx workflow.Context, s *stage.Scope) error {
		for range 4 {
			if err := s.Safe(ctx); err != nil {
				return err
			}
			w.note(ctx, "batch")
			if err := workflow.Sleep(ctx, 50*m); err != nil {
				return err
			}
		}
		return nil
	}})
	w.run()
	assert.Equal(t, []string{"14h0m0s batch", "14h50m0s batch", "15h40m0s batch", "38h0m0s batch"}, w.journal)
}

func TestSectionStartsOnlyIfItFitsTheWindow(t *testing.T) {
	w := newWorld(t, stage.Options{Windows: nightly})
	withStages(w, stage.Stage{Name: "hosts", Mutates: true, Do: func(ctx workflow.Context, s *stage.Scope) error {
		for _, host := range []string{"n1", "n2"} {
			err := s.Section(ctx, host, 70*m, func(ctx workflow.Context) error {
				w.note(ctx, host)
				return workflow.Sleep(ctx, 60*m)
			})
			if err != nil {
				return err
			}
		}
		return nil
	}})
	waiting := w.statusAt(15*h + 30*m)
	w.run()
	assert.Equal(t, []string{"14h0m0s n1", "38h0m0s n2"}, w.journal)
	assert.Contains(t, waiting.WaitingFor.Found, "section n2 needs 1h10m0s, more than is left of this window")
}

func TestSectionThatFitsNoWindowParks(t *testing.T) {
	w := newWorld(t, stage.Options{Windows: nightly})
	withStages(w, stage.Stage{Name: "long", Mutates: true, Section: true, Estimate: 3 * h, Do: w.act("long", 0)})
	parked := w.statusAt(15 * h)
	w.signalAt(16*h, protocol.Abort, ann(""))
	r := w.run()
	assert.Equal(t, protocol.PhaseParked, parked.Phase)
	assert.Contains(t, parked.WaitingFor.Found, "needs 3h0m0s")
	assert.Equal(t, protocol.OutcomeAborted, r.Outcome)
}

func TestPauseDuringTheWaitForAWindowOutlastsIt(t *testing.T) {
	w := newWorld(t, stage.Options{Windows: nightly})
	withStages(w, stage.Stage{Name: "change", Mutates: true, Do: w.act("change", 0)})
	w.signalAt(h, protocol.Pause, ann(""))
	paused := w.statusAt(2 * h)
	w.signalAt(15*h, protocol.Resume, ann(""))
	w.run()
	assert.Equal(t, protocol.PhasePaused, paused.Phase)
	assert.Equal(t, []string{"15h0m0s change"}, w.journal)
}

func TestApprovalOutsideTheWindowIsTakenAndWaits(t *testing.T) {
	w := newWorld(t, stage.Options{Windows: nightly})
	withStages(w, stage.Stage{Name: "canary", Mutates: true, Gate: &stage.Gate{}, Do: w.act("roll", 0)})
	w.signalAt(h, protocol.Approve, ann("canary"))
	w.run()
	assert.Equal(t, []string{"14h0m0s roll"}, w.journal)
}

func TestRunsLongerThanTheRecordedOpenings(t *testing.T) {
	weekly := []window.Spec{{Opens: "0 22 * * 1", Duration: window.Duration(h)}}
	w := newWorld(t, stage.Options{Windows: weekly})
	withStages(w, stage.Stage{Name: "weeks", Mutates: true, Do: func(ctx workflow.Context, s *stage.Scope) error {
		for range 6 {
			if err := s.Safe(ctx); err != nil {
				return err
			}
			w.note(ctx, "batch")
			if err := workflow.Sleep(ctx, 2*h); err != nil {
				return err
			}
		}
		return nil
	}})
	w.run()
	assert.Len(t, w.journal, 6)
	assert.Equal(t, "854h0m0s batch", w.journal[5]) // five weeks after the first
}

func TestBadWindowsCloseTheRunAsBadInput(t *testing.T) {
	w := newWorld(t, stage.Options{Windows: []window.Spec{{Opens: "at night", TimeZone: "Mars/Olympus"}}})
	w.env.ExecuteWorkflow("Toy")
	var app *temporal.ApplicationError
	require.ErrorAs(t, w.env.GetWorkflowError(), &app)
	assert.Equal(t, protocol.BadInput, app.Type())
	assert.Contains(t, app.Message(), "windows[0]")
	assert.Contains(t, app.Message(), "Mars/Olympus")
}

func TestMaxDurationParksAndRetryExtendsIt(t *testing.T) {
	w := newWorld(t, stage.Options{MaxDuration: h})
	withStages(w, stage.Stage{Name: "hours", Do: func(ctx workflow.Context, s *stage.Scope) error {
		for range 4 {
			if err := s.Safe(ctx); err != nil {
				return err
			}
			w.note(ctx, "batch")
			if err := workflow.Sleep(ctx, 40*m); err != nil {
				return err
			}
		}
		return nil
	}})
	parked := w.statusAt(90 * m)
	w.signalAt(100*m, protocol.Retry, ann("hours"))
	w.run()
	assert.Equal(t, protocol.PhaseParked, parked.Phase)
	assert.Contains(t, parked.WaitingFor.Found, "longer than its max duration of 1h0m0s")
	assert.Equal(t, []string{"0s batch", "40m0s batch", "1h40m0s batch", "2h20m0s batch"}, w.journal)
}

func TestAHalfDoneSectionGoesOnWithoutAWindowAndTheNextWaits(t *testing.T) {
	w := newWorld(t, stage.Options{Windows: nightly})
	tries := 0
	withStages(w, stage.Stage{Name: "keyspaces", Mutates: true, Do: func(ctx workflow.Context, s *stage.Scope) error {
		err := s.Section(ctx, "a", 30*m, func(ctx workflow.Context) error {
			w.note(ctx, "a")
			if tries++; tries == 1 {
				return errors.New("broken")
			}
			return nil
		})
		if err != nil {
			return err
		}
		return s.Section(ctx, "b", 30*m, func(ctx workflow.Context) error {
			w.note(ctx, "b")
			return nil
		})
	}})
	w.signalAt(20*h, protocol.Retry, ann(""))
	w.run()
	assert.Equal(t, []string{"14h0m0s a", "20h0m0s a", "38h0m0s b"}, w.journal)
}

func TestASectionThatNoWindowMayDelayStartsAtOnceButNotWhilePaused(t *testing.T) {
	w := newWorld(t, stage.Options{Windows: nightly})
	withStages(w, stage.Stage{Name: "way out", Gate: &stage.Gate{}, Do: func(ctx workflow.Context, s *stage.Scope) error {
		return s.SectionNow(ctx, "way out", func(ctx workflow.Context) error {
			w.note(ctx, "way out")
			return nil
		})
	}})
	w.signalAt(h, protocol.Approve, ann("way out"))
	w.signalAt(30*m, protocol.Pause, ann(""))
	w.signalAt(2*h, protocol.Resume, ann(""))
	w.run()
	assert.Equal(t, []string{"2h0m0s way out"}, w.journal)
}
