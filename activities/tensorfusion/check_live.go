package tensorfusion

import (
	"fmt"
	"slices"
	"strings"

	"github.com/refit-run/refit/activities/finding"
)

func checkLeader(o *Observation) []finding.Finding {
	var out []finding.Finding
	if o.Controller.LeaderTrouble != "" {
		out = append(out, finding.Finding{Object: "Lease/" + leaderLease, Expected: "one live leader", Found: o.Controller.LeaderTrouble,
			Next: "a new leader takes about 15 s; look at the controller pods' log if none appears"})
	}
	if o.Controller.WebhookTrouble != "" {
		out = append(out, finding.Finding{Object: "MutatingWebhookConfiguration of the release", Expected: "a labelled pod is admitted by server dry run",
			Found: o.Controller.WebhookTrouble, Why: "no TensorFusion pod can be created meanwhile",
			Next: "look at the webhook's certificate Secret, its Service and the controller pods"})
	}
	return out
}

func checkRollout(o *Observation) []finding.Finding {
	c := o.Controller
	var out []finding.Finding
	if c.RolledOut != "" {
		out = append(out, finding.Finding{Object: c.Deployment, Expected: "rollout complete", Found: c.RolledOut,
			Next: "look at the controller pods: events, log, image pull"})
	} else if c.Ready != c.Replicas {
		out = append(out, finding.Finding{Object: c.Deployment, Expected: fmt.Sprintf("%d replicas ready", c.Replicas), Found: fmt.Sprint(c.Ready)})
	}
	if want := o.Target.ControllerImage; want != "" && c.Image != want {
		out = append(out, finding.Finding{Object: c.Deployment, Expected: "image " + want, Found: orNone(c.Image)})
	}
	return out
}

func checkNeighbours(o *Observation) []finding.Finding {
	var out []finding.Finding
	for _, n := range o.Neighbours {
		if n.Trouble != "" {
			out = append(out, finding.Finding{Object: n.Object, Expected: "ready after the Helm step", Found: n.Trouble})
		}
	}
	return out
}

func checkHosts(o *Observation) []finding.Finding {
	var out []finding.Finding
	for _, h := range o.Hosts {
		if !o.rolled(h) {
			continue
		}
		if why := h.unproven(o.Goal, nil); why != "" {
			f := notProven("T14", h.name, why)
			f.Next = hintFor(h.pod(o.Goal), "")
			out = append(out, f)
		}
	}
	return out
}

// rolled reports whether a host belongs to a pool that the run rolled.
func (o *Observation) rolled(h hostView) bool {
	return slices.ContainsFunc(o.Rolled, func(pool string) bool { return h.gpuNode.Labels[poolLabel(pool)] == "true" })
}

func checkWorkers(o *Observation) []finding.Finding {
	byWorkload := map[string][]int{}
	for i, w := range o.Workers {
		key := w.Namespace + "/" + w.Labels[labelWorkload]
		byWorkload[key] = append(byWorkload[key], i)
	}
	image := ""
	for _, p := range o.Providers {
		if strings.EqualFold(p.Spec.Vendor, nvidiaVendor) {
			image = p.Spec.Images.RemoteWorker
		}
	}
	var out []finding.Finding
	for _, w := range o.Workloads {
		object := "TensorFusionWorkload/" + w.Namespace + "/" + w.Name
		if w.Spec.Replicas != nil && (w.Status.WorkerCount != *w.Spec.Replicas || w.Status.ReadyWorkers != *w.Spec.Replicas) {
			out = append(out, finding.Finding{Object: object, Expected: fmt.Sprintf("%d workers, all ready", *w.Spec.Replicas),
				Found: fmt.Sprintf("%d workers, %d ready", w.Status.WorkerCount, w.Status.ReadyWorkers)})
		}
		if !slices.Contains(o.Rolled, w.Pool()) {
			continue
		}
		for _, i := range byWorkload[w.Namespace+"/"+w.Name] {
			p := &o.Workers[i]
			if why := staleWorker(p.Labels[labelTemplateHash], w.Status.Hash, containerImage(p.Spec.Containers), image); why != "" {
				out = append(out, finding.Finding{Object: "Pod/" + p.Namespace + "/" + p.Name, Expected: "the workload's template and image", Found: why})
			}
		}
	}
	return out
}

// staleWorker: the label proves the template, not the image, which comes from
// the ProviderConfig (rule 26).
func staleWorker(label, hash, image, want string) string {
	switch {
	case label != hash:
		return fmt.Sprintf("template hash %s instead of %s", orNone(label), orNone(hash))
	case want != "" && image != want:
		return "image " + image + " instead of " + want
	}
	return ""
}

func checkClients(o *Observation) []finding.Finding {
	hashes := map[string]string{}
	for _, p := range o.Pools {
		hashes[p.Name] = p.Status.Components.Client
	}
	var out []finding.Finding
	for _, p := range o.Clients {
		want := hashes[p.Labels[labelGPUPool]]
		if want != "" && p.Labels[labelTemplateHash] != want && p.DeletionTimestamp == nil {
			out = append(out, finding.Finding{Object: "Pod/" + p.Namespace + "/" + p.Name, Expected: "injection " + want,
				Found: orNone(p.Labels[labelTemplateHash])})
		}
	}
	return out
}

