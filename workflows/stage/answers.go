package stage

import (
	"fmt"
	"slices"
	"strings"

	"go.temporal.io/sdk/temporal"
	"go.temporal.io/sdk/workflow"

	"github.com/refit-run/refit/workflows/protocol"
)

// maxIgnored bounds the record of signals that fitted nothing; the newest stay.
const maxIgnored = 50

// verbsByWeight is the order in which signals of one workflow task are taken:
// their order of arrival is not visible here, so what stops more goes first,
// and pause after resume, so that the run holds when both arrive.
var verbsByWeight = []string{
	protocol.Abort, protocol.Rollback, protocol.Resume, protocol.Pause,
	protocol.Reject, protocol.Approve, protocol.Retry, protocol.Skip,
}

func describe(verb string) string {
	switch verb {
	case protocol.Approve:
		return "Let the waiting stage go on: {stage, by, comment}"
	case protocol.Reject:
		return "Refuse at a gate; the run parks: {stage, by, comment}"
	case protocol.Retry:
		return "Run the parked stage again: {stage, by, comment}"
	case protocol.Skip:
		return "Leave the parked stage out, where it allows that: {stage, by, comment}"
	case protocol.Pause:
		return "Hold the run at its next safe boundary: {by, comment}"
	case protocol.Resume:
		return "Go on after a pause: {by, comment}"
	case protocol.Abort:
		return "End the run after the section in progress, undoing only what must not stay: {by, comment}"
	}
	return "Stop and run the rollback, where one is defined: {by, comment}"
}

// wait is one stage that waits for a person or a window.
type wait struct {
	protocol.Waiting
	row   int
	taken string // the verb that ended the wait
}

// answerable reports whether a waiting takes answers that name a stage.
func answerable(w protocol.Waiting) bool {
	return w.Kind == protocol.WaitApproval || w.Kind == protocol.WaitParked
}

func (r *Run) listen(ctx workflow.Context) error {
	for _, verb := range protocol.Verbs {
		err := workflow.SetUpdateHandlerWithOptions(ctx, verb,
			func(ctx workflow.Context, a protocol.Answer) (protocol.Accepted, error) {
				return r.update(ctx, verb, a)
			},
			workflow.UpdateHandlerOptions{
				Description: describe(verb),
				Validator: func(_ workflow.Context, a protocol.Answer) error {
					if reason := r.refusal(verb, a); reason != "" {
						return refused(verb, reason)
					}
					return nil
				},
			})
		if err != nil {
			return err
		}
	}
	for _, verb := range verbsByWeight {
		workflow.GetSignalChannelWithOptions(ctx, verb, workflow.SignalChannelOptions{Description: describe(verb)})
	}
	workflow.GetSignalChannelWithOptions(ctx, protocol.SignalReport,
		workflow.SignalChannelOptions{Description: "Report of a child run; not for people"})
	workflow.Go(r.ctx, r.receive)
	cancelled := ctx.Done()
	workflow.Go(r.ctx, func(ctx workflow.Context) {
		cancelled.Receive(ctx, nil)
		r.signal(protocol.Abort, protocol.Answer{Comment: "cancelled from outside (UI or API), which means abort"})
	})
	return nil
}

func (r *Run) receive(ctx workflow.Context) {
	selector := workflow.NewSelector(ctx)
	for _, verb := range verbsByWeight {
		selector.AddReceive(workflow.GetSignalChannel(ctx, verb), func(ch workflow.ReceiveChannel, _ bool) {
			var a protocol.Answer
			ch.Receive(ctx, &a)
			r.signal(verb, a)
		})
	}
	selector.AddReceive(workflow.GetSignalChannel(ctx, protocol.SignalReport), func(ch workflow.ReceiveChannel, _ bool) {
		var rep protocol.Report
		ch.Receive(ctx, &rep)
		r.merge(rep)
	})
	for {
		selector.Select(ctx)
	}
}

// drain reads what arrived since the listener last ran: a signal must not be
// lost without a trace when the run ends or continues as new.
func (r *Run) drain() (found bool) {
	for _, verb := range verbsByWeight {
		ch := workflow.GetSignalChannel(r.ctx, verb)
		var a protocol.Answer
		for ch.ReceiveAsync(&a) {
			r.signal(verb, a)
			a, found = protocol.Answer{}, true
		}
	}
	ch := workflow.GetSignalChannel(r.ctx, protocol.SignalReport)
	var rep protocol.Report
	for ch.ReceiveAsync(&rep) {
		r.merge(rep)
		rep, found = protocol.Report{}, true
	}
	return found
}

func refused(verb, reason string) error {
	return temporal.NewNonRetryableApplicationError(verb+" refused: "+reason, "Refused", nil)
}

