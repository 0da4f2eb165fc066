package tensorfusion

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/refit-run/refit/activities/kube"
)

const labelApp = "app"

// startUp is how long a new pod of the doubles takes to become Ready: longer
// than several evictions in a row, as with real pods, so that those overlap.
const startUp = 250 * time.Millisecond

// app is an application whose owner is a double of its controller: it keeps as
// many pods as the owner's object wants, by removing and creating them.
type app struct {
	w     *world
	name  string
	owner *unstructured.Unstructured
	// hash is the injection of the pods that are created from now on; broken
	// ones never become Ready.
	hash   atomic.Value
	broken atomic.Bool
}

// made creates an object of one of the kinds that own pods.
func (w *world) made(kind, name string, replicas int, above *unstructured.Unstructured) *unstructured.Unstructured {
	w.t.Helper()
	selector := map[string]any{"matchLabels": map[string]any{labelApp: name}}
	spec := map[string]any{
		"selector": selector, "replicas": int64(replicas), "serviceName": "none",
		"template": map[string]any{
			"metadata": map[string]any{"labels": map[string]any{labelApp: name}},
			"spec":     map[string]any{"containers": []any{map[string]any{"name": "c", "image": "x"}}},
		},
	}
	at := strings.LastIndex(kind, "/")
	version, short := kind[:at], kind[at+1:]
	if short != "StatefulSet" {
		delete(spec, "serviceName")
	}
	if short == "ReplicationController" {
		spec["selector"] = map[string]any{labelApp: name}
	}
	if short == "DaemonSet" {
		delete(spec, "replicas")
	}
	u := &unstructured.Unstructured{Object: map[string]any{"spec": spec}}
	u.SetAPIVersion(version)
	u.SetKind(short)
	u.SetName(name)
	if above != nil {
		u.SetOwnerReferences([]metav1.OwnerReference{*metav1.NewControllerRef(above, above.GroupVersionKind())})
	}
	client := w.admin.Dynamic.Resource(resources[kind]).Namespace(w.scope.Release.Namespace)
	u, err := client.Create(w.t.Context(), u, metav1.CreateOptions{})
	require.NoError(w.t, err)
	if short == "DaemonSet" {
		u.Object["status"] = map[string]any{"desiredNumberScheduled": int64(replicas), "currentNumberScheduled": int64(replicas), "numberReady": int64(0), "numberMisscheduled": int64(0)}
		u, err = client.UpdateStatus(w.t.Context(), u, metav1.UpdateOptions{})
		require.NoError(w.t, err)
	}
	return u
}

// app makes an owner of that kind with as many outdated pods, and runs its
// controller: new pods have the current injection.
func (w *world) app(kind, name string, replicas int, above *unstructured.Unstructured) *app {
	w.t.Helper()
	a := &app{w: w, name: name, owner: w.made(kind, name, replicas, above)}
	a.hash.Store("new")
	for i := range replicas {
		require.NoError(w.t, a.create(w.t.Context(), fmt.Sprintf("%s-old-%d", name, i), "old", true))
	}
	n, coming := 0, map[string]bool{}
	w.background(func(objects kube.Objects) {
		if len(objects[0]) == 0 {
			return
		}
		owner := objects[0][0].(*unstructured.Unstructured).Object
		want, ok, _ := unstructured.NestedInt64(owner, "spec", "replicas")
		if !ok {
			want, _, _ = unstructured.NestedInt64(owner, "status", "desiredNumberScheduled")
		}
		for _, u := range objects[1] {
			delete(coming, u.GetName())
		}
		have := len(objects[1]) + len(coming)
		for ; have < int(want); have++ {
			n++
			pod := fmt.Sprintf("%s-made-%d", name, n)
			coming[pod] = true
			if a.create(w.t.Context(), pod, a.hash.Load().(string), false) == nil && !a.broken.Load() {
				time.AfterFunc(startUp, func() { _ = w.getReady(w.t.Context(), pod) })
			}
		}
		for i := 0; have > int(want) && i < len(objects[1]); i++ {
			have--
			_ = w.admin.Typed.CoreV1().Pods(w.scope.Release.Namespace).Delete(w.t.Context(), objects[1][i].GetName(), metav1.DeleteOptions{})
		}
	},
		kube.Selection{Resource: resources[kind], Namespace: w.scope.Release.Namespace, Name: name},
		kube.Selection{Resource: podsGVR, Namespace: w.scope.Release.Namespace, Labels: labelApp + "=" + name})
	return a
}

