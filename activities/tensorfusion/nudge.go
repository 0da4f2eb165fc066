package tensorfusion

import (
	"fmt"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/refit-run/refit/activities/finding"
)

// hypervisorTemplate is a pool entry's raw PodTemplate, opened at the
// hypervisor: the first container, whatever its name.
type hypervisorTemplate struct {
	object     map[string]any
	containers []any
	first      map[string]any
	env        []any
}

// openTemplate copies the template; where it has no container yet, the copy has
// one with the name that the controller gives it.
func openTemplate(e PoolEntry) (hypervisorTemplate, error) {
	t := hypervisorTemplate{object: map[string]any{}}
	if h := e.Spec.Components.Hypervisor; h != nil && h.PodTemplate != nil {
		t.object = (&unstructured.Unstructured{Object: h.PodTemplate}).DeepCopy().Object
	}
	var err error
	if t.containers, _, err = unstructured.NestedSlice(t.object, "template", "spec", "containers"); err != nil {
		return t, fmt.Errorf("hypervisor template of entry %s: %w", e.Name, err)
	}
	if len(t.containers) == 0 {
		t.containers = []any{map[string]any{"name": "tensorfusion-hypervisor"}}
	}
	first, ok := t.containers[0].(map[string]any)
	if !ok {
		return t, fmt.Errorf("hypervisor template of entry %s: containers[0] is not an object", e.Name)
	}
	t.first = first
	if t.env, _, err = unstructured.NestedSlice(first, "env"); err != nil {
		return t, fmt.Errorf("hypervisor template of entry %s: %w", e.Name, err)
	}
	return t, nil
}

func isNudge(variable any) bool {
	m, ok := variable.(map[string]any)
	return ok && m["name"] == nudgeEnv
}

// nudgeOf is the value of the variable in an entry's template, "" without one.
func nudgeOf(e PoolEntry) string {
	t, err := openTemplate(e)
	if err != nil {
		return "" // whoever changes the template says so
	}
	i := slices.IndexFunc(t.env, isNudge)
	if i < 0 {
		return ""
	}
	value, _ := t.env[i].(map[string]any)["value"].(string)
	return value
}

// nudge adds the harmless variable to the hypervisor's template, or gives the
// one of an earlier run a new value; false when it is there and the pool has a
// pending change already.
func (b *clusterPatch) nudge(index int, synced bool, at time.Time) (bool, error) {
	e := b.cluster.Spec.GPUPools[index]
	if e.Spec.Components.Hypervisor == nil {
		return false, finding.Finding{
			Row:    "P10",
			Object: "TensorFusionCluster/" + b.cluster.Name + ", pool entry " + e.Name,
			Found:  "componentConfig.hypervisor is missing, so the spec change that 2.17 needs cannot be made",
			Next:   "set componentConfig.hypervisor in the TensorFusionCluster, then retry",
		}.Error(finding.Stop)
	}
	if nudgeOf(e) != "" && !synced {
		return false, nil
	}
	return true, b.setNudge(index, at.UTC().Format(time.RFC3339Nano))
}

// setNudge gives the variable a value; an empty one takes it away.
func (b *clusterPatch) setNudge(index int, value string) error {
	t, err := openTemplate(b.cluster.Spec.GPUPools[index])
	if err != nil {
		return err
	}
	t.env = slices.DeleteFunc(t.env, isNudge)
	if value != "" {
		t.env = append(t.env, map[string]any{"name": nudgeEnv, "value": value})
	}
	if len(t.env) > 0 {
		t.first["env"] = t.env
	} else {
		delete(t.first, "env")
	}
	if err := unstructured.SetNestedSlice(t.object, t.containers, "template", "spec", "containers"); err != nil {
		return fmt.Errorf("hypervisor template of entry %s: %w", b.cluster.Spec.GPUPools[index].Name, err)
	}
	b.add(entryPath(index, "/componentConfig/hypervisor/podTemplate"), t.object)
	return nil
}
