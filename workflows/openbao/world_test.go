package openbao

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"go.temporal.io/sdk/temporal"

	acts "github.com/refit-run/refit/activities/openbao"

	"github.com/refit-run/refit/activities/artifact"
	"github.com/refit-run/refit/activities/evidence"
	"github.com/refit-run/refit/activities/finding"
	"github.com/refit-run/refit/activities/kube"
	"github.com/refit-run/refit/workflows/datastore"
	"github.com/refit-run/refit/workflows/internal/workflowtest"
	"github.com/refit-run/refit/workflows/protocol"
)

// system is the world behind the activities: three members as they would see
// them. What is to be done next is decided by the product's own rules.
type system struct {
	mu     sync.Mutex
	view   acts.View
	log    []string
	locked bool
	looks  int
	// refuse parks every survey; down is a member that does not answer; sealed
	// is one that comes back sealed.
	refuse, down, sealed string
	// after runs after a member was deleted, once.
	after func()
	// deaf is how many step-downs are accepted and do nothing; lost is how many
	// are done and their reply is lost.
	deaf, lost int
	// worn is how often an activity is lost with its worker.
	worn     int
	now      func() time.Time
	snapshot []finding.Finding
}

func newSystem() *system {
	s := &system{view: acts.View{Set: acts.Set{Name: "openbao-server", Replicas: 3, Strategy: "OnDelete", Image: "nvcf-openbao:2.6.3-nv-1.3.7", Revision: "new"}}}
	for i := range 3 {
		m := acts.Member{Pod: fmt.Sprintf("openbao-server-%d", i), UID: fmt.Sprintf("uid-%d", i), Revision: "old", Image: "nvcf-openbao:2.6.2-nv-1.3.4"}
		m.Status = acts.Status{Initialized: true, Version: "2.6.2", ClusterID: "c1", Committed: 40}
		s.view.Members = append(s.view.Members, m)
	}
	s.lead(0)
	return s
}

func (s *system) do(f func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f()
}

func (s *system) say(format string, args ...any) { s.log = append(s.log, fmt.Sprintf(format, args...)) }

func (s *system) lead(i int) {
	for j := range s.view.Members {
		s.view.Members[j].Active, s.view.Members[j].Leader = i == j, fmt.Sprint(i)
	}
}

func (s *system) at(pod string) int {
	return slices.IndexFunc(s.view.Members, func(m acts.Member) bool { return m.Pod == pod })
}

func (s *system) seen() evidence.Trail {
	s.looks++
	return evidence.Trail{Looks: 3, Last: artifact.Ref{Name: fmt.Sprintf("look-%d.json", s.looks)}}
}

// wrong is what every look at the cluster finds.
func (s *system) wrong() []finding.Finding {
	switch {
	case s.refuse != "":
		return []finding.Finding{{Row: "N161", Object: "StatefulSet openbao-server", Expected: "update strategy OnDelete", Found: s.refuse}}
	case s.down != "":
		return []finding.Finding{{Row: "N89", Object: "OpenBao member " + s.down, Expected: "an answer", Found: "connection refused"}}
	case s.sealed != "":
		return []finding.Finding{{Row: "N163", Object: "OpenBao member " + s.sealed, Expected: "unsealed", Found: "Ready and sealed", Next: "follow the runbook"}}
	}
	return nil
}

// died is the error of an activity whose worker was lost for good.
func (s *system) died() error {
	if s.worn == 0 {
		return nil
	}
	s.worn--
	return temporal.NewNonRetryableApplicationError("the worker is gone", "Gone", nil)
}

func (s *system) survey(_ context.Context, r acts.SurveyRequest) (acts.SurveyResult, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := acts.SurveyResult{Findings: s.wrong(), State: s.view.State(), Evidence: s.seen(), Snapshot: artifact.Ref{URL: r.Snapshot}}
	if len(out.Findings) > 0 {
		s.say("survey finds %s", out.Findings[0].Found)
		return out, nil
	}
	active, none := s.view.Active()
	if none != "" {
		panic(none)
	}
	out.Step, out.Steps, out.ClusterID, out.Committed = acts.Next(s.view), acts.Steps(s.view), "c1", active.Committed
	return out, nil
}

// late tells whether an act that was to begin by then must not any more.
func (s *system) late(by time.Time) bool { return by.IsZero() || s.now().After(by) }

