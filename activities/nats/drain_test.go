package nats

import (
	"encoding/json"
	"errors"
	"testing"

	"github.com/stretchr/testify/require"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/kubernetes/fake"
	ktesting "k8s.io/client-go/testing"

	"github.com/refit-run/refit/activities/finding"
	"github.com/refit-run/refit/activities/kube"
)

func TestWhatATryOfADrainHasSeenIsKnownToTheNext(t *testing.T) {
	_, held := emptied(Judge(recorded(t, "single")), nil)
	kept, err := json.Marshal(held)
	require.NoError(t, err)
	got, err := remembered(nil, string(kept))
	require.NoError(t, err)
	require.Equal(t, held, got)
	got, err = remembered(held, "")
	require.NoError(t, err)
	require.Equal(t, held, got, "no try before has kept anything: what the attempt before has seen")
}

func TestAListOfPodsThatFailsIsATroubleOfThatLookAlone(t *testing.T) {
	refuse := error(apierrors.NewServiceUnavailable("the API server restarts"))
	api := fake.NewClientset()
	api.PrependReactor("list", "pods", func(ktesting.Action) (bool, runtime.Object, error) { return true, nil, refuse })
	l := &looker{a: &Activities{}, client: &kube.Client{Typed: api}, place: Place{Namespace: "nats-system"}}
	answers, err := l.look(t.Context())
	require.NoError(t, err)
	v := Judge(answers)
	require.Len(t, v.Troubles, 1)
	require.Equal(t, "NATS servers", v.Troubles[0].Object)
	require.Contains(t, v.Troubles[0].Found, "the API server restarts")
	held := []Record{{Account: "A", AccountID: "A", Name: "S", State: State{Messages: 4, LastSeq: 4}}}
	lost, now := emptied(v, held)
	require.Empty(t, lost)
	require.Equal(t, held, now, "what it held is known still")

	refuse = apierrors.NewForbidden(schema.GroupResource{Resource: "pods"}, "", errors.New("no such right"))
	_, err = l.look(t.Context())
	require.ErrorContains(t, err, "no such right", "that needs a person at once")
}

func TestALossIsFoundAgainUntilItsVerdictWasHeard(t *testing.T) {
	lost := []finding.Finding{{Row: "N124"}}
	require.True(t, keeps(nil, []string{"A/orders"}, nil))
	require.False(t, keeps(nil, []string{"A/orders"}, []string{"A/orders"}))
	require.False(t, keeps(lost, nil, []string{"A/orders"}), "kept, it would be drained for the next try")
}
