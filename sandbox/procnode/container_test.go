package procnode_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
)

// kill ends the only process of a pod, as a crash would.
func (s *space) kill(p corev1.Pod) {
	s.Helper()
	pids := processes(p.UID)
	require.Len(s, pids, 1)
	require.NoError(s, syscall.Kill(pids[0], syscall.SIGKILL))
}

// restarts waits until the pod's container was restarted n times and satisfies
// the check.
func (s *space) restarts(name string, n int32, check func(corev1.ContainerStatus) error) corev1.ContainerStatus {
	s.Helper()
	var status corev1.ContainerStatus
	s.eventually(fmt.Sprintf("container of %s, restarts %d", name, n), func(ctx context.Context) error {
		p, err := s.kube.CoreV1().Pods(s.name).Get(ctx, name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		if len(p.Status.ContainerStatuses) == 0 {
			return errors.New("no status")
		}
		status = p.Status.ContainerStatuses[0]
		if status.RestartCount != n {
			return fmt.Errorf("found restarts %d", status.RestartCount)
		}
		return check(status)
	})
	return status
}

func running(s corev1.ContainerStatus) error {
	if s.State.Running == nil {
		return fmt.Errorf("expected it running, found %+v", s.State)
	}
	return nil
}

func waiting(reason string) func(corev1.ContainerStatus) error {
	return func(s corev1.ContainerStatus) error {
		if s.State.Waiting == nil || s.State.Waiting.Reason != reason {
			return fmt.Errorf("expected it waiting for %s, found %+v", reason, s.State)
		}
		return nil
	}
}

func one(image string, args ...string) corev1.PodSpec {
	return corev1.PodSpec{Containers: []corev1.Container{{Name: "main", Image: image, Args: args}}}
}

func TestCrashingContainerIsStartedAtOnceThenWithDelays(t *testing.T) {
	s := newSpace(t)
	s.create("crash", one(shell, "echo life; exit 3"))
	// The first restart is immediate; then the delay grows.
	first := s.restarts("crash", 1, waiting("CrashLoopBackOff"))
	require.EqualValues(t, 3, first.LastTerminationState.Terminated.ExitCode)
	require.Contains(t, first.State.Waiting.Message, "back-off 1s")
	second := s.restarts("crash", 2, waiting("CrashLoopBackOff"))
	require.Contains(t, second.State.Waiting.Message, "back-off 2s")
	require.False(t, second.Ready)
	require.Equal(t, "life\n", s.logs("crash", corev1.PodLogOptions{}))
	require.Equal(t, "life\n", s.logs("crash", corev1.PodLogOptions{Previous: true}))
	// All containers wait: virtual-kubelet deletes such a pod without ending it.
	require.NoError(t, s.kube.CoreV1().Pods(s.name).Delete(t.Context(), "crash", metav1.DeleteOptions{}))
	s.ready(0)
}

func TestContainerThatFailsItsLivenessProbeIsStartedAgain(t *testing.T) {
	s := newSpace(t)
	spec := one(shell, `trap 'exit 5' TERM; : > "$HOME/alive-$$"; echo started; while :; do sleep 0.05; done`)
	spec.Containers[0].LivenessProbe = &corev1.Probe{
		ProbeHandler:  corev1.ProbeHandler{Exec: &corev1.ExecAction{Command: []string{"/bin/sh", "-c", `test ! -e "$HOME/sick"`}}},
		PeriodSeconds: 1, FailureThreshold: 2,
	}
	s.create("sick", spec)
	s.restarts("sick", 0, running)
	_, _, code := s.exec(false, "sick", nil, "/bin/sh", "-c", `: > "$HOME/sick"`)
	require.Zero(t, code)
	status := s.restarts("sick", 1, running)
	require.EqualValues(t, 5, status.LastTerminationState.Terminated.ExitCode, "it was asked to end")
	require.Contains(t, status.LastTerminationState.Terminated.Message, "liveness")
	s.eventually("the events tell", func(ctx context.Context) error {
		events, err := s.kube.CoreV1().Events(s.name).List(ctx, metav1.ListOptions{FieldSelector: "involvedObject.name=sick,reason=Unhealthy"})
		if err == nil && len(events.Items) == 0 {
			err = errors.New("no event Unhealthy")
		}
		return err
	})
}

func TestStartupProbeHoldsTheOthersBack(t *testing.T) {
	s := newSpace(t)
	spec := one(shell, `while :; do sleep 0.05; done`)
	test := func(file string) corev1.ProbeHandler {
		return corev1.ProbeHandler{Exec: &corev1.ExecAction{Command: []string{"/bin/sh", "-c", `test -e "$HOME/` + file + `"`}}}
	}
	c := &spec.Containers[0]
	c.StartupProbe = &corev1.Probe{ProbeHandler: test("up"), PeriodSeconds: 1, FailureThreshold: 1000}
	c.LivenessProbe = &corev1.Probe{ProbeHandler: test("up"), PeriodSeconds: 1, FailureThreshold: 1}
	c.ReadinessProbe = &corev1.Probe{ProbeHandler: test("ready"), PeriodSeconds: 1, FailureThreshold: 1}
	s.create("slow", spec)
	status := s.restarts("slow", 0, running)
	require.False(t, *status.Started)
	s.exec(false, "slow", nil, "/bin/sh", "-c", `: > "$HOME/up"`)
	s.restarts("slow", 0, func(c corev1.ContainerStatus) error {
		if !*c.Started {
			return errors.New("not started")
		}
		require.False(t, c.Ready)
		return nil
	})
	s.exec(false, "slow", nil, "/bin/sh", "-c", `: > "$HOME/ready"`)
	s.ready(1)
	s.exec(false, "slow", nil, "/bin/sh", "-c", `rm "$HOME/ready"`)
	s.restarts("slow", 0, func(c corev1.ContainerStatus) error {
		if c.Ready {
			return errors.New("still Ready")
		}
		return nil
	})
}

func TestTCPProbeSeesTheListener(t *testing.T) {
	s := newSpace(t)
	spec := member(image1).Spec
	spec.Containers[0].ReadinessProbe.ProbeHandler = corev1.ProbeHandler{TCPSocket: &corev1.TCPSocketAction{}}
	spec.Containers[0].ReadinessProbe.TCPSocket.Port.IntVal = 9000
	s.create("tcp", spec)
	s.ready(1)
}

func TestPodThatIgnoresTheEndIsKilledAfterItsGrace(t *testing.T) {
	s := newSpace(t)
	spec := member(image1).Spec
	spec.TerminationGracePeriodSeconds = ptr.To[int64](1)
	spec.Containers[0].Env = []corev1.EnvVar{{Name: "IGNORE_TERM", Value: "1"}}
	s.create("stubborn", spec)
	before := s.ready(1)["stubborn"]
	require.NoError(t, s.kube.CoreV1().Pods(s.name).Delete(t.Context(), "stubborn", metav1.DeleteOptions{}))
	s.ready(0)
	require.Empty(t, processes(before.UID))
}

// A process that left its container's session dies with the pod all the same.
func TestNothingOfAPodIsLeft(t *testing.T) {
	s := newSpace(t)
	s.create("parent", one(shell, `setsid sleep 600 & exec sleep 600`))
	p := s.ready(1)["parent"]
	s.eventually("two processes run", func(context.Context) error {
		if n := len(processes(p.UID)); n != 2 {
			return fmt.Errorf("found %d", n)
		}
		return nil
	})
	require.NoError(t, s.kube.CoreV1().Pods(s.name).Delete(t.Context(), "parent", metav1.DeleteOptions{}))
	s.ready(0)
	require.Empty(t, processes(p.UID))
}

func TestEnvironmentAndVolumesAreThePods(t *testing.T) {
	s := newSpace(t)
	_, err := s.kube.CoreV1().ConfigMaps(s.name).Create(t.Context(), &corev1.ConfigMap{
		ObjectMeta: metav1.ObjectMeta{Name: "settings"}, Data: map[string]string{"a.txt": "first", "b": "second"},
	}, metav1.CreateOptions{})
	require.NoError(t, err)
	_, err = s.kube.CoreV1().Secrets(s.name).Create(t.Context(), &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{Name: "password"}, StringData: map[string]string{"pw": "fake-password"},
	}, metav1.CreateOptions{})
	require.NoError(t, err)
	data := s.volume("data", "1Gi")
	_, err = s.kube.CoreV1().PersistentVolumeClaims(s.name).Create(t.Context(), &corev1.PersistentVolumeClaim{
		ObjectMeta: metav1.ObjectMeta{Name: "data"},
		Spec: corev1.PersistentVolumeClaimSpec{
			StorageClassName: ptr.To(""), AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce},
			Resources: corev1.VolumeResourceRequirements{Requests: corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("1Gi")}},
		},
	}, metav1.CreateOptions{})
	require.NoError(t, err)
	field := func(path string) *corev1.EnvVarSource {
		return &corev1.EnvVarSource{FieldRef: &corev1.ObjectFieldSelector{FieldPath: path}}
	}
	spec := one(shell, strings.Join([]string{
		`echo "ip=$POD_IP name=$POD_NAME node=$NODE app=$APP full=$FULL secret=$PASSWORD prefixed=$SET_b cpu=$CPU"`,
		`cat "$(VOLUME_my-settings)/renamed"; echo`, `cat "$VOLUME_all/pw"; echo`, `cat "$VOLUME_all/labels"; echo`,
		`test -s "$VOLUME_all/token" && echo token`, `stat -c %a "$VOLUME_all/pw"`,
		`echo kept > "$VOLUME_data/file"; : > "$VOLUME_scratch/file"`,
	}, "\n"))
	spec.RestartPolicy = corev1.RestartPolicyNever
	c := &spec.Containers[0]
	c.Resources.Limits = corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("2")}
	c.EnvFrom = []corev1.EnvFromSource{{Prefix: "SET_", ConfigMapRef: &corev1.ConfigMapEnvSource{LocalObjectReference: corev1.LocalObjectReference{Name: "settings"}}}}
	c.Env = []corev1.EnvVar{
		{Name: "POD_IP", ValueFrom: field("status.podIP")}, {Name: "POD_NAME", ValueFrom: field("metadata.name")},
		{Name: "NODE", ValueFrom: field("spec.nodeName")}, {Name: "APP", ValueFrom: field("metadata.labels['app']")},
		{Name: "FULL", Value: "$(POD_NAME).$(POD_IP)"},
		{Name: "PASSWORD", ValueFrom: &corev1.EnvVarSource{SecretKeyRef: &corev1.SecretKeySelector{LocalObjectReference: corev1.LocalObjectReference{Name: "password"}, Key: "pw"}}},
		{Name: "CPU", ValueFrom: &corev1.EnvVarSource{ResourceFieldRef: &corev1.ResourceFieldSelector{Resource: "limits.cpu"}}},
	}
	spec.Volumes = []corev1.Volume{
		{Name: "my-settings", VolumeSource: corev1.VolumeSource{ConfigMap: &corev1.ConfigMapVolumeSource{
			LocalObjectReference: corev1.LocalObjectReference{Name: "settings"}, Items: []corev1.KeyToPath{{Key: "a.txt", Path: "renamed"}},
		}}},
		{Name: "scratch", VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}},
		{Name: "data", VolumeSource: corev1.VolumeSource{PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: "data"}}},
		{Name: "all", VolumeSource: corev1.VolumeSource{Projected: &corev1.ProjectedVolumeSource{DefaultMode: ptr.To[int32](0o640), Sources: []corev1.VolumeProjection{
			{Secret: &corev1.SecretProjection{LocalObjectReference: corev1.LocalObjectReference{Name: "password"}}},
			{DownwardAPI: &corev1.DownwardAPIProjection{Items: []corev1.DownwardAPIVolumeFile{{Path: "labels", FieldRef: &corev1.ObjectFieldSelector{FieldPath: "metadata.labels"}}}}},
			{ServiceAccountToken: &corev1.ServiceAccountTokenProjection{Path: "token"}},
		}}}},
	}
	s.create("env", spec)
	p := s.phase("env", corev1.PodSucceeded)
	require.Equal(t, strings.Join([]string{
		fmt.Sprintf("ip=%[1]s name=env node=process-0 app=env full=env.%[1]s secret=fake-password prefixed=second cpu=2", p.Status.PodIP),
		"first", "fake-password", `app="env"`, "token", "640", "",
	}, "\n"), s.logs("env", corev1.PodLogOptions{}))
	require.NoError(t, s.kube.CoreV1().Pods(s.name).Delete(t.Context(), "env", metav1.DeleteOptions{}))
	s.ready(0)
	kept, err := os.ReadFile(filepath.Join(data, "file"))
	require.NoError(t, err)
	require.Equal(t, "kept\n", string(kept), "a claim's folder outlives the pod")
}

