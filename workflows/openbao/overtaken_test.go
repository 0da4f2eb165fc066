package openbao

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/mock"
	"github.com/stretchr/testify/require"
	enumspb "go.temporal.io/api/enums/v1"
	"go.temporal.io/sdk/activity"
	"go.temporal.io/sdk/temporal"

	acts "github.com/refit-run/refit/activities/openbao"

	"github.com/refit-run/refit/activities/finding"
	"github.com/refit-run/refit/workflows/protocol"
	"github.com/refit-run/refit/workflows/window"
)

func TestATemplateThatChangesWhileAMemberIsReplacedIsPlannedAnewAndNotParked(t *testing.T) {
	s := newSystem()
	h := newHarness(t, s)
	once := true
	h.OnActivity(acts.ReplaceActivity, mock.Anything, mock.Anything).Return(func(ctx context.Context, r acts.ReplaceRequest) (acts.ReplaceResult, error) {
		out, err := s.replace(ctx, r)
		if once && err == nil {
			once = false // the same image, another revision
			s.do(func() { s.view.Members[s.at(r.Pod)].Revision = "overtaken" })
			out.OK, out.Anew = false, "the template changed while "+r.Pod+" was replaced"
		}
		return out, err
	})
	var out ReplaceResult
	h.Run(protocol.OpenBaoReplace, replacement(), &out)
	require.Equal(t, protocol.OutcomeDone, out.Outcome)
	require.Equal(t, []string{"lock", "delete openbao-server-1", "openbao-server-1 proven", "delete openbao-server-1", "openbao-server-1 proven", "delete openbao-server-2"}, s.log[:6],
		"it is stale again and comes first again")
	require.Empty(t, out.LeftBehind)
}

// marked is how the activities say that nothing was changed.
func marked(untouched bool) error {
	f := finding.Finding{Row: "N165", Object: "OpenBao member openbao-server-0", Found: "permission denied"}
	return temporal.NewApplicationErrorWithOptions(f.String(), string(finding.Stop), temporal.ApplicationErrorOptions{NonRetryable: true,
		Details: []any{map[string]any{"row": f.Row, "object": f.Object, "found": f.Found, "untouched": untouched}}})
}

func TestAnErrorBeforeTheDeletionLeavesNothingHalfDone(t *testing.T) {
	for _, untouched := range []bool{true, false} {
		s := newSystem()
		h := newHarness(t, s)
		once := true
		h.OnActivity(acts.ReplaceActivity, mock.Anything, mock.Anything).Return(func(ctx context.Context, r acts.ReplaceRequest) (acts.ReplaceResult, error) {
			if once {
				once = false
				return acts.ReplaceResult{}, marked(untouched)
			}
			return s.replace(ctx, r)
		})
		h.At(time.Hour, func() {
			w := h.Waits("replace")
			require.Contains(t, w.Found, "permission denied")
			if untouched {
				require.NotContains(t, w.Why, "half done")
			} else {
				require.Contains(t, w.Why, "half done: replacement of openbao-server-1", "an error that does not say so proves nothing")
			}
			h.Answer(protocol.Abort)
		})
		var out ReplaceResult
		h.Run(protocol.OpenBaoReplace, replacement(), &out)
		require.Equal(t, untouched, len(out.LeftBehind) == 0, "%v", out.LeftBehind)
	}
}

func TestAStepThatWasBegunStaysHalfDoneWhateverALaterTrySays(t *testing.T) {
	s := newSystem()
	s.worn = 1
	h := newHarness(t, s)
	calls := 0
	h.OnActivity(acts.ReplaceActivity, mock.Anything, mock.Anything).Return(func(ctx context.Context, r acts.ReplaceRequest) (acts.ReplaceResult, error) {
		if calls++; calls == 2 {
			return acts.ReplaceResult{}, marked(true)
		}
		return s.replace(ctx, r)
	})
	h.At(time.Hour, func() { h.Answer(protocol.Retry) })
	h.At(2*time.Hour, func() {
		require.Contains(t, h.Waits("replace").Why, "half done: replacement of openbao-server-1")
		h.Answer(protocol.Retry)
	})
	var out ReplaceResult
	h.Run(protocol.OpenBaoReplace, replacement(), &out)
	require.Equal(t, protocol.OutcomeDone, out.Outcome)
	require.Equal(t, 4, calls-1, "one was lost, one did not begin, three members came back")
}

