package sandbox

import (
	"context"
	"encoding/json"
	"time"

	"github.com/stretchr/testify/require"
	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/refit-run/refit/workflows/protocol"
)

// Exit codes of the protocol.
const (
	ExitDone     = 0
	ExitBadInput = 2
	ExitParked   = 3
	ExitAborted  = 4
	ExitGate     = 5
	ExitRefused  = 6
	ExitChanges  = 7
)

// Patience for what a run does by itself: machines that run tests are busy.
const (
	toGate   = 4 * time.Minute
	toParked = 5 * time.Minute
	toEnd    = 5 * time.Minute
	toAnswer = 10 * time.Second
	every    = 200 * time.Millisecond
)

// Refit runs the command line.
func (s *Sandbox) Refit(args ...string) (string, int) {
	s.t.Helper()
	return s.Run("refit", args...)
}

// Start begins a run from a plan file of the repository, with --set changes
// and flags, and returns its workflow ID.
func (s *Sandbox) Start(plan string, set []string, flags ...string) string {
	s.t.Helper()
	args := append([]string{"start", "-f", plan, "-o", "json"}, flags...)
	for _, change := range set {
		args = append(args, "--set", change)
	}
	out := s.must("refit", args...)
	var started struct {
		WorkflowID string `json:"workflowID"`
	}
	require.NoError(s.t, json.Unmarshal([]byte(out), &started), out)
	require.NotEmpty(s.t, started.WorkflowID, out)
	return started.WorkflowID
}

// Answer gives an answer by the command line, as ann; it must be accepted.
func (s *Sandbox) Answer(verb, run string, args ...string) {
	s.t.Helper()
	s.must("refit", append([]string{verb, run, "--by", "ann"}, args...)...)
}

// Status is the query, asked by the client as any script would.
func (s *Sandbox) Status(run string) (protocol.Status, error) { return s.StatusWithin(run, toAnswer) }

// StatusWithin gives up after limit: a query waits for the worker that had the
// run last, also when it is dead.
func (s *Sandbox) StatusWithin(run string, limit time.Duration) (protocol.Status, error) {
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	var status protocol.Status
	v, err := s.Temporal.QueryWorkflow(ctx, run, "", protocol.QueryStatus)
	if err != nil {
		return status, err
	}
	return status, v.Get(&status)
}

// Until polls the status until cond holds.
func (s *Sandbox) Until(run, what string, limit time.Duration, cond func(protocol.Status) bool) protocol.Status {
	s.t.Helper()
	var last protocol.Status
	var lastErr error
	err := wait.PollUntilContextTimeout(context.Background(), every, limit, true, func(context.Context) (bool, error) {
		status, err := s.Status(run)
		if err != nil {
			lastErr = err
			return false, nil // the worker may be dead on purpose
		}
		last = status
		return cond(status), nil
	})
	if err != nil {
		b, _ := json.MarshalIndent(last, "", "  ")
		s.t.Fatalf("%s did not happen within %s (last error %v); last status:\n%s", what, limit, lastErr, b)
	}
	return last
}

// UntilGate waits until a person is asked.
func (s *Sandbox) UntilGate(run string) protocol.Status {
	s.t.Helper()
	return s.Until(run, "a gate", toGate, func(status protocol.Status) bool {
		if w := status.WaitingFor; w != nil && w.Kind == protocol.WaitParked {
			b, _ := json.MarshalIndent(w, "", "  ")
			s.t.Fatalf("parked instead of a gate:\n%s", b)
		}
		return status.WaitingFor != nil && status.WaitingFor.Kind == protocol.WaitApproval
	})
}

// UntilParked waits until the run parks.
func (s *Sandbox) UntilParked(run string) protocol.Status {
	s.t.Helper()
	return s.Until(run, "parking", toParked, func(status protocol.Status) bool {
		return status.WaitingFor != nil && status.WaitingFor.Kind == protocol.WaitParked
	})
}

// Result waits for the run's end and reads its result. A run that parks has no
// end: the test fails with what it says.
func (s *Sandbox) Result(run string, result any) {
	s.t.Helper()
	s.Until(run, "the end", toEnd, func(status protocol.Status) bool {
		if w := status.WaitingFor; w != nil && w.Kind == protocol.WaitParked {
			b, _ := json.MarshalIndent(w, "", "  ")
			s.t.Fatalf("parked instead of an end:\n%s", b)
		}
		return Closed(status)
	})
	ctx, cancel := context.WithTimeout(context.Background(), toEnd)
	defer cancel()
	require.NoError(s.t, s.Temporal.GetWorkflow(ctx, run, "").Get(ctx, result))
}

// Closed says whether the run has ended, however.
func Closed(s protocol.Status) bool {
	return s.Phase == protocol.PhaseDone || s.Phase == protocol.PhaseAborted || s.Phase == protocol.PhaseRolledBack
}
