package helm

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"helm.sh/helm/v3/pkg/action"
	"helm.sh/helm/v3/pkg/chart"
	"helm.sh/helm/v3/pkg/chart/loader"
	coordinationv1 "k8s.io/api/coordination/v1"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"

	"github.com/refit-run/refit/activities/internal/apiservertest"
	"github.com/refit-run/refit/activities/kube"
	"github.com/refit-run/refit/activities/lease"
)

// The test binary is its own engine, as the worker is.
func TestMain(m *testing.M) {
	if IsChild(os.Args) {
		os.Exit(RunChild(os.Stdin, os.Stdout))
	}
	if value := os.Getenv(parentVariable); value != "" {
		fmt.Fprintln(os.Stderr, runParent(value))
		os.Exit(1)
	}
	os.Exit(apiservertest.Main(m))
}

const (
	holder  = "temporal-a/default/upgrade.prod.tf/run-1"
	planted = "fake-planted-secret-1"
	rotated = "fake-rotated-secret-2"
)

// gadgetChart behaves where it hurts like the charts we upgrade: a custom
// resource with a fixed policy, a secret made only when lookup finds none, a
// plain token in an environment, a hook that never ends when asked for.
func gadgetChart(t *testing.T, version string) *chart.Chart {
	t.Helper()
	c, err := loader.LoadFiles(gadgetFiles(version))
	require.NoError(t, err)
	return c
}

func gadgetFiles(version string) []*loader.BufferedFile {
	files := map[string]string{
		"Chart.yaml": "apiVersion: v2\nname: gadget\nversion: " + version + "\nappVersion: \"" + version + "\"\n",
		"values.yaml": `image: registry.example/gadget:1.0.0
pools: 2
token: ""
hang: false
extra: {}
`,
		"templates/gadget.yaml": `apiVersion: example.com/v1
kind: Gadget
metadata:
  name: {{ .Release.Name }}
spec:
  pools:
{{- range $i := until (int .Values.pools) }}
  - name: pool-{{ $i }}
    image: {{ $.Values.image }}
    policy: {auto: true, batch: 20}
{{- end }}
`,
		"templates/deployment.yaml": `apiVersion: apps/v1
kind: Deployment
metadata:
  name: {{ .Release.Name }}
spec:
  replicas: 1
  selector: {matchLabels: {app: gadget}}
  template:
    metadata: {labels: {app: gadget}}
    spec:
      containers:
      - name: main
        image: {{ .Values.image }}
        env:
        - {name: TOKEN, value: {{ .Values.token | quote }}}
        - {name: CHART, value: {{ .Chart.Version | quote }}}
`,
		"templates/config.yaml": `apiVersion: v1
kind: ConfigMap
metadata: {name: {{ .Release.Name }}}
data: {image: {{ .Values.image }}}
`,
		"templates/secret.yaml": `{{- if not (lookup "v1" "Secret" .Release.Namespace "credentials") }}
apiVersion: v1
kind: Secret
metadata: {name: credentials, annotations: {helm.sh/resource-policy: keep}}
stringData: {key: fake-install-time-key}
{{- end }}
`,
		"templates/token.yaml": `apiVersion: v1
kind: Secret
metadata: {name: token}
stringData: {token: {{ .Values.token | quote }}}
`,
		"templates/job.yaml": `{{- if .Values.hang }}
apiVersion: batch/v1
kind: Job
metadata: {name: hook, annotations: {helm.sh/hook: pre-upgrade, helm.sh/hook-delete-policy: before-hook-creation}}
spec: {template: {spec: {restartPolicy: Never, containers: [{name: main, image: registry.example/hook:1.0.0}]}}}
{{- end }}
`,
		"templates/NOTES.txt": "thanks\n",
		"crds/gadget.yaml":    gadgetCRD,
	}
	if version != "1.0.0" {
		files["templates/added.yaml"] = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: added}\ndata: {since: \"2\"}\n"
	} else {
		files["templates/removed.yaml"] = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: removed}\ndata: {until: \"1\"}\n"
	}
	var buffered []*loader.BufferedFile
	for name, data := range files {
		buffered = append(buffered, &loader.BufferedFile{Name: name, Data: []byte(data)})
	}
	return buffered
}

const gadgetCRD = `apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: gadgets.example.com}
spec:
  group: example.com
  names: {kind: Gadget, plural: gadgets, singular: gadget}
  scope: Namespaced
  versions:
  - name: v1
    served: true
    storage: true
    schema: {openAPIV3Schema: {type: object, x-kubernetes-preserve-unknown-fields: true}}
`

var gadgets = schema.GroupVersionResource{Group: "example.com", Version: "v1", Resource: "gadgets"}

// world is a namespace with release tf of gadget 1.0.0 as revision 1, and its
// Lease held by holder.
type world struct {
	*testing.T
	c         *kube.Client
	namespace string
	target    kube.Target
}

