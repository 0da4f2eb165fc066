package tensorfusion

import (
	"fmt"
	"reflect"

	"github.com/refit-run/refit/activities/finding"
)

// forecast lists what the Helm step will set in motion by itself although the
// policy is held (P11), by version pair and configuration (facts, section 5,
// rules 21 to 27). An empty list means: nothing known.
func forecast(o *Observation) []finding.Finding {
	from, to := o.Source.Controller, o.Target.Controller
	add := func(out []finding.Finding, object, found, next string) []finding.Finding {
		return append(out, finding.Finding{Row: "P11", Object: object, Found: found, Next: next})
	}
	var out []finding.Finding
	all := plural(len(o.Hosts), "hypervisor pods")
	if from == nil || to == nil {
		out = add(out, all, "the controller's version is not known: expect every hypervisor and worker to be recreated at once",
			"pin both controllers to version tags")
	}
	if below(to, "2.11.2") {
		out = add(out, all, "controllers below 2.11.2 delete every hypervisor when they start",
			"treat the Helm step as a full hypervisor outage")
	}
	if below(from, "2.14.0") && atLeast(from, "2.0.0") && atLeast(to, "2.14.0") {
		out = add(out, all, "the new controller names pods otherwise and creates a second one per node, on the same host port",
			"the rollout removes the old pod within each host's turn")
	}
	// From below 2.17 the hold's template change makes the pods wait; between
	// two 2.17 controllers nothing holds a change of the policy.
	if atLeast(from, "2.17.0") && atLeast(to, "2.17.0") && o.Source.IsolationPolicy != o.Target.IsolationPolicy {
		out = add(out, all, fmt.Sprintf("the isolation policy changes from %q to %q: hypervisors may be deleted outside a batch",
			orNone(o.Source.IsolationPolicy), orNone(o.Target.IsolationPolicy)),
			"pin isolationPolicy to the present value and change it on its own")
	}
	out = append(out, forecastWorkers(o)...)
	for _, h := range o.Hosts {
		if pod := h.pod(o.Goal); pod != nil && podTrouble(pod) != "" {
			out = add(out, hostObject(h.name), "its pod is in trouble ("+podTrouble(pod)+"): the controller replaces it with the new configuration whatever the policy says",
				"repair the host first")
		}
	}
	return out
}

// forecastWorkers: a changed worker template or port makes every controller
// version delete all workers of a workload at once, whatever autoUpdateWorker
// says (rule 25).
func forecastWorkers(o *Observation) []finding.Finding {
	target := entriesOf(o.Target.Clusters)
	live := entriesOf(o.Clusters)
	var out []finding.Finding
	for _, pool := range sortedKeys(live) {
		t, ok := target[pool]
		if !ok {
			continue
		}
		if sameWorkers(live[pool].Spec, t.Spec) {
			continue
		}
		for _, w := range o.Workloads {
			if w.Pool() != pool {
				continue
			}
			out = append(out, finding.Finding{
				Row: "P11", Object: "TensorFusionWorkload/" + w.Namespace + "/" + w.Name,
				Found: fmt.Sprintf("the worker template of GPUPool/%s changes: its %d workers are deleted together when the controller next looks at it", pool, w.Status.WorkerCount),
				Why:   "applications connected to them lose their GPU session",
				Next:  "keep the worker image and template in this upgrade, or tell the owners",
			})
		}
	}
	return out
}

// sameWorkers: the two make workers in the same way (rule 3).
func sameWorkers(a, b PoolSpec) bool {
	return a.Port() == b.Port() && reflect.DeepEqual(a.Components.Worker, b.Components.Worker)
}

// Outdated says what of a GPUPool a release makes outdated beside its
// hypervisors, which a Goal judges.
type Outdated struct {
	Pool    string `json:"pool"`
	Workers bool   `json:"workers,omitempty"`
	Clients bool   `json:"clients,omitempty"`
}

// outdated lists the pools whose workers or clients the release changes: their
// template, or the image of workers that comes from the ProviderConfig (rules 3
// and 26).
func outdated(o *Observation) []Outdated {
	target := entriesOf(o.Target.Clusters)
	live := entriesOf(o.Clusters)
	image := workerImage(o.Target.Providers)
	images := image != "" && image != workerImage(o.Providers)
	var out []Outdated
	for _, pool := range sortedKeys(live) {
		was := live[pool].Spec
		is := was // of a cluster that the chart does not manage
		if t, ok := target[pool]; ok {
			is = t.Spec
		}
		d := Outdated{
			Pool: pool, Workers: images || !sameWorkers(was, is),
			Clients: !reflect.DeepEqual(was.Components.Client, is.Components.Client),
		}
		if d.Workers || d.Clients {
			out = append(out, d)
		}
	}
	return out
}
