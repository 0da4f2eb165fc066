package stage

import (
	"slices"
	"time"

	"go.temporal.io/sdk/temporal"
	"go.temporal.io/sdk/workflow"

	"github.com/refit-run/refit/workflows/protocol"
)

// Status is what the query answers: this run and, merged in, its child runs.
func (r *Run) Status() protocol.Status {
	s := protocol.Status{
		Kind: r.o.Kind, Cluster: r.o.Cluster,
		Stages: r.table(), Progress: r.totals(), ETA: r.eta,
		Ignored: slices.Clone(r.ignored), Warnings: slices.Clone(r.warnings), Artifacts: slices.Clone(r.artifacts),
		Current: slices.Clone(r.hosts), Section: r.sectionName(), Deferred: r.deferred(),
	}
	if r.current >= 0 {
		s.Stage = r.rows[r.current].Name
	}
	for _, c := range r.children {
		if c.closed {
			continue
		}
		s.Current = append(s.Current, c.status.Current...)
		if s.Section == "" {
			s.Section = c.status.Section
		}
		if s.Deferred == "" {
			s.Deferred = c.status.Deferred
		}
		if s.ETA == nil {
			s.ETA = c.status.ETA
		}
		if c.status.Stage != "" && c.row == r.current {
			s.Stage = c.prefix + "." + c.status.Stage
		}
	}
	waits := r.waitings()
	if len(waits) > 0 {
		s.WaitingFor = &waits[0]
		s.AlsoWaiting = waits[1:]
		if answerable(waits[0]) {
			s.Stage = waits[0].Stage
		}
	}
	s.Phase = r.phase(waits)
	return s
}

func (r *Run) phase(waits []protocol.Waiting) protocol.Phase {
	switch {
	case r.final != "":
		return r.final
	case r.aborted:
		return protocol.PhaseAborted
	case len(waits) == 0:
		return protocol.PhaseRunning
	}
	switch waits[0].Kind {
	case protocol.WaitParked:
		return protocol.PhaseParked
	case protocol.WaitApproval:
		return protocol.PhaseGate
	case protocol.WaitPaused:
		return protocol.PhasePaused
	case protocol.WaitWindow:
		return protocol.PhaseWindow
	}
	return protocol.PhaseRunning // a queue without a worker holds one activity, not the run
}

// urgency orders what a run waits for: what a person must answer comes first.
func urgency(kind string) int {
	return slices.Index([]string{
		protocol.WaitParked, protocol.WaitApproval, protocol.WaitPaused, protocol.WaitWindow, protocol.WaitQueue,
	}, kind)
}

// waitings lists what waits, own and of child runs, the most urgent first.
// Coroutines of one stage that are held by the same pause or window count once.
func (r *Run) waitings() []protocol.Waiting {
	var out []protocol.Waiting
	add := func(w protocol.Waiting) {
		if !answerable(w) && slices.ContainsFunc(out, func(o protocol.Waiting) bool { return o.Kind == w.Kind && o.Stage == w.Stage }) {
			return
		}
		out = append(out, w)
	}
	for _, w := range r.waits {
		if w.taken == "" {
			shown := w.Waiting
			shown.Answers = slices.Clone(w.Answers)
			shown.Approvals = slices.Clone(w.Approvals)
			add(shown)
		}
	}
	for _, c := range r.children {
		if c.closed {
			continue
		}
		for _, w := range c.waitings() {
			if answerable(w) && r.o.Rollback != nil && !r.rolling && !slices.Contains(w.Answers, protocol.Rollback) {
				w.Answers = append(slices.Clone(w.Answers), protocol.Rollback) // this run's
			}
			add(w)
		}
	}
	slices.SortStableFunc(out, func(a, b protocol.Waiting) int { return urgency(a.Kind) - urgency(b.Kind) })
	return out
}

// table is the stage table: the rows of a child run follow the stage that
// started it, named with its prefix.
func (r *Run) table() []protocol.Stage {
	out := make([]protocol.Stage, 0, len(r.rows))
	for i, row := range r.rows {
		row.Answers = slices.Clone(row.Answers)
		out = append(out, row)
		for _, c := range r.children {
			if c.row != i {
				continue
			}
			for _, sub := range c.status.Stages {
				sub.Name = c.prefix + "." + sub.Name
				out = append(out, sub)
			}
		}
	}
	return append(out, r.coming...)
}

func (r *Run) totals() protocol.Progress {
	p := r.progress
	total := 0
	for _, c := range r.children {
		p.Done += c.status.Progress.Done
		p.Failed += c.status.Progress.Failed
		total += c.status.Progress.Total
	}
	p.Total = max(p.Total, total)
	return p
}

func (r *Run) sectionName() string {
	if len(r.sections) == 0 {
		return ""
	}
	name := r.sections[0]
	for i, s := range r.sections[1:] {
		if i == 4 {
			return name + ", …"
		}
		name += ", " + s
	}
	return name
}

