package rollout

import (
	"fmt"
	"strings"

	"github.com/refit-run/refit/activities/finding"
	"github.com/refit-run/refit/activities/tensorfusion"
	"github.com/refit-run/refit/workflows/protocol"
	"github.com/refit-run/refit/workflows/rollout/plan"
	"github.com/refit-run/refit/workflows/stage"
)

// maxWarnings bounds the hosts or pods that warnings name one by one.
const maxWarnings = 20

// keep records a host's row and translates it for the planner.
func (h *hypervisors) keep(row HostRow) plan.Result {
	h.rows[row.Name] = row
	if row.Warning != "" {
		h.warned++
		switch {
		case h.warned <= maxWarnings:
			h.Warn("host " + row.Name + ": " + row.Warning)
		case h.warned == maxWarnings+1:
			h.Warn(fmt.Sprintf("more than %d hosts passed with a warning: see the rows of the result", maxWarnings))
		}
	}
	if row.Outcome != tensorfusion.OutcomeFailed {
		return plan.Result{Host: row.Name, Status: plan.Proven}
	}
	r := plan.Result{Host: row.Name, Status: plan.Failed, Why: "failed"}
	if row.Failure != nil {
		r.Why = row.Failure.Found
	}
	return r
}

func (h *hypervisors) note(s *stage.Scope, index int) { s.Note("%s", h.evidence(index)) }

// evidence sums a batch up in one line.
func (h *hypervisors) evidence(index int) string {
	counts := map[string]int{}
	slowest := 0.0
	for _, name := range h.layout.Batches[index].Hosts {
		row := h.row(name)
		counts[row.Outcome]++
		slowest = max(slowest, row.Seconds)
		if row.Warning != "" {
			counts["degraded"]++
		}
		if row.Prepared != "" {
			counts["prepared"]++
		}
	}
	var parts []string
	for _, k := range []string{
		"prepared", tensorfusion.OutcomeReplaced, tensorfusion.OutcomeAlready, "degraded", tensorfusion.OutcomeFailed, OutcomeGone, OutcomeLeft, OutcomeUnproven, outcomeWaiting,
	} {
		if counts[k] > 0 {
			parts = append(parts, fmt.Sprintf("%d %s", counts[k], k))
		}
	}
	if slowest > 0 {
		parts = append(parts, fmt.Sprintf("slowest %.0f s", slowest))
	}
	if h.in.Validation == ValidateAgent && counts[tensorfusion.OutcomeReplaced] > 0 {
		parts = append(parts, "proven by the agents")
	}
	return strings.Join(parts, ", ")
}

// outcomeWaiting is the row of a host that was not reached.
const outcomeWaiting = "waiting"

// row is the host's record with what the planner knows beside its last wave.
func (h *hypervisors) row(name string) HostRow {
	row, st := h.rows[name], h.plan.Hosts[name]
	row.Name = name
	switch st.Status {
	case plan.Already:
		row.Outcome, row.NewUID = tensorfusion.OutcomeAlready, h.seen[name].UID
	case plan.Gone:
		row.Outcome = OutcomeGone
	case plan.Left:
		row.Outcome = OutcomeLeft
	case plan.Waiting:
		row.Outcome = outcomeWaiting
	case plan.Unproven:
		row.Outcome = OutcomeUnproven
	case plan.Failed:
		if row.Failure == nil {
			row.Failure = &finding.Finding{Object: "host " + name, Expected: "on target and healthy", Found: st.Why,
				Next: "look at its hypervisor pod and GPUNode, then answer retry: it is done again"}
		}
		row.Outcome = tensorfusion.OutcomeFailed
	}
	return row
}

func (h *hypervisors) fill(out *Result) {
	h.unprepared()
	cut := 0
	for _, b := range h.layout.Batches {
		for _, name := range b.Hosts {
			row := h.row(name)
			if len(out.LeftBehind)+len(row.LeftBehind) <= maxWarnings {
				out.LeftBehind = append(out.LeftBehind, row.LeftBehind...)
			} else if len(row.LeftBehind) > 0 {
				cut++
			}
			row.Baseline, row.LeftBehind = nil, nil
			if row.Outcome == outcomeWaiting {
				continue // never touched
			}
			out.Hosts = append(out.Hosts, row)
		}
	}
	if cut > 0 {
		out.LeftBehind = append(out.LeftBehind, fmt.Sprintf("%s more whose set-up failed left something behind: see the runs that their failures name", hosts(cut)))
	}
	for _, name := range h.layout.Done {
		out.Hosts = append(out.Hosts, HostRow{
			Name: name, Outcome: tensorfusion.OutcomeAlready, NewUID: h.seen[name].UID, Verdict: h.rows[name].Verdict,
		})
	}
	out.Drift = h.drift
	if out.Outcome == protocol.OutcomeDone && len(h.layout.Batches) == 0 {
		out.Outcome = protocol.OutcomeNoChange
	}
}

func hosts(n int) string {
	if n == 1 {
		return "1 host"
	}
	return fmt.Sprintf("%d hosts", n)
}

// shorten names the hosts of a wave.
func shorten(names []string) string {
	if len(names) > 3 {
		return fmt.Sprintf("%s, %s and %d more", names[0], names[1], len(names)-2)
	}
	return strings.Join(names, ", ")
}
