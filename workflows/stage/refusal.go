package stage

import (
	"fmt"
	"slices"
	"strings"

	"github.com/refit-run/refit/workflows/protocol"
)

// refusal says why an answer does not fit now; "" means that it fits. It
// changes nothing: Update validators call it.
func (r *Run) refusal(verb string, a protocol.Answer) string {
	if r.final != "" {
		return fmt.Sprintf("the run has ended (%s)", r.final)
	}
	if r.stopping != "" && (verb == protocol.Abort || verb == protocol.Rollback) && !(r.stopping == protocol.Rollback && verb == protocol.Abort) {
		return fmt.Sprintf("%s is already in progress", r.stopping)
	}
	if r.aborted {
		return "the run was aborted and is cleaning up"
	}
	switch verb {
	case protocol.Abort:
		return ""
	case protocol.Pause:
		if r.paused {
			return "the run is paused already"
		}
		return ""
	case protocol.Resume:
		if r.paused || slices.ContainsFunc(r.waitings(), func(w protocol.Waiting) bool { return w.Kind == protocol.WaitPaused }) {
			return ""
		}
		return "the run is not paused"
	case protocol.Rollback:
		return r.rollbackRefusal()
	}
	if r.stopping != "" {
		return fmt.Sprintf("%s is in progress", r.stopping)
	}
	w, _, reason := r.find(a.Stage)
	if reason != "" {
		return reason
	}
	if !slices.Contains(w.Answers, verb) {
		return fmt.Sprintf("stage %s waits for %s and takes %s", w.Stage, w.Kind, strings.Join(w.Answers, ", "))
	}
	if verb == protocol.Approve {
		return approverRefusal(w, a)
	}
	return ""
}

func (r *Run) rollbackRefusal() string {
	switch {
	case r.o.Rollback == nil:
		return "this run has no rollback"
	case r.rolling:
		return "the rollback is already running"
	}
	for _, w := range r.waitings() {
		if answerable(w) || w.Kind == protocol.WaitPaused {
			return ""
		}
	}
	return "the run is at work: rollback fits while it is parked, paused or waits for approval; pause it first"
}

func approverRefusal(w protocol.Waiting, a protocol.Answer) string {
	if w.Needed <= 1 {
		return ""
	}
	by := strings.TrimSpace(a.By)
	if by == "" {
		return fmt.Sprintf("stage %s asks for %d different approvers: say who approves (by)", w.Stage, w.Needed)
	}
	if slices.ContainsFunc(w.Approvals, func(s string) bool { return strings.EqualFold(s, by) }) {
		return fmt.Sprintf("%s has approved stage %s already; %d of %d approvals given, another person must approve",
			by, w.Stage, len(w.Approvals), w.Needed)
	}
	return ""
}

// find returns the waiting that an answer means, own or of a child run.
func (r *Run) find(name string) (w protocol.Waiting, own *wait, reason string) {
	var fits []protocol.Waiting
	for _, w := range r.waitings() {
		if answerable(w) {
			fits = append(fits, w)
		}
	}
	name = r.local(name)
	if name == "" {
		switch len(fits) {
		case 0:
			return w, nil, "no stage waits for an answer"
		case 1:
			name = fits[0].Stage
		default:
			var names []string
			for _, f := range fits {
				names = append(names, f.Stage)
			}
			return w, nil, fmt.Sprintf("%d stages wait (%s): name one", len(fits), strings.Join(names, ", "))
		}
	}
	for _, f := range fits {
		if f.Stage == name {
			for _, o := range r.waits {
				if o.Stage == name && answerable(o.Waiting) {
					own = o
				}
			}
			return f, own, ""
		}
	}
	for _, row := range r.table() {
		if row.Name == name {
			return w, nil, fmt.Sprintf("stage %s is %s and waits for no answer", name, row.State)
		}
	}
	return w, nil, fmt.Sprintf("there is no stage %q; status lists the stages", name)
}

// local strips the prefix under which the parent shows this run's stages: a
// person may answer the child run itself with the name seen in the parent.
func (r *Run) local(name string) string {
	if r.o.Parent != nil {
		return strings.TrimPrefix(name, r.o.Parent.Prefix+".")
	}
	return name
}