// deferred is the verb that was accepted and has not taken effect yet.
func (r *Run) deferred() string {
	switch {
	case r.final != "":
		return ""
	case r.stopping != "" && len(r.sections) > 0:
		return r.stopping
	case r.paused && !slices.ContainsFunc(r.waitings(), func(w protocol.Waiting) bool { return w.Kind == protocol.WaitPaused }):
		return protocol.Pause
	}
	return ""
}

// changed publishes a change of state: live details, search attributes and
// the report to the parent. Nothing is written when nothing differs.
func (r *Run) changed() {
	s := r.Status()
	r.search.upsert(r, s)
	r.showDetails(s)
	r.report.due = r.o.Parent != nil && !r.report.orphan
}

// progressed publishes what changes often: the details at once, the report
// with the next change of state or at most reportEvery after the last one,
// because each report costs events in two histories.
func (r *Run) progressed() {
	r.showDetails(r.Status())
	r.report.stale = r.o.Parent != nil && !r.report.orphan
}

func (r *Run) showDetails(s protocol.Status) {
	text := Details(s, r.answering())
	if text != r.details {
		r.details = text
		workflow.SetCurrentDetails(r.ctx, text)
	}
}

// answering names the run that people answer: the parent takes every answer.
func (r *Run) answering() Target {
	if p := r.o.Parent; p != nil {
		return Target{Namespace: r.info.Namespace, WorkflowID: p.WorkflowID, Stage: p.Prefix}
	}
	return Target{Namespace: r.info.Namespace, WorkflowID: r.info.WorkflowExecution.ID}
}

// searched remembers what was upserted last.
type searched struct {
	enabled bool
	done    bool
	phase   protocol.Phase
	waiting string
}

func (s *searched) upsert(r *Run, status protocol.Status) {
	waiting := ""
	if status.WaitingFor != nil {
		waiting = status.WaitingFor.Kind
	}
	if !s.enabled || s.done && s.phase == status.Phase && s.waiting == waiting {
		return
	}
	updates := []temporal.SearchAttributeUpdate{
		temporal.NewSearchAttributeKeyKeyword(protocol.AttrPhase).ValueSet(string(status.Phase)),
	}
	key := temporal.NewSearchAttributeKeyKeyword(protocol.AttrWaitingFor)
	if waiting != "" {
		updates = append(updates, key.ValueSet(waiting))
	} else if s.waiting != "" {
		updates = append(updates, key.ValueUnset())
	}
	if !s.done {
		updates = append(updates,
			temporal.NewSearchAttributeKeyKeyword(protocol.AttrCluster).ValueSet(r.o.Cluster),
			temporal.NewSearchAttributeKeyKeyword(protocol.AttrKind).ValueSet(r.o.Kind))
	}
	if err := workflow.UpsertTypedSearchAttributes(r.ctx, updates...); err != nil {
		workflow.GetLogger(r.ctx).Warn("search attributes not updated", "error", err)
		s.enabled = false
		return
	}
	s.done, s.phase, s.waiting = true, status.Phase, waiting
}

// reportEvery is the least time between reports of mere progress.
const reportEvery = 15 * time.Second

type reporting struct {
	due     bool // a change of state
	stale   bool // a change that can wait for reportEvery
	sending bool
	orphan  bool // the parent is gone
	last    time.Time
}

// reportUpwards sends reports one after the other; changes that happen while
// one is under way go out together with the next.
func (r *Run) reportUpwards(ctx workflow.Context) {
	for !r.report.orphan {
		if workflow.Await(ctx, func() bool { return r.report.due || r.report.stale }) != nil {
			return
		}
		if rest := reportEvery - workflow.Now(ctx).Sub(r.report.last); !r.report.due && rest > 0 {
			if _, err := workflow.AwaitWithTimeout(ctx, rest, func() bool { return r.report.due }); err != nil {
				return
			}
		}
		r.report.due, r.report.stale, r.report.sending = false, false, true
		r.report.last = workflow.Now(ctx)
		s := r.Status()
		s.Stages = abridge(s.Stages, maxReported)
		s.Ignored, s.Warnings, s.Artifacts = nil, nil, nil // the child's result has them
		err := workflow.SignalExternalWorkflow(ctx, r.o.Parent.WorkflowID, r.o.Parent.RunID, protocol.SignalReport, protocol.Report{
			Prefix: r.o.Parent.Prefix, WorkflowID: r.info.WorkflowExecution.ID, Status: s, Acked: slices.Clone(r.acked),
		}).Get(ctx, nil)
		r.report.sending = false
		if err != nil {
			// The run goes on by itself: its own query and verbs still work.
			workflow.GetLogger(ctx).Warn("parent run is gone; no more reports", "parent", r.o.Parent.WorkflowID, "error", err)
			r.report.orphan, r.report.due, r.report.stale = true, false, false
		}
	}
}
