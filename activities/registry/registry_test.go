package registry_test

import (
	"fmt"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-containerregistry/pkg/name"
	ociregistry "github.com/google/go-containerregistry/pkg/registry"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/random"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/static"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"github.com/stretchr/testify/require"
	"helm.sh/helm/v3/pkg/chart"
	"helm.sh/helm/v3/pkg/chartutil"
	helmregistry "helm.sh/helm/v3/pkg/registry"

	"github.com/refit-run/refit/activities/finding"
	"github.com/refit-run/refit/activities/registry"
)

func requireStop(t *testing.T, err error, words ...string) {
	t.Helper()
	f, class, ok := finding.Of(err)
	require.True(t, ok, "expected a finding, got %v", err)
	require.Equal(t, finding.Stop, class, err)
	for _, word := range words {
		require.Contains(t, f.String(), word)
	}
}

// newRegistry serves OCI images under the name registry.example.
func newRegistry(t *testing.T) (host string, m registry.Mirrors) {
	server := httptest.NewServer(ociregistry.New(ociregistry.Logger(log.New(io.Discard, "", 0))))
	t.Cleanup(server.Close)
	m, err := registry.ParseMirrors("registry.example=" + server.URL + ", docker.io=" + server.URL + "/hub")
	require.NoError(t, err)
	return strings.TrimPrefix(server.URL, "http://"), m
}

func pack(t *testing.T, version string) string {
	c := &chart.Chart{
		Metadata:  &chart.Metadata{APIVersion: "v2", Name: "gadget", Version: version},
		Templates: []*chart.File{{Name: "templates/a.yaml", Data: []byte("kind: ConfigMap\n")}},
	}
	path, err := chartutil.Save(c, t.TempDir())
	require.NoError(t, err)
	return path
}

func TestHasImageAsksTheMirror(t *testing.T) {
	host, m := newRegistry(t)
	image, err := random.Image(64, 1)
	require.NoError(t, err)
	want, err := image.Digest()
	require.NoError(t, err)
	for _, repository := range []string{"/team/app:1.0.0", "/hub/library/app:1.0.0"} {
		ref, err := name.ParseReference(host+repository, name.Insecure)
		require.NoError(t, err)
		require.NoError(t, remote.Write(ref, image))
	}
	for _, ref := range []string{"registry.example/team/app:1.0.0", "registry.example/team/app@" + want.String(), "app:1.0.0"} {
		digest, err := m.HasImage(t.Context(), ref)
		require.NoError(t, err, ref)
		require.Equal(t, want.String(), digest)
	}
	_, err = m.HasImage(t.Context(), "registry.example/team/app:2.0.0")
	requireStop(t, err, "registry.example/team/app:2.0.0", "REFIT_REGISTRY_MIRRORS")
	_, err = m.HasImage(t.Context(), "NOT A REFERENCE")
	requireStop(t, err, "valid reference")
}

func TestRegistryThatIsAwayIsRetried(t *testing.T) {
	server := httptest.NewServer(http.NotFoundHandler())
	m, err := registry.ParseMirrors("registry.example=" + server.URL)
	require.NoError(t, err)
	server.Close()
	_, err = m.HasImage(t.Context(), "registry.example/app:1.0.0")
	_, class, ok := finding.Of(err)
	require.True(t, ok, err)
	require.Equal(t, finding.Retry, class)
}

func TestPullChartFromOCI(t *testing.T) {
	host, m := newRegistry(t)
	archive, err := os.ReadFile(pack(t, "1.2.3+build.4"))
	require.NoError(t, err)
	image, err := mutate.AppendLayers(empty.Image, static.NewLayer(archive, types.MediaType(helmregistry.ChartLayerMediaType)))
	require.NoError(t, err)
	want, err := image.Digest()
	require.NoError(t, err)
	ref, err := name.ParseReference(host+"/charts/gadget:1.2.3_build.4", name.Insecure)
	require.NoError(t, err)
	require.NoError(t, remote.Write(ref, image))

	c, digest, err := m.PullChart(t.Context(), "oci://registry.example/charts/gadget", "1.2.3+build.4")
	require.NoError(t, err)
	require.Equal(t, want.String(), digest)
	require.Equal(t, "1.2.3+build.4", c.Metadata.Version)
	_, _, err = m.PullChart(t.Context(), "oci://registry.example/charts/gadget", "")
	requireStop(t, err, "a version")
	_, _, err = m.PullChart(t.Context(), "oci://registry.example/charts/gadget", "9.9.9")
	requireStop(t, err, "9.9.9")

	plain, err := random.Image(64, 1)
	require.NoError(t, err)
	require.NoError(t, remote.Write(ref.Context().Tag("5.0.0"), plain))
	_, _, err = m.PullChart(t.Context(), "oci://registry.example/charts/gadget", "5.0.0")
	requireStop(t, err, "no Helm chart")
}

