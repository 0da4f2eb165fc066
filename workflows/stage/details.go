package stage

import (
	"fmt"
	"strings"
	"time"

	"github.com/refit-run/refit/workflows/protocol"
)

// Bounds of what is shown: the UI takes 20,000 bytes of details; a report
// repeats the table on every change of a child's state.
const (
	maxDetails  = 19500
	maxReported = 120
	maxText     = 1500
)

// Details renders a status as markdown for the Temporal UI, at most
// maxDetails long. to names the run that people answer; its Stage, if any, is
// the prefix that this run's stages have there.
func Details(s protocol.Status, to Target) string {
	head := renderHead(s, to)
	for rows := len(s.Stages); ; rows = rows * 3 / 4 {
		text := head + renderTable(abridge(s.Stages, rows))
		if len(text) <= maxDetails || rows <= 4 {
			return clip(text, maxDetails)
		}
	}
}

func renderHead(s protocol.Status, to Target) string {
	var b strings.Builder
	fmt.Fprintf(&b, "**%s**", s.Phase)
	if s.Stage != "" {
		fmt.Fprintf(&b, " at `%s`", s.Stage)
	}
	if p := s.Progress; p.Total > 0 {
		fmt.Fprintf(&b, ", %d of %d done", p.Done, p.Total)
		if p.Failed > 0 {
			fmt.Fprintf(&b, ", %d failed", p.Failed)
		}
	}
	if s.ETA != nil {
		fmt.Fprintf(&b, ", ready about %s", clock(*s.ETA))
	}
	b.WriteString("\n\n")
	if s.Section != "" {
		fmt.Fprintf(&b, "In the unbreakable section `%s`.", clip(s.Section, maxNote))
		if s.Deferred != "" {
			fmt.Fprintf(&b, " **%s** takes effect after it.", s.Deferred)
		}
		b.WriteString("\n\n")
	} else if s.Deferred != "" {
		fmt.Fprintf(&b, "**%s** takes effect at the next safe boundary.\n\n", s.Deferred)
	}
	if len(s.Current) > 0 {
		fmt.Fprintf(&b, "Now: %s\n\n", clip(strings.Join(s.Current, ", "), maxNote))
	}
	if s.WaitingFor != nil {
		renderWaiting(&b, *s.WaitingFor, to)
	}
	for i, w := range s.AlsoWaiting {
		if i == 10 {
			fmt.Fprintf(&b, "… and %d more wait.\n\n", len(s.AlsoWaiting)-i)
			break
		}
		fmt.Fprintf(&b, "Also waiting for %s: `%s`: %s\n\n", w.Kind, w.Stage, clip(w.Found, maxNote))
	}
	for i, w := range s.Warnings {
		if i == 10 {
			fmt.Fprintf(&b, "… and %d more warnings.\n\n", len(s.Warnings)-i)
			break
		}
		fmt.Fprintf(&b, "Warning: %s\n\n", clip(w, maxNote))
	}
	return b.String()
}

func renderWaiting(b *strings.Builder, w protocol.Waiting, to Target) {
	fmt.Fprintf(b, "### Waits for %s: `%s`\n\n", waitsFor(w.Kind), w.Stage)
	fmt.Fprintf(b, "Since %s", clock(w.Since))
	if w.Until != nil {
		fmt.Fprintf(b, ", until %s", clock(*w.Until))
	}
	if w.Needed > 1 {
		fmt.Fprintf(b, "; %d of %d approvals", len(w.Approvals), w.Needed)
		if len(w.Approvals) > 0 {
			fmt.Fprintf(b, " (%s)", strings.Join(w.Approvals, ", "))
		}
	}
	b.WriteString("\n\n")
	for _, part := range []struct{ label, text string }{
		{"Found", w.Found}, {"Why it matters", w.Why}, {"What helps", w.Helps},
	} {
		if part.text != "" {
			fmt.Fprintf(b, "- **%s:** %s\n", part.label, clip(oneLine(part.text), maxText))
		}
	}
	for i, f := range w.Findings {
		if i == 5 {
			fmt.Fprintf(b, "- … and %d more findings, see status\n", len(w.Findings)-i)
			break
		}
		fmt.Fprintf(b, "- %s\n", clip(oneLine(f.String()), maxNote))
	}
	if len(w.Answers) == 0 {
		b.WriteString("\n")
		return
	}
	fmt.Fprintf(b, "\n**Answers:** %s. For example:\n\n", strings.Join(w.Answers, ", "))
	name := w.Stage
	if to.Stage != "" {
		name = to.Stage + "." + name
	}
	commands := Target{Namespace: to.Namespace, WorkflowID: to.WorkflowID, Verb: w.Answers[0], Stage: name}.Commands()
	fmt.Fprintf(b, "```\n%s\n%s\n%s\n```\n\nor on this page: Send an Update, `%s`.\n\n", commands[0], commands[2], commands[3], w.Answers[0])
}

func waitsFor(kind string) string {
	switch kind {
	case protocol.WaitParked:
		return "an answer (parked)"
	case protocol.WaitWindow:
		return "a maintenance window"
	case protocol.WaitPaused:
		return "resume (paused)"
	case protocol.WaitQueue:
		return "a worker"
	}
	return kind
}

func renderTable(rows []protocol.Stage) string {
	if len(rows) == 0 {
		return ""
	}
	var b strings.Builder
	b.WriteString("| Stage | State | Took | Evidence |\n|---|---|---|---|\n")
	for _, r := range rows {
		took := ""
		if r.Started != nil && r.Ended != nil {
			took = r.Ended.Sub(*r.Started).Round(time.Second).String()
		} else if r.Started != nil {
			took = "since " + clock(*r.Started)
		}
		note := r.Note
		if note == "" {
			note = r.Purpose
		}
		if r.Attempts > 1 {
			note = fmt.Sprintf("attempt %d; %s", r.Attempts, note)
		}
		fmt.Fprintf(&b, "| %s | %s | %s | %s |\n", cell(r.Name), r.State, took, cell(clip(note, maxNote)))
	}
	return b.String()
}

// abridge keeps at most n rows: the first and the last few, and around the
// middle one row that says how many are left out. Rows that are at work or
// wait go last to be left out.
func abridge(rows []protocol.Stage, n int) []protocol.Stage {
	if len(rows) <= n || n < 3 {
		return rows
	}
	quiet := func(s protocol.StageState) bool {
		return s == protocol.Done || s == protocol.Skipped || s == protocol.Pending
	}
	drop := len(rows) - n + 1
	left := make([]bool, len(rows))
	for _, all := range []bool{false, true} {
		// From the middle outwards, quiet rows first.
		for i := range rows {
			at := len(rows)/2 + (i+1)/2*(1-2*(i%2))
			if drop > 0 && at > 0 && at < len(rows)-1 && !left[at] && (all || quiet(rows[at].State)) {
				left[at] = true
				drop--
			}
		}
	}
	var out []protocol.Stage
	mark := -1
	for i, row := range rows {
		if !left[i] {
			out = append(out, row)
			continue
		}
		if mark < 0 {
			mark = len(out)
			out = append(out, protocol.Stage{Name: "…", State: row.State})
		}
	}
	if mark >= 0 {
		out[mark].Purpose = fmt.Sprintf("%d stages left out here; see status", len(rows)-len(out)+1)
	}
	return out
}

func clock(t time.Time) string { return t.UTC().Format("2006-01-02 15:04:05Z") }

func oneLine(s string) string { return strings.Join(strings.Fields(s), " ") }

func cell(s string) string { return strings.ReplaceAll(oneLine(s), "|", `\|`) }
