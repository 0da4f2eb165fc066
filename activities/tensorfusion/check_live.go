package tensorfusion

import (
	"fmt"
	"slices"

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
		out = append(out, finding.Finding{Object: c.Deployment, Expected: fmt.Sprintf("%d replicas ready", c.Replicas), Found: fmt.Sprint(c.Ready),
			Next: "look at the controller pods: events, log, image pull"})
	}
	if want := o.Target.ControllerImage; want != "" && c.Image != want {
		out = append(out, finding.Finding{Object: c.Deployment, Expected: "image " + want, Found: orNone(c.Image),
			Why: "somebody else changed the Deployment since", Next: "find out who (kubectl get deployment --show-managed-fields), then retry"})
	}
	return out
}

func checkNeighbours(o *Observation) []finding.Finding {
	var out []finding.Finding
	for _, n := range o.Neighbours {
		if n.Trouble != "" {
			f := finding.Finding{Object: n.Object, Expected: "ready, and what the plan says, after the Helm step", Found: n.Trouble,
				Next: "look at its events and at who wrote it (kubectl get --show-managed-fields), put it right, then retry"}
			if n.Content {
				f.Next += "; what a retry finds as it is told here it takes as it is"
			}
			out = append(out, f)
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

// rolled reports whether a host belongs to a pool that the run rolled, and was
// not left as it was.
func (o *Observation) rolled(h hostView) bool {
	return !slices.Contains(o.Rolled.LeftHosts, h.name) && slices.ContainsFunc(o.Rolled.Hypervisors, func(pool string) bool { return h.gpuNode.Labels[poolLabel(pool)] == "true" })
}

func checkWorkers(o *Observation) []finding.Finding {
	byWorkload := map[string][]int{}
	for i, w := range o.Workers {
		key := w.Namespace + "/" + w.Labels[labelWorkload]
		byWorkload[key] = append(byWorkload[key], i)
	}
	image := workerImage(o.Providers)
	var out []finding.Finding
	for _, w := range o.Workloads {
		rolled := slices.Contains(o.Rolled.Workers, w.Pool())
		if !rolled && !slices.Contains(o.Rolled.Completed, w.Pool()) {
			continue
		}
		object := "TensorFusionWorkload/" + w.Namespace + "/" + w.Name
		if w.Spec.Replicas != nil && (w.Status.WorkerCount != *w.Spec.Replicas || w.Status.ReadyWorkers != *w.Spec.Replicas) {
			out = append(out, finding.Finding{Object: object, Expected: fmt.Sprintf("%d workers, all ready", *w.Spec.Replicas),
				Found: fmt.Sprintf("%d workers, %d ready", w.Status.WorkerCount, w.Status.ReadyWorkers),
				Why:   "applications of this workload wait for a GPU", Next: "look at the workload's pods: events, image pull, free capacity of the pool"})
		}
		if !rolled {
			continue
		}
		for _, i := range byWorkload[w.Namespace+"/"+w.Name] {
			p := &o.Workers[i]
			if why := staleWorker(p.Labels[labelTemplateHash], w.Status.Hash, containerImage(p.Spec.Containers), image); why != "" {
				out = append(out, finding.Finding{Object: "Pod/" + p.Namespace + "/" + p.Name, Expected: "the workload's template and image", Found: why,
					Next: "run the worker rollout of its pool again, or delete the pod when its application may lose its session"})
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
		pool := p.Labels[labelGPUPool]
		if !slices.Contains(o.Rolled.Clients, pool) || slices.Contains(o.Rolled.Left, p.Namespace+"/"+p.Name) {
			continue
		}
		if staleClient(&p, hashes[pool]) {
			out = append(out, finding.Finding{Object: "Pod/" + p.Namespace + "/" + p.Name, Expected: "injection " + hashes[pool],
				Found: orNone(p.Labels[labelTemplateHash]), Why: "it talks to the new workers through the old client library",
				Next: "run the client rollout of its pool again, or let its owner recreate it"})
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
			out = append(out, finding.Finding{Object: "TensorFusionCluster/" + c.Name, Expected: phaseRunning, Found: orNone(c.Status.Phase),
				Next: "look at its pools and nodes; its phase follows theirs"})
		}
	}
	for _, p := range o.Pools {
		if !empty[p.Name] && p.Status.Phase != phaseRunning {
			out = append(out, finding.Finding{Object: "GPUPool/" + p.Name, Expected: phaseRunning, Found: orNone(p.Status.Phase),
				Next: "look at its GPUNodes; its phase follows theirs"})
		}
	}
	for _, h := range o.Hosts {
		if h.gpuNode.Status.Phase != phaseRunning {
			out = append(out, finding.Finding{Object: hostObject(h.name), Expected: phaseRunning, Found: orNone(h.gpuNode.Status.Phase),
				Next: "look at the node's hypervisor pod: events and log"})
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
			out = append(out, finding.Finding{Object: hostObject(h.name), Expected: "exactly one hypervisor pod", Found: fmt.Sprint(len(h.pods)),
				Next: "two: delete the one of the older line's name; none: look at the controller's log for this node"})
			continue
		}
		p := &h.pods[0]
		switch {
		case !ready(p):
			out = append(out, finding.Finding{Object: "Pod/" + p.Namespace + "/" + p.Name, Expected: "Running and Ready", Found: string(p.Status.Phase),
				Next: hintFor(p, "")})
		case o.rolled(h) && containerImage(p.Spec.Containers) != o.Goal.HypervisorImage:
			out = append(out, finding.Finding{Object: "Pod/" + p.Namespace + "/" + p.Name, Expected: "image " + o.Goal.HypervisorImage, Found: containerImage(p.Spec.Containers),
				Next: "find out what made this pod after its batch, then run the rollout again"})
		}
	}
	return out
}

func checkInventory(o *Observation) []finding.Finding {
	var out []finding.Finding
	for _, h := range o.Hosts {
		n, known := o.Nodes[h.name]
		switch {
		case !known:
			out = append(out, finding.Finding{Object: "Node/" + h.name, Expected: "exists", Found: "no Node of this name",
				Next: "delete the GPUNode that was left behind, or bring the Node back"})
		case !nodeReady(&n):
			out = append(out, finding.Finding{Object: "Node/" + h.name, Expected: "Ready", Found: "not Ready", Next: "repair the Node, or take it out of the pool"})
		}
		if h.gpuNode.Status.Phase != phaseRunning {
			out = append(out, finding.Finding{Object: hostObject(h.name), Expected: phaseRunning, Found: orNone(h.gpuNode.Status.Phase),
				Why: "one Pending node blocks every batch of the controller, also those of a rollback", Next: "repair the host, or take it out of the pool"})
		}
	}
	return append(out, inventoryFindings(o.Before, o.snapshot())...)
}

func inventoryFindings(before, now Snapshot) []finding.Finding {
	if before.Inventory == "" || now.Inventory == before.Inventory {
		return nil
	}
	return []finding.Finding{{Object: "GPU inventory", Expected: fmt.Sprintf("%d GPUs, digest %.12s", before.GPUs, before.Inventory),
		Found: fmt.Sprintf("%d GPUs, digest %.12s", now.GPUs, now.Inventory),
		Why:   "a GPU is gone, or its model or capacity changed", Next: "compare the GPU objects with the backup's"}}
}
