package planfile

import (
	"fmt"
	"strings"
)

// suggestion is `; did you mean "x"?` for the nearest known name, or nothing
// when none is near.
func suggestion(name string, known []string) string {
	best, distance := "", len(name)/2+1
	for _, k := range known {
		if d := edits(strings.ToLower(name), strings.ToLower(k)); d < distance {
			best, distance = k, d
		}
	}
	if best == "" {
		return ""
	}
	return fmt.Sprintf("; did you mean %q?", best)
}

// orKnown is the suggestion, or the list of all known names.
func orKnown(name string, known []string) string {
	if s := suggestion(name, known); s != "" || len(known) == 0 {
		return s
	}
	return "; known: " + strings.Join(known, ", ")
}

// edits is the Levenshtein distance.
func edits(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		left := row[0]
		row[0] = i + 1
		for j := range len(b) {
			change := left
			if a[i] != b[j] {
				change++
			}
			left = row[j+1]
			row[j+1] = min(change, left+1, row[j]+1)
		}
	}
	return row[len(b)]
}
