package tensorfusion

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"

	"github.com/refit-run/refit/activities/internal/apiservertest"
	"github.com/refit-run/refit/activities/kube"
)

// world is a small TensorFusion installation on a real API server, with a
// controller that does what these tests need of the real one: copy policies
// into GPUPools and put a hypervisor pod on every GPUNode.
type world struct {
	t         *testing.T
	client    *kube.Client // the activities', with the rights of a worker
	admin     *kube.Client // the test's and the controller's
	scope     Scope
	cluster   string // TensorFusionCluster
	pool      string // GPUPool
	writes    *requestLog
	mu        sync.Mutex
	broken    map[string]bool // nodes whose pods never become Ready
	image     string          // what new pods run
	podPrefix string
}

// requestLog counts the requests of one client by method and resource path.
type requestLog struct {
	mu   sync.Mutex
	seen map[string]int
	// lost is the method whose replies don't come.
	lost string
}

func (l *requestLog) wrap(next http.RoundTripper) http.RoundTripper {
	return roundTrip(func(r *http.Request) (*http.Response, error) {
		l.mu.Lock()
		method := r.Method
		if r.URL.Query().Get("watch") != "" {
			method = "WATCH"
		}
		l.seen[method+" "+r.URL.Path]++
		lost := l.lost == method
		l.mu.Unlock()
		reply, err := next.RoundTrip(r)
		if err == nil && lost {
			reply.Body.Close()
			return nil, io.ErrUnexpectedEOF
		}
		return reply, err
	})
}

func (l *requestLog) count(match func(string) bool) (n int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for key, c := range l.seen {
		if match(key) {
			n += c
		}
	}
	return n
}

type roundTrip func(*http.Request) (*http.Response, error)

func (f roundTrip) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

var kinds = map[string]string{
	"tensorfusionclusters": "TensorFusionCluster", "gpupools": "GPUPool", "gpunodes": "GPUNode", "gpus": "GPU",
	"tensorfusionworkloads": "TensorFusionWorkload", "tensorfusionconnections": "TensorFusionConnection", "providerconfigs": "ProviderConfig",
}

// newWorld makes an installation of its own with the given GPU nodes.
func newWorld(t *testing.T, nodes ...string) *world {
	t.Helper()
	server := apiservertest.Shared(t)
	w := &world{
		t: t, admin: server.Client(t), writes: &requestLog{seen: map[string]int{}},
		broken: map[string]bool{}, image: newHypervisor, podPrefix: podPrefix,
	}
	config := asWorker(t)
	config.Wrap(w.writes.wrap)
	var err error
	w.client, err = kube.NewClient(config)
	require.NoError(t, err)
	w.installCRDs()
	w.scope = Scope{Release: Release{Name: "tensor-fusion-sys", Namespace: server.Namespace(t)}}
	w.cluster = "tf-" + w.scope.Release.Namespace
	w.pool = poolName(w.cluster, "shared")
	w.create("tensorfusionclusters", w.cluster, map[string]any{"spec": map[string]any{"gpuPools": []any{map[string]any{
		"name": "shared",
		"specTemplate": map[string]any{
			"nodeManagerConfig": map[string]any{"nodePoolRollingUpdatePolicy": map[string]any{"autoUpdateHypervisor": true, "batchPercentage": int64(20), "batchInterval": "1s"}},
			"componentConfig": map[string]any{"hypervisor": map[string]any{
				"image":       oldHypervisor,
				"podTemplate": map[string]any{"template": map[string]any{"spec": map[string]any{"containers": []any{map[string]any{"name": "h", "env": []any{map[string]any{"name": "A", "value": "b"}}}}}}},
			}},
		},
	}}}})
	for _, n := range nodes {
		w.addNode(n)
	}
	return w
}

func (w *world) installCRDs() {
	for plural, kind := range kinds {
		scope := apiextensionsv1.ClusterScoped
		if strings.HasPrefix(plural, "tensorfusionw") || strings.HasPrefix(plural, "tensorfusionco") {
			scope = apiextensionsv1.NamespaceScoped
		}
		keep := true
		crd := &apiextensionsv1.CustomResourceDefinition{
			ObjectMeta: metav1.ObjectMeta{Name: plural + "." + apiGroup},
			Spec: apiextensionsv1.CustomResourceDefinitionSpec{
				Group: apiGroup, Scope: scope,
				Names: apiextensionsv1.CustomResourceDefinitionNames{Plural: plural, Singular: strings.ToLower(kind), Kind: kind, ListKind: kind + "List"},
				Versions: []apiextensionsv1.CustomResourceDefinitionVersion{{
					Name: apiVersion, Served: true, Storage: true,
					Subresources: &apiextensionsv1.CustomResourceSubresources{Status: &apiextensionsv1.CustomResourceSubresourceStatus{}},
					Schema: &apiextensionsv1.CustomResourceValidation{OpenAPIV3Schema: &apiextensionsv1.JSONSchemaProps{
						Type: "object", XPreserveUnknownFields: &keep,
					}},
				}},
			},
		}
		_, err := w.admin.Extensions.ApiextensionsV1().CustomResourceDefinitions().Create(w.t.Context(), crd, metav1.CreateOptions{})
		if !apierrors.IsAlreadyExists(err) {
			require.NoError(w.t, err)
		}
	}
	require.NoError(w.t, w.admin.Await(w.t.Context(), kube.Wait{What: "test CRDs", Limit: time.Minute}, func(objects kube.Objects) (bool, string, error) {
		ready := 0
		for _, u := range objects[0] {
			crd, err := decode[apiextensionsv1.CustomResourceDefinition](u)
			if err == nil && crd.Spec.Group == apiGroup && established(crd) {
				ready++
			}
		}
		return ready >= len(kinds), fmt.Sprint(ready), nil
	}, kube.Selection{Resource: crdsGVR}))
}

