package natsd

import "github.com/refit-run/refit/sandbox/procnode/environ"

// Tools makes the folder that goes before PATH in the containers: hooks and
// people call nats-server by its name there. command is what runs Run.
func Tools(dir string, command ...string) error {
	return environ.Script(dir, "nats-server", command...)
}
