// Package cassandra has the child runs that keep Cassandra safe around an
// upgrade: the backup, the expansion from one member to three, the raise of
// the keyspaces' copies, and the check of the migrations' ledgers. Each also
// runs alone. It must do no I/O of its own and hold no rule about rings or
// keyspaces: the verdicts of activities/cassandra decide.
package cassandra

import (
	"fmt"
	"slices"
	"time"

	acts "github.com/refit-run/refit/activities/cassandra"

	"github.com/refit-run/refit/workflows/datastore"
	"github.com/refit-run/refit/workflows/protocol"
	"github.com/refit-run/refit/workflows/rollout/plan"
	"github.com/refit-run/refit/workflows/window"
)

// Site is what every plan of this package says first: which Cassandra is meant
// (default: the release cassandra in cassandra-system).
type Site struct {
	datastore.Site
	// Members says which pods are members, where the chart was changed.
	Members acts.Members `json:"members,omitzero"`
}

// BackupInput is the one JSON value of a CassandraBackup.
type BackupInput struct {
	Site
	// Tag names the snapshots; one that is there with every table is done.
	Tag string `json:"tag"`
	// Copied names the copy of the volumes off the cluster, where one is made
	// by other means; without it the run asks for it at a gate.
	Copied string `json:"copied,omitempty"`
	// Limit is how long members may take to be up, to flush and to snapshot,
	// each (default 15 m).
	Limit   window.Duration `json:"limit,omitempty"`
	Windows []window.Spec   `json:"windows,omitempty"`
}

// BackupResult of a CassandraBackup.
type BackupResult struct {
	protocol.Receipt
	// Members is how many there are: an expansion is decided by this number.
	Members   int                   `json:"members"`
	Snapshots []acts.SnapshotResult `json:"snapshots,omitempty"`
}

// Strategies of a CassandraExpand.
const (
	Bootstrap   = "bootstrap"
	QuorumFirst = "quorumFirst"
	Guide       = "guide"
)

// ExpandInput is the one JSON value of a CassandraExpand.
type ExpandInput struct {
	Site
	Login acts.Login `json:"login"`
	// Mode is highAvailability.mode of the stack: with none nothing is done.
	Mode string `json:"mode" jsonschema:"enum=none,enum=preferred,enum=enforced"`
	// Strategy is bootstrap (default), quorumFirst or guide.
	Strategy string `json:"strategy,omitempty" jsonschema:"enum=bootstrap,enum=quorumFirst,enum=guide"`
	// AcknowledgeSeeds lets the guide's order go on where a joiner is a seed:
	// rows are missing and logins are refused meanwhile, perhaps all.
	AcknowledgeSeeds bool `json:"acknowledgeSeeds,omitempty"`
	// SavedMembers is the number that the backup has recorded; without it the
	// live one decides, unless it is three: then the run parks and asks.
	SavedMembers int `json:"savedMembers,omitempty"`
	// Keyspaces are raised after system_auth (default: the guide's seven).
	Keyspaces []string `json:"keyspaces,omitempty"`
	// Services are those whose logs must show no refused login at the end
	// (default: Deployment nvcf-api in nvcf).
	Services []acts.Service `json:"services,omitempty"`
	Limits   Limits         `json:"limits,omitzero"`
	// Estimate is how long the part without a stop takes: it starts only where a
	// window is open for so long. The default is 45 m, and 10 m more for each
	// keyspace where that part brings the keyspaces too: with quorumFirst, with
	// guide, and where another run has scaled.
	Estimate window.Duration `json:"estimate,omitempty"`
	Windows  []window.Spec   `json:"windows,omitempty"`
	// PlanOnly stops once it is known what would be done.
	PlanOnly bool `json:"planOnly,omitempty"`
}

