package tensorfusion

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sort"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/refit-run/refit/activities/finding"
	"github.com/refit-run/refit/activities/kube"
)

// ObserveWorkers lists the workloads of a pool, and for each the connections
// that lose their GPU session when its workers are replaced.
func (a *Activities) ObserveWorkers(ctx context.Context, req WorkersRequest) (WorkersResult, error) {
	defer pulse(ctx, nil)()
	c, err := a.connect(ctx, req.Scope)
	if err != nil {
		return WorkersResult{}, err
	}
	return observeWorkers(ctx, c, req)
}

func observeWorkers(ctx context.Context, c *kube.Client, req WorkersRequest) (WorkersResult, error) {
	var out WorkersResult
	workloads, err := list[FusionWorkload](ctx, c, workloadsGVR, "", "")
	if err != nil {
		return out, kube.Wrap(err, "TensorFusionWorkloads")
	}
	connections, err := list[FusionConnection](ctx, c, connectionsGVR, "", "")
	if err != nil {
		return out, kube.Wrap(err, "TensorFusionConnections")
	}
	pods, err := list[corev1.Pod](ctx, c, podsGVR, "", workerSelector)
	if err != nil {
		return out, kube.Wrap(err, "worker pods")
	}
	pools, err := list[FusionPool](ctx, c, poolsGVR, "", "")
	if err != nil {
		return out, kube.Wrap(err, "GPUPools")
	}
	providers, err := listIfServed[FusionProvider](ctx, c, providerConfigsGVR)
	if err != nil {
		return out, kube.Wrap(err, "ProviderConfigs")
	}
	pending := slices.ContainsFunc(pools, func(p FusionPool) bool { return p.Name == req.Pool && !p.Status.Components.WorkerSynced })
	image := workerImage(providers)
	for _, w := range workloads {
		if w.Pool() != req.Pool {
			continue
		}
		row := Workload{Namespace: w.Namespace, Name: w.Name, Replicas: int(w.Status.WorkerCount), Ready: int(w.Status.ReadyWorkers), Stale: pending}
		if w.Spec.Replicas != nil {
			row.Replicas = int(*w.Spec.Replicas)
		}
		for i := range pods {
			p := &pods[i]
			if p.Namespace == w.Namespace && p.Labels[labelWorkload] == w.Name &&
				staleWorker(p.Labels[labelTemplateHash], w.Status.Hash, containerImage(p.Spec.Containers), image) != "" {
				row.Stale = true
			}
		}
		for _, conn := range connections {
			if conn.Namespace == w.Namespace && conn.Spec.WorkloadName == w.Name {
				row.Connections = append(row.Connections, strings.TrimSuffix(conn.Name+" of pod "+conn.Spec.ClientPod, " of pod "))
			}
		}
		out.Workloads = append(out.Workloads, row)
	}
	return out, nil
}

func workerImage(providers []FusionProvider) string {
	for _, p := range providers {
		if strings.EqualFold(p.Spec.Vendor, nvidiaVendor) {
			return p.Spec.Images.RemoteWorker
		}
	}
	return ""
}

// errProgress ends one round of a watch because something moved forward.
var errProgress = errors.New("progress")

// RollWorkers lets the controller roll the pool's workers in its own batches
// (T15): the flag and the batches are written on the TensorFusionCluster, the
// progress is watched, and the flag goes off again at the end, also after a
// stall or a cancel (T27).
func (a *Activities) RollWorkers(ctx context.Context, req WorkersRequest) (WorkersResult, error) {
	defer pulse(ctx, nil)()
	c, err := a.connect(ctx, req.Scope)
	if err != nil {
		return WorkersResult{}, err
	}
	out, err := rollWorkers(ctx, c, req)
	return out, inRow(err, "T15")
}

func rollWorkers(ctx context.Context, c *kube.Client, req WorkersRequest) (WorkersResult, error) {
	if req.BatchPercentage < 1 || req.BatchPercentage > 100 {
		return WorkersResult{}, finding.Finding{
			Row: "T27", Object: "request, batchPercentage", Expected: "1..100", Found: fmt.Sprint(req.BatchPercentage),
			Why: "0 is dropped by the API and becomes one batch of 100 %", Next: "to stop a rollout switch its flag off",
		}.Error(finding.Stop)
	}
	before, err := observeWorkers(ctx, c, req)
	if err != nil {
		return before, err
	}
	if len(before.Workloads) == 0 {
		return before, nil // the controller rolls nothing in a pool without workloads
	}
	if err := setWorkerPolicy(ctx, c, req, true); err != nil {
		return before, err
	}
	rolled := watchWorkers(ctx, c, req)
	// The flag must not stay on when the run is cancelled.
	off, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Minute)
	defer cancel()
	if err := setWorkerPolicy(off, c, req, false); err != nil {
		rolled = stillOn(rolled, err)
	}
	if rolled != nil {
		return before, rolled
	}
	return observeWorkers(ctx, c, req)
}

// stillOn says beside what ended a rollout that the flag could not be switched
// off: the controller goes on behind a parked run.
func stillOn(rolled, err error) error {
	if rolled == nil {
		return err
	}
	f, class, ok := finding.Of(rolled)
	if !ok { // cancelled: the run says so
		return rolled
	}
	f.Why = fmt.Sprintf("auto update may still be on, switching it off again failed: %v", err)
	f.Next = "switch autoUpdateWorker off by hand; " + f.Next
	return f.Error(class)
}

