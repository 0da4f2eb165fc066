package tensorfusion

import (
	"context"
	"encoding/json"
	"fmt"
	"sync"

	"github.com/refit-run/refit/activities/finding"
	"github.com/refit-run/refit/activities/kube"
)

// askHypervisors asks every rolled host's hypervisor whether it is ready and
// how many devices it sees, through the API server (facts, section 6).
func askHypervisors(ctx context.Context, c *kube.Client, o *Observation) []finding.Finding {
	ports := map[string]int32{}
	for pool, e := range entriesOf(o.Clusters) {
		ports[pool] = e.Spec.Port()
	}
	trouble := make([]string, len(o.Hosts))
	var wg sync.WaitGroup
	slots := make(chan struct{}, parallelRequests)
	for i, h := range o.Hosts {
		if !o.rolled(h) {
			continue
		}
		port := int32(defaultPort)
		for pool, p := range ports {
			if h.gpuNode.Labels[poolLabel(pool)] == "true" {
				port = p
			}
		}
		slots <- struct{}{}
		wg.Go(func() {
			defer func() { <-slots }()
			trouble[i] = hypervisorTrouble(ctx, c, h, o.Goal, int(port))
		})
	}
	wg.Wait()
	var out []finding.Finding
	for i, why := range trouble {
		if why != "" {
			out = append(out, finding.Finding{Row: "T19", Object: "hypervisor of " + o.Hosts[i].name, Expected: "ready, with every GPU of the node", Found: why,
				Next: "read the hypervisor's log; a GPU that it does not list is not given to workloads"})
		}
	}
	return out
}

func hypervisorTrouble(ctx context.Context, c *kube.Client, h hostView, goal Goal, port int) string {
	pod := h.pod(goal)
	if pod == nil {
		return "no pod to ask"
	}
	if _, err := podHTTP(ctx, c, pod.Namespace, pod.Name, port, "/readyz"); err != nil {
		return err.Error()
	}
	body, err := podHTTP(ctx, c, pod.Namespace, pod.Name, port, "/api/v1/devices")
	if err != nil {
		return err.Error()
	}
	if n := countDevices(body); n != len(h.gpus) {
		return fmt.Sprintf("lists %d devices, the node has %d GPU objects", n, len(h.gpus))
	}
	return ""
}

// countDevices accepts a list, or an object with a list called devices or
// data; -1 when there is none.
func countDevices(body []byte) int {
	var plain []json.RawMessage
	if json.Unmarshal(body, &plain) == nil {
		return len(plain)
	}
	var wrapped struct {
		Devices, Data []json.RawMessage
	}
	if json.Unmarshal(body, &wrapped) != nil || wrapped.Devices == nil && wrapped.Data == nil {
		return -1
	}
	return len(wrapped.Devices) + len(wrapped.Data)
}
