package procnode_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/tools/remotecommand"
	utilexec "k8s.io/client-go/util/exec"
	"k8s.io/utils/ptr"

	"github.com/refit-run/refit/sandbox/process"
	"github.com/refit-run/refit/sandbox/procnode"
)

// space is a namespace for one test.
type space struct {
	*testing.T
	*world
	name string
}

func newSpace(t *testing.T) *space {
	t.Helper()
	w := cluster(t)
	ns, err := w.kube.CoreV1().Namespaces().Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{GenerateName: "test-"}}, metav1.CreateOptions{})
	require.NoError(t, err)
	s := &space{T: t, world: w, name: ns.Name}
	_, err = w.kube.CoreV1().ServiceAccounts(ns.Name).Create(t.Context(), &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: "default"}}, metav1.CreateOptions{})
	if !apierrors.IsAlreadyExists(err) {
		require.NoError(t, err)
	}
	// The token's ConfigMap comes from a controller.
	s.eventually("the root CA is published", func(ctx context.Context) error {
		_, err := w.kube.CoreV1().ConfigMaps(ns.Name).Get(ctx, "kube-root-ca.crt", metav1.GetOptions{})
		return err
	})
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("the node's log ends with:\n%s", w.node.Tail())
			s.describe()
		}
		ctx, cancel := context.WithTimeout(context.Background(), limit)
		defer cancel()
		_ = w.kube.CoreV1().Namespaces().Delete(ctx, ns.Name, metav1.DeleteOptions{})
		_ = w.kube.CoreV1().Pods(ns.Name).DeleteCollection(ctx, metav1.DeleteOptions{GracePeriodSeconds: ptr.To[int64](0)}, metav1.ListOptions{})
	})
	return s
}

// describe shows what the pods have come to.
func (s *space) describe() {
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	pods, err := s.pods(ctx)
	if err != nil {
		s.Log(err)
	}
	lines := int64(20)
	for name, p := range pods {
		for _, c := range p.Status.ContainerStatuses {
			text, err := s.kube.CoreV1().Pods(s.name).GetLogs(name, &corev1.PodLogOptions{Container: c.Name, TailLines: &lines}).DoRaw(ctx)
			s.Logf("%s/%s %s: restarts %d, ready %t, now %+v, before %+v; %v\n%s", name, c.Name, p.Status.Message, c.RestartCount, c.Ready, c.State, c.LastTerminationState, err, text)
		}
	}
}

func (s *space) eventually(what string, check func(ctx context.Context) error) {
	s.Helper()
	ctx, cancel := context.WithTimeout(s.Context(), limit)
	defer cancel()
	require.NoError(s, process.Until(ctx, look, check), what)
}

// member is the pod template of most tests: the echo server on this node.
func member(image string) corev1.PodTemplateSpec {
	return corev1.PodTemplateSpec{
		ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{"app": "echo"}},
		Spec: onNode(corev1.PodSpec{
			TerminationGracePeriodSeconds: ptr.To[int64](10),
			Containers: []corev1.Container{{
				Name: "main", Image: image, Ports: []corev1.ContainerPort{{Name: "http", ContainerPort: 8080}},
				ReadinessProbe: &corev1.Probe{
					ProbeHandler:  corev1.ProbeHandler{HTTPGet: &corev1.HTTPGetAction{Path: "/healthz", Port: intstr.FromString("http")}},
					PeriodSeconds: 1, FailureThreshold: 1,
				},
			}},
		}),
	}
}

func onNode(spec corev1.PodSpec) corev1.PodSpec {
	spec.Tolerations = []corev1.Toleration{{Key: procnode.Taint, Operator: corev1.TolerationOpExists}}
	spec.NodeSelector = map[string]string{procnode.Label: "true"}
	return spec
}

// statefulSet makes one of echo servers with its headless Service.
func (s *space) statefulSet(replicas int32, change func(*appsv1.StatefulSet)) {
	s.Helper()
	labels := map[string]string{"app": "echo"}
	_, err := s.kube.CoreV1().Services(s.name).Create(s.Context(), &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: "echo"},
		Spec: corev1.ServiceSpec{
			ClusterIP: corev1.ClusterIPNone, PublishNotReadyAddresses: true, Selector: labels, Ports: []corev1.ServicePort{{Port: 8080}},
		},
	}, metav1.CreateOptions{})
	require.NoError(s, err)
	set := &appsv1.StatefulSet{
		ObjectMeta: metav1.ObjectMeta{Name: "echo"},
		Spec: appsv1.StatefulSetSpec{
			Replicas: &replicas, ServiceName: "echo", Selector: &metav1.LabelSelector{MatchLabels: labels}, Template: member(image1),
		},
	}
	if change != nil {
		change(set)
	}
	_, err = s.kube.AppsV1().StatefulSets(s.name).Create(s.Context(), set, metav1.CreateOptions{})
	require.NoError(s, err)
}

