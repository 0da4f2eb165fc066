package tensorfusion

import (
	"context"
	"encoding/json"
	"fmt"
	"reflect"
	"slices"
	"sort"
	"strings"

	"helm.sh/helm/v3/pkg/chart"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/refit-run/refit/activities/finding"
	"github.com/refit-run/refit/activities/helm"
	"github.com/refit-run/refit/activities/kube"
	"github.com/refit-run/refit/activities/mask"
)

// Values paths of the chart that the engine sets itself.
const (
	pathHypervisorImage = "cluster.hypervisorImage"
	pathIsolationPolicy = "controller.isolationModePolicy"
)

// resolved is an intent made concrete: chart, values and pins as Helm would
// get them. It holds secrets and never leaves an activity.
type resolved struct {
	intent   Intent // with both digests
	chart    *chart.Chart
	values   map[string]any
	pins     []helm.Pin
	rendered *helm.Rendered
	current  *helm.Release
	history  helm.History
	masker   *mask.Masker
	// secretPaths of the values came from secrets files and references, of this
	// plan or of earlier ones.
	secretPaths []string
	fileValues  map[string]any
	substituted []string
}

// policyPins keep the three flags false whatever the chart's template says: it
// writes autoUpdateHypervisor true and offers no value for it (facts, section 7).
func policyPins() []helm.Pin {
	const block = "spec.gpuPools[*].specTemplate.nodeManagerConfig.nodePoolRollingUpdatePolicy."
	var pins []helm.Pin
	for _, flag := range []string{"autoUpdateHypervisor", "autoUpdateWorker", "autoUpdateClient"} {
		pins = append(pins, helm.Pin{Kind: "TensorFusionCluster", Path: block + flag, Value: false})
	}
	return pins
}

// resolve makes the intent concrete and stops when its digest or the chart's
// is not the one that was approved. Errors are masked.
func (a *Activities) resolve(ctx context.Context, c *kube.Client, s Scope, intent Intent) (*resolved, error) {
	r := &resolved{intent: intent, pins: policyPins(), masker: mask.New()}
	err := a.resolveInto(ctx, c, s, r)
	return r, r.masker.Error(err)
}

func (a *Activities) resolveInto(ctx context.Context, c *kube.Client, s Scope, r *resolved) error {
	var err error
	if r.history, err = helm.Releases(ctx, c, s.Release.Namespace, s.Release.Name); err != nil {
		return err
	}
	if r.current, err = currentRelease(ctx, c, s, r.history); err != nil {
		return err
	}
	if err := r.learnSecrets(ctx, c, s); err != nil {
		return err
	}
	if err := a.resolveChart(ctx, c, s, r); err != nil {
		return err
	}
	if err := r.resolveValues(ctx, c); err != nil {
		return err
	}
	r.masker.Merge(mask.FromValues(r.values))
	if err := r.seal(); err != nil {
		return err
	}
	r.rendered, err = helm.Render(ctx, c, helm.RenderRequest{
		Namespace: s.Release.Namespace, Release: s.Release.Name, Revision: r.current.Version + 1,
		Chart: r.chart, Values: r.values, Pins: r.pins,
	})
	if err != nil {
		return err
	}
	for _, u := range r.rendered.Objects {
		r.masker.Merge(mask.FromObjects(u.Object))
	}
	return nil
}

// currentRelease is the deployed revision; between Helm's last two writes none
// is, and then the newest superseded one is what the values come from.
func currentRelease(ctx context.Context, c *kube.Client, s Scope, h helm.History) (*helm.Release, error) {
	if _, ok := h.Deployed(); !ok {
		for _, i := range slices.Backward(h) {
			if i.Status == "superseded" {
				return helm.Stored(ctx, c, s.Release.Namespace, s.Release.Name, i.Revision)
			}
		}
	}
	return helm.Current(ctx, c, s.Release.Namespace, s.Release.Name)
}

// learnSecrets teaches the masker every value that must not be shown: of the
// namespace's Secrets and of the release's values.
func (r *resolved) learnSecrets(ctx context.Context, c *kube.Client, s Scope) error {
	secrets, err := c.Typed.CoreV1().Secrets(s.Release.Namespace).List(ctx, metav1.ListOptions{})
	if err != nil {
		return kube.Wrap(err, "Secrets of namespace "+s.Release.Namespace)
	}
	for _, secret := range secrets.Items {
		// Helm's own Secrets hold whole releases: as values they match nothing.
		if secret.Type != "helm.sh/release.v1" && secret.Type != corev1.SecretTypeServiceAccountToken {
			r.masker.Merge(mask.FromSecret(secret.Data))
		}
	}
	r.learnRevision(r.current)
	return nil
}

