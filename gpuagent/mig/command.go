package mig

import (
	"context"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/refit-run/refit/gpuagent/child"
	"github.com/refit-run/refit/gpuagent/setup"
)

// Command is `mig plan|apply`, for a person at the host.
func Command(host Host, reset func(ctx context.Context, pci ...string) error) *cobra.Command {
	return setup.Kind[Entry]{
		Name: "mig", Short: "Bring the GPUs to a declared MIG layout (mig-parted's format)",
		ApplyShort: "Change mode and instances to the layout; needs root and idle GPUs",
		Parse:      Parse,
		Flags: func(f *pflag.FlagSet, planned bool) setup.Do[Entry] {
			var o Options
			var allowReset bool
			f.BoolVar(&o.ModeOnly, "mode-only", false, "set the mode and touch no instance (TensorFusion partitioned pools)")
			if planned {
				return func(ctx context.Context, _ string, entries []Entry, _ func(string)) (setup.Report, error) {
					return Preview(ctx, host, entries, o)
				}
			}
			f.BoolVar(&allowReset, "allow-reset", false, "reset a GPU whose change of mode asks for it")
			return func(ctx context.Context, _ string, entries []Entry, progress func(string)) (setup.Report, error) {
				a := Applier{Host: host, Progress: progress}
				if allowReset {
					a.Reset = reset
				}
				return a.Apply(ctx, entries, o)
			}
		},
	}.Command()
}

// resetLimit is generous: nvidia-smi waits for the GPU to come back.
const resetLimit = 3 * time.Minute

// Reset resets GPUs with nvidia-smi, because NVML has no call for it. The
// GPUs must be without a client, nvidia-persistenced included.
func Reset(ctx context.Context, pci ...string) error {
	_, err := child.Tool(ctx, resetLimit, "nvidia-smi", "--gpu-reset", "-i", strings.Join(pci, ","))
	return err
}
