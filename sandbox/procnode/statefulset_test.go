package procnode_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/refit-run/refit/sandbox/procnode/proc"
)

func TestMembersComeUpOneAfterTheOther(t *testing.T) {
	s := newSpace(t)
	began := time.Now()
	s.statefulSet(3, nil)
	s.eventually("3 members are Ready", func(ctx context.Context) error {
		pods, err := s.pods(ctx)
		if err != nil {
			return err
		}
		for i := range 2 {
			if _, there := pods[fmt.Sprintf("echo-%d", i+1)]; there {
				require.True(t, isReady(pods[fmt.Sprintf("echo-%d", i)]), "member %d exists before member %d is Ready", i+1, i)
			}
		}
		if !isReady(pods["echo-2"]) {
			return fmt.Errorf("found %d members", len(pods))
		}
		return nil
	})
	t.Logf("3 members were Ready one after the other in %s", time.Since(began))
	seen := map[string]bool{}
	for _, p := range s.ready(3) {
		require.False(t, seen[p.Status.PodIP], "every member has its own address")
		seen[p.Status.PodIP] = true
	}
}

func TestDeletedMemberComesBackAsAnotherPod(t *testing.T) {
	s := newSpace(t)
	s.statefulSet(2, nil)
	before := s.ready(2)
	began := time.Now()
	require.NoError(t, s.kube.CoreV1().Pods(s.name).Delete(t.Context(), "echo-1", metav1.DeleteOptions{}))
	s.eventually("the next echo-1 is Ready", func(ctx context.Context) error {
		p, err := s.kube.CoreV1().Pods(s.name).Get(ctx, "echo-1", metav1.GetOptions{})
		if err != nil {
			return err
		}
		if p.UID == before["echo-1"].UID {
			return fmt.Errorf("still the old one")
		}
		// The object of the old pod goes only when its processes have gone.
		require.Empty(t, processes(before["echo-1"].UID))
		if !isReady(*p) {
			return fmt.Errorf("not Ready")
		}
		return nil
	})
	t.Logf("deleted to Ready in %s", time.Since(began))
	after := s.ready(2)
	require.NotEqual(t, before["echo-1"].Status.PodIP, after["echo-1"].Status.PodIP, "an address rests before it is used again")
	require.Equal(t, before["echo-0"].UID, after["echo-0"].UID)
}

func processes(uid types.UID) []int { return proc.Marked("REFIT_SANDBOX_POD", string(uid)) }

func (s *space) setImage(image string) {
	s.Helper()
	patch := fmt.Sprintf(`{"spec":{"template":{"spec":{"containers":[{"name":"main","image":%q}]}}}}`, image)
	_, err := s.kube.AppsV1().StatefulSets(s.name).Patch(s.Context(), "echo", types.StrategicMergePatchType, []byte(patch), metav1.PatchOptions{})
	require.NoError(s, err)
}

func TestOnDeleteReplacesOnlyWhatIsDeleted(t *testing.T) {
	s := newSpace(t)
	s.statefulSet(2, func(set *appsv1.StatefulSet) {
		set.Spec.UpdateStrategy.Type = appsv1.OnDeleteStatefulSetStrategyType
		set.Spec.PodManagementPolicy = appsv1.ParallelPodManagement
	})
	before := s.ready(2)
	s.setImage(image2)
	s.eventually("the update is known", func(ctx context.Context) error {
		set, err := s.kube.AppsV1().StatefulSets(s.name).Get(ctx, "echo", metav1.GetOptions{})
		if err == nil && set.Status.UpdateRevision == set.Status.CurrentRevision {
			err = fmt.Errorf("one revision only")
		}
		return err
	})
	require.NoError(t, s.kube.CoreV1().Pods(s.name).Delete(t.Context(), "echo-0", metav1.DeleteOptions{}))
	s.eventually("echo-0 is new", func(ctx context.Context) error {
		p, err := s.kube.CoreV1().Pods(s.name).Get(ctx, "echo-0", metav1.GetOptions{})
		if err == nil && (p.UID == before["echo-0"].UID || !isReady(*p)) {
			err = fmt.Errorf("not the new one, or not Ready")
		}
		return err
	})
	after := s.ready(2)
	require.Equal(t, image2, after["echo-0"].Spec.Containers[0].Image)
	require.Contains(t, s.logs("echo-0", corev1.PodLogOptions{}), "up [2]")
	require.Equal(t, before["echo-1"].UID, after["echo-1"].UID)
}

