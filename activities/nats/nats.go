// Package nats reads and changes the JetStream of a NATS cluster through the
// Kubernetes API alone: every server is asked by its own monitoring port, each
// stream is judged from its leader, and replicas are raised over the JetStream
// API. Verdicts are pure functions of what the servers answered. It must never
// purge or delete a message, and must not restart a server.
package nats

import (
	"time"

	"go.temporal.io/sdk/activity"
	"go.temporal.io/sdk/worker"

	"github.com/refit-run/refit/activities/artifact"
	"github.com/refit-run/refit/activities/kube"
)

// Activity names.
const (
	DrainActivity   = "nats.Drain"
	ListActivity    = "nats.List"
	RaiseActivity   = "nats.Raise"
	SettleActivity  = "nats.Settle"
	SaveActivity    = "nats.Save"
	CompareActivity = "nats.Compare"
)

const (
	// TargetReplicas is what streams are raised to. With two copies a stream
	// loses its quorum as soon as one member is down (N190).
	TargetReplicas = 3
	// LookLimit bounds one look at all servers, which are asked side by side:
	// opening the tunnel, then reading every page.
	LookLimit = dialLimit + readLimit
	// StableFor is how long raised streams must look right with the same
	// leaders: replicas flap for seconds after a raise.
	StableFor = 10 * time.Second

	// From the guide, 'Drain pending work'.
	dialLimit = 30 * time.Second
	readLimit = 30 * time.Second

	// raisePace is how often the copies of one stream are looked for: they take
	// about a second. settlePace is for all of them while they settle; drainPace
	// while their consumers work: that takes minutes.
	raisePace  = 200 * time.Millisecond
	settlePace = 500 * time.Millisecond
	drainPace  = 5 * time.Second
)

// Activities of one worker.
type Activities struct {
	Clusters  *kube.Clusters
	Artifacts *artifact.Store
	Dial      kube.Dial
	// Pace, when set, replaces how often servers are looked at, and Stable for
	// how long streams must look right: a test has no minutes.
	Pace, Stable time.Duration
}

// Register registers every activity under its name.
func (a *Activities) Register(r worker.Registry) {
	for _, e := range []struct {
		name string
		fn   any
	}{
		{DrainActivity, a.Drain}, {ListActivity, a.List}, {RaiseActivity, a.Raise},
		{SettleActivity, a.Settle}, {SaveActivity, a.Save}, {CompareActivity, a.Compare},
	} {
		r.RegisterActivityWithOptions(e.fn, activity.RegisterOptions{Name: e.name})
	}
}

// Place is where the servers are.
type Place struct {
	Target    kube.Target `json:"target"`
	Namespace string      `json:"namespace"`
	Servers   Servers     `json:"servers,omitzero"`
	// Release and Holder are the Lease that what changes a stream must hold.
	Release string `json:"release,omitempty"`
	Holder  string `json:"holder,omitempty"`
}

// Servers says which pods are NATS servers and where they listen.
type Servers struct {
	// Selector narrows the pods by labels; empty takes every pod that has the
	// container (default nats).
	Selector  string `json:"selector,omitempty"`
	Container string `json:"container,omitempty"`
	// MonitorPort (default 8222) answers without a login, ClientPort (default
	// 4222) asks for one.
	MonitorPort int `json:"monitorPort,omitempty"`
	ClientPort  int `json:"clientPort,omitempty"`
}

// WithDefaults fills in what the chart of NVCF uses.
func (s Servers) WithDefaults() Servers {
	if s.Container == "" {
		s.Container = "nats"
	}
	if s.MonitorPort == 0 {
		s.MonitorPort = 8222
	}
	if s.ClientPort == 0 {
		s.ClientPort = 4222
	}
	return s
}

func (a *Activities) stable() time.Duration {
	if a.Stable > 0 {
		return a.Stable
	}
	return StableFor
}
