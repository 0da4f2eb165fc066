package vgpu

import (
	"context"
	"os"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/refit-run/refit/gpuagent/setup"
)

// Command is `vgpu plan|apply`, for a person at the host; writer makes what
// changes the tree at a root.
func Command(driver Driver, writer func(root string) Writer) *cobra.Command {
	return setup.Kind[Entry]{
		Name: "vgpu", Short: "Bring the GPUs to a declared set of vGPU types (vgpu-device-manager's format)",
		ApplyShort: "Create and release virtual GPUs to the layout; needs root",
		Parse:      Parse,
		Flags: func(f *pflag.FlagSet, planned bool) setup.Do[Entry] {
			var o Options
			var heterogeneous bool
			host, _ := os.Hostname()
			if node := os.Getenv("NODE_NAME"); node != "" {
				host = node
			}
			f.StringVar(&o.Node, "node", host, "name of the node, part of the ids of mediated devices (NODE_NAME)")
			f.StringVar(&o.Scheduler, "scheduler", "", "best-effort, equal-share or fixed-share; empty leaves the policy")
			f.BoolVar(&heterogeneous, "heterogeneous", false, "allow vGPUs of several sizes on one GPU; left as it is when not given")
			f.StringSliceVar(&o.Protected, "protect", nil, "virtual functions and mediated devices that are never released")
			return func(ctx context.Context, root string, entries []Entry, progress func(string)) (setup.Report, error) {
				if f.Changed("heterogeneous") {
					o.Heterogeneous = &heterogeneous
				}
				if planned {
					return Applier{Root: root, Driver: driver, Writer: ReadOnly{driver}}.Preview(ctx, entries, o)
				}
				return Applier{Root: root, Driver: driver, Writer: writer(root), Progress: progress}.Apply(ctx, entries, o)
			}
		},
	}.Command()
}
