package e2e

import (
	"bytes"
	"compress/gzip"
	"context"
	"encoding/base64"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/refit-run/refit/workflows/protocol"
)

const (
	exitChanges = 7
	releaseName = "tensor-fusion-sys"
	// Planted by the sandbox's install, and what they are rotated to.
	oldPassword, newPassword = "fake-greptime-password-0000", "fake-greptime-password-1111"
	oldToken, newToken       = "fake-enroll-token-0000", "fake-enroll-token-1111"
)

var noGates = append(slices.Clone(quickPlan), "rollouts[0].strategy.gates=none")

// TestRollback takes one installation through two upgrades, the first of them
// in maintenance windows, a rotation of credentials and back to the revision
// that Helm itself installed: its stored manifest has auto update on and the
// credentials of that time.
func TestRollback(t *testing.T) {
	t.Parallel()
	w := up(t)
	o := observe(t, w)
	planted := w.plantedSecrets()
	before := w.hypervisors()

	// It takes two minutes until a missing worker is told, so it is asked for
	// first and looked at last.
	out, code := w.refit("start", "-f", "examples/tensorfusion-upgrade.yaml", "--set", "cluster=snadbox", "--id", "unknown-cluster")
	require.Zero(t, code, out)

	t.Run("a wrong plan is told before anything is touched", func(t *testing.T) { w.wrongPlans(t) })

	t.Run("refit plan shows the diff and changes nothing", func(t *testing.T) {
		out, code := w.refit("plan", "-f", "examples/tensorfusion-upgrade.yaml", "--exit-code")
		assert.Equal(t, exitChanges, code, out)
		for _, want := range []string{
			"tensor-fusion-operator:2.16.3", "tensor-fusion-operator:2.17.0", "tensor-fusion-hypervisor:2.17.0",
			"rollout.hypervisor.shared.canary", "rollout.hypervisor.training",
		} {
			assert.Contains(t, out, want)
		}
		for _, s := range planted {
			assert.NotContains(t, out, s)
		}
		assert.Equal(t, before, w.hypervisors())
		assert.Empty(t, w.changes(), "the worker's user writes its Lease and nothing else")
		_, code = w.refit("plan", "-f", "examples/tensorfusion-upgrade.yaml")
		assert.Zero(t, code, "changes alone are no failure")
	})
	if t.Failed() {
		t.FailNow()
	}

	first := w.throughAWindow(t, o)
	assert.Equal(t, "2.17.0", first.After["controller"])
	assert.Equal(t, 4, o.deletions(), "every node once")
	assert.Empty(t, o.violations(turns(first)), "2.16 -> 2.17 deletes every hypervisor unless it is held in the way the new controller heeds")

	t.Run("an upgrade of the controller's image alone rolls no node", func(t *testing.T) {
		o.reset()
		proven := w.hypervisors()
		r := w.finish(append(slices.Clone(noGates), "values.inline.controller.image.tag=2.17.1")...)
		assert.Equal(t, protocol.OutcomeDone, r.Outcome)
		assert.Equal(t, "2.17.1", r.After["controller"])
		assert.Zero(t, o.deletions())
		assert.Empty(t, o.violations(turns(r)))
		assert.Equal(t, proven, w.hypervisors())
	})

	t.Run("credentials are rotated by reference", func(t *testing.T) {
		o.reset()
		w.plant(newPassword, newToken)
		w.fault("greptime-password", newPassword)
		r := w.finish(append(slices.Clone(noGates),
			"values.secrets[0].path=greptime.password", "values.secrets[0].namespace=apps", "values.secrets[0].secret=rotated", "values.secrets[0].key=password",
			"values.secrets[1].path=agent.enrollToken", "values.secrets[1].namespace=apps", "values.secrets[1].secret=rotated", "values.secrets[1].key=token")...)
		assert.Equal(t, protocol.OutcomeDone, r.Outcome)
		w.credentials(t, newPassword, newToken)
		assert.Zero(t, o.deletions())
	})
	if t.Failed() {
		t.FailNow()
	}

	t.Run("back to a revision with auto update on and older credentials", func(t *testing.T) {
		stored := w.stored(1)
		require.Contains(t, stored, "autoUpdateHypervisor: true")
		require.Contains(t, stored, oldPassword)
		o.reset()
		run := w.startFile("examples/tensorfusion-rollback.yaml", "revision=1")
		s := w.untilGate(run)
		assert.Equal(t, "plan", s.WaitingFor.Stage)
		assert.Contains(t, noteOf(s, "revision"), "today's values stay for: agent.enrollToken, greptime.password")
		assert.Zero(t, o.deletions(), "nothing rolls before the plan is approved")
		r := w.approveAll(run)
		assert.Equal(t, protocol.OutcomeDone, r.Outcome)
		assert.Equal(t, "2.16.3", r.After["controller"])
		assert.Contains(t, strings.Join(r.LeftBehind, "\n"), "credentials stay today's")
		assert.Equal(t, 4, o.deletions(), "every node once")
		assert.Empty(t, o.violations(turns(r)), "no hypervisor goes outside a batch")
		w.credentials(t, newPassword, newToken)
		w.searchSecrets(run, append(planted, newPassword, newToken))
		w.replay(run)
	})

	t.Run("a cluster that no worker knows is named", func(t *testing.T) {
		s := w.until("unknown-cluster", "waiting for a worker", 3*time.Minute, func(s protocol.Status) bool { return s.WaitingFor != nil })
		assert.Equal(t, protocol.WaitQueue, s.WaitingFor.Kind)
		assert.Contains(t, s.WaitingFor.Found, "cluster/snadbox")
		w.answer("abort", "unknown-cluster")
	})
}

