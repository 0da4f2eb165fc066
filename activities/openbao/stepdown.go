package openbao

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"go.temporal.io/sdk/activity"

	"github.com/refit-run/refit/activities/evidence"
	"github.com/refit-run/refit/activities/finding"
)

// sent begins what the heartbeats of a try say once the request has left: the
// next try of the same activity then only looks at what came of it.
const sent = "step-down sent"

// StepDownRequest moves leadership away from a stale member.
type StepDownRequest struct {
	Place
	Want Want `json:"want"`
	// Pod and UID are the active member's as the survey saw it.
	Pod string `json:"pod"`
	UID string `json:"uid"`
	// Committed is its committed index then: every other one must have it.
	Committed uint64 `json:"committed"`
	// BeginBy is when the request may be sent at the latest; without it none
	// is, and only what an earlier one has begun is finished.
	BeginBy time.Time `json:"beginBy,omitzero"`
	// Limit is how long a whole cluster is waited for before, Transfer how
	// long the new leader after.
	Limit    time.Duration `json:"limit"`
	Transfer time.Duration `json:"transfer"`
}

// StepDownResult is who leads afterwards.
type StepDownResult struct {
	OK bool `json:"ok"`
	// Moved: nothing was sent, because the pod is not the active member any
	// more, not the last stale one, the cluster is not whole any more, or it is
	// too late.
	Moved string `json:"moved,omitempty"`
	// Sent: this attempt has asked the member; Reply is what it said, which
	// decides nothing.
	Sent  bool   `json:"sent,omitempty"`
	Reply string `json:"reply,omitempty"`
	State
	Findings []finding.Finding `json:"findings,omitempty"`
	Evidence evidence.Trail    `json:"evidence"`
}

// StepDown is the activity openbao.StepDown (N165, N166): one attempt. It
// finds the active member anew, sends the request to that member alone, and
// only if it is still the stale one; then it judges by who is active and on
// what version, never by the reply. A lost reply, or one more try, so never
// reaches the new leader.
func (a *Activities) StepDown(ctx context.Context, r StepDownRequest) (out StepDownResult, err error) {
	defer func() {
		if !out.Sent {
			err = untouched(ctx, err)
		}
	}()
	l, err := a.looker(ctx, r.Place)
	if err != nil {
		return out, err
	}
	defer l.close()
	defer func() { out.Evidence = l.record.Trail }()

	if out.Sent = sentBefore(ctx); !out.Sent {
		var at time.Time // of the look that decides
		var led, refused bool
		steady := ready{caught: r.Committed}
		err = l.until(ctx, min(r.Limit, RecheckLimit), func(v View) verdict {
			at, r.Committed = v.At, steady.caught
			led, out.Moved, out.Findings = mayStepDown(v, r)
			if led || out.Moved != "" {
				return verdict{true, "", out}
			}
			refused = len(refusals(v, r.Want)) > 0
			out.Findings = steady.look(time.Now(), v, out.Findings, "step-down of "+r.Pod, a.stable())
			return verdict{refused || len(out.Findings) == 0, evidence.InWords(out.Findings), out}
		})
		if err != nil || out.Moved != "" || refused {
			return out, err
		}
		if len(out.Findings) > 0 {
			out.Moved, out.Findings = overtaken(out.Findings), nil
			return out, nil
		}
		if !led {
			if err := l.stepDown(ctx, r, at, &out); err != nil || out.Moved != "" {
				return out, err
			}
		}
	}
	var quiet calm
	err = l.until(ctx, r.Transfer, func(v View) verdict {
		out.Findings = transferred(v, r)
		out.State = v.State()
		out.OK = quiet.look(time.Now(), out.Active, len(out.Findings) == 0, a.stable())
		if !out.OK && len(out.Findings) == 0 {
			out.Findings = []finding.Finding{unsteady("after the step-down of "+r.Pod, a.stable())}
		}
		return verdict{out.OK, strings.TrimSuffix(sent+"; "+evidence.InWords(out.Findings), "; "), out}
	})
	return out, err
}

// sentBefore tells whether an earlier try of this activity has got as far.
func sentBefore(ctx context.Context) bool {
	var said string
	return activity.IsActivity(ctx) && activity.HasHeartbeatDetails(ctx) &&
		activity.GetHeartbeatDetails(ctx, &said) == nil && strings.HasPrefix(said, sent)
}

// mayStepDown decides whether the member may be asked now: it may with no
// findings, unless another one of the present template leads already.
func mayStepDown(v View, r StepDownRequest) (led bool, moved string, found []finding.Finding) {
	if found := slices.Concat(refusals(v, r.Want), waiting(v, r.Committed)); len(found) > 0 {
		return false, "", evidence.Shown(found)
	}
	active, _ := v.Active()
	late := tooLate(v.At, r.BeginBy, "the step-down of "+r.Pod)
	switch {
	case !v.stale(active):
		return true, "", nil
	case late != "":
		return false, late, nil
	case active.Pod != r.Pod || active.UID != r.UID:
		return false, fmt.Sprintf("%s is active, not %s", active.Pod, r.Pod), nil
	case len(v.Stale()) > 1:
		return false, "a stale standby is left: leadership could go to it", nil
	}
	return false, "", nil
}

// transferred is what is still missing for a confirmed leader of the present
// template, with the former one as its standby.
func transferred(v View, r StepDownRequest) []finding.Finding {
	found := slices.Concat(refusals(v, r.Want), waiting(v, 0))
	if active, none := v.Active(); none == "" && v.stale(active) {
		found = append(found, finding.Finding{
			Row: "N166", Object: "OpenBao in " + v.Set.Name, Expected: "a member of version " + r.Want.Version + " active", Found: fmt.Sprintf("%s (%s) is", active.Pod, active.Version),
			Why:  "the last stale member must be a standby before it is replaced",
			Next: "look at the log of " + r.Pod + ": did it lose leadership, and why did no other member take it? Then retry",
		})
	}
	return evidence.Shown(found)
}

// stepDown asks the member itself, unless the look that it stands on has become
// too old meanwhile.
func (l *looker) stepDown(ctx context.Context, r StepDownRequest, at time.Time, out *StepDownResult) error {
	if err := l.mayChange(ctx); err != nil {
		return err
	}
	// Kept by the server before it is done: a try that dies in between is one attempt less,
	// and no second request.
	if err := l.mark(sent + " to " + r.Pod); err != nil {
		return err
	}
	if out.Moved = missed(at, r.BeginBy, "step-down of "+r.Pod); out.Moved != "" {
		return nil
	}
	asked, cancel := context.WithTimeout(ctx, dialLimit+callLimit)
	defer cancel()
	out.Sent = true
	err := l.servers[r.UID].stepDown(asked)
	if errors.Is(err, errDenied) {
		out.Sent = false // it was refused: nothing has changed
		return l.denied(r.Pod, err)
	}
	out.Reply = "accepted"
	if err != nil {
		out.Reply = inShort(err)
	}
	return nil
}
