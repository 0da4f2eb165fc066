package stage

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"go.temporal.io/sdk/workflow"

	"github.com/refit-run/refit/workflows/protocol"
)

// Stage is one step of a run.
type Stage struct {
	// Name is unique in the run; people type it.
	Name, Purpose string
	Estimate      time.Duration
	Skippable     bool
	// Mutates: waits for an open window.
	Mutates bool
	// Section: the whole Do is one unbreakable section, which starts only if
	// Estimate fits the window.
	Section bool
	// Gate is asked before Do, once.
	Gate *Gate
	// Do acts. Its error parks the stage; retry runs it again from the start,
	// so it must be harmless to run twice.
	Do func(ctx workflow.Context, s *Scope) error
}

// Execute runs the stages in order. It returns nil, ErrAborted or
// ErrRolledBack, or ErrContinueAsNew when a Do asked for it; whatever else
// goes wrong parks inside, or in an unattended run is returned as Failed; any
// other error is a mistake in the stages given.
// A stage that the run before a continue-as-new had finished is passed over.
// Call it from the workflow's main coroutine; ctx carries values (activity
// options), its cancellation is not heeded.
func (r *Run) Execute(ctx workflow.Context, stages ...Stage) error {
	if r.undone {
		return ErrRolledBack
	}
	ctx, _ = workflow.NewDisconnectedContext(ctx)
	todo := make([]int, len(stages))
	for i, st := range stages {
		if st.Do == nil {
			return fmt.Errorf("stage %q has no Do", st.Name)
		}
		row, err := r.admit(st)
		if err != nil {
			return err
		}
		todo[i] = row
	}
	r.changed()
	for i, st := range stages {
		if s := r.rows[todo[i]].State; s == protocol.Done || s == protocol.Skipped {
			continue
		}
		if err := r.runStage(ctx, st, todo[i]); err != nil {
			return err
		}
	}
	return nil
}

// Announce names the stages that are going to be executed as far as they are
// known, in order; it replaces what was announced before. They stand as
// pending below the stages given to Execute, which takes them over by name,
// and vanish when the run ends without them.
func (r *Run) Announce(stages ...Stage) {
	r.coming = nil
	for _, st := range stages {
		if !slices.ContainsFunc(r.rows, func(row protocol.Stage) bool { return row.Name == st.Name }) {
			r.coming = append(r.coming, protocol.Stage{Name: st.Name, Purpose: st.Purpose, State: protocol.Pending})
		}
	}
	r.changed()
}

// admit gives a stage its row; rows of the run before are taken over by name.
func (r *Run) admit(st Stage) (int, error) {
	r.coming = slices.DeleteFunc(r.coming, func(row protocol.Stage) bool { return row.Name == st.Name })
	at := slices.IndexFunc(r.rows, func(row protocol.Stage) bool { return row.Name == st.Name })
	switch {
	case at < 0:
		r.rows = append(r.rows, protocol.Stage{Name: st.Name, Purpose: st.Purpose, State: protocol.Pending})
		return len(r.rows) - 1, nil
	case slices.Contains(r.resumed, st.Name):
		r.resumed = slices.DeleteFunc(r.resumed, func(name string) bool { return name == st.Name })
		r.rows[at].Purpose = st.Purpose
		return at, nil
	}
	return 0, fmt.Errorf("stage %q: the run already has a stage of that name", st.Name)
}

func (r *Run) runStage(ctx workflow.Context, st Stage, row int) error {
	r.current = row
	if r.stopping != "" || r.aborted {
		return r.unwind(ctx, -1)
	}
	gated := false
	for {
		scope := &Scope{run: r, row: row, stage: st}
		sctx, cancel := workflow.WithCancel(workflow.WithValue(ctx, scopeKey{}, scope))
		r.cancel = cancel
		err := r.attempt(sctx, scope, &gated)
		cancel()
		r.cancel = nil
		// A Do that started coroutines may return before their sections end.
		if werr := workflow.Await(ctx, func() bool { return len(r.sections) == 0 }); werr != nil {
			return werr
		}
		r.hosts, r.eta = nil, nil
		switch {
		case err == nil:
			r.finish(row, protocol.Done)
			if r.stopping != "" {
				return r.unwind(ctx, -1)
			}
			return nil
		case r.stopping != "" || r.aborted:
			return r.unwind(ctx, row)
		case errors.Is(err, ErrContinueAsNew):
			return err
		case r.o.Unattended:
			r.rows[row].Note = clip(Explain(err).Found, maxNote)
			r.finish(row, protocol.Aborted)
			r.aborted, r.coming = true, nil
			return &Failed{Stage: st.Name, Cause: err}
		}
		switch r.park(ctx, st, row, err) {
		case protocol.Retry:
		case protocol.Skip:
			r.finish(row, protocol.Skipped)
			return nil
		default:
			return r.unwind(ctx, row)
		}
	}
}

