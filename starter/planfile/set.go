package planfile

import (
	"bytes"
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/goccy/go-yaml"
)

// assignment is one --set path=value. Its text is the path alone: the value
// may be something that must not be printed.
type assignment struct {
	text  string
	path  []string
	value any
}

// parseSet reads path=value; the value is YAML, so 3 is a number and "3" a
// string.
func parseSet(text string) (assignment, error) {
	path, raw, ok := strings.Cut(text, "=")
	if !ok {
		return assignment{}, Problems{{Set: text, Message: "has no =: want --set path=value, for example --set rollouts[0].strategy.batch.count=2"}}
	}
	steps, err := splitPath(path)
	if err != nil {
		return assignment{}, Problems{{Set: text, Message: err.Error()}}
	}
	var value any
	if err := yaml.Unmarshal([]byte(raw), &value); err != nil {
		return assignment{}, Problems{{Set: path, Path: path, Message: "has a value that is not YAML"}}
	}
	doc, err := json.Marshal(value)
	if err != nil {
		return assignment{}, Problems{{Set: path, Path: path, Message: "has a value that JSON can't carry"}}
	}
	if err := decodeNumbers(doc, &value); err != nil {
		return assignment{}, err
	}
	return assignment{text: path, path: steps, value: value}, nil
}

// covers tells whether a value at path came from this assignment.
func (s assignment) covers(path []string) bool {
	return len(path) >= len(s.path) && slices.Equal(path[:len(s.path)], s.path)
}

func (s assignment) apply(root map[string]any) error {
	_, err := s.put(root, 0)
	return err
}

// put returns the container with the value in place: a list may have grown.
func (s assignment) put(into any, depth int) (any, error) {
	if depth == len(s.path) {
		return s.value, nil
	}
	step := s.path[depth]
	switch c := into.(type) {
	case map[string]any:
		v, err := s.put(c[step], depth+1)
		if err != nil {
			return nil, err
		}
		c[step] = v
		return c, nil
	case []any:
		i, err := strconv.Atoi(step)
		if err != nil || i < 0 || i > len(c) {
			return nil, s.problem(depth, fmt.Sprintf("is a list of %d: want an index from 0 to %d", len(c), len(c)))
		}
		if i == len(c) {
			c = append(c, nil)
		}
		v, err := s.put(c[i], depth+1)
		if err != nil {
			return nil, err
		}
		c[i] = v
		return c, nil
	case nil:
		if i, err := strconv.Atoi(step); err == nil {
			if i != 0 {
				return nil, s.problem(depth, "is an empty list: want index 0")
			}
			return s.put([]any{}, depth)
		}
		return s.put(map[string]any{}, depth)
	default:
		return nil, s.problem(depth, fmt.Sprintf("is %s: it has no key %q", jsonName(c), step))
	}
}

func (s assignment) problem(depth int, message string) error {
	return Problems{{Set: s.text, Path: joinPath(s.path[:depth]), Message: message}}
}

// decodeNumbers decodes JSON keeping numbers as written.
func decodeNumbers(raw []byte, into any) error {
	d := json.NewDecoder(bytes.NewReader(raw))
	d.UseNumber()
	return d.Decode(into)
}

func jsonName(v any) string {
	switch v.(type) {
	case string:
		return "a string"
	case bool:
		return "a boolean"
	case json.Number:
		return "a number"
	case []any:
		return "a list"
	case map[string]any:
		return "a mapping"
	default:
		return "null"
	}
}
