package registry

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"net"
	"net/http"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func serve(t *testing.T) *Registry {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	r := Serve(l)
	t.Cleanup(r.Close)
	return r
}

func head(t *testing.T, r *Registry, path string) *http.Response {
	t.Helper()
	resp, err := http.Head("http://" + r.Address() + path)
	require.NoError(t, err)
	require.NoError(t, resp.Body.Close())
	return resp
}

const image = Host + "/tensorfusion/operator:1.0.0"

func TestImagesHaveDigestsOfTheirOwn(t *testing.T) {
	r := serve(t)
	for _, i := range []string{image, Host + "/tensorfusion/operator:1.0.1", "docker.io/timberio/vector:latest"} {
		require.NoError(t, r.PushImage(t.Context(), i))
	}
	first := head(t, r, "/v2/tensorfusion/operator/manifests/1.0.0")
	second := head(t, r, "/v2/tensorfusion/operator/manifests/1.0.1")
	require.Equal(t, http.StatusOK, first.StatusCode)
	require.NotEqual(t, first.Header.Get("Docker-Content-Digest"), second.Header.Get("Docker-Content-Digest"))
	require.Equal(t, http.StatusOK, head(t, r, "/v2/timberio/vector/manifests/latest").StatusCode)
	require.Equal(t, http.StatusNotFound, head(t, r, "/v2/tensorfusion/operator/manifests/9.9.9").StatusCode)
}

func TestMissingImageComesBackWhenHealed(t *testing.T) {
	r := serve(t)
	require.NoError(t, r.PushImage(t.Context(), image))
	require.NoError(t, r.SetMissing(image, true))
	require.Equal(t, http.StatusNotFound, head(t, r, "/v2/tensorfusion/operator/manifests/1.0.0").StatusCode)
	r.Heal()
	require.Equal(t, http.StatusOK, head(t, r, "/v2/tensorfusion/operator/manifests/1.0.0").StatusCode)
}

func TestSlowRegistryOutlastsAnImpatientClient(t *testing.T) {
	r := serve(t)
	require.NoError(t, r.PushImage(t.Context(), image))
	r.SetDelay(time.Hour)
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+r.Address()+"/v2/tensorfusion/operator/manifests/1.0.0", nil)
	require.NoError(t, err)
	_, err = http.DefaultClient.Do(req)
	require.ErrorIs(t, err, context.DeadlineExceeded)
}

func TestChartsAreHelmArtifacts(t *testing.T) {
	r := serve(t)
	require.NoError(t, r.PushChart(chartArchive(t), "tiny", "1.2.3"))
	require.Equal(t, http.StatusOK, head(t, r, "/v2/charts/tiny/manifests/1.2.3").StatusCode)
}

func chartArchive(t *testing.T) []byte {
	t.Helper()
	var out bytes.Buffer
	zipped := gzip.NewWriter(&out)
	files := tar.NewWriter(zipped)
	content := []byte("apiVersion: v2\nname: tiny\nversion: 1.2.3\n")
	require.NoError(t, files.WriteHeader(&tar.Header{Name: "tiny/Chart.yaml", Mode: 0o644, Size: int64(len(content))}))
	_, err := files.Write(content)
	require.NoError(t, err)
	require.NoError(t, files.Close())
	require.NoError(t, zipped.Close())
	return out.Bytes()
}