// setWorkerPolicy writes the worker flag of the pool; off also brings back the
// batches as the hold found them.
func setWorkerPolicy(ctx context.Context, c *kube.Client, req WorkersRequest, on bool) error {
	return patchClusters(ctx, c, func(b *clusterPatch) error {
		was := recordedPolicies(b.cluster)
		for i, e := range b.cluster.Spec.GPUPools {
			p := policyOf(b.cluster.Name, e)
			if p.Pool != req.Pool {
				continue
			}
			p.AutoWorker = on
			if on {
				p.BatchPercentage = req.BatchPercentage
				if req.BatchInterval > 0 {
					p.BatchInterval = req.BatchInterval.String()
				}
			} else if w, ok := was[p.Pool]; ok {
				p.BatchPercentage, p.BatchInterval = w.BatchPercentage, w.BatchInterval
			}
			b.set(i, p)
			if on {
				b.annotate(annotationRollingWorkers, req.Pool)
			} else {
				b.annotate(annotationRollingWorkers, "")
			}
		}
		return nil
	})
}

// watchWorkers waits until the controller says 100 and synced and every worker
// is of its template. Each step forward gives the next one its own time.
func watchWorkers(ctx context.Context, c *kube.Client, req WorkersRequest) error {
	var seen advance
	for {
		err := c.Await(ctx, kube.Wait{
			What: "worker rollout of GPUPool/" + req.Pool, Limit: req.Stall, Heartbeat: beater(ctx),
			Next: "the flag is off again; look for workers that do not become ready (capacity, image), then retry",
		}, func(objects kube.Objects) (bool, string, error) {
			state, err := workersState(objects, req.Pool)
			if state.done || err != nil {
				return true, state.text, err
			}
			if len(objects[0]) > 0 && seen.moved(state.percent, state.open) {
				return true, state.text, errProgress
			}
			return false, state.text, nil
		},
			kube.Selection{Resource: poolsGVR, Name: req.Pool},
			kube.Selection{Resource: workloadsGVR},
			kube.Selection{Resource: podsGVR, Labels: workerSelector},
			kube.Selection{Resource: providerConfigsGVR})
		if !errors.Is(err, errProgress) {
			return err
		}
	}
}

// advance tells steps forward from mere change: a worker that crashes and comes
// back for ever changes the state each time.
type advance struct {
	begun       bool
	told        bool // the percentage is of this rollout, not 100 of the one before
	percent     int  // the highest so far
	most, least int  // of what was open since the percentage last rose
}

// moved reports a higher percentage, or fewer open workers than ever since the
// batch opened them: the controller outdates a batch's workers only when it
// begins it, so that a new maximum begins the count anew. Both are bounded.
func (a *advance) moved(percent, open int) bool {
	a.told = a.told || percent < 100
	if !a.told {
		percent = 0
	}
	switch {
	case !a.begun:
		a.begun, a.percent, a.most, a.least = true, percent, open, open
		return false
	case percent > a.percent:
		a.percent, a.most, a.least = percent, open, open
		return true
	case open > a.most:
		a.most, a.least = open, open
		return false
	case open < a.least:
		a.least = open
		return true
	}
	return false
}

// workersAt is where a worker rollout stands.
type workersAt struct {
	percent, open int
	done          bool
	text          string
}

func workersState(objects kube.Objects, pool string) (workersAt, error) {
	if len(objects[0]) == 0 {
		return workersAt{text: "GPUPool/" + pool + " is gone"}, nil
	}
	p, err := decode[FusionPool](objects[0][0])
	if err != nil {
		return workersAt{}, err
	}
	workloads, err := decodeAll[FusionWorkload](objects[1])
	if err != nil {
		return workersAt{}, err
	}
	workers, err := decodeAll[corev1.Pod](objects[2])
	if err != nil {
		return workersAt{}, err
	}
	providers, err := decodeAll[FusionProvider](objects[3])
	if err != nil {
		return workersAt{}, err
	}
	o := &Observation{Rolled: Rolled{Workers: []string{pool}}, Workers: workers, Providers: providers}
	for _, w := range workloads {
		if w.Pool() == pool {
			o.Workloads = append(o.Workloads, w)
		}
	}
	open := checkWorkers(o)
	lines := make([]string, 0, len(open))
	for _, f := range open {
		lines = append(lines, f.Object+" "+f.Found)
	}
	sort.Strings(lines)
	s := p.Status.Components
	return workersAt{
		percent: int(s.WorkerProgress), open: len(open), done: len(open) == 0 && s.WorkerSynced && s.WorkerProgress == 100,
		text: fmt.Sprintf("%d %%, synced=%t, %d open: %s", s.WorkerProgress, s.WorkerSynced, len(open), strings.Join(lines, ", ")),
	}, nil
}

func decodeAll[T any](objects []metav1.Object) ([]T, error) {
	out := make([]T, 0, len(objects))
	for _, u := range objects {
		v, err := decode[T](u)
		if err != nil {
			return nil, err
		}
		out = append(out, v)
	}
	return out, nil
}
