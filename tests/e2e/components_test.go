package e2e

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/tools/cache"

	"github.com/refit-run/refit/workflows/protocol"
)

const (
	samplePool   = "tensor-fusion-shared"
	sample       = "sample-" + samplePool // workload and Deployment of the pool
	templateHash = "tensor-fusion.ai/pod-template-hash"
)

// components puts new worker and client images and their rollouts into the
// example plan.
func (w *world) components() string {
	w.t.Helper()
	text, err := os.ReadFile(filepath.Join(root, "examples/tensorfusion-upgrade.yaml"))
	require.NoError(w.t, err)
	plan := string(text)
	for _, change := range [][2]string{
		{"gates: afterCanary", "gates: none"},
		{"rollouts:\n", `values:
  inline:
    providerConfigs:
      nvidia:
        images:
          remoteWorker: registry.refit.local/tensorfusion/tensor-fusion-worker:v2.17.0
          remoteClient: registry.refit.local/tensorfusion/tensor-fusion-client:v2.17.0
rollouts:
`},
		{"\n# After every pod", `
  - component: worker
    pools: [shared]
    workers: {acknowledgeLostSessions: true, batchPercentage: 50, stall: 20s}
  - component: client
    pools: [shared]
    clients: {perOwner: 1, limit: 8s, leave: [Deployment/apps/kept]}

# After every pod`},
	} {
		require.Contains(w.t, plan, change[0])
		plan = strings.Replace(plan, change[0], change[1], 1)
	}
	file := filepath.Join(w.home, "components.yaml")
	require.NoError(w.t, os.WriteFile(file, []byte(plan), 0o600))
	return file
}

// TestComponents rolls workers and clients after the hypervisors: sessions are
// listed before they end, a roll of the controller's is stopped by a pause and a
// stall, applications go through the Eviction API one by one, and what nobody
// would make again stays.
func TestComponents(t *testing.T) {
	t.Parallel()
	w := up(t)
	w.addClients()
	clients := w.watchClients(sample, 2)
	before := w.pods("app")
	plan := w.components()
	t.Run("sessions that the plan does not give up", func(t *testing.T) { w.sessionsNotAccepted(t, plan) })
	run := w.startFile(plan)

	s := w.untilGate(run)
	require.Equal(t, "helm", s.WaitingFor.Stage, "P11: the controller would delete the workers by itself")
	assert.Contains(t, s.WaitingFor.Found, "TensorFusionWorkload/apps/"+sample)
	assert.Contains(t, s.WaitingFor.Found, "TensorFusionWorkload/apps/sample-tensor-fusion-training")
	w.answer("approve", run)

	s = w.untilGate(run)
	require.Equal(t, rollWorkers, s.WaitingFor.Stage)
	for _, want := range []string{"apps/" + sample + " (2 workers)", sample + "-0 of pod " + sample + "-client-0", sample + "-1"} {
		assert.Contains(t, s.WaitingFor.Found, want)
	}
	assert.Equal(t, before, w.pods("app"), "no application was touched so far")
	w.fault("pdb-blocks", "apps", "app="+sample)
	w.troubledWorkers(t, run)

	s = w.untilParked(run)
	require.Equal(t, "rollout.client.shared.evict", s.WaitingFor.Stage)
	assert.Contains(t, s.WaitingFor.Found+findings(s), "PodDisruptionBudget/apps/sandbox-fault-")
	assert.Equal(t, before, w.pods("app"), "the budget was heeded")
	w.onTarget(sample)
	w.fault("clear")
	w.answer("retry", run)
	r := w.approveAll(run)
	assert.Equal(t, protocol.OutcomeDone, r.Outcome)

	after := w.pods("app")
	for name := range before {
		_, stays := after[name]
		assert.Equal(t, !strings.HasPrefix(name, sample), stays, name)
	}
	hash := w.clientHash()
	for name, pod := range after {
		if strings.HasPrefix(name, sample) {
			assert.Equal(t, hash, pod, "%s has today's injection", name)
		}
	}
	warnings := strings.Join(r.Warnings, "\n")
	assert.Contains(t, warnings, "pod apps/bare keeps its outdated injection")
	assert.Contains(t, warnings, "pod apps/kept-")
	assert.Equal(t, 1, clients.most(), "at most one pod of an owner is away")
	evictions := 0
	for _, l := range w.writes() {
		if strings.HasPrefix(l, "create pods/eviction apps/"+sample) && strings.HasSuffix(l, ": 201") {
			evictions++
		}
		assert.False(t, strings.HasPrefix(l, "delete pods/ apps/"), l)
	}
	assert.Equal(t, 2, evictions, "by the Eviction API, each pod once")
	w.replay(run)
}