func newWorld(t *testing.T) *world {
	server := apiservertest.Shared(t)
	w := &world{T: t, c: server.Client(t), namespace: server.Namespace(t), target: server.Target(t, "prod")}
	w.defineGadgets()
	config := new(action.Configuration)
	require.NoError(t, config.Init(getter{client: w.c, namespace: w.namespace}, w.namespace, "secret", t.Logf))
	install := action.NewInstall(config)
	install.ReleaseName, install.Namespace, install.SkipCRDs = "tf", w.namespace, true
	_, err := install.RunWithContext(t.Context(), gadgetChart(t, "1.0.0"), map[string]any{"token": planted})
	require.NoError(t, err)
	name, id := lease.Name("tf"), holder
	_, err = w.c.Typed.CoordinationV1().Leases(w.namespace).Create(t.Context(), &coordinationv1.Lease{
		ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: coordinationv1.LeaseSpec{HolderIdentity: &id},
	}, metav1.CreateOptions{})
	require.NoError(t, err)
	return w
}

func (w *world) defineGadgets() {
	objects, err := Objects(gadgetCRD)
	require.NoError(w, err)
	_, err = w.c.Apply(w.Context(), objects[0], "test", true, false)
	require.NoError(w, err)
	require.NoError(w, w.c.Await(w.Context(), kube.Wait{What: "CRD gadgets", Limit: 30 * time.Second}, func(o kube.Objects) (bool, string, error) {
		conditions, _, _ := unstructured.NestedSlice(o[0][0].(*unstructured.Unstructured).Object, "status", "conditions")
		for _, c := range conditions {
			if m := c.(map[string]any); m["type"] == string(apiextensionsv1.Established) && m["status"] == "True" {
				return true, "", nil
			}
		}
		return false, "not established", nil
	}, kube.Selection{Resource: apiextensionsv1.SchemeGroupVersion.WithResource("customresourcedefinitions"), Name: objects[0].GetName()}))
}

func (w *world) request() UpgradeRequest {
	return UpgradeRequest{
		Target: w.target, Namespace: w.namespace, Release: "tf", Chart: gadgetChart(w.T, "2.0.0"),
		Values: map[string]any{"token": planted, "image": "registry.example/gadget:2.0.0"},
		Pins:   []Pin{{Kind: "Gadget", Path: "spec.pools[*].policy.auto", Value: false}},
		Holder: holder, Mark: "intent-1", FromRevision: 1, Limit: time.Minute,
	}
}

func (w *world) gadget() map[string]any {
	obj, err := w.c.Dynamic.Resource(gadgets).Namespace(w.namespace).Get(w.Context(), "tf", metav1.GetOptions{})
	require.NoError(w, err)
	spec, _, _ := unstructured.NestedMap(obj.Object, "spec")
	return spec
}

func (w *world) patchGadget(patch string) {
	_, err := w.c.Dynamic.Resource(gadgets).Namespace(w.namespace).Patch(w.Context(), "tf", types.MergePatchType, []byte(patch), metav1.PatchOptions{})
	require.NoError(w, err)
}

func (w *world) history() []string {
	h, err := Releases(w.Context(), w.c, w.namespace, "tf")
	require.NoError(w, err)
	var states []string
	for _, i := range h {
		states = append(states, i.Status)
	}
	return states
}

func (w *world) hold(id string) {
	patch, err := json.Marshal(map[string]any{"spec": map[string]any{"holderIdentity": id}})
	require.NoError(w, err)
	_, err = w.c.Typed.CoordinationV1().Leases(w.namespace).Patch(w.Context(), lease.Name("tf"), types.MergePatchType, patch, metav1.PatchOptions{})
	require.NoError(w, err)
}

// awaitPending waits until the engine stands in its hook: the revision is
// pending and the hook's Job exists.
func (w *world) awaitPending(ctx context.Context) {
	require.NoError(w, w.c.Await(ctx, kube.Wait{What: "the hook Job", Limit: 30 * time.Second}, func(o kube.Objects) (bool, string, error) {
		return len(o[0]) == 1, "", nil
	}, kube.Selection{Resource: schema.GroupVersionResource{Group: "batch", Version: "v1", Resource: "jobs"}, Namespace: w.namespace, Name: "hook"}))
}

func (w *world) exists(kind, name string) bool {
	var err error
	switch kind {
	case "ConfigMap":
		_, err = w.c.Typed.CoreV1().ConfigMaps(w.namespace).Get(w.Context(), name, metav1.GetOptions{})
	case "Secret":
		_, err = w.c.Typed.CoreV1().Secrets(w.namespace).Get(w.Context(), name, metav1.GetOptions{})
	}
	if apierrors.IsNotFound(err) {
		return false
	}
	require.NoError(w, err)
	return true
}
