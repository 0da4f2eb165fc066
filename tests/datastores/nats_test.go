package datastores

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"
	"github.com/stretchr/testify/require"
	"k8s.io/apimachinery/pkg/types"

	"github.com/refit-run/refit/tests/sandbox"
	"github.com/refit-run/refit/workflows/protocol"
)

const (
	drainPlan    = "examples/nats-drain.yaml"
	replicasPlan = "examples/nats-replicas.yaml"
	rollPlan     = "examples/nats-roll.yaml"
)

// requests is a queue as the control plane has them: one copy, in memory.
var requests = jetstream.StreamConfig{Name: "requests", Storage: jetstream.MemoryStorage, Retention: jetstream.WorkQueuePolicy}

// TestNATS runs everything on one set of three servers; each subtest leaves
// them without streams.
func TestNATS(t *testing.T) {
	t.Parallel()
	w := up(t, "nats")
	w.natsHealthy("nats-0", "nats-1", "nats-2")
	w.through(t, []step{
		{"what does not drain parks with its stream, and what nobody can see is not drained", (*world).natsDrains},
		{"a drain outlives the worker that waits for it", (*world).natsDrainOutlivesTheWorker},
		{"a queue that a restart empties while it is waited for is lost, not drained", (*world).natsLosesWhatItHeld},
		{"streams are raised while services publish and the worker is killed", (*world).natsReplicas},
		{"a server that goes down between two streams holds the next one up", (*world).natsServerDownInTheRaise},
		{"a server that goes down while replicas settle holds the run up", (*world).natsServerDown},
		{"a replica that flaps begins the wait anew", (*world).natsReplicaFlaps},
		{"a roll is checked against the streams before it", (*world).natsRoll},
		{"every account is logged in to by its own credentials", (*world).natsAccounts},
	})
}

// parks waits until the run is parked with this text.
func (w *world) parks(run, found string) protocol.Waiting {
	w.t.Helper()
	s := w.Until(run, "parking with "+found, patience, func(s protocol.Status) bool {
		return s.WaitingFor != nil && s.WaitingFor.Kind == protocol.WaitParked && strings.Contains(s.WaitingFor.Found, found)
	})
	return *s.WaitingFor
}

// at waits until the run works at a stage.
func (w *world) at(run, stage string) {
	w.t.Helper()
	w.Until(run, "stage "+stage, patience, func(s protocol.Status) bool { return s.Stage == stage })
}

// stageOf is a stage of a receipt.
func stageOf(r protocol.Receipt, name string) protocol.Stage {
	for _, s := range r.Stages {
		if s.Name == name {
			return s
		}
	}
	return protocol.Stage{}
}

// raised is the result of a NATSReplicas.
type raised struct {
	protocol.Receipt
	Raised []struct {
		Name     string `json:"name"`
		Account  string `json:"account"`
		Replicas int    `json:"replicas"`
	} `json:"raised"`
}

func (w *world) natsReplicas() {
	s := w.service(w.byKey())
	s.stream(requests)
	s.stream(jetstream.StreamConfig{Name: "events"})
	s.stream(jetstream.StreamConfig{Name: "icms", Storage: jetstream.MemoryStorage, Replicas: 3})
	more := []string{"s1", "s2", "s3", "s4", "s5", "s6"} // raised after the others
	for _, name := range more {
		s.stream(jetstream.StreamConfig{Name: name})
	}
	for name, n := range map[string]int{"requests": 5, "events": 10, "icms": 4} {
		s.publish(name, n)
	}
	out, code := w.Refit("plan", "-f", replicasPlan, "--exit-code")
	require.Equal(w.t, sandbox.ExitChanges, code, out)
	require.Contains(w.t, out, "stream NVCF/requests")
	require.Contains(w.t, out, "stream NVCF/events")
	require.NotContains(w.t, out, "icms")
	require.Equal(w.t, 1, s.info("events").Config.Replicas, "a plan raises nothing")

	published := s.busy("events")
	run := w.Start(replicasPlan, nil, "--id", "replicas")
	w.at(run, "raise")
	w.KillWorker()
	require.Equal(w.t, 1, s.info(more[len(more)-1]).Config.Replicas, "the worker was killed in the middle of the raise")
	w.StartWorker()
	w.at(run, "settle")
	w.KillWorker()
	w.StartWorker()
	var got raised
	w.Result(run, &got)
	require.Equal(w.t, protocol.OutcomeDone, got.Outcome)
	require.Len(w.t, got.Raised, 2+len(more))
	for _, r := range got.Raised {
		require.Equal(w.t, 1, r.Replicas, "how %s was before", r.Name)
	}
	least := 10 + published()
	for name, n := range map[string]uint64{"requests": 5, "events": least, "icms": 4} {
		i := s.info(name)
		require.Equal(w.t, 3, i.Config.Replicas, name)
		require.GreaterOrEqual(w.t, i.State.Msgs, n, name)
	}
	w.Record("nats-replicas", run)

	run = w.Start(replicasPlan, nil, "--id", "replicas-again")
	w.Result(run, &got)
	require.Equal(w.t, protocol.OutcomeNoChange, got.Outcome)
	w.secretly("replicas", w.natsSeed())
	s.drop(append(more, "requests", "events", "icms")...)
}

