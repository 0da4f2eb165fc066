package tensorfusion_test

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"

	"github.com/refit-run/refit/sandbox/tensorfusion"
	"github.com/refit-run/refit/sandbox/tensorfusion/machine"
)

func tf(plural string) schema.GroupVersionResource {
	return schema.GroupVersionResource{Group: "tensor-fusion.ai", Version: "v1", Resource: plural}
}

// TestDoubleOnARealAPIServer plays one life of a release: every step begins
// with what the one before left.
func TestDoubleOnARealAPIServer(t *testing.T) {
	c := startCluster(t)
	t.Run("an install gives Running pools and sealed fresh hypervisors", c.installs)
	t.Run("unknown fields are pruned", c.prunes)
	t.Run("a deleted hypervisor comes back under another UID", c.replaces)
	t.Run("clients are injected, workers run, connections have a worker", c.seeds)
	t.Run("the endpoints answer as the leader and as each hypervisor", c.answers)
	t.Run("a held hypervisor stays Pending until the fault is cleared", c.holds)
	t.Run("a crash loop is recreated", c.crashes)
	t.Run("a changed image rolls in batches and is sealed", c.rolls)
	t.Run("a crashed controller leads again after its lease", c.restarts)
	t.Run("2.16 to 2.17 replaces every hypervisor also with auto=false", c.upgrades)
	t.Run("claims of the default class are bound", c.binds)
	t.Run("without a replica no client is admitted", c.refuses)
}

func (c *cluster) installs(t *testing.T) {
	c.t = t
	tfc := c.until("", "tensor-fusion", tf("tensorfusionclusters"), func(u *unstructured.Unstructured) bool {
		nodes, _, _ := unstructured.NestedInt64(u.Object, "status", "totalNodes")
		return text(u, "status", "phase") == "Running" && nodes == nodesPerPool*2
	})
	if pools, _, _ := unstructured.NestedStringSlice(tfc.Object, "status", "readyGPUPools"); len(pools) != 2 {
		t.Errorf("readyGPUPools %v", pools)
	}
	for _, pool := range []string{"tensor-fusion-shared", "tensor-fusion-training"} {
		c.sealed(pool)
	}
	if _, err := c.kube.CoreV1().Secrets(c.namespace).Get(c.ctx, "tensor-fusion-webhook-secret", metav1.GetOptions{}); err != nil {
		t.Error(err)
	}
	gpus := c.list(tf("gpus"))
	if len(gpus) != nodesPerPool*2*2 || text(&gpus[0], "status", "gpuModel") != tensorfusion.Model {
		t.Errorf("%d GPUs, the first with model %q", len(gpus), text(&gpus[0], "status", "gpuModel"))
	}
}

func (c *cluster) sealed(pool string) {
	c.t.Helper()
	c.until("", pool, tf("gpupools"), func(u *unstructured.Unstructured) bool {
		synced, _, _ := unstructured.NestedBool(u.Object, "status", "componentStatus", "hypervisorConfigSynced")
		progress, _, _ := unstructured.NestedInt64(u.Object, "status", "componentStatus", "hypervisorUpdateProgress")
		return synced && progress == 100 && text(u, "status", "phase") == "Running"
	})
}

func (c *cluster) prunes(t *testing.T) {
	c.t = t
	c.editPools(func(entry map[string]any) { set(t, entry, "typo", "specTemplate", "noSuchField") })
	u := c.get(tf("tensorfusionclusters"), "", "tensor-fusion")
	pools, _, _ := unstructured.NestedSlice(u.Object, "spec", "gpuPools")
	if _, found, _ := unstructured.NestedString(pools[0].(map[string]any), "specTemplate", "noSuchField"); found {
		t.Error("the field must be gone")
	}
}

func (c *cluster) replaces(t *testing.T) {
	c.t = t
	before := c.hypervisors()
	node := slices.Sorted(maps.Keys(before))[0]
	c.check(c.kube.CoreV1().Pods(c.namespace).Delete(c.ctx, "hypervisor-"+node, metav1.DeleteOptions{}))
	c.newHypervisor(node, before[node].UID)
	c.until("", node, tf("gpunodes"), func(u *unstructured.Unstructured) bool { return text(u, "status", "phase") == "Running" })
	after := c.hypervisors()
	if len(after) != len(before) {
		t.Errorf("%d hypervisors, expected %d", len(after), len(before))
	}
}

// newHypervisor waits for a Ready pod with another UID.
func (c *cluster) newHypervisor(node string, old types.UID) corev1.Pod {
	c.t.Helper()
	return c.untilPod(c.namespace, "hypervisor-"+node, func(p *corev1.Pod) bool { return p.UID != old && p.DeletionTimestamp == nil && ready(p) })
}

