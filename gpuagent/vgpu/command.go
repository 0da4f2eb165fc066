package vgpu

import (
	"context"
	"fmt"
	"os"

	"github.com/spf13/cobra"

	"github.com/refit-run/refit/gpuagent/nvml"
	"github.com/refit-run/refit/gpuagent/setup"
)

// Command is `vgpu plan|apply`, for a person at the host.
func Command() *cobra.Command {
	c := &cobra.Command{Use: "vgpu", Short: "Bring the GPUs to a declared set of vGPU types (vgpu-device-manager's format)"}
	c.AddCommand(command(nvml.Setters{}, true), command(nvml.Setters{}, false))
	return c
}

func command(driver Driver, planned bool) *cobra.Command {
	var (
		flags         setup.Flags
		o             Options
		heterogeneous bool
	)
	c := &cobra.Command{Use: "apply -f FILE", Short: "Create and release virtual GPUs to the layout; needs root"}
	if planned {
		c = &cobra.Command{Use: "plan -f FILE", Short: "Show what apply would do; changes nothing"}
	}
	flags.Bind(c, planned)
	host, _ := os.Hostname()
	if node := os.Getenv("NODE_NAME"); node != "" {
		host = node
	}
	c.Flags().StringVar(&o.Node, "node", host, "name of the node, part of the ids of mediated devices (NODE_NAME)")
	c.Flags().StringVar(&o.Scheduler, "scheduler", "", "best-effort, equal-share or fixed-share; empty leaves the policy")
	c.Flags().BoolVar(&heterogeneous, "heterogeneous", false, "allow vGPUs of several sizes on one GPU; left as it is when not given")
	c.Flags().StringSliceVar(&o.Protected, "protect", nil, "virtual functions and mediated devices that are never released")
	c.RunE = func(c *cobra.Command, _ []string) error {
		text, err := flags.Text()
		if err != nil {
			return setup.ExitFor(err)
		}
		entries, err := Parse(text, flags.Label)
		if err != nil {
			return setup.ExitFor(err)
		}
		if c.Flags().Changed("heterogeneous") {
			o.Heterogeneous = &heterogeneous
		}
		a := Applier{Root: flags.Root, Driver: driver, Writer: Sysfs{Root: flags.Root},
			Progress: func(step string) { fmt.Fprintln(c.ErrOrStderr(), step) }}
		if planned {
			a.Writer = ReadOnly{}
			r, err := a.Preview(c.Context(), entries, o)
			return flags.Finish(c, r, planned, err)
		}
		r, err := setup.Locked(c.Context(), flags.Root, func(ctx context.Context) (setup.Report, error) { return a.Apply(ctx, entries, o) })
		return flags.Finish(c, r, planned, err)
	}
	return c
}
