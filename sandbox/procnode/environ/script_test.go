package environ

import (
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestScriptPassesItsWordsAndItsArgumentsOnUnchanged(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "tools")
	require.NoError(t, Script(dir, "tool", "printf", "[%s]", "it's $HOME", "two words"))
	out, err := exec.Command(filepath.Join(dir, "tool"), "a b", "'").Output()
	require.NoError(t, err)
	require.Equal(t, "[it's $HOME][two words][a b][']", string(out))
}
