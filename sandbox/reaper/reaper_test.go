package reaper

import (
	"context"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
)

func TestOnlyTerminatingPodsOfFakeNodesGoAndOnlyByUID(t *testing.T) {
	pod := func(name, node string, terminating bool) *corev1.Pod {
		p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "a", Name: name, UID: "uid-of-x"}, Spec: corev1.PodSpec{NodeName: node}}
		if terminating {
			p.DeletionTimestamp = &metav1.Time{Time: time.Unix(1, 0)}
		}
		return p
	}
	kube := fake.NewClientset(
		&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "fake", Annotations: map[string]string{"kind": "fake"}}},
		&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "real"}},
		pod("leaves", "fake", true), pod("stays", "fake", false), pod("real", "real", true),
	)
	deleted := make(chan clienttesting.DeleteActionImpl, 8)
	kube.PrependReactor("delete", "pods", func(a clienttesting.Action) (bool, runtime.Object, error) {
		deleted <- a.(clienttesting.DeleteActionImpl)
		return false, nil, nil
	})
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	done := make(chan error, 1)
	go func() { done <- Run(ctx, kube, "kind", "fake") }()
	select {
	case a := <-deleted:
		if a.Name != "leaves" || *a.DeleteOptions.GracePeriodSeconds != 0 || string(*a.DeleteOptions.Preconditions.UID) != "uid-of-x" {
			t.Errorf("deleted %s with %+v", a.Name, a.DeleteOptions)
		}
	case <-ctx.Done():
		t.Fatal("nothing was deleted")
	}
	cancel()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	if len(deleted) != 0 {
		t.Errorf("also deleted %s", (<-deleted).Name)
	}
}
