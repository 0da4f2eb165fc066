package tensorfusion

import (
	"context"
	"encoding/json"
	"slices"

	corev1 "k8s.io/api/core/v1"

	"github.com/refit-run/refit/activities/finding"
	"github.com/refit-run/refit/activities/kube"
)

// allocations are the pods (namespace/name) to which the leader has given GPUs;
// nil when it does not answer. They are memory of one process, so only the
// leader's count.
func allocations(ctx context.Context, c *kube.Client, namespace, leader string) map[string]bool {
	body, err := podHTTP(ctx, c, namespace, leader, controllerPort, "/api/allocation")
	if err != nil {
		return nil
	}
	return readAllocations(body)
}

// allocation is one entry of the answer. The controller writes its fields with
// a capital, which JSON's decoder does not mind.
type allocation struct {
	PodMeta struct {
		Namespace string `json:"namespace"`
		Name      string `json:"name"`
	} `json:"podMeta"`
}

// readAllocations takes a list or an object with a key per pod; nil when an
// entry names no pod, because then none can be compared.
func readAllocations(body []byte) map[string]bool {
	var answer struct {
		Allocation json.RawMessage `json:"allocation"`
	}
	if json.Unmarshal(body, &answer) != nil {
		return nil
	}
	var entries []allocation
	var byKey map[string]allocation
	switch {
	case json.Unmarshal(answer.Allocation, &entries) == nil:
	case json.Unmarshal(answer.Allocation, &byKey) == nil:
		for _, e := range byKey {
			entries = append(entries, e)
		}
	default:
		return nil
	}
	out := map[string]bool{}
	for _, e := range entries {
		if e.PodMeta.Name == "" {
			return nil
		}
		out[e.PodMeta.Namespace+"/"+e.PodMeta.Name] = true
	}
	return out
}

// remember puts the leader's allocations into the snapshot. There may be
// thousands, nearly all of workers, so that the exceptions are kept.
func (s *Snapshot) remember(allocated map[string]bool) {
	s.Allocations = -1
	if allocated == nil {
		return
	}
	s.Allocations = len(allocated)
	for _, pod := range sortedKeys(s.Workers) {
		if !allocated[pod] {
			s.Unallocated = append(s.Unallocated, pod)
		}
	}
	for _, pod := range sortedKeys(allocated) {
		if _, worker := s.Workers[pod]; !worker {
			s.Allocated = append(s.Allocated, pod)
		}
	}
}

// AfterHelm forgets what only the Helm step must leave alone: the list of
// allocations would grow with every worker that is rolled.
func (s *Snapshot) AfterHelm() {
	s.Objects, s.Allocations, s.Allocated, s.Unallocated = nil, -1, nil, nil
}

// carry keeps the allocations of an earlier snapshot; of a worker that came
// since nothing is known.
func (s *Snapshot) carry(before Snapshot) {
	s.Allocations, s.Allocated, s.Unallocated = before.Allocations, before.Allocated, nil
	if before.Allocations < 0 {
		return
	}
	for _, pod := range sortedKeys(s.Workers) {
		if _, known := before.Workers[pod]; !known || slices.Contains(before.Unallocated, pod) {
			s.Unallocated = append(s.Unallocated, pod)
		}
	}
}

// holders are the pods that had an allocation. Where the leader was not heard
// every worker counts as one.
func (s Snapshot) holders() []string {
	var out []string
	for _, pod := range sortedKeys(s.Workers) {
		if _, without := slices.BinarySearch(s.Unallocated, pod); !without {
			out = append(out, pod)
		}
	}
	return append(out, s.Allocated...)
}

// checkAllocations compares, one by one, with the allocations of before the
// Helm step, without the pods that have ended since; before it, the leader must
// answer at all.
func checkAllocations(o *Observation) []finding.Finding {
	const object = "/api/allocation of the leader"
	alive := o.holding()
	var held []string
	for _, pod := range o.Before.holders() {
		uid, lives := alive[pod]
		if was, worker := o.Before.Workers[pod]; lives && (!worker || was.UID == uid) {
			held = append(held, pod)
		}
	}
	if o.Allocated == nil {
		if len(o.Workers) == 0 && len(held) == 0 {
			return nil // nothing was given out
		}
		return []finding.Finding{{Object: object, Expected: "a list of the pods that have GPUs", Found: "no answer that names them",
			Why:  "whether the controller's restart loses an allocation could not be told",
			Next: "check that the leader's pod answers on port 8080"}}
	}
	var out []finding.Finding
	for _, pod := range held {
		if !o.Allocated[pod] {
			out = append(out, finding.Finding{Object: object, Expected: "an allocation of Pod/" + pod + " as before", Found: "none, and the pod still runs",
				Why: "its GPU would be given out a second time", Next: "do not admit new GPU work; restart the controller once and compare again"})
		}
	}
	return out
}

// holding are the UIDs of the pods that can hold an allocation now: workers and
// local-GPU application pods that run and are not being deleted.
func (o *Observation) holding() map[string]string {
	out := map[string]string{}
	for _, pods := range [][]corev1.Pod{o.Workers, o.Clients} {
		for i := range pods {
			p := &pods[i]
			ended := p.DeletionTimestamp != nil || p.Status.Phase == corev1.PodSucceeded || p.Status.Phase == corev1.PodFailed
			if !ended && (o.Before.Allocations >= 0 || ready(p)) {
				out[p.Namespace+"/"+p.Name] = string(p.UID)
			}
		}
	}
	return out
}
