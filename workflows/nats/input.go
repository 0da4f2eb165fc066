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
	"github.com/refit-run/refit/activities/kube"
	"github.com/refit-run/refit/workflows/protocol"
	"github.com/refit-run/refit/workflows/rollout/plan"
	"github.com/refit-run/refit/workflows/window"
)

// Site is what every plan of this package says first: which NATS is meant.
type Site struct {
	Target kube.Target `json:"target"`
	// Namespace (default nats-system) and Release (default nats) are those of
	// the Helm release, whose Lease a run that was started alone takes.
	Namespace string `json:"namespace,omitempty"`
	Release   string `json:"release,omitempty"`
	// Servers says which pods are NATS servers, where the chart was changed.
	Servers acts.Servers `json:"servers,omitzero"`
	// Parent is set by a run that starts this one as its child: it holds the
	// Lease, and Target carries the cluster's UID.
	Parent *protocol.Parent `json:"parent,omitempty"`
}

// DrainInput is the one JSON value of a NATSDrain.
type DrainInput struct {
	Site
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
	// streams until they are steady (default 5 m).
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
	// Emptied are memory streams with one copy that the roll has emptied. They
	// were drained; their sequences began anew.
	Emptied []string `json:"emptied,omitempty"`
}

const (
	defaultDrain  = window.Duration(30 * time.Minute)
	defaultSettle = window.Duration(5 * time.Minute)
)

func (s Site) withDefaults() Site {
	if s.Namespace == "" {
		s.Namespace = "nats-system"
	}
	if s.Release == "" {
		s.Release = "nats"
	}
	s.Servers = s.Servers.WithDefaults()
	return s
}

// Object names the release, for the receipt and the run's ID.
func (s Site) Object() string { return s.withDefaults().Release }

func (s Site) place() acts.Place {
	return acts.Place{Target: s.Target, Namespace: s.Namespace, Servers: s.Servers}
}

func or(d, usual window.Duration) window.Duration {
	if d == 0 {
		return usual
	}
	return d
}

// problems collects what is wrong with an input.
type problems []plan.Problem

func (ps *problems) add(path, format string, args ...any) {
	*ps = append(*ps, plan.Problem{Path: path, Message: fmt.Sprintf(format, args...)})
}

func (ps *problems) site(s Site, limit window.Duration) {
	if s.Target.Cluster == "" {
		ps.add("target.cluster", "is missing: name a cluster of the worker's configuration")
	}
	if s.Parent != nil && s.Target.UID == "" {
		ps.add("target.uid", "is missing: the run that starts this one hands down the cluster's identity")
	}
	ps.port("servers.monitorPort", s.Servers.MonitorPort)
	ps.port("servers.clientPort", s.Servers.ClientPort)
	if limit < 0 {
		ps.add("limit", "is %s: want a positive duration, or leave it out", limit)
	}
}

func (ps *problems) port(path string, port int) {
	if port < 0 || port > 65535 {
		ps.add(path, "is %d: want a port from 1 to 65535, or leave it out", port)
	}
}

// Validate returns every problem of the input at once.
func (in DrainInput) Validate() []plan.Problem {
	var ps problems
	ps.site(in.Site, in.Limit)
	return ps
}

// Validate returns every problem of the input at once.
func (in RollInput) Validate() []plan.Problem {
	var ps problems
	ps.site(in.Site, in.Limit)
	switch {
	case in.Phase != Before && in.Phase != After:
		ps.add("phase", "is %q: want before or after", in.Phase)
	case in.Phase == After && in.Saved == "":
		ps.add("saved", "is missing: give the URL of the list that the phase before has saved (its receipt names it)")
	case in.Phase == Before && in.Saved != "":
		ps.add("saved", "is set for the phase before, which saves a list of its own: leave it out")
	}
	return ps
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
			ps.add(at+".account", "is missing: name the account that the login leads into")
		case slices.Contains(seen, l.Account):
			ps.add(at+".account", "is %q a second time: want one login for each account", l.Account)
		}
		seen = append(seen, l.Account)
		switch {
		case (l.NKey == nil) == (l.Creds == nil):
			ps.add(at, "names nkey and creds, or neither: want one of them")
		case l.NKey != nil:
			ps.reference(at+".nkey", *l.NKey)
		default:
			ps.reference(at+".creds", *l.Creds)
		}
	}
	for i, name := range in.Leave {
		if account, stream, ok := strings.Cut(name, "/"); !ok || account == "" || stream == "" {
			ps.add(fmt.Sprintf("leave[%d]", i), "is %q: want ACCOUNT/STREAM", name)
		}
	}
	for i, w := range in.Windows {
		if err := w.Validate(); err != nil {
			ps.add(fmt.Sprintf("windows[%d]", i), "%v", err)
		}
	}
	return ps
}

func (ps *problems) reference(path string, r acts.Reference) {
	given := 0
	for _, from := range []string{r.Secret, r.File, r.Variable} {
		if from != "" {
			given++
		}
	}
	switch {
	case given != 1:
		ps.add(path, "names %d places: want secret with key, file or variable", given)
	case r.Secret != "" && r.Key == "":
		ps.add(path+".key", "is missing: name the key of Secret %s", r.Secret)
	case r.Secret == "" && r.Key != "":
		ps.add(path+".key", "is set without secret: leave it out")
	}
}
