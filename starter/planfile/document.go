package planfile

import (
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"

	"github.com/goccy/go-yaml"
	"github.com/goccy/go-yaml/ast"
	"github.com/goccy/go-yaml/parser"
)

// document is a parsed YAML file that can say where each of its values stands.
type document struct {
	file string
	root ast.Node
	sets []assignment
}

// parse reads exactly one YAML document with a mapping at its top.
func parse(file string, content []byte) (*document, error) {
	tree, err := parser.ParseBytes(content, 0)
	if err != nil {
		return nil, syntaxProblem(file, err)
	}
	var root ast.Node
	for _, d := range tree.Docs {
		if d.Body == nil || d.Body.Type() == ast.NullType || d.Body.Type() == ast.CommentType {
			continue
		}
		if root != nil {
			at := position(d.Body)
			return nil, Problems{{File: file, Line: at.line, Column: at.column,
				Message: "is a second YAML document: want one plan per file"}}
		}
		root = d.Body
	}
	if root == nil {
		return nil, Problems{{File: file, Line: 1, Column: 1, Message: "holds no plan: want a mapping that begins with `kind:`"}}
	}
	switch root.(type) {
	case *ast.MappingNode, *ast.MappingValueNode:
		return &document{file: file, root: root}, nil
	default:
		at := position(root)
		return nil, Problems{{File: file, Line: at.line, Column: at.column,
			Message: fmt.Sprintf("is %s: want a mapping that begins with `kind:`", nodeName(root))}}
	}
}

// syntaxProblem keeps the parser's position and first line: the rest is an
// excerpt drawn for terminals.
func syntaxProblem(file string, err error) error {
	p := Problem{File: file, Line: 1, Column: 1, Message: err.Error()}
	var syntax yaml.Error
	if errors.As(err, &syntax) {
		p.Message = "is not YAML: " + syntax.GetMessage()
		if t := syntax.GetToken(); t != nil {
			p.Line, p.Column = t.Position.Line, t.Position.Column
		}
	}
	return Problems{p}
}

// value is the document as JSON values, with the assignments applied.
func (d *document) value() (map[string]any, error) {
	var v map[string]any
	if err := yaml.NodeToValue(d.root, &v); err != nil {
		return nil, syntaxProblem(d.file, err)
	}
	raw, err := json.Marshal(v)
	if err != nil {
		return nil, Problems{{File: d.file, Line: 1, Column: 1, Message: fmt.Sprintf("holds a value that JSON can't carry: %v", err)}}
	}
	var out map[string]any
	if err := decodeNumbers(raw, &out); err != nil {
		return nil, err
	}
	for _, s := range d.sets {
		if err := s.apply(out); err != nil {
			return nil, err
		}
	}
	return out, nil
}

// at finds the position of a path's key (key=true) or value. A path that the
// document doesn't hold gives the position of its nearest parent, so that a
// missing key is reported where it belongs.
func (d *document) at(path []string, key bool) Problem {
	for _, s := range d.sets {
		if s.covers(path) {
			return Problem{Set: s.text}
		}
	}
	node, where := d.root, position(d.root)
	for i, step := range path {
		last := i == len(path)-1
		child, childKey := lookup(node, step)
		if child == nil {
			break
		}
		where = position(child)
		if childKey != nil && (last && key || isBlock(child)) {
			where = position(childKey)
		}
		node = child
	}
	return Problem{File: d.file, Line: where.line, Column: where.column}
}

type place struct{ line, column int }

// isBlock tells a value that begins on a later line than its key: its key is
// the better place to point at.
func isBlock(n ast.Node) bool {
	switch v := n.(type) {
	case *ast.MappingNode:
		return !v.IsFlowStyle
	case *ast.MappingValueNode:
		return true
	case *ast.SequenceNode:
		return !v.IsFlowStyle
	}
	return false
}

func position(n ast.Node) place {
	switch v := n.(type) {
	case *ast.MappingNode:
		if len(v.Values) > 0 && !v.IsFlowStyle {
			return position(v.Values[0])
		}
	case *ast.MappingValueNode:
		return position(v.Key)
	}
	t := n.GetToken()
	if t == nil || t.Position == nil {
		return place{1, 1}
	}
	return place{t.Position.Line, t.Position.Column}
}

func lookup(n ast.Node, step string) (child, key ast.Node) {
	switch v := n.(type) {
	case *ast.MappingNode:
		for _, entry := range v.Values {
			if keyText(entry.Key) == step {
				return entry.Value, entry.Key
			}
		}
	case *ast.MappingValueNode:
		if keyText(v.Key) == step {
			return v.Value, v.Key
		}
	case *ast.SequenceNode:
		if i, err := strconv.Atoi(step); err == nil && i >= 0 && i < len(v.Values) {
			return v.Values[i], nil
		}
	case *ast.AnchorNode:
		return lookup(v.Value, step)
	case *ast.TagNode:
		return lookup(v.Value, step)
	}
	return nil, nil
}

func keyText(k ast.MapKeyNode) string {
	if s, ok := k.(*ast.StringNode); ok {
		return s.Value
	}
	return k.GetToken().Value
}

func nodeName(n ast.Node) string {
	switch n.Type() {
	case ast.SequenceType:
		return "a list"
	case ast.StringType, ast.LiteralType:
		return "a string"
	case ast.IntegerType, ast.FloatType:
		return "a number"
	case ast.BoolType:
		return "a boolean"
	default:
		return "a " + strings.ToLower(n.Type().String())
	}
}

// splitPath turns rollouts[0].strategy.batch into its steps.
func splitPath(path string) ([]string, error) {
	var steps []string
	for _, part := range strings.Split(path, ".") {
		name, rest, _ := strings.Cut(part, "[")
		if name == "" {
			return nil, fmt.Errorf("path %q has an empty key", path)
		}
		steps = append(steps, name)
		for rest != "" {
			index, after, ok := strings.Cut(rest, "]")
			if _, err := strconv.Atoi(index); !ok || err != nil {
				return nil, fmt.Errorf("path %q: want a number in [...]", path)
			}
			steps = append(steps, index)
			rest = strings.TrimPrefix(after, "[")
		}
	}
	return steps, nil
}

// joinPath is splitPath's inverse for messages; numbers become indexes.
func joinPath(steps []string) string {
	var b strings.Builder
	for _, s := range steps {
		if _, err := strconv.Atoi(s); err == nil && b.Len() > 0 {
			fmt.Fprintf(&b, "[%s]", s)
			continue
		}
		if b.Len() > 0 {
			b.WriteByte('.')
		}
		b.WriteString(s)
	}
	return b.String()
}
