// Package view turns statuses, receipts and findings into text for people.
// Every function is pure: it reads no clock, writes to no terminal and asks
// no server.
package view

import (
	"fmt"
	"strings"
	"time"

	"github.com/jedib0t/go-pretty/v6/table"
	"github.com/jedib0t/go-pretty/v6/text"

	"github.com/refit-run/refit/workflows/protocol"
)

// Options say where the text will be shown.
type Options struct {
	Now time.Time
	// Location of the times shown; nil means UTC.
	Location *time.Location
	// Colour adds ANSI colours; Width cuts lines, 0 leaves them whole.
	Colour bool
	Width  int
}

type colour string

const (
	green  colour = "\x1b[32m"
	yellow colour = "\x1b[33m"
	red    colour = "\x1b[31m"
	cyan   colour = "\x1b[36m"
	faint  colour = "\x1b[2m"
	bold   colour = "\x1b[1m"
	reset         = "\x1b[0m"
)

func (o Options) paint(c colour, s string) string {
	if !o.Colour || s == "" {
		return s
	}
	return string(c) + s + reset
}

// clock is a time of day; the date is added when it is not today's.
func (o Options) clock(t time.Time) string {
	zone := o.Location
	if zone == nil {
		zone = time.UTC
	}
	t, now := t.In(zone), o.Now.In(zone)
	if t.Format(time.DateOnly) == now.Format(time.DateOnly) {
		return t.Format(time.TimeOnly)
	}
	return t.Format(time.DateTime)
}

// span is a duration as people say it: two units at most.
func span(d time.Duration) string {
	switch {
	case d < 0:
		return "0s"
	case d < 10*time.Second:
		return strings.TrimSuffix(fmt.Sprintf("%.1f", d.Seconds()), ".0") + "s"
	case d < time.Minute:
		return fmt.Sprintf("%ds", int(d.Seconds()))
	case d < time.Hour:
		return fmt.Sprintf("%dm%02ds", int(d.Minutes()), int(d.Seconds())%60)
	case d < 48*time.Hour:
		return fmt.Sprintf("%dh%02dm", int(d.Hours()), int(d.Minutes())%60)
	default:
		return fmt.Sprintf("%dd%02dh", int(d.Hours())/24, int(d.Hours())%24)
	}
}

// minLastColumn is how narrow the last column of a grid may become.
const minLastColumn = 12

// grid is a table without borders. On a narrow terminal the last column, which
// holds the prose, is wrapped: nothing is cut off.
func (o Options) grid(header table.Row, rows []table.Row) string {
	t := table.NewWriter()
	style := table.StyleLight
	style.Options = table.Options{SeparateHeader: true}
	style.Format.Header = text.FormatDefault
	style.Box.PaddingLeft = ""
	style.Box.PaddingRight = "  "
	t.SetStyle(style)
	if o.Width > 0 {
		left := o.Width
		for column := range header[:len(header)-1] {
			widest := 0
			for _, row := range append([]table.Row{header}, rows...) {
				for _, line := range strings.Split(fmt.Sprint(row[column]), "\n") {
					widest = max(widest, text.StringWidthWithoutEscSequences(line))
				}
			}
			left -= widest + len(style.Box.PaddingRight)
		}
		t.SetColumnConfigs([]table.ColumnConfig{{
			Number: len(header), WidthMax: max(left, minLastColumn), WidthMaxEnforcer: text.WrapSoft,
		}})
	}
	t.AppendHeader(header)
	t.AppendRows(rows)
	lines := strings.Split(t.Render(), "\n")
	for i := range lines {
		lines[i] = strings.TrimRight(lines[i], " ")
	}
	return strings.Join(lines, "\n") + "\n"
}

var stateMarks = map[protocol.StageState]struct {
	mark   string
	words  string
	colour colour
}{
	protocol.Pending:          {"·", "pending", faint},
	protocol.WaitingForWindow: {"◷", "waits for window", yellow},
	protocol.WaitingForGate:   {"?", "waits for approval", yellow},
	protocol.Running:          {"▶", "running", cyan},
	protocol.Paused:           {"‖", "paused", yellow},
	protocol.Parked:           {"!", "parked", red},
	protocol.Done:             {"✓", "done", green},
	protocol.Skipped:          {"-", "skipped", faint},
	protocol.Aborted:          {"✗", "aborted", red},
}

func (o Options) state(s protocol.StageState) string {
	m, ok := stateMarks[s]
	if !ok {
		return string(s)
	}
	return o.paint(m.colour, m.mark+" "+m.words)
}

var phaseWords = map[protocol.Phase]struct {
	words  string
	colour colour
}{
	protocol.PhaseRunning: {"running", cyan},
	protocol.PhaseWindow:  {"waiting for a maintenance window", yellow},
	protocol.PhaseGate:    {"waiting for approval", yellow},
	protocol.PhasePaused:  {"paused", yellow},
	protocol.PhaseParked:  {"parked", red},
	protocol.PhaseDone:    {"done", green},
	protocol.PhaseAborted: {"aborted", red},
}

// Phase is the phase in words.
func (o Options) Phase(p protocol.Phase) string {
	w, ok := phaseWords[p]
	if !ok {
		return string(p)
	}
	return o.paint(w.colour, w.words)
}

func stageTimes(s protocol.Stage, now time.Time) string {
	switch {
	case s.Started == nil:
		return ""
	case s.Ended != nil:
		return span(s.Ended.Sub(*s.Started))
	default:
		return span(now.Sub(*s.Started))
	}
}

// Bar draws progress as a bar of the given width: done, failed, left.
func (o Options) Bar(p protocol.Progress, width int) string {
	if p.Total <= 0 {
		return ""
	}
	share := func(n int) int { return min(width, n*width/p.Total) }
	doneCells := share(p.Done)
	failedCells := share(p.Done+p.Failed) - doneCells
	if p.Failed > 0 && failedCells == 0 && doneCells < width {
		failedCells = 1
	}
	rest := max(0, width-doneCells-failedCells)
	return o.paint(green, strings.Repeat("█", doneCells)) +
		o.paint(red, strings.Repeat("▒", failedCells)) +
		o.paint(faint, strings.Repeat("░", rest))
}

// units are what runs count that count no hosts.
var units = map[string]string{
	protocol.NATSReplicas: "streams", protocol.OpenBaoReplace: "steps",
	protocol.CassandraExpand: "steps", protocol.CassandraReplication: "steps",
}

// Counts is progress of a kind of run in words.
func Counts(kind string, p protocol.Progress) string {
	if p.Total <= 0 {
		return ""
	}
	unit := units[kind]
	if unit == "" {
		unit = "hosts"
	}
	s := fmt.Sprintf("%d of %d %s (%d %%)", p.Done, p.Total, unit, p.Done*100/p.Total)
	if p.Failed > 0 {
		s += fmt.Sprintf(", %d failed", p.Failed)
	}
	return s
}
