package cassandra

import (
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/refit-run/refit/activities/finding"
	"github.com/refit-run/refit/activities/kube"
)

// A look before a window or a pause says nothing of the members after it.
func TestNothingIsRaisedWhileAMemberIsAway(t *testing.T) {
	whole, err := os.ReadFile("testdata/status-3.txt")
	require.NoError(t, err)
	s := newScripted(t, 3)
	c, err := s.acts.open(t.Context(), s.place)
	require.NoError(t, err)
	defer c.close()
	for name, status := range map[string]string{
		"":                               string(whole),
		"DN as cassandra-0 sees it":      strings.Replace(string(whole), "\nUN ", "\nDN ", 1),
		"found 2 members of 3 pods":      string(whole[:strings.LastIndex(string(whole), "\nUN ")+1]),
		"expected all members up before": strings.ReplaceAll(string(whole), "\nUN ", "\nUJ "),
	} {
		s.answer = func(_, command string) (kube.Exit, error) {
			require.Equal(t, "status", command)
			return kube.Exit{Stdout: status}, nil
		}
		err := c.together(t.Context())
		if name == "" {
			require.NoError(t, err)
			continue
		}
		require.ErrorContains(t, err, name)
		_, class, told := finding.Of(err)
		require.True(t, told && class == finding.Wait, "it may come back")
	}

	pods := s.client.Typed.CoreV1().Pods(s.place.Namespace)
	pod, err := pods.Get(t.Context(), "cassandra-2", metav1.GetOptions{})
	require.NoError(t, err)
	pod.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionFalse}}
	_, err = pods.UpdateStatus(t.Context(), pod, metav1.UpdateOptions{})
	require.NoError(t, err)
	s.ran = nil
	require.ErrorContains(t, c.together(t.Context()), "Cassandra member cassandra-2")
	require.Empty(t, s.ran, "Kubernetes knows enough")
}