func (c *cluster) seeds(t *testing.T) {
	c.t = t
	for range 2 { // the second changes nothing
		c.check(c.double.Seed(c.ctx))
	}
	name := "sample-tensor-fusion-shared"
	c.until(tensorfusion.SeedNamespace, name, tf("tensorfusionworkloads"), func(u *unstructured.Unstructured) bool {
		n, _, _ := unstructured.NestedInt64(u.Object, "status", "readyWorkers")
		return n == 2 && text(u, "status", "phase") == "Running"
	})
	c.until(tensorfusion.SeedNamespace, name+"-0", tf("tensorfusionconnections"), func(u *unstructured.Unstructured) bool {
		return text(u, "status", "workerName") != ""
	})
	list, err := c.kube.CoreV1().Pods(tensorfusion.SeedNamespace).List(c.ctx, metav1.ListOptions{LabelSelector: "tensor-fusion.ai/enabled=true"})
	c.check(err)
	if len(list.Items) != 4 {
		t.Fatalf("%d clients, expected 4", len(list.Items))
	}
	for _, p := range list.Items {
		pool := c.get(tf("gpupools"), "", p.Labels[machine.PoolLabel])
		if p.Labels[machine.HashLabel] != text(pool, "status", "componentStatus", "client") || p.Spec.InitContainers[0].Name != "inject-lib" {
			t.Errorf("client %s: labels %v", p.Name, p.Labels)
		}
	}
}

func (c *cluster) answers(t *testing.T) {
	c.t = t
	var body struct {
		Allocation map[string]any `json:"allocation"`
		Devices    []any          `json:"devices"`
	}
	c.getJSON("/api/allocation", &body)
	if len(body.Allocation) != 4 {
		t.Errorf("%d allocations, expected the 4 workers", len(body.Allocation))
	}
	node := slices.Sorted(maps.Keys(c.hypervisors()))[0]
	c.getJSON("/nodes/"+node+"/readyz", &body)
	c.getJSON("/nodes/"+node+"/api/v1/devices", &body)
	if len(body.Devices) != 2 {
		t.Errorf("%d devices, expected 2", len(body.Devices))
	}
}

func (c *cluster) getJSON(path string, into any) {
	c.t.Helper()
	response, err := http.Get("http://" + c.double.APIAddr() + path)
	c.check(err)
	defer response.Body.Close()
	data, err := io.ReadAll(response.Body)
	c.check(err)
	if response.StatusCode != http.StatusOK {
		c.t.Fatalf("GET %s: %s: %s", path, response.Status, data)
	}
	c.check(json.Unmarshal(data, into))
}

func (c *cluster) holds(t *testing.T) {
	c.t = t
	before := c.hypervisors()
	node := slices.Sorted(maps.Keys(before))[0]
	c.check(c.double.Fault(c.ctx, tensorfusion.NodeNeverReady, node))
	c.check(c.double.Fault(c.ctx, tensorfusion.HypervisorReplaced, node))
	held := c.untilPod(c.namespace, "hypervisor-"+node, func(p *corev1.Pod) bool { return p.UID != before[node].UID })
	c.until("", node, tf("gpunodes"), func(u *unstructured.Unstructured) bool { return text(u, "status", "phase") == "Pending" })
	if held.Annotations[tensorfusion.HoldAnnotation] != "true" {
		t.Errorf("annotations %v", held.Annotations)
	}
	c.check(c.double.Fault(c.ctx, tensorfusion.ClearFaults))
	if p := c.newHypervisor(node, before[node].UID); p.UID != held.UID {
		t.Error("the held pod itself must become Ready")
	}
	if err := c.double.Fault(c.ctx, tensorfusion.NodeNeverReady, "no-such-node"); err == nil {
		t.Error("an unknown node must be refused")
	}
}

func (c *cluster) crashes(t *testing.T) {
	c.t = t
	before := c.hypervisors()
	node := slices.Sorted(maps.Keys(before))[1]
	c.check(c.double.Fault(c.ctx, tensorfusion.HypervisorCrashLoop, node))
	c.untilPod(c.namespace, "hypervisor-"+node, func(p *corev1.Pod) bool { return p.UID != before[node].UID })
	c.check(c.double.Fault(c.ctx, tensorfusion.ClearFaults))
	c.newHypervisor(node, before[node].UID)
	events, err := c.kube.CoreV1().Events(c.namespace).List(c.ctx, metav1.ListOptions{FieldSelector: "reason=" + machine.CrashLoop})
	c.check(err)
	if len(events.Items) == 0 {
		t.Errorf("event %s expected", machine.CrashLoop)
	}
	c.until("", node, tf("gpunodes"), func(u *unstructured.Unstructured) bool { return text(u, "status", "phase") == "Running" })
}

