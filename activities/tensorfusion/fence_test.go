package tensorfusion

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/refit-run/refit/activities/finding"
	"github.com/refit-run/refit/activities/lease"
)

// TestNothingIsWrittenOnceAnotherRunTookTheLease runs every activity that
// writes, as the run that lost its Lease.
func TestNothingIsWrittenOnceAnotherRunTookTheLease(t *testing.T) {
	i := install(t)
	i.addNode("a")
	hosts := i.oldHosts("a")
	i.scope.Holder = i.holder
	leases := i.admin.Typed.CoordinationV1().Leases(i.scope.Release.Namespace)
	before := i.policy()
	for _, c := range []struct {
		found string
		lose  func() error
	}{
		{"held by", func() error {
			l, err := leases.Get(t.Context(), lease.Name(i.scope.Release.Name), metav1.GetOptions{})
			require.NoError(t, err)
			other := "test/default/upgrade/run-2"
			l.Spec.HolderIdentity = &other
			_, err = leases.Update(t.Context(), l, metav1.UpdateOptions{})
			return err
		}},
		{"no Lease", func() error {
			return leases.Delete(t.Context(), lease.Name(i.scope.Release.Name), metav1.DeleteOptions{})
		}},
	} {
		require.NoError(t, c.lose())
		for name, call := range map[string]func() error{
			HoldActivity: func() error {
				_, err := i.activities.Hold(t.Context(), HoldRequest{Scope: i.scope, Limit: time.Second})
				return err
			},
			ReplaceActivity: func() error {
				_, err := i.activities.ReplaceHypervisors(t.Context(), ReplaceRequest{Scope: i.scope, Pool: i.pool, Hosts: hosts, Limit: time.Second})
				return err
			},
			ApplyCRDsActivity: func() error {
				_, err := i.activities.ApplyCRDs(t.Context(), CRDsRequest{Scope: i.scope, Intent: i.intent(), Limit: time.Second})
				return err
			},
			AwaitControllerActivity: func() error {
				_, err := i.activities.AwaitController(t.Context(), ControllerRequest{Scope: i.scope, Intent: i.intent(), Limit: time.Second})
				return err
			},
			PolicyActivity: func() error {
				_, err := i.activities.SetPolicy(t.Context(), PolicyRequest{Scope: i.scope, Mode: PolicyRestore, Limit: time.Second})
				return err
			},
			RollWorkersActivity: func() error {
				_, err := i.activities.RollWorkers(t.Context(), WorkersRequest{Scope: i.scope, Pool: i.pool, Stall: time.Second})
				return err
			},
			EvictClientsActivity: func() error {
				_, err := i.activities.EvictClients(t.Context(), ClientsRequest{Scope: i.scope, Pool: i.pool, Limit: time.Second})
				return err
			},
			CanaryJobActivity: func() error {
				_, err := i.activities.RunCanaryJob(t.Context(), CanaryJobRequest{Scope: i.scope, Pool: i.pool, Limit: time.Second})
				return err
			},
		} {
			err := call()
			f, class, ok := finding.Of(err)
			require.True(t, ok, "%s: %v", name, err)
			require.Equal(t, finding.Stop, class, name)
			require.Contains(t, f.Object, "Lease ", name)
			require.Contains(t, f.Found, c.found, name)
			require.NotEmpty(t, f.Next, name)
		}
		require.Equal(t, before, i.policy())
	}
	pods, err := i.admin.Typed.CoreV1().Pods(i.scope.Release.Namespace).List(t.Context(), metav1.ListOptions{})
	require.NoError(t, err)
	require.Len(t, pods.Items, 1)
	require.Equal(t, hosts[0].UID, string(pods.Items[0].UID))
	require.Nil(t, pods.Items[0].DeletionTimestamp)

	// What happened is recorded all the same.
	_, err = i.activities.WriteReceipt(t.Context(), ReceiptRequest{Scope: i.scope, Key: "run", JSON: []byte("{}")})
	require.NoError(t, err)
}

func TestTheHolderOfTheLeaseWorks(t *testing.T) {
	i := install(t)
	i.scope.Holder = i.holder
	i.control()
	_, err := i.activities.Hold(t.Context(), HoldRequest{Scope: i.scope, Limit: 30 * time.Second})
	require.NoError(t, err)
	require.True(t, i.policy().held())
}
