package view

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/jedib0t/go-pretty/v6/table"

	"github.com/refit-run/refit/workflows/protocol"
)

// Plan is what a run is going to do, before it does anything.
func Plan(p protocol.Plan, o Options) string {
	var b strings.Builder
	names := slices.Collect(maps.Keys(p.To))
	for n := range p.From {
		if _, ok := p.To[n]; !ok {
			names = append(names, n)
		}
	}
	slices.Sort(names)
	if len(names) > 0 {
		rows := make([]table.Row, len(names))
		for i, n := range names {
			rows[i] = table.Row{n, p.From[n], p.To[n]}
		}
		b.WriteString(o.grid(table.Row{"VERSION", "NOW", "PLANNED"}, rows) + "\n")
	}
	if len(p.Changes) > 0 {
		rows := make([]table.Row, len(p.Changes))
		for i, c := range p.Changes {
			rows[i] = table.Row{o.action(c.Action), c.Object, c.Lines}
		}
		b.WriteString(o.grid(table.Row{"CHANGE", "OBJECT", "LINES"}, rows) + "\n")
	}
	if p.Diff != "" {
		b.WriteString(o.diff(p.Diff) + "\n")
	}
	if len(p.Batches) > 0 {
		rows := make([]table.Row, len(p.Batches))
		for i, batch := range p.Batches {
			hosts := slices.Clone(batch.Hosts)
			shown := strings.Join(hosts, ", ")
			if more := batch.Total - len(hosts); more > 0 {
				shown += fmt.Sprintf(" and %d more", more)
			}
			rows[i] = table.Row{batch.Stage, batch.Total, shown}
		}
		b.WriteString(o.grid(table.Row{"BATCH", "HOSTS", "IN ORDER"}, rows) + "\n")
	}
	if len(p.Forecast) > 0 {
		b.WriteString("The new controller rolls by itself:\n" + Findings(p.Forecast, o) + "\n")
	}
	if len(p.LeftOff) > 0 {
		b.WriteString("Auto update stays off at the end:\n" + Findings(p.LeftOff, o) + "\n")
	}
	if len(p.Accepted) > 0 {
		fmt.Fprintf(&b, "Not met, accepted by the plan: %s\n", strings.Join(p.Accepted, ", "))
	}
	if len(p.Changes) == 0 && len(p.Batches) == 0 {
		b.WriteString("Nothing to change.\n")
	}
	if p.Digest != "" {
		fmt.Fprintf(&b, "plan sha256:%s\n", strings.TrimPrefix(p.Digest, "sha256:"))
	}
	return b.String()
}

func (o Options) action(a string) string {
	switch a {
	case "create":
		return o.paint(green, "+ "+a)
	case "delete":
		return o.paint(red, "- "+a)
	default:
		return o.paint(yellow, "~ "+a)
	}
}

// diff colours a unified diff.
func (o Options) diff(text string) string {
	lines := strings.Split(strings.TrimRight(text, "\n"), "\n")
	for i, l := range lines {
		switch {
		case strings.HasPrefix(l, "+++"), strings.HasPrefix(l, "---"):
			lines[i] = o.paint(bold, l)
		case strings.HasPrefix(l, "+"):
			lines[i] = o.paint(green, l)
		case strings.HasPrefix(l, "-"):
			lines[i] = o.paint(red, l)
		case strings.HasPrefix(l, "@@"):
			lines[i] = o.paint(cyan, l)
		}
	}
	return strings.Join(lines, "\n") + "\n"
}