// addClients adds what a client rollout leaves: a bare pod, and the Deployment
// that the plan names.
func (w *world) addClients() {
	w.t.Helper()
	ctx := context.Background()
	template := func(app string) corev1.PodTemplateSpec {
		return corev1.PodTemplateSpec{
			ObjectMeta: metav1.ObjectMeta{
				Labels:      map[string]string{"app": app, "tensor-fusion.ai/enabled": "true"},
				Annotations: map[string]string{"tensor-fusion.ai/gpupool": samplePool},
			},
			Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "app", Image: "registry.refit.local/apps/sample:1.0.0"}}},
		}
	}
	bare := template("bare")
	bare.Name = "bare"
	_, err := w.kube.CoreV1().Pods("apps").Create(ctx, &corev1.Pod{ObjectMeta: bare.ObjectMeta, Spec: bare.Spec}, metav1.CreateOptions{})
	require.NoError(w.t, err)
	one := int32(1)
	_, err = w.kube.AppsV1().Deployments("apps").Create(ctx, &appsv1.Deployment{
		ObjectMeta: metav1.ObjectMeta{Name: "kept"},
		Spec: appsv1.DeploymentSpec{
			Replicas: &one, Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": "kept"}}, Template: template("kept"),
		},
	}, metav1.CreateOptions{})
	require.NoError(w.t, err)
	w.poll("every sample client Ready", time.Minute, func() bool {
		list, err := w.kube.CoreV1().Pods("apps").List(ctx, metav1.ListOptions{LabelSelector: "app"})
		if err != nil || len(list.Items) < 6 { // two of each pool, bare, kept
			return false
		}
		for i := range list.Items {
			if !isReady(&list.Items[i]) {
				return false
			}
		}
		return true
	})
}

// pods maps the application pods of the shared pool to their injection.
func (w *world) pods(label string) map[string]string {
	w.t.Helper()
	list, err := w.kube.CoreV1().Pods("apps").List(context.Background(), metav1.ListOptions{
		LabelSelector: label + ",tensor-fusion.ai/gpupool=" + samplePool,
	})
	require.NoError(w.t, err)
	out := map[string]string{}
	for _, p := range list.Items {
		if p.DeletionTimestamp == nil {
			out[p.Name] = p.Labels[templateHash]
		}
	}
	return out
}

func (w *world) clientHash() string {
	w.t.Helper()
	u, err := w.dynamic.Resource(schema.GroupVersionResource{Group: "tensor-fusion.ai", Version: "v1", Resource: "gpupools"}).
		Get(context.Background(), samplePool, metav1.GetOptions{})
	require.NoError(w.t, err)
	status, _ := u.Object["status"].(map[string]any)
	components, _ := status["componentStatus"].(map[string]any)
	return fmt.Sprint(components["client"])
}

// onTarget requires that the workload's workers are of its new template.
func (w *world) onTarget(workload string) {
	w.t.Helper()
	ctx := context.Background()
	u, err := w.dynamic.Resource(schema.GroupVersionResource{Group: "tensor-fusion.ai", Version: "v1", Resource: "tensorfusionworkloads"}).
		Namespace("apps").Get(ctx, workload, metav1.GetOptions{})
	require.NoError(w.t, err)
	status, _ := u.Object["status"].(map[string]any)
	list, err := w.kube.CoreV1().Pods("apps").List(ctx, metav1.ListOptions{LabelSelector: "tensor-fusion.ai/workload=" + workload})
	require.NoError(w.t, err)
	require.Len(w.t, list.Items, 2)
	for i := range list.Items {
		p := &list.Items[i]
		assert.Equal(w.t, status["podTemplateHash"], p.Labels[templateHash], p.Name)
		assert.True(w.t, isReady(p), p.Name)
		assert.Contains(w.t, p.Spec.Containers[0].Image, "tensor-fusion-worker:v2.17.0")
	}
}

// clientWatch counts from outside how many pods of one application are away.
type clientWatch struct {
	mu     sync.Mutex
	want   int
	ready  map[string]bool
	filled bool
	away   int
}

// watchClients counts once want pods have been Ready.
func (w *world) watchClients(app string, want int) *clientWatch {
	w.t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	w.t.Cleanup(cancel)
	c := &clientWatch{want: want, ready: map[string]bool{}}
	f := informers.NewSharedInformerFactoryWithOptions(w.kube, 0, informers.WithNamespace("apps"),
		informers.WithTweakListOptions(func(l *metav1.ListOptions) { l.LabelSelector = "app=" + app }))
	_, err := f.Core().V1().Pods().Informer().AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc:    func(obj any) { c.seen(obj.(*corev1.Pod), false) },
		UpdateFunc: func(_, obj any) { c.seen(obj.(*corev1.Pod), false) },
		DeleteFunc: func(obj any) {
			if gone, ok := obj.(cache.DeletedFinalStateUnknown); ok {
				obj = gone.Obj
			}
			c.seen(obj.(*corev1.Pod), true)
		},
	})
	require.NoError(w.t, err)
	f.Start(ctx.Done())
	f.WaitForCacheSync(ctx.Done())
	return c
}

func (c *clientWatch) seen(p *corev1.Pod, gone bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.ready, p.Name)
	if !gone && p.DeletionTimestamp == nil && isReady(p) {
		c.ready[p.Name] = true
	}
	c.filled = c.filled || len(c.ready) >= c.want
	if c.filled {
		c.away = max(c.away, c.want-len(c.ready))
	}
}

func (c *clientWatch) most() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.away
}
