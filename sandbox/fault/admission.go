package fault

import (
	"context"
	"fmt"
	"strings"
	"time"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/refit-run/refit/sandbox/process"
)

// annotateNewPods makes the API server itself put an annotation on every
// hypervisor pod that is created on the node, whoever creates it: a pod is
// faulty from its first moment, with the double as with a real controller.
func annotateNewPods(ctx context.Context, t *Targets, node, annotation, value string) error {
	if _, err := t.Kube.CoreV1().Nodes().Get(ctx, node, metav1.GetOptions{}); err != nil {
		return fmt.Errorf("node %s: %w", node, err)
	}
	name := "sandbox-fault-" + annotation[strings.Index(annotation, "/")+1:] + "-" + node
	fail := admissionv1.Fail
	equivalent := admissionv1.Equivalent
	policy := &admissionv1.MutatingAdmissionPolicy{
		ObjectMeta: metav1.ObjectMeta{
			Name: name, Labels: map[string]string{Label: "admission"},
			Annotations: map[string]string{policyNode: node, policyAnnotation: annotation},
		},
		Spec: admissionv1.MutatingAdmissionPolicySpec{
			FailurePolicy:      &fail,
			ReinvocationPolicy: admissionv1.NeverReinvocationPolicy,
			MatchConstraints: &admissionv1.MatchResources{
				MatchPolicy: &equivalent,
				ResourceRules: []admissionv1.NamedRuleWithOperations{{RuleWithOperations: admissionv1.RuleWithOperations{
					Operations: []admissionv1.OperationType{admissionv1.Create},
					Rule:       admissionv1.Rule{APIGroups: []string{""}, APIVersions: []string{"v1"}, Resources: []string{"pods"}},
				}}},
				ObjectSelector: &metav1.LabelSelector{MatchLabels: map[string]string{componentLabel: hypervisor}},
			},
			MatchConditions: []admissionv1.MatchCondition{{
				Name: "node", Expression: fmt.Sprintf("object.spec.?nodeName.orValue('') == '%s'", node),
			}},
			Mutations: []admissionv1.Mutation{{
				PatchType: admissionv1.PatchTypeApplyConfiguration,
				ApplyConfiguration: &admissionv1.ApplyConfiguration{Expression: fmt.Sprintf(
					"Object{metadata: Object.metadata{annotations: {'%s': '%s'}}}", annotation, value)},
			}},
		},
	}
	api := t.Kube.AdmissionregistrationV1()
	if _, err := api.MutatingAdmissionPolicies().Create(ctx, policy, metav1.CreateOptions{}); err != nil && !apierrors.IsAlreadyExists(err) {
		return fmt.Errorf("admission policy %s: %w", name, err)
	}
	binding := &admissionv1.MutatingAdmissionPolicyBinding{
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{Label: "admission"}},
		Spec:       admissionv1.MutatingAdmissionPolicyBindingSpec{PolicyName: name},
	}
	if _, err := api.MutatingAdmissionPolicyBindings().Create(ctx, binding, metav1.CreateOptions{}); err != nil && !apierrors.IsAlreadyExists(err) {
		return fmt.Errorf("admission policy binding %s: %w", name, err)
	}
	return applied(ctx, t, node, annotation, true)
}

// Annotations of a policy: what it does, for the wait when it is removed.
const (
	policyNode       = "refit.sandbox/fault-node"
	policyAnnotation = "refit.sandbox/fault-annotation"
)

// policyDelay bounds how long the API server may take to load a new policy.
const policyDelay = 20 * time.Second

// applied asks with dry runs until the API server applies the policy, or no
// longer does: it loads changes of policies with a delay, in both directions.
func applied(ctx context.Context, t *Targets, node, annotation string, want bool) error {
	ctx, cancel := context.WithTimeout(ctx, policyDelay)
	defer cancel()
	probe := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{GenerateName: "sandbox-fault-", Labels: map[string]string{componentLabel: hypervisor}},
		Spec:       corev1.PodSpec{NodeName: node, Containers: []corev1.Container{{Name: "probe", Image: "probe"}}},
	}
	return process.Until(ctx, 100*time.Millisecond, func(ctx context.Context) error {
		got, err := t.Kube.CoreV1().Pods(t.Namespace).Create(ctx, probe, metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
		if err != nil {
			return fmt.Errorf("dry run of a pod on node %s: %w", node, err)
		}
		if _, ok := got.Annotations[annotation]; ok != want {
			return fmt.Errorf("dry run of a pod on node %s: expected annotation %s set to be %t, found %t", node, annotation, want, ok)
		}
		return nil
	})
}

// removePolicies returns when no new pod is touched any more: pods that are
// created after it are sound.
func removePolicies(ctx context.Context, t *Targets) error {
	api := t.Kube.AdmissionregistrationV1()
	ours := metav1.ListOptions{LabelSelector: Label}
	policies, err := api.MutatingAdmissionPolicies().List(ctx, ours)
	if err != nil {
		return err
	}
	if err := api.MutatingAdmissionPolicyBindings().DeleteCollection(ctx, metav1.DeleteOptions{}, ours); err != nil {
		return err
	}
	if err := api.MutatingAdmissionPolicies().DeleteCollection(ctx, metav1.DeleteOptions{}, ours); err != nil {
		return err
	}
	for _, p := range policies.Items {
		if err := applied(ctx, t, p.Annotations[policyNode], p.Annotations[policyAnnotation], false); err != nil {
			return err
		}
	}
	return nil
}
