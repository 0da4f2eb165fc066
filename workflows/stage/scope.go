package stage

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"go.temporal.io/sdk/workflow"

	"github.com/refit-run/refit/workflows/protocol"
)

// Bounds of texts: a note is one line; summaries are cut by the server.
const (
	maxNote    = 300
	maxSummary = 200
)

// Scope is what a Do has of its run. Its blocking methods take the context
// that the Do (or a coroutine that it started) was given.
type Scope struct {
	run   *Run
	row   int
	stage Stage
	// unanswered counts activities that were scheduled again.
	unanswered int
}

type (
	scopeKey   struct{}
	sectionKey struct{}
)

// ScopeOf returns the Scope of the stage that ctx belongs to, nil outside one.
func ScopeOf(ctx workflow.Context) *Scope {
	s, _ := ctx.Value(scopeKey{}).(*Scope)
	return s
}

func inSection(ctx workflow.Context) bool { return ctx.Value(sectionKey{}) != nil }

// Gate asks people whether to go on.
type Gate struct {
	// Name is the unique name under which the gate is answered; empty means
	// the stage's own.
	Name string
	// Found says what was reached, Why what depends on the answer, Helps what
	// to look at before answering.
	Found, Why, Helps string
	// Approvers is how many different people must approve (default 1).
	Approvers int
	// Until parks the gate when nobody has answered by then.
	Until *time.Time
}

// Run returns the run that the scope belongs to.
func (s *Scope) Run() *Run { return s.run }

// Note puts one line of evidence into the stage's row.
func (s *Scope) Note(format string, args ...any) {
	note := clip(strings.Join(strings.Fields(fmt.Sprintf(format, args...)), " "), maxNote)
	if s.run.rows[s.row].Note != note {
		s.run.rows[s.row].Note = note
		s.run.progressed()
	}
}

// Progress sets the run's own counts. Counts of child runs are added, so a
// stage whose children report theirs sets at most the total.
func (s *Scope) Progress(done, total, failed int) {
	s.run.progress = protocol.Progress{Done: done, Total: total, Failed: failed}
	s.run.progressed()
}

// Current names the hosts or objects in work.
func (s *Scope) Current(hosts ...string) {
	s.run.hosts = slices.Clone(hosts)
	s.run.progressed()
}

// ETA says when the stage is expected to end.
func (s *Scope) ETA(t time.Time) {
	s.run.eta = &t
	s.run.progressed()
}

// Safe is a safe boundary: it blocks while the run is paused, over its max
// duration or, in a mutating stage, outside the windows. Within a section it
// does nothing, because a section is not interrupted.
func (s *Scope) Safe(ctx workflow.Context) error {
	if inSection(ctx) {
		return nil
	}
	return s.run.boundary(ctx, s, s.need())
}

// Gate blocks until the people asked have approved. A rejected gate parks
// with the answers approve, rollback and abort. A person answers in their own
// time, so a gate must stand before a section, never inside: there it fails.
func (s *Scope) Gate(ctx workflow.Context, g Gate) error {
	r := s.run
	if inSection(ctx) {
		return fmt.Errorf("gate %q of stage %s stands inside an unbreakable section", g.Name, s.stage.Name)
	}
	w := &wait{row: s.row}
	w.Kind, w.Stage = protocol.WaitApproval, g.Name
	if w.Stage == "" {
		w.Stage = s.stage.Name
	}
	w.Found, w.Why, w.Helps, w.Until = g.Found, g.Why, g.Helps, g.Until
	w.Needed = max(1, g.Approvers)
	w.Answers = append([]string{protocol.Approve, protocol.Reject}, r.answers()...)
	if g.Until != nil {
		timeout := g.Until.Sub(workflow.Now(ctx))
		rejected := func() bool { return w.Kind == protocol.WaitParked }
		if timeout > 0 {
			if err := r.hold(ctx, w, timeout, rejected); err != nil {
				return err
			}
		}
		if w.taken != "" {
			return nil
		}
		if !rejected() {
			w.Kind, w.Until = protocol.WaitParked, nil
			w.Found = strings.TrimPrefix(fmt.Sprintf("%s; nobody answered until %s", g.Found, g.Until.Format(time.RFC3339)), "; ")
			w.Answers = r.answers(protocol.Approve)
		}
	}
	return r.hold(ctx, w, 0, nil)
}