// signal takes an answer that has nobody to reply to: one that does not fit is
// recorded, never kept. A forwarded answer is acknowledged to the parent.
func (r *Run) signal(verb string, a protocol.Answer) {
	reason := r.refusal(verb, a)
	if reason == "" {
		for _, f := range r.accept(verb, a) {
			r.pending = append(r.pending, f)
		}
	}
	switch {
	case a.ID != "":
		r.acknowledge(a.ID, reason)
	case reason != "":
		r.ignore(verb, a, reason)
	}
	r.changed()
}

func (r *Run) ignore(verb string, a protocol.Answer, reason string) {
	r.ignored = append(r.ignored, protocol.Ignored{
		Verb: verb, Stage: a.Stage, By: a.By, At: workflow.Now(r.ctx), Reason: reason,
	})
	if n := len(r.ignored); n > maxIgnored {
		r.ignored = slices.Clone(r.ignored[n-maxIgnored:])
	}
}

// update takes an answer whose sender waits: it returns when every child run
// that the answer was forwarded to has acknowledged it.
func (r *Run) update(ctx workflow.Context, verb string, a protocol.Answer) (protocol.Accepted, error) {
	ctx, _ = workflow.NewDisconnectedContext(ctx)
	// The state may have moved on since the validator ran.
	if reason := r.refusal(verb, a); reason != "" {
		return protocol.Accepted{}, refused(verb, reason)
	}
	w, _, _ := r.find(a.Stage)
	sent := r.accept(verb, a)
	r.changed()
	for _, f := range sent {
		if err := workflow.Await(ctx, func() bool { _, ok := f.reply(); return ok }); err != nil {
			return protocol.Accepted{}, err
		}
		if reason, _ := f.reply(); reason != "" && !protocol.AddressesRun(verb) {
			return protocol.Accepted{}, refused(verb, reason)
		}
	}
	accepted := protocol.Accepted{Verb: verb, Effect: r.effect(verb)}
	if !protocol.AddressesRun(verb) {
		accepted.Stage = w.Stage
	}
	return accepted, nil
}

func (r *Run) effect(verb string) string {
	s := r.Status()
	switch {
	case s.Deferred == verb && s.Section != "":
		return fmt.Sprintf("takes effect after the section %s", s.Section)
	case s.Deferred == verb:
		return "takes effect at the next safe boundary"
	}
	return "in effect"
}

// accept lets a fitting answer take effect and returns what was forwarded.
func (r *Run) accept(verb string, a protocol.Answer) []forwarded {
	now := workflow.Now(r.ctx)
	given := protocol.Given{Verb: verb, By: strings.TrimSpace(a.By), Comment: a.Comment, At: now}
	switch verb {
	case protocol.Pause, protocol.Resume:
		r.paused, r.pausedBy = verb == protocol.Pause, given
		r.record(r.current, given)
		return r.forwardAll(verb, a)
	case protocol.Abort, protocol.Rollback:
		r.record(r.current, given)
		r.stop(verb)
		return r.forwardAll(protocol.Abort, a)
	}
	w, own, _ := r.find(a.Stage)
	if own == nil {
		return r.forwardTo(w.Stage, verb, a)
	}
	r.record(own.row, given)
	switch verb {
	case protocol.Approve:
		if own.Needed > 1 {
			own.Approvals = append(own.Approvals, given.By)
		}
		if own.Needed <= 1 || len(own.Approvals) >= own.Needed {
			own.taken = verb
		}
	case protocol.Reject:
		own.reject(given, r)
	default:
		own.taken = verb
	}
	return nil
}

// reject turns a gate into a parking that approve can still lift.
func (w *wait) reject(given protocol.Given, r *Run) {
	w.Kind = protocol.WaitParked
	w.Approvals = nil
	w.Since = given.At
	w.Until = nil
	w.Answers = r.answers(protocol.Approve)
	w.Found = "rejected" + byAndComment(given)
	w.Helps = "approve to go on after all, or abort"
	if slices.Contains(w.Answers, protocol.Rollback) {
		w.Helps = "approve to go on after all, roll back, or abort"
	}
	r.rows[w.row].State = protocol.Parked
}

func byAndComment(g protocol.Given) (s string) {
	if g.By != "" {
		s = " by " + g.By
	}
	if g.Comment != "" {
		s += ": " + g.Comment
	}
	return s
}

// answers appends to the verbs given those that every stop takes.
func (r *Run) answers(verbs ...string) []string {
	if r.o.Rollback != nil && !r.rolling {
		verbs = append(verbs, protocol.Rollback)
	}
	return append(verbs, protocol.Abort)
}

func (r *Run) record(row int, g protocol.Given) {
	if row >= 0 && row < len(r.rows) {
		r.rows[row].Answers = append(r.rows[row].Answers, g)
	}
}

// stop lets abort or rollback take effect: outside sections at once, within
// one after it, because a section's context does not descend from the stage's.
func (r *Run) stop(verb string) {
	r.stopping = verb
	r.paused = false // what was asked for goes on without a resume
	if r.cancel != nil {
		r.cancel()
	}
}
