package tensorfusion

import (
	"encoding/json"
	"fmt"
	"io"
	"log"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	registryserver "github.com/google/go-containerregistry/pkg/registry"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"helm.sh/helm/v3/pkg/release"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/refit-run/refit/activities/artifact"
	"github.com/refit-run/refit/activities/finding"
	"github.com/refit-run/refit/activities/helm"
	"github.com/refit-run/refit/activities/registry"
)

// mustHide fails when a value leaves an activity with a secret in it.
func mustHide(t *testing.T, value any, secrets ...string) {
	t.Helper()
	text, err := json.Marshal(value)
	require.NoError(t, err)
	if e, ok := value.(error); ok {
		text = []byte(e.Error())
	}
	for _, s := range secrets {
		assert.NotContains(t, string(text), s)
	}
}

func TestAnIntentIsFixedByItsDigest(t *testing.T) {
	i := install(t)
	intent := i.intent()
	first, err := i.activities.resolve(t.Context(), i.client, i.scope, intent)
	require.NoError(t, err)
	require.NotEmpty(t, first.intent.Digest)

	again, err := i.activities.resolve(t.Context(), i.client, i.scope, first.intent)
	require.NoError(t, err)
	assert.Equal(t, first.intent, again.intent)

	changed := first.intent
	changed.Values.Inline = map[string]any{"controller": map[string]any{"replicaCount": 3}}
	_, err = i.activities.resolve(t.Context(), i.client, i.scope, changed)
	f, class, ok := finding.Of(err)
	require.True(t, ok)
	assert.Equal(t, finding.Stop, class)
	assert.Contains(t, f.Next, "plan anew")

	otherChart := first.intent
	require.NoError(t, os.WriteFile(filepath.Join(otherChart.Chart.Ref, "templates", "more.yaml"), []byte("{}"), 0o644))
	_, err = i.activities.resolve(t.Context(), i.client, i.scope, otherChart)
	f, _, ok = finding.Of(err)
	require.True(t, ok)
	assert.Contains(t, f.Why, "not the chart that was planned")
}

func TestSecretValuesAreReferences(t *testing.T) {
	i := install(t)
	inline := i.intent()
	inline.Values.Inline = map[string]any{"greptime": map[string]any{"password": "fake-inline-password"}}
	_, err := i.activities.resolve(t.Context(), i.client, i.scope, inline)
	require.Error(t, err)
	assert.Contains(t, err.Error(), "values.greptime.password")
	mustHide(t, err, "fake-inline-password")

	_, err = i.admin.Typed.CoreV1().Secrets(i.scope.Release.Namespace).Create(t.Context(), &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{Name: "db"}, StringData: map[string]string{"password": "fake-db-password-1"},
	}, metav1.CreateOptions{})
	require.NoError(t, err)
	reference := i.intent()
	reference.Values.Secrets = []SecretReference{{Path: "greptime.password", Namespace: i.scope.Release.Namespace, Secret: "db", Key: "password"}}
	r, err := i.activities.resolve(t.Context(), i.client, i.scope, reference)
	require.NoError(t, err)
	value, _ := helm.GetPath(r.values, "greptime.password")
	assert.Equal(t, "fake-db-password-1", value)
	assert.NotContains(t, r.masker.String("login with fake-db-password-1 failed"), "fake-db-password-1")
}