func TestLeadershipIsAskedForThriceAlsoWhenThePlanIsMadeAnewInBetween(t *testing.T) {
	s := newSystem()
	s.deaf = 3
	h := newHarness(t, s)
	calls, asked := 0, 0
	h.OnActivity(acts.StepDownActivity, mock.Anything, mock.Anything).Return(func(ctx context.Context, r acts.StepDownRequest) (acts.StepDownResult, error) {
		if calls++; calls == 2 || calls == 4 {
			return acts.StepDownResult{Moved: "the members were not whole and steady right before it"}, nil
		}
		out, err := s.stepDown(ctx, r)
		if out.Sent {
			asked++
		}
		return out, err
	})
	h.At(time.Hour, func() {
		require.Contains(t, h.Waits("replace").Found, "N166")
		require.Equal(t, 3, asked)
		h.Answer(protocol.Retry)
	})
	var out ReplaceResult
	h.Run(protocol.OpenBaoReplace, replacement(), &out)
	require.Equal(t, protocol.OutcomeDone, out.Outcome)
	require.Equal(t, 4, asked)
}

func TestAnAttemptThatIsRefusedIsNoneAndAPersonIsAskedAtOnce(t *testing.T) {
	s := newSystem()
	s.deaf = 1
	h := newHarness(t, s)
	calls := 0
	h.OnActivity(acts.StepDownActivity, mock.Anything, mock.Anything).Return(func(ctx context.Context, r acts.StepDownRequest) (acts.StepDownResult, error) {
		if calls++; calls == 2 {
			return acts.StepDownResult{Findings: []finding.Finding{{Row: "N161", Object: "StatefulSet openbao-server", Expected: "update strategy OnDelete", Found: "RollingUpdate"}}}, nil
		}
		return s.stepDown(ctx, r)
	})
	h.At(time.Hour, func() {
		require.Contains(t, h.Waits("replace").Found, "N161")
		require.Equal(t, 2, calls, "nothing that waiting or asking mends")
		h.Answer(protocol.Retry)
	})
	var out ReplaceResult
	h.Run(protocol.OpenBaoReplace, replacement(), &out)
	require.Equal(t, protocol.OutcomeDone, out.Outcome)
	require.Equal(t, "its reply is lost with the worker that asked", replied(""))
	require.Equal(t, `answered with "accepted"`, replied("accepted"))
}

func TestAStepDownBeginsOnlyWhereAllItsAttemptsFitTheWindow(t *testing.T) {
	s := newSystem()
	for i := 1; i < 3; i++ { // only the step-down is left, and then its member
		s.view.Members[i].Revision, s.view.Members[i].Version = "new", "2.6.3"
	}
	h := newHarness(t, s)
	in := replacement()
	in.Windows = []window.Spec{{Opens: "0 * * * *", Duration: window.Duration(50 * time.Minute)}}
	h.SetStartTime(time.Date(2026, 1, 1, 0, 46, 0, 0, time.UTC)) // four minutes are left: three attempts take four and a half
	h.At(3*time.Minute, func() {
		require.Equal(t, protocol.WaitWindow, h.Waits("replace").Kind)
		require.Equal(t, []string{"lock"}, s.log)
	})
	var out ReplaceResult
	h.Run(protocol.OpenBaoReplace, in, &out)
	require.Equal(t, protocol.OutcomeDone, out.Outcome)
}

func TestASnapshotHasTimeForAllItsTries(t *testing.T) {
	s := newSystem()
	h := newHarness(t, s)
	var given time.Duration
	h.OnActivity(acts.SnapshotActivity, mock.Anything, mock.Anything).Return(func(ctx context.Context, r acts.SnapshotRequest) (acts.SnapshotResult, error) {
		given = activity.GetInfo(ctx).StartToCloseTimeout
		return s.snapshots(ctx, r)
	})
	var out SnapshotResult
	h.Run(protocol.OpenBaoSnapshot, SnapshotInput{Site: site(), Limit: window.Duration(5 * time.Minute), TransferLimit: window.Duration(10 * time.Minute)}, &out)
	require.GreaterOrEqual(t, given, 45*time.Minute, "each try may wait for an active member and then take its time")
}

