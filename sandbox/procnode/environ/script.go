package environ

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
)

// Script makes a tool of an image: a program of that name in dir, which goes
// before PATH, that is the command line with what it is called with.
func Script(dir, name string, line ...string) error {
	quoted := make([]string, len(line))
	for i, word := range line {
		quoted[i] = "'" + strings.ReplaceAll(word, "'", `'\''`) + "'"
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	text := fmt.Sprintf("#!/bin/sh\nexec %s \"$@\"\n", strings.Join(quoted, " "))
	return os.WriteFile(filepath.Join(dir, name), []byte(text), 0o755)
}