func TestRollingUpdateReplacesEveryMemberFromTheLast(t *testing.T) {
	s := newSpace(t)
	s.statefulSet(3, nil)
	before := s.ready(3)
	began := time.Now()
	s.setImage(image2)
	s.eventually("all members are new", func(ctx context.Context) error {
		pods, err := s.pods(ctx)
		if err != nil {
			return err
		}
		for i := range 3 {
			name := fmt.Sprintf("echo-%d", i)
			if pods[name].UID == before[name].UID || !isReady(pods[name]) {
				return fmt.Errorf("%s is not new and Ready", name)
			}
			if i > 0 && pods[fmt.Sprintf("echo-%d", i-1)].UID != before[fmt.Sprintf("echo-%d", i-1)].UID {
				require.NotEqual(t, before[name].UID, pods[name].UID, "member %d was replaced before member %d", i-1, i)
			}
		}
		return nil
	})
	t.Logf("rolled 3 members in %s", time.Since(began))
}

// A crash of the node is none of its pods': the next node process finds them.
func TestPodsOutliveTheNodeProcess(t *testing.T) {
	s := newSpace(t)
	s.statefulSet(2, nil)
	before := s.ready(2)
	running := map[types.UID][]int{}
	for _, p := range before {
		running[p.UID] = processes(p.UID)
		require.Len(t, running[p.UID], 1)
	}
	pid := s.node.Status().PID
	require.NoError(t, s.node.Kill())
	s.eventually("another node process runs", func(context.Context) error {
		if st := s.node.Status(); !st.Running || st.PID == pid {
			return fmt.Errorf("not yet")
		}
		return nil
	})
	// Exec shows that the new process serves the old pods.
	s.eventually("exec is served", func(ctx context.Context) error {
		return s.kube.CoreV1().RESTClient().Get().Resource("pods").Namespace(s.name).Name("echo-0").SubResource("log").Do(ctx).Error()
	})
	out, _, code := s.exec(false, "echo-0", nil, "/bin/sh", "-c", "echo $HOSTNAME")
	require.Equal(t, "echo-0\n", out)
	require.Zero(t, code)
	after := s.ready(2)
	for name, p := range after {
		require.Equal(t, before[name].UID, p.UID)
		require.Equal(t, before[name].Status.PodIP, p.Status.PodIP)
		require.Zero(t, p.Status.ContainerStatuses[0].RestartCount)
		require.Equal(t, running[p.UID], processes(p.UID), "the same processes")
	}
	// What it took over, it watches: a death is seen.
	s.kill(after["echo-1"])
	s.eventually("echo-1 was started again", func(ctx context.Context) error {
		p, err := s.kube.CoreV1().Pods(s.name).Get(ctx, "echo-1", metav1.GetOptions{})
		if err == nil && (p.Status.ContainerStatuses[0].RestartCount != 1 || !isReady(*p)) {
			err = fmt.Errorf("restarts %d", p.Status.ContainerStatuses[0].RestartCount)
		}
		return err
	})
	require.EqualValues(t, 255, s.pod("echo-1").Status.ContainerStatuses[0].LastTerminationState.Terminated.ExitCode)
	// And it takes new ones, at addresses that are free.
	s.create("another", member(image1).Spec)
	require.Len(t, s.ready(3), 3)
	require.NotContains(t, []string{after["echo-0"].Status.PodIP, after["echo-1"].Status.PodIP}, s.pod("another").Status.PodIP)
}

// What is to run once, as a hook of a chart, does not run twice because nobody
// saw its end.
func TestAPodThatIsNeverRestartedAndEndedWhileTheNodeWasAwayHasFailed(t *testing.T) {
	s := newSpace(t)
	once := member(image1).Spec
	once.RestartPolicy = corev1.RestartPolicyNever
	s.create("once", once)
	s.create("again", member(image1).Spec)
	pods := s.ready(2)
	s.node.Suspend()
	s.kill(pods["once"])
	s.kill(pods["again"])
	require.NoError(t, s.node.Start())
	over := s.phase("once", corev1.PodFailed).Status.ContainerStatuses[0]
	require.Zero(t, over.RestartCount)
	require.EqualValues(t, 255, over.State.Terminated.ExitCode)
	require.Empty(t, processes(pods["once"].UID))
	s.restarts("again", 1, running)
}

// A pod that was deleted while the node was away ends when it is back.
func TestDeletionsWhileTheNodeWasAwayAreSeen(t *testing.T) {
	s := newSpace(t)
	s.create("gone", member(image1).Spec)
	s.create("forced", member(image1).Spec)
	pods := s.ready(2)
	s.node.Suspend()
	zero := int64(0)
	require.NoError(t, s.kube.CoreV1().Pods(s.name).Delete(t.Context(), "gone", metav1.DeleteOptions{}))
	require.NoError(t, s.kube.CoreV1().Pods(s.name).Delete(t.Context(), "forced", metav1.DeleteOptions{GracePeriodSeconds: &zero}))
	require.NotEmpty(t, processes(pods["gone"].UID))
	require.NoError(t, s.node.Start())
	s.eventually("both are gone", func(ctx context.Context) error {
		left, err := s.pods(ctx)
		if err == nil && len(left)+len(processes(pods["gone"].UID))+len(processes(pods["forced"].UID)) > 0 {
			err = fmt.Errorf("found %d pods", len(left))
		}
		return err
	})
}
