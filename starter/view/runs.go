package view

import (
	"github.com/jedib0t/go-pretty/v6/table"

	"time"
)

// Row is one run of a list.
type Row struct {
	ID, State, Phase, WaitingFor string
	Started                      time.Time
	Closed                       *time.Time
}

// Runs is the table of runs.
func Runs(rows []Row, o Options) string {
	out := make([]table.Row, len(rows))
	for i, r := range rows {
		end := o.Now
		if r.Closed != nil {
			end = *r.Closed
		}
		state := r.State
		if r.Phase != "" && r.Closed == nil {
			state = r.Phase
		}
		out[i] = table.Row{r.ID, state, r.WaitingFor, o.clock(r.Started), span(end.Sub(r.Started))}
	}
	return o.grid(table.Row{"RUN", "STATE", "WAITS FOR", "STARTED", "TIME"}, out)
}
