package tensorfusion

import (
	"fmt"
	"time"

	"github.com/Masterminds/semver/v3"
	corev1 "k8s.io/api/core/v1"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
)

const (
	oldHypervisor = "registry.test/hypervisor:2.15.0"
	newHypervisor = "registry.test/hypervisor:2.17.0"
	middleware    = "registry.test/middleware:1.3.9"
	workerImage1  = "registry.test/worker:v2.15.0"
)

func pointer[T any](v T) *T { return &v }

func testGoal() Goal {
	return Goal{HypervisorImage: newHypervisor, MiddlewareImage: middleware, IsolationPolicy: "static", PodName: podPrefix}
}

// provenPod meets testGoal and is Ready.
func provenPod(node string) corev1.Pod {
	return corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Name: podPrefix + node, Namespace: "tensor-fusion-sys", UID: types.UID("uid-" + node),
			CreationTimestamp: metav1.NewTime(time.Date(2026, 11, 30, 10, 0, 0, 0, time.UTC)),
			Labels:            map[string]string{labelComponent: componentHypervisor},
		},
		Spec: corev1.PodSpec{
			NodeName:       node,
			InitContainers: []corev1.Container{{Name: "init-shm", Image: newHypervisor}, {Name: runtimeInit, Image: middleware}},
			Containers:     []corev1.Container{{Name: "tensor-fusion-hypervisor", Image: newHypervisor, Args: []string{"--isolation-mode=soft", "--isolation-policy=static"}}},
		},
		Status: corev1.PodStatus{
			Phase:      corev1.PodRunning,
			Conditions: []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}},
		},
	}
}

func provenHost(node, pool string) hostView {
	n := &FusionNode{ObjectMeta: metav1.ObjectMeta{Name: node, Labels: map[string]string{poolLabel(pool): "true"}}}
	n.Status.Phase = phaseRunning
	var gpus []FusionGPU
	for i := range 2 {
		g := FusionGPU{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("gpu-%s-%d", node, i)}}
		g.Status.Phase, g.Status.Model = phaseRunning, "H100_SXM"
		g.Status.Capacity = map[string]any{"tflops": "989", "vram": "80Gi"}
		g.Status.NodeSelector = map[string]string{corev1.LabelHostname: node}
		gpus = append(gpus, g)
	}
	return hostView{name: node, gpuNode: n, gpus: gpus, pods: []corev1.Pod{provenPod(node)}}
}

func readyNode(name string) corev1.Node {
	return corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Status: corev1.NodeStatus{
			Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}},
			NodeInfo:   corev1.NodeSystemInfo{BootID: "boot-of-" + name},
		},
	}
}

func testEntry(name, image string) PoolEntry {
	e := PoolEntry{Name: name}
	e.Spec.NodeManager = &struct {
		Policy *RollingPolicy `json:"nodePoolRollingUpdatePolicy"`
	}{Policy: &RollingPolicy{AutoHypervisor: true, BatchPercentage: pointer(int32(20)), BatchInterval: "1s", MaxDuration: defaultMaxDuration}}
	e.Spec.Components.Hypervisor = &HypervisorConfig{Image: image, PortNumber: pointer(int32(8000))}
	e.Spec.Components.Worker = map[string]any{"image": workerImage1}
	return e
}

func testCluster(image string) FusionCluster {
	c := FusionCluster{ObjectMeta: metav1.ObjectMeta{Name: "tensor-fusion"}}
	c.Spec.GPUPools = []PoolEntry{testEntry("shared", image)}
	c.Status.Phase = phaseRunning
	return c
}

func testPool() FusionPool {
	p := FusionPool{ObjectMeta: metav1.ObjectMeta{Name: "tensor-fusion-shared"}, Spec: testEntry("shared", oldHypervisor).Spec}
	p.Status.Phase = phaseRunning
	p.Status.Components.Client = "client-hash"
	return p
}

func testCRD(name string, fields ...string) *apiextensionsv1.CustomResourceDefinition {
	properties := map[string]apiextensionsv1.JSONSchemaProps{}
	for _, f := range fields {
		properties[f] = apiextensionsv1.JSONSchemaProps{Type: "string"}
	}
	crd := &apiextensionsv1.CustomResourceDefinition{ObjectMeta: metav1.ObjectMeta{Name: name + "." + apiGroup}}
	crd.Spec.Group, crd.Spec.Names.Plural = apiGroup, name
	crd.Spec.Versions = []apiextensionsv1.CustomResourceDefinitionVersion{{
		Name: apiVersion, Served: true, Storage: true,
		Schema: &apiextensionsv1.CustomResourceValidation{OpenAPIV3Schema: &apiextensionsv1.JSONSchemaProps{
			Type: "object",
			Properties: map[string]apiextensionsv1.JSONSchemaProps{
				"spec": {Type: "object", Properties: properties},
			},
		}},
	}}
	return crd
}

