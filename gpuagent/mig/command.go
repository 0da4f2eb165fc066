package mig

import (
	"context"
	"fmt"
	"os/exec"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/refit-run/refit/gpuagent/nvml"
	"github.com/refit-run/refit/gpuagent/setup"
)

// Command is `mig plan|apply`, for a person at the host.
func Command() *cobra.Command {
	c := &cobra.Command{Use: "mig", Short: "Bring the GPUs to a declared MIG layout (mig-parted's format)"}
	c.AddCommand(command(nvml.Setters{}, true), command(nvml.Setters{}, false))
	return c
}

func command(host Host, planned bool) *cobra.Command {
	var (
		flags      setup.Flags
		o          Options
		allowReset bool
	)
	c := &cobra.Command{Use: "apply -f FILE", Short: "Change mode and instances to the layout; needs root and idle GPUs"}
	if planned {
		c = &cobra.Command{Use: "plan -f FILE", Short: "Show what apply would do; changes nothing"}
	}
	flags.Bind(c, planned)
	c.Flags().BoolVar(&o.ModeOnly, "mode-only", false, "set the mode and touch no instance (TensorFusion partitioned pools)")
	if !planned {
		c.Flags().BoolVar(&allowReset, "allow-reset", false, "reset a GPU whose change of mode asks for it")
	}
	c.RunE = func(c *cobra.Command, _ []string) error {
		text, err := flags.Text()
		if err != nil {
			return setup.ExitFor(err)
		}
		entries, err := Parse(text, flags.Label)
		if err != nil {
			return setup.ExitFor(err)
		}
		if planned {
			r, err := Preview(c.Context(), host, entries, o)
			return flags.Finish(c, r, planned, err)
		}
		a := Applier{Host: host, Progress: func(step string) { fmt.Fprintln(c.ErrOrStderr(), step) }}
		if allowReset {
			a.Reset = Reset
		}
		r, err := setup.Locked(c.Context(), flags.Root, func(ctx context.Context) (setup.Report, error) { return a.Apply(ctx, entries, o) })
		return flags.Finish(c, r, planned, err)
	}
	return c
}

// resetLimit is generous: nvidia-smi waits for the GPU to come back.
const resetLimit = 3 * time.Minute

// Reset resets GPUs with nvidia-smi, because NVML has no call for it. The
// GPUs must be without a client, nvidia-persistenced included.
func Reset(ctx context.Context, pci ...string) error {
	ctx, cancel := context.WithTimeout(ctx, resetLimit)
	defer cancel()
	out, err := setup.Output(ctx, exec.CommandContext(ctx, "nvidia-smi", "--gpu-reset", "-i", strings.Join(pci, ",")))
	if err != nil {
		return fmt.Errorf("nvidia-smi --gpu-reset: %w: %s", err, strings.TrimSpace(out))
	}
	return nil
}
