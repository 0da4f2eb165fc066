package setup

import (
	"context"
	"errors"
	"fmt"
	"os"

	"github.com/spf13/cobra"
)

// Flags are those that plan and apply of every set-up share.
type Flags struct {
	File, Label, Root, Output string
	ExitCode                  bool
}

// rootVariable names the host's root as the agent's container mounts it.
const rootVariable = "REFIT_HOST_ROOT"

// Bind adds the flags to a command.
func (f *Flags) Bind(c *cobra.Command, planned bool) {
	root := os.Getenv(rootVariable)
	if root == "" {
		root = "/"
	}
	c.Flags().StringVarP(&f.File, "file", "f", "", "file with the declared layouts")
	c.Flags().StringVar(&f.Label, "label", "", "layout in the file; may be left out where there is one")
	c.Flags().StringVar(&f.Root, "root", root, "root of the host ("+rootVariable+")")
	c.Flags().StringVarP(&f.Output, "output", "o", "table", "table or json")
	if planned {
		c.Flags().BoolVar(&f.ExitCode, "exit-code", false, "end with 7 when there is something to do")
	}
	_ = c.MarkFlagRequired("file")
	c.Args, c.SilenceUsage, c.SilenceErrors = cobra.NoArgs, true, true
}

// Text reads the file.
func (f *Flags) Text() ([]byte, error) {
	if f.Output != "table" && f.Output != "json" {
		return nil, Bad("flag --output", "table or json", f.Output, "correct the command")
	}
	text, err := os.ReadFile(f.File)
	if err != nil {
		return nil, Bad("flag --file", "a file with layouts", err.Error(), "correct the command")
	}
	return text, nil
}

// Finish prints the report and gives the command its exit code.
func (f *Flags) Finish(c *cobra.Command, r Report, planned bool, err error) error {
	if err != nil && (errors.Is(err, ErrBadLayout) || len(r.Actions)+len(r.Needs) == 0) {
		return ExitFor(err)
	}
	if e := r.Print(c.OutOrStdout(), f.Output, planned); e != nil {
		return ExitFor(fmt.Errorf("write the report: %w", e))
	}
	switch {
	case err != nil:
		return ExitFor(err)
	case len(r.Needs) > 0:
		return &Exit{Code: ExitWaiting}
	case planned && f.ExitCode && len(r.Actions) > 0:
		return &Exit{Code: ExitChanges}
	}
	return nil
}

// Locked runs a set-up while no other one works on this host.
func Locked(ctx context.Context, root string, do func(ctx context.Context) (Report, error)) (Report, error) {
	unlock, err := Lock(root)
	if err != nil {
		return Report{}, err
	}
	defer unlock()
	return do(ctx)
}