// Limits are how long a run waits before it parks.
type Limits struct {
	// Rollout of the changed pod template (default 10 m).
	Rollout window.Duration `json:"rollout,omitempty"`
	// Join of the new members, all up and of one schema (default 20 m).
	Join window.Duration `json:"join,omitempty"`
	// Repair of one keyspace on one member (default 30 m).
	Repair window.Duration `json:"repair,omitempty"`
	// Login is how long a quorum of the roles may be away (default 5 m).
	Login window.Duration `json:"login,omitempty"`
	// Authentication is how long refused logins may take to fall out of the
	// ten minutes of log that are looked at (default 15 m).
	Authentication window.Duration `json:"authentication,omitempty"`
}

// ExpandResult of a CassandraExpand.
type ExpandResult struct {
	protocol.Receipt
	// Raised is how each keyspace that this run has raised was before; Repairs
	// prove the copies.
	Raised  []acts.Keyspace `json:"raised,omitempty"`
	Repairs []acts.Repair   `json:"repairs,omitempty"`
	// Absent keyspaces are not installed, Outside ones nobody asked for keep
	// their copies.
	Absent  []string        `json:"absent,omitempty"`
	Outside []acts.Keyspace `json:"outside,omitempty"`
	// Recovered: the new members were taken out again.
	Recovered bool `json:"recovered,omitempty"`
}

// When a CassandraReplication repairs.
const (
	RepairRaised = "raised"
	RepairAlways = "always"
)

// ReplicationInput is the one JSON value of a CassandraReplication.
type ReplicationInput struct {
	Site
	Login acts.Login `json:"login"`
	// Mode is highAvailability.mode of the stack: with none nothing is done.
	Mode      string   `json:"mode" jsonschema:"enum=none,enum=preferred,enum=enforced"`
	Keyspaces []string `json:"keyspaces,omitempty"`
	// Repair is raised (default: only what this run has altered) or always.
	Repair   string        `json:"repair,omitempty" jsonschema:"enum=raised,enum=always"`
	Limits   Limits        `json:"limits,omitzero"`
	Windows  []window.Spec `json:"windows,omitempty"`
	PlanOnly bool          `json:"planOnly,omitempty"`
}

// ReplicationResult of a CassandraReplication.
type ReplicationResult struct {
	protocol.Receipt
	DataCenter string          `json:"dataCenter"`
	Raised     []acts.Keyspace `json:"raised,omitempty"`
	Repairs    []acts.Repair   `json:"repairs,omitempty"`
	Already    []string        `json:"already,omitempty"`
	Absent     []string        `json:"absent,omitempty"`
	Outside    []acts.Keyspace `json:"outside,omitempty"`
}

// LedgerInput is the one JSON value of a CassandraLedger.
type LedgerInput struct {
	Site
	Login     acts.Login `json:"login"`
	Keyspaces []string   `json:"keyspaces,omitempty"`
	// Expect is the version that ledgers must show, where the plan knows it.
	Expect []acts.Expected `json:"expect,omitempty"`
	// Limit is how long a quorum may be away (default 5 m).
	Limit window.Duration `json:"limit,omitempty"`
}

// LedgerResult of a CassandraLedger.
type LedgerResult struct {
	protocol.Receipt
	Entries []acts.Entry `json:"entries,omitempty"`
	Absent  []string     `json:"absent,omitempty"`
}

func (s Site) withDefaults() Site {
	return Site{Site: s.Site.WithDefaults("cassandra-system", "cassandra"), Members: s.Members.WithDefaults()}
}

// Object names the release, for the receipt and the run's ID.
func (s Site) Object() string { return s.withDefaults().Release }

func (l Limits) withDefaults() Limits {
	minutes := func(d window.Duration, usual time.Duration) window.Duration {
		return datastore.Or(d, window.Duration(usual*time.Minute))
	}
	return Limits{Rollout: minutes(l.Rollout, 10), Join: minutes(l.Join, 20), Repair: minutes(l.Repair, 30),
		Login: minutes(l.Login, 5), Authentication: minutes(l.Authentication, 15)}
}

func keyspaces(asked []string) []string {
	if len(asked) == 0 {
		return acts.ApplicationKeyspaces()
	}
	return asked
}

