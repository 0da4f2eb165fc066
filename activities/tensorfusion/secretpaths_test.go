package tensorfusion

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/refit-run/refit/activities/mask"
)

// A value that only a secrets file called secret stays one for whoever shows the
// release later: its key does not tell, and that plan is not there any more.
func TestWhatASecretsFileHeldIsKnownToLaterRuns(t *testing.T) {
	i := install(t)
	const ttl = "fake-secret-by-file"
	intent := i.intent()
	intent.Values.SecretsFile = filepath.Join(t.TempDir(), "secrets.yaml")
	require.NoError(t, os.WriteFile(intent.Values.SecretsFile, []byte("dynamicConfig: {metricsTTL: "+ttl+"}\n"), 0o600))
	r, err := i.activities.resolve(t.Context(), i.client, i.scope, intent)
	require.NoError(t, err)
	_, err = i.release(r.intent, 1)
	require.NoError(t, err)
	again, err := i.release(r.intent, 1)
	require.NoError(t, err)
	assert.True(t, again.Already)

	for name, later := range map[string]Intent{
		"a rollback": {Chart: Chart{Revision: 1}, IsolationPolicy: "static"}, "an upgrade without the file": i.intent(),
	} {
		r, err := i.activities.resolve(t.Context(), i.client, i.scope, later)
		require.NoError(t, err)
		assert.Equal(t, "-"+mask.Replacement, r.masker.String("-"+ttl), name)
		assert.Equal(t, []string{"dynamicConfig.metricsTTL"}, r.secretPaths, name)
	}
}
