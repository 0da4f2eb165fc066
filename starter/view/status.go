package view

import (
	"fmt"
	"strings"

	"github.com/jedib0t/go-pretty/v6/table"

	"github.com/refit-run/refit/workflows/protocol"
)

// barWidth leaves room for the counts beside the bar on an 80 column screen.
const barWidth = 40

// Status is the whole status of an open run: headline, stage table, progress,
// warnings. What the run waits for is said by Waiting.
func Status(id string, s protocol.Status, o Options) string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s  %s\n", o.paint(bold, id), o.Phase(s.Phase))
	b.WriteString("\n")
	rows := make([]table.Row, len(s.Stages))
	for i, st := range s.Stages {
		rows[i] = table.Row{st.Name, o.state(st.State), stageTimes(st, o.Now), note(st)}
	}
	b.WriteString(o.grid(table.Row{"STAGE", "STATE", "TIME", "NOTE"}, rows))
	if s.Progress.Total > 0 {
		fmt.Fprintf(&b, "\n%s %s", o.Bar(s.Progress, barWidth), Counts(s.Kind, s.Progress))
		if s.ETA != nil {
			fmt.Fprintf(&b, ", done about %s (in %s)", o.clock(*s.ETA), span(s.ETA.Sub(o.Now)))
		}
		b.WriteString("\n")
	}
	if len(s.Current) > 0 {
		fmt.Fprintf(&b, "in work: %s\n", list(s.Current, 6))
	}
	if s.Section != "" {
		fmt.Fprintf(&b, "unbreakable section: %s", s.Section)
		if s.Deferred != "" {
			fmt.Fprintf(&b, "; %s takes effect after it", s.Deferred)
		}
		b.WriteString("\n")
	}
	for _, w := range s.Warnings {
		fmt.Fprintf(&b, "%s %s\n", o.paint(yellow, "warning:"), w)
	}
	for _, i := range s.Ignored {
		fmt.Fprintf(&b, "%s %s\n", o.paint(yellow, "ignored:"), ignored(i, o))
	}
	return b.String()
}

func note(s protocol.Stage) string {
	var parts []string
	if s.Note != "" {
		parts = append(parts, s.Note)
	}
	if s.Attempts > 1 {
		parts = append(parts, fmt.Sprintf("attempt %d", s.Attempts))
	}
	for _, g := range s.Answers {
		given := g.Verb
		if g.By != "" {
			given += " by " + g.By
		}
		if g.Comment != "" {
			given += ": " + g.Comment
		}
		parts = append(parts, given)
	}
	return strings.Join(parts, "; ")
}

func ignored(i protocol.Ignored, o Options) string {
	s := i.Verb
	if i.Stage != "" {
		s += " " + i.Stage
	}
	if i.By != "" {
		s += " by " + i.By
	}
	return fmt.Sprintf("%s at %s: %s", s, o.clock(i.At), i.Reason)
}

// list joins at most limit names and counts the rest.
func list(names []string, limit int) string {
	if len(names) <= limit {
		return strings.Join(names, ", ")
	}
	return fmt.Sprintf("%s and %d more", strings.Join(names[:limit], ", "), len(names)-limit)
}
