package child

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// Mapped are the files that stand for a library in this process, in the order
// of its memory: those whose names begin with prefix. A child tells with it
// what the loader really gave it.
func Mapped(prefix string) ([]string, error) {
	maps, err := os.ReadFile("/proc/self/maps")
	if err != nil {
		return nil, fmt.Errorf("find the mapped %s: %w", prefix, err)
	}
	var found []string
	for line := range strings.Lines(string(maps)) {
		_, path, ok := strings.Cut(strings.TrimSpace(line), "/")
		if ok && strings.HasPrefix(filepath.Base(path), prefix) && !slices.Contains(found, "/"+path) {
			found = append(found, "/"+path)
		}
	}
	return found, nil
}
