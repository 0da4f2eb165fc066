package tensorfusion

import (
	"context"
	"fmt"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/utils/ptr"

	"github.com/refit-run/refit/sandbox/tensorfusion/machine"
)

// SeedNamespace holds the sample applications.
const SeedNamespace = "apps"

// Seed creates sample applications, one set per GPUPool: a workload of two
// workers with two connections, and a Deployment of two clients. Running it
// again changes nothing.
func (d *Double) Seed(ctx context.Context) error {
	_, err := d.client.CoreV1().Namespaces().Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: SeedNamespace}}, metav1.CreateOptions{})
	if err != nil && !apierrors.IsAlreadyExists(err) {
		return fmt.Errorf("seed: Namespace %s: %w", SeedNamespace, err)
	}
	// Pods would be refused until the account exists.
	_, err = d.client.CoreV1().ServiceAccounts(SeedNamespace).Create(ctx, &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: "default"}}, metav1.CreateOptions{})
	if err != nil && !apierrors.IsAlreadyExists(err) {
		return fmt.Errorf("seed: ServiceAccount %s/default: %w", SeedNamespace, err)
	}
	pools, err := d.dynamic.Resource(poolResource).List(ctx, metav1.ListOptions{})
	if err != nil {
		return fmt.Errorf("seed: GPUPools: %w", err)
	}
	if len(pools.Items) == 0 {
		return fmt.Errorf("seed: no GPUPool exists; install the chart and wait for its controller first")
	}
	for _, pool := range pools.Items {
		if err := d.seedPool(ctx, pool.GetName()); err != nil {
			return fmt.Errorf("seed: pool %s: %w", pool.GetName(), err)
		}
	}
	return nil
}

func (d *Double) seedPool(ctx context.Context, pool string) error {
	name := "sample-" + pool
	workload := newObject("TensorFusionWorkload", name, map[string]any{
		"replicas": int64(2), "poolName": pool, "qos": "medium", "gpuCount": int64(1),
		"resources": map[string]any{
			"requests": map[string]any{"tflops": "10", "vram": "8Gi"}, "limits": map[string]any{"tflops": "20", "vram": "16Gi"},
		},
	})
	workload.SetLabels(map[string]string{machine.PoolLabel: pool})
	if err := d.createNamespaced(ctx, workloadResource, workload); err != nil {
		return err
	}
	for i := range 2 {
		connection := newObject("TensorFusionConnection", fmt.Sprintf("%s-%d", name, i), map[string]any{
			"workloadName": name, "clientPod": fmt.Sprintf("%s-client-%d", name, i),
		})
		if err := d.createNamespaced(ctx, connectionResource, connection); err != nil {
			return err
		}
	}
	labels := map[string]string{"app": name}
	template := corev1.PodTemplateSpec{
		ObjectMeta: metav1.ObjectMeta{
			Labels:      map[string]string{"app": name, machine.EnabledLabel: "true"},
			Annotations: map[string]string{poolAnnotation: pool},
		},
		Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "app", Image: "registry.refit.local/apps/sample:1.0.0"}}},
	}
	_, err := d.client.AppsV1().Deployments(SeedNamespace).Create(ctx, &appsv1.Deployment{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: appsv1.DeploymentSpec{
			Replicas: ptr.To[int32](2), Selector: &metav1.LabelSelector{MatchLabels: labels}, Template: template,
		},
	}, metav1.CreateOptions{})
	if apierrors.IsAlreadyExists(err) {
		return nil
	}
	return err
}

func (d *Double) createNamespaced(ctx context.Context, r schema.GroupVersionResource, u *unstructured.Unstructured) error {
	_, err := d.dynamic.Resource(r).Namespace(SeedNamespace).Create(ctx, u, metav1.CreateOptions{})
	if apierrors.IsAlreadyExists(err) {
		return nil
	}
	return err
}
