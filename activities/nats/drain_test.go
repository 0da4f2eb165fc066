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

func TestTheNextTryHearsOfEachStateOfWhatIsHeld(t *testing.T) {
	var kept []string
	var refuse error
	next := successor{keep: func(text string) error {
		if refuse == nil {
			kept = append(kept, text)
		}
		return refuse
	}}
	record := Record{AccountID: "A", Name: "requests", State: State{Messages: 3, FirstSeq: 1, LastSeq: 3}}
	hears := func() {
		t.Helper()
		require.NoError(t, next.hears([]Record{record}))
	}
	hears()
	hears()
	require.Len(t, kept, 1, "nothing has changed")
	record.State = State{Messages: 2, FirstSeq: 900, LastSeq: 901}
	refuse = errors.New("the server is away")
	hears()
	refuse = nil
	hears()
	require.Len(t, kept, 2)
	held, err := remembered(nil, kept[1])
	require.NoError(t, err)

	// A restart has emptied it, and it has come further than it was at first.
	now := Stream{AccountID: "A", Name: "requests", settings: settings{Storage: memory, Replicas: 1}, Leader: "nats-0", State: State{Messages: 12, FirstSeq: 4, LastSeq: 15}}
	lost, _ := emptied(View{Streams: []Stream{now}}, held)
	require.Len(t, lost, 1)
}