// create makes a TensorFusion object; its status is written too.
func (w *world) create(plural, name string, content map[string]any) {
	w.t.Helper()
	u := &unstructured.Unstructured{Object: content}
	u.SetAPIVersion(apiGroup + "/" + apiVersion)
	u.SetKind(kinds[plural])
	u.SetName(name)
	status, hasStatus := content["status"]
	made, err := w.admin.Dynamic.Resource(tensorFusion(plural)).Create(w.t.Context(), u, metav1.CreateOptions{})
	require.NoError(w.t, err)
	w.t.Cleanup(func() {
		_ = w.admin.Dynamic.Resource(tensorFusion(plural)).Delete(context.Background(), name, metav1.DeleteOptions{})
	})
	if hasStatus {
		made.Object["status"] = status
		_, err = w.admin.Dynamic.Resource(tensorFusion(plural)).UpdateStatus(w.t.Context(), made, metav1.UpdateOptions{})
		require.NoError(w.t, err)
	}
}

// node is unique to the world: Nodes and GPUNodes are cluster-scoped.
func (w *world) node(name string) string { return name + "-" + w.scope.Release.Namespace }

func (w *world) addNode(short string) {
	w.t.Helper()
	name := w.node(short)
	node := readyNode(name)
	made, err := w.admin.Typed.CoreV1().Nodes().Create(w.t.Context(), &node, metav1.CreateOptions{})
	require.NoError(w.t, err)
	made.Status = node.Status
	_, err = w.admin.Typed.CoreV1().Nodes().UpdateStatus(w.t.Context(), made, metav1.UpdateOptions{})
	require.NoError(w.t, err)
	w.t.Cleanup(func() {
		_ = w.admin.Typed.CoreV1().Nodes().Delete(context.Background(), name, metav1.DeleteOptions{})
	})
	w.create("gpunodes", name, map[string]any{
		"metadata": map[string]any{"labels": map[string]any{poolLabel(w.pool): "true"}},
		"status":   map[string]any{"phase": phaseRunning},
	})
	w.create("gpus", "gpu-0."+name, map[string]any{"metadata": map[string]any{"labels": map[string]any{labelManagedBy: name}}, "status": map[string]any{
		"phase": phaseRunning, "gpuModel": "H100_SXM", "capacity": map[string]any{"tflops": "989", "vram": "80Gi"},
		"nodeSelector": map[string]any{corev1.LabelHostname: name},
	}})
}

// pod makes a hypervisor pod as a controller would.
func (w *world) makePod(ctx context.Context, node, prefix, image string) error {
	pod := provenPod(node)
	pod.ObjectMeta = metav1.ObjectMeta{Name: prefix + node, Namespace: w.scope.Release.Namespace, Labels: map[string]string{labelComponent: componentHypervisor}}
	pod.Spec.TerminationGracePeriodSeconds = pointer(int64(0))
	pod.Spec.Containers[0].Image = image
	status := pod.Status
	w.mu.Lock()
	if w.broken[node] {
		status = corev1.PodStatus{Phase: corev1.PodPending, ContainerStatuses: []corev1.ContainerStatus{{
			Name: "tensor-fusion-hypervisor", Image: image, State: corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: "ImagePullBackOff"}},
		}}}
	}
	w.mu.Unlock()
	made, err := w.admin.Typed.CoreV1().Pods(pod.Namespace).Create(ctx, &pod, metav1.CreateOptions{})
	if err != nil {
		return err
	}
	made.Status = status
	_, err = w.admin.Typed.CoreV1().Pods(pod.Namespace).UpdateStatus(ctx, made, metav1.UpdateOptions{})
	return err
}

// background calls react after each change until the test ends.
func (w *world) background(react func(kube.Objects), selections ...kube.Selection) {
	w.t.Helper()
	ctx, stop := context.WithCancel(context.Background())
	done := make(chan struct{})
	w.t.Cleanup(func() { stop(); <-done })
	go func() {
		defer close(done)
		_ = w.admin.Await(ctx, kube.Wait{What: "double of the test"}, func(objects kube.Objects) (bool, string, error) {
			react(objects)
			return false, "", nil
		}, selections...)
	}()
}