// TestAnActThatNoWorkerBeganInTimeWaitsForTheNextWindow: the worker is away when
// the window has room, and back when it has none.
func TestAnActThatNoWorkerBeganInTimeWaitsForTheNextWindow(t *testing.T) {
	for _, stepDown := range []bool{false, true} {
		s := newSystem()
		name, act := acts.ReplaceActivity, "delete openbao-server-1"
		if stepDown {
			name, act = acts.StepDownActivity, "step-down of openbao-server-0"
			for i := 1; i < 3; i++ { // only the step-down is left, and then its member
				s.view.Members[i].Revision, s.view.Members[i].Version = "new", "2.6.3"
			}
		}
		h := newHarness(t, s)
		start := time.Date(2026, 1, 1, 0, 1, 0, 0, time.UTC)
		h.SetStartTime(start)
		away := func() error {
			if h.Now().Before(start.Add(50 * time.Minute)) {
				return temporal.NewTimeoutError(enumspb.TIMEOUT_TYPE_SCHEDULE_TO_START, nil)
			}
			return nil
		}
		if stepDown {
			h.OnActivity(name, mock.Anything, mock.Anything).After(2 * time.Minute).Return(func(ctx context.Context, r acts.StepDownRequest) (acts.StepDownResult, error) {
				if err := away(); err != nil {
					return acts.StepDownResult{}, err
				}
				return s.stepDown(ctx, r)
			})
		} else {
			h.OnActivity(name, mock.Anything, mock.Anything).After(2 * time.Minute).Return(func(ctx context.Context, r acts.ReplaceRequest) (acts.ReplaceResult, error) {
				if err := away(); err != nil {
					return acts.ReplaceResult{}, err
				}
				return s.replace(ctx, r)
			})
		}
		in := replacement()
		in.Windows = []window.Spec{{Opens: "0 * * * *", Duration: window.Duration(50 * time.Minute)}}
		h.At(55*time.Minute, func() {
			w := h.Waits("replace")
			require.Equal(t, protocol.WaitWindow, w.Kind)
			require.NotContains(t, s.log, act)
			h.Answer(protocol.Abort)
		})
		var out ReplaceResult
		h.Run(protocol.OpenBaoReplace, in, &out)
		require.Equal(t, protocol.OutcomeAborted, out.Outcome)
		require.Empty(t, out.LeftBehind, "nothing was begun")
	}
}

// TestARetryOfAStepThatHadNotBegunWaitsForAWindow: its activity ended in an
// error that does not say how far it had come.
func TestARetryOfAStepThatHadNotBegunWaitsForAWindow(t *testing.T) {
	s := newSystem()
	h := newHarness(t, s)
	h.SetStartTime(time.Date(2026, 1, 1, 0, 1, 0, 0, time.UTC))
	once := true
	h.OnActivity(acts.ReplaceActivity, mock.Anything, mock.Anything).Return(func(ctx context.Context, r acts.ReplaceRequest) (acts.ReplaceResult, error) {
		if once {
			once = false
			return acts.ReplaceResult{}, marked(false)
		}
		return s.replace(ctx, r)
	})
	h.At(52*time.Minute, func() {
		require.Contains(t, h.Waits("replace").Why, "half done")
		h.Answer(protocol.Retry)
	})
	h.At(55*time.Minute, func() {
		require.Equal(t, protocol.WaitWindow, h.Waits("replace").Kind)
		require.Equal(t, []string{"lock", "replace openbao-server-1 not begun: late"}, s.log)
	})
	in := replacement()
	in.Windows = []window.Spec{{Opens: "0 * * * *", Duration: window.Duration(50 * time.Minute)}}
	var out ReplaceResult
	h.Run(protocol.OpenBaoReplace, in, &out)
	require.Equal(t, protocol.OutcomeDone, out.Outcome)
	require.Empty(t, out.LeftBehind)
}

// TestAMemberThatIsAwayIsBroughtBackOutsideOfTheWindow: half done is worse than
// late.
func TestAMemberThatIsAwayIsBroughtBackOutsideOfTheWindow(t *testing.T) {
	s := newSystem()
	s.after = func() { s.sealed = "openbao-server-1" }
	h := newHarness(t, s)
	h.SetStartTime(time.Date(2026, 1, 1, 0, 1, 0, 0, time.UTC))
	h.At(52*time.Minute, func() {
		s.do(func() { s.sealed = "" })
		h.Answer(protocol.Retry)
	})
	h.At(55*time.Minute, func() {
		require.Equal(t, protocol.WaitWindow, h.Waits("replace").Kind)
		require.Equal(t, "openbao-server-1 proven", s.log[len(s.log)-1], "and no other is begun")
	})
	in := replacement()
	in.Windows = []window.Spec{{Opens: "0 * * * *", Duration: window.Duration(50 * time.Minute)}}
	var out ReplaceResult
	h.Run(protocol.OpenBaoReplace, in, &out)
	require.Equal(t, protocol.OutcomeDone, out.Outcome)
}