// wrongPlans asks for plans that can't be right.
func (w *world) wrongPlans(t *testing.T) {
	example, err := os.ReadFile(filepath.Join(root, "examples/tensorfusion-upgrade.yaml"))
	require.NoError(t, err)
	for _, c := range []struct {
		name, old, new string
		code           int
		want           []string
	}{
		{"an unknown key", "hostTimeout: 3m", "hostTimeuot: 3m", exitBadInput, []string{":27:7:", "hostTimeuot", "hostTimeout"}},
		{"no share of the nodes", "batch: {percent: 50}", "batch: {percent: 0}", exitBadInput, []string{"rollouts[0].strategy.batch"}},
		{"a secret in the plan", "rollouts:\n", "values: {inline: {greptime: {password: fake-inline-0000}}}\nrollouts:\n", exitBadInput,
			[]string{"values.inline.greptime.password", "values.secrets"}},
		{"a canary bigger than the pool", "canary: {count: 1}", "canary: {count: 9}", exitParked, []string{"shared", "canary", "2"}},
		{"a pool that does not exist", "[shared, training]", "[shraed]", exitParked, []string{"shraed", "shared, training"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			text := strings.Replace(string(example), c.old, c.new, 1)
			require.NotEqual(t, string(example), text)
			file := filepath.Join(w.home, "wrong.yaml")
			require.NoError(t, os.WriteFile(file, []byte(text), 0o600))
			out, code := w.refit("plan", "-f", file)
			assert.Equal(t, c.code, code, out)
			for _, want := range c.want {
				assert.Contains(t, out, want)
			}
			assert.NotContains(t, out, "fake-inline-0000")
			assert.Empty(t, w.changes())
		})
	}
}

// changes are the worker's writes beside the Lease, the questions about its
// own rights and the connections through the API server.
func (w *world) changes() []string {
	return slices.DeleteFunc(w.writes(), func(l string) bool {
		return strings.Contains(l, " leases/") || strings.Contains(l, " selfsubjectaccessreviews/") || strings.Contains(l, " pods/portforward ")
	})
}

// finish runs an upgrade to its end.
func (w *world) finish(set ...string) protocol.Receipt {
	w.t.Helper()
	return w.approveAll(w.start(set...))
}

// startFile begins the run of a plan file and returns its workflow ID.
func (w *world) startFile(file string, set ...string) string {
	w.t.Helper()
	return w.sandbox.Start(file, set)
}

// plant writes the Secret that a rotation refers to.
func (w *world) plant(password, token string) {
	w.t.Helper()
	_, err := w.kube.CoreV1().Secrets("apps").Create(context.Background(), &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{Name: "rotated"},
		StringData: map[string]string{"password": password, "token": token},
	}, metav1.CreateOptions{})
	require.NoError(w.t, err)
}

// credentials requires that the live objects hold them.
func (w *world) credentials(t *testing.T, password, token string) {
	t.Helper()
	ctx := context.Background()
	s, err := w.kube.CoreV1().Secrets(releaseName).Get(ctx, releaseName+"-greptimedb-secret", metav1.GetOptions{})
	require.NoError(t, err)
	assert.Equal(t, password, string(s.Data["password"]))
	d, err := w.kube.AppsV1().Deployments(releaseName).Get(ctx, releaseName+"-controller", metav1.GetOptions{})
	require.NoError(t, err)
	var tokens []string
	for _, c := range d.Spec.Template.Spec.Containers {
		for _, e := range c.Env {
			if e.Name == "ENROLL_TOKEN" {
				tokens = append(tokens, e.Value)
			}
		}
	}
	assert.Equal(t, []string{token}, tokens)
}

// stored is a release revision as Helm keeps it.
func (w *world) stored(revision int) string {
	w.t.Helper()
	s, err := w.kube.CoreV1().Secrets(releaseName).Get(context.Background(),
		fmt.Sprintf("sh.helm.release.v1.%s.v%d", releaseName, revision), metav1.GetOptions{})
	require.NoError(w.t, err)
	packed, err := base64.StdEncoding.DecodeString(string(s.Data["release"]))
	require.NoError(w.t, err)
	z, err := gzip.NewReader(bytes.NewReader(packed))
	require.NoError(w.t, err)
	b, err := io.ReadAll(z)
	require.NoError(w.t, err)
	return string(b)
}
