package tensorfusion

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"helm.sh/helm/v3/pkg/chart"
	"helm.sh/helm/v3/pkg/chart/loader"
	"helm.sh/helm/v3/pkg/release"
	"helm.sh/helm/v3/pkg/storage"
	"helm.sh/helm/v3/pkg/storage/driver"
	helmtime "helm.sh/helm/v3/pkg/time"

	coordinationv1 "k8s.io/api/coordination/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/refit-run/refit/activities/artifact"
	"github.com/refit-run/refit/activities/helm"
	"github.com/refit-run/refit/activities/internal/apiservertest"
	"github.com/refit-run/refit/activities/lease"
)

// The test chart hurts where the real one does: autoUpdateHypervisor true is
// written into the template, a token stands in the Deployment's environment,
// and the credentials Secret is rendered only when there is none.
var chartFiles = map[string]string{
	"values.yaml": `
controller: {replicaCount: 2, image: {repository: registry.test/operator, tag: ""}, isolationModePolicy: dynamic}
cluster: {enabled: true, name: tf, hypervisorImage: registry.test/hypervisor:2.15.0}
agent: {agentId: "", enrollToken: ""}
greptime: {host: "", password: ""}
cloudVendorCredentials: {accessKey: dummy, secretKey: dummy}
dynamicConfig: {metricsTTL: 30d}
`,
	"templates/deployment.yaml": `
apiVersion: apps/v1
kind: Deployment
metadata:
  name: {{ .Release.Name }}-controller
  labels: {tensor-fusion.ai/component: operator}
spec:
  replicas: {{ .Values.controller.replicaCount }}
  selector: {matchLabels: {app: controller}}
  template:
    metadata: {labels: {app: controller}}
    spec:
      containers:
        - name: controller
          image: {{ .Values.controller.image.repository }}:{{ .Values.controller.image.tag | default .Chart.AppVersion }}
          env:
            - {name: TF_ISOLATION_MODE_POLICY, value: {{ .Values.controller.isolationModePolicy }}}
            - {name: ENROLL_TOKEN, value: {{ .Values.agent.enrollToken | quote }}}
          volumeMounts: [{name: config, mountPath: /etc/config.yaml, subPath: config.yaml}]
      volumes: [{name: config, configMap: {name: {{ .Release.Name }}-config}}]
`,
	"templates/config.yaml": `
apiVersion: v1
kind: ConfigMap
metadata: {name: {{ .Release.Name }}-config}
data: {config.yaml: "metricsTTL: {{ .Values.dynamicConfig.metricsTTL }}"}
`,
	"templates/rules.yaml": `
apiVersion: v1
kind: ConfigMap
metadata: {name: {{ .Release.Name }}-rules, labels: {helm.sh/chart: "{{ .Chart.Version }}"}}
data: {rules.yaml: "GPUHot: 85"}
`,
	"templates/secret.yaml": `
{{- if not (lookup "v1" "Secret" .Release.Namespace "tf-cloud-vendor-credentials") }}
apiVersion: v1
kind: Secret
metadata: {name: tf-cloud-vendor-credentials, annotations: {helm.sh/resource-policy: keep}}
stringData: {ak: {{ .Values.cloudVendorCredentials.accessKey | quote }}, sk: {{ .Values.cloudVendorCredentials.secretKey | quote }}}
{{- end }}
`,
	"templates/cluster.yaml": `
{{- if .Values.cluster.enabled }}
apiVersion: tensor-fusion.ai/v1
kind: TensorFusionCluster
metadata: {name: {{ .Values.cluster.name }}, annotations: {helm.sh/resource-policy: keep}}
spec:
  gpuPools:
    - name: shared
      specTemplate:
        nodeManagerConfig:
          nodePoolRollingUpdatePolicy: {autoUpdateHypervisor: true, batchPercentage: 20, batchInterval: 1s}
        componentConfig:
          hypervisor: {image: {{ .Values.cluster.hypervisorImage }}}
{{- end }}
`,
}

// Obviously fake secrets.
const (
	oldToken  = "fake-enroll-token-old"
	newToken  = "fake-enroll-token-new"
	vendorKey = "fake-vendor-key-live"
)

// writeChart makes a chart folder of one version.
func writeChart(t *testing.T, version, appVersion string) string {
	t.Helper()
	folder := filepath.Join(t.TempDir(), "tensor-fusion-"+version)
	files := map[string]string{
		"Chart.yaml": "apiVersion: v2\nname: tensor-fusion\nversion: " + version + "\nappVersion: " + appVersion + "\n",
		"crds/widgets.yaml": `
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: schedulingconfigtemplates.tensor-fusion.ai}
spec:
  group: tensor-fusion.ai
  scope: Cluster
  names: {plural: schedulingconfigtemplates, singular: schedulingconfigtemplate, kind: SchedulingConfigTemplate, listKind: SchedulingConfigTemplateList}
  versions: [{name: v1, served: true, storage: true, schema: {openAPIV3Schema: {type: object, x-kubernetes-preserve-unknown-fields: true}}}]
`,
	}
	for name, text := range chartFiles {
		files[name] = text
	}
	for name, text := range files {
		path := filepath.Join(folder, name)
		require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o755))
		require.NoError(t, os.WriteFile(path, []byte(text), 0o644))
	}
	return folder
}

