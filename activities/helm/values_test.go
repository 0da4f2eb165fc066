package helm

import (
	"encoding/json"
	"testing"

	"github.com/stretchr/testify/require"
	"helm.sh/helm/v3/pkg/chart"
)

func TestMergeLaysValuesOverEachOther(t *testing.T) {
	base := map[string]any{"a": map[string]any{"x": 1, "y": 2}, "list": []any{1, 2}, "keep": true}
	file := map[string]any{"a": map[string]any{"y": 3}, "list": []any{9}}
	inline := map[string]any{"a": map[string]any{"z": nil}, "keep": false}
	got := Merge(base, file, inline)
	require.Equal(t, map[string]any{"a": map[string]any{"x": 1, "y": 3, "z": nil}, "list": []any{9}, "keep": false}, got)
	got["a"].(map[string]any)["x"] = "changed"
	got["list"].([]any)[0] = "changed"
	require.Equal(t, map[string]any{"a": map[string]any{"x": 1, "y": 2}, "list": []any{1, 2}, "keep": true}, base, "inputs are not changed")
	require.Equal(t, []any{9}, file["list"])
	require.Equal(t, map[string]any{}, Merge(nil, nil))
}

func TestUnknownKeysNameTheNearest(t *testing.T) {
	known := map[string]any{
		"controller": map[string]any{"replicaCount": 1, "affinity": map[string]any{}, "command": []any{}, "note": nil},
		"agent":      map[string]any{"enrollToken": ""},
	}
	require.Equal(t, []string{
		"agnet (did you mean agent?)",
		"controller.replicaCuont (did you mean replicaCount?)",
		"controller.zzz",
	}, UnknownKeys(known, map[string]any{
		"controller": map[string]any{"replicaCuont": 2, "zzz": 1, "affinity": map[string]any{"free": "form"}, "note": map[string]any{"any": 1}},
		"agnet":      map[string]any{"enrollToken": "x"},
		"global":     map[string]any{"any": 1},
	}))
	require.Empty(t, UnknownKeys(known, map[string]any{"agent": map[string]any{"enrollToken": "x"}}))
}

func TestDigestDependsOnContentAlone(t *testing.T) {
	type s struct {
		B int            `json:"b"`
		A map[string]any `json:"a"`
	}
	one, err := Digest(s{B: 1, A: map[string]any{"x": 1, "y": "2"}})
	require.NoError(t, err)
	two, err := Digest(map[string]any{"a": map[string]any{"y": "2", "x": 1.0}, "b": json.Number("1")})
	require.NoError(t, err)
	require.Equal(t, one, two)
	require.Len(t, one, 64)
	other, err := Digest(s{B: 2})
	require.NoError(t, err)
	require.NotEqual(t, one, other)
	_, err = Digest(func() {})
	require.Error(t, err)
}

func TestPathsOfValues(t *testing.T) {
	values := map[string]any{"a": map[string]any{"list": []any{map[string]any{"k": 1}}}}
	require.NoError(t, SetPath(values, `a.b.c`, "x"))
	require.NoError(t, SetPath(values, `a.list[0].k`, 2))
	require.NoError(t, SetPath(values, `a["dotted.key/x"]`, true))
	for path, want := range map[string]any{"a.b.c": "x", "a.list[0].k": 2, `a["dotted.key/x"]`: true} {
		got, ok := GetPath(values, path)
		require.True(t, ok, path)
		require.Equal(t, want, got, path)
	}
	for _, path := range []string{"a.none", "a.list[3].k", "a.b.c.d", "..", ""} {
		_, ok := GetPath(values, path)
		require.False(t, ok, path)
	}
	require.Error(t, SetPath(values, "a.b.c.d", 1))
	require.Error(t, SetPath(values, "[0]", 1))
}

const pools = `---
# Source: gadget/templates/gadget.yaml
apiVersion: example.com/v1
kind: Gadget
metadata:
  name: one
spec:
  pools:
  - name: a
    policy:
      auto: true
  - name: b
---
# Source: gadget/templates/other.yaml
kind: Other # stays as it is
metadata: {name: two}
`

func TestPinsReachEveryElementAndNothingElse(t *testing.T) {
	pin := func(kind, name, path string) []Pin { return []Pin{{Kind: kind, Name: name, Path: path, Value: false}} }
	for _, c := range []struct {
		name string
		pins []Pin
		want int
	}{
		{"every element", pin("Gadget", "", "spec.pools[*].policy.auto"), 2},
		{"one element", pin("Gadget", "one", "spec.pools[1].policy.auto"), 1},
		{"another name", pin("Gadget", "two", "spec.pools[*].policy.auto"), 0},
		{"another kind", pin("Widget", "", "spec.pools[*].policy.auto"), 0},
		{"a missing list", pin("Gadget", "", "spec.none[*].auto"), 0},
		{"a missing map", pin("Gadget", "", "spec.fresh.auto"), 1},
	} {
		manifest, n, err := ApplyPins(pools, c.pins)
		require.NoError(t, err, c.name)
		require.Equal(t, c.want, n, c.name)
		if n == 0 {
			require.Equal(t, pools, manifest, c.name)
			continue
		}
		require.Contains(t, manifest, "# Source: gadget/templates/gadget.yaml\n", c.name)
		require.Contains(t, manifest, "kind: Other # stays as it is\n", c.name)
		require.Contains(t, manifest, "auto: false", c.name)
		again, m, err := ApplyPins(manifest, c.pins)
		require.NoError(t, err)
		require.Equal(t, manifest, again, "%s: twice is once", c.name)
		require.Equal(t, n, m)
	}
	_, _, err := ApplyPins(pools, pin("Gadget", "", "spec.pools.name.x"))
	require.ErrorContains(t, err, "expected a map")
	_, _, err = ApplyPins(pools, pin("Gadget", "", "metadata[*].x"))
	require.ErrorContains(t, err, "expected a list")
	for _, path := range []string{"", "[0]", "a[", "a[x]", "a[-1].b", `a["b`, "a..b", "a[*]"} {
		_, _, err := ApplyPins(pools, pin("Gadget", "", path))
		require.Error(t, err, path)
	}
}

// Helm does not store subcharts: such a chart must not be upgraded to as if it
// were whole.
func TestChartWithoutItsSubchartsIsRefused(t *testing.T) {
	whole := &chart.Chart{Metadata: &chart.Metadata{Name: "parent", Version: "1.0.0", Dependencies: []*chart.Dependency{{Name: "sub"}}}}
	whole.AddDependency(&chart.Chart{Metadata: &chart.Metadata{Name: "sub", Version: "1.0.0"}, Values: map[string]any{"n": 1}})
	require.NoError(t, CheckChart(whole))
	copied, err := copyChart(whole)
	require.NoError(t, err)
	require.NoError(t, CheckChart(copied), "the way to the child keeps them")
	copied.SetDependencies()
	require.ErrorContains(t, CheckChart(copied), "keeps no subcharts")
	require.Error(t, CheckChart(nil))
}
