// refit-sandbox starts, inspects, breaks and removes local worlds for Refit:
// a Kubernetes control plane with fake GPU nodes, Temporal, an OCI registry
// and a double of TensorFusion.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/refit-run/refit/sandbox/folder"
	"github.com/refit-run/refit/sandbox/openbao"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := command().ExecuteContext(ctx)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "refit-sandbox:", err)
		var exit *openbao.ExitError
		if errors.As(err, &exit) {
			os.Exit(exit.Code)
		}
		os.Exit(1)
	}
}

// where is the sandbox that a command is about.
type where struct{ name, dir string }

func (w *where) folder() (folder.Folder, error) { return folder.Locate(w.name, w.dir) }

func command() *cobra.Command {
	w := &where{}
	root := &cobra.Command{
		Use:           "refit-sandbox",
		Short:         "A local world for Refit: Kubernetes with fake GPU nodes, Temporal, a registry, TensorFusion's double",
		SilenceUsage:  true,
		SilenceErrors: true,
	}
	root.PersistentFlags().StringVar(&w.name, "name", "demo", "name of the sandbox; several can run side by side")
	root.PersistentFlags().StringVar(&w.dir, "dir", "", "its folder (default $REFIT_SANDBOX_HOME/NAME or ./.sandbox/NAME)")
	root.AddCommand(upCommand(w), downCommand(w), statusCommand(w), envCommand(w), faultCommand(w), runCommand(w))
	root.AddCommand(podCommands()...)
	return root
}
