package cassandra

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	acts "github.com/refit-run/refit/activities/cassandra"

	"github.com/refit-run/refit/activities/artifact"
	"github.com/refit-run/refit/activities/evidence"
	"github.com/refit-run/refit/activities/finding"
	"github.com/refit-run/refit/activities/kube"
	"github.com/refit-run/refit/activities/secret"
	"github.com/refit-run/refit/workflows/datastore"
	"github.com/refit-run/refit/workflows/internal/workflowtest"
	"github.com/refit-run/refit/workflows/protocol"
)

// system is the world behind the activities: Cassandra as they would see it.
type system struct {
	mu  sync.Mutex
	log []string
	// now is the clock of the members.
	now func() time.Time

	members int
	seeds   string
	noRule  string
	shared  []finding.Finding
	// factors of the keyspaces; center is the live data centre's name.
	factors map[string]int
	center  string
	// scaled and repaired are what happens with the scale and a repair.
	scaled, repaired func()
	absentServices   []string
	relied           []bool // whether each raise relied on the look before it
	scaledWith       string // the seeds that the scale asks for
	// down is a member that does not serve, schemas how many versions there are.
	down    string
	schemas int
	// refused are members that refuse the login; lockOut makes all refuse once
	// scaled.
	refused []string
	lockOut bool
	// refuse, when set, says whether all refuse now.
	refuse func() bool
	// altered is what happens with a raise.
	altered func()
	// lostRaise is the keyspace whose raise is done once and told as an error.
	lostRaise string
	// failRepair is the member and the keyspace of a repair that fails once.
	failRepair string
	// left are the members that were taken out; their pods stay.
	left       []string
	snapshots  map[string]bool
	dirty      bool
	authErrors int
	looks      int
}

func newSystem(members int) *system {
	return &system{members: members, center: "ncp", schemas: 1, seeds: "cassandra-0.h,cassandra-1.h", snapshots: map[string]bool{},
		factors: map[string]int{"system_auth": 1, "nvcf_api": 1, "sis_api": 1, "schema_migrations": 1}}
}

func (s *system) do(f func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f()
}

func (s *system) say(format string, args ...any) { s.log = append(s.log, fmt.Sprintf(format, args...)) }

func (s *system) seen() evidence.Trail {
	s.looks++
	return evidence.Trail{Looks: 1, Last: artifact.Ref{Name: fmt.Sprintf("look-%d.json", s.looks)}}
}

func (s *system) keyspace(name string) acts.Keyspace {
	return acts.Keyspace{Name: name, Class: "NetworkTopologyStrategy", Factors: []acts.Factor{{DataCenter: s.center, Factor: fmt.Sprint(s.factors[name])}}}
}

func (s *system) names() []string {
	var out []string
	for name := range s.factors {
		out = append(out, name)
	}
	slices.Sort(out)
	return out
}

// quorum says whether the members are a quorum of the roles' copies.
func (s *system) quorum() bool { return s.members >= s.factors[acts.AuthKeyspace]/2+1 }

func (s *system) lockedOut() bool {
	return s.lockOut && s.members-len(s.left) > 1 || s.refuse != nil && s.refuse()
}

// login is what a statement hears.
func (s *system) login() error {
	f := finding.Finding{Object: "login of cassandra"}
	switch {
	case !s.quorum():
		f.Found = "Cannot achieve consistency level QUORUM"
		return f.Error(finding.Wait)
	case s.lockedOut():
		f.Found = "refused: username or password is incorrect"
		return f.Error(finding.Stop)
	}
	return nil
}

func (s *system) ring(_ context.Context, r acts.RingRequest) (acts.RingResult, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	want := r.Want
	if want == 0 {
		want = s.members
	}
	s.say("ring %d", want)
	out := acts.RingResult{Evidence: s.seen()}
	out.DataCenter, out.Schema = s.center, "v"
	out.Hosts = map[string]string{}
	for i := range s.members {
		pod := fmt.Sprintf("cassandra-%d", i)
		out.Members = append(out.Members, pod)
		out.Hosts[pod] = "host of " + pod
	}
	for _, name := range s.names() {
		out.Keyspaces = append(out.Keyspaces, s.keyspace(name))
	}
	if s.down != "" {
		out.Findings = append(out.Findings, finding.Finding{Row: r.Row, Object: "Cassandra member " + s.down, Expected: "UN", Found: "DN as cassandra-0 sees it"})
	}
	if s.schemas > 1 {
		out.Findings = append(out.Findings, finding.Finding{Row: r.Row, Object: "schema of Cassandra", Expected: "one version on all members", Found: fmt.Sprint(s.schemas)})
	}
	out.OK = len(out.Findings) == 0 && want == s.members
	return out, nil
}