func (a *app) create(ctx context.Context, pod, hash string, works bool) error {
	return a.w.clientPod(ctx, pod, a.name, hash, a.owner, works)
}

func (w *world) clientPod(ctx context.Context, name, app, hash string, owner *unstructured.Unstructured, works bool) error {
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{labelApp: app, labelEnabled: "true", labelGPUPool: w.pool, labelTemplateHash: hash}},
		Spec:       corev1.PodSpec{TerminationGracePeriodSeconds: pointer(int64(0)), Containers: []corev1.Container{{Name: "c", Image: "x"}}},
	}
	if owner != nil {
		pod.OwnerReferences = []metav1.OwnerReference{*metav1.NewControllerRef(owner, owner.GroupVersionKind())}
	}
	pods := w.admin.Typed.CoreV1().Pods(w.scope.Release.Namespace)
	if _, err := pods.Create(ctx, pod, metav1.CreateOptions{}); err != nil || !works {
		return err
	}
	return w.getReady(ctx, name)
}

func (w *world) getReady(ctx context.Context, name string) error {
	pods := w.admin.Typed.CoreV1().Pods(w.scope.Release.Namespace)
	p, err := pods.Get(ctx, name, metav1.GetOptions{})
	if err != nil {
		return err
	}
	p.Status = provenPod("x").Status
	_, err = pods.UpdateStatus(ctx, p, metav1.UpdateOptions{})
	return err
}

// scale is somebody, or an autoscaler, who sets an owner's replicas.
func (w *world) scale(kind, name string, replicas int) {
	w.t.Helper()
	client := w.admin.Dynamic.Resource(resources[kind]).Namespace(w.scope.Release.Namespace)
	u, err := client.Get(w.t.Context(), name, metav1.GetOptions{})
	require.NoError(w.t, err)
	require.NoError(w.t, unstructured.SetNestedField(u.Object, int64(replicas), "spec", "replicas"))
	_, err = client.Update(w.t.Context(), u, metav1.UpdateOptions{})
	require.NoError(w.t, err)
}

// tally follows the pods of some applications event by event, so that no
// moment is missed.
type tally struct {
	w      *world
	wanted atomic.Int32
	mu     sync.Mutex
	ready  map[string]bool
	peak   int // the most that were ever away
	ended  chan struct{}
}

const lastPod = "last-of-the-tally"

// tally begins with the pods that are there; apps are those that count.
func (w *world) tally(wanted int, apps ...string) *tally {
	w.t.Helper()
	c := &tally{w: w, ready: map[string]bool{}, ended: make(chan struct{})}
	c.wanted.Store(int32(wanted))
	counts := func(p *corev1.Pod) bool {
		for _, a := range apps {
			if p.Labels[labelApp] == a {
				return true
			}
		}
		return false
	}
	pods := w.admin.Typed.CoreV1().Pods(w.scope.Release.Namespace)
	list, err := pods.List(w.t.Context(), metav1.ListOptions{})
	require.NoError(w.t, err)
	for i := range list.Items {
		if p := &list.Items[i]; counts(p) && ready(p) {
			c.ready[p.Name] = true
		}
	}
	events, err := pods.Watch(w.t.Context(), metav1.ListOptions{ResourceVersion: list.ResourceVersion})
	require.NoError(w.t, err)
	w.t.Cleanup(events.Stop)
	go func() {
		defer close(c.ended)
		for event := range events.ResultChan() {
			p, ok := event.Object.(*corev1.Pod)
			if !ok || p.Name == lastPod {
				return
			}
			if !counts(p) {
				continue
			}
			c.mu.Lock()
			if ready(p) && event.Type != "DELETED" {
				c.ready[p.Name] = true
			} else {
				delete(c.ready, p.Name)
			}
			c.peak = max(c.peak, int(c.wanted.Load())-len(c.ready))
			c.mu.Unlock()
		}
	}()
	return c
}

func (c *tally) readyNow() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.ready)
}

// end returns the most pods that were away at once until now, and how many are.
func (c *tally) end() (peak, away int) {
	c.w.t.Helper()
	require.NoError(c.w.t, c.w.clientPod(c.w.t.Context(), lastPod, "", "", nil, false))
	<-c.ended
	return c.peak, int(c.wanted.Load()) - c.readyNow()
}