func testRole(name string, verbs ...any) *unstructured.Unstructured {
	return &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole",
		"metadata": map[string]any{"name": name},
		"rules":    []any{map[string]any{"apiGroups": []any{apiGroup}, "resources": []any{"gpus", "gpupools"}, "verbs": verbs}},
	}}
}

// soundWorld is an observation in which every check holds at every stage, T04
// apart, which only a person can answer.
func soundWorld() *Observation {
	old, target := semver.MustParse("2.16.3"), semver.MustParse("2.17.0")
	o := &Observation{
		Goal: testGoal(),
		Intent: Intent{
			Chart: Chart{Ref: "oci://registry.test/tensor-fusion", Version: "1.8.7"}, HypervisorImage: newHypervisor, IsolationPolicy: "static",
		},
		Source: Side{Chart: "1.8.6", ControllerImage: "registry.test/operator:2.16.3", Controller: old, Replicas: 2, Objects: []*unstructured.Unstructured{testRole("tf-role", "get", "list", "watch")}},
		Target: Side{
			Chart: "1.8.7", ControllerImage: "registry.test/operator:2.17.0", Controller: target, Replicas: 2, KnowsIsolation: true, ShippedHypervisor: oldHypervisor,
			Clusters: []FusionCluster{testCluster(newHypervisor)},
			Objects:  []*unstructured.Unstructured{testRole("tf-role", "get", "list", "watch", "patch")},
			CRDs:     []*apiextensionsv1.CustomResourceDefinition{testCRD("gpus", "vendor", "policy"), testCRD("gpupools", "vendor")},
		},
		CRDs: map[string]*apiextensionsv1.CustomResourceDefinition{
			providerConfigCRD:      testCRD("providerconfigs"),
			"gpus." + apiGroup:     testCRD("gpus", "vendor"),
			"gpupools." + apiGroup: testCRD("gpupools", "vendor"),
		},
		Clusters: []FusionCluster{testCluster(oldHypervisor)},
		Pools:    []FusionPool{testPool()},
		Hosts:    []hostView{provenHost("node-1", "tensor-fusion-shared"), provenHost("node-2", "tensor-fusion-shared")},
		Nodes:    map[string]corev1.Node{"node-1": readyNode("node-1"), "node-2": readyNode("node-2")},
		Controller: Controller{
			Deployment: "Deployment/tensor-fusion-sys/tf-controller", Image: "registry.test/operator:2.17.0",
			Replicas: 2, Ready: 2, Updated: 2, Leader: "tf-controller-1",
		},
		Allocated: map[string]bool{"ml/llm-tf-worker-a": true, "ml/app": true},
		Rolled: Rolled{
			Hypervisors: []string{"tensor-fusion-shared"}, Workers: []string{"tensor-fusion-shared"}, Clients: []string{"tensor-fusion-shared"},
		},
	}
	provider := FusionProvider{}
	provider.Spec.Vendor = "NVIDIA"
	provider.Spec.Images.Middleware, provider.Spec.Images.RemoteWorker = middleware, workerImage1
	o.Providers = []FusionProvider{provider}
	w := FusionWorkload{ObjectMeta: metav1.ObjectMeta{Name: "llm", Namespace: "ml", Labels: map[string]string{labelGPUPool: "tensor-fusion-shared"}}}
	w.Spec.Replicas = pointer(int32(1))
	w.Status.WorkerCount, w.Status.ReadyWorkers, w.Status.Hash = 1, 1, "worker-hash"
	o.Workloads = []FusionWorkload{w}
	o.Workers = []corev1.Pod{{
		ObjectMeta: metav1.ObjectMeta{Name: "llm-tf-worker-a", Namespace: "ml", UID: "uid-worker", Labels: map[string]string{labelWorkload: "llm", labelTemplateHash: "worker-hash"}},
		Spec:       corev1.PodSpec{Containers: []corev1.Container{{Image: workerImage1}}},
	}}
	o.Clients = []corev1.Pod{{ObjectMeta: metav1.ObjectMeta{Name: "app", Namespace: "ml", Labels: map[string]string{labelGPUPool: "tensor-fusion-shared", labelTemplateHash: "client-hash"}}}}
	o.Before = o.snapshot()
	return o
}
