package cli_test

import (
	"encoding/json"
	"fmt"
	"slices"
	"time"

	"go.temporal.io/sdk/temporal"
	"go.temporal.io/sdk/workflow"

	"github.com/refit-run/refit/activities/artifact"
	"github.com/refit-run/refit/starter/planfile"
	"github.com/refit-run/refit/workflows/protocol"
)

// toyInput asks the stand-in for one course of events.
type toyInput struct {
	Kind     string         `json:"kind"`
	Cluster  string         `json:"cluster"`
	Object   string         `json:"object"`
	Course   string         `json:"course,omitempty"` // gate, park, work, badInput, locked, noUpdates
	Hosts    int            `json:"hosts,omitempty"`
	PlanOnly bool           `json:"planOnly,omitempty"`
	Stored   []artifact.Ref `json:"stored,omitempty"`
}

const toySchema = `{
  "type": "object", "required": ["kind", "cluster", "object"], "additionalProperties": false,
  "properties": {
    "kind": {"type": "string"}, "cluster": {"type": "string"}, "object": {"type": "string"},
    "course": {"type": "string", "enum": ["gate", "park", "work", "badInput", "locked", "noUpdates"]},
    "hosts": {"type": "integer"}, "planOnly": {"type": "boolean"}, "stored": {"type": "array"}
  }
}`

func toyKind(name string) planfile.Kind {
	return planfile.Kind{Name: name, Schema: []byte(toySchema), Read: func(doc []byte) (planfile.Plan, error) {
		var in toyInput
		if err := json.Unmarshal(doc, &in); err != nil {
			return planfile.Plan{}, err
		}
		return planfile.Plan{
			Cluster: in.Cluster, Object: in.Object, Input: in, Summary: "stand-in for " + in.Object,
			Planned: func() any { p := in; p.PlanOnly = true; return p },
		}, nil
	}}
}

// toy stands in for a run: it speaks the protocol and does nothing.
type toy struct {
	in     toyInput
	status protocol.Status
	ended  string
}

const gateName = "rollout.hypervisor.shared.canary"

func standIn(ctx workflow.Context, in toyInput) (protocol.Receipt, error) {
	t := &toy{in: in, status: protocol.Status{
		Kind: in.Kind, Cluster: in.Cluster, Phase: protocol.PhaseRunning, Artifacts: in.Stored,
		Stages: []protocol.Stage{{Name: "preflight", State: protocol.Running}, {Name: gateName, State: protocol.Pending}},
	}}
	if err := t.listen(ctx); err != nil {
		return protocol.Receipt{}, err
	}
	switch in.Course {
	case "badInput":
		return protocol.Receipt{}, temporal.NewNonRetryableApplicationError("chart.ref is missing", protocol.BadInput, nil)
	case "locked":
		return protocol.Receipt{}, temporal.NewNonRetryableApplicationError("another run holds the Lease refit-tf", protocol.Locked, nil)
	}
	start := workflow.Now(ctx)
	t.status.Stages[0].State = protocol.Done
	receipt := func(o protocol.Outcome) protocol.Receipt {
		info := workflow.GetInfo(ctx).WorkflowExecution
		return protocol.Receipt{Kind: in.Kind, Cluster: in.Cluster, Object: in.Object, WorkflowID: info.ID, RunID: info.RunID,
			Outcome: o, Started: start, Ended: workflow.Now(ctx), Stages: t.status.Stages, Ignored: t.status.Ignored,
			Progress: t.status.Progress, Artifacts: in.Stored,
			Plan: &protocol.Plan{Digest: "abc", Changes: []protocol.PlannedChange{{Action: "change", Object: "Deployment/ns/tf", Lines: 2}}}}
	}
	if in.PlanOnly && in.Course != "park" {
		return receipt(protocol.OutcomePlanned), nil
	}
	for i := range in.Hosts {
		t.status.Progress = protocol.Progress{Done: i + 1, Total: in.Hosts}
		if err := workflow.Sleep(ctx, 700*time.Millisecond); err != nil {
			return protocol.Receipt{}, err
		}
	}
	if in.Course != "work" {
		t.wait(ctx)
		if err := workflow.Await(ctx, func() bool { return t.ended != "" }); err != nil {
			return protocol.Receipt{}, err
		}
	}
	if err := workflow.Await(ctx, func() bool { return workflow.AllHandlersFinished(ctx) }); err != nil {
		return protocol.Receipt{}, err
	}
	if t.ended == protocol.Abort {
		t.status.Stages[1].State = protocol.Aborted
		return receipt(protocol.OutcomeAborted), nil
	}
	t.status.Stages[1].State = protocol.Done
	return receipt(protocol.OutcomeDone), nil
}