func (w *world) natsServerDownInTheRaise() {
	s := w.service(w.byKey())
	names := []string{"s0", "s1", "s2", "s3", "s4", "s5", "s6", "s7", "s8", "s9"} // raised in this order
	for _, name := range names {
		s.stream(jetstream.StreamConfig{Name: name})
		s.publish(name, 2)
	}
	last := names[len(names)-1]
	holder := s.info(last).Cluster.Leader
	down := "nats-0"
	if holder == down {
		down = "nats-1"
	}
	// One copy, in the memory of the server that goes down: raised after the
	// others, and empty by then.
	memory := ""
	for i := 0; memory == ""; i++ {
		require.Less(w.t, i, 50, "no stream is placed on %s", down)
		name := fmt.Sprintf("z%02d", i)
		s.stream(jetstream.StreamConfig{Name: name, Storage: jetstream.MemoryStorage})
		s.publish(name, 2)
		names = append(names, name)
		if s.info(name).Cluster.Leader == down {
			memory = name
		}
	}
	run := w.Start(replicasPlan, []string{"limit=10s"}, "--id", "replicas-half")
	w.at(run, "raise")
	w.Answer(protocol.Pause, run)
	w.Until(run, "a pause between two streams", patience, func(s protocol.Status) bool {
		return s.WaitingFor != nil && s.WaitingFor.Kind == protocol.WaitPaused && s.WaitingFor.Stage == "raise"
	})
	back := w.keepDown(natsSystem, down)
	w.Answer(protocol.Resume, run)
	w.parks(run, "N125: NATS server "+down)
	require.Equal(w.t, 1, s.info(last).Config.Replicas, "nothing is raised while a server is away")
	back()
	w.natsHealthy(down)
	w.Answer(protocol.Retry, run)
	var out raised
	w.Result(run, &out)
	require.Equal(w.t, protocol.OutcomeDone, out.Outcome)
	require.Len(w.t, out.Raised, len(names))
	for _, name := range names {
		i, held := s.info(name), 2
		if name == memory {
			held = 0
		}
		require.Equal(w.t, 3, i.Config.Replicas, name)
		require.EqualValues(w.t, held, i.State.Msgs, name)
	}
	require.Contains(w.t, strings.Join(out.Warnings, "\n"), "stream NVCF/"+memory+": expected nothing lost of 2 messages")
	s.drop(names...)
}

func (w *world) natsReplicaFlaps() {
	s := w.service(w.byKey())
	s.stream(jetstream.StreamConfig{Name: "events", Storage: jetstream.MemoryStorage})
	s.publish("events", 7)
	run := w.Start(replicasPlan, []string{"limit=3m"}, "--id", "replicas-flap")
	w.at(run, "settle")
	follower := s.info("events").Cluster.Replicas[0].Name
	former := w.deletePod(natsSystem, follower)
	gone := time.Now()
	w.replaced(natsSystem, follower, former)
	var out raised
	w.Result(run, &out)
	require.Equal(w.t, protocol.OutcomeDone, out.Outcome)
	settle := stageOf(out.Receipt, "settle")
	require.Equal(w.t, 1, settle.Attempts, "it came back in time")
	require.Greater(w.t, settle.Ended.Sub(gone), 10*time.Second, "what was calm before does not count")
	require.EqualValues(w.t, 7, s.info("events").State.Msgs)
	s.drop("events")
}

