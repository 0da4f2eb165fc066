package helm

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/refit-run/refit/activities/finding"
	"github.com/refit-run/refit/activities/mask"
)

func (w *world) diff(values map[string]any, pins []Pin, m *mask.Masker) ([]Change, error) {
	current, err := Current(w.Context(), w.c, w.namespace, "tf")
	require.NoError(w, err)
	target, err := Render(w.Context(), w.c, RenderRequest{Namespace: w.namespace, Release: "tf", Revision: 2, Chart: gadgetChart(w.T, "2.0.0"), Values: values, Pins: pins})
	require.NoError(w, err)
	return Diff(w.Context(), w.c, DiffRequest{Namespace: w.namespace, Release: "tf", Current: current.Manifest, Target: target.Manifest, Masker: m})
}

func byObject(changes []Change) map[string]Change {
	m := map[string]Change{}
	for _, c := range changes {
		m[c.Action+" "+strings.ReplaceAll(c.Object(), c.Namespace+"/", "")] = c
	}
	return m
}

func TestDiffIsWhatTheUpgradeDoes(t *testing.T) {
	w := newWorld(t)
	// A live edit that a two-way merge keeps as long as the array is not
	// touched, and undoes when it is.
	w.patchGadget(`{"spec":{"note":"edited"}}`)
	r := w.request()
	changes, err := w.diff(r.Values, r.Pins, nil)
	require.NoError(t, err)
	got := byObject(changes)
	require.Len(t, got, 5, "%v", got)
	gadget := got["change Gadget/tf"].UnifiedDiff
	require.Contains(t, gadget, "-      auto: true\n+      auto: false\n")
	require.Contains(t, gadget, "+  - image: registry.example/gadget:2.0.0\n")
	require.NotContains(t, gadget, "-  note")
	require.Contains(t, got["change Deployment/tf"].UnifiedDiff, "+          value: 2.0.0\n")
	require.Contains(t, got["change ConfigMap/tf"].UnifiedDiff, "+  image: registry.example/gadget:2.0.0\n")
	require.Contains(t, got["create ConfigMap/added"].UnifiedDiff, "+  since: \"2\"\n")
	require.Contains(t, got["delete ConfigMap/removed"].UnifiedDiff, "-  until: \"1\"\n")
	require.False(t, w.exists("ConfigMap", "added"), "a diff stores nothing")
	require.Equal(t, true, w.gadget()["pools"].([]any)[0].(map[string]any)["policy"].(map[string]any)["auto"])

	_, err = Upgrade(t.Context(), w.c, r)
	require.NoError(t, err)
	require.Equal(t, "edited", w.gadget()["note"])
	changes, err = w.diff(r.Values, r.Pins, nil)
	require.NoError(t, err)
	require.Empty(t, changes, "after the upgrade nothing is left to change")
}

func TestUnchangedArrayKeepsALiveEdit(t *testing.T) {
	w := newWorld(t)
	w.patchGadget(`{"spec":{"pools":[{"name":"pool-0","policy":{"auto":false}}]}}`)
	changes, err := w.diff(map[string]any{"token": planted}, nil, nil)
	require.NoError(t, err)
	require.NotContains(t, byObject(changes), "change Gadget/tf")
	changes, err = w.diff(map[string]any{"token": planted, "pools": 3}, nil, nil)
	require.NoError(t, err)
	require.Contains(t, byObject(changes)["change Gadget/tf"].UnifiedDiff, "+      auto: true\n", "one pool more rewrites the whole array")
}

// Secret data, a Deployment's environment, a ConfigMap and the values hold it:
// neither the old nor the new value is ever shown, but that it changes is.
func TestPlantedSecretNeverAppearsInADiff(t *testing.T) {
	w := newWorld(t)
	_, err := w.c.Typed.CoreV1().ConfigMaps(w.namespace).Patch(t.Context(), "tf", "application/merge-patch+json",
		[]byte(`{"metadata":{"annotations":{"kubectl.kubernetes.io/last-applied-configuration":"{\"token\":\"`+planted+`\"}"}}}`), metav1.PatchOptions{})
	require.NoError(t, err)
	values := map[string]any{"token": rotated, "image": "registry.example/gadget:" + planted}
	changes, err := w.diff(values, nil, mask.FromValues(values))
	require.NoError(t, err)
	got := byObject(changes)
	var all strings.Builder
	for _, c := range changes {
		all.WriteString(c.UnifiedDiff + c.Refused + c.Object())
	}
	for _, secret := range []string{planted, rotated, "fake-planted", "fake-rotated", "ZmFrZS1wbGFudGVk", "ZmFrZS1yb3RhdGVk", "ZmFrZS1pbnN0YWxs"} {
		require.NotContains(t, all.String(), secret)
	}
	require.Contains(t, got["change Deployment/tf"].UnifiedDiff, "-          value: "+mask.Replacement+"\n+          value: "+mask.Replacement+"\n")
	require.Contains(t, got["change Secret/token"].UnifiedDiff, "-  token: '"+mask.Replacement+" (before)'\n+  token: '"+mask.Replacement+" (after)'\n")
	require.NotContains(t, got, "delete Secret/credentials", "lookup left it out of the manifest, keep protects it")
}

