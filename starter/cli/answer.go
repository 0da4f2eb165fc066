package cli

import (
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"github.com/refit-run/refit/starter/run"
	"github.com/refit-run/refit/starter/view"
	"github.com/refit-run/refit/workflows/protocol"
)

var verbHelp = map[string]string{
	protocol.Approve:  "Let the waiting stage go on",
	protocol.Reject:   "Turn the waiting stage down; the run parks",
	protocol.Retry:    "Try the parked stage again",
	protocol.Skip:     "Go on without the parked stage, where it allows that",
	protocol.Pause:    "Pause a run at its next safe boundary",
	protocol.Resume:   "Let a paused run go on",
	protocol.Abort:    "End a run at its next safe boundary and clean up",
	protocol.Rollback: "Roll back what a run did, where that is defined",
}

// answered is what -o json prints of an answer.
type answered struct {
	Verb   string          `json:"verb"`
	Run    string          `json:"run"`
	Answer protocol.Answer `json:"answer"`
	run.Given
}

func (a *App) verbCommands() []*cobra.Command {
	out := make([]*cobra.Command, len(protocol.Verbs))
	for i, verb := range protocol.Verbs {
		out[i] = a.verbCommand(verb)
	}
	return out
}

func (a *App) verbCommand(verb string) *cobra.Command {
	var answer protocol.Answer
	var signal bool
	var limit time.Duration
	c := &cobra.Command{
		Use:               verb + " [RUN]",
		Short:             verbHelp[verb],
		Args:              atMost(1, "at most one run"),
		ValidArgsFunction: a.completeRuns,
		RunE: func(c *cobra.Command, args []string) error {
			conn, r, err := a.find(c.Context(), first(args))
			if err != nil {
				return err
			}
			defer conn.Close()
			if answer.By == "" {
				answer.By = a.user()
			}
			given, err := run.Answer(c.Context(), conn, r, verb, answer, limit, signal)
			if err != nil {
				return err
			}
			return a.print(answered{verb, r.WorkflowID, answer, given}, func(view.Options) string {
				what := verb
				if answer.Stage != "" {
					what += " " + answer.Stage
				}
				if given.Means == run.BySignal {
					return fmt.Sprintf("%s was sent to %s as a signal: it is ignored if nothing waits for it; see `refit status %s`\n", what, r.WorkflowID, r.WorkflowID)
				}
				if stage := given.Accepted.Stage; stage != "" {
					what = verb + " " + stage
				}
				text := fmt.Sprintf("%s accepted by %s", what, r.WorkflowID)
				if given.Accepted.Effect != "" {
					text += ": " + given.Accepted.Effect
				}
				return text + "\n"
			})
		},
	}
	f := c.Flags()
	f.StringVar(&answer.By, "by", "", "who answers (default $USER); claimed, not proven")
	f.StringVar(&answer.Comment, "comment", "", "kept in the receipt")
	if !protocol.AddressesRun(verb) {
		f.StringVar(&answer.Stage, "stage", "", "the stage's name in the status; may be left out when exactly one stage waits")
	}
	f.BoolVar(&signal, "signal", false, "send a signal, which is not confirmed, instead of an Update")
	f.DurationVar(&limit, "timeout", answerLimit, "how long to wait for the run to confirm")
	return c
}
