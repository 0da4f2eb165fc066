package planfile

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/santhosh-tekuri/jsonschema/v6"
	"github.com/santhosh-tekuri/jsonschema/v6/kind"

	"github.com/refit-run/refit/activities/mask"
)

// DurationPattern is the schema pattern of window.Duration; its breach is
// told in words.
const DurationPattern = `^([0-9]+(\.[0-9]+)?(ns|us|ms|s|m|h))+$`

// check validates the value against the kind's schema.
func (d *document) check(k Kind, value map[string]any) (Problems, error) {
	doc, err := jsonschema.UnmarshalJSON(bytes.NewReader(k.Schema))
	if err != nil {
		return nil, fmt.Errorf("schema of %s: %w", k.Name, err)
	}
	c := jsonschema.NewCompiler()
	url := "mem:///" + k.Name + ".json"
	if err := c.AddResource(url, doc); err != nil {
		return nil, fmt.Errorf("schema of %s: %w", k.Name, err)
	}
	schema, err := c.Compile(url)
	if err != nil {
		return nil, fmt.Errorf("schema of %s: %w", k.Name, err)
	}
	var invalid *jsonschema.ValidationError
	switch err := schema.Validate(map[string]any(value)); {
	case err == nil:
		return nil, nil
	case !errors.As(err, &invalid):
		return nil, fmt.Errorf("plan %s: %w", d.file, err)
	}
	var found Problems
	d.collect(&found, invalid, doc, value)
	slices.SortStableFunc(found, func(a, b Problem) int {
		if a.Line != b.Line {
			return a.Line - b.Line
		}
		return a.Column - b.Column
	})
	return found, nil
}

// collect turns the leaves of a validation error into problems.
func (d *document) collect(out *Problems, e *jsonschema.ValidationError, schema any, value any) {
	for _, c := range e.Causes {
		d.collect(out, c, schema, value)
	}
	if len(e.Causes) > 0 {
		return
	}
	add := func(path []string, key bool, format string, args ...any) {
		p := d.at(path, key)
		p.Path, p.Message = joinPath(path), fmt.Sprintf(format, args...)
		*out = append(*out, p)
	}
	here := e.InstanceLocation
	below := func(name string) []string { return append(slices.Clone(here), name) }
	got := shown(here, valueAt(value, here))
	switch k := e.ErrorKind.(type) {
	case *kind.AdditionalProperties:
		known := properties(schema, e.SchemaURL)
		for _, name := range k.Properties {
			add(below(name), true, "is not a key that is known here%s", orKnown(name, known))
		}
	case *kind.Required:
		for _, name := range k.Missing {
			add(below(name), true, "is missing")
		}
	case *kind.Type:
		hint := ""
		if slices.Equal(k.Want, []string{"string"}) && (k.Got == "number" || k.Got == "boolean") {
			hint = "; put it in quotes"
		}
		add(here, false, "is %s: want %s%s", got, wanted(k.Want), hint)
	case *kind.Enum:
		var want []string
		for _, w := range k.Want {
			want = append(want, fmt.Sprint(w))
		}
		text, _ := k.Got.(string)
		add(here, false, "is %s: want one of %s%s", got, strings.Join(want, ", "), suggestion(text, want))
	case *kind.Minimum:
		add(here, false, "is %s: want %s or more", got, k.Want.RatString())
	case *kind.Maximum:
		add(here, false, "is %s: want %s or less", got, k.Want.RatString())
	case *kind.Pattern:
		if k.Want == DurationPattern {
			add(here, false, "is %s: want a duration with a unit such as 90s, 5m or 2h", got)
			return
		}
		add(here, false, "is %s: want the form %s", got, k.Want)
	default:
		add(here, false, "is %s: %s", got, e.ErrorKind.KeywordPath())
	}
}

// properties lists the keys that the schema at url's fragment knows.
func properties(schema any, url string) []string {
	_, fragment, _ := strings.Cut(url, "#")
	node := schema
	for _, step := range strings.Split(strings.TrimPrefix(fragment, "/"), "/") {
		if step == "" {
			continue
		}
		m, ok := node.(map[string]any)
		if !ok {
			return nil
		}
		node = m[strings.NewReplacer("~1", "/", "~0", "~").Replace(step)]
	}
	m, _ := node.(map[string]any)
	props, _ := m["properties"].(map[string]any)
	names := make([]string, 0, len(props))
	for name := range props {
		names = append(names, name)
	}
	slices.Sort(names)
	return names
}

func valueAt(v any, path []string) any {
	for _, step := range path {
		v = element(v, step)
	}
	return v
}

// element is one step down from a mapping or a list; nil when there is none.
func element(v any, step string) any {
	switch c := v.(type) {
	case map[string]any:
		return c[step]
	case []any:
		if i, err := strconv.Atoi(step); err == nil && i >= 0 && i < len(c) {
			return c[i]
		}
	}
	return nil
}

// shown describes a value; one whose key may hold a secret, where a reference
// belongs, by its type only.
func shown(path []string, v any) string {
	if len(path) > 0 && mask.SecretKey(path[len(path)-1]) {
		return jsonName(v)
	}
	return describe(v)
}

// describe names a value by type; short scalars are shown.
func describe(v any) string {
	switch x := v.(type) {
	case string:
		if len(x) <= 40 {
			return strconv.Quote(x)
		}
		return "a string"
	case bool:
		return strconv.FormatBool(x)
	case json.Number:
		return "the number " + x.String()
	default:
		return jsonName(v)
	}
}

func wanted(kinds []string) string {
	words := map[string]string{"object": "a mapping", "array": "a list", "string": "a string",
		"integer": "a whole number", "number": "a number", "boolean": "true or false", "null": "nothing"}
	out := make([]string, len(kinds))
	for i, k := range kinds {
		out[i] = words[k]
	}
	return strings.Join(out, " or ")
}
