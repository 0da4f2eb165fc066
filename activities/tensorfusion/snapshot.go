package tensorfusion

import (
	"crypto/sha256"
	"encoding/hex"
	"slices"
	"sort"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"github.com/refit-run/refit/activities/finding"
)

// snapshot reduces the observation to what must not change by itself.
func (o *Observation) snapshot() Snapshot {
	s := Snapshot{Hypervisors: map[string]string{}, Workers: map[string]string{}, Allocations: o.Allocations}
	var lines []string
	for _, h := range o.Hosts {
		if p := h.eldest(); p != nil {
			s.Hypervisors[h.name] = string(p.UID)
		}
		lines = append(lines, h.inventory()...)
	}
	for i := range o.Workers {
		s.Workers[o.Workers[i].Namespace+"/"+o.Workers[i].Name] = string(o.Workers[i].UID)
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

// compareSnapshots lists what changed and was not planned (P12). New workers
// are the users' business; gone or replaced ones are not.
func compareSnapshots(before, now Snapshot, planned []string, plannedWorkers bool) []finding.Finding {
	var out []finding.Finding
	for _, node := range sortedKeys(before.Hypervisors) {
		was, is := before.Hypervisors[node], now.Hypervisors[node]
		if was != is && !slices.Contains(planned, node) {
			out = append(out, finding.Finding{
				Row: "P12", Object: "hypervisor of " + node, Expected: "pod UID " + orNone(was), Found: orNone(is),
				Why:  "it was replaced outside a batch, unproven",
				Next: "find out what replaced it: the controller's log around the pod's creation",
			})
		}
	}
	if plannedWorkers {
		return out
	}
	for _, pod := range sortedKeys(before.Workers) {
		is, there := now.Workers[pod]
		switch {
		case !there:
			out = append(out, finding.Finding{Row: "P12", Object: "worker Pod/" + pod, Expected: "UID " + before.Workers[pod], Found: "gone",
				Why: "the application connected to it lost its GPU session"})
		case is != before.Workers[pod]:
			out = append(out, finding.Finding{Row: "P12", Object: "worker Pod/" + pod, Expected: "UID " + before.Workers[pod], Found: is,
				Why: "the application connected to it lost its GPU session"})
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