func TestPodsWaitForWhatTheyNeed(t *testing.T) {
	s := newSpace(t)
	spec := one(shell, `cat "$VOLUME_late/key"`)
	spec.RestartPolicy = corev1.RestartPolicyNever
	spec.Volumes = []corev1.Volume{{Name: "late", VolumeSource: corev1.VolumeSource{Secret: &corev1.SecretVolumeSource{SecretName: "late"}}}}
	s.create("patient", spec)
	s.create("unknown", one("registry.test/nothing:1"))
	s.restarts("unknown", 0, waiting("ErrImageNeverPull"))
	s.eventually("the pod says what it waits for", func(ctx context.Context) error {
		if m := s.pod("patient").Status.Message; !strings.Contains(m, `secrets "late" not found`) {
			return fmt.Errorf("message %q", m)
		}
		return nil
	})
	_, err := s.kube.CoreV1().Secrets(s.name).Create(t.Context(), &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{Name: "late"}, StringData: map[string]string{"key": "value"},
	}, metav1.CreateOptions{})
	require.NoError(t, err)
	require.Empty(t, s.phase("patient", corev1.PodSucceeded).Status.Message)
	require.Equal(t, "value", s.logs("patient", corev1.PodLogOptions{}))
}

func TestInitContainersRunFirstAndCanFailThePod(t *testing.T) {
	s := newSpace(t)
	spec := one(shell, `cat "$VOLUME_shared/order"`)
	spec.RestartPolicy = corev1.RestartPolicyNever
	spec.Volumes = []corev1.Volume{{Name: "shared", VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}}}
	add := func(name, script string) corev1.Container {
		return corev1.Container{Name: name, Image: shell, Args: []string{script}}
	}
	spec.InitContainers = []corev1.Container{add("a", `echo a >> "$VOLUME_shared/order"`), add("b", `echo b >> "$VOLUME_shared/order"`)}
	s.create("good", spec)
	spec.InitContainers[1].Args[0] = "exit 4"
	s.create("bad", spec)
	s.phase("good", corev1.PodSucceeded)
	require.Equal(t, "a\nb\n", s.logs("good", corev1.PodLogOptions{Container: "main"}))
	failed := s.phase("bad", corev1.PodFailed)
	require.EqualValues(t, 4, failed.Status.InitContainerStatuses[1].State.Terminated.ExitCode)
}

