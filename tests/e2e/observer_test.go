package e2e

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/tools/cache"
)

// observer watches the hypervisor pods from outside, as a monitoring system
// would: what the engine says about itself proves nothing.
type observer struct {
	mu      sync.Mutex
	deleted map[string]int    // node -> pods that went away
	pool    map[string]string // node -> its pool label
	ready   map[string]map[string]bool
	away    map[string]int       // pool -> most nodes without a Ready pod at one time
	since   map[string]time.Time // node -> when its last Ready pod went away
	log     []string
}

// observe starts watching; nodes are counted from their first Ready pod on.
func observe(t *testing.T, w *world) *observer {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	o := &observer{deleted: map[string]int{}, pool: map[string]string{}, ready: map[string]map[string]bool{}, away: map[string]int{},
		since: map[string]time.Time{}}
	t.Cleanup(func() {
		cancel()
		if t.Failed() {
			t.Logf("hypervisor pods as seen from outside:\n%s", strings.Join(o.log, "\n"))
		}
	})
	f := informers.NewSharedInformerFactoryWithOptions(w.kube, 0, informers.WithNamespace("tensor-fusion-sys"),
		informers.WithTweakListOptions(func(l *metav1.ListOptions) { l.LabelSelector = "tensor-fusion.ai/component=hypervisor" }))
	inf := f.Core().V1().Pods().Informer()
	_, err := inf.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc:    func(obj any) { o.seen(obj.(*corev1.Pod), false) },
		UpdateFunc: func(_, obj any) { o.seen(obj.(*corev1.Pod), false) },
		DeleteFunc: func(obj any) {
			if gone, ok := obj.(cache.DeletedFinalStateUnknown); ok {
				obj = gone.Obj
			}
			o.seen(obj.(*corev1.Pod), true)
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	f.Start(ctx.Done())
	f.WaitForCacheSync(ctx.Done())
	return o
}

func (o *observer) seen(p *corev1.Pod, gone bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	node := p.Spec.NodeName
	for k := range p.Labels {
		if len(k) > 22 && k[:22] == "tensor-fusion.ai/pool-" {
			o.pool[node] = k[22:]
		}
	}
	if o.ready[node] == nil {
		o.ready[node] = map[string]bool{}
	}
	if gone || o.ready[node][string(p.UID)] != (p.DeletionTimestamp == nil && isReady(p)) {
		o.log = append(o.log, fmt.Sprintf("%s %s uid %s ready=%t deleting=%t gone=%t", time.Now().Format("15:04:05.000"),
			p.Name, p.UID, isReady(p), p.DeletionTimestamp != nil, gone))
	}
	if gone {
		o.deleted[node]++
		delete(o.ready[node], string(p.UID))
	} else {
		o.ready[node][string(p.UID)] = p.DeletionTimestamp == nil && isReady(p)
	}
	away := map[string]int{}
	for n, uids := range o.ready {
		ok := false
		for _, r := range uids {
			ok = ok || r
		}
		if ok {
			delete(o.since, n)
			continue
		}
		away[o.pool[n]]++
		if o.since[n].IsZero() {
			o.since[n] = time.Now()
		}
	}
	for pool, n := range away {
		o.away[pool] = max(o.away[pool], n)
	}
}

func isReady(p *corev1.Pod) bool {
	for _, c := range p.Status.Conditions {
		if c.Type == corev1.PodReady {
			return c.Status == corev1.ConditionTrue
		}
	}
	return false
}

// awayNow maps the nodes without a Ready pod to how long they have had none.
func (o *observer) awayNow() map[string]time.Duration {
	o.mu.Lock()
	defer o.mu.Unlock()
	out := map[string]time.Duration{}
	for node, since := range o.since {
		out[node] = time.Since(since)
	}
	return out
}

// reset forgets what was counted so far.
func (o *observer) reset() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.deleted, o.away = map[string]int{}, map[string]int{}
}

// violations says where more was taken away than allowed: each node at most
// perNode deletions, never more than maxAway nodes of a pool at once.
func (o *observer) violations(perNode, maxAway int) []string {
	o.mu.Lock()
	defer o.mu.Unlock()
	var out []string
	for node, n := range o.deleted {
		if n > perNode {
			out = append(out, fmt.Sprintf("node %s lost its hypervisor %d times, allowed %d", node, n, perNode))
		}
	}
	for pool, n := range o.away {
		if n > maxAway {
			out = append(out, fmt.Sprintf("pool %s had %d nodes without a Ready hypervisor at once, allowed %d", pool, n, maxAway))
		}
	}
	return out
}

// deletions counts every hypervisor pod that went away.
func (o *observer) deletions() (n int) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, d := range o.deleted {
		n += d
	}
	return n
}
