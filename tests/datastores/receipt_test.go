package datastores

import (
	"context"
	"encoding/json"
	"os"
	"strings"

	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/refit-run/refit/workflows/protocol"
)

// recorded requires that the receipt of a run that was started alone lies in the
// artifact store and, as a ConfigMap, in the release's namespace.
func (w *world) recorded(namespace string, out protocol.Receipt) {
	w.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	cm, err := w.Kube.CoreV1().ConfigMaps(namespace).Get(ctx, "refit-receipt-"+out.RunID, metav1.GetOptions{})
	require.NoError(w.t, err, "%v", out.Warnings)
	artifact, err := os.ReadFile(strings.TrimPrefix(cm.Data["artifact"], "file://"))
	require.NoError(w.t, err)
	require.JSONEq(w.t, cm.Data["receipt.json"], string(artifact))
	var stored protocol.Receipt
	require.NoError(w.t, json.Unmarshal(artifact, &stored))
	require.Equal(w.t, out.Outcome, stored.Outcome)
	require.Equal(w.t, out.WorkflowID, stored.WorkflowID)
	require.NotEmpty(w.t, stored.Stages)
	for _, s := range stored.Stages {
		require.Equal(w.t, stageOf(out, s.Name), s)
	}
	require.Equal(w.t, cm.Data["artifact"], out.Artifacts[len(out.Artifacts)-1].URL)
}
