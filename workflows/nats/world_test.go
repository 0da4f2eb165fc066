package nats

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"

	acts "github.com/refit-run/refit/activities/nats"

	"github.com/refit-run/refit/activities/artifact"
	"github.com/refit-run/refit/activities/evidence"
	"github.com/refit-run/refit/activities/finding"
	"github.com/refit-run/refit/activities/kube"
	"github.com/refit-run/refit/workflows/datastore"
	"github.com/refit-run/refit/workflows/internal/workflowtest"
	"github.com/refit-run/refit/workflows/protocol"
)

// system is the world behind the activities: NATS as they would see it.
type system struct {
	mu     sync.Mutex
	log    []string
	locked bool
	// messages are what is left in the one memory stream with one replica.
	messages int
	// streams have so many replicas; down is a server that does not answer.
	names    []string
	replicas map[string]int
	down     string
	flapping bool
	// behind is a stream that is raised and whose copies do not come.
	behind string
	// states are how far streams are; what a raise expects beyond is lost.
	states map[string]acts.State
	// interrupted is a stream whose raise is sent and has no result: aborted is
	// called meanwhile. unknown are names in leave that no stream has.
	interrupted string
	aborted     func()
	unknown     []string
	// after the roll
	lost, emptied []string
	looks         int
	// held counts the streams that each drain was told of.
	held []int
}

func (s *system) do(f func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f()
}

func (s *system) say(format string, args ...any) { s.log = append(s.log, fmt.Sprintf(format, args...)) }

// seen is the evidence of one call, each kept apart.
func (s *system) seen() evidence.Trail {
	s.looks++
	return evidence.Trail{Looks: 3, Last: artifact.Ref{Name: fmt.Sprintf("look-%d.json", s.looks), URL: fmt.Sprintf("file:///look-%d.json", s.looks)}}
}

func (s *system) unreachable() []finding.Finding {
	if s.down == "" {
		return nil
	}
	return []finding.Finding{{Row: "N125", Object: "NATS server " + s.down, Expected: "a whole answer", Found: "connection refused", Why: "unreachable is not drained", Next: "bring the server back"}}
}

func (s *system) verdict() acts.Drained {
	d := acts.Drained{Seen: 1, Messages: uint64(s.messages), Findings: s.unreachable()}
	if s.messages > 0 {
		d.Findings = append(d.Findings, finding.Finding{Row: "N127", Object: "stream NVCF/requests", Expected: "0 messages", Found: fmt.Sprintf("%d messages", s.messages)})
	}
	d.OK = len(d.Findings) == 0
	return d
}

func (s *system) drain(_ context.Context, r acts.DrainRequest) (acts.DrainResult, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.say("drain %s least %d for %s", r.Namespace, r.Least, r.Limit)
	s.held = append(s.held, len(r.Held))
	out := acts.DrainResult{Drained: s.verdict(), Evidence: s.seen()}
	if s.messages > 0 {
		out.Held = []acts.Record{{Account: "NVCF", AccountID: "NVCF", Name: "requests", Replicas: 1, State: acts.State{Messages: uint64(s.messages)}}}
	}
	return out, nil
}

func (s *system) save(_ context.Context, r acts.DrainRequest) (acts.SaveResult, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.say("save least %d", r.Least)
	out := acts.SaveResult{Drained: s.verdict(), Evidence: s.seen()}
	if out.OK {
		out.Streams, out.List = len(s.names), artifact.Ref{Name: "streams.json", URL: "file:///streams.json"}
	}
	return out, nil
}

func (s *system) compare(_ context.Context, r acts.CompareRequest) (acts.CompareResult, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.say("compare with %s", r.List)
	out := acts.CompareResult{Streams: len(s.names), Emptied: s.emptied, Evidence: s.seen(), Findings: s.unreachable()}
	for _, name := range s.lost {
		out.Findings = append(out.Findings, finding.Finding{Object: "stream NVCF/" + name, Expected: "as before the roll", Found: "no server lists it"})
	}
	out.OK = len(out.Findings) == 0
	return out, nil
}

