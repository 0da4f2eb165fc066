package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// source is a repository of one package with a registry of two checks.
func source(t *testing.T) string {
	t.Helper()
	root := t.TempDir()
	folder := filepath.Join(root, "checks")
	require.NoError(t, os.Mkdir(folder, 0o755))
	require.NoError(t, os.WriteFile(filepath.Join(folder, "checks.go"), []byte(`package checks
type Spec struct { Row string; Func func() }
var All = []Spec{{"T01", line}, {"T02", line}}
func line() {}
type Runner struct{}
func (r *Runner) Run() {}
`), 0o644))
	require.NoError(t, os.WriteFile(filepath.Join(folder, "checks_test.go"), []byte("package checks\nfunc TestLine() {}\n"), 0o644))
	return root
}

func TestATableIsProvenByTheSource(t *testing.T) {
	sound := func() table {
		return table{Registry: "checks.All", Rows: []row{
			{ID: "T01", Symbol: "checks.line", Tests: []string{"checks.TestLine"}},
			{ID: "T02", Symbol: "checks.Runner.Run", Tests: []string{"checks.TestLine"}},
		}}
	}
	for _, tc := range []struct {
		world string
		spoil func(*table)
		says  string
	}{
		{"every name exists", func(*table) {}, ""},
		{"a symbol is missing", func(x *table) { x.Rows[0].Symbol = "checks.gone" }, "T01: checks.gone does not exist"},
		{"a method is missing", func(x *table) { x.Rows[1].Symbol = "checks.Runner.Walk" }, "checks.Runner.Walk does not exist"},
		{"a test is missing", func(x *table) { x.Rows[1].Tests = []string{"checks.TestGone"} }, "T02: checks.TestGone does not exist"},
		{"a folder is missing", func(x *table) { x.Rows[1].Tests = []string{"nowhere.TestLine"} }, "nowhere.TestLine does not exist"},
		{"a row has no test and does not say why", func(x *table) { x.Rows[1].Tests = nil }, "`open` does not explain"},
		{"a row has no test and says why", func(x *table) { x.Rows[1].Tests, x.Rows[1].Open = nil, "an act of a person" }, ""},
		{"a row stands twice", func(x *table) { x.Rows[1].ID = "T01" }, "T01: stands twice"},
		{"a check has no row", func(x *table) { x.Rows = x.Rows[:1] }, "T02: is a check of checks.All and has no row"},
		{"no registry says which rows there must be", func(x *table) { x.Registry, x.Rows = "", x.Rows[:1] }, ""},
		{"a name is missing where there is no registry", func(x *table) { x.Registry, x.Rows[0].Symbol = "", "checks.gone" }, "T01: checks.gone does not exist"},
		{"the registry is not there", func(x *table) { x.Registry = "checks.None" }, "no list of checks"},
		{"a name without a package", func(x *table) { x.Rows[0].Symbol = "line" }, "want folder/package.Name"},
	} {
		t.Run(tc.world, func(t *testing.T) {
			x := sound()
			tc.spoil(&x)
			err := x.prove(source(t))
			if tc.says == "" {
				assert.NoError(t, err)
				return
			}
			assert.ErrorContains(t, err, tc.says)
		})
	}
}

func TestAnOldPageIsNoticed(t *testing.T) {
	name := filepath.Join(t.TempDir(), "coverage.yaml")
	require.NoError(t, os.WriteFile(name, []byte("title: A table\nintro: Rows.\nrows: []\n"), 0o644))
	require.NoError(t, run(name, false, false))
	require.NoError(t, run(name, true, false))
	page := strings.TrimSuffix(name, ".yaml") + ".md"
	require.NoError(t, os.WriteFile(page, []byte("older\n"), 0o644))
	assert.ErrorContains(t, run(name, true, false), "make generate")
}

// TestTheTablesOfThisRepositoryAreUpToDate fails when code, table and page
// differ.
func TestTheTablesOfThisRepositoryAreUpToDate(t *testing.T) {
	t.Chdir(filepath.Join("..", ".."))
	tables, err := filepath.Glob("docs/*-coverage.yaml")
	require.NoError(t, err)
	require.NotEmpty(t, tables)
	for _, name := range tables {
		assert.NoError(t, run(name, true, false))
	}
}