func (c *cluster) rolls(t *testing.T) {
	c.t = t
	before := c.hypervisors()
	c.editPools(func(entry map[string]any) {
		set(t, entry, "registry.refit.local/tensorfusion/tensor-fusion-hypervisor:2.17.0", "specTemplate", "componentConfig", "hypervisor", "image")
	})
	for node, old := range before {
		if p := c.newHypervisor(node, old.UID); p.Spec.Containers[0].Image == old.Spec.Containers[0].Image {
			t.Errorf("%s still has %s", p.Name, p.Spec.Containers[0].Image)
		}
	}
	for _, pool := range []string{"tensor-fusion-shared", "tensor-fusion-training"} {
		c.sealed(pool)
	}
}

func (c *cluster) restarts(t *testing.T) {
	c.t = t
	before := c.holder()
	hypervisors := c.hypervisors()
	c.check(c.double.Fault(c.ctx, tensorfusion.ControllerRestart))
	c.untilHolder(func(holder string) bool { return holder != before })
	for node, p := range c.hypervisors() {
		if p.UID != hypervisors[node].UID {
			t.Errorf("a restart of the same version must not touch %s", p.Name)
		}
	}
}

func (c *cluster) upgrades(t *testing.T) {
	c.t = t
	c.editPools(func(entry map[string]any) {
		set(t, entry, false, "specTemplate", "nodeManagerConfig", "nodePoolRollingUpdatePolicy", "autoUpdateHypervisor")
	})
	for _, pool := range []string{"tensor-fusion-shared", "tensor-fusion-training"} {
		c.until("", pool, tf("gpupools"), func(u *unstructured.Unstructured) bool {
			auto, _, _ := unstructured.NestedBool(u.Object, "spec", "nodeManagerConfig", "nodePoolRollingUpdatePolicy", "autoUpdateHypervisor")
			return !auto
		})
	}
	before := c.hypervisors()
	patch := fmt.Appendf(nil, `{"spec":{"template":{"spec":{"containers":[{"name":"controller","image":%q}]}}}}`, "registry.refit.local/tensorfusion/tensor-fusion-operator:2.17.0")
	_, err := c.kube.AppsV1().Deployments(c.namespace).Patch(c.ctx, "tensor-fusion-sys-controller", types.StrategicMergePatchType, patch, metav1.PatchOptions{})
	c.check(err)
	for node, old := range before {
		p := c.newHypervisor(node, old.UID)
		if !slices.Contains(p.Spec.Containers[0].Args, "--isolation-policy=static") || p.Labels[machine.HashLabel] != old.Labels[machine.HashLabel] {
			t.Errorf("%s: args %v, label %s, before %s", p.Name, p.Spec.Containers[0].Args, p.Labels[machine.HashLabel], old.Labels[machine.HashLabel])
		}
	}
}

func (c *cluster) binds(t *testing.T) {
	c.t = t
	claim := &corev1.PersistentVolumeClaim{
		ObjectMeta: metav1.ObjectMeta{Name: "storage"},
		Spec: corev1.PersistentVolumeClaimSpec{
			AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce},
			Resources:   corev1.VolumeResourceRequirements{Requests: corev1.ResourceList{corev1.ResourceStorage: quantity("5Gi")}},
		},
	}
	_, err := c.kube.CoreV1().PersistentVolumeClaims(c.namespace).Create(c.ctx, claim, metav1.CreateOptions{})
	c.check(err)
	resource := schema.GroupVersionResource{Version: "v1", Resource: "persistentvolumeclaims"}
	c.until(c.namespace, "storage", resource, func(u *unstructured.Unstructured) bool { return text(u, "status", "phase") == "Bound" })
}

func (c *cluster) refuses(t *testing.T) {
	c.t = t
	client := func() error {
		_, err := c.kube.CoreV1().Pods(c.namespace).Create(c.ctx, &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{GenerateName: "probe-", Labels: map[string]string{machine.EnabledLabel: "true"}},
			Spec:       corev1.PodSpec{Containers: []corev1.Container{{Name: "c", Image: "registry.refit.local/apps/sample:1.0.0"}}},
		}, metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
		return err
	}
	c.check(client())
	_, err := c.kube.AppsV1().Deployments(c.namespace).Patch(c.ctx, "tensor-fusion-sys-controller", types.MergePatchType, []byte(`{"spec":{"replicas":0}}`), metav1.PatchOptions{})
	c.check(err)
	c.untilStatus(func(replicas float64) bool { return replicas == 0 })
	if err := client(); err == nil {
		t.Error("failurePolicy is Fail: nobody may be admitted")
	}
	response, err := http.PostForm("http://"+c.double.APIAddr()+"/sandbox/fault", url.Values{})
	c.check(err)
	defer response.Body.Close()
	if response.StatusCode != http.StatusBadRequest {
		t.Errorf("a fault without a name: %s", response.Status)
	}
	ctx, cancel := context.WithTimeout(c.ctx, time.Minute)
	defer cancel()
	c.stop(ctx)
}
