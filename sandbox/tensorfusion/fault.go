package tensorfusion

import (
	"context"
	"encoding/json"
	"fmt"
	"sync"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/refit-run/refit/sandbox/tensorfusion/machine"
)

// Annotations that the simulated kubelet obeys: one keeps a pod from becoming
// Ready, the other crashes its containers at that interval.
const (
	HoldAnnotation  = "refit.sandbox/hold"
	CrashAnnotation = "refit.sandbox/crash-loop"
)

// Faults, by the name that Fault takes. All but ControllerRestart and
// ClearFaults take a node.
const (
	NodeNeverReady      = "node-never-ready"
	HypervisorCrashLoop = "hypervisor-crash-loop"
	HypervisorReplaced  = "hypervisor-replaced"
	ControllerRestart   = "controller-restart"
	ClearFaults         = "clear"
)

// crashInterval is how often a crash-looping hypervisor restarts.
const crashInterval = "1s"

type faults struct {
	mu    sync.Mutex
	nodes map[string]string // node -> fault
}

func (f *faults) annotations(node string) map[string]string {
	f.mu.Lock()
	defer f.mu.Unlock()
	switch f.nodes[node] {
	case NodeNeverReady:
		return map[string]string{HoldAnnotation: "true"}
	case HypervisorCrashLoop:
		return map[string]string{CrashAnnotation: crashInterval}
	}
	return nil
}

func (f *faults) set(node, fault string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.nodes == nil {
		f.nodes = map[string]string{}
	}
	f.nodes[node] = fault
}

// clear empties the faults and returns what they were.
func (f *faults) clear() map[string]string {
	f.mu.Lock()
	defer f.mu.Unlock()
	before := f.nodes
	f.nodes = nil
	return before
}

// Fault breaks something, or with ClearFaults repairs what faults broke.
func (d *Double) Fault(ctx context.Context, name string, args ...string) error {
	node := func() (string, error) {
		if len(args) != 1 {
			return "", fmt.Errorf("fault %s: expected one node, found %d arguments", name, len(args))
		}
		if d.caches.node(args[0]) == nil {
			return "", fmt.Errorf("fault %s: Node %q does not exist", name, args[0])
		}
		return args[0], nil
	}
	switch name {
	case NodeNeverReady, HypervisorCrashLoop:
		n, err := node()
		if err != nil {
			return err
		}
		d.faults.set(n, name)
		if pod := d.hypervisorPod(n); name == HypervisorCrashLoop && pod != nil {
			return d.annotatePod(ctx, pod, map[string]any{CrashAnnotation: crashInterval})
		}
		return nil
	case HypervisorReplaced:
		n, err := node()
		if err != nil {
			return err
		}
		pod := d.hypervisorPod(n)
		if pod == nil {
			return fmt.Errorf("fault %s: Node %s has no hypervisor pod", name, n)
		}
		return d.deletePod(ctx, pod.Namespace, pod.Name, string(pod.UID))
	case ControllerRestart:
		d.election.crash()
		return nil
	case ClearFaults:
		return d.clearFaults(ctx)
	}
	return fmt.Errorf("fault %q is unknown; there are %s, %s, %s, %s, %s", name,
		NodeNeverReady, HypervisorCrashLoop, HypervisorReplaced, ControllerRestart, ClearFaults)
}

// hypervisorPod is the node's hypervisor pod of either name.
func (d *Double) hypervisorPod(node string) *corev1.Pod {
	for _, version := range []machine.Version{machine.Newest, {Major: 2}} {
		if p := d.caches.pod(d.options.Namespace, version.HypervisorName(node)); p != nil {
			return p
		}
	}
	return nil
}

// clearFaults lets held and crashing pods become Ready.
func (d *Double) clearFaults(ctx context.Context) error {
	for node := range d.faults.clear() {
		pod := d.hypervisorPod(node)
		if pod == nil {
			continue
		}
		if err := d.annotatePod(ctx, pod, map[string]any{HoldAnnotation: nil, CrashAnnotation: nil}); err != nil {
			return err
		}
	}
	return nil
}

func (d *Double) annotatePod(ctx context.Context, pod *corev1.Pod, annotations map[string]any) error {
	patch, err := json.Marshal(map[string]any{"metadata": map[string]any{"annotations": annotations}})
	if err != nil {
		return err
	}
	_, err = d.client.CoreV1().Pods(pod.Namespace).Patch(ctx, pod.Name, types.MergePatchType, patch, metav1.PatchOptions{})
	if apierrors.IsNotFound(err) {
		return nil
	}
	return err
}
