package tensorfusion_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
	toolswatch "k8s.io/client-go/tools/watch"
	"k8s.io/utils/ptr"

	"github.com/refit-run/refit/sandbox/charts"
	"github.com/refit-run/refit/sandbox/controlplane"
	"github.com/refit-run/refit/sandbox/folder"
	"github.com/refit-run/refit/sandbox/kwok"
	"github.com/refit-run/refit/sandbox/process"
	"github.com/refit-run/refit/sandbox/reaper"
	"github.com/refit-run/refit/sandbox/release"
	"github.com/refit-run/refit/sandbox/tensorfusion"
)

const nodesPerPool = 2

// cluster is a real control plane with fake nodes, the chart and the double.
type cluster struct {
	t         *testing.T
	ctx       context.Context
	namespace string
	kube      kubernetes.Interface
	dynamic   dynamic.Interface
	double    *tensorfusion.Double
	cancel    context.CancelFunc
	done      chan error
}

func program(t *testing.T, name, variable string) string {
	t.Helper()
	path, err := process.Find(name, variable)
	if err != nil {
		t.Skipf("not run: %v", err)
	}
	return path
}

func startCluster(t *testing.T) *cluster {
	t.Helper()
	kubeProgram, kwokProgram := program(t, "refit-kube", "REFIT_SANDBOX_KUBE"), program(t, "kwok", "REFIT_SANDBOX_KWOK")
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Minute)
	t.Cleanup(cancel)
	c := &cluster{t: t, ctx: ctx, namespace: "tensor-fusion-sys", done: make(chan error, 1)}
	f := folder.Folder{Root: t.TempDir()}
	ports, reserved, err := f.Reserve()
	c.check(err)
	t.Cleanup(func() { _ = reserved.Close() })
	plane, err := controlplane.New(f, ports, "test", kubeProgram)
	c.check(err)
	t.Cleanup(plane.Stop)
	c.check(plane.Start(ctx))
	config, err := plane.Config(controlplane.Sandbox)
	c.check(err)
	c.kube, err = kubernetes.NewForConfig(config)
	c.check(err)
	c.dynamic, err = dynamic.NewForConfig(config)
	c.check(err)
	for _, namespace := range []string{c.namespace, "default"} {
		object := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace}}
		if namespace != "default" {
			_, err = c.kube.CoreV1().Namespaces().Create(ctx, object, metav1.CreateOptions{})
			c.check(err)
		}
		account := &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: "default"}}
		if _, err := c.kube.CoreV1().ServiceAccounts(namespace).Create(ctx, account, metav1.CreateOptions{}); err != nil {
			t.Logf("ServiceAccount %s/default: %v", namespace, err)
		}
	}
	c.check(kwok.ApplyCRDs(ctx, config))
	kubelet, err := kwok.New(f, ports, plane.KwokKubeconfig(), kwokProgram, 0)
	c.check(err)
	c.check(kubelet.Start())
	t.Cleanup(kubelet.Stop)
	c.check(kubelet.Ready(ctx))
	pools := []folder.Pool{{Name: "shared", Nodes: nodesPerPool}, {Name: "training", Nodes: nodesPerPool}}
	c.check(kwok.CreateNodes(ctx, c.kube, pools, ports))
	c.check(kwok.ReadyNodes(ctx, c.kube, nodesPerPool*2))
	c.check(plane.ReadyControllers(ctx))
	reaping, stopReaping := context.WithCancel(ctx)
	t.Cleanup(stopReaping)
	go func() {
		if err := reaper.Run(reaping, c.kube, kwok.NodeAnnotation, "fake"); err != nil {
			t.Error(err)
		}
	}()
	c.double, err = tensorfusion.New(tensorfusion.Options{
		Config: config, Namespace: c.namespace, Release: "tensor-fusion-sys", LeaseDuration: time.Second,
	})
	c.check(err)
	life, end := context.WithCancel(ctx)
	c.cancel = end
	t.Cleanup(end)
	go func() { c.done <- c.double.Run(life) }()
	values := charts.Values()
	values["controller"].(map[string]any)["admissionWebhooks"] = map[string]any{"url": c.double.WebhookURL()}
	archive, err := charts.Archive("1.8.6")
	c.check(err)
	c.check(release.Install(ctx, release.Release{
		Name: "tensor-fusion-sys", Namespace: c.namespace, Kubeconfig: plane.Kubeconfig(controlplane.Sandbox),
		Archive: archive, Values: values, Timeout: 2 * time.Minute,
	}))
	select {
	case <-c.double.Ready():
	case err := <-c.done:
		t.Fatal(err)
	case <-ctx.Done():
		t.Fatal("no controller process leads")
	}
	return c
}

// stop ends the double and expects that it stops clean.
func (c *cluster) stop(ctx context.Context) {
	c.t.Helper()
	c.cancel()
	select {
	case err := <-c.done:
		c.check(err)
	case <-ctx.Done():
		c.t.Fatal("the double does not stop")
	}
}

func (c *cluster) check(err error) {
	c.t.Helper()
	if err != nil {
		c.t.Fatal(err)
	}
}

func quantity(s string) resource.Quantity { return resource.MustParse(s) }