// What a person added to live objects is in no Secret and in no values; Helm
// keeps it, so the diff has it as context.
func TestASecretThatAPersonAddedToALiveObjectNeverAppearsInADiff(t *testing.T) {
	w := newWorld(t)
	_, err := w.c.Typed.CoreV1().ConfigMaps(w.namespace).Patch(t.Context(), "tf", "application/merge-patch+json",
		[]byte(`{"metadata":{"annotations":{"example.com/api-token":"fake-by-hand-annotation"}},"data":{"db-password":"fake-by-hand-key"}}`), metav1.PatchOptions{})
	require.NoError(t, err)
	_, err = w.c.Typed.AppsV1().Deployments(w.namespace).Patch(t.Context(), "tf", "application/strategic-merge-patch+json",
		[]byte(`{"spec":{"template":{"spec":{"containers":[{"name":"main","env":[{"name":"DB_PASSWORD","value":"fake-by-hand-variable"}]}]}}}}`), metav1.PatchOptions{})
	require.NoError(t, err)
	changes, err := w.diff(map[string]any{"token": rotated, "image": "registry.example/gadget:2.0.0"}, nil, nil)
	require.NoError(t, err)
	got := byObject(changes)
	for _, object := range []string{"change ConfigMap/tf", "change Deployment/tf"} {
		require.Contains(t, got[object].UnifiedDiff, mask.Replacement, object)
		require.NotContains(t, got[object].UnifiedDiff, "fake-by-hand", object)
	}
}

func TestDiffTellsWhatTheServerWouldRefuse(t *testing.T) {
	w := newWorld(t)
	changes, err := w.diff(map[string]any{"token": planted}, []Pin{{Kind: "Deployment", Path: "spec.selector.matchLabels.app", Value: "other"}}, nil)
	require.NoError(t, err)
	require.Contains(t, byObject(changes)["change Deployment/tf"].Refused, "selector")

	// A kind that comes with a CRD not applied yet.
	current, err := Current(t.Context(), w.c, w.namespace, "tf")
	require.NoError(t, err)
	changes, err = Diff(t.Context(), w.c, DiffRequest{Namespace: w.namespace, Release: "tf", Current: current.Manifest,
		Target: current.Manifest + "---\napiVersion: example.com/v1\nkind: Widget\nmetadata: {name: w}\nspec: {size: 3}\n"})
	require.NoError(t, err)
	require.Len(t, changes, 1)
	require.Equal(t, Create, changes[0].Action)
	require.Contains(t, changes[0].Refused, "does not know this kind yet")
	require.Contains(t, changes[0].UnifiedDiff, "+  size: 3\n")
}

func TestDiffStopsAtAnObjectOfAnotherOwner(t *testing.T) {
	w := newWorld(t)
	_, err := w.c.Typed.CoreV1().ConfigMaps(w.namespace).Create(t.Context(), &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "added"}}, metav1.CreateOptions{})
	require.NoError(t, err)
	_, err = w.diff(map[string]any{"token": planted}, nil, nil)
	f, class, ok := finding.Of(err)
	require.True(t, ok, err)
	require.Equal(t, finding.Stop, class)
	require.Contains(t, f.Object, "ConfigMap/"+w.namespace+"/added")
}

func TestReleaseHistoryTellsStates(t *testing.T) {
	w := newWorld(t)
	none, err := Releases(t.Context(), w.c, w.namespace, "absent")
	require.NoError(t, err)
	require.Empty(t, none)
	_, err = Current(t.Context(), w.c, w.namespace, "absent")
	_, class, _ := finding.Of(err)
	require.Equal(t, finding.Stop, class)
	h, err := Releases(t.Context(), w.c, w.namespace, "tf")
	require.NoError(t, err)
	deployed, ok := h.Deployed()
	require.True(t, ok)
	require.Equal(t, "gadget", deployed.Chart)
	require.Equal(t, "1.0.0", deployed.ChartVersion)
	require.False(t, deployed.Ours)
	_, err = Stored(t.Context(), w.c, w.namespace, "tf", 9)
	require.ErrorContains(t, err, "no such revision")

	// A chart from a stored revision renders to what that revision holds.
	stored, err := Stored(t.Context(), w.c, w.namespace, "tf", 1)
	require.NoError(t, err)
	again, err := Render(t.Context(), w.c, RenderRequest{Namespace: w.namespace, Release: "tf", Chart: stored.Chart, Values: stored.Config})
	require.NoError(t, err)
	require.NotContains(t, again.Manifest, "fake-install-time-key", "lookup finds the live Secret")
	crds, err := CRDs(gadgetChart(t, "1.0.0"))
	require.NoError(t, err)
	require.Len(t, crds, 1)
	require.Equal(t, "gadgets.example.com", crds[0].GetName())
}