func TestASecretComesFromAFileOrAVariableOfTheWorkerToo(t *testing.T) {
	i := install(t)
	folder := t.TempDir()
	write := func(name, content string) string {
		path := filepath.Join(folder, name)
		require.NoError(t, os.WriteFile(path, []byte(content), 0o600))
		return path
	}
	t.Setenv("REFIT_SECRET_GREPTIME", "fake-password-of-a-variable")
	for name, c := range map[string]struct {
		values Values
		want   string
	}{
		"file":     {Values{Secrets: []SecretReference{{Path: "greptime.password", File: write("password", "fake-password-of-a-file\n")}}}, "fake-password-of-a-file"},
		"variable": {Values{Secrets: []SecretReference{{Path: "greptime.password", Variable: "REFIT_SECRET_GREPTIME"}}}, "fake-password-of-a-variable"},
		"secrets file": {Values{SecretsFile: write("secrets.yaml", "greptime: {password: fake-password-of-all, user: fake-user-of-all}\n")},
			"fake-password-of-all"},
	} {
		t.Run(name, func(t *testing.T) {
			intent := i.intent()
			intent.Values = c.values
			r, err := i.activities.resolve(t.Context(), i.client, i.scope, intent)
			require.NoError(t, err)
			got, _ := helm.GetPath(r.values, "greptime.password")
			assert.Equal(t, c.want, got)
			assert.NotContains(t, r.masker.String("login with "+c.want+" as fake-user-of-all failed"), c.want)
			if c.values.SecretsFile != "" {
				assert.NotContains(t, r.masker.String("login as fake-user-of-all failed"), "fake-user-of-all", "everything in that file is secret")
			}
		})
	}
	for name, v := range map[string]Values{
		"no such file":          {Secrets: []SecretReference{{Path: "a.b", File: filepath.Join(folder, "none")}}},
		"no such variable":      {Secrets: []SecretReference{{Path: "a.b", Variable: "REFIT_SECRET_NONE"}}},
		"the worker's own":      {Secrets: []SecretReference{{Path: "a.b", Variable: "PATH"}}},
		"two sources":           {Secrets: []SecretReference{{Path: "a.b", Variable: "REFIT_SECRET_GREPTIME", File: "/x"}}},
		"half a Secret":         {Secrets: []SecretReference{{Path: "a.b", Namespace: "x", Secret: "y"}}},
		"a broken secrets file": {SecretsFile: write("broken.yaml", "greptime: {password: fake-broken-password\n")},
	} {
		t.Run(name, func(t *testing.T) {
			intent := i.intent()
			intent.Values = v
			_, err := i.activities.resolve(t.Context(), i.client, i.scope, intent)
			f, class, ok := finding.Of(err)
			require.True(t, ok, err)
			assert.Equal(t, finding.Stop, class)
			assert.NotEmpty(t, f.Next)
			mustHide(t, err, "fake-broken-password")
		})
	}
}

func TestTheUsersValuesSurviveAndThePinsHold(t *testing.T) {
	i := install(t)
	r, err := i.activities.resolve(t.Context(), i.client, i.scope, i.intent())
	require.NoError(t, err)
	token, _ := helm.GetPath(r.values, "agent.enrollToken")
	assert.Equal(t, oldToken, token)
	assert.Equal(t, ValuesReview{}, r.review())
	target, err := r.targetSide()
	require.NoError(t, err)
	require.Len(t, target.Clusters, 1)
	assert.True(t, policyOf("x", target.Clusters[0].Spec.GPUPools[0]).held(), "the chart's template says true")
	assert.Equal(t, "2.17.0", versionString(target.Controller))
	assert.Equal(t, "static", target.IsolationPolicy)
}

func TestAValuesFileMustNotChangeTheAgentInSilence(t *testing.T) {
	i := install(t)
	intent := i.intent()
	intent.Values.File = filepath.Join(t.TempDir(), "values.yaml")
	require.NoError(t, os.WriteFile(intent.Values.File, []byte("agent: {enrollToken: fake-token-of-the-file}\ncontroler: {replicaCount: 3}\n"), 0o600))
	r, err := i.activities.resolve(t.Context(), i.client, i.scope, intent)
	require.NoError(t, err)
	review := r.review()
	assert.Equal(t, []string{"agent.enrollToken"}, review.Agent)
	require.Len(t, review.Unknown, 1)
	assert.Contains(t, review.Unknown[0], "controller")
}

func TestTheReleaseIsUpgradedOnceAndStaysHeld(t *testing.T) {
	i := install(t)
	r, err := i.activities.resolve(t.Context(), i.client, i.scope, i.intent())
	require.NoError(t, err)
	began := time.Now()
	out, err := i.release(r.intent, 1)
	require.NoError(t, err)
	assert.WithinRange(t, out.Deployed, began.Truncate(time.Second), time.Now())
	assert.Equal(t, ReleaseResult{Revision: 2, Chart: "1.8.7", Deployed: out.Deployed}, out)
	assert.True(t, i.policy().held())
	d, err := controllerDeployment(t.Context(), i.admin, i.scope.Release.Namespace)
	require.NoError(t, err)
	image, policy := controllerOf(d.Spec.Template.Spec)
	assert.Equal(t, "registry.test/operator:2.17.0", image)
	assert.Equal(t, "static", policy)

	again, err := i.release(r.intent, 1)
	require.NoError(t, err)
	// A later run must tell from it which pods are of this revision.
	assert.Equal(t, ReleaseResult{Revision: 2, Chart: "1.8.7", Already: true, Deployed: out.Deployed}, again)
}

func TestAForeignRevisionStopsTheUpgrade(t *testing.T) {
	i := install(t)
	r, err := i.activities.resolve(t.Context(), i.client, i.scope, i.intent())
	require.NoError(t, err)
	_, err = i.release(r.intent, 7)
	f, class, ok := finding.Of(err)
	require.True(t, ok)
	assert.Equal(t, finding.Stop, class)
	assert.Equal(t, "T08", f.Row)
}