// problems collects what is wrong with an input.
type problems struct{ datastore.Problems }

func (ps *problems) site(s Site, windows []window.Spec) {
	ps.Site(s.Site)
	ps.Port("members.port", s.Members.Port)
	ps.Windows(windows)
}

func (ps *problems) limits(l Limits) {
	ps.Limit("limits.rollout", l.Rollout)
	ps.Limit("limits.join", l.Join)
	ps.Limit("limits.repair", l.Repair)
	ps.Limit("limits.login", l.Login)
	ps.Limit("limits.authentication", l.Authentication)
}

func (ps *problems) word(path, value string, allowed ...string) {
	if !slices.Contains(allowed, value) {
		ps.Add(path, "is %q: want one of %v", value, allowed)
	}
}

func (ps *problems) mode(mode string) {
	ps.word("mode", mode, acts.ModeNone, acts.ModePreferred, acts.ModeEnforced)
}

func (ps *problems) keyspaces(names []string) {
	for i, n := range names {
		at := fmt.Sprintf("keyspaces[%d]", i)
		switch {
		case !acts.ValidKeyspace(n):
			ps.Add(at, "is %q: want lower-case letters, digits and underscores", n)
		case n == acts.AuthKeyspace:
			ps.Add(at, "is %s: CassandraExpand raises it by itself", n)
		case slices.Contains(names[:i], n):
			ps.Add(at, "is %q a second time", n)
		}
	}
}

// Validate returns every problem of the input at once.
func (in BackupInput) Validate() []plan.Problem {
	var ps problems
	ps.site(in.Site, in.Windows)
	ps.Limit("limit", in.Limit)
	if !acts.ValidTag(in.Tag) {
		ps.Add("tag", "is %q: want letters, digits, dots, underscores and hyphens, for example pre-1-1-5", in.Tag)
	}
	return ps.Problems
}

// Validate returns every problem of the input at once.
func (in ExpandInput) Validate() []plan.Problem {
	var ps problems
	ps.site(in.Site, in.Windows)
	ps.Reference("login.password", in.Login.Password)
	ps.mode(in.Mode)
	ps.word("strategy", in.Strategy, "", Bootstrap, QuorumFirst, Guide)
	if in.AcknowledgeSeeds && in.Strategy != Guide {
		ps.Add("acknowledgeSeeds", "is set without strategy guide: leave it out")
	}
	if in.SavedMembers < 0 {
		ps.Add("savedMembers", "is %d: want the number that the backup has recorded, or leave it out", in.SavedMembers)
	}
	ps.keyspaces(in.Keyspaces)
	for i, s := range in.Services {
		if s.Namespace == "" || s.Deployment == "" {
			ps.Add(fmt.Sprintf("services[%d]", i), "lacks namespace or deployment: want both")
		}
	}
	ps.limits(in.Limits)
	ps.Limit("estimate", in.Estimate)
	return ps.Problems
}

// Validate returns every problem of the input at once.
func (in ReplicationInput) Validate() []plan.Problem {
	var ps problems
	ps.site(in.Site, in.Windows)
	ps.Reference("login.password", in.Login.Password)
	ps.mode(in.Mode)
	ps.word("repair", in.Repair, "", RepairRaised, RepairAlways)
	ps.keyspaces(in.Keyspaces)
	ps.limits(in.Limits)
	return ps.Problems
}

// Validate returns every problem of the input at once.
func (in LedgerInput) Validate() []plan.Problem {
	var ps problems
	ps.site(in.Site, nil)
	ps.Reference("login.password", in.Login.Password)
	ps.Limit("limit", in.Limit)
	ps.keyspaces(in.Keyspaces)
	for i, e := range in.Expect {
		if !acts.ValidKeyspace(e.Keyspace) || e.Version <= 0 {
			ps.Add(fmt.Sprintf("expect[%d]", i), "is %s at %d: want a keyspace and a version above 0", e.Keyspace, e.Version)
		}
	}
	return ps.Problems
}
