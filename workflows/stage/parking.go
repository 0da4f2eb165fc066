package stage

import (
	"errors"
	"fmt"
	"strings"
	"time"

	enumspb "go.temporal.io/api/enums/v1"
	"go.temporal.io/sdk/temporal"

	"github.com/refit-run/refit/activities/finding"
	"github.com/refit-run/refit/workflows/protocol"
)

// maxFindings bounds what status shows of the findings behind a parking.
const maxFindings = 20

type parking struct {
	found, why, helps string
	answers           []string
	findings          []finding.Finding
}

func (p *parking) Error() string {
	parts := []string{p.found}
	if p.why != "" {
		parts = append(parts, "why it matters: "+p.why)
	}
	if p.helps != "" {
		parts = append(parts, "what helps: "+p.helps)
	}
	return strings.Join(parts, "; ")
}

// Parking is the error with which Do parks its stage: what was found, why it
// matters, what usually helps. Answers nil means those of the stage (retry,
// skip where it allows that, abort, rollback where defined); otherwise they
// choose among retry and skip, and abort and rollback are always added.
func Parking(found, why, helps string, answers []string, findings ...finding.Finding) error {
	return &parking{found: found, why: why, helps: helps, answers: answers, findings: findings}
}

// Explain turns any error of an activity or a stage into the text that a
// person reads: Found, Why, Helps, Findings and the answers it asks for.
func Explain(err error) protocol.Waiting {
	var p *parking
	if errors.As(err, &p) {
		w := protocol.Waiting{Kind: protocol.WaitParked, Found: p.found, Why: p.why, Helps: p.helps, Answers: p.answers, Findings: p.findings}
		if len(w.Findings) > maxFindings {
			w.Findings = w.Findings[:maxFindings]
		}
		return w
	}
	if f, _, ok := finding.Of(err); ok {
		found := f.Object + ": " + f.Found
		if f.Expected != "" {
			found = fmt.Sprintf("%s: expected %s, found %s", f.Object, f.Expected, f.Found)
		}
		if f.Row != "" {
			found = f.Row + ": " + found
		}
		return protocol.Waiting{Kind: protocol.WaitParked, Found: found, Why: f.Why, Helps: f.Next, Findings: []finding.Finding{f}}
	}
	w := protocol.Waiting{Kind: protocol.WaitParked, Found: clip(rootMessage(err), 2000)}
	name := activityName(err)
	var timeout *temporal.TimeoutError
	if !errors.As(err, &timeout) {
		if name != "" {
			w.Found = name + ": " + w.Found
		}
		w.Helps = "see the failed activity or child run in the run's history; retry when the cause is gone"
		return w
	}
	if name == "" {
		name = "a call"
	}
	switch timeout.TimeoutType() {
	case enumspb.TIMEOUT_TYPE_SCHEDULE_TO_START:
		w.Found = name + " was not started in time: no worker polls its task queue"
		w.Helps = "start the worker or the GPU host's agent that polls the queue, then retry"
	case enumspb.TIMEOUT_TYPE_HEARTBEAT:
		w.Found = name + " stopped reporting: its worker died or was cut off"
		w.Why = "the act may have been done or not; it is observed again before it is repeated"
		w.Helps = "check the worker's log, then retry"
	default:
		w.Found = name + " did not end before its deadline"
		w.Why = "the act may have been done or not; it is observed again before it is repeated"
		w.Helps = "find out what it waits for, or give it more time in the plan, then retry"
	}
	return w
}

// nobodyPolls is the parking of an activity that no worker picked up.
func nobodyPolls(queue string, after time.Duration) error {
	return Parking(
		fmt.Sprintf("no worker polls the task queue %s: its activity was not started within %s", queue, after),
		"only the agent behind that queue can observe and prove the host",
		fmt.Sprintf("check that the agent for %s runs and reaches Temporal, then retry", queue), nil)
}

func activityName(err error) string {
	var a *temporal.ActivityError
	if errors.As(err, &a) {
		return a.ActivityType().GetName()
	}
	var c *temporal.ChildWorkflowExecutionError
	if errors.As(err, &c) {
		return "child run " + c.WorkflowID()
	}
	return ""
}

// rootMessage is the cause's own text, without the wrapping that names event
// numbers.
func rootMessage(err error) string {
	var app *temporal.ApplicationError
	if errors.As(err, &app) {
		return app.Message()
	}
	var a *temporal.ActivityError
	var c *temporal.ChildWorkflowExecutionError
	if errors.As(err, &a) && a.Unwrap() != nil {
		return a.Unwrap().Error()
	}
	if errors.As(err, &c) && c.Unwrap() != nil {
		return c.Unwrap().Error()
	}
	return err.Error()
}