func text(u *unstructured.Unstructured, path ...string) string {
	s, _, _ := unstructured.NestedString(u.Object, path...)
	return s
}

func set(t *testing.T, object map[string]any, value any, path ...string) {
	t.Helper()
	if err := unstructured.SetNestedField(object, value, path...); err != nil {
		t.Fatal(err)
	}
}

func (c *cluster) get(r schema.GroupVersionResource, namespace, name string) *unstructured.Unstructured {
	c.t.Helper()
	u, err := c.dynamic.Resource(r).Namespace(namespace).Get(c.ctx, name, metav1.GetOptions{})
	c.check(err)
	return u
}

func (c *cluster) list(r schema.GroupVersionResource) []unstructured.Unstructured {
	c.t.Helper()
	l, err := c.dynamic.Resource(r).List(c.ctx, metav1.ListOptions{})
	c.check(err)
	return l.Items
}

// editPools changes every entry of the TensorFusionCluster.
func (c *cluster) editPools(change func(entry map[string]any)) {
	c.t.Helper()
	for {
		u := c.get(tf("tensorfusionclusters"), "", "tensor-fusion")
		pools, _, err := unstructured.NestedSlice(u.Object, "spec", "gpuPools")
		c.check(err)
		for _, p := range pools {
			change(p.(map[string]any))
		}
		set(c.t, u.Object, pools, "spec", "gpuPools")
		_, err = c.dynamic.Resource(tf("tensorfusionclusters")).Update(c.ctx, u, metav1.UpdateOptions{})
		if err == nil {
			return
		}
		c.t.Logf("again: %v", err) // the controller wrote the status meanwhile
		c.check(c.ctx.Err())
	}
}

// until watches one object until ok.
func (c *cluster) until(namespace, name string, r schema.GroupVersionResource, ok func(*unstructured.Unstructured) bool) *unstructured.Unstructured {
	c.t.Helper()
	api := c.dynamic.Resource(r).Namespace(namespace)
	only := "metadata.name=" + name
	lw := &cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
			o.FieldSelector = only
			return api.List(ctx, o)
		},
		WatchFuncWithContext: func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
			o.FieldSelector = only
			return api.Watch(ctx, o)
		},
	}
	ctx, cancel := context.WithTimeout(c.ctx, 2*time.Minute)
	defer cancel()
	var last *unstructured.Unstructured
	_, err := toolswatch.UntilWithSync(ctx, lw, &unstructured.Unstructured{}, nil, func(e watch.Event) (bool, error) {
		u, is := e.Object.(*unstructured.Unstructured)
		if !is || e.Type == watch.Deleted {
			return false, nil
		}
		last = u
		return ok(u), nil
	})
	if err != nil {
		c.t.Fatalf("%s %s: %v; last seen %v", r.Resource, name, err, last)
	}
	return last
}

func (c *cluster) untilPod(namespace, name string, ok func(*corev1.Pod) bool) corev1.Pod {
	c.t.Helper()
	var pod corev1.Pod
	c.until(namespace, name, schema.GroupVersionResource{Version: "v1", Resource: "pods"}, func(u *unstructured.Unstructured) bool {
		pod = corev1.Pod{}
		c.check(runtime.DefaultUnstructuredConverter.FromUnstructured(u.Object, &pod))
		return ok(&pod)
	})
	return pod
}

func ready(p *corev1.Pod) bool {
	for _, condition := range p.Status.Conditions {
		if condition.Type == corev1.PodReady {
			return condition.Status == corev1.ConditionTrue
		}
	}
	return false
}

// hypervisors maps node to pod.
func (c *cluster) hypervisors() map[string]corev1.Pod {
	c.t.Helper()
	list, err := c.kube.CoreV1().Pods(c.namespace).List(c.ctx, metav1.ListOptions{LabelSelector: "tensor-fusion.ai/component=hypervisor"})
	c.check(err)
	found := map[string]corev1.Pod{}
	for _, p := range list.Items {
		found[p.Spec.NodeName] = p
	}
	return found
}

const leaseName = "85104305.tensor-fusion.ai"

func (c *cluster) holder() string {
	c.t.Helper()
	lease, err := c.kube.CoordinationV1().Leases(c.namespace).Get(c.ctx, leaseName, metav1.GetOptions{})
	c.check(err)
	return ptr.Deref(lease.Spec.HolderIdentity, "")
}

func (c *cluster) untilHolder(ok func(string) bool) {
	c.t.Helper()
	resource := schema.GroupVersionResource{Group: "coordination.k8s.io", Version: "v1", Resource: "leases"}
	c.until(c.namespace, leaseName, resource, func(u *unstructured.Unstructured) bool { return ok(text(u, "spec", "holderIdentity")) })
}

// untilStatus asks the double how many replicas it sees: no object shows that.
func (c *cluster) untilStatus(ok func(replicas float64) bool) {
	c.t.Helper()
	c.check(process.Until(c.ctx, 100*time.Millisecond, func(context.Context) error {
		var body struct {
			Replicas float64 `json:"replicas"`
		}
		c.getJSON("/sandbox/status", &body)
		if !ok(body.Replicas) {
			return fmt.Errorf("the double sees %v replicas", body.Replicas)
		}
		return nil
	}))
}
