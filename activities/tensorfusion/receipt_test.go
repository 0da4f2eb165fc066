package tensorfusion

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

func TestTheReceiptIsAnArtifactAndAConfigMap(t *testing.T) {
	i := install(t)
	for range 2 {
		out, err := i.activities.WriteReceipt(t.Context(), ReceiptRequest{Scope: i.scope, Key: "Run-1", JSON: []byte(`{"outcome":"done"}`), Hosts: []byte(`[]`)})
		require.NoError(t, err)
		assert.Equal(t, "refit-receipt-run-1", out.ConfigMap)
		cm, err := i.admin.Typed.CoreV1().ConfigMaps(i.scope.Release.Namespace).Get(t.Context(), out.ConfigMap, metav1.GetOptions{})
		require.NoError(t, err)
		assert.JSONEq(t, `{"outcome":"done"}`, cm.Data["receipt.json"])
		assert.Equal(t, out.Artifact.URL, cm.Data["artifact"])
	}
}

func TestTheReceiptOfAnyReleaseLiesInItsNamespaceAndNeedsNoRowsPerHost(t *testing.T) {
	i := install(t)
	scope := Scope{Target: i.scope.Target, Release: Release{Name: "nats", Namespace: i.scope.Release.Namespace}}
	out, err := i.activities.WriteReceipt(t.Context(), ReceiptRequest{Scope: scope, Key: "run-3", JSON: []byte(`{"outcome":"aborted"}`)})
	require.NoError(t, err)
	assert.Empty(t, out.Hosts)
	cm, err := i.admin.Typed.CoreV1().ConfigMaps(scope.Release.Namespace).Get(t.Context(), "refit-receipt-run-3", metav1.GetOptions{})
	require.NoError(t, err)
	assert.Equal(t, "nats", cm.Labels["refit.run/release"])
	assert.NotContains(t, cm.Data, "hosts")
}

// The rows of a big cluster do not fit into one request.
func TestTheRowsOfAReceiptMayComeInPages(t *testing.T) {
	i := install(t)
	request := ReceiptRequest{Scope: i.scope, Key: "run-2"}
	for n := 1; n <= 2; n++ {
		page := request
		page.Page, page.Hosts = n, []byte(`[{"name":"a"},{"name":"b"}]`)
		out, err := i.activities.WriteReceipt(t.Context(), page)
		require.NoError(t, err)
		assert.Empty(t, out.ConfigMap, "a page is no receipt")
		assert.Empty(t, out.Artifact.URL)
		assert.Equal(t, 2, out.Hosts.Entries)
		request.Pages = append(request.Pages, out.Hosts.URL)
	}
	assert.NotEqual(t, request.Pages[0], request.Pages[1])
	request.JSON = []byte(`{"outcome":"done"}`)
	out, err := i.activities.WriteReceipt(t.Context(), request)
	require.NoError(t, err)
	assert.Empty(t, out.Hosts.URL)
	cm, err := i.admin.Typed.CoreV1().ConfigMaps(i.scope.Release.Namespace).Get(t.Context(), out.ConfigMap, metav1.GetOptions{})
	require.NoError(t, err)
	assert.Equal(t, strings.Join(request.Pages, "\n"), cm.Data["hosts"])
}
