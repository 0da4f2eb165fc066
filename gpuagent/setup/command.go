package setup

import (
	"context"
	"errors"
	"fmt"
	"os"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/refit-run/refit/gpuagent/host"
)

// Kind is one kind of set-up as a person at the host drives it.
type Kind[E any] struct {
	Name, Short, ApplyShort string
	// Parse reads the file of layouts and chooses one.
	Parse func(text []byte, label string) ([]E, error)
	// Flags adds the flags of plan or apply, beside those that every set-up
	// has, and returns what the command does.
	Flags func(f *pflag.FlagSet, planned bool) Do[E]
}

// Do plans or applies the entries of a layout on the host at root.
type Do[E any] func(ctx context.Context, root string, entries []E, progress func(step string)) (Report, error)

// Command is `NAME plan|apply`.
func (k Kind[E]) Command() *cobra.Command {
	c := &cobra.Command{Use: k.Name, Short: k.Short}
	c.AddCommand(k.command(true), k.command(false))
	return c
}

func (k Kind[E]) command(planned bool) *cobra.Command {
	var f flags
	c := &cobra.Command{Use: "apply -f FILE", Short: k.ApplyShort}
	if planned {
		c = &cobra.Command{Use: "plan -f FILE", Short: "Show what apply would do; changes nothing"}
	}
	f.bind(c, planned)
	do := k.Flags(c.Flags(), planned)
	c.RunE = func(c *cobra.Command, _ []string) error {
		text, err := f.text()
		if err != nil {
			return ExitFor(err)
		}
		entries, err := k.Parse(text, f.label)
		if err != nil {
			return ExitFor(err)
		}
		run := func(ctx context.Context) (Report, error) {
			return do(ctx, f.root, entries, func(step string) { fmt.Fprintln(c.ErrOrStderr(), step) })
		}
		var r Report
		if planned {
			r, err = run(c.Context())
		} else {
			r, err = Locked(c.Context(), f.root, run)
		}
		return f.finish(c, r, planned, err)
	}
	return c
}

// flags are those that plan and apply of every set-up share.
type flags struct {
	file, label, root, output string
	exitCode                  bool
}

func (f *flags) bind(c *cobra.Command, planned bool) {
	c.Flags().StringVarP(&f.file, "file", "f", "", "file with the declared layouts")
	c.Flags().StringVar(&f.label, "label", "", "layout in the file; may be left out where there is one")
	c.Flags().StringVar(&f.root, "root", host.New().Root, "root of the host ("+host.RootVariable+")")
	c.Flags().StringVarP(&f.output, "output", "o", "table", "table or json")
	if planned {
		c.Flags().BoolVar(&f.exitCode, "exit-code", false, "end with 7 when there is something to do")
	}
	_ = c.MarkFlagRequired("file")
	c.Args, c.SilenceUsage, c.SilenceErrors = cobra.NoArgs, true, true
}

func (f *flags) text() ([]byte, error) {
	if f.output != "table" && f.output != "json" {
		return nil, Bad("flag --output", "table or json", f.output, "correct the command")
	}
	text, err := os.ReadFile(f.file)
	if err != nil {
		return nil, Bad("flag --file", "a file with layouts", err.Error(), "correct the command")
	}
	return text, nil
}

// finish prints the report and gives the command its exit code.
func (f *flags) finish(c *cobra.Command, r Report, planned bool, err error) error {
	if err != nil && (errors.Is(err, ErrBadLayout) || len(r.Actions)+len(r.Needs) == 0) {
		return ExitFor(err)
	}
	if e := r.Print(c.OutOrStdout(), f.output, planned); e != nil {
		return ExitFor(fmt.Errorf("write the report: %w", e))
	}
	switch {
	case err != nil:
		return ExitFor(err)
	case len(r.Needs) > 0:
		return &Exit{Code: ExitWaiting}
	case planned && f.exitCode && len(r.Actions) > 0:
		return &Exit{Code: ExitChanges}
	}
	return nil
}
