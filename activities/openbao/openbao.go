// Package openbao looks at the members of an OpenBao cluster, each by its own
// pod through the Kubernetes API alone, replaces one at a time, moves
// leadership and takes snapshots. Verdicts and the order of the steps are pure
// functions of what was seen. It must never delete a volume claim, initialise
// or unseal a member, change the peers of the cluster, or write into a pod.
package openbao

import (
	"time"

	"go.temporal.io/sdk/activity"
	"go.temporal.io/sdk/worker"

	"github.com/refit-run/refit/activities/artifact"
	"github.com/refit-run/refit/activities/kube"
	"github.com/refit-run/refit/activities/secret"
)

// Activity names.
const (
	SurveyActivity   = "openbao.Survey"
	ReplaceActivity  = "openbao.Replace"
	StepDownActivity = "openbao.StepDown"
	SnapshotActivity = "openbao.Snapshot"
)

const (
	// LookLimit bounds one look at all members, which are asked side by side:
	// opening the tunnel, then its seal and its leader, then the peers.
	LookLimit = dialLimit + 3*callLimit
	// StableFor is how long a replaced member, or a new leader, must look right
	// with the same leader in every look: leadership that has moved once moves
	// again easily.
	StableFor = 5 * time.Second
	// RecheckLimit bounds the looks right before a step. A cluster that is not
	// whole any more is waited for by the next survey, outside of the section.
	RecheckLimit = 30 * time.Second
	// steadyLooks is how many looks that must be at least.
	steadyLooks = 3
	// freshFor is how old a look may be when something is changed on it.
	freshFor = 3 * time.Second

	dialLimit = 30 * time.Second
	callLimit = 10 * time.Second
	// lookPace is how often members are looked at. A step-down is over within
	// a second; nothing is gained by seeing it sooner.
	lookPace = time.Second
)

// Activities of one worker.
type Activities struct {
	Clusters  *kube.Clusters
	Artifacts *artifact.Store
	Dial      kube.Dial
	// Pace, when set, replaces how often members are looked at, and Stable for
	// how long they must look right: a test has no minutes.
	Pace, Stable time.Duration
}

// Register registers every activity under its name.
func (a *Activities) Register(r worker.Registry) {
	for _, e := range []struct {
		name string
		fn   any
	}{
		{SurveyActivity, a.Survey}, {ReplaceActivity, a.Replace}, {StepDownActivity, a.StepDown}, {SnapshotActivity, a.Snapshot},
	} {
		r.RegisterActivityWithOptions(e.fn, activity.RegisterOptions{Name: e.name})
	}
}

// Place is where the members are, and on whose behalf they are worked on.
type Place struct {
	Target    kube.Target `json:"target"`
	Namespace string      `json:"namespace"`
	Servers   Servers     `json:"servers,omitzero"`
	// Token opens the list of peers, the step-down and the snapshot.
	Token secret.Reference `json:"token"`
	// Release and Holder, once the run has the release's Lease: nothing is
	// changed after it was lost.
	Release string `json:"release,omitempty"`
	Holder  string `json:"holder,omitempty"`
}

// Servers says which pods are members and where they listen.
type Servers struct {
	// StatefulSet (default openbao-server) makes the pods, Selector (default
	// app.kubernetes.io/name=openbao,component=server) finds them, Container
	// (default openbao) holds the server.
	StatefulSet string `json:"statefulSet,omitempty"`
	Selector    string `json:"selector,omitempty"`
	Container   string `json:"container,omitempty"`
	// Port (default 8200) is the API's, in plain HTTP.
	Port int `json:"port,omitempty"`
}

// WithDefaults fills in what the chart of NVCF uses.
func (s Servers) WithDefaults() Servers {
	if s.StatefulSet == "" {
		s.StatefulSet = "openbao-server"
	}
	if s.Selector == "" {
		s.Selector = "app.kubernetes.io/name=openbao,component=server"
	}
	if s.Container == "" {
		s.Container = "openbao"
	}
	if s.Port == 0 {
		s.Port = 8200
	}
	return s
}

// Want is what the members are to become.
type Want struct {
	// Image is the server's, with its tag; what the template puts in front of
	// it, a registry or a folder, does not matter.
	Image string `json:"image"`
	// Version is what a member of that image reports: not the tag, which
	// carries the build's own suffix.
	Version string `json:"version"`
	// Members is how many there are.
	Members int `json:"members"`
	// ClusterID, once it is known, is the one that every member keeps.
	ClusterID string `json:"clusterID,omitempty"`
}

func (a *Activities) pace() time.Duration {
	if a.Pace > 0 {
		return a.Pace
	}
	return lookPace
}

func (a *Activities) stable() time.Duration {
	if a.Stable > 0 {
		return a.Stable
	}
	return StableFor
}
