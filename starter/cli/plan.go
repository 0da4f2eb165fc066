package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"time"

	"github.com/spf13/cobra"

	"github.com/refit-run/refit/starter/planfile"
	"github.com/refit-run/refit/starter/run"
	"github.com/refit-run/refit/starter/view"
	"github.com/refit-run/refit/workflows/protocol"
)

// load reads the plan file named, or standard input for "-".
func (a *App) load(name string, sets []string) (planfile.Plan, error) {
	var content []byte
	var err error
	if name == "-" {
		content, err = io.ReadAll(a.In)
		name = "(standard input)"
	} else {
		content, err = os.ReadFile(name)
	}
	if err != nil {
		return planfile.Plan{}, usage{fmt.Errorf("plan file: %w", err)}
	}
	return planfile.Load(a.Kinds, name, content, sets)
}

// asked is the plan that a command line names.
type asked struct {
	file string
	sets []string
}

// name is the plan file, given as the argument or with --file.
func (f asked) name(c *cobra.Command, args []string) (string, error) {
	given := append(slices.Clone(args), f.file)
	given = slices.DeleteFunc(given, func(s string) bool { return s == "" })
	if len(given) != 1 {
		return "", usage{fmt.Errorf("%s takes one plan file (- is standard input), found %d", c.CommandPath(), len(given))}
	}
	return given[0], nil
}

func (f *asked) flags(c *cobra.Command) {
	c.Flags().StringVarP(&f.file, "file", "f", "", "the plan file, when it is not the argument; - is standard input")
	c.Flags().StringArrayVar(&f.sets, "set", nil, "path=value put into the plan, for example rollouts[0].strategy.batch.count=2; may be repeated")
}

func (a *App) planCommand() *cobra.Command {
	var file asked
	var exitCode bool
	c := &cobra.Command{
		Use:   "plan FILE",
		Short: "Show what a plan would change, without changing anything",
		Args:  atMost(1, "one plan file"),
		RunE: func(c *cobra.Command, args []string) error {
			name, err := file.name(c, args)
			if err != nil {
				return err
			}
			plan, err := a.load(name, file.sets)
			if err != nil {
				return err
			}
			if plan.Planned == nil {
				return usage{fmt.Errorf("kind %s has no plan stage", plan.Kind)}
			}
			ctx := c.Context()
			conn, err := a.connect(ctx)
			if err != nil {
				return err
			}
			defer conn.Close()
			return a.plan(ctx, conn, plan, exitCode)
		},
	}
	file.flags(c)
	c.Flags().BoolVar(&exitCode, "exit-code", false, "exit with 7 when there are changes")
	return c
}

// plan starts the run that stops after its plan stage, waits for it and shows
// the plan. One that can't get that far is ended: it changed nothing, and
// left open it would only keep the release locked.
func (a *App) plan(ctx context.Context, c *run.Connection, p planfile.Plan, exitCode bool) error {
	r, err := run.Start(ctx, c, run.Request{
		ID: p.ID() + ".plan", Kind: p.Kind, Input: p.Planned(), Summary: "plan only: " + p.Summary,
	})
	if err != nil {
		return err
	}
	w := watcher{app: a, conn: c, run: r, quiet: true}
	o, err := w.follow(ctx)
	if err != nil {
		// Left open, the run would hold the release's Lease, or take it later.
		ending, cancel := context.WithTimeout(context.WithoutCancel(ctx), answerLimit)
		defer cancel()
		if cerr := c.CancelWorkflow(ending, r.WorkflowID, r.RunID); cerr != nil {
			a.say("the planning run %s is still open: %v; end it with refit abort", r.WorkflowID, cerr)
		}
		if errors.Is(err, errNobody) {
			return fmt.Errorf("plan of %s: no worker took it up within %s; it ends by itself when one comes", p.ID(), a.patience())
		}
		return err
	}
	if o.Run.Open() {
		if err := a.print(o, func(v view.Options) string { return view.Waiting(*o.Status.WaitingFor, view.Ways{}, v) }); err != nil {
			return err
		}
		if _, err := run.Answer(ctx, c, o.Run, protocol.Abort, protocol.Answer{By: a.user(), Comment: "planning could not go on"}, answerLimit, false); err != nil {
			return fmt.Errorf("end the planning run: %w", err)
		}
		// Closed only now does it leave its ID and the Lease to the next run.
		limited, cancel := context.WithTimeout(ctx, answerLimit)
		defer cancel()
		if err := c.GetWorkflow(limited, o.Run.WorkflowID, o.Run.RunID).Get(limited, nil); err != nil {
			a.say("the planning run %s is still ending: %v", o.Run.WorkflowID, err)
		}
		return exit{ExitParked}
	}
	if o.Receipt == nil {
		return failure(o)
	}
	shown := protocol.Plan{}
	if o.Receipt.Plan != nil {
		shown = *o.Receipt.Plan
	}
	if err := a.print(shown, func(v view.Options) string { return view.Plan(shown, v) }); err != nil {
		return err
	}
	if code := closedCode(o); code != ExitDone {
		return exit{code}
	}
	if exitCode && (len(shown.Changes) > 0 || len(shown.Batches) > 0) {
		return exit{ExitChanges}
	}
	return nil
}

func (a *App) startCommand() *cobra.Command {
	var file asked
	var id string
	var m mode
	c := &cobra.Command{
		Use:   "start FILE",
		Short: "Start the run that a plan file asks for",
		Args:  atMost(1, "one plan file"),
		RunE: func(c *cobra.Command, args []string) error {
			if err := m.check(); err != nil {
				return err
			}
			name, err := file.name(c, args)
			if err != nil {
				return err
			}
			plan, err := a.load(name, file.sets)
			if err != nil {
				return err
			}
			ctx := c.Context()
			conn, err := a.connect(ctx)
			if err != nil {
				return err
			}
			defer conn.Close()
			if id == "" {
				id = plan.ID()
			}
			r, err := run.Start(ctx, conn, run.Request{
				ID: id, Kind: plan.Kind, Input: plan.Input, Summary: plan.Summary, Details: details(plan),
			})
			if err != nil {
				return err
			}
			if m.follow || m.untilGate {
				a.say("started %s", r.WorkflowID)
				return a.watch(ctx, conn, r, m)
			}
			r.Started = time.Now()
			return a.print(r, func(view.Options) string {
				text := fmt.Sprintf("started %s (run ID %s)\n", r.WorkflowID, r.RunID)
				if page := a.page(conn, r); page != "" {
					text += "  " + page + "\n"
				}
				return text + "  refit watch " + r.WorkflowID + "\n"
			})
		},
	}
	file.flags(c)
	c.Flags().StringVar(&id, "id", "", "workflow ID (default <kind>.<cluster>.<object>)")
	m.flags(c)
	return c
}

// details is what the Temporal UI shows above the run: the plan as asked for.
// It holds no secret: a plan names secrets by reference.
func details(p planfile.Plan) string {
	return "Started with the plan\n```json\n" + string(p.Document) + "\n```\n"
}
