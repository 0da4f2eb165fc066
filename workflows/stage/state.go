package stage

import (
	"slices"
	"time"

	"go.temporal.io/sdk/workflow"

	"github.com/refit-run/refit/activities/artifact"
	"github.com/refit-run/refit/workflows/protocol"
)

// State is what a run hands to the run that continues it.
type State struct {
	Rows       []protocol.Stage   `json:"rows"`
	Children   []Closed           `json:"children,omitempty"`
	Progress   protocol.Progress  `json:"progress,omitzero"`
	Ignored    []protocol.Ignored `json:"ignored,omitempty"`
	Warnings   []string           `json:"warnings,omitempty"`
	Artifacts  []artifact.Ref     `json:"artifacts,omitempty"`
	HalfDone   []HalfDone         `json:"halfDone,omitempty"`
	LeftBehind []string           `json:"leftBehind,omitempty"`
	Paused     *protocol.Given    `json:"paused,omitempty"`
	Rolling    bool               `json:"rolling,omitempty"`
	Started    time.Time          `json:"started"`
	Deadline   time.Time          `json:"deadline,omitzero"`
	Acked      []protocol.Ack     `json:"acked,omitempty"`
}

// HalfDone is a section that failed and has not succeeded since.
type HalfDone struct {
	Section string `json:"section"`
	// Stage is the one that it belongs to.
	Stage string `json:"stage,omitempty"`
	Why   string `json:"why"`
}

// Closed is a child run that has ended, as the table shows it.
type Closed struct {
	Prefix string          `json:"prefix"`
	Row    int             `json:"row"`
	Status protocol.Status `json:"status"`
}

// State returns what a continued run needs. ContinueAsNew calls it when
// nothing is under way any more.
func (r *Run) State() State {
	s := State{
		Rows: slices.Clone(r.rows), Progress: r.progress,
		Ignored: r.ignored, Warnings: r.warnings, Artifacts: r.artifacts,
		HalfDone: r.halfDone, LeftBehind: r.leftBehind, Rolling: r.rolling,
		Started: r.started, Deadline: r.deadline, Acked: r.acked,
	}
	if r.paused {
		s.Paused = &r.pausedBy
	}
	for _, c := range r.children {
		s.Children = append(s.Children, Closed{Prefix: c.prefix, Row: c.row, Status: c.status})
	}
	return s
}

func (r *Run) restore(s State) {
	r.rows, r.progress = s.Rows, s.Progress
	r.ignored, r.warnings, r.artifacts = s.Ignored, s.Warnings, s.Artifacts
	r.halfDone, r.leftBehind, r.rolling = s.HalfDone, s.LeftBehind, s.Rolling
	r.started, r.deadline, r.acked = s.Started, s.Deadline, s.Acked
	if s.Paused != nil {
		r.paused, r.pausedBy = true, *s.Paused
	}
	for i, row := range r.rows {
		r.resumed = append(r.resumed, row.Name)
		if row.State == protocol.Running {
			r.rows[i].Attempts-- // going on is not another attempt
		}
	}
	for _, c := range s.Children {
		r.children = append(r.children, &child{prefix: c.Prefix, row: c.Row, status: c.Status, closed: true})
	}
}

// ShouldContinueAsNew reports whether the history has grown so long that the
// run should continue as new, and nothing stands against it: no child run at
// work, no section, no stop, nothing that waits. Ask at a safe boundary, then
// return ErrContinueAsNew from Do.
func (r *Run) ShouldContinueAsNew() bool {
	return workflow.GetInfo(r.ctx).GetContinueAsNewSuggested() && r.idle()
}

func (r *Run) idle() bool {
	return len(r.sections) == 0 && len(r.waits) == 0 && !r.Stopping() &&
		!slices.ContainsFunc(r.children, func(c *child) bool { return !c.closed })
}

// ContinueAsNew returns the error with which the workflow ends its run to
// continue as new with input(State). It waits until reports are delivered and
// Updates answered; an abort or rollback that arrives meanwhile wins, and the
// error is the one that Execute returns then.
func (r *Run) ContinueAsNew(wf any, input func(State) any) error {
	r.settle()
	if r.stopping != "" || r.aborted {
		return r.unwind(r.ctx, -1)
	}
	return workflow.NewContinueAsNewError(r.ctx, wf, input(r.State()))
}