// T11: with cluster.enabled false Helm does not touch the TensorFusionCluster.
func TestAClusterOfTheUserIsEditedDirectly(t *testing.T) {
	i := install(t)
	i.edit("tensorfusionclusters", i.cluster, `[{"op":"add","path":"/spec/gpuPools/0/specTemplate/capacityConfig","value":{"warmResources":{"vram":"1Gi"}}}]`)
	cluster := func() *unstructured.Unstructured {
		u, err := i.admin.Dynamic.Resource(clustersGVR).Get(t.Context(), i.cluster, metav1.GetOptions{})
		require.NoError(t, err)
		return u
	}
	before := cluster()
	intent := i.intent()
	intent.Values.Inline = map[string]any{"cluster": map[string]any{"enabled": false}}
	r, err := i.activities.resolve(t.Context(), i.client, i.scope, intent)
	require.NoError(t, err)
	_, err = i.release(r.intent, 1)
	require.NoError(t, err)
	after := cluster()
	fc, err := decode[FusionCluster](after)
	require.NoError(t, err)
	assert.Equal(t, newHypervisor, fc.Spec.GPUPools[0].Spec.Components.Hypervisor.Image)
	assert.True(t, i.policy().held())
	assert.Equal(t, strings.ReplaceAll(fmt.Sprint(withoutOurs(content(before))), oldHypervisor, newHypervisor), fmt.Sprint(withoutOurs(content(after))),
		"the rest stays its owner's")
}

// T21: chart and values of the stored revision, but never its credentials.
func TestARollbackBringsBackNoOldCredential(t *testing.T) {
	i := install(t)
	values := helm.Merge(i.values, map[string]any{"agent": map[string]any{"enrollToken": newToken}, "dynamicConfig": map[string]any{"metricsTTL": "7d"}})
	i.setStatus(1, release.StatusSuperseded)
	i.store(writeChart(t, "1.8.7", "2.17.0"), 2, release.StatusDeployed, values)
	vendor, err := i.admin.Typed.CoreV1().Secrets(i.scope.Release.Namespace).Get(t.Context(), vendorSecret, metav1.GetOptions{})
	require.NoError(t, err)
	vendor.Data["ak"] = []byte(vendorKey)
	_, err = i.admin.Typed.CoreV1().Secrets(i.scope.Release.Namespace).Update(t.Context(), vendor, metav1.UpdateOptions{})
	require.NoError(t, err)

	seen, err := i.activities.InspectRevision(t.Context(), RevisionRequest{Scope: i.scope})
	require.NoError(t, err)
	assert.Equal(t, 1, seen.Revision)
	assert.Equal(t, "1.8.6", seen.Versions.Chart)
	assert.Equal(t, "registry.test/hypervisor:2.15.0", seen.HypervisorImage)
	assert.Equal(t, []string{"agent.enrollToken"}, seen.Substituted)
	mustHide(t, seen, oldToken, newToken)

	r, err := i.activities.resolve(t.Context(), i.client, i.scope, Intent{Chart: Chart{Revision: 1}, HypervisorImage: seen.HypervisorImage, IsolationPolicy: "static"})
	require.NoError(t, err)
	_, err = i.release(r.intent, 2)
	require.NoError(t, err)
	current, err := helm.Current(t.Context(), i.admin, i.scope.Release.Namespace, i.scope.Release.Name)
	require.NoError(t, err)
	assert.Equal(t, "1.8.6", current.Chart.Metadata.Version)
	token, _ := helm.GetPath(current.Config, "agent.enrollToken")
	assert.Equal(t, newToken, token)
	_, hasTTL := helm.GetPath(current.Config, "dynamicConfig.metricsTTL")
	assert.False(t, hasTTL, "the revision's other values come back")
	assert.NotContains(t, current.Manifest, oldToken)
	assert.True(t, i.policy().held(), "the stored manifest said autoUpdateHypervisor true")
	live, err := i.admin.Typed.CoreV1().Secrets(i.scope.Release.Namespace).Get(t.Context(), vendorSecret, metav1.GetOptions{})
	require.NoError(t, err)
	assert.Equal(t, vendorKey, string(live.Data["ak"]))
}

func TestCRDsAreAppliedAndEstablished(t *testing.T) {
	i := install(t)
	out, err := i.activities.ApplyCRDs(t.Context(), CRDsRequest{Scope: i.scope, Intent: i.intent(), Limit: time.Minute})
	require.NoError(t, err)
	assert.Equal(t, []string{"schedulingconfigtemplates.tensor-fusion.ai"}, out.Applied)

	kept, err := i.activities.ApplyCRDs(t.Context(), CRDsRequest{Scope: i.scope, Intent: Intent{Chart: Chart{Revision: 1}}, Limit: time.Minute})
	require.NoError(t, err)
	assert.Empty(t, kept.Applied, "a rollback leaves the newer CRDs in place")
}