func (w *world) natsServerDown() {
	s := w.service(w.byKey())
	s.stream(jetstream.StreamConfig{Name: "events", Storage: jetstream.MemoryStorage})
	s.publish("events", 7)
	run := w.Start(replicasPlan, []string{"limit=20s"}, "--id", "replicas-down")
	w.at(run, "settle") // ten seconds at least
	w.KillWorker()      // so that however slow the machine is, the proof is not over first
	follower := s.info("events").Cluster.Replicas[0].Name
	back := w.keepDown(natsSystem, follower)
	w.StartWorker()
	w.parks(run, follower)
	back()
	w.natsHealthy(follower)
	w.Answer(protocol.Retry, run)
	var out raised
	w.Result(run, &out)
	require.Equal(w.t, protocol.OutcomeDone, out.Outcome)
	require.Equal(w.t, 1, stageOf(out.Receipt, "raise").Attempts, "what was raised is not raised again")
	require.Equal(w.t, 2, stageOf(out.Receipt, "settle").Attempts)
	i := s.info("events")
	require.Equal(w.t, 3, i.Config.Replicas)
	require.EqualValues(w.t, 7, i.State.Msgs)
	s.drop("events")
}

// rolled is the result of a NATSRoll.
type rolled struct {
	protocol.Receipt
	Saved struct {
		URL string `json:"url"`
	} `json:"saved"`
	Emptied []string `json:"emptied"`
}

func (w *world) natsRoll() {
	s := w.service(w.byKey())
	s.stream(requests)
	s.stream(jetstream.StreamConfig{Name: "events", Storage: jetstream.MemoryStorage, Replicas: 3})
	s.stream(jetstream.StreamConfig{Name: "kept"})
	s.publish("requests", 2)
	s.publish("events", 20)
	s.publish("kept", 5)

	run := w.Start(rollPlan, []string{"limit=5s"}, "--id", "roll-before")
	w.parks(run, "stream NVCF/requests")
	s.consume("requests", 2)
	w.Answer(protocol.Retry, run)
	var before rolled
	w.Result(run, &before)
	require.Equal(w.t, protocol.OutcomeDone, before.Outcome)
	require.NotEmpty(w.t, before.Saved.URL)
	w.Record("nats-roll-before", run)
	compare := func(id, limit string) string {
		return w.Start(rollPlan, []string{"phase=after", "saved=" + before.Saved.URL, "limit=" + limit}, "--id", id)
	}

	w.natsRollByHelm("registry.refit.local/synadia/nats-server:2.14.6-alpine3.22")
	run = compare("roll-after", "5m")
	var after rolled
	w.Result(run, &after)
	require.Equal(w.t, protocol.OutcomeDone, after.Outcome)
	require.Equal(w.t, []string{"NVCF/requests"}, after.Emptied, "one copy, in memory")
	require.Len(w.t, after.Warnings, 1)
	require.Contains(w.t, after.Warnings[0], "stream NVCF/requests came back empty")
	require.Contains(w.t, after.Warnings[0], "what was published from then on")
	w.Record("nats-roll-after", run)

	s.drop("kept")
	run = compare("roll-missing", "5s")
	parked := w.parks(run, "stream NVCF/kept")
	require.Contains(w.t, parked.Found, "no server lists it")
	w.Answer(protocol.Skip, run, "--comment", "it is made anew by its service")
	w.Result(run, &after)
	require.Equal(w.t, protocol.OutcomeDone, after.Outcome)
	require.Equal(w.t, protocol.Skipped, stageOf(after.Receipt, "compare").State)
	require.Equal(w.t, "ann", stageOf(after.Receipt, "compare").Answers[0].By)

	// A roll that does not wait for one server before it takes the next.
	s.stream(jetstream.StreamConfig{Name: "kept"})
	former := map[string]types.UID{}
	for i := range natsServers {
		name := fmt.Sprintf("nats-%d", i)
		former[name] = w.deletePod(natsSystem, name)
	}
	for name, uid := range former {
		w.replaced(natsSystem, name, uid)
	}
	run = compare("roll-lost", "2m")
	parked = w.parks(run, "stream NVCF/")
	var lost []string
	for _, f := range parked.Findings {
		lost = append(lost, f.Object)
	}
	require.Contains(w.t, lost, "stream NVCF/events", "the pods are Ready and the copies current, and hold nothing")
	w.Answer(protocol.Abort, run)
	w.Result(run, &after)
	require.Equal(w.t, protocol.OutcomeAborted, after.Outcome)
	s.drop("requests", "events", "kept")
}
