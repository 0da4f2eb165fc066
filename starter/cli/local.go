package cli

import (
	"context"
	"fmt"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"

	"github.com/refit-run/refit/starter/local"
	"github.com/refit-run/refit/starter/run"
	"github.com/refit-run/refit/starter/view"
)

func (a *App) upCommand() *cobra.Command {
	o := local.Options{Getenv: a.Getenv, Environ: os.Environ()}
	c := &cobra.Command{
		Use:   "up",
		Short: "Start a Temporal server and a worker on this host, for people without a Temporal cluster",
		Args:  exactly(0, "no argument"),
		RunE: func(c *cobra.Command, _ []string) error {
			own, err := os.Executable()
			if err != nil {
				return fmt.Errorf("find our own binary: %w", err)
			}
			o.Beside = filepath.Dir(own)
			o.Say = a.say
			o.Ready, o.Polls = ready, polls
			s, err := local.Up(c.Context(), o)
			if err != nil {
				return err
			}
			return a.print(s, func(view.Options) string {
				return fmt.Sprintf("\nTemporal  %s\nUI        %s\nrefit finds both by itself; other tools need TEMPORAL_ADDRESS=%s\n", s.Address, s.UI, s.Address)
			})
		},
	}
	f := c.Flags()
	f.IntVar(&o.Port, "port", 7233, "port of the Temporal server")
	f.IntVar(&o.UIPort, "ui-port", 8233, "port of its web UI")
	f.StringArrayVar(&o.Clusters, "cluster", nil, "NAME=KUBECONFIG#CONTEXT the worker may work on; may be repeated")
	f.StringArrayVar(&o.Recipients, "recipient", nil, "age public key that backups are encrypted to (default REFIT_AGE_RECIPIENTS, or a key made in the state folder)")
	return c
}

// ready prepares a fresh dev server: search attributes, and a retention long
// enough for receipts to be read.
func ready(ctx context.Context, address string) error {
	c, err := run.ConnectPlain(ctx, address, "")
	if err != nil {
		return err
	}
	defer c.Close()
	if _, err := run.Setup(ctx, c); err != nil {
		return err
	}
	return run.Retain(ctx, c, run.KeepReceipts)
}

func polls(ctx context.Context, address string, pid int) (bool, error) {
	c, err := run.ConnectPlain(ctx, address, "")
	if err != nil {
		return false, err
	}
	defer c.Close()
	return run.Polled(ctx, c, pid)
}

func (a *App) downCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "down",
		Short: "Stop what `refit up` started; runs go on at the next `refit up`",
		Args:  exactly(0, "no argument"),
		RunE: func(c *cobra.Command, _ []string) error {
			s, err := local.Down(c.Context(), a.Getenv, a.say)
			if err != nil {
				return err
			}
			return a.print(s, func(view.Options) string { return "runs stay in " + s.Folder + "\n" })
		},
	}
}
