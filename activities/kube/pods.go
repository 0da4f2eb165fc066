package kube

import (
	"context"
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"

	"github.com/refit-run/refit/activities/finding"
)

// Members are the pods of a system that runs as StatefulSets, and those that
// should be there and are not.
type Members struct {
	Pods []corev1.Pod
	// Missing are the names of pods that a StatefulSet asks for and nobody has.
	Missing []string
}

// Members lists the pods of a namespace that match the label selector (empty
// takes all) and have a container of that name, by name. A list of pods alone
// would not show that one is gone: the StatefulSets whose pods have these labels
// and this container say how many there must be, whatever their own labels.
func (c *Client) Members(ctx context.Context, namespace, selector, container string) (Members, error) {
	what := fmt.Sprintf("pods of %s with container %q", namespace, container)
	wanted, err := labels.Parse(selector)
	if err != nil {
		return Members{}, finding.Finding{Object: what, Expected: "a label selector", Found: err.Error(), Next: "correct the selector in the plan"}.Error(finding.Stop)
	}
	options := metav1.ListOptions{LabelSelector: selector, Limit: listPage}
	var out Members
	for {
		page, err := c.Typed.CoreV1().Pods(namespace).List(ctx, options)
		if err != nil {
			return Members{}, Wrap(err, what)
		}
		for _, p := range page.Items {
			if hasContainer(p.Spec, container) {
				out.Pods = append(out.Pods, p)
			}
		}
		if options.Continue = page.Continue; options.Continue == "" {
			break
		}
	}
	sets, err := c.Typed.AppsV1().StatefulSets(namespace).List(ctx, metav1.ListOptions{})
	if err != nil {
		return Members{}, Wrap(err, fmt.Sprintf("StatefulSets of %s with container %q", namespace, container))
	}
	for _, set := range sets.Items {
		if !hasContainer(set.Spec.Template.Spec, container) || !wanted.Matches(labels.Set(set.Spec.Template.Labels)) {
			continue
		}
		replicas, first := int32(1), int32(0)
		if set.Spec.Replicas != nil {
			replicas = *set.Spec.Replicas
		}
		if set.Spec.Ordinals != nil {
			first = set.Spec.Ordinals.Start
		}
		for i := first; i < first+replicas; i++ {
			name := fmt.Sprintf("%s-%d", set.Name, i)
			if !slices.ContainsFunc(out.Pods, func(p corev1.Pod) bool { return p.Name == name }) {
				out.Missing = append(out.Missing, name)
			}
		}
	}
	return out, nil
}

func hasContainer(spec corev1.PodSpec, name string) bool {
	return slices.ContainsFunc(spec.Containers, func(c corev1.Container) bool { return c.Name == name })
}

// Unready says in a few words why a pod is not Ready; "" when it is.
func Unready(p *corev1.Pod) string {
	for _, s := range p.Status.ContainerStatuses {
		if w := s.State.Waiting; w != nil && w.Reason != "" {
			return fmt.Sprintf("container %s waits: %s %s", s.Name, w.Reason, w.Message)
		}
	}
	if p.DeletionTimestamp != nil {
		return "it is being deleted"
	}
	for _, c := range p.Status.Conditions {
		if c.Type == corev1.PodReady {
			if c.Status == corev1.ConditionTrue {
				return ""
			}
			return fmt.Sprintf("not Ready: %s %s", c.Reason, c.Message)
		}
	}
	return fmt.Sprintf("not Ready, phase %s", p.Status.Phase)
}
