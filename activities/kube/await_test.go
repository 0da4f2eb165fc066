package kube_test

import (
	"context"
	"fmt"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"

	"github.com/refit-run/refit/activities/finding"
	"github.com/refit-run/refit/activities/internal/apiservertest"
	"github.com/refit-run/refit/activities/kube"
)

func TestMain(m *testing.M) { os.Exit(apiservertest.Main(m)) }

var configMaps = schema.GroupVersionResource{Version: "v1", Resource: "configmaps"}

func configMap(namespace, name, value string) *corev1.ConfigMap {
	return &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: namespace}, Data: map[string]string{"state": value}}
}

func state(objects kube.Objects) string {
	if len(objects[0]) == 0 {
		return "missing"
	}
	value, _, _ := unstructured.NestedString(objects[0][0].(*unstructured.Unstructured).Object, "data", "state")
	return value
}

func TestAwaitSeesWhatIsThereAndWhatComes(t *testing.T) {
	server := apiservertest.Shared(t)
	c, ns := server.Client(t), server.Namespace(t)
	seen := make(chan string, 10)
	done := make(chan error, 1)
	go func() {
		done <- c.Await(t.Context(), kube.Wait{What: "the state", Limit: 30 * time.Second}, func(o kube.Objects) (bool, string, error) {
			now := state(o)
			seen <- now
			return now == "ready", now, nil
		}, kube.Selection{Resource: configMaps, Namespace: ns, Name: "a"})
	}()
	require.Equal(t, "missing", <-seen)
	_, err := c.Typed.CoreV1().ConfigMaps(ns).Create(t.Context(), configMap(ns, "a", "starting"), metav1.CreateOptions{})
	require.NoError(t, err)
	require.Equal(t, "starting", <-seen)
	_, err = c.Typed.CoreV1().ConfigMaps(ns).Update(t.Context(), configMap(ns, "a", "ready"), metav1.UpdateOptions{})
	require.NoError(t, err)
	require.Equal(t, "ready", <-seen)
	require.NoError(t, <-done)
}

// A hundred hosts that change at once must not be looked at a thousand times.
func TestAwaitLooksAtManyChangesTogether(t *testing.T) {
	server := apiservertest.Shared(t)
	c, ns := server.Client(t), server.Namespace(t)
	const changes = 60
	began, looks := time.Now(), 0
	go func() {
		for i := range changes {
			if _, err := c.Typed.CoreV1().ConfigMaps(ns).Create(t.Context(), configMap(ns, fmt.Sprintf("n-%02d", i), ""), metav1.CreateOptions{}); err != nil {
				t.Error(err)
			}
		}
	}()
	err := c.Await(t.Context(), kube.Wait{What: "all of them", Limit: time.Minute}, func(o kube.Objects) (bool, string, error) {
		looks++
		n := 0
		for _, u := range o[0] {
			if strings.HasPrefix(u.GetName(), "n-") {
				n++
			}
		}
		return n == changes, fmt.Sprint(n), nil
	}, kube.Selection{Resource: configMaps, Namespace: ns})
	require.NoError(t, err)
	require.LessOrEqual(t, looks, 1+int(time.Since(began)/(100*time.Millisecond)))
}

func TestAwaitDeadlineSaysWhatWasFoundLast(t *testing.T) {
	server := apiservertest.Shared(t)
	c, ns := server.Client(t), server.Namespace(t)
	var beats atomic.Int32
	err := c.Await(t.Context(), kube.Wait{
		What: "ConfigMap a", Limit: 600 * time.Millisecond, Every: 50 * time.Millisecond, Next: "make it",
		Heartbeat: func(string) { beats.Add(1) },
	}, func(o kube.Objects) (bool, string, error) { return false, state(o), nil }, kube.Selection{Resource: configMaps, Namespace: ns, Name: "a"})
	f, class, ok := finding.Of(err)
	require.True(t, ok, err)
	require.Equal(t, finding.Stop, class)
	require.Equal(t, finding.Finding{Object: "ConfigMap a", Expected: "within 600ms", Found: "missing", Next: "make it"}, f)
	require.Greater(t, beats.Load(), int32(3))
}

func TestAwaitEndsWithTheCancellation(t *testing.T) {
	server := apiservertest.Shared(t)
	c, ns := server.Client(t), server.Namespace(t)
	ctx, cancel := context.WithCancel(t.Context())
	err := c.Await(ctx, kube.Wait{What: "nothing"}, func(o kube.Objects) (bool, string, error) { cancel(); return false, "", nil },
		kube.Selection{Resource: configMaps, Namespace: ns})
	require.ErrorIs(t, err, context.Canceled)
}

