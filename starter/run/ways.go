package run

import (
	"go.temporal.io/sdk/client"

	"github.com/refit-run/refit/starter/view"
	"github.com/refit-run/refit/workflows/stage"
)

// Ways are the four ways to give one answer, ready to be pasted. page is the
// web UI's address. getenv tells what the person's shell holds already: the
// server is named only where the tools would miss it.
func Ways(c *Connection, page, id, verb, waiting string, getenv func(string) string) view.Ways {
	t := stage.Target{Namespace: c.Namespace, WorkflowID: id, Verb: verb, Stage: waiting}
	commands := t.Commands()
	w := view.Ways{Refit: commands[0], Temporal: commands[2], Tctl: commands[3]}
	if page != "" {
		w.Page = page + commands[1]
	}
	if c.Address == client.DefaultHostPort || c.Address == "127.0.0.1:7233" {
		return w
	}
	if getenv("TEMPORAL_ADDRESS") != c.Address {
		w.Refit = "TEMPORAL_ADDRESS=" + c.Address + " " + w.Refit
		w.Temporal = "TEMPORAL_ADDRESS=" + c.Address + " " + w.Temporal
	}
	if getenv("TEMPORAL_CLI_ADDRESS") != c.Address {
		w.Tctl = "TEMPORAL_CLI_ADDRESS=" + c.Address + " " + w.Tctl
	}
	return w
}
