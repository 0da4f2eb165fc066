package helm

import (
	"encoding/base64"
	"encoding/json"
	"maps"

	jsonpatch "gopkg.in/evanphx/json-patch.v4"
	helmkube "helm.sh/helm/v3/pkg/kube"
	apiextensionsv1beta1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1beta1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/strategicpatch"
	"k8s.io/cli-runtime/pkg/resource"
	"sigs.k8s.io/yaml"

	"github.com/refit-run/refit/activities/mask"
)

// What Helm writes on every object of a release.
const (
	managedByLabel      = "app.kubernetes.io/managed-by"
	managedByHelm       = "Helm"
	releaseAnnotation   = "meta.helm.sh/release-name"
	namespaceAnnotation = "meta.helm.sh/release-namespace"
)

// own adds Helm's marks, as an upgrade does to the target's objects only.
func (d *differ) own(obj *unstructured.Unstructured) {
	labels, annotations := obj.GetLabels(), obj.GetAnnotations()
	if labels == nil {
		labels = map[string]string{}
	}
	if annotations == nil {
		annotations = map[string]string{}
	}
	labels[managedByLabel] = managedByHelm
	maps.Copy(annotations, map[string]string{releaseAnnotation: d.request.Release, namespaceAnnotation: d.request.Namespace})
	obj.SetLabels(labels)
	obj.SetAnnotations(annotations)
}

func (d *differ) owned(obj *unstructured.Unstructured) bool {
	a := obj.GetAnnotations()
	return obj.GetLabels()[managedByLabel] == managedByHelm && a[releaseAnnotation] == d.request.Release && a[namespaceAnnotation] == d.request.Namespace
}

// createPatch makes the patch that Helm 3 would send.
func createPatch(original, target, live *unstructured.Unstructured, mapping *meta.RESTMapping) ([]byte, types.PatchType, error) {
	oldData, err := json.Marshal(original)
	if err != nil {
		return nil, "", err
	}
	newData, err := json.Marshal(target)
	if err != nil {
		return nil, "", err
	}
	versioned := helmkube.AsVersioned(&resource.Info{Object: target.DeepCopy(), Mapping: mapping})
	_, custom := versioned.(runtime.Unstructured)
	_, oldCRD := versioned.(*apiextensionsv1beta1.CustomResourceDefinition)
	if custom || oldCRD {
		patch, err := jsonpatch.CreateMergePatch(oldData, newData)
		return patch, types.MergePatchType, err
	}
	liveData, err := json.Marshal(live)
	if err != nil {
		return nil, "", err
	}
	schema, err := strategicpatch.NewPatchMetaFromStruct(versioned)
	if err != nil {
		return nil, "", err
	}
	patch, err := strategicpatch.CreateThreeWayMergePatch(oldData, newData, liveData, schema, true)
	return patch, types.StrategicMergePatchType, err
}

// learn teaches the masker what a Secret object holds, encoded or not, and what
// any other says in the open under a known secret key.
func (d *differ) learn(obj *unstructured.Unstructured) {
	if !isSecret(obj) {
		d.masker.Merge(mask.FromObjects(obj.Object))
		return
	}
	for _, field := range []string{"data", "stringData"} {
		values, _, _ := unstructured.NestedStringMap(obj.Object, field)
		for _, value := range values {
			d.masker.Add(value)
			if decoded, err := base64.StdEncoding.DecodeString(value); field == "data" && err == nil {
				d.masker.Add(string(decoded))
			}
		}
	}
}

func isSecret(obj *unstructured.Unstructured) bool {
	return obj.GetKind() == "Secret" && obj.GroupVersionKind().Group == ""
}

// text is an object as a person compares it: without the server's own fields,
// and a Secret's values told apart only by whether they change. Other secret
// values are still in it: the diff of two texts is masked, not the texts, or a
// change from one secret to another would not show.
func text(obj, other *unstructured.Unstructured, side string) string {
	if obj == nil {
		return ""
	}
	shown := obj.DeepCopy()
	for _, field := range [][]string{
		{"status"}, {"metadata", "managedFields"}, {"metadata", "resourceVersion"}, {"metadata", "generation"},
		{"metadata", "uid"}, {"metadata", "creationTimestamp"}, {"metadata", "selfLink"},
	} {
		unstructured.RemoveNestedField(shown.Object, field...)
	}
	if isSecret(shown) {
		// kubectl's copy of the object holds values too short to be masked.
		unstructured.RemoveNestedField(shown.Object, "metadata", "annotations", "kubectl.kubernetes.io/last-applied-configuration")
		for _, field := range []string{"data", "stringData"} {
			hideValues(shown, other, field, side)
		}
	}
	data, err := yaml.Marshal(shown.Object)
	if err != nil {
		return err.Error() + "\n"
	}
	return string(data)
}

func hideValues(shown, other *unstructured.Unstructured, field, side string) {
	values, ok, _ := unstructured.NestedStringMap(shown.Object, field)
	if !ok {
		return
	}
	var others map[string]string
	if other != nil {
		others, _, _ = unstructured.NestedStringMap(other.Object, field)
	}
	for key, value := range values {
		differs, both := others[key] != value, len(others) > 0
		values[key] = mask.Replacement
		if both && differs {
			values[key] += " (" + side + ")"
		}
	}
	_ = unstructured.SetNestedStringMap(shown.Object, values, field)
}