func TestAwaitStopsWhenAPersonMustMend(t *testing.T) {
	server := apiservertest.Shared(t)
	c, ns := server.Client(t), server.Namespace(t)
	err := c.Await(t.Context(), kube.Wait{What: "gadgets", Limit: 20 * time.Second},
		func(kube.Objects) (bool, string, error) { return true, "", nil },
		kube.Selection{Resource: schema.GroupVersionResource{Group: "example.com", Version: "v1", Resource: "gadgets"}, Namespace: ns})
	_, class, ok := finding.Of(err)
	require.True(t, ok, err)
	require.Equal(t, finding.Stop, class)
	require.NotContains(t, err.Error(), "within")
}

// The API server goes away for as long as it takes to start it again, with a
// change made in between that no watch event tells of.
func TestAwaitGoesOnAfterTheAPIServerWasAway(t *testing.T) {
	server := apiservertest.Start(t)
	c, ns := server.Client(t), server.Namespace(t)
	_, err := c.Typed.CoreV1().ConfigMaps(ns).Create(t.Context(), configMap(ns, "a", "before"), metav1.CreateOptions{})
	require.NoError(t, err)
	listed := make(chan struct{})
	done := make(chan error, 1)
	go func() {
		first := true
		done <- c.Await(t.Context(), kube.Wait{What: "ConfigMap a", Limit: 90 * time.Second}, func(o kube.Objects) (bool, string, error) {
			if first {
				first = false
				close(listed)
			}
			return state(o) == "after", state(o), nil
		}, kube.Selection{Resource: configMaps, Namespace: ns, Name: "a"})
	}()
	<-listed
	server.StopAPI()
	require.NoError(t, server.StartAPI())
	other := server.Client(t)
	require.Eventually(t, func() bool {
		_, err := other.Typed.CoreV1().ConfigMaps(ns).Update(t.Context(), configMap(ns, "a", "after"), metav1.UpdateOptions{})
		return err == nil
	}, 30*time.Second, 100*time.Millisecond)
	require.NoError(t, <-done)
}

func TestApplyIsHarmlessTwiceAndTellsOwnersApart(t *testing.T) {
	server := apiservertest.Shared(t)
	c, ns := server.Client(t), server.Namespace(t)
	obj := func(value string) *unstructured.Unstructured {
		return &unstructured.Unstructured{Object: map[string]any{
			"apiVersion": "v1", "kind": "ConfigMap", "metadata": map[string]any{"name": "a", "namespace": ns}, "data": map[string]any{"state": value},
		}}
	}
	dry, err := c.Apply(t.Context(), obj("one"), "refit", false, true)
	require.NoError(t, err)
	require.Equal(t, "a", dry.GetName())
	_, err = c.Typed.CoreV1().ConfigMaps(ns).Get(t.Context(), "a", metav1.GetOptions{})
	require.True(t, apierrors.IsNotFound(err), "a dry run stores nothing")

	first, err := c.Apply(t.Context(), obj("one"), "refit", false, false)
	require.NoError(t, err)
	// The reply was lost: the same apply again changes nothing.
	second, err := c.Apply(t.Context(), obj("one"), "refit", false, false)
	require.NoError(t, err)
	require.Equal(t, first.GetResourceVersion(), second.GetResourceVersion())

	_, err = c.Apply(t.Context(), obj("two"), "somebody-else", false, false)
	require.Equal(t, finding.Retry, kube.Class(err), "a conflict of owners: %v", err)
	taken, err := c.Apply(t.Context(), obj("two"), "somebody-else", true, false)
	require.NoError(t, err)
	require.Equal(t, "two", taken.Object["data"].(map[string]any)["state"])
}

// A delete with a UID precondition whose reply was lost is sent again after
// the object came back under the same name: the new one must survive.
func TestRepeatedDeleteSparesTheSuccessor(t *testing.T) {
	server := apiservertest.Shared(t)
	c, ns := server.Client(t), server.Namespace(t)
	maps := c.Typed.CoreV1().ConfigMaps(ns)
	old, err := maps.Create(t.Context(), configMap(ns, "a", "old"), metav1.CreateOptions{})
	require.NoError(t, err)
	remove := func(uid types.UID) error {
		return maps.Delete(t.Context(), "a", metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: &uid}})
	}
	require.NoError(t, remove(old.UID))
	_, err = maps.Create(t.Context(), configMap(ns, "a", "new"), metav1.CreateOptions{})
	require.NoError(t, err)
	require.True(t, apierrors.IsConflict(remove(old.UID)))
	now, err := maps.Get(t.Context(), "a", metav1.GetOptions{})
	require.NoError(t, err)
	require.Equal(t, "new", now.Data["state"])
}

func TestKubeconfigOfAConnectionReachesTheSameServer(t *testing.T) {
	server := apiservertest.Shared(t)
	target := server.Target(t, "prod")
	c, err := server.Clusters(t, "prod").Connect(t.Context(), target)
	require.NoError(t, err)
	for name, client := range map[string]*kube.Client{"of a named cluster": c, "of a bare configuration": server.Client(t)} {
		data, err := client.Kubeconfig()
		require.NoError(t, err, name)
		require.False(t, strings.Contains(string(data), server.Kubeconfig), "%s: must not point at a file", name)
	}
}
