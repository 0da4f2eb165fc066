package world

import (
	"context"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"
)

// A stand-in for a real controller: this test binary, started as one. It
// records how it was started and does what a sandbox waits for at its start,
// once: pools, one node with a hypervisor pod, and a cluster that is Running.
// Nothing of a rolling update is in it.

const (
	apiGroup = "tensor-fusion.ai"
	poolName = "tensor-fusion-shared"
	nodeName = "shared-000"
)

var (
	poolResource = schema.GroupVersionResource{Group: apiGroup, Version: "v1", Resource: "gpupools"}
	nodeResource = schema.GroupVersionResource{Group: apiGroup, Version: "v1", Resource: "gpunodes"}
	gpuResource  = schema.GroupVersionResource{Group: apiGroup, Version: "v1", Resource: "gpus"}
)

// asController is set in the environment that the chart gives its container.
func asController() bool { return os.Getenv("OPERATOR_NAMESPACE") != "" }

func record(dir string, pid int) string { return filepath.Join(dir, fmt.Sprintf("started.%d", pid)) }

func standIn() error {
	started := strings.Join(append(os.Args[1:], os.Environ()...), "\n")
	if err := os.WriteFile(record(os.Getenv("HOME"), os.Getpid()), []byte(started), 0o600); err != nil {
		return err
	}
	cfg, err := clientcmd.BuildConfigFromFlags("", os.Getenv("KUBECONFIG"))
	if err != nil {
		return err
	}
	api, err := dynamic.NewForConfig(cfg)
	if err != nil {
		return err
	}
	kube, err := kubernetes.NewForConfig(cfg)
	if err != nil {
		return err
	}
	if err := standInObjects(context.Background(), api, kube); err != nil {
		return err
	}
	for _, a := range os.Args {
		if address, ok := strings.CutPrefix(a, "-health-probe-bind-address="); ok {
			return http.ListenAndServe(address, http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
		}
	}
	return fmt.Errorf("no address for the probes in %q", os.Args)
}

func standInObjects(ctx context.Context, api dynamic.Interface, kube kubernetes.Interface) error {
	tfc, err := api.Resource(clusterResource).Get(ctx, "tensor-fusion", metav1.GetOptions{})
	if err != nil {
		return err
	}
	pools, _, err := unstructured.NestedSlice(tfc.Object, "spec", "gpuPools")
	if err != nil || len(pools) == 0 {
		return fmt.Errorf("TensorFusionCluster: expected pools, found %v: %w", pools, err)
	}
	create := func(r schema.GroupVersionResource, kind, name string, spec any) error {
		u := &unstructured.Unstructured{Object: map[string]any{
			"apiVersion": apiGroup + "/v1", "kind": kind, "spec": spec,
			"metadata": map[string]any{"name": name, "labels": map[string]any{apiGroup + "/pool-" + poolName: "true"}},
		}}
		_, err := api.Resource(r).Create(ctx, u, metav1.CreateOptions{})
		return unlessThere(err)
	}
	if err := create(poolResource, "GPUPool", poolName, pools[0].(map[string]any)["specTemplate"]); err != nil {
		return err
	}
	if err := create(nodeResource, "GPUNode", nodeName, map[string]any{"manageMode": "Auto"}); err != nil {
		return err
	}
	_, err = kube.CoreV1().Pods(Namespace).Create(ctx, &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: "hypervisor-" + nodeName, Labels: map[string]string{apiGroup + "/component": "hypervisor"}},
		Spec:       corev1.PodSpec{NodeName: nodeName, Containers: []corev1.Container{{Name: "hypervisor", Image: "hypervisor"}}},
	}, metav1.CreateOptions{})
	if err := unlessThere(err); err != nil {
		return err
	}
	tfc.Object["status"] = map[string]any{"phase": "Running", "totalNodes": int64(1)}
	_, err = api.Resource(clusterResource).UpdateStatus(ctx, tfc, metav1.UpdateOptions{})
	return err
}

func unlessThere(err error) error {
	if apierrors.IsAlreadyExists(err) {
		return nil
	}
	return err
}
