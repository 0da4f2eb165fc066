package tensorfusion

import (
	"sort"
	"strings"

	corev1 "k8s.io/api/core/v1"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/refit-run/refit/activities/helm"
	"github.com/refit-run/refit/activities/registry"
)

// readSide reads one side of the upgrade out of a manifest's objects.
func readSide(objects []*unstructured.Unstructured) (Side, error) {
	s := Side{Objects: objects}
	for _, u := range objects {
		switch u.GetKind() {
		case "Deployment":
			if u.GetLabels()[labelComponent] != componentOperator {
				continue
			}
			replicas, found, err := unstructured.NestedInt64(u.Object, "spec", "replicas")
			if err != nil || !found {
				replicas = 1
			}
			s.Replicas = int32(replicas)
			pod, err := podSpec(u)
			if err != nil {
				return s, err
			}
			s.ControllerImage, s.IsolationPolicy = controllerOf(pod)
			s.Controller = imageVersion(s.ControllerImage)
		case "TensorFusionCluster":
			fc, err := decode[FusionCluster](u)
			if err != nil {
				return s, err
			}
			s.Clusters = append(s.Clusters, fc)
		case "ProviderConfig":
			p, err := decode[FusionProvider](u)
			if err != nil {
				return s, err
			}
			s.Providers = append(s.Providers, p)
		}
	}
	return s, nil
}

// podSpec is the template's of a workload object.
func podSpec(u *unstructured.Unstructured) (corev1.PodSpec, error) {
	type workload struct {
		Spec struct {
			Template corev1.PodTemplateSpec `json:"template"`
		} `json:"spec"`
	}
	w, err := decode[workload](u)
	return w.Spec.Template.Spec, err
}

// controllerOf reads the controller's image and its isolation policy.
func controllerOf(pod corev1.PodSpec) (image, policy string) {
	for _, c := range pod.Containers {
		if c.Name != controllerContainer {
			continue
		}
		for _, e := range c.Env {
			if e.Name == policyEnv {
				policy = e.Value
			}
		}
		return c.Image, policy
	}
	return "", ""
}

// targetSide is what the intent renders, with the chart's CRDs.
func (r *resolved) targetSide() (Side, error) {
	s, err := readSide(r.rendered.Objects)
	if err != nil {
		return s, err
	}
	s.Chart, s.AppVersion = r.chart.Metadata.Version, r.chart.Metadata.AppVersion
	_, s.KnowsIsolation = helm.GetPath(r.chart.Values, pathIsolationPolicy)
	if image, known := helm.GetPath(r.chart.Values, pathHypervisorImage); known {
		s.ShippedHypervisor, _ = image.(string)
	}
	crds, err := helm.CRDs(r.chart)
	if err != nil {
		return s, err
	}
	for _, u := range crds {
		crd, err := decode[apiextensionsv1.CustomResourceDefinition](u)
		if err != nil {
			return s, err
		}
		s.CRDs = append(s.CRDs, &crd)
	}
	return s, nil
}

// sourceSide is what the stored release says it installed.
func (r *resolved) sourceSide() (Side, error) {
	objects, err := helm.Objects(r.current.Manifest)
	if err != nil {
		return Side{}, err
	}
	s, err := readSide(objects)
	if r.current.Chart != nil && r.current.Chart.Metadata != nil {
		s.Chart, s.AppVersion = r.current.Chart.Metadata.Version, r.current.Chart.Metadata.AppVersion
	}
	return s, err
}

// imageKinds are the objects whose images the cluster will pull.
var imageKinds = map[string]bool{
	"Deployment": true, "StatefulSet": true, "DaemonSet": true, "Job": true, "CronJob": true, "Pod": true,
	"TensorFusionCluster": true, "ProviderConfig": true,
}

// imagesOf lists every image that the objects name, sorted: fields called
// image or ...Image, and everything below images.
func imagesOf(objects ...[]*unstructured.Unstructured) []string {
	seen := map[string]bool{}
	for _, set := range objects {
		for _, u := range set {
			if imageKinds[u.GetKind()] {
				collectImages(u.Object, false, seen)
			}
		}
	}
	return sortedKeys(seen)
}

func collectImages(node any, below bool, seen map[string]bool) {
	switch n := node.(type) {
	case map[string]any:
		for key, value := range n {
			text, isText := value.(string)
			if isText && text != "" && (below || key == "image" || strings.HasSuffix(key, "Image")) {
				seen[text] = true
				continue
			}
			collectImages(value, below || key == "images", seen)
		}
	case []any:
		for _, value := range n {
			collectImages(value, below, seen)
		}
	}
}

// floatingOf are those of the images whose tag may move.
func floatingOf(images []string) []string {
	var out []string
	for _, image := range images {
		if tag, pinned := registry.Tag(image); !pinned && registry.Floating(tag) {
			out = append(out, image)
		}
	}
	sort.Strings(out)
	return out
}

// middlewareImage is the NVIDIA ProviderConfig's, "" when there is none.
func middlewareImage(providers []FusionProvider) string {
	for _, p := range providers {
		if strings.EqualFold(p.Spec.Vendor, nvidiaVendor) {
			return p.Spec.Images.Middleware
		}
	}
	return ""
}
