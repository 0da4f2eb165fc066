package cli

import (
	"encoding/json"
	"fmt"
	"io"
	"time"

	"sigs.k8s.io/yaml"

	"github.com/refit-run/refit/starter/run"
	"github.com/refit-run/refit/starter/view"
	"github.com/refit-run/refit/workflows/protocol"
	"github.com/refit-run/refit/workflows/stage"
)

// print writes value as JSON or YAML, or the text that table draws.
func (a *App) print(value any, table func(view.Options) string) error {
	switch a.output {
	case "json":
		doc, err := json.MarshalIndent(value, "", "  ")
		if err != nil {
			return fmt.Errorf("write JSON: %w", err)
		}
		_, err = fmt.Fprintln(a.Out, string(doc))
		return err
	case "yaml":
		doc, err := yaml.Marshal(value)
		if err != nil {
			return fmt.Errorf("write YAML: %w", err)
		}
		_, err = a.Out.Write(doc)
		return err
	default:
		_, err := io.WriteString(a.Out, table(a.options()))
		return err
	}
}

// say writes a line for people; it stays out of JSON and YAML.
func (a *App) say(format string, args ...any) {
	if a.output == "table" {
		fmt.Fprintf(a.Out, format+"\n", args...)
	}
}

func (a *App) terminal() bool {
	w, _ := a.Size()
	return w > 0 && a.Getenv("TERM") != "dumb"
}

func (a *App) options() view.Options {
	o := view.Options{Now: time.Now(), Location: time.Local}
	if a.terminal() {
		o.Width, _ = a.Size()
		o.Colour = a.Getenv("NO_COLOR") == ""
	}
	return o
}

// page is the run's address in the web UI, "" when no UI is known.
func (a *App) page(c *run.Connection, r run.Run) string {
	if a.ui == "" {
		return ""
	}
	return a.ui + stage.Target{Namespace: c.Namespace, WorkflowID: r.WorkflowID}.UIPath()
}

// waiting is the text about what a run waits for.
func (a *App) waiting(c *run.Connection, r run.Run, w protocol.Waiting, o view.Options) string {
	verb := protocol.Approve
	if len(w.Answers) > 0 {
		verb = w.Answers[0]
	}
	ways := run.Ways(c, a.ui, r.WorkflowID, verb, w.Stage, a.Getenv)
	return view.Waiting(w, ways, o)
}
