package fault

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"

	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/refit-run/refit/sandbox/agents"
	"github.com/refit-run/refit/sandbox/kwok"
)

// Label marks every object that a fault leaves in the cluster, for clear.
const Label = "refit.sandbox/fault"

// TensorFusion's label on its pods.
const (
	componentLabel = "tensor-fusion.ai/component"
	hypervisor     = "hypervisor"
	operator       = "operator"
)

func nodeNeverReady(ctx context.Context, t *Targets, args []string) error {
	return annotateNode(ctx, t, args[0], "true")
}

func annotateNode(ctx context.Context, t *Targets, node string, value any) error {
	patch, err := json.Marshal(map[string]any{"metadata": map[string]any{"annotations": map[string]any{kwok.NotReady: value}}})
	if err != nil {
		return err
	}
	if _, err := t.Kube.CoreV1().Nodes().Patch(ctx, node, types.MergePatchType, patch, metav1.PatchOptions{}); err != nil {
		return fmt.Errorf("node %s: %w", node, err)
	}
	return nil
}

func hypervisorNeverReady(ctx context.Context, t *Targets, args []string) error {
	return annotateNewPods(ctx, t, args[0], kwok.Hold, "true")
}

// crashEvery is the time between two crashes: fast, because tests wait for
// several of them.
const crashEvery = "1s"

func hypervisorCrashLoop(ctx context.Context, t *Targets, args []string) error {
	if err := annotateNewPods(ctx, t, args[0], kwok.CrashLoop, crashEvery); err != nil {
		return err
	}
	pods, err := hypervisors(ctx, t, args[0])
	if err != nil {
		return err
	}
	for _, p := range pods {
		if err := annotatePod(ctx, t, p, map[string]any{kwok.CrashLoop: crashEvery}); err != nil {
			return err
		}
	}
	return nil
}

func annotatePod(ctx context.Context, t *Targets, p corev1.Pod, annotations map[string]any) error {
	patch, err := json.Marshal(map[string]any{"metadata": map[string]any{"annotations": annotations}})
	if err != nil {
		return err
	}
	_, err = t.Kube.CoreV1().Pods(p.Namespace).Patch(ctx, p.Name, types.MergePatchType, patch, metav1.PatchOptions{})
	if apierrors.IsNotFound(err) {
		return nil
	}
	return err
}

func hypervisors(ctx context.Context, t *Targets, node string) ([]corev1.Pod, error) {
	list, err := t.Kube.CoreV1().Pods(t.Namespace).List(ctx, metav1.ListOptions{
		LabelSelector: componentLabel + "=" + hypervisor,
		FieldSelector: fields.OneTermEqualSelector("spec.nodeName", node).String(),
	})
	if err != nil {
		return nil, fmt.Errorf("hypervisor of node %s: %w", node, err)
	}
	return list.Items, nil
}

func hypervisorReplaced(ctx context.Context, t *Targets, args []string) error {
	pods, err := hypervisors(ctx, t, args[0])
	if err != nil {
		return err
	}
	if len(pods) == 0 {
		return fmt.Errorf("node %s: expected a hypervisor pod, found none", args[0])
	}
	for _, p := range pods {
		if err := t.Kube.CoreV1().Pods(p.Namespace).Delete(ctx, p.Name, metav1.DeleteOptions{Preconditions: metav1.NewUIDPreconditions(string(p.UID))}); err != nil {
			return fmt.Errorf("pod %s: %w", p.Name, err)
		}
	}
	return nil
}

// controllerRestart deletes the controller's pods and ends the process that
// they stand for.
func controllerRestart(ctx context.Context, t *Targets, _ []string) error {
	selector := metav1.ListOptions{LabelSelector: componentLabel + "=" + operator}
	if err := t.Kube.CoreV1().Pods(t.Namespace).DeleteCollection(ctx, metav1.DeleteOptions{}, selector); err != nil {
		return fmt.Errorf("controller pods: %w", err)
	}
	if t.RestartController == nil {
		return nil
	}
	return t.RestartController(ctx)
}

