package kube_test

import (
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/refit-run/refit/activities/finding"
	"github.com/refit-run/refit/activities/internal/apiservertest"
	"github.com/refit-run/refit/activities/kube"
)

func TestParseClusters(t *testing.T) {
	clusters, err := kube.Parse(" prod=/etc/kube/config#admin@prod, lab=in-cluster,")
	require.NoError(t, err)
	require.Equal(t, []string{"lab", "prod"}, clusters.Names())

	for spec, complaint := range map[string]string{
		"prod":                      "expected NAME=",
		"prod=":                     "expected NAME=",
		"=in-cluster":               "expected NAME=",
		"prod=/etc/kube/config":     "current-context is never used",
		"prod=/etc/kube/config#":    "context is missing",
		"a/b=in-cluster":            "task queue",
		"a=in-cluster,a=in-cluster": "given twice",
	} {
		_, err := kube.Parse(spec)
		require.ErrorContains(t, err, complaint, spec)
	}
}

func TestUnknownClusterNamesTheKnownOnes(t *testing.T) {
	clusters, err := kube.Parse("lab=in-cluster")
	require.NoError(t, err)
	_, err = clusters.Connect(t.Context(), kube.Target{Cluster: "prod"})
	f, class, ok := finding.Of(err)
	require.True(t, ok)
	require.Equal(t, finding.Stop, class)
	require.Equal(t, "one of lab", f.Expected)
}

func TestTargetWithoutIdentityIsRefused(t *testing.T) {
	server := apiservertest.Shared(t)
	_, err := server.Clusters(t, "prod").Connect(t.Context(), kube.Target{Cluster: "prod"})
	_, class, _ := finding.Of(err)
	require.Equal(t, finding.Stop, class)
	require.ErrorContains(t, err, "kube.Identify")
}

func TestMissingKubeconfigOrContextStops(t *testing.T) {
	path := filepath.Join(t.TempDir(), "kubeconfig")
	clusters, err := kube.Parse("prod=" + path + "#admin")
	require.NoError(t, err)
	_, err = clusters.Connect(t.Context(), kube.Target{Cluster: "prod"})
	_, class, _ := finding.Of(err)
	require.Equal(t, finding.Stop, class)
	require.NoError(t, os.WriteFile(path, []byte("apiVersion: v1\nkind: Config\n"), 0o600))
	_, err = clusters.Connect(t.Context(), kube.Target{Cluster: "prod"})
	require.ErrorContains(t, err, `no context "admin"`)
}

func TestIdentifyRecordsTheUIDThatConnectDemands(t *testing.T) {
	server := apiservertest.Shared(t)
	clusters := server.Clusters(t, "prod")
	id, err := clusters.Identify(t.Context(), kube.IdentifyRequest{Cluster: "prod"})
	require.NoError(t, err)
	require.Equal(t, server.Target(t, "prod").UID, id.UID)
	require.Regexp(t, `^v1\.\d+`, id.Version)
	_, err = clusters.Connect(t.Context(), kube.Target{Cluster: "prod", UID: id.UID})
	require.NoError(t, err)
}

// The worker is given another cluster's kubeconfig under the same name in the
// middle of a run: the very next activity must refuse.
func TestSwappedKubeconfigIsRefused(t *testing.T) {
	one, other := apiservertest.Shared(t), apiservertest.Start(t)
	path := filepath.Join(t.TempDir(), "kubeconfig")
	place := func(from string) {
		data, err := os.ReadFile(from)
		require.NoError(t, err)
		require.NoError(t, os.WriteFile(path+".new", data, 0o600))
		require.NoError(t, os.Rename(path+".new", path))
	}
	place(one.Kubeconfig)
	clusters, err := kube.Parse("prod=" + path + "#" + apiservertest.Context)
	require.NoError(t, err)
	target := one.Target(t, "prod")
	_, err = clusters.Connect(t.Context(), target)
	require.NoError(t, err)

	place(other.Kubeconfig)
	_, err = clusters.Connect(t.Context(), target)
	f, class, ok := finding.Of(err)
	require.True(t, ok, err)
	require.Equal(t, finding.Stop, class)
	require.Contains(t, f.Expected, target.UID)
	require.Contains(t, f.Found, other.Target(t, "prod").UID)

	place(one.Kubeconfig)
	_, err = clusters.Connect(t.Context(), target)
	require.NoError(t, err, "the right kubeconfig is back")
}

func TestForbiddenStopsAndSaysWhatToDo(t *testing.T) {
	server := apiservertest.Shared(t)
	if server.ContextName != apiservertest.Context {
		t.Skip("skipped: an external cluster has no user without permissions")
	}
	clusters, err := kube.Parse("prod=" + server.Kubeconfig + "#" + apiservertest.NobodyContext)
	require.NoError(t, err)
	_, err = clusters.Connect(t.Context(), server.Target(t, "prod"))
	f, class, ok := finding.Of(err)
	require.True(t, ok, err)
	require.Equal(t, finding.Stop, class)
	require.Contains(t, f.Next, "permission")
}

func TestErrorClasses(t *testing.T) {
	pods := schema.GroupResource{Resource: "pods"}
	for _, c := range []struct {
		name string
		err  error
		want finding.Class
	}{
		{"forbidden", apierrors.NewForbidden(pods, "a", errors.New("no")), finding.Stop},
		{"invalid", apierrors.NewInvalid(schema.GroupKind{Kind: "Pod"}, "a", nil), finding.Stop},
		{"not found", apierrors.NewNotFound(pods, "a"), finding.Stop},
		{"unknown kind", &meta.NoKindMatchError{GroupKind: schema.GroupKind{Kind: "Gadget"}}, finding.Stop},
		{"conflict", apierrors.NewConflict(pods, "a", errors.New("changed")), finding.Retry},
		{"timeout", apierrors.NewTimeoutError("slow", 1), finding.Retry},
		{"too many requests", apierrors.NewTooManyRequestsError("later"), finding.Retry},
		{"500", apierrors.NewInternalError(errors.New("etcd")), finding.Retry},
		{"503", apierrors.NewServiceUnavailable("starting"), finding.Retry},
		{"another 4xx", apierrors.NewGenericServerResponse(http.StatusTeapot, "get", pods, "a", "tea", 0, false), finding.Stop},
		{"connection refused", fmt.Errorf("dial: %w", syscall.ECONNREFUSED), finding.Retry},
	} {
		require.Equal(t, c.want, kube.Class(c.err), c.name)
		wrapped := kube.Wrap(fmt.Errorf("while looking: %w", c.err), "Pod/a")
		_, class, ok := finding.Of(wrapped)
		require.True(t, ok, c.name)
		require.Equal(t, c.want, class, c.name)
		require.Equal(t, wrapped, kube.Wrap(wrapped, "again"), "%s: told once", c.name)
	}
	require.NoError(t, kube.Wrap(nil, "nothing"))
}
