package tensorfusion

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"slices"
	"sort"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"github.com/refit-run/refit/activities/finding"
)

// snapshot reduces the observation to what must not change by itself.
func (o *Observation) snapshot() Snapshot {
	s := Snapshot{Hypervisors: map[string]string{}, Workers: map[string]WorkerPod{}, Objects: o.Objects}
	var lines []string
	for _, h := range o.Hosts {
		if p := h.eldest(); p != nil {
			s.Hypervisors[h.name] = string(p.UID)
			if made := p.CreationTimestamp.UTC(); made.After(s.Youngest) {
				s.Youngest = made
			}
		}
		lines = append(lines, h.inventory()...)
	}
	for i := range o.Workers {
		p := &o.Workers[i]
		s.Workers[p.Namespace+"/"+p.Name] = WorkerPod{UID: string(p.UID), Workload: p.Namespace + "/" + p.Labels[labelWorkload]}
	}
	s.remember(o.Allocated)
	for pool, e := range entriesOf(o.Clusters) {
		if s.Ports == nil {
			s.Ports = map[string]int32{}
		}
		s.Ports[pool] = e.Spec.Port()
	}
	sort.Strings(lines)
	sum := sha256.Sum256([]byte(strings.Join(lines, "\n")))
	s.GPUs, s.Inventory = len(lines), hex.EncodeToString(sum[:])
	return s
}

// eldest is the hypervisor pod that stood first: a controller of another line
// may have put a second one beside it, which replaces nothing.
func (v hostView) eldest() *corev1.Pod {
	var out *corev1.Pod
	for i := range v.pods {
		if out == nil || v.pods[i].CreationTimestamp.Before(&out.CreationTimestamp) {
			out = &v.pods[i]
		}
	}
	return out
}

// checkUnplanned lists what changed since Before and was not planned (P12). New
// workers are the users' business, and so is a workload that got smaller.
func checkUnplanned(o *Observation) []finding.Finding {
	now := o.snapshot()
	var out []finding.Finding
	for _, node := range sortedKeys(o.Before.Hypervisors) {
		was, is := o.Before.Hypervisors[node], now.Hypervisors[node]
		if was != is && !slices.Contains(o.Planned, node) {
			out = append(out, finding.Finding{
				Object: "hypervisor of " + node, Expected: "pod UID " + orNone(was), Found: orNone(is),
				Why:  "it was replaced outside a batch, unproven",
				Next: "find out what replaced it: the controller's log around the pod's creation",
			})
		}
	}
	if o.PlannedWorkers {
		return out
	}
	incomplete := o.incompleteWorkloads(now)
	for _, pod := range sortedKeys(o.Before.Workers) {
		was, is := o.Before.Workers[pod], now.Workers[pod]
		found := is.UID
		if is.UID == "" {
			found = incomplete[was.Workload]
		}
		if is.UID != was.UID && found != "" {
			out = append(out, finding.Finding{
				Object: "worker Pod/" + pod, Expected: "UID " + was.UID, Found: found,
				Why:  "the application connected to it lost its GPU session",
				Next: "find out what replaced it: the controller's log around that time; tell the application's owner",
			})
		}
	}
	return out
}

// incompleteWorkloads says of each workload why a worker of it that is gone was
// not simply one too many: another stands in its place, or is missing.
func (o *Observation) incompleteWorkloads(now Snapshot) map[string]string {
	out := map[string]string{}
	count := map[string]int32{}
	for pod, w := range now.Workers {
		count[w.Workload]++
		if _, known := o.Before.Workers[pod]; !known {
			out[w.Workload] = "gone, and another worker made"
		}
	}
	for _, w := range o.Workloads {
		name := w.Namespace + "/" + w.Name
		if w.Spec.Replicas != nil && count[name] < *w.Spec.Replicas {
			out[name] = fmt.Sprintf("gone, %d of %d workers left", count[name], *w.Spec.Replicas)
		}
	}
	return out
}

func containerImage(containers []corev1.Container) string {
	if len(containers) == 0 {
		return ""
	}
	return containers[0].Image
}
