package e2e

import (
	"bytes"
	"context"
	"encoding/base64"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.temporal.io/api/common/v1"
	"go.temporal.io/api/query/v1"
	"go.temporal.io/api/workflowservice/v1"
	"go.temporal.io/sdk/client"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

const systemNamespace = "tensor-fusion-sys"

// plantInTheOpen adds by hand what people add to live objects of a release and
// beside it: keys of a ConfigMap, annotations, variables. No Secret and no value
// of the chart holds them; Helm keeps them, and its diff has them as context.
func (w *world) plantInTheOpen() []string {
	w.t.Helper()
	ctx, apps, core := context.Background(), w.kube.AppsV1(), w.kube.CoreV1()
	const key, nested, annotation, variable, own = "fake-open-configmap-0000", "fake-open-nested-0000", "fake-open-annotation-0000", "fake-open-variable-0000", "fake-open-deployment-0000"
	annotated := fmt.Sprintf(`{"metadata":{"annotations":{"example.com/api-token":%q}}`, annotation)
	_, err := core.ConfigMaps(systemNamespace).Patch(ctx, "tensor-fusion-sys-config", types.MergePatchType,
		[]byte(annotated+fmt.Sprintf(`,"data":{"db-password":%q,"extra.yaml":"db:\n  password: %s\n"}}`, key, nested)), metav1.PatchOptions{})
	require.NoError(w.t, err)
	_, err = apps.Deployments(systemNamespace).Patch(ctx, "tensor-fusion-sys-controller", types.MergePatchType, []byte(annotated+"}"), metav1.PatchOptions{})
	require.NoError(w.t, err)
	// A variable in the controller would restart it: the alert manager has one.
	_, err = apps.StatefulSets(systemNamespace).Patch(ctx, "tensor-fusion-sys-alert-manager", types.StrategicMergePatchType,
		[]byte(fmt.Sprintf(`{"spec":{"template":{"spec":{"containers":[{"name":"alertmanager","env":[{"name":"SMTP_PASSWORD","value":%q}]}]}}}}`, variable)), metav1.PatchOptions{})
	require.NoError(w.t, err)
	none, labels := int32(0), map[string]string{"app": "own"}
	_, err = apps.Deployments(systemNamespace).Create(ctx, &appsv1.Deployment{
		ObjectMeta: metav1.ObjectMeta{Name: "own"},
		Spec: appsv1.DeploymentSpec{Replicas: &none, Selector: &metav1.LabelSelector{MatchLabels: labels}, Template: corev1.PodTemplateSpec{
			ObjectMeta: metav1.ObjectMeta{Labels: labels},
			Spec: corev1.PodSpec{Containers: []corev1.Container{{
				Name: "own", Image: "registry.refit.local/own:1.0.0", Env: []corev1.EnvVar{{Name: "CONNECTION", Value: own}},
			}}},
		}},
	}, metav1.CreateOptions{})
	require.NoError(w.t, err)
	return []string{key, nested, annotation, variable, own}
}

// plantInValues writes a values file and a secrets file of the worker, which the
// chart renders into a ConfigMap, and returns the plan's settings for them.
func (w *world) plantInValues() (settings, planted []string) {
	w.t.Helper()
	const rule, hook = "fake-values-webhook-0000", "fake-values-receiver-0000"
	for name, text := range map[string]string{
		"values.yaml":  "dynamicConfig:\n  alertRules:\n  - {name: GPUMissing, severity: P0, threshold: 0, evaluationInterval: 60s, webhookUrl: 'https://hooks.refit.local/" + rule + "'}\n",
		"secrets.yaml": "alert:\n  alertManagerConfig:\n    receivers:\n    - {name: default, webhook_configs: [{url: 'https://hooks.refit.local/" + hook + "'}]}\n",
	} {
		require.NoError(w.t, os.WriteFile(filepath.Join(w.home, name), []byte(text), 0o600))
	}
	return []string{"values.file=" + filepath.Join(w.home, "values.yaml"), "values.secretsFile=" + filepath.Join(w.home, "secrets.yaml")}, []string{rule, hook}
}

// plantedSecrets are the values of the release's Secrets and of the plain
// environment of its controller, as an operator would have planted them.
func (w *world) plantedSecrets() []string {
	w.t.Helper()
	ctx := context.Background()
	var out []string
	secrets, err := w.kube.CoreV1().Secrets(systemNamespace).List(ctx, metav1.ListOptions{LabelSelector: "owner!=helm"})
	require.NoError(w.t, err)
	for _, s := range secrets.Items {
		for _, v := range s.Data {
			out = append(out, string(v))
		}
	}
	d, err := w.kube.AppsV1().Deployments(systemNamespace).Get(ctx, "tensor-fusion-sys-controller", metav1.GetOptions{})
	require.NoError(w.t, err)
	for _, c := range d.Spec.Template.Spec.Containers {
		for _, e := range c.Env {
			if e.Name == "ENROLL_TOKEN" {
				out = append(out, e.Value)
			}
		}
	}
	return out
}

// searchSecrets looks for the planted values in everything that leaves the
// cluster: histories, memos and details, logs, all that the command line has
// printed so far on both its streams, artifacts that are not encrypted.
func (w *world) searchSecrets(run string, planted []string) {
	w.t.Helper()
	places := map[string][]byte{}
	for id, h := range w.histories(run) {
		b, err := protojson.Marshal(h)
		require.NoError(w.t, err)
		places["history of "+id] = b
		raw, err := proto.Marshal(h) // payloads are base64 in JSON: look at them in the clear too
		require.NoError(w.t, err)
		places["history of "+id] = append(b, raw...)
	}
	w.readEverything(run)
	for line, out := range w.printed {
		places["what refit "+line+" printed"] = out
	}
	log, err := os.ReadFile(filepath.Join(w.home, "worker.log"))
	require.NoError(w.t, err)
	places["the worker's log"] = log
	for id, page := range w.pages(run) {
		places["Temporal's page of "+id] = page
	}
	for path, content := range w.evidence() {
		places["artifact "+path] = content
	}
	for place, b := range places {
		b = append(b, unpacked(b)...)
		for _, s := range planted {
			assert.False(w.t, bytes.Contains(b, []byte(s)), "a planted secret appears in %s", place)
			coded := base64.StdEncoding.EncodeToString([]byte(s))
			assert.False(w.t, bytes.Contains(b, []byte(coded)), "a planted secret appears in %s, in base64", place)
		}
	}
}

// readEverything runs every command that tells of a run, in every format.
func (w *world) readEverything(run string) {
	w.t.Helper()
	for _, cmd := range [][]string{
		{"status", run}, {"watch", run, "--until-gate"}, {"list"}, {"list", "--all"}, {"receipt", run}, {"artifacts", "list", run},
	} {
		w.inEveryFormat(cmd...)
	}
}

// inEveryFormat returns what the command printed as a table.
func (w *world) inEveryFormat(cmd ...string) (table string) {
	w.t.Helper()
	for _, format := range []string{"json", "yaml", "table"} {
		table, _ = w.refit(append(slices.Clone(cmd), "-o", format)...)
	}
	assert.NotEmpty(w.t, table, "refit %v", cmd)
	return table
}

// pages is what the UI shows of the run and its children beside the history:
// memo, search attributes, summary, and the live details that a query answers.
func (w *world) pages(run string) map[string][]byte {
	w.t.Helper()
	ctx, out := context.Background(), map[string][]byte{}
	for id := range w.histories(run) {
		workflowID, runID, _ := strings.Cut(id, "/")
		execution := &common.WorkflowExecution{WorkflowId: workflowID, RunId: runID}
		described, err := w.temporal.WorkflowService().DescribeWorkflowExecution(ctx, &workflowservice.DescribeWorkflowExecutionRequest{
			Namespace: client.DefaultNamespace, Execution: execution,
		})
		require.NoError(w.t, err)
		details, err := w.temporal.WorkflowService().QueryWorkflow(ctx, &workflowservice.QueryWorkflowRequest{
			Namespace: client.DefaultNamespace, Execution: execution, Query: &query.WorkflowQuery{QueryType: "__temporal_workflow_metadata"},
		})
		require.NoError(w.t, err)
		for _, part := range []proto.Message{described, details} {
			b, err := proto.Marshal(part)
			require.NoError(w.t, err)
			out[id] = append(out[id], b...)
		}
	}
	return out
}

// evidence reads every artifact that is stored in the clear.
func (w *world) evidence() map[string][]byte {
	w.t.Helper()
	found := map[string][]byte{}
	root := strings.TrimPrefix(w.vars["REFIT_ARTIFACTS"], "file://")
	require.NoError(w.t, filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || strings.HasSuffix(path, ".age") {
			return err
		}
		found[path], err = os.ReadFile(path)
		return err
	}))
	require.NotEmpty(w.t, found, "the diff and the receipt at least lie in %s", root)
	return found
}

var base64Text = regexp.MustCompile(`[A-Za-z0-9+/]{24,}={0,2}`)

// unpacked is what stands in base64 in a text: bytes in a JSON payload do.
func unpacked(b []byte) []byte {
	var out []byte
	for _, text := range base64Text.FindAll(b, -1) {
		text = bytes.TrimRight(text, "=")
		if clear, err := base64.RawStdEncoding.DecodeString(string(text[:len(text)/4*4])); err == nil {
			out = append(append(out, clear...), '\n')
		}
	}
	return out
}