func (s *system) list(_ context.Context, r acts.ListRequest) (acts.ListResult, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.say("list")
	out := acts.ListResult{Evidence: s.seen(), Findings: s.unreachable()}
	if len(r.Logins) == 0 {
		return out, finding.Finding{Row: "N190", Object: "stream NVCF/requests", Expected: "a login into account NVCF", Found: "none in the plan"}.Error(finding.Stop)
	}
	for _, name := range s.unknown {
		out.Unknown = append(out.Unknown, finding.Finding{Row: "N189", Object: "stream " + name + " in leave", Expected: "a stream of that name", Found: "none on any server"})
	}
	for _, name := range s.names {
		record := acts.Record{Account: "NVCF", AccountID: "NVCF", Name: name, Replicas: s.replicas[name], State: s.states[name]}
		if record.Replicas < acts.TargetReplicas {
			out.Raise = append(out.Raise, record)
		} else {
			out.Already = append(out.Already, record)
		}
	}
	return out, nil
}

func (s *system) raise(_ context.Context, r acts.RaiseRequest) (acts.RaiseResult, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if found := s.unreachable(); found != nil {
		s.say("raise %s refused", r.Stream.Name)
		return acts.RaiseResult{Before: r.Stream, Findings: found, Evidence: s.seen()}, nil
	}
	s.say("raise %s", r.Stream.Name)
	if r.Stream.State.Messages > 0 && r.Stream.State.LastSeq > s.states[r.Stream.Name].LastSeq {
		return acts.RaiseResult{Before: r.Stream, Evidence: s.seen(), Findings: []finding.Finding{{Row: "N191", Object: r.Stream.String(), Expected: "nothing lost", Found: "messages are gone"}}}, nil
	}
	changed := s.replicas[r.Stream.Name] < acts.TargetReplicas
	s.replicas[r.Stream.Name] = acts.TargetReplicas
	if s.behind == r.Stream.Name || !slices.Contains(s.names, r.Stream.Name) {
		return acts.RaiseResult{Changed: changed, Before: r.Stream, Evidence: s.seen(), Findings: []finding.Finding{{Row: "N191", Object: r.Stream.String(), Expected: "2 current replicas", Found: "it is behind"}}}, nil
	}
	if s.interrupted == r.Stream.Name {
		s.aborted()
		return acts.RaiseResult{}, finding.Finding{Object: r.Stream.String(), Found: "the connection was lost"}.Error(finding.Stop)
	}
	return acts.RaiseResult{OK: true, Changed: true, Before: r.Stream, Evidence: s.seen()}, nil
}

func (s *system) settle(_ context.Context, r acts.SettleRequest) (acts.SettleResult, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.say("settle %d for %s", len(r.Streams), r.Limit)
	if s.flapping {
		return acts.SettleResult{Evidence: s.seen(), Findings: []finding.Finding{{Row: "N191", Object: "2 raised streams", Expected: "the same leaders for 10s", Found: "for 1.2s"}}}, nil
	}
	return acts.SettleResult{OK: true, Evidence: s.seen()}, nil
}

func newHarness(t *testing.T, s *system) *workflowtest.Run {
	h := workflowtest.New(t, workflowtest.Release{
		Name: "nats", Namespace: "nats-system", Locked: s.locked, Say: func(what string) { s.do(func() { s.say("%s", what) }) },
	}, map[string]any{protocol.NATSDrain: Drain, protocol.NATSReplicas: Replicas, protocol.NATSRoll: Roll}, map[string]any{
		acts.DrainActivity: s.drain, acts.SaveActivity: s.save, acts.CompareActivity: s.compare,
		acts.ListActivity: s.list, acts.RaiseActivity: s.raise, acts.SettleActivity: s.settle,
	})
	return h
}

func site() Site { return Site{Site: datastore.Site{Target: kube.Target{Cluster: "prod"}}} }
