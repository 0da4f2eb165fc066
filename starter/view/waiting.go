package view

import (
	"fmt"
	"slices"
	"strings"

	"github.com/refit-run/refit/activities/finding"
	"github.com/refit-run/refit/workflows/protocol"
)

// Ways are the four ways to give one answer.
type Ways struct {
	Refit    string `json:"refit"`
	Page     string `json:"page,omitempty"`
	Temporal string `json:"temporal"`
	Tctl     string `json:"tctl"`
}

var waitWords = map[string]string{
	protocol.WaitApproval: "Waiting for approval of",
	protocol.WaitParked:   "Parked at",
	protocol.WaitWindow:   "Waiting for a maintenance window before",
	protocol.WaitPaused:   "Paused at",
	protocol.WaitQueue:    "Waiting for a worker at",
}

// Waiting says what a run waits for, why, and how to answer. The ways belong
// to the first of the answers.
func Waiting(w protocol.Waiting, ways Ways, o Options) string {
	var b strings.Builder
	words, ok := waitWords[w.Kind]
	if !ok {
		words = "Waiting (" + w.Kind + ") at"
	}
	tone := yellow
	if w.Kind == protocol.WaitParked {
		tone = red
	}
	fmt.Fprintf(&b, "%s %s  since %s (%s)", o.paint(tone, words), o.paint(bold, w.Stage), o.clock(w.Since), span(o.Now.Sub(w.Since)))
	if w.Until != nil {
		fmt.Fprintf(&b, ", until %s", o.clock(*w.Until))
	}
	b.WriteString("\n")
	for _, part := range []struct{ label, text string }{{"found", w.Found}, {"why", w.Why}, {"helps", w.Helps}} {
		if part.text != "" {
			fmt.Fprintf(&b, "  %-8s %s\n", part.label, indent(part.text))
		}
	}
	if w.Needed > 1 {
		fmt.Fprintf(&b, "  %-8s %d of %d different people", "approved", len(w.Approvals), w.Needed)
		if len(w.Approvals) > 0 {
			fmt.Fprintf(&b, ": %s", strings.Join(w.Approvals, ", "))
		}
		b.WriteString("\n")
	}
	if len(w.Findings) > 0 {
		b.WriteString(Findings(w.Findings, o))
	}
	if len(w.Answers) > 0 {
		fmt.Fprintf(&b, "  %-8s %s\n", "answers", strings.Join(w.Answers, ", "))
		fmt.Fprintf(&b, "To %s:\n", w.Answers[0])
		for _, way := range []string{ways.Refit, page(ways.Page), ways.Temporal, ways.Tctl} {
			if way != "" {
				fmt.Fprintf(&b, "  %s\n", way)
			}
		}
		if slices.Contains(w.Answers, protocol.Reject) {
			b.WriteString(o.paint(faint, "The other answers read the same with their own name.") + "\n")
		}
	}
	return b.String()
}

func page(address string) string {
	if address == "" {
		return ""
	}
	return address + "   (Send an Update)"
}

// Findings lists deviations, one a line, with what to do next below.
func Findings(all []finding.Finding, o Options) string {
	var b strings.Builder
	for _, f := range all {
		row := f.Row
		if row != "" {
			row += " "
		}
		fmt.Fprintf(&b, "  %s %s%s: ", o.paint(red, "✗"), row, o.paint(bold, f.Object))
		if f.Expected != "" {
			fmt.Fprintf(&b, "expected %s, found %s\n", f.Expected, f.Found)
		} else {
			fmt.Fprintf(&b, "%s\n", f.Found)
		}
		for _, line := range []struct{ label, text string }{{"why", f.Why}, {"next", f.Next}} {
			if line.text != "" {
				fmt.Fprintf(&b, "      %s: %s\n", line.label, line.text)
			}
		}
	}
	return b.String()
}

// indent keeps a text of several lines under its label.
func indent(s string) string {
	return strings.ReplaceAll(strings.TrimRight(s, "\n"), "\n", "\n           ")
}
