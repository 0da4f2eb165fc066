package rollout

import (
	"fmt"
	"slices"
	"strings"

	"go.temporal.io/sdk/workflow"

	"github.com/refit-run/refit/activities/finding"
	"github.com/refit-run/refit/activities/tensorfusion"
	"github.com/refit-run/refit/workflows/protocol"
	"github.com/refit-run/refit/workflows/stage"
)

// workers is the driver `controller`: the controller rolls the workloads by
// its own batches while auto update of workers is on, and Refit watches. The
// flag goes off again at the end, on a stall, a pause and an abort.
type workers struct {
	*run
	before []tensorfusion.Workload
	after  []tensorfusion.Workload
	todo   bool // something was outdated at the start
	// agreed are the connections per outdated workload that a person has
	// accepted to lose.
	agreed map[string]int
}

func (w *workers) state(*State) {}

func (w *workers) roll(ctx workflow.Context) error {
	if err := w.Execute(ctx, stage.Stage{
		Name: w.name("observe"), Purpose: "list the workloads whose workers are outdated, and who is connected to them", Do: w.observe,
	}); err != nil {
		return err
	}
	if !w.todo {
		return nil
	}
	gate := w.gate("")
	return w.Execute(ctx, stage.Stage{
		Name: w.name("roll"), Purpose: "let the controller roll the workers of pool " + w.in.Entry + ", watched",
		Mutates: true, Estimate: w.in.Workers.Stall.D(), Gate: &gate, Do: w.act,
	})
}

// gate asks people to accept that the sessions of before are lost.
func (w *workers) gate(since string) stage.Gate {
	w.agreed = connections(w.before)
	return stage.Gate{
		Found:     since + w.sessions(),
		Why:       "a connection to a replaced worker loses its GPU session: its program fails or has to reconnect",
		Helps:     "tell the owners of the workloads, then approve; reject parks the rollout",
		Approvers: w.in.Strategy.Approvers,
	}
}

// agree asks anew as long as the list has grown since it was accepted: an
// answer takes its time, and so may a window, a pause or a repair before a
// retry. The number per workload counts, because it is the owner of a workload
// who is told; connections that come and go would never let anyone approve.
func (w *workers) agree(ctx workflow.Context, s *stage.Scope) error {
	for {
		if err := w.look(ctx, s); err != nil {
			return err
		}
		var more []string
		for _, l := range stale(w.before) {
			key := l.Namespace + "/" + l.Name
			if known, ok := w.agreed[key]; !ok {
				more = append(more, fmt.Sprintf("%s with %d connections", key, len(l.Connections)))
			} else if n := len(l.Connections); n > known {
				more = append(more, fmt.Sprintf("%s with %d connections instead of %d", key, n, known))
			}
		}
		if len(more) == 0 {
			return nil
		}
		if err := s.Gate(ctx, w.gate("since the approval the list has grown ("+shorten(more)+"): ")); err != nil {
			return err
		}
	}
}

// connections counts those of each outdated workload.
func connections(all []tensorfusion.Workload) map[string]int {
	out := map[string]int{}
	for _, l := range stale(all) {
		out[l.Namespace+"/"+l.Name] = len(l.Connections)
	}
	return out
}

func (w *workers) request() tensorfusion.WorkersRequest {
	return tensorfusion.WorkersRequest{
		Scope: w.in.Scope, Pool: w.in.Pool, BatchPercentage: *w.in.Workers.BatchPercentage,
		BatchInterval: w.in.Workers.BatchInterval.D(), Stall: w.in.Workers.Stall.D(),
	}
}

func (w *workers) observe(ctx workflow.Context, s *stage.Scope) error {
	if err := w.look(ctx, s); err != nil {
		return err
	}
	w.todo = len(stale(w.before)) > 0
	s.Note("%d of %d workloads have outdated workers", len(stale(w.before)), len(w.before))
	return nil
}

func (w *workers) look(ctx workflow.Context, s *stage.Scope) error {
	var seen tensorfusion.WorkersResult
	if err := w.do(ctx, s, tensorfusion.WorkersActivity, "workloads of pool "+w.in.Pool, holdLimit, w.request(), &seen); err != nil {
		return err
	}
	w.before, w.after = seen.Workloads, seen.Workloads
	s.Progress(0, len(stale(w.before)), 0)
	return nil
}

func (w *workers) act(ctx workflow.Context, s *stage.Scope) error {
	if err := w.agree(ctx, s); err != nil {
		return err
	}
	if len(stale(w.before)) == 0 && complete(w.before) {
		s.Note("no workload has outdated workers any more")
		return nil
	}
	var out tensorfusion.WorkersResult
	if err := w.attended(ctx, s, tensorfusion.RollWorkersActivity, "roll the workers of pool "+w.in.Pool, w.request(), &out, w.holdAgain(s)); err != nil {
		return err
	}
	w.after = out.Workloads
	left := stale(w.after)
	total := len(w.agreed) // what an earlier attempt rolled is no longer outdated
	s.Progress(max(0, total-len(left)), total, len(left))
	if len(left) == 0 {
		s.Note("%d workloads rolled, every worker is Ready", total)
		return nil
	}
	var found []finding.Finding
	for _, l := range left {
		found = append(found, finding.Finding{
			Object: "TensorFusionWorkload/" + l.Namespace + "/" + l.Name, Expected: fmt.Sprintf("%d ready workers of the target", l.Replicas),
			Found: fmt.Sprintf("%d ready, outdated=%t", l.Ready, l.Stale), Next: "look at the workload's pods and events, then answer retry",
		})
	}
	return stage.Parking(fmt.Sprintf("%d of %d workloads are still outdated", len(left), total),
		"their workers run the old version beside the new hypervisor", "repair them, then answer retry", nil, found...)
}

// sessions is the gate's list: per workload the connections that end.
func (w *workers) sessions() string {
	const shown = 20
	list := stale(w.before)
	var lines []string
	for i, l := range list {
		if i == shown {
			lines = append(lines, fmt.Sprintf("and %d more workloads", len(list)-shown))
			break
		}
		who := "nobody connected"
		if n := len(l.Connections); n > 5 {
			who = fmt.Sprintf("%s and %d more connections", strings.Join(l.Connections[:5], ", "), n-5)
		} else if n > 0 {
			who = strings.Join(l.Connections, ", ")
		}
		lines = append(lines, fmt.Sprintf("%s/%s (%d workers): %s", l.Namespace, l.Name, l.Replicas, who))
	}
	return fmt.Sprintf("%d workloads lose their GPU sessions: %s", len(list), strings.Join(lines, "; "))
}

func stale(all []tensorfusion.Workload) []tensorfusion.Workload {
	var out []tensorfusion.Workload
	for _, w := range all {
		if w.Stale {
			out = append(out, w)
		}
	}
	return out
}

// complete reports that every workload has its workers: those that a roll has
// made may still be on their way, or never come.
func complete(all []tensorfusion.Workload) bool {
	return !slices.ContainsFunc(all, func(w tensorfusion.Workload) bool { return w.Ready < w.Replicas })
}

func (w *workers) fill(out *Result) {
	if out.Outcome == protocol.OutcomeDone && !w.todo {
		out.Outcome = protocol.OutcomeNoChange
	}
}
