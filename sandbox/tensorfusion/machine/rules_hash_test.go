package machine

import (
	"encoding/json"
	"regexp"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

func process(t *testing.T, version string) Process {
	t.Helper()
	v, err := ParseVersion(version)
	if err != nil {
		t.Fatal(err)
	}
	return Process{Version: v, MaxCrash: 5}
}

func testPool(annotations map[string]string) *Pool {
	return &Pool{Name: poolName, Annotations: annotations, Spec: baseSpec()}
}

func must(t *testing.T) func(string, error) string {
	return func(s string, err error) string {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
}

var revision = map[string]string{RevisionsAnnotation: `{"nvidia":"aaaa"}`}

func TestParseVersionReadsTags(t *testing.T) {
	for tag, want := range map[string]string{"2.16.3": "2.16.3", "v2.17.0": "2.17.0", "2.15": "2.15.0", "2.17.1-rc1": "2.17.1"} {
		v, err := ParseVersion(tag)
		if err != nil || v.String() != want {
			t.Errorf("%s: found %s, %v", tag, v, err)
		}
	}
	for _, tag := range []string{"latest", "1.65.8", "sha256"} {
		if _, err := ParseVersion(tag); err == nil {
			t.Errorf("%s must be refused", tag)
		}
	}
}

func TestRule01_HashIsFNVOverTheComposedSpec(t *testing.T) {
	p, pool := process(t, "2.17.0"), testPool(nil)
	h := must(t)(p.PoolHash(pool))
	if !regexp.MustCompile(`^[0-9a-f]{16}$`).MatchString(h) {
		t.Errorf("hash %q", h)
	}
	if again := must(t)(p.PoolHash(testPool(nil))); again != h {
		t.Error("the same input must give the same hash")
	}
	pool.Spec.ComponentConfig.Hypervisor.PodTemplate = json.RawMessage(`{"template":{"spec":{"containers":[{"name":"h","env":[{"name":"NUDGE","value":"1"}]}]}}}`)
	if must(t)(p.PoolHash(pool)) == h {
		t.Error("an extra environment variable must change the hash")
	}
	pool = testPool(nil)
	pool.Spec.ComponentConfig.Hypervisor.PodTemplate = json.RawMessage(`{"template":{"metadata":{"labels":{"a":"b"}}}}`)
	if must(t)(p.PoolHash(pool)) != h {
		t.Error("labels are not hashed")
	}
}

func TestRule02_PoolAndNodeHashAreEqualOnlyBeforeTheirInputsDiffer(t *testing.T) {
	for _, c := range []struct {
		version     string
		annotations map[string]string
		equal       bool
	}{
		{"2.9.0", revision, true}, {"2.13.0", revision, true}, {"2.14.0", nil, true},
		{"2.14.0", revision, false}, {"2.15.0", nil, false}, {"2.17.0", revision, false},
	} {
		p, pool := process(t, c.version), testPool(c.annotations)
		h, hn := must(t)(p.PoolHash(pool)), must(t)(p.NodeHash(pool, p.isolationMode(&pool.Spec, nil, GPUNode{})))
		if (h == hn) != c.equal {
			t.Errorf("%s with %v: H %s, Hn %s, expected equal %v", c.version, c.annotations, h, hn, c.equal)
		}
	}
	dynamic, pool := process(t, "2.17.0"), testPool(nil)
	dynamic.Policy = DynamicPolicy
	before, node := must(t)(dynamic.PoolHash(pool)), must(t)(dynamic.NodeHash(pool, "soft"))
	pool.Spec.NodeManagerConfig.DefaultIsolationMode = "hard"
	if must(t)(dynamic.PoolHash(pool)) != before {
		t.Error("under policy dynamic H leaves the isolation mode out")
	}
	if must(t)(process(t, "2.17.0").NodeHash(pool, "soft")) != node {
		t.Error("the policy is no part of Hn")
	}
}

func TestRule02_FirstMatchingIsolationRuleWins(t *testing.T) {
	p, pool := process(t, "2.15.0"), testPool(nil)
	match := func(v string) *metav1.LabelSelector {
		return &metav1.LabelSelector{MatchLabels: map[string]string{"tier": v}}
	}
	pool.Spec.NodeManagerConfig.IsolationModeRules = []IsolationRule{{"hard", match("a")}, {"shared", match("a")}}
	if mode := p.isolationMode(&pool.Spec, &Node{Labels: map[string]string{"tier": "a"}}, GPUNode{}); mode != "hard" {
		t.Errorf("found %s", mode)
	}
	if mode := p.isolationMode(&pool.Spec, &Node{}, GPUNode{}); mode != "soft" {
		t.Errorf("found %s", mode)
	}
}

func TestRule03_WorkerAndClientHashes(t *testing.T) {
	pool := testPool(nil)
	w, c := must(t)(WorkerHash(&pool.Spec)), must(t)(ClientHash(&pool.Spec))
	label := must(t)(WorkloadHash(&pool.Spec, json.RawMessage(`{"replicas":1}`)))
	if label == w {
		t.Error("a worker's label never equals componentStatus.worker")
	}
	pool.Annotations = revision
	if must(t)(WorkerHash(&pool.Spec)) != w || must(t)(ClientHash(&pool.Spec)) != c {
		t.Error("neither contains the ProviderConfig")
	}
	port := int32(9000)
	pool.Spec.ComponentConfig.Hypervisor.PortNumber = &port
	if must(t)(WorkerHash(&pool.Spec)) == w {
		t.Error("the hypervisor's port is part of W")
	}
	pool.Spec.ComponentConfig.Hypervisor.Image = "other"
	pool.Spec.ComponentConfig.Client.OperatorEndpoint = "http://elsewhere"
	if must(t)(ClientHash(&pool.Spec)) == c {
		t.Error("operatorEndpoint is part of C")
	}
}

func TestRule04_CodeDefaultsAreHashedPerVersion(t *testing.T) {
	pool := testPool(nil)
	seen := map[string]string{}
	for _, version := range []string{"2.9.0", "2.13.0", "2.14.0", "2.15.0", "2.16.3"} {
		h := must(t)(process(t, version).PoolHash(pool))
		if other := seen[h]; other != "" {
			t.Errorf("%s and %s hash alike", version, other)
		}
		seen[h] = version
	}
	if must(t)(process(t, "2.16.3").PoolHash(pool)) != must(t)(process(t, "2.17.0").PoolHash(pool)) {
		t.Error("2.16 and 2.17 compose alike: H must stay equal")
	}
	newer := process(t, "2.16.3")
	newer.KubeMinor = 30
	if must(t)(newer.PoolHash(pool)) == must(t)(process(t, "2.16.3").PoolHash(pool)) {
		t.Error("Kubernetes 1.30 adds an AppArmor profile")
	}
}

func TestNamesFollowTheVersionAndFitTheLimit(t *testing.T) {
	long := strings.Repeat("x", 70)
	for version, prefix := range map[string]string{"2.13.0": "tf-hypervisor-", "2.14.0": "hypervisor-"} {
		v := process(t, version).Version
		if got := v.HypervisorName("gpu-0"); got != prefix+"gpu-0" {
			t.Errorf("%s: %s", version, got)
		}
		if got := v.HypervisorName(long); len(got) != 63 || !strings.HasPrefix(got, prefix) {
			t.Errorf("%s: %s has %d characters", version, got, len(got))
		}
	}
}

func TestRule26_ProviderImageWinsOverTheConfiguredWorker(t *testing.T) {
	pool := testPool(nil)
	spec, err := ComposeWorker(&pool.Spec, nil, "n0")
	if err != nil || spec.Containers[0].Image != "worker:1" {
		t.Fatalf("without a provider: %v, %v", spec.Containers, err)
	}
	w := &world{}
	withProvider(w)
	if spec, err = ComposeWorker(&pool.Spec, w.provider, "n0"); err != nil || spec.Containers[0].Image != "provider-worker:1" {
		t.Fatalf("with a provider: %v, %v", spec.Containers, err)
	}
	before := must(t)(WorkerHash(&pool.Spec))
	w.provider.Spec.Images.RemoteWorker = "provider-worker:2"
	if must(t)(WorkerHash(&pool.Spec)) != before {
		t.Error("the label proves the template, not the image")
	}
}

func TestRevisionLeavesProviderEnvironmentValuesOut(t *testing.T) {
	w := &world{}
	withProvider(w)
	w.provider.Spec.Hypervisor = &ProviderHypervisor{ExtraEnv: []corev1.EnvVar{{Name: "A", Value: "1"}}}
	before := must(t)(w.provider.Revision())
	w.provider.Spec.Hypervisor.ExtraEnv[0].Value = "2"
	if must(t)(w.provider.Revision()) != before {
		t.Error("a changed value must keep the revision")
	}
	w.provider.Spec.Images.Middleware = "middleware:2"
	if must(t)(w.provider.Revision()) == before {
		t.Error("another middleware is another revision")
	}
}