func checkPhases(o *Observation) []finding.Finding {
	empty := o.emptyPools()
	var out []finding.Finding
	for _, c := range o.Clusters {
		// An empty pool with minResources stays Updating, and its cluster too.
		if c.Status.Phase != phaseRunning && !hasEmpty(c, empty) {
			out = append(out, finding.Finding{Object: "TensorFusionCluster/" + c.Name, Expected: phaseRunning, Found: orNone(c.Status.Phase)})
		}
	}
	for _, p := range o.Pools {
		if !empty[p.Name] && p.Status.Phase != phaseRunning {
			out = append(out, finding.Finding{Object: "GPUPool/" + p.Name, Expected: phaseRunning, Found: orNone(p.Status.Phase)})
		}
	}
	for _, h := range o.Hosts {
		if h.gpuNode.Status.Phase != phaseRunning {
			out = append(out, finding.Finding{Object: hostObject(h.name), Expected: phaseRunning, Found: orNone(h.gpuNode.Status.Phase)})
		}
	}
	return out
}

func hasEmpty(c FusionCluster, empty map[string]bool) bool {
	return slices.ContainsFunc(c.Spec.GPUPools, func(e PoolEntry) bool { return empty[poolName(c.Name, e.Name)] })
}

func checkOnePod(o *Observation) []finding.Finding {
	var out []finding.Finding
	for _, h := range o.Hosts {
		if len(h.pods) != 1 {
			out = append(out, finding.Finding{Object: hostObject(h.name), Expected: "exactly one hypervisor pod", Found: fmt.Sprint(len(h.pods))})
			continue
		}
		p := &h.pods[0]
		switch {
		case !ready(p):
			out = append(out, finding.Finding{Object: "Pod/" + p.Namespace + "/" + p.Name, Expected: "Running and Ready", Found: string(p.Status.Phase)})
		case o.rolled(h) && containerImage(p.Spec.Containers) != o.Goal.HypervisorImage:
			out = append(out, finding.Finding{Object: "Pod/" + p.Namespace + "/" + p.Name, Expected: "image " + o.Goal.HypervisorImage, Found: containerImage(p.Spec.Containers)})
		}
	}
	return out
}

func checkUnplanned(o *Observation) []finding.Finding {
	return compareSnapshots(o.Before, o.snapshot(), nil, false)
}

func checkAllocations(o *Observation) []finding.Finding {
	object := "/api/allocation of the leader"
	switch {
	case o.Before.Allocations < 0 && len(o.Before.Workers) > 0:
		return []finding.Finding{{Object: object, Expected: "a count from before the restart", Found: "it was unknown",
			Why: "whether an allocation was lost cannot be told", Next: "compare the GPUs' runningApps with the workers by hand"}}
	case o.Before.Allocations < 0:
		return nil // no worker, so nothing was allocated
	case o.Allocations < 0:
		return []finding.Finding{{Object: object, Expected: plural(int(o.Before.Allocations), "allocations"), Found: "no answer",
			Next: "check that the leader's pod answers on port 8080"}}
	case o.Allocations < o.Before.Allocations:
		return []finding.Finding{{Object: object, Expected: plural(o.Before.Allocations, "allocations as before"), Found: fmt.Sprint(o.Allocations),
			Why: "GPUs in use would be given out a second time", Next: "do not admit new GPU work; restart the controller once and compare again"}}
	}
	return nil
}

func checkInventory(o *Observation) []finding.Finding {
	var out []finding.Finding
	for _, h := range o.Hosts {
		n, known := o.Nodes[h.name]
		switch {
		case !known:
			out = append(out, finding.Finding{Object: "Node/" + h.name, Expected: "exists", Found: "no Node of this name"})
		case !nodeReady(&n):
			out = append(out, finding.Finding{Object: "Node/" + h.name, Expected: "Ready", Found: "not Ready", Next: "repair the Node, or take it out of the pool"})
		}
		if h.gpuNode.Status.Phase != phaseRunning {
			out = append(out, finding.Finding{Object: hostObject(h.name), Expected: phaseRunning, Found: orNone(h.gpuNode.Status.Phase),
				Why: "one Pending node blocks every batch of the controller, also those of a rollback"})
		}
	}
	if now := o.snapshot(); o.Before.Inventory != "" && now.Inventory != o.Before.Inventory {
		out = append(out, finding.Finding{Object: "GPU inventory", Expected: fmt.Sprintf("%d GPUs, digest %.12s", o.Before.GPUs, o.Before.Inventory),
			Found: fmt.Sprintf("%d GPUs, digest %.12s", now.GPUs, now.Inventory),
			Why:   "a GPU is gone, or its model or capacity changed", Next: "compare the GPU objects with the backup's"})
	}
	return out
}
