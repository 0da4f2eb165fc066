package tensorfusion

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/refit-run/refit/workflows/protocol"
)

// P10: without the hold a new controller may delete every hypervisor at once.
func TestAHoldThatCannotBeHadParks(t *testing.T) {
	i := newInstallation(t)
	i.unheld = 1
	h := newHarness(t, i)
	h.at(time.Minute, func() {
		assert.Contains(t, h.waits(protocol.WaitParked, "hold").Found, "shows the old policy")
		h.answer(protocol.Retry)
	})
	r := h.upgrade(upgradeInput())
	assert.Equal(t, protocol.OutcomeDone, r.Outcome)
	assert.NotContains(t, strings.Join(r.Warnings, "\n"), "P10")
}

func TestAPlanThatAcceptsTheOutageGoesOnWithoutTheHoldUntilTheNewControllerLeads(t *testing.T) {
	i := newInstallation(t)
	i.unheld = 3 // the hold, before the CRDs, before Helm
	h := newHarness(t, i)
	in := upgradeInput()
	in.Acknowledge = append(in.Acknowledge, "P10")
	r := h.upgrade(in)
	require.Equal(t, protocol.OutcomeDone, r.Outcome)
	assert.Contains(t, r.Acknowledged, "P10")
	assert.Contains(t, strings.Join(r.Warnings, "\n"), "every hypervisor may be replaced at once, as the plan acknowledges")
	require.Len(t, i.policies, 1)
	assert.Equal(t, asFound, i.policies[0].Before, "the policy as found comes back")

	require.Greater(t, len(i.holds), 4)
	assert.True(t, i.holds[2].Outage)
	assert.False(t, i.holds[3].Outage, "the rollouts begin under a hold that is had")
	last := len(i.drifts) - 1
	for n, d := range i.drifts[:last] {
		assert.Equal(t, []string{"gpu-1"}, d.Planned, "comparison %d: the controller may have replaced it", n+1)
	}
	assert.Empty(t, i.drifts[last].Planned, "after the policy every change is one too many")
}

// The outage that was accepted ends with the old controller.
func TestTheAcceptedOutageDoesNotCoverTheRollouts(t *testing.T) {
	i := newInstallation(t)
	i.unheld = 4
	h := newHarness(t, i)
	in := upgradeInput()
	in.Acknowledge = append(in.Acknowledge, "P10")
	h.at(time.Minute, func() {
		assert.Contains(t, h.waits(protocol.WaitParked, "helm").Found, "shows the old policy")
		h.answer(protocol.Retry)
	})
	assert.Equal(t, protocol.OutcomeDone, h.upgrade(in).Outcome)
}
