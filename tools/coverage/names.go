package main

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"path/filepath"
	"strconv"
	"strings"
)

// index holds the names declared in each folder that was asked for.
type index struct {
	root    string
	folders map[string]map[string]bool
}

// split cuts package/folder.Name or package/folder.Type.Method in two.
func split(name string) (folder, symbol string, err error) {
	slash := strings.LastIndex(name, "/")
	dot := strings.Index(name[slash+1:], ".")
	if dot < 0 {
		return "", "", fmt.Errorf("%q: want folder/package.Name", name)
	}
	return name[:slash+1+dot], name[slash+dot+2:], nil
}

// has reports whether folder.Name or folder.Type.Method is declared.
func (x index) has(name string) (bool, error) {
	folder, symbol, err := split(name)
	if err != nil {
		return false, err
	}
	if x.folders[folder] == nil {
		declared, err := declarations(filepath.Join(x.root, folder))
		if err != nil {
			return false, err
		}
		x.folders[folder] = declared
	}
	return x.folders[folder][symbol], nil
}

func parse(folder string) ([]*ast.File, error) {
	paths, err := filepath.Glob(filepath.Join(folder, "*.go"))
	if err != nil {
		return nil, err
	}
	var out []*ast.File
	for _, path := range paths {
		f, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.SkipObjectResolution)
		if err != nil {
			return nil, err
		}
		out = append(out, f)
	}
	return out, nil
}

func declarations(folder string) (map[string]bool, error) {
	files, err := parse(folder)
	if err != nil {
		return nil, err
	}
	out := map[string]bool{}
	for _, f := range files {
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

// registered lists the ids of a registry: the first string of each element.
func registered(root, name string) ([]string, error) {
	folder, symbol, err := split(name)
	if err != nil {
		return nil, err
	}
	files, err := parse(filepath.Join(root, folder))
	if err != nil {
		return nil, err
	}
	var ids []string
	for _, f := range files {
		ast.Inspect(f, func(n ast.Node) bool {
			spec, ok := n.(*ast.ValueSpec)
			if !ok || len(spec.Names) != 1 || spec.Names[0].Name != symbol || len(spec.Values) != 1 {
				return true
			}
			list, ok := spec.Values[0].(*ast.CompositeLit)
			if !ok {
				return true
			}
			for _, e := range list.Elts {
				if id, ok := firstString(e); ok {
					ids = append(ids, id)
				}
			}
			return false
		})
	}
	if len(ids) == 0 {
		return nil, fmt.Errorf("registry %s: no list of checks of that name", name)
	}
	return ids, nil
}

func firstString(e ast.Expr) (string, bool) {
	item, ok := e.(*ast.CompositeLit)
	if !ok || len(item.Elts) == 0 {
		return "", false
	}
	lit, ok := item.Elts[0].(*ast.BasicLit)
	if !ok || lit.Kind != token.STRING {
		return "", false
	}
	s, err := strconv.Unquote(lit.Value)
	return s, err == nil
}
