package e2e

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/tools/cache"
)

// observer watches the hypervisor pods from outside, as a monitoring system
// would: what the engine says about itself proves nothing.
type observer struct {
	mu      sync.Mutex
	deleted []deletion
	pool    map[string]string // node -> its pool label
	pods    map[string]map[types.UID]sight
	served  map[string]bool      // nodes that have had a Ready pod
	away    map[string]int       // pool -> most nodes without a Ready pod at one time
	since   map[string]time.Time // node -> when its last Ready pod went away
	log     []string
}

// deletion is a hypervisor that was told to go, when that was seen first.
type deletion struct {
	node string
	at   time.Time
}

// sight is what was seen of a pod last.
type sight struct{ ready, deleting bool }

// observe starts watching; nodes are counted from their first Ready pod on.
func observe(t *testing.T, w *world) *observer {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	o := newObserver()
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
		AddFunc:    func(obj any) { o.seen(time.Now(), obj.(*corev1.Pod), false) },
		UpdateFunc: func(_, obj any) { o.seen(time.Now(), obj.(*corev1.Pod), false) },
		DeleteFunc: func(obj any) {
			if gone, ok := obj.(cache.DeletedFinalStateUnknown); ok {
				obj = gone.Obj
			}
			o.seen(time.Now(), obj.(*corev1.Pod), true)
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	f.Start(ctx.Done())
	f.WaitForCacheSync(ctx.Done())
	return o
}

func newObserver() *observer {
	return &observer{
		pool: map[string]string{}, pods: map[string]map[types.UID]sight{},
		served: map[string]bool{}, away: map[string]int{}, since: map[string]time.Time{},
	}
}

func (o *observer) seen(at time.Time, p *corev1.Pod, gone bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	node := p.Spec.NodeName
	for k := range p.Labels {
		if pool, ok := strings.CutPrefix(k, "tensor-fusion.ai/pool-"); ok {
			o.pool[node] = pool
		}
	}
	if o.pods[node] == nil {
		o.pods[node] = map[types.UID]sight{}
	}
	before := o.pods[node][p.UID]
	now := sight{ready: isReady(p), deleting: gone || p.DeletionTimestamp != nil}
	if gone || before != now {
		o.log = append(o.log, fmt.Sprintf("%s %s uid %s ready=%t deleting=%t gone=%t", clock(at),
			p.Name, p.UID, now.ready, p.DeletionTimestamp != nil, gone))
	}
	if now.deleting && !before.deleting {
		o.deleted = append(o.deleted, deletion{node, at})
	}
	if o.pods[node][p.UID] = now; gone {
		delete(o.pods[node], p.UID)
	}
	o.count(at)
}

// count notes which nodes are without a Ready pod.
func (o *observer) count(at time.Time) {
	away := map[string]int{}
	for node, pods := range o.pods {
		if slices.ContainsFunc(slices.Collect(maps.Values(pods)), func(s sight) bool { return s.ready && !s.deleting }) {
			o.served[node] = true
			delete(o.since, node)
			continue
		}
		if !o.served[node] {
			continue
		}
		away[o.pool[node]]++
		if o.since[node].IsZero() {
			o.since[node] = at
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

func clock(at time.Time) string { return at.UTC().Format("15:04:05.000") }

// awayNow is how long a node has been without a Ready pod, 0 when it has one.
func (o *observer) awayNow(node string) time.Duration {
	o.mu.Lock()
	defer o.mu.Unlock()
	if since := o.since[node]; !since.IsZero() {
		return time.Since(since)
	}
	return 0
}

// back reports whether a node that lost a hypervisor has a Ready one again.
func (o *observer) back(node string) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.since[node].IsZero() && slices.ContainsFunc(o.deleted, func(d deletion) bool { return d.node == node })
}

// reset forgets what was counted so far.
func (o *observer) reset() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.deleted, o.away = nil, map[string]int{}
}

// deletions counts every hypervisor pod that was told to go.
func (o *observer) deletions() int {
	o.mu.Lock()
	defer o.mu.Unlock()
	return len(o.deleted)
}
