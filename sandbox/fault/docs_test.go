package fault

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// The page shows the table that `fault --list` prints, row by row.
func TestDocumentationShowsTheTable(t *testing.T) {
	text, err := os.ReadFile(filepath.Join("..", "..", "docs", "sandbox.md"))
	require.NoError(t, err)
	const head = "| fault | arguments | what happens |\n|---|---|---|\n"
	_, table, found := strings.Cut(string(text), head)
	require.True(t, found, "docs/sandbox.md: expected the table of faults with the head %q", head)
	var rows []string
	for line := range strings.Lines(table) {
		if !strings.HasPrefix(line, "|") {
			break
		}
		rows = append(rows, strings.TrimSpace(line))
	}
	var want []string
	for _, f := range Table() {
		args := strings.ReplaceAll(f.Args, "|", `\|`)
		want = append(want, fmt.Sprintf("| `%s` | %s | %s |", f.Name, args, f.Does))
	}
	require.Equal(t, want, rows)
}
