// Package cli is the command line of Refit: it turns what a person typed into
// requests to runs and prints what came back. It must hold no decision about
// a run: workflows decide, starter/run carries, starter/view draws.
package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/refit-run/refit/starter/local"
	"github.com/refit-run/refit/starter/planfile"
	"github.com/refit-run/refit/starter/run"
)

// Exit codes that scripts can use.
const (
	ExitDone    = 0 // done, or no change
	ExitError   = 1
	ExitInput   = 2 // bad input
	ExitParked  = 3
	ExitAborted = 4
	ExitGate    = 5 // waiting for approval
	ExitRefused = 6 // locked or unsafe
	ExitChanges = 7 // plan --exit-code: there are changes
)

// App is what the command line is given by its process.
type App struct {
	Kinds []planfile.Kind
	In    io.Reader
	Out   io.Writer
	Err   io.Writer
	// Getenv reads the environment.
	Getenv func(string) string
	// Width and Height of the terminal that Out is; 0 when it is none.
	Size func() (width, height int)
	// Patience is how long `plan` waits for a worker (default 3 minutes: its
	// queue is named after 2).
	Patience time.Duration

	settings run.Settings
	output   string
	ui       string
}

func (a *App) patience() time.Duration {
	if a.Patience > 0 {
		return a.Patience
	}
	return 3 * time.Minute
}

// exit is an error that only carries a code: everything was said already.
type exit struct{ code int }

func (e exit) Error() string { return fmt.Sprintf("exit code %d", e.code) }

// usage is an error in how the command was typed.
type usage struct{ error }

// coded is an error with an exit code of its own.
type coded struct {
	code int
	error
}

// Main runs one command line and returns its exit code.
func Main(ctx context.Context, app App, args []string) int {
	root := app.root()
	root.SetArgs(args)
	root.SetIn(app.In)
	root.SetOut(app.Out)
	root.SetErr(app.Err)
	err := root.ExecuteContext(ctx)
	code := codeOf(err)
	var silent exit
	if err != nil && ctx.Err() != nil {
		fmt.Fprintln(app.Err, "refit: interrupted; runs go on by themselves")
		return ExitError
	}
	if err != nil && !errors.As(err, &silent) {
		fmt.Fprintln(app.Err, "refit:", err)
	}
	return code
}

func codeOf(err error) int {
	var (
		silent   exit
		own      coded
		typed    usage
		problems planfile.Problems
		unknown  *run.Unknown
		refused  *run.Refused
	)
	switch {
	case err == nil:
		return ExitDone
	case errors.As(err, &silent):
		return silent.code
	case errors.As(err, &own):
		return own.code
	case errors.As(err, &typed), errors.As(err, &problems), errors.As(err, &unknown):
		return ExitInput
	case errors.As(err, &refused):
		return ExitRefused
	default:
		return ExitError
	}
}

func (a *App) root() *cobra.Command {
	root := &cobra.Command{
		Use:           "refit",
		Short:         "Install and upgrade GPU clusters as durable workflows on Temporal",
		SilenceErrors: true,
		SilenceUsage:  true,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) > 0 {
				return usage{fmt.Errorf("%q is not a refit command; see `refit help`", args[0])}
			}
			return nil
		},
		RunE: func(c *cobra.Command, _ []string) error { return c.Help() },
		PersistentPreRunE: func(*cobra.Command, []string) error {
			switch a.output {
			case "table", "json", "yaml":
				return nil
			}
			return usage{fmt.Errorf("--output %q: want table, json or yaml", a.output)}
		},
	}
	root.SetFlagErrorFunc(func(c *cobra.Command, err error) error {
		return usage{fmt.Errorf("%w; see `%s --help`", err, c.CommandPath())}
	})
	f := root.PersistentFlags()
	f.StringVarP(&a.output, "output", "o", "table", "table, json or yaml")
	f.StringVar(&a.settings.Address, "address", "", "Temporal server (default TEMPORAL_ADDRESS, the profile file, or what refit up started)")
	f.StringVar(&a.settings.Namespace, "namespace", "", "Temporal namespace (default TEMPORAL_NAMESPACE, the profile file, or default)")
	f.StringVar(&a.settings.Profile, "profile", "", "profile of the Temporal configuration file (default TEMPORAL_PROFILE)")
	f.StringVar(&a.ui, "ui", a.Getenv("REFIT_UI"), "address of Temporal's web UI, for the links printed (REFIT_UI)")
	root.AddCommand(a.upCommand(), a.downCommand(), a.setupCommand(), a.planCommand(), a.startCommand(), a.watchCommand(),
		a.statusCommand(), a.listCommand(), a.receiptCommand(), a.artifactsCommand(), a.codecCommand())
	root.AddCommand(a.verbCommands()...)
	return root
}

// connect dials the server; what `refit up` started is the last resort.
func (a *App) connect(ctx context.Context) (*run.Connection, error) {
	s := a.settings
	up, err := local.Read(a.Getenv)
	if err == nil && up.Running() {
		s.Fallback = up.Address
	}
	c, err := run.Connect(ctx, s)
	if err == nil && a.ui == "" && up.Address == c.Address {
		a.ui = up.UI
	}
	return c, err
}

// atMost is cobra.MaximumNArgs as a usage error.
func atMost(n int, what string) cobra.PositionalArgs {
	return func(c *cobra.Command, args []string) error {
		if len(args) > n {
			return usage{fmt.Errorf("%s takes %s, found %d arguments: %s", c.CommandPath(), what, len(args), strings.Join(args, " "))}
		}
		return nil
	}
}

func exactly(n int, what string) cobra.PositionalArgs {
	return func(c *cobra.Command, args []string) error {
		if len(args) != n {
			return usage{fmt.Errorf("%s takes %s, found %d arguments", c.CommandPath(), what, len(args))}
		}
		return nil
	}
}

func first(args []string) string {
	if len(args) == 0 {
		return ""
	}
	return args[0]
}

// user is who --by names when it is left out.
func (a *App) user() string {
	for _, name := range []string{"USER", "LOGNAME"} {
		if u := a.Getenv(name); u != "" {
			return u
		}
	}
	if host, err := os.Hostname(); err == nil {
		return "somebody at " + host
	}
	return ""
}

// answerLimit is how long a verb waits for the run: long enough for a worker
// that restarts, short enough for a person.
const answerLimit = 30 * time.Second