// control runs the controller until the test ends.
func (w *world) control() {
	w.t.Helper()
	ctx := w.t.Context()
	w.background(func(objects kube.Objects) {
		for _, u := range objects[0] {
			if u.GetName() == w.cluster {
				w.copyPolicies(ctx, u.(*unstructured.Unstructured))
			}
		}
		have := map[string]bool{}
		for _, u := range objects[2] {
			p, err := decode[corev1.Pod](u)
			if err == nil && strings.HasPrefix(p.Name, w.podPrefix) {
				have[p.Spec.NodeName] = true
			}
		}
		for _, u := range objects[1] {
			if !have[u.GetName()] {
				// Lost races are seen at the next event.
				_ = w.makePod(ctx, u.GetName(), w.podPrefix, w.image)
			}
		}
	},
		kube.Selection{Resource: clustersGVR},
		kube.Selection{Resource: gpuNodesGVR, Labels: poolLabel(w.pool) + "=true"},
		kube.Selection{Resource: podsGVR, Namespace: w.scope.Release.Namespace})
}

// copyPolicies makes each entry's GPUPool, and stores synced=false when the
// template changed under auto=false.
func (w *world) copyPolicies(ctx context.Context, u *unstructured.Unstructured) {
	entries, _, _ := unstructured.NestedSlice(u.Object, "spec", "gpuPools")
	for _, e := range entries {
		entry := e.(map[string]any)
		name := poolName(w.cluster, entry["name"].(string))
		spec := runtime.DeepCopyJSON(entry["specTemplate"].(map[string]any))
		pool, err := w.admin.Dynamic.Resource(poolsGVR).Get(ctx, name, metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			pool = &unstructured.Unstructured{Object: map[string]any{"spec": spec}}
			pool.SetAPIVersion(apiGroup + "/" + apiVersion)
			pool.SetKind("GPUPool")
			pool.SetName(name)
			if pool, err = w.admin.Dynamic.Resource(poolsGVR).Create(ctx, pool, metav1.CreateOptions{}); err != nil {
				return
			}
			w.t.Cleanup(func() {
				_ = w.admin.Dynamic.Resource(poolsGVR).Delete(context.Background(), name, metav1.DeleteOptions{})
			})
		} else if err != nil {
			return
		}
		was, _ := json.Marshal(pool.Object["spec"])
		is, _ := json.Marshal(spec)
		synced := map[string]any{"componentStatus": map[string]any{"hypervisorConfigSynced": !strings.Contains(string(is), nudgeEnv)}, "phase": phaseRunning}
		if string(was) != string(is) {
			pool.Object["spec"] = spec
			if pool, err = w.admin.Dynamic.Resource(poolsGVR).Update(ctx, pool, metav1.UpdateOptions{}); err != nil {
				return
			}
		}
		if now, _ := json.Marshal(pool.Object["status"]); string(now) != func() string { b, _ := json.Marshal(synced); return string(b) }() {
			pool.Object["status"] = synced
			_, _ = w.admin.Dynamic.Resource(poolsGVR).UpdateStatus(ctx, pool, metav1.UpdateOptions{})
		}
	}
}

// setFlag is somebody who edits the TensorFusionCluster.
func (w *world) setFlag(flag string, value bool) {
	w.t.Helper()
	patch := fmt.Sprintf(`[{"op":"add","path":"/spec/gpuPools/0/specTemplate/nodeManagerConfig/nodePoolRollingUpdatePolicy/%s","value":%t}]`, flag, value)
	_, err := w.admin.Dynamic.Resource(clustersGVR).Patch(w.t.Context(), w.cluster, types.JSONPatchType, []byte(patch), metav1.PatchOptions{})
	require.NoError(w.t, err)
}

func (w *world) policy() PoolPolicy {
	w.t.Helper()
	u, err := w.admin.Dynamic.Resource(clustersGVR).Get(w.t.Context(), w.cluster, metav1.GetOptions{})
	require.NoError(w.t, err)
	fc, err := decode[FusionCluster](u)
	require.NoError(w.t, err)
	return policyOf(fc.Name, fc.Spec.GPUPools[0])
}

// hosts waits until every node has its pod and returns them as targets.
func (w *world) hosts() []HostTarget {
	w.t.Helper()
	var out []HostTarget
	require.NoError(w.t, w.admin.Await(w.t.Context(), kube.Wait{What: "pods of the test world", Limit: time.Minute}, func(objects kube.Objects) (bool, string, error) {
		out = nil
		for _, u := range objects[0] {
			for _, p := range objects[1] {
				if node := p.(*corev1.Pod).Spec.NodeName; node == u.GetName() {
					out = append(out, HostTarget{Name: node, UID: string(p.GetUID())})
				}
			}
		}
		return len(out) > 0 && len(out) == len(objects[0]), "", nil
	},
		kube.Selection{Resource: gpuNodesGVR, Labels: poolLabel(w.pool) + "=true"},
		kube.Selection{Resource: podsGVR, Namespace: w.scope.Release.Namespace}))
	return out
}
