// Command refit-gpuagent proves and sets up the GPUs of one host: as a Temporal
// activity worker on the host's own task queue, and as commands for a person
// at the host.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/refit-run/refit/gpuagent/agent"
	"github.com/refit-run/refit/gpuagent/child"
	"github.com/refit-run/refit/gpuagent/cuda"
	"github.com/refit-run/refit/gpuagent/host"
	"github.com/refit-run/refit/gpuagent/mig"
	"github.com/refit-run/refit/gpuagent/setup"
	"github.com/refit-run/refit/gpuagent/vgpu"
)

// Exit codes of check, beside those of every command.
const (
	exitDegraded    = 10
	exitResetNeeded = 11
	exitUnfit       = 12
	exitUnproven    = 13
)

const exitHelp = `Exit codes:
  0   done; check: the verdict is pass
  1   an error, of which the text says what to do; probe: it did not pass
  2   bad input: a flag, a file, a baseline of another host
  3   another check or set-up of this host is at work; mig, vgpu: something is in
      use, or a reset or reboot is needed
  6   mig, vgpu: refused
  7   plan --exit-code: there is something to do
  10  check: degraded     there are warnings
  11  check: resetNeeded  a reset, a retry or a setting helps
  12  check: unfit        a GPU must not be used
  13  check: unproven     a row that matters could not be answered`

func main() {
	if child.Main() {
		return
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	code := run(ctx, command(), os.Args[1:])
	stop()
	os.Exit(code)
}

func run(ctx context.Context, root *cobra.Command, args []string) int {
	root.SetArgs(args)
	err := root.ExecuteContext(ctx)
	if err == nil {
		return setup.ExitDone
	}
	if errors.Is(err, cuda.ErrNotPassed) {
		return setup.ExitError // the verdict has been written
	}
	var exit *setup.Exit
	if !errors.As(err, &exit) {
		// What cobra itself refuses is a wrong flag or argument.
		exit = &setup.Exit{Code: setup.ExitBad, Err: err}
	}
	if !exit.Silent() {
		fmt.Fprintln(os.Stderr, "refit-gpuagent:", exit.Error())
	}
	return exit.ExitCode()
}

func command() *cobra.Command {
	root := &cobra.Command{
		Use:   "refit-gpuagent",
		Short: "Prove and set up the GPUs of this host",
		Long: "Prove and set up the GPUs of this host.\n\n" + exitHelp + `

Environment:
  NODE_NAME          the node's name in the cluster (default: the host name)
  REFIT_CLUSTER      the cluster's name, for run
  REFIT_HOST_ROOT    where the host's tree is mounted (default: /)
  TEMPORAL_ADDRESS, TEMPORAL_NAMESPACE, TEMPORAL_PROFILE and the other
                     variables of Temporal's clients, for run`,
		SilenceUsage: true, SilenceErrors: true,
	}
	setters := agent.NewSetters(host.New().Root)
	root.AddCommand(checkCommand(), baselineCommand(), runCommand(), cuda.Command(), mig.Command(setters, setters.Reset),
		vgpu.Command(setters, func(root string) vgpu.Writer { return agent.NewSetters(root) }))
	return root
}

// nodeName is the node's name in the cluster.
func nodeName() (string, error) {
	if name := os.Getenv("NODE_NAME"); name != "" {
		return name, nil
	}
	name, err := os.Hostname()
	if err != nil {
		return "", fmt.Errorf("find the host's name: %w; set NODE_NAME", err)
	}
	return name, nil
}

// failed gives an error of the agent its exit code.
func failed(err error) error {
	if errors.Is(err, errBad) {
		return &setup.Exit{Code: setup.ExitBad, Err: err}
	}
	return setup.ExitFor(err)
}

// errBad marks input of a person that cannot be used.
var errBad = errors.New("bad input")

func bad(format string, args ...any) error { return badInput{fmt.Errorf(format, args...)} }

type badInput struct{ error }

func (badInput) Is(target error) bool { return target == errBad }

func (b badInput) Unwrap() error { return b.error }