func TestTheBackupIsWholeAndEncrypted(t *testing.T) {
	i := install(t)
	out, err := i.activities.Backup(t.Context(), BackupRequest{Scope: i.scope, Key: "run-1"})
	require.NoError(t, err)
	for _, name := range []string{
		"values.yaml", "manifest.yaml", "customresourcedefinitions", "deployments", "statefulsets", "configmaps", "secrets",
		"tensorfusionclusters.tensor-fusion.ai", "gpupools.tensor-fusion.ai", "providerconfigs.tensor-fusion.ai",
	} {
		assert.Contains(t, out.Counts, name)
	}
	assert.Equal(t, 1, out.Counts["deployments"])
	assert.Positive(t, out.Counts["tensorfusionclusters.tensor-fusion.ai"])
	for _, ref := range out.Artifacts {
		assert.Equal(t, artifact.Secret, ref.Kind)
		data, err := os.ReadFile(strings.TrimPrefix(ref.URL, "file://"))
		if os.IsNotExist(err) {
			data, err = os.ReadFile(strings.TrimPrefix(ref.URL, "file://") + ".age")
		}
		require.NoError(t, err)
		assert.NotContains(t, string(data), oldToken)
	}
	mustHide(t, out, oldToken)
}

func TestWithoutRecipientsThereIsNoBackup(t *testing.T) {
	i := install(t)
	store, err := artifact.Open(t.TempDir(), nil)
	require.NoError(t, err)
	defer store.Close()
	i.activities.Artifacts = store
	_, err = i.activities.Backup(t.Context(), BackupRequest{Scope: i.scope, Key: "run-1"})
	f, _, ok := finding.Of(err)
	require.True(t, ok)
	assert.Equal(t, "T06", f.Row)
}

func TestTheDiffIsMaskedAndNamesWhatChanges(t *testing.T) {
	i := install(t)
	intent := i.intent()
	intent.Values.Inline = map[string]any{"controller": map[string]any{"replicaCount": 3}}
	out, err := i.activities.Diff(t.Context(), DiffRequest{Scope: i.scope, Intent: intent})
	require.NoError(t, err)
	var objects []string
	for _, c := range out.Changes {
		objects = append(objects, c.Action+" "+c.Object)
	}
	assert.Contains(t, objects, "change Deployment/"+i.scope.Release.Namespace+"/tensor-fusion-sys-controller")
	assert.Contains(t, objects, "change TensorFusionCluster/"+i.cluster)
	assert.Contains(t, out.Text, "2.17.0")
	mustHide(t, out, oldToken)
	blocking, _ := blockingOf(out.Checks)
	assert.Empty(t, blocking)
}

// emptyRegistry answers for the chart's registry.
func (i *installation) emptyRegistry() {
	images := httptest.NewServer(registryserver.New(registryserver.Logger(log.New(io.Discard, "", 0))))
	i.t.Cleanup(images.Close)
	var err error
	i.activities.Registry, err = registry.ParseMirrors("registry.test=" + images.URL)
	require.NoError(i.t, err)
}

func TestThePreflightTellsEverythingAtOnce(t *testing.T) {
	i := install(t)
	i.world.control()
	i.emptyRegistry()
	out, err := i.activities.Preflight(t.Context(), PreflightRequest{Scope: i.scope, Intent: i.intent(), Acknowledged: []string{"T04", "T17"}})
	require.NoError(t, err)
	assert.Equal(t, "2.16.3", out.Source.Controller)
	assert.Equal(t, "2.17.0", out.Target.Controller)
	assert.Equal(t, 1, out.Source.Revision)
	assert.True(t, out.NeedsNudge)
	assert.False(t, out.NoChange)
	assert.Equal(t, "static", out.Goal.IsolationPolicy)
	assert.NotEmpty(t, out.Intent.Digest)
	verdicts := map[string]bool{}
	for _, c := range out.Checks {
		verdicts[c.Row] = c.OK || c.Acknowledged
	}
	for _, row := range []string{"T01", "T02", "T03", "T04", "T05", "T06", "T08", "T26", "P01", "P03", "P05", "P10"} {
		assert.True(t, verdicts[row], row)
	}
	assert.False(t, verdicts["P06"], "no controller leads here")
	assert.False(t, verdicts["P09"], "the registry is empty")
	mustHide(t, out, oldToken)
}

// setStatus changes the status of a stored revision.
func (i *installation) setStatus(revision int, status release.Status) {
	i.t.Helper()
	r, err := helm.Stored(i.t.Context(), i.admin, i.scope.Release.Namespace, i.scope.Release.Name, revision)
	require.NoError(i.t, err)
	r.Info.Status = status
	require.NoError(i.t, i.releases().Update(r))
}
