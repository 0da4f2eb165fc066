// Package nats has the child runs that keep NATS JetStream safe around an
// upgrade: the proof that its memory streams are drained, the raise of their
// replicas, and the checks around a roll that Helm drives. Each also runs
// alone. It must do no I/O of its own and hold no rule about streams: the
// verdicts of activities/nats decide.
package nats

import (
	"fmt"
	"slices"
	"strings"
	"time"

	acts "github.com/refit-run/refit/activities/nats"

	"github.com/refit-run/refit/activities/artifact"
	"github.com/refit-run/refit/workflows/datastore"
	"github.com/refit-run/refit/workflows/protocol"
	"github.com/refit-run/refit/workflows/rollout/plan"
	"github.com/refit-run/refit/workflows/window"
)

// Site is what every plan of this package says first: which NATS is meant
// (default: the release nats in nats-system).
type Site struct {
	datastore.Site
	// Servers says which pods are NATS servers, where the chart was changed.
	Servers acts.Servers `json:"servers,omitzero"`
}

// DrainInput is the one JSON value of a NATSDrain.
type DrainInput struct {
	Site
	// AskCallers asks a person, before the wait begins, to confirm what no
	// server of NATS can tell: that callers have stopped, that the queues of the
	// affected functions are empty and that running tasks are recorded.
	AskCallers bool `json:"askCallers,omitempty"`
	// Limit is how long the streams are waited for before the run parks
	// (default 30 m).
	Limit window.Duration `json:"limit,omitempty"`
}

// DrainResult of a NATSDrain.
type DrainResult struct {
	protocol.Receipt
	Verdict acts.Drained `json:"verdict"`
}

// ReplicasInput is the one JSON value of a NATSReplicas.
type ReplicasInput struct {
	Site
	// Logins are needed for every account with a stream to raise.
	Logins []acts.Login `json:"logins,omitempty"`
	// Leave names streams (ACCOUNT/STREAM) that are not touched.
	Leave []string `json:"leave,omitempty"`
	// Limit is how long the copies of one stream may take, and then all
	// streams until their 10 s of calm begin (default 5 m).
	Limit   window.Duration `json:"limit,omitempty"`
	Windows []window.Spec   `json:"windows,omitempty"`
	// PlanOnly stops once it is known which streams are to be raised.
	PlanOnly bool `json:"planOnly,omitempty"`
}

// ReplicasResult of a NATSReplicas.
type ReplicasResult struct {
	protocol.Receipt
	// Raised is how each raised stream was before.
	Raised []acts.Record `json:"raised,omitempty"`
}

// Phases of a NATSRoll.
const (
	Before = "before"
	After  = "after"
)

// RollInput is the one JSON value of a NATSRoll.
type RollInput struct {
	Site
	Phase string `json:"phase" jsonschema:"enum=before,enum=after"`
	// Saved is the URL of the list that the phase before has saved; the phase
	// after compares with it.
	Saved string `json:"saved,omitempty"`
	// Limit is how long drained streams (before, default 30 m) or recovered
	// servers (after, default 5 m) are waited for.
	Limit window.Duration `json:"limit,omitempty"`
}

// RollResult of a NATSRoll.
type RollResult struct {
	protocol.Receipt
	Phase string `json:"phase"`
	// Saved is the list to give to the phase after.
	Saved artifact.Ref `json:"saved,omitzero"`
	// Emptied are memory streams with one copy that the roll has emptied. Nothing
	// was in them when the list was saved.
	Emptied []string `json:"emptied,omitempty"`
}

const (
	defaultDrain  = window.Duration(30 * time.Minute)
	defaultSettle = window.Duration(5 * time.Minute)
)

func (s Site) withDefaults() Site {
	return Site{Site: s.Site.WithDefaults("nats-system", "nats"), Servers: s.Servers.WithDefaults()}
}

// Object names the release, for the receipt and the run's ID.
func (s Site) Object() string { return s.withDefaults().Release }

// problems collects what is wrong with an input.
type problems struct{ datastore.Problems }

func (ps *problems) site(s Site, limit window.Duration) {
	ps.Site(s.Site)
	ps.Port("servers.monitorPort", s.Servers.MonitorPort)
	ps.Port("servers.clientPort", s.Servers.ClientPort)
	ps.Limit("limit", limit)
}

// Validate returns every problem of the input at once.
func (in DrainInput) Validate() []plan.Problem {
	var ps problems
	ps.site(in.Site, in.Limit)
	return ps.Problems
}

// Validate returns every problem of the input at once.
func (in RollInput) Validate() []plan.Problem {
	var ps problems
	ps.site(in.Site, in.Limit)
	switch {
	case in.Phase != Before && in.Phase != After:
		ps.Add("phase", "is %q: want before or after", in.Phase)
	case in.Phase == After && in.Saved == "":
		ps.Add("saved", "is missing: give the URL of the list that the phase before has saved (its receipt names it)")
	case in.Phase == Before && in.Saved != "":
		ps.Add("saved", "is set for the phase before, which saves a list of its own: leave it out")
	}
	return ps.Problems
}

// Validate returns every problem of the input at once.
func (in ReplicasInput) Validate() []plan.Problem {
	var ps problems
	ps.site(in.Site, in.Limit)
	var seen []string
	for i, l := range in.Logins {
		at := fmt.Sprintf("logins[%d]", i)
		switch {
		case l.Account == "":
			ps.Add(at+".account", "is missing: name the account that the login leads into")
		case slices.Contains(seen, l.Account):
			ps.Add(at+".account", "is %q a second time: want one login for each account", l.Account)
		}
		seen = append(seen, l.Account)
		switch {
		case (l.NKey == nil) == (l.Creds == nil):
			ps.Add(at, "names nkey and creds, or neither: want one of them")
		case l.NKey != nil:
			ps.Reference(at+".nkey", *l.NKey)
		default:
			ps.Reference(at+".creds", *l.Creds)
		}
	}
	for i, name := range in.Leave {
		if account, stream, ok := strings.Cut(name, "/"); !ok || account == "" || stream == "" {
			ps.Add(fmt.Sprintf("leave[%d]", i), "is %q: want ACCOUNT/STREAM", name)
		}
	}
	ps.Windows(in.Windows)
	return ps.Problems
}