// learnRevision teaches the masker the secret values of a stored revision, by
// their keys and by the paths that the revision was stored with.
func (r *resolved) learnRevision(stored *helm.Release) {
	r.masker.Merge(mask.FromValues(stored.Config))
	values := leaves(stored.Config)
	for _, path := range helm.SecretPaths(stored) {
		r.secretPaths = union(r.secretPaths, path)
		var value any
		if json.Unmarshal([]byte(values[path]), &value) == nil {
			r.masker.Merge(mask.FromAll(map[string]any{path: value}))
		}
	}
}

func (a *Activities) resolveChart(ctx context.Context, c *kube.Client, s Scope, r *resolved) error {
	want := r.intent.Chart.Digest
	digest := ""
	if r.intent.Chart.Revision != 0 {
		stored, err := helm.Stored(ctx, c, s.Release.Namespace, s.Release.Name, r.intent.Chart.Revision)
		if err != nil {
			return err
		}
		r.learnRevision(stored)
		r.chart = stored.Chart
		r.values = helm.Merge(stored.Config)
		if digest, err = helm.Digest(stored.Chart); err != nil {
			return err
		}
		if err := r.substitute(ctx, c, s); err != nil {
			return err
		}
	} else {
		var err error
		if r.chart, digest, err = a.Registry.PullChart(ctx, r.intent.Chart.Ref, r.intent.Chart.Version); err != nil {
			return err
		}
		r.values = helm.Merge(r.current.Config)
	}
	r.intent.Chart.Digest = digest
	if want != "" && want != digest {
		return finding.Finding{
			Object: "chart " + r.intent.Chart.Ref + " " + r.intent.Chart.Version, Expected: "digest " + want, Found: digest,
			Why:  "it is not the chart that was planned and approved",
			Next: "find out who published the version again, then plan anew",
		}.Error(finding.Stop)
	}
	return helm.CheckChart(r.chart)
}

// resolveValues lays file, inline values and references over the base, and
// sets what every plan makes explicit.
func (r *resolved) resolveValues(ctx context.Context, c *kube.Client) error {
	v := r.intent.Values
	if paths := mask.RefuseInline(v.Inline); len(paths) > 0 {
		return finding.Finding{
			Object: "plan, values." + strings.Join(paths, ", values."), Expected: "a reference to a Secret", Found: "an inline value",
			Why: "inputs are kept in workflow history", Next: "put it into a Secret and name it under values.secrets",
		}.Error(finding.Stop)
	}
	var err error
	if r.fileValues, err = readValues(v.File); err != nil {
		return err
	}
	secrets, err := readValues(v.SecretsFile)
	if err != nil {
		return err
	}
	r.masker.Merge(mask.FromValues(r.fileValues))
	r.masker.Merge(mask.FromAll(secrets))
	for _, path := range sortedKeys(leaves(secrets)) {
		r.secretPaths = union(r.secretPaths, path)
	}
	r.values = helm.Merge(r.values, r.fileValues, v.Inline, secrets)
	r.fileValues = helm.Merge(r.fileValues, secrets) // both say what the plan changes
	for _, ref := range v.Secrets {
		value, err := ref.read(ctx, c)
		if err != nil {
			return err
		}
		r.masker.Add(value)
		r.secretPaths = union(r.secretPaths, ref.Path)
		if err := helm.SetPath(r.values, ref.Path, value); err != nil {
			return err
		}
	}
	for path, value := range map[string]string{pathHypervisorImage: r.intent.HypervisorImage, pathIsolationPolicy: r.intent.IsolationPolicy} {
		if _, known := helm.GetPath(r.chart.Values, path); known && value != "" {
			if err := helm.SetPath(r.values, path, value); err != nil {
				return err
			}
		}
	}
	return nil
}

// seal computes the intent's digest and compares it with the approved one.
func (r *resolved) seal() error {
	want := r.intent.Digest
	digest, err := helm.Digest(map[string]any{"chart": r.intent.Chart.Digest, "values": r.values, "pins": r.pins})
	if err != nil {
		return err
	}
	r.intent.Digest = digest
	if want != "" && want != digest {
		return finding.Finding{
			Object: "intent of the release", Expected: "digest " + want + " as planned", Found: digest,
			Why:  "the values, a referenced Secret or the values file changed since the plan was approved",
			Next: "plan anew",
		}.Error(finding.Stop)
	}
	return nil
}