func (s *system) survey(context.Context, acts.SurveyRequest) (acts.SurveyResult, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.say("survey")
	out := acts.SurveyResult{UID: "uid-sts", Replicas: s.members, DataCenter: "ncp", Seeds: s.seeds, NoRule: s.noRule, Rule: s.noRule == "", NewRule: s.noRule == "", Shared: s.shared}
	if s.seeds != "" {
		out.Narrowed = "cassandra-0.h"
	}
	if s.seeds == "cassandra-0.h,cassandra-1.h" {
		out.JoiningSeeds = []string{"cassandra-1.h"}
	}
	return out, nil
}

func (s *system) template(_ context.Context, r acts.TemplateRequest) (acts.TemplateResult, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.say("template rule=%t narrow=%t %s", r.Rule, r.Narrow, r.UID)
	if r.Narrow {
		s.seeds = "cassandra-0.h"
	}
	return acts.TemplateResult{Changed: true}, nil
}

func (s *system) scale(_ context.Context, r acts.ScaleRequest) (acts.ScaleResult, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.say("scale %s", r.UID)
	s.scaledWith = r.Seeds
	s.members = 3
	if s.scaled != nil {
		s.scaled()
	}
	return acts.ScaleResult{Before: 1, Changed: true}, nil
}

func (s *system) logins(_ context.Context, r acts.LoginsRequest) (acts.LoginsResult, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.say("logins %s", r.Pod)
	out := acts.LoginsResult{Evidence: s.seen()}
	for i := range s.members {
		pod := fmt.Sprintf("cassandra-%d", i)
		switch {
		case r.Pod != "" && r.Pod != pod:
		case !s.quorum():
			out.Findings = append(out.Findings, finding.Finding{Row: "N143", Object: "login of cassandra on " + pod, Found: "Cannot achieve consistency level QUORUM"})
		case slices.Contains(s.refused, pod), s.lockedOut():
			out.Refused = append(out.Refused, pod)
			out.Findings = append(out.Findings, finding.Finding{Row: "N143", Object: "login of cassandra on " + pod, Found: "refused: username or password is incorrect", Next: "stop, do not upgrade"})
		default:
			out.Accepted = append(out.Accepted, pod)
		}
	}
	out.OK = len(out.Findings) == 0
	return out, nil
}

func (s *system) raise(_ context.Context, r acts.RaiseRequest) (acts.RaiseResult, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case r.PlanOnly && len(r.Keyspaces) < 7: // the look before a raise, and not at the plan's list
	case r.PlanOnly:
		s.say("plan %d keyspaces", len(r.Keyspaces))
	case r.All:
		s.say("raise all to %d", r.Factor)
	default:
		s.say("raise %v to %d", r.Keyspaces, r.Factor)
		s.relied = append(s.relied, r.Seen)
	}
	out := acts.RaiseResult{DataCenter: s.center, At: s.now()}
	if err := s.login(); err != nil {
		return out, err
	}
	if s.center != "ncp" {
		return out, finding.Finding{Row: "N184", Object: "data centre of Cassandra", Expected: "ncp", Found: s.center}.Error(finding.Stop)
	}
	wanted := slices.Clone(r.Keyspaces)
	if r.All {
		wanted = s.names()
	}
	for _, name := range wanted {
		switch factor, there := s.factors[name]; {
		case !there:
			out.Absent = append(out.Absent, name)
		case factor >= r.Factor:
			out.Already = append(out.Already, s.keyspace(name))
		default:
			out.Raise = append(out.Raise, s.keyspace(name))
			if !r.PlanOnly {
				s.factors[name] = r.Factor
				if s.altered != nil {
					s.altered()
				}
				if s.lostRaise == name {
					s.lostRaise = ""
					return acts.RaiseResult{}, finding.Finding{Object: "CQL on cassandra-0", Found: "the connection broke"}.Error(finding.Wait)
				}
			}
		}
	}
	if !slices.Contains(wanted, "schema_migrations") && s.factors["schema_migrations"] == 1 {
		out.Outside = append(out.Outside, s.keyspace("schema_migrations"))
	}
	return out, nil
}