func pdbBlocks(ctx context.Context, t *Targets, args []string) error {
	key, value, ok := strings.Cut(args[1], "=")
	if !ok {
		return fmt.Errorf("selector %q: expected LABEL=VALUE", args[1])
	}
	none := intstr.FromInt32(0)
	pdb := &policyv1.PodDisruptionBudget{
		ObjectMeta: metav1.ObjectMeta{GenerateName: "sandbox-fault-", Labels: map[string]string{Label: "pdb-blocks"}},
		Spec: policyv1.PodDisruptionBudgetSpec{
			MaxUnavailable: &none,
			Selector:       &metav1.LabelSelector{MatchLabels: map[string]string{key: value}},
		},
	}
	if _, err := t.Kube.PolicyV1().PodDisruptionBudgets(args[0]).Create(ctx, pdb, metav1.CreateOptions{}); err != nil {
		return fmt.Errorf("PodDisruptionBudget in %s: %w", args[0], err)
	}
	return nil
}

var clusters = schema.GroupVersionResource{Group: "tensor-fusion.ai", Version: "v1", Resource: "tensorfusionclusters"}

// autoUpdateOn flips the flag in the TensorFusionCluster that has the pool, as
// a person with kubectl would; pools are found by name, not by index.
func autoUpdateOn(ctx context.Context, t *Targets, args []string) error {
	list, err := t.Dynamic.Resource(clusters).List(ctx, metav1.ListOptions{})
	if err != nil {
		return fmt.Errorf("TensorFusionClusters: %w", err)
	}
	for _, tfc := range list.Items {
		pools, _, err := unstructured.NestedSlice(tfc.Object, "spec", "gpuPools")
		if err != nil {
			return fmt.Errorf("TensorFusionCluster %s: %w", tfc.GetName(), err)
		}
		for i, p := range pools {
			pool, ok := p.(map[string]any)
			if !ok || (pool["name"] != args[0] && fmt.Sprint(tfc.GetName(), "-", pool["name"]) != args[0]) {
				continue
			}
			if err := unstructured.SetNestedField(pool, true, "specTemplate", "nodeManagerConfig", "nodePoolRollingUpdatePolicy", "autoUpdateHypervisor"); err != nil {
				return fmt.Errorf("TensorFusionCluster %s, pool %s: %w", tfc.GetName(), args[0], err)
			}
			pools[i] = pool
			if err := unstructured.SetNestedSlice(tfc.Object, pools, "spec", "gpuPools"); err != nil {
				return err
			}
			_, err := t.Dynamic.Resource(clusters).Update(ctx, &tfc, metav1.UpdateOptions{FieldManager: "kubectl-edit"})
			return err
		}
	}
	return fmt.Errorf("pool %q: expected it in one of %d TensorFusionClusters, found it in none", args[0], len(list.Items))
}

// heal takes back every fault that lasts. It goes on after an error, so that
// one broken part does not keep the others broken.
func heal(ctx context.Context, t *Targets, _ []string) error {
	t.Canary.Answer(agents.OK)
	t.Registry.Heal()
	t.Greptime.SetDown(false)
	problems := []error{t.Agents.Heal(ctx), t.APIServer.Start()}
	if err := t.APIReady(ctx); err != nil {
		return errors.Join(append(problems, err)...)
	}
	problems = append(problems, healNodes(ctx, t), removePolicies(ctx, t), healPods(ctx, t))
	pdbs, err := t.Kube.PolicyV1().PodDisruptionBudgets("").List(ctx, metav1.ListOptions{LabelSelector: Label})
	problems = append(problems, err)
	if err == nil {
		for _, p := range pdbs.Items {
			problems = append(problems, t.Kube.PolicyV1().PodDisruptionBudgets(p.Namespace).Delete(ctx, p.Name, metav1.DeleteOptions{}))
		}
	}
	return errors.Join(problems...)
}

func healNodes(ctx context.Context, t *Targets) error {
	nodes, err := t.Kube.CoreV1().Nodes().List(ctx, metav1.ListOptions{})
	if err != nil {
		return err
	}
	for _, n := range nodes.Items {
		if _, ok := n.Annotations[kwok.NotReady]; ok {
			if err := annotateNode(ctx, t, n.Name, nil); err != nil {
				return err
			}
		}
	}
	return nil
}

func healPods(ctx context.Context, t *Targets) error {
	pods, err := t.Kube.CoreV1().Pods(t.Namespace).List(ctx, metav1.ListOptions{LabelSelector: componentLabel + "=" + hypervisor})
	if err != nil {
		return err
	}
	for _, p := range pods.Items {
		_, crashing := p.Annotations[kwok.CrashLoop]
		_, pending := p.Annotations[kwok.Hold]
		if !crashing && !pending {
			continue
		}
		if err := annotatePod(ctx, t, p, map[string]any{kwok.CrashLoop: nil, kwok.Hold: nil}); err != nil {
			return err
		}
	}
	return nil
}