// attempt is one try: gate, then pause and windows, then Do.
func (r *Run) attempt(ctx workflow.Context, s *Scope, gated *bool) error {
	if s.stage.Gate != nil && !*gated {
		if err := r.boundary(ctx, s, nil); err != nil {
			return err
		}
		if err := s.Gate(ctx, *s.stage.Gate); err != nil {
			return err
		}
		*gated = true
	}
	if s.stage.Section {
		return s.Section(ctx, s.stage.Name, s.stage.Estimate, s.do)
	}
	n := s.need()
	if slices.ContainsFunc(r.halfDone, func(h HalfDone) bool { return h.Stage == s.stage.Name }) {
		n = nil // its half done section goes on first; each of the others asks for a window
	}
	if err := r.boundary(ctx, s, n); err != nil {
		return err
	}
	return s.do(ctx)
}

func (s *Scope) do(ctx workflow.Context) error {
	row := &s.run.rows[s.row]
	now := workflow.Now(ctx)
	if row.Started == nil {
		row.Started = &now
	}
	row.Ended = nil
	row.Attempts++
	row.State = protocol.Running
	s.run.changed()
	return s.stage.Do(ctx, s)
}

func (r *Run) finish(row int, state protocol.StageState) {
	now := workflow.Now(r.ctx)
	r.rows[row].State = state
	r.rows[row].Ended = &now
	r.changed()
}

// park waits for a person after a failure and returns retry or skip; "" means
// that the run is to be stopped.
func (r *Run) park(ctx workflow.Context, st Stage, row int, err error) string {
	w := &wait{Waiting: Explain(err), row: row}
	asked := w.Answers
	w.Stage = st.Name
	verbs := []string{protocol.Retry}
	if st.Skippable {
		verbs = append(verbs, protocol.Skip)
	}
	if asked != nil {
		verbs = slices.DeleteFunc([]string{protocol.Retry, protocol.Skip}, func(v string) bool { return !slices.Contains(asked, v) })
	}
	w.Answers = r.answers(verbs...)
	if half := r.halfDoneNames(); half != "" {
		w.Why = strings.TrimPrefix(w.Why+"; left half done: "+half, "; ")
	}
	if r.hold(ctx, w, 0, nil) != nil {
		return ""
	}
	return w.taken
}

// unwind ends the run's stages after abort or rollback was accepted. row is
// the stage that was stopped, -1 when none was at work.
func (r *Run) unwind(ctx workflow.Context, row int) error {
	if row >= 0 {
		r.finish(row, protocol.Aborted)
	}
	if r.stopping == protocol.Rollback && !r.rolling {
		return r.rollback(ctx)
	}
	r.stopping, r.aborted, r.coming = "", true, nil
	r.changed()
	return ErrAborted
}

func (r *Run) rollback(ctx workflow.Context) error {
	r.stopping, r.rolling, r.coming = "", true, nil
	undo := Stage{
		Name: protocol.Rollback, Purpose: "undo what this run has changed",
		Do: func(ctx workflow.Context, _ *Scope) error { return r.o.Rollback(ctx) },
	}
	row, err := r.admit(undo)
	if err != nil {
		return err
	}
	if err := r.runStage(ctx, undo, row); err != nil {
		return err
	}
	r.undone = true
	return ErrRolledBack
}

// Cleanup runs what must be undone at the end of any run, stopped ones too:
// it has a row like a stage, and its failure is recorded among what is left
// behind instead of parking, because nobody may be there to answer.
func (r *Run) Cleanup(name, purpose string, do func(ctx workflow.Context) error) {
	row, err := r.admit(Stage{Name: name, Purpose: purpose})
	if err != nil {
		r.leftBehind = append(r.leftBehind, err.Error())
		return
	}
	now := workflow.Now(r.ctx)
	r.current, r.coming = row, nil
	r.rows[row].State, r.rows[row].Started, r.rows[row].Attempts = protocol.Running, &now, 1
	r.changed()
	if err := do(r.ctx); err != nil {
		why := Explain(err)
		r.rows[row].Note = clip(why.Found, maxNote)
		r.leftBehind = append(r.leftBehind, fmt.Sprintf("%s failed: %s", name, why.Found))
		r.finish(row, protocol.Aborted)
		return
	}
	r.finish(row, protocol.Done)
}
