package tensorfusion

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/refit-run/refit/activities/kube"
)

// now is the clock of the pure functions' callers.
func now() time.Time { return time.Now() }

// controllerDeployment finds the controller by its label: names depend on the
// chart's fullnameOverride.
func controllerDeployment(ctx context.Context, c *kube.Client, namespace string) (*appsv1.Deployment, error) {
	found, err := list[appsv1.Deployment](ctx, c, deploymentsGVR, namespace, labelComponent+"="+componentOperator)
	if err != nil {
		return nil, kube.Wrap(err, "controller Deployment")
	}
	if len(found) != 1 {
		return nil, noController(namespace, len(found))
	}
	return &found[0], nil
}

func readLease(ctx context.Context, c *kube.Client, namespace string) (*coordinationv1.Lease, error) {
	l, err := c.Typed.CoordinationV1().Leases(namespace).Get(ctx, leaderLease, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return nil, nil
	}
	return l, err
}

// leaseSlack is how long after its duration a lease still counts as held: the
// clocks of worker and cluster differ.
const leaseSlack = 15 * time.Second

// leaderOf returns the pod that leads, or why none does. The lease is not
// released on exit, so its holder must also be a Ready pod.
func leaderOf(l *coordinationv1.Lease, pods []corev1.Pod, at time.Time) (pod, trouble string) {
	if l == nil || l.Spec.HolderIdentity == nil || *l.Spec.HolderIdentity == "" {
		return "", "nobody holds the lease"
	}
	// A controller's identity is its host name, then "_" and a random part.
	holder, _, _ := strings.Cut(*l.Spec.HolderIdentity, "_")
	if l.Spec.RenewTime != nil && l.Spec.LeaseDurationSeconds != nil {
		limit := time.Duration(*l.Spec.LeaseDurationSeconds)*time.Second + leaseSlack
		if age := at.Sub(l.Spec.RenewTime.Time); age > limit {
			return "", fmt.Sprintf("held by %s, but not renewed for %s", holder, age.Round(time.Second))
		}
	}
	for i := range pods {
		if pods[i].Name == holder {
			if !ready(&pods[i]) {
				return "", fmt.Sprintf("held by %s, which is not Ready", holder)
			}
			return holder, ""
		}
	}
	return "", fmt.Sprintf("held by %s, which is no pod of the controller", holder)
}

// probeLimit bounds one HTTP question to a pod.
const probeLimit = 10 * time.Second

// podHTTP asks a pod's port through the API server.
func podHTTP(ctx context.Context, c *kube.Client, namespace, pod string, port int, path string) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, probeLimit)
	defer cancel()
	client := http.Client{Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return c.DialPod(ctx, namespace, pod, port)
		},
	}}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, fmt.Sprintf("http://%s:%d%s", pod, port, path), nil)
	if err != nil {
		return nil, err
	}
	resp, err := client.Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(io.LimitReader(resp.Body, 32<<20))
	if err != nil {
		return nil, err
	}
	if resp.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("GET %s of pod %s: %s", path, pod, resp.Status)
	}
	return body, nil
}

// webhookTrouble lets the API server admit a labelled pod by dry run and says
// why it was not, "" when it was. Without a webhook in the release there is
// nothing to ask.
func webhookTrouble(ctx context.Context, c *kube.Client, objects []string, pool string) string {
	if len(objects) == 0 {
		return ""
	}
	pod := gpuPod("refit-admission-check", metav1.NamespaceDefault, pool, corev1.Container{Name: "check", Image: "refit.invalid/never-pulled:0"})
	_, err := c.Typed.CoreV1().Pods(metav1.NamespaceDefault).Create(ctx, pod, metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
	if err != nil {
		return err.Error()
	}
	return ""
}

// Resources that a pod of ours asks for: small, so that it fits a busy GPU.
const (
	probeTFlops   = "1"
	probeVRAM     = "2Gi"
	probeGPUCount = 1
)

// gpuPod is a pod as a user of TensorFusion writes it (facts, section 11).
func gpuPod(name, namespace, pool string, container corev1.Container) *corev1.Pod {
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Name: name, Namespace: namespace,
			Labels: map[string]string{labelEnabled: "true"},
			Annotations: map[string]string{
				annotationRequestTFlops: probeTFlops, annotationLimitTFlops: probeTFlops,
				annotationRequestVRAM: probeVRAM, annotationLimitVRAM: probeVRAM,
				annotationGPUCount: fmt.Sprint(probeGPUCount),
				annotationGPUPool:  pool,
				annotationInject:   container.Name,
			},
		},
		Spec: corev1.PodSpec{RestartPolicy: corev1.RestartPolicyNever, Containers: []corev1.Container{container}},
	}
}
