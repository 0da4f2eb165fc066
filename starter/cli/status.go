package cli

import (
	"context"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/refit-run/refit/starter/run"
	"github.com/refit-run/refit/starter/view"
)

// find connects and resolves the run that is meant.
func (a *App) find(ctx context.Context, id string) (*run.Connection, run.Run, error) {
	c, err := a.connect(ctx)
	if err != nil {
		return nil, run.Run{}, err
	}
	r, err := run.Find(ctx, c, id)
	if err != nil {
		c.Close()
		return nil, run.Run{}, err
	}
	return c, r, nil
}

func (a *App) statusCommand() *cobra.Command {
	var exitCode bool
	c := &cobra.Command{
		Use:               "status [RUN]",
		Short:             "Show how a run stands and what it waits for",
		Args:              atMost(1, "at most one run"),
		ValidArgsFunction: a.completeRuns,
		RunE: func(c *cobra.Command, args []string) error {
			conn, r, err := a.find(c.Context(), first(args))
			if err != nil {
				return err
			}
			defer conn.Close()
			o, err := run.Observe(c.Context(), conn, r.WorkflowID)
			if err != nil {
				return err
			}
			if err := a.print(o, func(v view.Options) string { return a.standing(conn, o, v) }); err != nil {
				return err
			}
			if code := observedCode(o); exitCode && code != ExitDone {
				return exit{code}
			}
			return nil
		},
	}
	c.Flags().BoolVar(&exitCode, "exit-code", false, "exit with the code of the run's state: 3 parked, 4 aborted, 5 waiting for approval ...")
	return c
}

func observedCode(o run.Observation) int {
	if o.Run.Open() {
		return waitCode(o.Status)
	}
	return closedCode(o)
}

func (a *App) standing(c *run.Connection, o run.Observation, v view.Options) string {
	switch {
	case o.Receipt != nil:
		return view.Receipt(*o.Receipt, v)
	case o.Failure != nil:
		return fmt.Sprintf("%s  %s\n%s: %s\n", o.Run.WorkflowID, o.Run.State, o.Failure.Type, o.Failure.Message)
	case o.Status == nil:
		return fmt.Sprintf("%s  open\n%s\n", o.Run.WorkflowID, o.Silent)
	}
	text := view.Status(o.Run.WorkflowID, *o.Status, v)
	if o.Status.WaitingFor != nil {
		text += "\n" + a.waiting(c, o.Run, *o.Status.WaitingFor, v)
	}
	return text
}

func (a *App) listCommand() *cobra.Command {
	var all bool
	var limit int
	c := &cobra.Command{
		Use:   "list",
		Short: "List open runs",
		Args:  exactly(0, "no argument"),
		RunE: func(c *cobra.Command, _ []string) error {
			conn, err := a.connect(c.Context())
			if err != nil {
				return err
			}
			defer conn.Close()
			runs, err := run.List(c.Context(), conn, all, limit)
			if err != nil {
				return err
			}
			if runs == nil {
				runs = []run.Run{}
			}
			return a.print(runs, func(v view.Options) string {
				if len(runs) == 0 {
					return "no runs; start one with `refit start PLAN`\n"
				}
				rows := make([]view.Row, len(runs))
				for i, r := range runs {
					rows[i] = view.Row{ID: r.WorkflowID, State: r.State, Phase: r.Phase, WaitingFor: r.WaitingFor, Started: r.Started, Closed: r.Closed}
				}
				return view.Runs(rows, v)
			})
		},
	}
	c.Flags().BoolVar(&all, "all", false, "closed runs too, as long as the server keeps them")
	c.Flags().IntVar(&limit, "limit", 50, "at most so many runs, newest first; 0 is no limit")
	return c
}

func (a *App) receiptCommand() *cobra.Command {
	return &cobra.Command{
		Use:               "receipt [RUN]",
		Short:             "Show the receipt of a closed run",
		Args:              atMost(1, "at most one run"),
		ValidArgsFunction: a.completeRuns,
		RunE: func(c *cobra.Command, args []string) error {
			ctx := c.Context()
			conn, err := a.connect(ctx)
			if err != nil {
				return err
			}
			defer conn.Close()
			id := first(args)
			if id == "" {
				if id, err = newest(ctx, conn); err != nil {
					return err
				}
			}
			o, err := run.Observe(ctx, conn, id)
			if err != nil {
				return err
			}
			if o.Run.Open() {
				return coded{max(ExitError, waitCode(o.Status)), fmt.Errorf("run %s is open: its receipt is written when it closes; see `refit status %s`", id, id)}
			}
			if o.Receipt == nil {
				return failure(o)
			}
			return a.print(o.Receipt, func(v view.Options) string { return view.Receipt(*o.Receipt, v) })
		},
	}
}

// newest is the latest run, open or closed: the one whose receipt is wanted
// when none is named.
func newest(ctx context.Context, c *run.Connection) (string, error) {
	runs, err := run.List(ctx, c, true, 1)
	if err != nil {
		return "", err
	}
	if len(runs) == 0 {
		return "", &run.Unknown{Reason: "no run is known in namespace " + c.Namespace + "; start one with `refit start PLAN`"}
	}
	return runs[0].WorkflowID, nil
}

func (a *App) completeRuns(c *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
	if len(args) > 0 {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	conn, err := a.connect(c.Context())
	if err != nil {
		return nil, cobra.ShellCompDirectiveError
	}
	defer conn.Close()
	runs, err := run.List(c.Context(), conn, c.Name() == "receipt", 50)
	if err != nil {
		return nil, cobra.ShellCompDirectiveError
	}
	ids := make([]string, len(runs))
	for i, r := range runs {
		ids[i] = r.WorkflowID
	}
	return ids, cobra.ShellCompDirectiveNoFileComp
}

func (a *App) setupCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "setup",
		Short: "Create the search attributes that runs are found by",
		Args:  exactly(0, "no argument"),
		RunE: func(c *cobra.Command, _ []string) error {
			conn, err := a.connect(c.Context())
			if err != nil {
				return err
			}
			defer conn.Close()
			created, err := run.Setup(c.Context(), conn)
			if err != nil {
				return err
			}
			if created == nil {
				created = []string{}
			}
			result := map[string]any{"namespace": conn.Namespace, "created": created}
			return a.print(result, func(view.Options) string {
				if len(created) == 0 {
					return "search attributes of namespace " + conn.Namespace + " are there already\n"
				}
				return fmt.Sprintf("created search attributes %v in namespace %s\n", created, conn.Namespace)
			})
		},
	}
}
