package realgpu

import (
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/refit-run/refit/activities/gpu"
	"github.com/refit-run/refit/gpuagent/cuda"
	"github.com/refit-run/refit/gpuagent/host"
)

// bench prints the figure that has a goal; a missed one is a figure too.
func (s *study) bench(w io.Writer) {
	for _, f := range s.figures {
		if f.goal == 0 {
			continue
		}
		verdict := "ok"
		if f.value > f.goal {
			verdict = "miss"
		}
		fmt.Fprintf(w, "bench: %s %.2f %s (goal <= %g) %s\n", f.name, f.value, f.unit, f.goal, verdict)
	}
}

// page is the study in markdown. UUIDs and serial numbers name one card in the
// world and stay out of it.
func (s *study) page() string {
	var b strings.Builder
	d := s.snapshot.Devices[0]
	fmt.Fprintf(&b, "# The node agent on %s\n\n", orNone(d.Name.Value))
	b.WriteString("Written by `make test-gpu`, which only reads: MIG and vGPU changes, resets and every other setter are refused in it and are proven on the fakes alone ([gpuagent.md](gpuagent.md)).\n\n")
	table(&b, []string{"date", "GPUs", "driver", "CUDA of the driver", "compute capability", "memory of one GPU"}, [][]string{{
		s.when.Format("2006-01-02"), fmt.Sprint(len(s.snapshot.Devices)), orNone(s.snapshot.Driver.Value),
		fmt.Sprintf("%d.%d", s.snapshot.CUDA.Value/1000, s.snapshot.CUDA.Value%1000/10), capability(s.probes), fmt.Sprintf("%d MiB", d.Memory.Value.Total>>20),
	}})
	b.WriteString("\n## Problems\n")
	problems := s.problems()
	if len(problems) == 0 {
		b.WriteString("None: every row has an answer or a named reason for none, every probe passed, and no setting changed.\n")
	}
	for _, p := range problems {
		fmt.Fprintf(&b, "- %s\n", strings.TrimSpace(p))
	}
	b.WriteString("\n## Figures\n")
	var rows [][]string
	for _, f := range s.figures {
		goal := ""
		if f.goal > 0 {
			goal = fmt.Sprintf("<= %g %s", f.goal, f.unit)
		}
		rows = append(rows, []string{f.name, fmt.Sprintf("%.2f %s", f.value, f.unit), goal})
	}
	table(&b, []string{"what", "figure", "goal"}, rows)
	b.WriteString("\n## What the host shows\n")
	table(&b, []string{"source", "visible"}, sources(s.host))
	b.WriteString("\n## Probes\n")
	rows = nil
	for _, r := range s.probes {
		rows = append(rows, []string{r.UUID, string(r.Verdict), r.PTX, fmt.Sprintf("%d MiB, %d patterns, %d bad words", r.TestedBytes>>20, r.Patterns, r.BadWords), stages(r)})
	}
	table(&b, []string{"device", "verdict", "PTX", "memory", "milliseconds by stage"}, rows)
	b.WriteString("\n## Rows\n")
	s.rows(&b)
	b.WriteString("\n## Plans\n")
	for _, p := range s.plans {
		fmt.Fprintf(&b, "\n%s (exit code %d):\n\n```\n%s```\n", p.what, p.code, p.text)
	}
	b.WriteString("\n## Settings, before and after\n")
	rows = nil
	for _, d := range s.snapshot.Devices {
		for _, name := range settingNames {
			rows = append(rows, []string{d.UUID.Value, name, s.before[d.UUID.Value][name], s.after[d.UUID.Value][name]})
		}
	}
	table(&b, []string{"GPU", "setting", "before", "after"}, rows)
	return s.anonymous().Replace(b.String())
}

// rows has a line for each row of the validation table, with what each level
// said of all GPUs.
func (s *study) rows(b *strings.Builder) {
	head := []string{"row"}
	for _, l := range s.levels {
		head = append(head, fmt.Sprintf("%s: %s", l.name, l.verdict))
	}
	var names []string
	for _, l := range s.levels {
		for _, c := range l.checks {
			if !slices.Contains(names, c.Name) {
				names = append(names, c.Name)
			}
		}
	}
	var rows [][]string
	for _, name := range names {
		row := []string{name}
		for _, l := range s.levels {
			var said []string
			for _, c := range l.checks {
				if text := outcome(c); c.Name == name && !slices.Contains(said, text) {
					said = append(said, text)
				}
			}
			row = append(row, strings.Join(said, "; "))
		}
		rows = append(rows, row)
	}
	table(b, head, rows)
}

func outcome(c gpu.Check) string {
	switch {
	case c.OK:
		return c.Found
	case c.Skipped != "":
		return "skipped: " + c.Skipped
	}
	return fmt.Sprintf("**%s**: expected %s, found %s", c.Severity, c.Expected, c.Found)
}

// sources says which of the host's own accounts can be read here.
func sources(h host.Snapshot) [][]string {
	const hidden = "skipped: not visible"
	say := func(visible bool, found string) string {
		if !visible {
			return hidden
		}
		return found
	}
	log := "read"
	if !h.Log.Visible {
		log = hidden + ": " + h.Log.Why
	}
	rows := [][]string{
		{"kernel log", log},
		{"sysfs, version of the module", say(h.Module != "", h.Module)},
		{"sysfs, PCI bus", say(h.PCIVisible, fmt.Sprintf("%d NVIDIA display controllers", len(h.PCI)))},
		{"/proc/driver/nvidia", say(h.Proc != "", h.Proc)},
	}
	for _, s := range h.Services {
		state := "not running"
		if s.Active {
			state = strings.TrimSpace("active " + s.Version)
		}
		rows = append(rows, []string{"systemd, " + s.Name, say(s.Visible, state)})
	}
	return rows
}

func stages(r cuda.Result) string {
	var out []string
	for _, name := range []string{"dlopen", "init", "context", "jit", "kernel", "memory", "bandwidth"} {
		if ms, ok := r.Millis[name]; ok {
			out = append(out, fmt.Sprintf("%s %d", name, ms))
		}
	}
	return strings.Join(out, ", ")
}

func capability(probes []cuda.Result) string {
	if len(probes) == 0 {
		return "not probed"
	}
	return orNone(probes[0].Capability)
}

// anonymous replaces what names a card by its place in the host.
func (s *study) anonymous() *strings.Replacer {
	var pairs []string
	for i, d := range s.snapshot.Devices {
		for n, m := range d.MIGDevices.Value {
			pairs = append(pairs, m.UUID, fmt.Sprintf("MIG device %d.%d", i, n))
		}
		// Some texts say GPU before the UUID.
		pairs = append(pairs, "GPU "+d.UUID.Value, fmt.Sprintf("GPU %d", i), d.UUID.Value, fmt.Sprintf("GPU %d", i))
		if len(d.Serial.Value) > 4 {
			pairs = append(pairs, d.Serial.Value, "(not shown)")
		}
	}
	return strings.NewReplacer(pairs...)
}

func table(b *strings.Builder, head []string, rows [][]string) {
	line := func(cells []string) {
		for i, c := range cells {
			cells[i] = strings.NewReplacer("|", "\\|", "\n", " ").Replace(c)
		}
		fmt.Fprintf(b, "| %s |\n", strings.Join(cells, " | "))
	}
	line(slices.Clone(head))
	b.WriteString("|" + strings.Repeat("---|", len(head)) + "\n")
	for _, r := range rows {
		line(slices.Clone(r))
	}
}

func orNone(s string) string {
	if s == "" {
		return "unknown"
	}
	return s
}
