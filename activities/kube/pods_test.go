package kube_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/refit-run/refit/activities/finding"
	"github.com/refit-run/refit/activities/internal/apiservertest"
	"github.com/refit-run/refit/activities/kube"
)

func TestMembersAreFoundByContainerAndTheMissingOneIsNamed(t *testing.T) {
	server := apiservertest.Shared(t)
	c, ns := server.Client(t), server.Namespace(t)
	labels, ofPods := map[string]string{"app": "nats"}, map[string]string{"app": "nats", "role": "server"}
	pod := func(name, container string, labels map[string]string) {
		_, err := c.Typed.CoreV1().Pods(ns).Create(t.Context(), &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: labels},
			Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: container, Image: "x"}, {Name: "reloader", Image: "x"}}}}, metav1.CreateOptions{})
		require.NoError(t, err)
	}
	pod("nats-0", "nats", ofPods)
	pod("nats-2", "nats", ofPods)
	pod("nats-box-1", "nats-box", labels)
	pod("other", "nats", nil)
	three := int32(3)
	_, err := c.Typed.AppsV1().StatefulSets(ns).Create(t.Context(), &appsv1.StatefulSet{ObjectMeta: metav1.ObjectMeta{Name: "nats", Labels: labels},
		Spec: appsv1.StatefulSetSpec{Replicas: &three, Selector: &metav1.LabelSelector{MatchLabels: labels}, ServiceName: "nats",
			Template: corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: ofPods},
				Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "nats", Image: "x"}}}}}}, metav1.CreateOptions{})
	require.NoError(t, err)

	names := func(selector string) (out []string) {
		m, err := c.Members(t.Context(), ns, selector, "nats")
		require.NoError(t, err)
		require.Equal(t, []string{"nats-1"}, m.Missing)
		for _, p := range m.Pods {
			out = append(out, p.Name)
		}
		return out
	}
	require.Equal(t, []string{"nats-0", "nats-2", "other"}, names(""))
	require.Equal(t, []string{"nats-0", "nats-2"}, names("app=nats"))
	require.Equal(t, []string{"nats-0", "nats-2"}, names("role=server"), "a label that only the pods carry")

	other, err := c.Members(t.Context(), ns, "app=other", "nats")
	require.NoError(t, err)
	require.Empty(t, other, "the set's pods are not meant")
	_, err = c.Members(t.Context(), ns, "app in nats", "nats")
	_, class, ok := finding.Of(err)
	require.True(t, ok, err)
	require.Equal(t, finding.Stop, class)
}

func TestPollEndsWithTheLookTheErrorOrTheLimit(t *testing.T) {
	looks := 0
	done, err := kube.Poll(t.Context(), 30*time.Second, 5*time.Millisecond, func(context.Context) (bool, error) {
		looks++
		return looks == 3, nil
	})
	require.NoError(t, err)
	require.True(t, done)
	require.Equal(t, 3, looks)

	broken := errors.New("broken")
	_, err = kube.Poll(t.Context(), time.Minute, time.Millisecond, func(context.Context) (bool, error) { return false, broken })
	require.ErrorIs(t, err, broken)

	looks = 0
	done, err = kube.Poll(t.Context(), 0, time.Millisecond, func(ctx context.Context) (bool, error) {
		looks++
		require.NoError(t, ctx.Err(), "a look is not cut off by the limit")
		return false, nil
	})
	require.NoError(t, err)
	require.False(t, done)
	require.Positive(t, looks, "there is one look at least")

	ctx, cancel := context.WithCancel(t.Context())
	_, err = kube.Poll(ctx, time.Minute, time.Millisecond, func(context.Context) (bool, error) { cancel(); return true, nil })
	require.ErrorIs(t, err, context.Canceled)
}
