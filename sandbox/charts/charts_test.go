package charts

import (
	"bytes"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"helm.sh/helm/v3/pkg/chart"
	"helm.sh/helm/v3/pkg/chart/loader"
	"helm.sh/helm/v3/pkg/chartutil"
	"helm.sh/helm/v3/pkg/engine"
	apiextensions "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	structuralschema "k8s.io/apiextensions-apiserver/pkg/apiserver/schema"
	"sigs.k8s.io/yaml"
)

func load(t *testing.T, version string) *chart.Chart {
	t.Helper()
	data, err := Archive(version)
	if err != nil {
		t.Fatal(err)
	}
	c, err := loader.LoadArchive(bytes.NewReader(data))
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func render(t *testing.T, version string, values map[string]any) map[string]string {
	t.Helper()
	c := load(t, version)
	options := chartutil.ReleaseOptions{Name: "tensor-fusion-sys", Namespace: "tensor-fusion-sys", IsInstall: true}
	all, err := chartutil.ToRenderValues(c, values, options, chartutil.DefaultCapabilities)
	if err != nil {
		t.Fatal(err)
	}
	out, err := engine.Render(c, all)
	if err != nil {
		t.Fatal(err)
	}
	for name, text := range out {
		delete(out, name)
		out[strings.TrimPrefix(name, Name+"/templates/")] = text
		for _, document := range strings.Split(text, "\n---\n") {
			var object map[string]any
			if err := yaml.UnmarshalStrict([]byte(document), &object); err != nil {
				t.Errorf("%s %s: %v\n%s", version, name, err, document)
			}
		}
	}
	return out
}

func TestArchiveIsDeterministicAndNamesItsController(t *testing.T) {
	for version, controller := range map[string]string{"1.8.6": "2.16.3", "1.8.7": "2.17.0"} {
		first, err := Archive(version)
		if err != nil {
			t.Fatal(err)
		}
		second, _ := Archive(version)
		if !bytes.Equal(first, second) {
			t.Errorf("%s: two archives differ", version)
		}
		c := load(t, version)
		if c.Metadata.AppVersion != controller || c.Metadata.Version != version {
			t.Errorf("%s: found %s with controller %s", version, c.Metadata.Version, c.Metadata.AppVersion)
		}
	}
	if _, err := Archive("1.8.5"); err == nil {
		t.Error("an unknown version must be refused")
	}
}

func TestFSCanBeCopiedToAFolderThatHelmLoads(t *testing.T) {
	tree, err := FS("1.8.7")
	if err != nil {
		t.Fatal(err)
	}
	folder := filepath.Join(t.TempDir(), Name)
	if err := os.CopyFS(folder, tree); err != nil {
		t.Fatal(err)
	}
	if _, err := loader.LoadDir(folder); err != nil {
		t.Fatal(err)
	}
}

func TestEveryRenderedImageIsListed(t *testing.T) {
	image := regexp.MustCompile(regexp.QuoteMeta(Registry) + `/[^\s"']+`)
	for _, version := range Versions() {
		known := Images(version)
		for _, values := range []map[string]any{{}, Values()} {
			for name, text := range render(t, version, values) {
				for _, found := range image.FindAllString(text, -1) {
					if !slices.Contains(known, found) && !strings.Contains(found, "/api/") {
						t.Errorf("%s %s names %s, which Images does not list", version, name, found)
					}
				}
			}
		}
	}
}

func TestPolicyIsNoValue(t *testing.T) {
	values := Values()
	values["cluster"].(map[string]any)["nodePoolRollingUpdatePolicy"] = map[string]any{"autoUpdateHypervisor": false}
	for _, version := range Versions() {
		text := render(t, version, values)["tensorfusioncluster.yaml"]
		if n := strings.Count(text, "autoUpdateHypervisor: true"); n != 2 {
			t.Errorf("%s: autoUpdateHypervisor: true found %d times, expected once per pool", version, n)
		}
		for _, pool := range []string{"- name: shared", "- name: training"} {
			if !strings.Contains(text, pool) {
				t.Errorf("%s: %q missing", version, pool)
			}
		}
	}
}

func TestIsolationPolicyExistsOnlyFromThe187ChartAndIsDynamicByDefault(t *testing.T) {
	if text := render(t, "1.8.6", Values())["deployment.yaml"]; strings.Contains(text, "TF_ISOLATION_MODE_POLICY") {
		t.Error("1.8.6 must not set the isolation policy")
	}
	text := render(t, "1.8.7", Values())["deployment.yaml"]
	if !regexp.MustCompile(`TF_ISOLATION_MODE_POLICY\s+value: "dynamic"`).MatchString(text) {
		t.Errorf("1.8.7 must default to dynamic:\n%s", text)
	}
}

func TestTokenIsPlainAndOnlyWithAnAgent(t *testing.T) {
	if text := render(t, "1.8.7", Values())["deployment.yaml"]; !strings.Contains(text, `value: "fake-enroll-token-0000"`) {
		t.Error("the enrol token must be plain text in the Deployment")
	}
	if text := render(t, "1.8.7", nil)["deployment.yaml"]; strings.Contains(text, "cluster-agent") {
		t.Error("without agentId there must be no cluster-agent")
	}
}

func TestVolumeClaimTemplatesFollowPersistence(t *testing.T) {
	values := Values()
	if strings.Contains(render(t, "1.8.7", values)["alert-manager.yaml"], "volumeClaimTemplates") {
		t.Error("no persistence by default")
	}
	values["alert"] = map[string]any{"persistence": map[string]any{"enabled": true}}
	if !strings.Contains(render(t, "1.8.7", values)["alert-manager.yaml"], "volumeClaimTemplates") {
		t.Error("persistence must add volumeClaimTemplates")
	}
}

func crds(t *testing.T, version string) map[string]apiextensionsv1.CustomResourceDefinition {
	t.Helper()
	tree, err := FS(version)
	if err != nil {
		t.Fatal(err)
	}
	names, err := fs.Glob(tree, "crds/*.yaml")
	if err != nil {
		t.Fatal(err)
	}
	found := map[string]apiextensionsv1.CustomResourceDefinition{}
	for _, name := range names {
		data, err := fs.ReadFile(tree, name)
		if err != nil {
			t.Fatal(err)
		}
		var crd apiextensionsv1.CustomResourceDefinition
		if err := yaml.UnmarshalStrict(data, &crd); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		found[crd.Spec.Names.Kind] = crd
	}
	return found
}

func TestCRDsAreStructuralWithTheScopesOfTheRealOnes(t *testing.T) {
	namespaced := []string{"TensorFusionWorkload", "TensorFusionConnection", "WorkloadProfile", "GPUResourceQuota"}
	for _, version := range Versions() {
		found := crds(t, version)
		if len(found) != 12 {
			t.Errorf("%s: %d CRDs, expected 12", version, len(found))
		}
		for kind, crd := range found {
			if got := crd.Spec.Scope == apiextensionsv1.NamespaceScoped; got != slices.Contains(namespaced, kind) {
				t.Errorf("%s %s: scope %s", version, kind, crd.Spec.Scope)
			}
			v := crd.Spec.Versions[0]
			if got := v.Subresources != nil && v.Subresources.Status != nil; got == (kind == "ProviderConfig") {
				t.Errorf("%s %s: status subresource %v", version, kind, got)
			}
			var internal apiextensions.JSONSchemaProps
			if err := apiextensionsv1.Convert_v1_JSONSchemaProps_To_apiextensions_JSONSchemaProps(v.Schema.OpenAPIV3Schema, &internal, nil); err != nil {
				t.Fatal(err)
			}
			if _, err := structuralschema.NewStructural(&internal); err != nil {
				t.Errorf("%s %s: %v", version, kind, err)
			}
		}
	}
}

func TestNewerCRDsAreASupersetOfTheOlder(t *testing.T) {
	older, newer := crds(t, "1.8.6"), crds(t, "1.8.7")
	var walk func(where string, a, b apiextensionsv1.JSONSchemaProps)
	walk = func(where string, a, b apiextensionsv1.JSONSchemaProps) {
		for name, property := range a.Properties {
			other, ok := b.Properties[name]
			if !ok {
				t.Errorf("%s.%s is missing in 1.8.7", where, name)
				continue
			}
			walk(where+"."+name, property, other)
		}
		if a.Items != nil && a.Items.Schema != nil {
			walk(where+"[]", *a.Items.Schema, *b.Items.Schema)
		}
	}
	for kind, crd := range older {
		walk(kind, *crd.Spec.Versions[0].Schema.OpenAPIV3Schema, *newer[kind].Spec.Versions[0].Schema.OpenAPIV3Schema)
	}
	has := func(c apiextensionsv1.CustomResourceDefinition) bool {
		_, ok := c.Spec.Versions[0].Schema.OpenAPIV3Schema.Properties["status"].Properties["isolationPolicy"]
		return ok
	}
	if has(older["GPU"]) || !has(newer["GPU"]) {
		t.Error("GPU status.isolationPolicy must be new in 1.8.7")
	}
}

func TestTemplateOfTheClusterIsThePoolSpec(t *testing.T) {
	for _, version := range Versions() {
		found := crds(t, version)
		pool := found["GPUPool"].Spec.Versions[0].Schema.OpenAPIV3Schema.Properties["spec"]
		entry := found["TensorFusionCluster"].Spec.Versions[0].Schema.OpenAPIV3Schema.Properties["spec"].Properties["gpuPools"].Items.Schema.Properties["specTemplate"]
		a, _ := yaml.Marshal(pool)
		b, _ := yaml.Marshal(entry)
		if !bytes.Equal(a, b) {
			t.Errorf("%s: specTemplate and GPUPool.spec have different schemas", version)
		}
	}
}