// Section runs fn as an unbreakable section: it starts at a safe boundary and
// only if estimate fits the window; pause, window end and abort take effect
// after it. When abort was accepted meanwhile it returns ErrAborted also
// after fn succeeded: what must be recorded is recorded within fn. A section
// that fails is listed as half done until it succeeds; till then it starts
// again without a window, because half done is worse than late. A section
// within a section is part of it.
func (s *Scope) Section(ctx workflow.Context, name string, estimate time.Duration, fn func(ctx workflow.Context) error) error {
	if s.run.halfDoneSection(name) {
		return s.SectionNow(ctx, name, fn)
	}
	return s.section(ctx, name, &need{what: "section " + name, estimate: estimate}, fn)
}

// SectionNow is Section for what no window may delay: the way out of harm that
// somebody has just approved.
func (s *Scope) SectionNow(ctx workflow.Context, name string, fn func(ctx workflow.Context) error) error {
	return s.section(ctx, name, nil, fn)
}

func (s *Scope) section(ctx workflow.Context, name string, n *need, fn func(ctx workflow.Context) error) error {
	if inSection(ctx) {
		return fn(ctx)
	}
	r := s.run
	if err := r.boundary(ctx, s, n); err != nil {
		return err
	}
	detached, cancel := workflow.NewDisconnectedContext(workflow.WithValue(ctx, sectionKey{}, true))
	defer cancel()
	r.sections = append(r.sections, name)
	r.progressed()
	err := fn(detached)
	at := slices.Index(r.sections, name)
	r.sections = slices.Delete(r.sections, at, at+1)
	r.halfDone = slices.DeleteFunc(r.halfDone, func(h HalfDone) bool { return h.Section == name })
	if err != nil {
		r.halfDone = append(r.halfDone, HalfDone{Section: name, Stage: s.stage.Name, Why: clip(Explain(err).Found, maxNote)})
	}
	if r.stopping != "" || r.aborted {
		r.changed()
		return ErrAborted
	}
	r.progressed()
	return err
}

func (r *Run) halfDoneSection(name string) bool {
	return slices.ContainsFunc(r.halfDone, func(h HalfDone) bool { return h.Section == name })
}

func (r *Run) halfDoneNames() string {
	var names []string
	for _, h := range r.halfDone {
		names = append(names, h.Section)
	}
	return strings.Join(names, ", ")
}

// Sleep soaks: abort ends it at once, pause lets it run and holds at its end.
func (s *Scope) Sleep(ctx workflow.Context, d time.Duration, reason string) error {
	r := s.run
	before := r.rows[s.row].Note
	s.Note("%s until %s", reason, workflow.Now(ctx).Add(d).UTC().Format(time.RFC3339))
	soaking := r.rows[s.row].Note
	err := workflow.NewTimerWithOptions(ctx, d, workflow.TimerOptions{Summary: clip(reason, maxSummary)}).Get(ctx, nil)
	if r.rows[s.row].Note == soaking {
		s.Note("%s", before)
	}
	if r.stopping != "" && !inSection(ctx) || r.aborted {
		return ErrAborted
	}
	if err != nil {
		return err
	}
	return s.Safe(ctx)
}

// clip cuts a text to at most n bytes at a character boundary.
func clip(s string, n int) string {
	if len(s) <= n {
		return s
	}
	cut := n - len("…")
	for cut > 0 && s[cut]&0xC0 == 0x80 {
		cut--
	}
	return s[:cut] + "…"
}
