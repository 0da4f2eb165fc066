// Package planfile reads a plan file: YAML that becomes the one input struct
// of a workflow. It checks the file against the kind's JSON schema and the
// struct's own rules, and says file, line and column of everything wrong. It
// must not contact Temporal or a cluster.
package planfile

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
)

// Kind is one workflow that a plan file can ask for.
type Kind struct {
	// Name is the value of the top-level key `kind` and the workflow type.
	Name string
	// Schema is the kind's JSON schema.
	Schema []byte
	// Read decodes a document that meets the schema.
	Read func(doc []byte) (Plan, error)
}

// Plan is a plan file that was read.
type Plan struct {
	Kind string
	// Cluster and Object make the workflow ID.
	Cluster string
	Object  string
	// Summary is one line for lists and for the Temporal UI.
	Summary string
	// Input is the workflow's argument; Rules its struct's own complaints.
	Input any
	Rules []Rule
	// Planned returns the input that stops after the plan stage; nil where
	// the kind has no plan.
	Planned func() any
	// Document is the file's content as canonical JSON.
	Document []byte
}

// ID is the workflow ID that the command line gives.
func (p Plan) ID() string { return p.Kind + "." + p.Cluster + "." + p.Object }

// Rule is a complaint of the input struct about itself.
type Rule struct {
	Path    string
	Message string
}

// Problem is one thing wrong in a plan file.
type Problem struct {
	File   string `json:"file,omitempty"`
	Line   int    `json:"line,omitempty"`
	Column int    `json:"column,omitempty"`
	// Set is the --set that brought the value, instead of File.
	Set     string `json:"set,omitempty"`
	Path    string `json:"path,omitempty"`
	Message string `json:"message"`
}

// String is file:line:column: path message.
func (p Problem) String() string {
	where := fmt.Sprintf("%s:%d:%d", p.File, p.Line, p.Column)
	if p.Set != "" {
		where = "--set " + p.Set
	}
	if p.Path == "" {
		return where + ": " + p.Message
	}
	return where + ": " + p.Path + " " + p.Message
}

// Problems is every problem of a plan file, in the file's order.
type Problems []Problem

// Error lists one problem a line.
func (p Problems) Error() string {
	lines := make([]string, len(p))
	for i, x := range p {
		lines[i] = x.String()
	}
	return strings.Join(lines, "\n")
}

// Load reads a plan file's content with --set assignments on top. The error
// is of type Problems.
func Load(kinds []Kind, file string, content []byte, sets []string) (Plan, error) {
	doc, err := parse(file, content)
	if err != nil {
		return Plan{}, err
	}
	for _, text := range sets {
		s, err := parseSet(text)
		if err != nil {
			return Plan{}, err
		}
		doc.sets = append(doc.sets, s)
	}
	value, err := doc.value()
	if err != nil {
		return Plan{}, err
	}
	kind, err := doc.kind(kinds, value)
	if err != nil {
		return Plan{}, err
	}
	found, err := doc.check(kind, value)
	if err != nil {
		return Plan{}, err
	}
	if len(found) > 0 {
		return Plan{}, found
	}
	raw, err := json.Marshal(value)
	if err != nil {
		return Plan{}, fmt.Errorf("plan %s: %w", file, err)
	}
	plan, err := kind.Read(raw)
	if err != nil {
		return Plan{}, Problems{{File: file, Line: 1, Column: 1, Message: err.Error()}}
	}
	for _, r := range plan.Rules {
		p := doc.at(steps(r.Path, value), false)
		p.Path, p.Message = r.Path, r.Message
		found = append(found, p)
	}
	if len(found) > 0 {
		return Plan{}, found
	}
	plan.Kind, plan.Document = kind.Name, raw
	return plan, nil
}

func (d *document) kind(kinds []Kind, value map[string]any) (Kind, error) {
	names := make([]string, len(kinds))
	for i, k := range kinds {
		names[i] = k.Name
	}
	name, ok := value["kind"].(string)
	if !ok {
		p := d.at([]string{"kind"}, true)
		p.Path, p.Message = "kind", "is missing: want one of "+strings.Join(names, ", ")
		return Kind{}, Problems{p}
	}
	if i := slices.Index(names, name); i >= 0 {
		return kinds[i], nil
	}
	p := d.at([]string{"kind"}, false)
	p.Path, p.Message = "kind", fmt.Sprintf("is %q: want one of %s%s", name, strings.Join(names, ", "), suggestion(name, names))
	return Kind{}, Problems{p}
}

// steps splits a rule's path greedily against the document, because keys of
// free-form values may hold dots.
func steps(path string, value any) []string {
	var out []string
	for path != "" {
		head := longestKey(path, value)
		if head == "" {
			rest, err := splitPath(path)
			if err != nil {
				return append(out, path)
			}
			return append(out, rest...)
		}
		out = append(out, head)
		path, value = path[len(head):], element(value, head)
		for strings.HasPrefix(path, "[") {
			index, after, _ := strings.Cut(path[1:], "]")
			out = append(out, index)
			path, value = after, element(value, index)
		}
		path = strings.TrimPrefix(path, ".")
	}
	return out
}

// longestKey is the longest key of value that path begins with.
func longestKey(path string, value any) string {
	m, _ := value.(map[string]any)
	best := ""
	for k := range m {
		rest, ok := strings.CutPrefix(path, k)
		if ok && len(k) > len(best) && (rest == "" || rest[0] == '.' || rest[0] == '[') {
			best = k
		}
	}
	return best
}
