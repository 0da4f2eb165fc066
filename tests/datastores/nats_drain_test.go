package datastores

import (
	"context"
	"errors"
	"strings"

	"github.com/stretchr/testify/require"

	"github.com/refit-run/refit/workflows/protocol"
)

// drained is the result of a NATSDrain.
type drained struct {
	protocol.Receipt
	Verdict struct {
		OK   bool `json:"ok"`
		Seen int  `json:"seen"`
	} `json:"verdict"`
}

func (w *world) natsDrains() {
	s := w.service(w.byKey())
	run := w.Start(drainPlan, []string{"limit=5s", "askCallers=true"}, "--id", "drain")
	w.UntilGate(run)
	w.Answer(protocol.Approve, run, "--comment", "callers stopped, queues empty, no task runs")
	w.parks(run, "N127: memory streams with one replica: expected at least 1")

	s.stream(requests)
	holder := s.info("requests").Cluster.Leader
	back := w.keepDown(natsSystem, holder)
	w.Answer(protocol.Retry, run)
	w.parks(run, "N125: NATS server "+holder)
	back()
	w.natsHealthy(holder)

	s.publish("requests", 3)
	w.Answer(protocol.Retry, run)
	parked := w.parks(run, "stream NVCF/requests: expected 0 messages and no pending deliveries, found 3 messages")
	require.Equal(w.t, []string{protocol.Retry, protocol.Abort}, parked.Answers)
	s.consume("requests", 3)
	w.Answer(protocol.Retry, run)
	var out drained
	w.Result(run, &out)
	require.EqualValues(w.t, 3, s.info("requests").State.LastSeq, "its consumer emptied it, nobody else")
	require.Equal(w.t, protocol.OutcomeDone, out.Outcome)
	require.True(w.t, out.Verdict.OK)
	require.Equal(w.t, 1, out.Verdict.Seen)
	kept := map[string]bool{}
	for _, a := range out.Artifacts {
		kept[a.URL] = true
	}
	require.Len(w.t, kept, 5, "the evidence of every attempt is kept apart, and the receipt: %v", out.Artifacts)
	w.recorded(natsSystem, out.Receipt)
	w.Record("nats-drain", run)
	s.drop("requests")
}

func (w *world) natsDrainOutlivesTheWorker() {
	s := w.service(w.byKey())
	s.stream(requests)
	s.publish("requests", 2)
	run := w.Start(drainPlan, []string{"limit=5m"}, "--id", "drain-killed")
	w.at(run, "drain")
	w.KillWorker()
	s.consume("requests", 2)
	w.StartWorker()
	var out drained
	w.Result(run, &out)
	require.Equal(w.t, protocol.OutcomeDone, out.Outcome)
	require.Equal(w.t, 1, out.Verdict.Seen)

	// What a dead worker has seen is known to the next: the server of the queue
	// goes down with it.
	s.publish("requests", 4)
	holder := s.info("requests").Cluster.Leader
	run = w.Start(drainPlan, []string{"limit=5m"}, "--id", "drain-killed-with-server")
	w.eventually("the worker has told the server what is held", func(ctx context.Context) error {
		d, err := w.Temporal.DescribeWorkflowExecution(ctx, run, "")
		if err != nil {
			return err
		}
		for _, a := range d.PendingActivities {
			if strings.Contains(a.HeartbeatDetails.String(), "requests") && len(a.HeartbeatDetails.GetPayloads()) > 1 {
				return nil
			}
		}
		return errors.New("no heartbeat carries it")
	})
	w.KillWorker()
	former := w.deletePod(natsSystem, holder)
	w.replaced(natsSystem, holder, former)
	w.natsHealthy(holder)
	w.StartWorker()
	require.Contains(w.t, w.parks(run, "N124: stream NVCF/requests").Found, "4 messages")
	w.Answer(protocol.Abort, run)
	w.Result(run, &out)
	require.Equal(w.t, protocol.OutcomeAborted, out.Outcome)
	s.drop("requests")
}

// natsLosesWhatItHeld restarts the one server of a queue while a run waits for
// the queue's consumers.
func (w *world) natsLosesWhatItHeld() {
	s := w.service(w.byKey())
	s.stream(requests)
	s.publish("requests", 4)
	holder := s.info("requests").Cluster.Leader
	run := w.Start(drainPlan, []string{"limit=5s"}, "--id", "drain-emptied")
	w.parks(run, "4 messages")
	former := w.deletePod(natsSystem, holder)
	w.replaced(natsSystem, holder, former)
	w.natsHealthy(holder)
	w.eventually("the queue is there, and empty", func(context.Context) error {
		if i := s.info("requests"); i.State.LastSeq != 0 {
			return errors.New("it is as it was")
		}
		return nil
	})
	w.Answer(protocol.Retry, run)
	parked := w.parks(run, "N124: stream NVCF/requests")
	require.Contains(w.t, parked.Found, "4 messages")
	w.Answer(protocol.Retry, run, "--comment", "they are sent again")
	var out drained
	w.Result(run, &out)
	require.Equal(w.t, protocol.OutcomeDone, out.Outcome)
	s.drop("requests")
}
