// Command coverage writes the table that says, for each step and check of a
// procedure, which stage covers it, which Go symbol does it and which test
// proves it. It fails when a symbol or a test of that name does not exist, or,
// for a table with a registry of checks, when one of these has no row.
//
//	go run ./tools/coverage [-check | -rows] docs/tensorfusion-coverage.yaml
package main

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"sigs.k8s.io/yaml"
)

// table is the source file.
type table struct {
	Title string `json:"title"`
	Intro string `json:"intro"`
	// Registry is package/folder.Variable: a list of checks whose first field
	// is the row's id. Without it only names are proven.
	Registry string `json:"registry,omitempty"`
	Rows     []row  `json:"rows"`
}

// row is one step or check. Symbol is package/folder.Name or
// package/folder.Type.Method, Test package/folder.TestName, or a method that is
// a step of one.
type row struct {
	ID     string   `json:"id"`
	What   string   `json:"what"`
	Stage  string   `json:"stage"`
	Symbol string   `json:"symbol"`
	Tests  []string `json:"tests"`
	Open   string   `json:"open,omitempty"` // what is not covered yet
}

func main() {
	check := flag.Bool("check", false, "compare with the file in place instead of writing it")
	rows := flag.Bool("rows", false, "print the ids of the registry's checks, one a line")
	flag.Parse()
	if flag.NArg() != 1 {
		fmt.Fprintln(os.Stderr, "usage: coverage [-check | -rows] TABLE.yaml")
		os.Exit(2)
	}
	if err := run(flag.Arg(0), *check, *rows); err != nil {
		fmt.Fprintln(os.Stderr, "coverage:", err)
		os.Exit(1)
	}
}

func run(source string, check, rows bool) error {
	t, err := read(source)
	if err != nil {
		return err
	}
	if rows {
		ids, err := registered(".", t.Registry)
		if err == nil {
			fmt.Println(strings.Join(ids, "\n"))
		}
		return err
	}
	if err := t.prove("."); err != nil {
		return fmt.Errorf("%s: %w", source, err)
	}
	out := strings.TrimSuffix(source, ".yaml") + ".md"
	want := render(t, source)
	if !check {
		return os.WriteFile(out, want, 0o644)
	}
	have, err := os.ReadFile(out)
	if err != nil {
		return err
	}
	if !bytes.Equal(have, want) {
		return fmt.Errorf("%s is out of date: run `make generate`", out)
	}
	return nil
}

func read(source string) (table, error) {
	var t table
	b, err := os.ReadFile(source)
	if err != nil {
		return t, err
	}
	if err := yaml.UnmarshalStrict(b, &t); err != nil {
		return t, fmt.Errorf("%s: %w", source, err)
	}
	return t, nil
}

// prove looks for every name of the table in the source below root.
func (t table) prove(root string) error {
	names := index{root: root, folders: map[string]map[string]bool{}}
	var missing []string
	seen := map[string]bool{}
	for _, r := range t.Rows {
		if seen[r.ID] {
			missing = append(missing, r.ID+": stands twice")
		}
		seen[r.ID] = true
		if (r.Symbol == "" || len(r.Tests) == 0) && r.Open == "" {
			missing = append(missing, r.ID+": has a gap that `open` does not explain")
		}
		for _, name := range append([]string{r.Symbol}, r.Tests...) {
			if name == "" {
				continue
			}
			ok, err := names.has(name)
			if err != nil {
				return err
			}
			if !ok {
				missing = append(missing, fmt.Sprintf("%s: %s does not exist", r.ID, name))
			}
		}
	}
	if t.Registry != "" {
		ids, err := registered(root, t.Registry)
		if err != nil {
			return err
		}
		for _, id := range ids {
			if !seen[id] {
				missing = append(missing, fmt.Sprintf("%s: is a check of %s and has no row", id, t.Registry))
			}
		}
	}
	if len(missing) > 0 {
		return errors.New(strings.Join(missing, "\n  "))
	}
	return nil
}

func render(t table, source string) []byte {
	var b bytes.Buffer
	fmt.Fprintf(&b, "# %s\n\n<!-- Generated from %s by `make generate`. -->\n\n%s\n\n", t.Title, filepath.Base(source), strings.TrimSpace(t.Intro))
	b.WriteString("| row | what | stage | done by | proven by |\n|---|---|---|---|---|\n")
	for _, r := range t.Rows {
		proof := make([]string, len(r.Tests))
		for i, name := range r.Tests {
			proof[i] = "`" + name + "`"
		}
		cell := strings.Join(proof, ", ")
		if r.Open != "" {
			cell = strings.TrimPrefix(cell+"; **open:** "+r.Open, "; ")
		}
		symbol := ""
		if r.Symbol != "" {
			symbol = "`" + r.Symbol + "`"
		}
		fmt.Fprintf(&b, "| %s | %s | %s | %s | %s |\n", r.ID, r.What, r.Stage, symbol, cell)
	}
	return b.Bytes()
}