func (s *system) repair(_ context.Context, r acts.RepairRequest) (acts.RepairResult, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.say("repair %v on %s", r.Keyspaces, r.Pod)
	if r.Since.IsZero() {
		return acts.RepairResult{}, finding.Finding{Object: "test", Found: "a repair since ever"}.Error(finding.Stop)
	}
	for _, k := range r.Keyspaces {
		if s.factors[k] != r.Copies {
			return acts.RepairResult{}, finding.Finding{Object: "test", Found: fmt.Sprintf("a repair of %s with %d copies", k, r.Copies)}.Error(finding.Stop)
		}
		if s.failRepair == r.Pod+" "+k {
			s.failRepair = ""
			return acts.RepairResult{}, finding.Finding{Row: "N187", Object: "nodetool repair --full " + k + " on " + r.Pod, Expected: "exit code 0", Found: "2"}.Error(finding.Stop)
		}
	}
	if s.repaired != nil {
		s.repaired()
	}
	out := acts.RepairResult{Evidence: s.seen()}
	for _, k := range r.Keyspaces {
		out.Repairs = append(out.Repairs, acts.Repair{Pod: r.Pod, Keyspace: k, By: "nodetool"})
	}
	return out, nil
}

func (s *system) snapshot(_ context.Context, r acts.SnapshotRequest) (acts.SnapshotResult, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.say("snapshot %s %s", r.Pod, r.Tag)
	already := s.snapshots[r.Pod]
	s.snapshots[r.Pod] = true
	return acts.SnapshotResult{Pod: r.Pod, Tables: 48, Already: already}, nil
}

func (s *system) ledger(_ context.Context, r acts.LedgerRequest) (acts.LedgerResult, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.say("ledger %v", r.Keyspaces)
	out := acts.LedgerResult{Entries: []acts.Entry{{Keyspace: "nvcf_api", Version: 42, Dirty: s.dirty}}, Absent: []string{"nvct_api"}}
	if s.dirty {
		out.Findings = []finding.Finding{{Object: "ledger of nvcf_api", Expected: "not dirty", Found: "dirty at version 42"}}
	}
	out.OK = !s.dirty
	return out, nil
}

func (s *system) auth(_ context.Context, r acts.AuthErrorsRequest) (acts.AuthErrorsResult, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.say("auth errors of %s", r.Services[0].Deployment)
	if s.authErrors > 0 {
		return acts.AuthErrorsResult{Pods: 1, Findings: []finding.Finding{{Row: "N146", Object: "log of Pod/nvcf/nvcf-api-1", Found: fmt.Sprint(s.authErrors)}}}, nil
	}
	return acts.AuthErrorsResult{OK: true, Pods: 1, Absent: s.absentServices}, nil
}

func (s *system) decommission(_ context.Context, r acts.DecommissionRequest) (acts.DecommissionResult, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.say("decommission %s", r.Pod)
	if r.HostID != "host of "+r.Pod || !slices.Contains(r.Keyspaces, "nvcf_api") {
		return acts.DecommissionResult{}, finding.Finding{Object: "test", Found: fmt.Sprintf("a decommission of %q", r.HostID)}.Error(finding.Stop)
	}
	if slices.Contains(s.left, r.Pod) {
		return acts.DecommissionResult{Already: true}, nil
	}
	s.left = append(s.left, r.Pod)
	return acts.DecommissionResult{}, nil
}

// repairs says whether a log tells that a member has repaired a keyspace.
func repairs(log []string, keyspace, pod string) bool {
	return slices.ContainsFunc(log, func(line string) bool {
		names, ok := strings.CutPrefix(strings.TrimSuffix(line, "] on "+pod), "repair [")
		return ok && strings.HasSuffix(line, "] on "+pod) && slices.Contains(strings.Fields(names), keyspace)
	})
}

func newHarness(t *testing.T, s *system) *workflowtest.Run {
	h := workflowtest.New(t, workflowtest.Release{
		Name: "cassandra", Namespace: "cassandra-system", Say: func(what string) { s.do(func() { s.say("%s", what) }) },
	}, map[string]any{
		protocol.CassandraBackup: Backup, protocol.CassandraExpand: Expand, protocol.CassandraReplication: Replication, protocol.CassandraLedger: Ledger,
	}, map[string]any{
		acts.RingActivity: s.ring, acts.SurveyActivity: s.survey, acts.TemplateActivity: s.template, acts.ScaleActivity: s.scale,
		acts.LoginsActivity: s.logins, acts.RaiseActivity: s.raise, acts.RepairActivity: s.repair, acts.SnapshotActivity: s.snapshot,
		acts.LedgerActivity: s.ledger, acts.AuthErrorsActivity: s.auth, acts.DecommissionActivity: s.decommission,
	})
	s.now = h.Now
	return h
}

func site() Site { return Site{Site: datastore.Site{Target: kube.Target{Cluster: "prod"}}} }

func admin() acts.Login {
	return acts.Login{Password: secret.Reference{Secret: "cassandra-admin", Key: "password"}}
}