func (t *toy) wait(ctx workflow.Context) {
	w := &protocol.Waiting{Kind: protocol.WaitApproval, Stage: gateName, Since: workflow.Now(ctx),
		Answers: []string{protocol.Approve, protocol.Reject, protocol.Abort}}
	t.status.Phase, t.status.Stages[1].State = protocol.PhaseGate, protocol.WaitingForGate
	if t.in.Course == "park" {
		w.Kind, w.Found, w.Answers = protocol.WaitParked, "host gpu-1 is broken", []string{protocol.Retry, protocol.Abort}
		t.status.Phase, t.status.Stages[1].State = protocol.PhaseParked, protocol.Parked
	}
	t.status.WaitingFor = w
}

// refusal says why an answer fits nothing, "" when it does.
func (t *toy) refusal(verb string, a protocol.Answer) string {
	w := t.status.WaitingFor
	switch {
	case verb == protocol.Abort, verb == protocol.Pause, verb == protocol.Resume:
		return ""
	case w == nil:
		return "nothing waits"
	case a.Stage != "" && a.Stage != w.Stage:
		return fmt.Sprintf("stage %s does not wait; %s does", a.Stage, w.Stage)
	case !slices.Contains(w.Answers, verb):
		return fmt.Sprintf("stage %s does not take %s", w.Stage, verb)
	}
	return ""
}

func (t *toy) take(ctx workflow.Context, verb string, a protocol.Answer) {
	row := &t.status.Stages[1]
	row.Answers = append(row.Answers, protocol.Given{Verb: verb, By: a.By, Comment: a.Comment, At: workflow.Now(ctx)})
	switch verb {
	case protocol.Approve, protocol.Retry, protocol.Abort:
		t.status.WaitingFor, t.ended = nil, verb
		t.status.Phase, row.State = protocol.PhaseRunning, protocol.Running
	case protocol.Reject:
		t.status.WaitingFor.Kind, t.status.WaitingFor.Found = protocol.WaitParked, "rejected by "+a.By
		t.status.Phase, row.State = protocol.PhaseParked, protocol.Parked
	}
}

func (t *toy) listen(ctx workflow.Context) error {
	if err := workflow.SetQueryHandler(ctx, protocol.QueryStatus, func() (protocol.Status, error) { return t.status, nil }); err != nil {
		return err
	}
	for _, verb := range protocol.Verbs {
		workflow.Go(ctx, func(ctx workflow.Context) {
			for {
				var a protocol.Answer
				workflow.GetSignalChannel(ctx, verb).Receive(ctx, &a)
				if reason := t.refusal(verb, a); reason != "" {
					t.status.Ignored = append(t.status.Ignored, protocol.Ignored{Verb: verb, Stage: a.Stage, By: a.By, At: workflow.Now(ctx), Reason: reason})
					continue
				}
				t.take(ctx, verb, a)
			}
		})
		if t.in.Course == "noUpdates" {
			continue
		}
		err := workflow.SetUpdateHandlerWithOptions(ctx, verb,
			func(ctx workflow.Context, a protocol.Answer) (protocol.Accepted, error) {
				t.take(ctx, verb, a)
				return protocol.Accepted{Verb: verb, Stage: a.Stage, Effect: "the run goes on"}, nil
			},
			workflow.UpdateHandlerOptions{Validator: func(_ workflow.Context, a protocol.Answer) error {
				if reason := t.refusal(verb, a); reason != "" {
					return temporal.NewNonRetryableApplicationError(verb+" refused: "+reason, "Refused", nil)
				}
				return nil
			}})
		if err != nil {
			return err
		}
	}
	return nil
}
