package helm

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"

	utilyaml "k8s.io/apimachinery/pkg/util/yaml"
	"sigs.k8s.io/yaml"
)

// Pin sets one field of rendered objects to a value, whatever the chart's
// template says. It is data, so that a child process can be given it and a
// plan can show it.
type Pin struct {
	Kind string `json:"kind"`
	// Name narrows to one object; empty means every object of the kind.
	Name string `json:"name,omitempty"`
	// Path is dotted, with [*] or [2] for list elements and ["a.b/c"] for keys
	// that hold dots: spec.pools[*].policy.auto. Missing maps are made, missing
	// list elements are not.
	Path  string `json:"path"`
	Value any    `json:"value"`
}

// PostRenderer applies pins to Helm's rendered manifest; it is a
// postrender.PostRenderer of the Helm SDK.
type PostRenderer struct {
	Pins []Pin
}

// Run implements postrender.PostRenderer.
func (p PostRenderer) Run(rendered *bytes.Buffer) (*bytes.Buffer, error) {
	manifest, _, err := ApplyPins(rendered.String(), p.Pins)
	if err != nil {
		return nil, err
	}
	return bytes.NewBufferString(manifest), nil
}

// ApplyPins returns the manifest with the pins set and the number of fields
// that hold a pinned value now. Documents without a pin stay as they are.
func ApplyPins(manifest string, pins []Pin) (string, int, error) {
	if len(pins) == 0 {
		return manifest, 0, nil
	}
	paths := make([][]step, len(pins))
	for i, pin := range pins {
		var err error
		if paths[i], err = parsePath(pin.Path); err != nil {
			return "", 0, fmt.Errorf("pin of %s: %w", pin.Kind, err)
		}
	}
	documents, err := split(manifest)
	if err != nil {
		return "", 0, err
	}
	var out strings.Builder
	total := 0
	for _, document := range documents {
		var obj map[string]any
		if err := yaml.Unmarshal([]byte(document), &obj); err != nil {
			return "", 0, fmt.Errorf("rendered manifest: %w", err)
		}
		set := 0
		for i, pin := range pins {
			if obj == nil || obj["kind"] != pin.Kind {
				continue
			}
			if metadata, _ := obj["metadata"].(map[string]any); pin.Name != "" && metadata["name"] != pin.Name {
				continue
			}
			n, err := pinAt(obj, paths[i], pin.Value)
			if err != nil {
				return "", 0, fmt.Errorf("pin %s of %s: %w", pin.Path, pin.Kind, err)
			}
			set += n
		}
		if set > 0 {
			data, err := yaml.Marshal(obj)
			if err != nil {
				return "", 0, err
			}
			document = sourceComment(document) + string(data)
			total += set
		}
		out.WriteString("---\n" + strings.TrimSuffix(document, "\n") + "\n")
	}
	return out.String(), total, nil
}

// split cuts a manifest into its documents, empty ones left out.
func split(manifest string) ([]string, error) {
	var documents []string
	reader := utilyaml.NewYAMLReader(bufio.NewReader(strings.NewReader(manifest)))
	for {
		document, err := reader.Read()
		if errors.Is(err, io.EOF) {
			return documents, nil
		}
		if err != nil {
			return nil, fmt.Errorf("rendered manifest: %w", err)
		}
		text := strings.TrimPrefix(string(document), "---\n")
		if strings.TrimSpace(text) != "" {
			documents = append(documents, text)
		}
	}
}

// sourceComment keeps the line by which Helm tells the template's file.
func sourceComment(document string) string {
	first, _, _ := strings.Cut(document, "\n")
	if strings.HasPrefix(first, "# Source:") {
		return first + "\n"
	}
	return ""
}

// step is one part of a path: a key, or a list index (-1 is every element).
type step struct {
	key   string
	list  bool
	index int
}

func parsePath(path string) ([]step, error) {
	var steps []step
	rest := path
	for rest != "" {
		switch {
		case strings.HasPrefix(rest, `["`):
			end := strings.Index(rest, `"]`)
			if end < 0 {
				return nil, fmt.Errorf("path %q: unfinished [\"key\"]", path)
			}
			steps, rest = append(steps, step{key: rest[2:end]}), rest[end+2:]
		case strings.HasPrefix(rest, "["):
			end := strings.Index(rest, "]")
			if end < 0 {
				return nil, fmt.Errorf("path %q: unfinished [index]", path)
			}
			s := step{list: true, index: -1}
			if inner := rest[1:end]; inner != "*" {
				n, err := strconv.Atoi(inner)
				if err != nil || n < 0 {
					return nil, fmt.Errorf("path %q: %q is no list index", path, inner)
				}
				s.index = n
			}
			steps, rest = append(steps, s), rest[end+1:]
		default:
			rest = strings.TrimPrefix(rest, ".")
			end := strings.IndexAny(rest, ".[")
			if end < 0 {
				end = len(rest)
			}
			if end == 0 {
				return nil, fmt.Errorf("path %q: an empty key", path)
			}
			steps, rest = append(steps, step{key: rest[:end]}), rest[end:]
		}
	}
	if len(steps) == 0 || steps[0].list || steps[len(steps)-1].list {
		return nil, fmt.Errorf("path %q: expected to begin and end with a key", path)
	}
	return steps, nil
}

func pinAt(node any, path []step, value any) (int, error) {
	s := path[0]
	if s.list {
		list, ok := node.([]any)
		if !ok {
			return 0, fmt.Errorf("expected a list, found %T", node)
		}
		total := 0
		for i, element := range list {
			if s.index >= 0 && s.index != i {
				continue
			}
			n, err := pinAt(element, path[1:], value)
			if err != nil {
				return 0, err
			}
			total += n
		}
		return total, nil
	}
	object, ok := node.(map[string]any)
	if !ok {
		return 0, fmt.Errorf("expected a map above %q, found %T", s.key, node)
	}
	if len(path) == 1 {
		object[s.key] = value
		return 1, nil
	}
	child := object[s.key]
	if child == nil {
		if path[1].list {
			return 0, nil
		}
		child = map[string]any{}
		object[s.key] = child
	}
	return pinAt(child, path[1:], value)
}
