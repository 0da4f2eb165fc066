package helm

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"sort"

	"github.com/refit-run/refit/activities/finding"
)

// Merge lays values over each other as `helm -f a -f b` does: maps are merged,
// everything else (lists too) is replaced by the later layer, null stays null
// and removes the chart's default. Inputs are not changed.
func Merge(layers ...map[string]any) map[string]any {
	merged := map[string]any{}
	for _, layer := range layers {
		merged = overlay(merged, layer)
	}
	return merged
}

func overlay(base, top map[string]any) map[string]any {
	for key, value := range top {
		over, isMap := value.(map[string]any)
		under, wasMap := base[key].(map[string]any)
		switch {
		case isMap && wasMap:
			base[key] = overlay(under, over)
		default:
			base[key] = clone(value)
		}
	}
	return base
}

func clone(value any) any {
	switch v := value.(type) {
	case map[string]any:
		return overlay(make(map[string]any, len(v)), v)
	case []any:
		list := make([]any, len(v))
		for i := range v {
			list[i] = clone(v[i])
		}
		return list
	}
	return value
}

// UnknownKeys lists the user's value paths that the chart's values do not
// have, each with the nearest known key beside it: charts without a strict
// schema ignore a misspelt key in silence. Below an empty map, a list or a
// scalar of the chart everything is allowed, as is `global`.
func UnknownKeys(known, user map[string]any) []string {
	var unknown []string
	compareKeys(known, user, "", &unknown)
	sort.Strings(unknown)
	return unknown
}

func compareKeys(known, user map[string]any, path string, unknown *[]string) {
	for key, value := range user {
		if path == "" && key == "global" {
			continue
		}
		at := key
		if path != "" {
			at = path + "." + key
		}
		expected, ok := known[key]
		if !ok {
			if near := nearest(key, known); near != "" {
				at += fmt.Sprintf(" (did you mean %s?)", near)
			}
			*unknown = append(*unknown, at)
			continue
		}
		below, isMap := expected.(map[string]any)
		given, givenMap := value.(map[string]any)
		if isMap && givenMap && len(below) > 0 {
			compareKeys(below, given, at, unknown)
		}
	}
}

// nearest is the known key with the smallest edit distance, if that is small
// enough to be a slip of the finger.
func nearest(key string, known map[string]any) string {
	best, distance := "", len(key)/3+1
	for candidate := range known {
		d := editDistance(key, candidate)
		if d < distance || (d == distance && (best == "" || candidate < best)) {
			best, distance = candidate, d
		}
	}
	return best
}

func editDistance(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := 1; i <= len(a); i++ {
		diagonal := row[0]
		row[0] = i
		for j := 1; j <= len(b); j++ {
			cost := 1
			if a[i-1] == b[j-1] {
				cost = 0
			}
			next := min(row[j]+1, row[j-1]+1, diagonal+cost)
			diagonal, row[j] = row[j], next
		}
	}
	return row[len(b)]
}

// Digest is the SHA-256 of a value's canonical JSON: sorted keys, no spaces.
// A plan carries it in place of values, which never leave an activity.
func Digest(value any) (string, error) {
	data, err := json.Marshal(value)
	if err != nil {
		return "", fmt.Errorf("digest: %w", err)
	}
	// Through a generic value, so that a struct and a map with the same
	// content agree.
	decoder := json.NewDecoder(bytes.NewReader(data))
	decoder.UseNumber()
	var generic any
	if err := decoder.Decode(&generic); err != nil {
		return "", fmt.Errorf("digest: %w", err)
	}
	if data, err = json.Marshal(generic); err != nil {
		return "", fmt.Errorf("digest: %w", err)
	}
	sum := sha256.Sum256(data)
	return hex.EncodeToString(sum[:]), nil
}

// SetPath puts a value at a dotted path of values, making maps on the way.
func SetPath(values map[string]any, path string, value any) error {
	steps, err := parsePath(path)
	if err == nil {
		_, err = pinAt(values, steps, value)
	}
	if err != nil {
		return finding.Finding{Object: "value " + path, Found: err.Error()}.Error(finding.Stop)
	}
	return nil
}

// GetPath is the value at a dotted path; ok is false when there is none.
func GetPath(values map[string]any, path string) (value any, ok bool) {
	steps, err := parsePath(path)
	if err != nil {
		return nil, false
	}
	var node any = values
	for _, s := range steps {
		if s.list {
			list, isList := node.([]any)
			if !isList || s.index < 0 || s.index >= len(list) {
				return nil, false
			}
			node = list[s.index]
			continue
		}
		object, isMap := node.(map[string]any)
		if !isMap {
			return nil, false
		}
		if node, ok = object[s.key]; !ok {
			return nil, false
		}
	}
	return node, true
}