func (s *system) replace(_ context.Context, r acts.ReplaceRequest) (out acts.ReplaceResult, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	out.Evidence = s.seen()
	if r.Holder != "me" || r.Target.UID != "uid-prod" || r.Want.ClusterID != "c1" || r.Token.Secret != "openbao-server-root-token" {
		return out, temporal.NewNonRetryableApplicationError(fmt.Sprintf("an incomplete request: %+v", r), "Test", nil)
	}
	i := s.at(r.Pod)
	if s.view.Members[i].UID == r.UID {
		if out.Findings = s.wrong(); len(out.Findings) > 0 {
			s.say("replace %s not begun: %s", r.Pod, out.Findings[0].Found)
			return out, nil
		}
		if s.late(r.BeginBy) {
			out.Moved = r.Pod + " is late"
			s.say("replace %s not begun: late", r.Pod)
			return out, nil
		}
		if s.view.Members[i].Active {
			out.Moved = r.Pod + " has become active"
			s.say("replace %s not begun: active", r.Pod)
			return out, nil
		}
		s.say("delete %s", r.Pod)
		m := &s.view.Members[i]
		m.UID, m.Revision, m.Version, m.Image = m.UID+"-new", "new", r.Want.Version, s.view.Set.Image
		if s.after != nil {
			s.after()
			s.after = nil
		}
	}
	out.Touched = true
	if err := s.died(); err != nil {
		return out, err
	}
	out.State = s.view.State()
	if out.Findings = s.wrong(); len(out.Findings) > 0 {
		s.say("%s not proven: %s", r.Pod, out.Findings[0].Found)
		return out, nil
	}
	s.say("%s proven", r.Pod)
	out.OK, out.Version = true, r.Want.Version
	return out, nil
}

func (s *system) stepDown(_ context.Context, r acts.StepDownRequest) (out acts.StepDownResult, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	out.Evidence = s.seen()
	active, _ := s.view.Active()
	if active.Pod == r.Pod && active.Revision != "new" {
		if out.Findings = s.wrong(); len(out.Findings) > 0 {
			return out, nil
		}
		if s.late(r.BeginBy) {
			out.Moved = r.Pod + " is late"
			s.say("step-down of %s not begun: late", r.Pod)
			return out, nil
		}
		out.Sent = true
		if s.deaf > 0 {
			s.deaf--
			s.say("step-down of %s without effect", r.Pod)
			out.Reply, out.Findings = "accepted", []finding.Finding{{Row: "N166", Object: "OpenBao", Expected: "a member of version 2.6.3 active", Found: r.Pod + " is"}}
			return out, nil
		}
		s.say("step-down of %s", r.Pod)
		s.lead((s.at(r.Pod) + 1) % 3)
		if s.lost > 0 {
			s.lost--
			return out, temporal.NewNonRetryableApplicationError("the reply is lost", "Lost", nil)
		}
	}
	active, _ = s.view.Active()
	if active.Revision != "new" {
		out.Moved = active.Pod + " is active"
		return out, nil
	}
	out.OK, out.State = true, s.view.State()
	s.say("%s leads", active.Pod)
	return out, nil
}

func (s *system) snapshots(_ context.Context, r acts.SnapshotRequest) (acts.SnapshotResult, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.say("snapshot")
	if len(s.snapshot) > 0 {
		return acts.SnapshotResult{Findings: s.snapshot, Evidence: s.seen()}, nil
	}
	out := acts.SnapshotResult{Active: "openbao-server-0", ClusterID: "c1", Snapshot: artifact.Ref{Name: "openbao.snap", Kind: artifact.Secret, Size: 99}, Evidence: s.seen()}
	for _, h := range r.Secrets {
		out.Secrets = append(out.Secrets, artifact.Ref{Name: h.Secret + ".yaml", Kind: artifact.Secret})
	}
	return out, nil
}

func newHarness(t *testing.T, s *system) *workflowtest.Run {
	var h *workflowtest.Run
	s.now = func() time.Time { return h.Now() }
	h = workflowtest.New(t, workflowtest.Release{
		Name: "openbao-server", Namespace: "vault-system", Locked: s.locked, Say: func(what string) { s.do(func() { s.say("%s", what) }) },
	}, map[string]any{protocol.OpenBaoReplace: Replace, protocol.OpenBaoSnapshot: Snapshot}, map[string]any{
		acts.SurveyActivity: s.survey, acts.ReplaceActivity: s.replace, acts.StepDownActivity: s.stepDown, acts.SnapshotActivity: s.snapshots,
	})
	return h
}

func site() Site { return Site{Site: datastore.Site{Target: kube.Target{Cluster: "prod"}}} }

func replacement() ReplaceInput {
	return ReplaceInput{Site: site(), Image: "nvcf-openbao:2.6.3-nv-1.3.7"}
}
