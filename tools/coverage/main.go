// Command coverage writes the table that says, for each step and check of a
// procedure, which stage covers it, which Go symbol does it and which test
// proves it. It fails when a symbol or a test of that name does not exist.
//
//	go run ./tools/coverage [-check] docs/tensorfusion-coverage.yaml
package main

import (
	"bytes"
	"flag"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"strings"

	"sigs.k8s.io/yaml"
)

// table is the source file.
type table struct {
	Title string `json:"title"`
	Intro string `json:"intro"`
	Rows  []row  `json:"rows"`
}

// row is one step or check. Symbol is package/folder.Name or
// package/folder.Type.Method, Test package/folder.TestName.
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
	flag.Parse()
	if flag.NArg() != 1 {
		fmt.Fprintln(os.Stderr, "usage: coverage [-check] TABLE.yaml")
		os.Exit(2)
	}
	if err := run(flag.Arg(0), *check); err != nil {
		fmt.Fprintln(os.Stderr, "coverage:", err)
		os.Exit(1)
	}
}

func run(source string, check bool) error {
	b, err := os.ReadFile(source)
	if err != nil {
		return err
	}
	var t table
	if err := yaml.UnmarshalStrict(b, &t); err != nil {
		return fmt.Errorf("%s: %w", source, err)
	}
	names := index{}
	var missing []string
	for _, r := range t.Rows {
		for _, name := range append([]string{r.Symbol}, r.Tests...) {
			if name == "" {
				if r.Open == "" {
					missing = append(missing, r.ID+": has a gap that `open` does not explain")
				}
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
	if len(missing) > 0 {
		return fmt.Errorf("%s:\n  %s", source, strings.Join(missing, "\n  "))
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
			cell = strings.TrimPrefix(cell+"; open: "+r.Open, "; ")
		}
		symbol := ""
		if r.Symbol != "" {
			symbol = "`" + r.Symbol + "`"
		}
		fmt.Fprintf(&b, "| %s | %s | %s | %s | %s |\n", r.ID, r.What, r.Stage, symbol, cell)
	}
	return b.Bytes()
}

// index holds the names declared in each folder that was asked for.
type index map[string]map[string]bool

// has reports whether folder.Name or folder.Type.Method is declared.
func (x index) has(name string) (bool, error) {
	slash := strings.LastIndex(name, "/")
	dot := strings.Index(name[slash+1:], ".")
	if dot < 0 {
		return false, fmt.Errorf("%q: want folder/package.Name", name)
	}
	folder, symbol := name[:slash+1+dot], name[slash+dot+2:]
	if x[folder] == nil {
		declared, err := declarations(folder)
		if err != nil {
			return false, err
		}
		x[folder] = declared
	}
	return x[folder][symbol], nil
}

func declarations(folder string) (map[string]bool, error) {
	files, err := filepath.Glob(filepath.Join(folder, "*.go"))
	if err != nil {
		return nil, err
	}
	out := map[string]bool{}
	for _, path := range files {
		f, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.SkipObjectResolution)
		if err != nil {
			return nil, err
		}
		for _, d := range f.Decls {
			switch d := d.(type) {
			case *ast.FuncDecl:
				out[method(d)] = true
			case *ast.GenDecl:
				for _, s := range d.Specs {
					switch s := s.(type) {
					case *ast.TypeSpec:
						out[s.Name.Name] = true
					case *ast.ValueSpec:
						for _, n := range s.Names {
							out[n.Name] = true
						}
					}
				}
			}
		}
	}
	return out, nil
}

// method names a function Name, a method Type.Name.
func method(d *ast.FuncDecl) string {
	if d.Recv == nil || len(d.Recv.List) == 0 {
		return d.Name.Name
	}
	t := d.Recv.List[0].Type
	if star, ok := t.(*ast.StarExpr); ok {
		t = star.X
	}
	if id, ok := t.(*ast.Ident); ok {
		return id.Name + "." + d.Name.Name
	}
	return d.Name.Name
}
