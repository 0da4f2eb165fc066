package openbao

import (
	"fmt"
	"os"
	"path/filepath"

	"github.com/refit-run/refit/sandbox/procnode/environ"
)

// Real binaries take the double's place when these variables name them: the
// older one that of the line 2.5, the other that of the rest.
const (
	RealVariable    = "REFIT_TEST_BAO"
	RealOldVariable = "REFIT_TEST_BAO_OLD"
)

// Tools makes the folders that go before PATH in the containers, one for each
// tag: bao is there, in the tag's version. command is what runs Program.
func Tools(dir string, tags []string, command ...string) (map[string]string, error) {
	folders := map[string]string{}
	for _, tag := range tags {
		version, err := ParseVersion(tag)
		if err != nil {
			return nil, err
		}
		line := append(append([]string{}, command...), asFlag+string(version))
		variable := RealVariable
		if version.old() {
			variable = RealOldVariable
		}
		if real := os.Getenv(variable); real != "" {
			if info, err := os.Stat(real); err != nil || !info.Mode().IsRegular() {
				return nil, fmt.Errorf("%s: expected a program, found none at %s", variable, real)
			}
			line = []string{real}
		}
		folders[tag] = filepath.Join(dir, tag)
		if err := environ.Script(folders[tag], "bao", line...); err != nil {
			return nil, err
		}
	}
	return folders, nil
}
