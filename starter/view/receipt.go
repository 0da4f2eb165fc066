package view

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/jedib0t/go-pretty/v6/table"

	"github.com/refit-run/refit/activities/artifact"
	"github.com/refit-run/refit/workflows/protocol"
)

var outcomeWords = map[protocol.Outcome]struct {
	words  string
	colour colour
}{
	protocol.OutcomeDone:       {"done", green},
	protocol.OutcomeNoChange:   {"nothing to change", green},
	protocol.OutcomePlanned:    {"planned, nothing changed", green},
	protocol.OutcomeAborted:    {"aborted", red},
	protocol.OutcomeRolledBack: {"rolled back", yellow},
}

// Receipt is the record of a closed run.
func Receipt(r protocol.Receipt, o Options) string {
	var b strings.Builder
	words := outcomeWords[r.Outcome]
	fmt.Fprintf(&b, "Receipt of %s  %s\n\n", o.paint(bold, r.WorkflowID), o.paint(words.colour, words.words))
	line := func(label, format string, args ...any) {
		fmt.Fprintf(&b, "%-9s %s\n", label, fmt.Sprintf(format, args...))
	}
	line("asked", "%s of %s in cluster %s", r.Kind, r.Object, r.Cluster)
	line("run", "%s", r.RunID)
	line("time", "%s to %s (%s)", o.clock(r.Started), o.clock(r.Ended), span(r.Ended.Sub(r.Started)))
	if r.PlanDigest != "" {
		line("plan", "sha256:%s", strings.TrimPrefix(r.PlanDigest, "sha256:"))
	}
	if counts := Counts(r.Kind, r.Progress); counts != "" {
		line("progress", "%s", counts)
	}
	for _, answer := range answers(r.Stages, o) {
		line("answered", "%s", answer)
	}
	if len(r.Acknowledged) > 0 {
		line("accepted", "%s", strings.Join(r.Acknowledged, ", "))
	}
	if table := versions(r, o); table != "" {
		b.WriteString("\n" + table)
	}
	rows := make([]table.Row, len(r.Stages))
	for i, s := range r.Stages {
		rows[i] = table.Row{s.Name, o.state(s.State), stageTimes(s, r.Ended), s.Note}
	}
	b.WriteString("\n" + o.grid(table.Row{"STAGE", "STATE", "TIME", "EVIDENCE"}, rows))
	for _, w := range r.Warnings {
		fmt.Fprintf(&b, "%s %s\n", o.paint(yellow, "warning:"), w)
	}
	for _, i := range r.Ignored {
		fmt.Fprintf(&b, "%s %s\n", o.paint(yellow, "ignored:"), ignored(i, o))
	}
	if len(r.Probes) > 0 {
		b.WriteString("\n" + probes(r.Probes, o))
	}
	if len(r.LeftBehind) > 0 {
		b.WriteString("\nNot undone:\n")
		for _, l := range r.LeftBehind {
			fmt.Fprintf(&b, "  %s\n", l)
		}
	}
	if len(r.Artifacts) > 0 {
		b.WriteString("\n" + Artifacts(r.Artifacts, o))
	}
	return b.String()
}

// Closed is one line about how a run ended.
func Closed(r protocol.Receipt, o Options) string {
	words := outcomeWords[r.Outcome]
	line := fmt.Sprintf("%s  %s after %s", o.paint(bold, r.WorkflowID), o.paint(words.colour, words.words), span(r.Ended.Sub(r.Started)))
	if counts := Counts(r.Kind, r.Progress); counts != "" {
		line += ", " + counts
	}
	return line + "; receipt: refit receipt " + r.WorkflowID + "\n"
}

func answers(stages []protocol.Stage, o Options) []string {
	var out []string
	for _, s := range stages {
		for _, g := range s.Answers {
			a := g.Verb + " " + s.Name
			if g.By != "" {
				a += " by " + g.By
			}
			a += " at " + o.clock(g.At)
			if g.Comment != "" {
				a += ": " + g.Comment
			}
			out = append(out, a)
		}
	}
	return out
}

func versions(r protocol.Receipt, o Options) string {
	if len(r.Before) == 0 && len(r.After) == 0 {
		return ""
	}
	names := slices.Collect(maps.Keys(r.Before))
	for name := range r.After {
		if _, ok := r.Before[name]; !ok {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	rows := make([]table.Row, len(names))
	for i, n := range names {
		rows[i] = table.Row{n, r.Before[n], r.After[n]}
	}
	return o.grid(table.Row{"VERSION", "BEFORE", "AFTER"}, rows)
}

// probes is the table of what the CUDA probe found inside workloads.
func probes(found []protocol.Probe, o Options) string {
	rows := make([]table.Row, len(found))
	for i, p := range found {
		var said []string
		for _, f := range p.Result.Proofs {
			said = append(said, fmt.Sprintf("%s: %d patterns", f.Device, f.Patterns))
		}
		for _, f := range p.Result.Found {
			said = append(said, f.Name+": "+f.Found)
		}
		for _, c := range p.Result.Checks {
			said = append(said, c.Name+": "+cmp.Or(c.Skipped, c.Found))
		}
		rows[i] = table.Row{p.Pool, p.Node, string(p.Result.Verdict), strings.Join(said, "; ")}
	}
	return o.grid(table.Row{"CUDA PROBE", "NODE", "VERDICT", "FOUND"}, rows)
}

// Artifacts is the table of what a run stored.
func Artifacts(refs []artifact.Ref, o Options) string {
	rows := make([]table.Row, len(refs))
	for i, a := range refs {
		rows[i] = table.Row{a.Name, a.Kind, a.Entries, size(a.Size), short(a.PlainSHA256)}
	}
	return o.grid(table.Row{"ARTIFACT", "KIND", "ENTRIES", "SIZE", "SHA-256"}, rows)
}

func short(digest string) string {
	return digest[:min(12, len(digest))]
}

func size(n int64) string {
	switch {
	case n < 1<<10:
		return fmt.Sprintf("%d B", n)
	case n < 1<<20:
		return fmt.Sprintf("%.1f KiB", float64(n)/(1<<10))
	default:
		return fmt.Sprintf("%.1f MiB", float64(n)/(1<<20))
	}
}