// TestAStepThatMayHaveBegunBeforeAnOutageIsHalfDone: the worker dies after the
// act, none takes the retry, and what is scheduled anew fails at once, knowing
// nothing of it.
func TestAStepThatMayHaveBegunBeforeAnOutageIsHalfDone(t *testing.T) {
	lost := temporal.NewTimeoutError(enumspb.TIMEOUT_TYPE_SCHEDULE_TO_START, nil)
	for name, half := range map[string]string{acts.ReplaceActivity: "replacement of openbao-server-1", acts.StepDownActivity: "step-down of openbao-server-0"} {
		s := newSystem()
		h := newHarness(t, s)
		calls := 0
		next := func() error {
			if calls++; calls == 1 {
				return lost
			}
			return marked(true)
		}
		if name == acts.ReplaceActivity {
			h.OnActivity(name, mock.Anything, mock.Anything).Return(func(ctx context.Context, r acts.ReplaceRequest) (acts.ReplaceResult, error) {
				if calls == 0 {
					_, _ = s.replace(ctx, r)
				}
				return acts.ReplaceResult{}, next()
			})
		} else {
			h.OnActivity(name, mock.Anything, mock.Anything).Return(func(context.Context, acts.StepDownRequest) (acts.StepDownResult, error) {
				return acts.StepDownResult{}, next()
			})
		}
		h.At(time.Hour, func() {
			require.Contains(t, h.Waits("replace").Why, "half done: "+half)
			h.Answer(protocol.Abort)
		})
		var out ReplaceResult
		h.Run(protocol.OpenBaoReplace, replacement(), &out)
		require.NotEmpty(t, out.LeftBehind)
		require.Contains(t, out.LeftBehind[0], half)
	}
}

func TestTheCalmHasItsTimeHoweverShortTheLimits(t *testing.T) {
	s := newSystem()
	h := newHarness(t, s)
	h.OnActivity(acts.ReplaceActivity, mock.Anything, mock.Anything).Return(func(ctx context.Context, r acts.ReplaceRequest) (acts.ReplaceResult, error) {
		require.Equal(t, 4*time.Second+acts.StableFor, r.Limit)
		return s.replace(ctx, r)
	})
	h.OnActivity(acts.StepDownActivity, mock.Anything, mock.Anything).Return(func(ctx context.Context, r acts.StepDownRequest) (acts.StepDownResult, error) {
		require.Equal(t, 4*time.Second+acts.StableFor, r.Limit)
		require.Equal(t, 3*time.Second+acts.StableFor, r.Transfer)
		return s.stepDown(ctx, r)
	})
	in := replacement()
	in.Limit, in.TransferLimit = window.Duration(4*time.Second), window.Duration(3*time.Second)
	var out ReplaceResult
	h.Run(protocol.OpenBaoReplace, in, &out)
	require.Equal(t, protocol.OutcomeDone, out.Outcome)
}

func TestMembersThatATemplateMadeStaleAfterTheSurveyAreAChange(t *testing.T) {
	s := newSystem()
	for i := range s.view.Members {
		s.view.Members[i].Revision, s.view.Members[i].Version = "new", "2.6.3"
	}
	h := newHarness(t, s)
	surveys := 0
	h.OnActivity(acts.SurveyActivity, mock.Anything, mock.Anything).Return(func(ctx context.Context, r acts.SurveyRequest) (acts.SurveyResult, error) {
		if surveys++; surveys == 2 {
			s.do(func() { s.view.Members[1].Revision = "overtaken" })
		}
		return s.survey(ctx, r)
	})
	var out ReplaceResult
	h.Run(protocol.OpenBaoReplace, replacement(), &out)
	require.Contains(t, s.log, "openbao-server-1 proven")
	require.Equal(t, protocol.OutcomeDone, out.Outcome)
}