func TestPullChartFromRepository(t *testing.T) {
	archive, err := os.ReadFile(pack(t, "1.0.0"))
	require.NoError(t, err)
	digest := "" // of the index
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/stable/index.yaml":
			fmt.Fprintf(w, "apiVersion: v1\nentries:\n  gadget:\n  - {name: gadget, version: 1.0.0, urls: [gadget-1.0.0.tgz], digest: %q}\n", digest)
		case "/stable/gadget-1.0.0.tgz":
			_, _ = w.Write(archive)
		default:
			http.NotFound(w, r)
		}
	}))
	defer server.Close()
	m, err := registry.ParseMirrors("charts.example=" + server.URL)
	require.NoError(t, err)
	for _, ref := range []string{server.URL + "/stable#gadget", "https://charts.example/stable/#gadget"} {
		c, sum, err := m.PullChart(t.Context(), ref, "1.0.0")
		require.NoError(t, err, ref)
		require.Equal(t, "gadget", c.Name())
		require.Regexp(t, "^sha256:[0-9a-f]{64}$", sum)
		digest = strings.TrimPrefix(sum, "sha256:")
	}
	_, _, err = m.PullChart(t.Context(), server.URL+"/stable#gadget", "2.0.0")
	requireStop(t, err, "not in its index")
	_, _, err = m.PullChart(t.Context(), server.URL+"/stable", "1.0.0")
	requireStop(t, err, "append #NAME")
	_, _, err = m.PullChart(t.Context(), server.URL+"/none#gadget", "1.0.0")
	requireStop(t, err, "404")
	digest = strings.Repeat("0", 64)
	_, _, err = m.PullChart(t.Context(), server.URL+"/stable#gadget", "1.0.0")
	requireStop(t, err, "changed after it was published")
}

func TestPullChartFromFolderAndArchive(t *testing.T) {
	var m registry.Mirrors
	archive := pack(t, "1.0.0")
	c, sum, err := m.PullChart(t.Context(), archive, "")
	require.NoError(t, err)
	require.Equal(t, "1.0.0", c.Metadata.Version)
	_, same, err := m.PullChart(t.Context(), archive, "1.0.0")
	require.NoError(t, err)
	require.Equal(t, sum, same)

	folder := filepath.Join(t.TempDir(), "gadget")
	require.NoError(t, os.MkdirAll(filepath.Join(folder, "templates"), 0o755))
	write := func(file, data string) {
		require.NoError(t, os.WriteFile(filepath.Join(folder, file), []byte(data), 0o600))
	}
	write("Chart.yaml", "apiVersion: v2\nname: gadget\nversion: 1.0.0\n")
	write("templates/a.yaml", "kind: A\n")
	_, before, err := m.PullChart(t.Context(), folder, "1.0.0")
	require.NoError(t, err)
	_, again, err := m.PullChart(t.Context(), folder, "1.0.0")
	require.NoError(t, err)
	require.Equal(t, before, again)
	write("templates/a.yaml", "kind: B\n")
	_, after, err := m.PullChart(t.Context(), folder, "1.0.0")
	require.NoError(t, err)
	require.NotEqual(t, before, after)
	_, _, err = m.PullChart(t.Context(), folder, "2.0.0")
	requireStop(t, err, "version 2.0.0", "version 1.0.0")
	_, _, err = m.PullChart(t.Context(), filepath.Join(folder, "none"), "")
	requireStop(t, err, "read on the worker")
}

func TestFloatingTags(t *testing.T) {
	for _, tag := range []string{"", "latest", "latest-alpine", "v1", "2", "main", "nightly-2026", "1.25-edge", "stable"} {
		require.True(t, registry.Floating(tag), tag)
	}
	for _, tag := range []string{"1.3.9", "v2.15.0", "v0.28.1", "16.4", "2.17.0-rc.1", "sha-1a2b3c4", "20260101", "maintenance-1.2.3"} {
		require.False(t, registry.Floating(tag), tag)
	}
	for image, want := range map[string]string{
		"app": "", "app:1": "1", "host:5000/app": "", "host:5000/app:2.0.0": "2.0.0", "host/app:1.0@sha256:" + strings.Repeat("0", 64): "1.0",
	} {
		tag, pinned := registry.Tag(image)
		require.Equal(t, want, tag, image)
		require.Equal(t, strings.Contains(image, "@"), pinned, image)
	}
}

func TestParseMirrorsRefusesNonsense(t *testing.T) {
	for _, spec := range []string{"registry.example", "registry.example=127.0.0.1:5000", "=http://h", "a=ftp://h"} {
		_, err := registry.ParseMirrors(spec)
		require.ErrorContains(t, err, "HOST=http(s)", spec)
	}
	_, err := registry.ParseMirrors(" , ")
	require.NoError(t, err)
}