func TestMembersFindOneAnotherByName(t *testing.T) {
	s := newSpace(t)
	s.statefulSet(2, func(set *appsv1.StatefulSet) { set.Spec.PodManagementPolicy = appsv1.ParallelPodManagement })
	pods := s.ready(2)
	hosts, err := os.ReadFile(filepath.Join(s.dir, "hosts"))
	require.NoError(t, err)
	for name, p := range pods {
		require.Contains(t, string(hosts), fmt.Sprintf("%s %s.echo.%s.svc.cluster.local ", p.Status.PodIP, name, s.name))
		require.Contains(t, string(hosts), fmt.Sprintf("%s echo.%s.svc.cluster.local ", p.Status.PodIP, s.name))
	}
}

// A controller marks the pods of a node that was away; the node knows better.
func TestNodeInsistsOnItsOwnView(t *testing.T) {
	s := newSpace(t)
	s.create("fine", member(image1).Spec)
	p := s.ready(1)["fine"]
	for i := range p.Status.Conditions {
		if p.Status.Conditions[i].Type == corev1.PodReady {
			p.Status.Conditions[i].Status = corev1.ConditionFalse
		}
	}
	written, err := s.kube.CoreV1().Pods(s.name).UpdateStatus(t.Context(), &p, metav1.UpdateOptions{})
	require.NoError(t, err)
	require.False(t, isReady(*written))
	s.ready(1)
}

func TestNewImageStartsTheContainerAgain(t *testing.T) {
	s := newSpace(t)
	s.create("image", member(image1).Spec)
	before := s.ready(1)["image"]
	_, err := s.kube.CoreV1().Pods(s.name).Patch(t.Context(), "image", types.StrategicMergePatchType,
		[]byte(fmt.Sprintf(`{"spec":{"containers":[{"name":"main","image":%q}]}}`, image2)), metav1.PatchOptions{})
	require.NoError(t, err)
	s.restarts("image", 1, running)
	require.Equal(t, before.UID, s.ready(1)["image"].UID)
	require.Contains(t, s.logs("image", corev1.PodLogOptions{}), "up [2]")
}
