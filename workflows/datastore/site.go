// Package datastore is what the child runs on NATS, Cassandra and OpenBao have
// in common: which release is meant, the run under its Lease, and the checks
// of a plan. It must do no I/O of its own, and must not know a datastore.
package datastore

import (
	"fmt"

	"github.com/refit-run/refit/activities/kube"
	"github.com/refit-run/refit/activities/secret"
	"github.com/refit-run/refit/workflows/protocol"
	"github.com/refit-run/refit/workflows/rollout/plan"
	"github.com/refit-run/refit/workflows/window"
)

// Site is what every plan on a datastore says first: which one is meant.
type Site struct {
	Target kube.Target `json:"target"`
	// Namespace and Release are those of the Helm release, whose Lease a run
	// that was started alone takes; empty means those of the NVCF chart.
	Namespace string `json:"namespace,omitempty"`
	Release   string `json:"release,omitempty"`
	// Parent is set by a run that starts this one as its child: it holds the
	// Lease, and Target carries the cluster's UID.
	Parent *protocol.Parent `json:"parent,omitempty"`
	// Holder is the run's name in the Lease: its own once it has taken it, or
	// its parent's. What changes something asks whether it still holds it.
	Holder string `json:"holder,omitempty" jsonschema:"-"`
}

// WithDefaults fills in namespace and release.
func (s Site) WithDefaults(namespace, release string) Site {
	if s.Namespace == "" {
		s.Namespace = namespace
	}
	if s.Release == "" {
		s.Release = release
	}
	return s
}

// Or is a duration of the plan, or what is usual where it says none.
func Or(d, usual window.Duration) window.Duration {
	if d == 0 {
		return usual
	}
	return d
}

// Problems collects what is wrong with an input.
type Problems []plan.Problem

// Add records one, with the JSON path of the fault.
func (ps *Problems) Add(path, format string, args ...any) {
	*ps = append(*ps, plan.Problem{Path: path, Message: fmt.Sprintf(format, args...)})
}

// Site checks which datastore is meant.
func (ps *Problems) Site(s Site) {
	if s.Target.Cluster == "" {
		ps.Add("target.cluster", "is missing: name a cluster of the worker's configuration")
	}
	if s.Parent != nil && s.Target.UID == "" {
		ps.Add("target.uid", "is missing: the run that starts this one hands down the cluster's identity")
	}
	if s.Parent != nil && s.Holder == "" {
		ps.Add("holder", "is missing: the run that starts this one hands down its name in the release's Lease; without it nothing would notice that the Lease was lost")
	}
}

// Limit checks a duration that may be left out.
func (ps *Problems) Limit(path string, d window.Duration) {
	if d < 0 {
		ps.Add(path, "is %s: want a positive duration, or leave it out", d)
	}
}

// Port checks a port that may be left out.
func (ps *Problems) Port(path string, port int) {
	if port < 0 || port > 65535 {
		ps.Add(path, "is %d: want a port from 1 to 65535, or leave it out", port)
	}
}

// Windows checks the windows of a plan.
func (ps *Problems) Windows(windows []window.Spec) {
	for i, w := range windows {
		if err := w.Validate(); err != nil {
			ps.Add(fmt.Sprintf("windows[%d]", i), "%v", err)
		}
	}
}

// Reference checks that a secret is named by one place.
func (ps *Problems) Reference(path string, r secret.Reference) {
	given := 0
	for _, from := range []string{r.Secret, r.File, r.Variable} {
		if from != "" {
			given++
		}
	}
	switch {
	case given != 1:
		ps.Add(path, "names %d places: want secret with key, file or variable", given)
	case r.Secret != "" && r.Key == "":
		ps.Add(path+".key", "is missing: name the key of Secret %s", r.Secret)
	case r.Secret == "" && r.Key != "":
		ps.Add(path+".key", "is set without secret: leave it out")
	}
}