func (s *space) pods(ctx context.Context) (map[string]corev1.Pod, error) {
	list, err := s.kube.CoreV1().Pods(s.name).List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, err
	}
	pods := map[string]corev1.Pod{}
	for _, p := range list.Items {
		pods[p.Name] = p
	}
	return pods, nil
}

func (s *space) pod(name string) corev1.Pod {
	s.Helper()
	p, err := s.kube.CoreV1().Pods(s.name).Get(s.Context(), name, metav1.GetOptions{})
	require.NoError(s, err)
	return *p
}

func isReady(p corev1.Pod) bool {
	for _, c := range p.Status.Conditions {
		if c.Type == corev1.PodReady {
			return c.Status == corev1.ConditionTrue && p.DeletionTimestamp == nil
		}
	}
	return false
}

// ready waits until n pods of the namespace are Ready and returns them.
func (s *space) ready(n int) map[string]corev1.Pod {
	s.Helper()
	var pods map[string]corev1.Pod
	s.eventually(fmt.Sprintf("%d pods are Ready", n), func(ctx context.Context) (err error) {
		if pods, err = s.pods(ctx); err != nil {
			return err
		}
		count := 0
		for _, p := range pods {
			if isReady(p) {
				count++
			}
		}
		if count != n || len(pods) != n {
			return fmt.Errorf("expected %d Ready, found %d of %d", n, count, len(pods))
		}
		return nil
	})
	return pods
}

func (s *space) create(name string, spec corev1.PodSpec) {
	s.Helper()
	_, err := s.kube.CoreV1().Pods(s.name).Create(s.Context(), &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{"app": name}, Annotations: map[string]string{"note": "a note"}}, Spec: onNode(spec),
	}, metav1.CreateOptions{})
	require.NoError(s, err)
}

// phase waits for a pod's phase.
func (s *space) phase(name string, want corev1.PodPhase) corev1.Pod {
	s.Helper()
	var p corev1.Pod
	s.eventually(fmt.Sprintf("pod %s is %s", name, want), func(ctx context.Context) error {
		found, err := s.kube.CoreV1().Pods(s.name).Get(ctx, name, metav1.GetOptions{})
		if err == nil && found.Status.Phase != want {
			err = fmt.Errorf("expected %s, found %s %s", want, found.Status.Phase, found.Status.Message)
		}
		if err == nil {
			p = *found
		}
		return err
	})
	return p
}

func (s *space) logs(name string, o corev1.PodLogOptions) string {
	s.Helper()
	data, err := s.kube.CoreV1().Pods(s.name).GetLogs(name, &o).DoRaw(s.Context())
	require.NoError(s, err)
	return string(data)
}

// exec runs a command through the API server and returns its output and code.
func (s *space) exec(webSocket bool, pod string, in io.Reader, line ...string) (out, errOut string, code int) {
	s.Helper()
	request := s.kube.CoreV1().RESTClient().Post().Resource("pods").Namespace(s.name).Name(pod).SubResource("exec").
		VersionedParams(&corev1.PodExecOptions{Command: line, Stdin: in != nil, Stdout: true, Stderr: true}, scheme.ParameterCodec)
	executor, err := remotecommand.NewSPDYExecutor(s.config, "POST", request.URL())
	if webSocket {
		executor, err = remotecommand.NewWebSocketExecutor(s.config, "GET", request.URL().String())
	}
	require.NoError(s, err)
	var stdout, stderr bytes.Buffer
	ctx, cancel := context.WithTimeout(s.Context(), limit)
	defer cancel()
	err = executor.StreamWithContext(ctx, remotecommand.StreamOptions{Stdin: in, Stdout: &stdout, Stderr: &stderr})
	var exit utilexec.CodeExitError
	if errors.As(err, &exit) {
		return stdout.String(), stderr.String(), exit.Code
	}
	require.NoError(s, err)
	return stdout.String(), stderr.String(), 0
}

func (s *space) volume(claim, size string) string {
	s.Helper()
	path := filepath.Join(s.T.TempDir(), claim)
	_, err := s.kube.CoreV1().PersistentVolumes().Create(s.Context(), &corev1.PersistentVolume{
		ObjectMeta: metav1.ObjectMeta{Name: s.name + "-" + claim},
		Spec: corev1.PersistentVolumeSpec{
			Capacity: corev1.ResourceList{corev1.ResourceStorage: resource.MustParse(size)}, AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce},
			PersistentVolumeSource: corev1.PersistentVolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: path}},
			ClaimRef:               &corev1.ObjectReference{Namespace: s.name, Name: claim},
		},
	}, metav1.CreateOptions{})
	require.NoError(s, err)
	return path
}