// installation is a world whose TensorFusionCluster belongs to a Helm release.
type installation struct {
	*world
	activities *Activities
	holder     string
	values     map[string]any
}

// install stores revision 1 of chart 1.8.6 as deployed and applies its objects.
func install(t *testing.T) *installation {
	t.Helper()
	w := newWorld(t)
	server := apiservertest.Shared(t)
	i := &installation{world: w, holder: "test/default/upgrade/run-1"}
	w.scope.Target = server.Target(t, "test")
	store, err := artifact.Open(t.TempDir(), []string{"age1lvyvwawkr0mcnnnncaghunadrqkmuf9e6507x9y920xxpp866cnql7dp2z"})
	require.NoError(t, err)
	t.Cleanup(func() { store.Close() })
	i.activities = &Activities{Clusters: workerClusters(t, "test"), Artifacts: store}
	i.values = map[string]any{
		"cluster": map[string]any{"name": w.cluster},
		"agent":   map[string]any{"agentId": "fake-agent", "enrollToken": oldToken},
	}
	i.store(writeChart(t, "1.8.6", "2.16.3"), 1, release.StatusDeployed, i.values)
	_, err = w.admin.Typed.CoordinationV1().Leases(w.scope.Release.Namespace).Create(t.Context(), &coordinationv1.Lease{
		ObjectMeta: metav1.ObjectMeta{Name: lease.Name(w.scope.Release.Name)},
		Spec:       coordinationv1.LeaseSpec{HolderIdentity: &i.holder},
	}, metav1.CreateOptions{})
	require.NoError(t, err)
	return i
}

// store writes a revision as Helm keeps it and applies its objects.
func (i *installation) store(folder string, revision int, status release.Status, values map[string]any) {
	i.t.Helper()
	c, err := loader.LoadDir(folder)
	require.NoError(i.t, err)
	rendered := i.apply(c, revision, values)
	require.NoError(i.t, i.releases().Create(&release.Release{
		Name: i.scope.Release.Name, Namespace: i.scope.Release.Namespace, Version: revision, Chart: c, Config: values, Manifest: rendered.Manifest,
		Info: &release.Info{Status: status, LastDeployed: helmtime.Now(), Description: "made by the test"},
	}))
}

func (i *installation) releases() *storage.Storage {
	secrets := driver.NewSecrets(i.admin.Typed.CoreV1().Secrets(i.scope.Release.Namespace))
	secrets.Log = func(string, ...any) {}
	return storage.Init(secrets)
}

func (i *installation) apply(c *chart.Chart, revision int, values map[string]any) *helm.Rendered {
	i.t.Helper()
	rendered, err := helm.Render(i.t.Context(), i.admin, helm.RenderRequest{
		Namespace: i.scope.Release.Namespace, Release: i.scope.Release.Name, Revision: revision, Chart: c, Values: values,
	})
	require.NoError(i.t, err)
	for _, u := range rendered.Objects {
		if u.GetNamespace() == "" && u.GetKind() != "TensorFusionCluster" {
			u.SetNamespace(i.scope.Release.Namespace)
		}
		labels := u.GetLabels()
		if labels == nil {
			labels = map[string]string{}
		}
		labels["app.kubernetes.io/managed-by"] = "Helm"
		u.SetLabels(labels)
		annotations := u.GetAnnotations()
		if annotations == nil {
			annotations = map[string]string{}
		}
		annotations["meta.helm.sh/release-name"], annotations["meta.helm.sh/release-namespace"] = i.scope.Release.Name, i.scope.Release.Namespace
		u.SetAnnotations(annotations)
		_, err := i.admin.Apply(i.t.Context(), u, helm.FieldManager, true, false)
		require.NoError(i.t, err)
	}
	return rendered
}

// intent is the upgrade to chart 1.8.7.
func (i *installation) intent() Intent {
	i.t.Helper()
	return Intent{
		Chart: Chart{Ref: writeChart(i.t, "1.8.7", "2.17.0"), Version: "1.8.7"}, HypervisorImage: newHypervisor, IsolationPolicy: "static",
	}
}

func (i *installation) release(intent Intent, from int) (ReleaseResult, error) {
	return i.activities.UpgradeRelease(i.t.Context(), ReleaseRequest{
		Scope: i.scope, Intent: intent, FromRevision: from, Holder: i.holder, Limit: time.Minute,
	})
}
