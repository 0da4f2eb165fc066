package tensorfusion

import (
	"slices"
	"testing"

	"github.com/stretchr/testify/assert"
	"go.temporal.io/sdk/activity"
	"go.temporal.io/sdk/worker"
)

type names struct {
	worker.Registry
	seen []string
}

func (n *names) RegisterActivityWithOptions(_ any, o activity.RegisterOptions) {
	n.seen = append(n.seen, o.Name)
}

func TestEveryActivityOfTheContractIsRegistered(t *testing.T) {
	var n names
	(&Activities{}).Register(&n)
	slices.Sort(n.seen)
	assert.Equal(t, []string{
		ApplyCRDsActivity, AwaitControllerActivity, BackupActivity, DriftActivity, DiffActivity, EvictClientsActivity, GPUHostsActivity, HoldActivity,
		RevisionActivity, ClientsActivity, ObservePoolActivity, WorkersActivity, PreflightActivity, ReplaceActivity, RollWorkersActivity,
		CanaryJobActivity, PolicyActivity, TenantsActivity, ReleaseActivity, VerifyActivity, ReceiptActivity,
	}, n.seen)
}

func TestDevicesAreCountedInEitherForm(t *testing.T) {
	assert.Equal(t, 2, countDevices([]byte(`[{},{}]`)))
	assert.Equal(t, 1, countDevices([]byte(`{"devices":[{}]}`)))
	assert.Equal(t, 1, countDevices([]byte(`{"data":[{}]}`)))
	assert.Equal(t, -1, countDevices([]byte(`{}`)))
}