// carriedOver are the secret values of a stored revision that today's replace
// in a rollback: old ones were rotated for a reason.
var carriedOver = []string{
	"agent.enrollToken", "agent.agentId", "greptime.password",
	"cloudVendorCredentials.accessKey", "cloudVendorCredentials.secretKey",
}

// vendorSecret is the source of truth of the cloud vendor's keys: the chart
// renders it only once, and a rotation replaces it (facts, section 13).
const vendorSecret = "tf-cloud-vendor-credentials"

var vendorKeys = map[string]string{"cloudVendorCredentials.accessKey": "ak", "cloudVendorCredentials.secretKey": "sk"}

// substitute puts today's secret values into those of a stored revision.
func (r *resolved) substitute(ctx context.Context, c *kube.Client, s Scope) error {
	vendor := map[string]string{}
	secrets, err := c.Typed.CoreV1().Secrets(s.Release.Namespace).List(ctx, metav1.ListOptions{FieldSelector: "metadata.name=" + vendorSecret})
	if err != nil {
		return kube.Wrap(err, "Secret/"+s.Release.Namespace+"/"+vendorSecret)
	}
	for _, secret := range secrets.Items {
		for path, key := range vendorKeys {
			vendor[path] = string(secret.Data[key])
		}
	}
	for _, path := range carriedOver {
		was, had := helm.GetPath(r.values, path)
		today, has := helm.GetPath(r.current.Config, path)
		if v := vendor[path]; v != "" && (had || has) {
			today, has = v, true
		}
		switch {
		case has:
			if err := helm.SetPath(r.values, path, today); err != nil {
				return err
			}
		case had:
			removePath(r.values, path)
		}
		if had != has || !reflect.DeepEqual(was, today) {
			r.substituted = append(r.substituted, path)
		}
	}
	return nil
}

func removePath(values map[string]any, path string) {
	steps := strings.Split(path, ".")
	for _, step := range steps[:len(steps)-1] {
		next, ok := values[step].(map[string]any)
		if !ok {
			return
		}
		values = next
	}
	delete(values, steps[len(steps)-1])
}

// review compares the intended values with the user's present ones.
func (r *resolved) review() ValuesReview {
	out := ValuesReview{Unknown: helm.UnknownKeys(r.chart.Values, r.values)}
	now, then := leaves(r.current.Config), leaves(r.values)
	planned := func(path string) bool {
		if _, inline := helm.GetPath(r.intent.Values.Inline, path); inline {
			return true
		}
		return path == pathHypervisorImage || path == pathIsolationPolicy ||
			slices.ContainsFunc(r.intent.Values.Secrets, func(s SecretReference) bool { return s.Path == path })
	}
	rollback := r.intent.Chart.Revision != 0
	for _, path := range sortedKeys(now) {
		if now[path] == then[path] || planned(path) {
			continue
		}
		_, fromFile := helm.GetPath(r.fileValues, path)
		switch {
		case strings.HasPrefix(path, "agent."):
			if !rollback || slices.Contains(carriedOver, path) {
				out.Agent = append(out.Agent, path)
			}
		case !rollback && !fromFile && then[path] == "":
			out.Lost = append(out.Lost, path)
		}
	}
	return out
}

// differing lists the paths in which a deployed revision is not as intended.
func (r *resolved) differing(live map[string]any) []string {
	want, have := leaves(r.values), leaves(live)
	var out []string
	for path, value := range want {
		if have[path] != value {
			out = append(out, path)
		}
	}
	for path := range have {
		if _, ok := want[path]; !ok {
			out = append(out, path)
		}
	}
	sort.Strings(out)
	return out
}

// leaves flattens values: dotted path to JSON of a scalar or a list. Helm
// replaces lists whole.
func leaves(values map[string]any) map[string]string {
	out := map[string]string{}
	flatten(values, "", out)
	return out
}

func flatten(node map[string]any, prefix string, out map[string]string) {
	for key, value := range node {
		path := key
		if prefix != "" {
			path = prefix + "." + key
		}
		if m, ok := value.(map[string]any); ok && len(m) > 0 {
			flatten(m, path, out)
			continue
		}
		data, err := json.Marshal(value)
		if err != nil {
			data = []byte(fmt.Sprint(value))
		}
		out[path] = string(data)
	}
}
