package natsd

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
)

// Tools makes the folder that goes before PATH in the containers: hooks and
// people call nats-server by its name there. command is what runs Run.
func Tools(dir string, command ...string) error {
	quoted := make([]string, len(command))
	for i, word := range command {
		quoted[i] = "'" + strings.ReplaceAll(word, "'", `'\''`) + "'"
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	script := fmt.Sprintf("#!/bin/sh\nexec %s \"$@\"\n", strings.Join(quoted, " "))
	return os.WriteFile(filepath.Join(dir, "nats-server"), []byte(script), 0o755)
}
