package tensorfusion

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/utils/clock"
)

type queue = workqueue.TypedRateLimitingInterface[string]

// queues hold the keys of each reconciler: object names, or namespace/name.
type queues struct {
	clusters, pools, nodes, inventory, providers, workloads, connections, devices, claims, webhooks queue
}

func newQueues(c clock.WithTicker) *queues {
	make := func(name string) queue {
		limiter := workqueue.NewTypedItemExponentialFailureRateLimiter[string](20*time.Millisecond, 5*time.Second)
		return workqueue.NewTypedRateLimitingQueueWithConfig(limiter, workqueue.TypedRateLimitingQueueConfig[string]{Name: name, Clock: c})
	}
	return &queues{
		clusters: make("clusters"), pools: make("pools"), nodes: make("nodes"), inventory: make("inventory"),
		providers: make("providers"), workloads: make("workloads"), connections: make("connections"),
		devices: make("devices"), claims: make("claims"), webhooks: make("webhooks"),
	}
}

func (q *queues) all() []queue {
	return []queue{q.clusters, q.pools, q.nodes, q.inventory, q.providers, q.workloads, q.connections, q.devices, q.claims, q.webhooks}
}

func (q *queues) shutDown() {
	for _, each := range q.all() {
		each.ShutDown()
	}
}

// Events of a pool are collected for a while: a batch of a hundred hosts shall
// not write the pool's status a hundred times. The while grows with what a
// look at the pool costs, so that a pool of a thousand nodes takes one core's
// twentieth and no more.
const (
	settle     = 100 * time.Millisecond
	maxSettle  = time.Second
	settleCost = 20
)

// pace is how long the events of pools are collected now.
type pace struct{ cost atomic.Int64 }

func (p *pace) took(d time.Duration) { p.cost.Store(int64(d)) }

func (p *pace) wait() time.Duration {
	return min(max(settle, settleCost*time.Duration(p.cost.Load())), maxSettle)
}

// reconciler handles one key for the process that leads.
type reconciler func(ctx context.Context, p *process, key string) (requeue time.Duration, err error)

func (d *Double) startWorkers(ctx context.Context, group *sync.WaitGroup) {
	for _, w := range []struct {
		queue   queue
		workers int
		handle  reconciler
	}{
		{d.queues.clusters, 1, d.reconcileCluster},
		{d.queues.pools, 1, d.reconcilePool},
		{d.queues.nodes, d.options.Concurrency, d.reconcileNode},
		{d.queues.inventory, d.options.Concurrency, d.reconcileInventory},
		{d.queues.providers, 1, d.reconcileProvider},
		{d.queues.workloads, 2, d.reconcileWorkload},
		{d.queues.connections, 1, d.reconcileConnection},
	} {
		d.work(ctx, group, w.queue, w.workers, func(ctx context.Context, key string) (time.Duration, error) {
			p := d.election.leading()
			if p == nil {
				return 0, nil // the next process starts with everything
			}
			return w.handle(ctx, p, key)
		})
	}
	// These are no part of the controller: they go on without a leader.
	d.work(ctx, group, d.queues.devices, d.options.Concurrency, d.reconcileDevices)
	d.work(ctx, group, d.queues.claims, 1, d.reconcileClaim)
	d.work(ctx, group, d.queues.webhooks, 1, d.reconcileWebhook)
}

func (d *Double) work(ctx context.Context, group *sync.WaitGroup, q queue, workers int, handle func(context.Context, string) (time.Duration, error)) {
	for range workers {
		group.Add(1)
		go func() {
			defer group.Done()
			for {
				key, stop := q.Get()
				if stop {
					return
				}
				requeue, err := handle(ctx, key)
				switch {
				case ctx.Err() != nil:
				case err != nil:
					// Conflicts and repeated creates are stale caches: the next
					// event brings the truth.
					if !apierrors.IsConflict(err) && !apierrors.IsAlreadyExists(err) {
						d.log.Info("reconcile failed", "key", key, "error", err.Error())
					}
					q.AddRateLimited(key)
				default:
					q.Forget(key)
					if requeue > 0 {
						q.AddAfter(key, requeue)
					}
				}
				q.Done(key)
			}
		}()
	}
}
