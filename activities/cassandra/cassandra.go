// Package cassandra reads and changes a Cassandra cluster through the
// Kubernetes API alone: nodetool by exec in the members' own pods, CQL through
// a tunnel to one member at a time. Verdicts are pure functions of what the
// members answered. It must never run cleanup, delete a volume or scale down,
// and the administrator's password must not leave a session.
package cassandra

import (
	"context"
	"time"

	"go.temporal.io/sdk/activity"
	"go.temporal.io/sdk/worker"

	"github.com/refit-run/refit/activities/artifact"
	"github.com/refit-run/refit/activities/kube"
	"github.com/refit-run/refit/activities/secret"
)

// Activity names.
const (
	RingActivity         = "cassandra.Ring"
	SurveyActivity       = "cassandra.Survey"
	TemplateActivity     = "cassandra.Template"
	ScaleActivity        = "cassandra.Scale"
	LoginsActivity       = "cassandra.Logins"
	RaiseActivity        = "cassandra.Raise"
	RepairActivity       = "cassandra.Repair"
	SnapshotActivity     = "cassandra.Snapshot"
	LedgerActivity       = "cassandra.Ledger"
	AuthErrorsActivity   = "cassandra.AuthErrors"
	DecommissionActivity = "cassandra.Decommission"
)

const (
	// TargetMembers is what a single member is expanded to, and what the
	// keyspaces are raised to.
	TargetMembers = 3
	// LookLimit bounds one look at all members, who are asked side by side:
	// two calls of nodetool, each of which starts a JVM.
	LookLimit = 2 * toolLimit

	toolLimit = time.Minute
	pace      = 3 * time.Second
)

// Exec runs a command in a pod.
type Exec func(ctx context.Context, c *kube.Client, cmd kube.Command) (kube.Exit, error)

// Activities of one worker.
type Activities struct {
	Clusters  *kube.Clusters
	Artifacts *artifact.Store
	Dial      kube.Dial
	// Exec replaces kube.Client.Exec where pods have no kubelet.
	Exec Exec
	// Pace, when set, replaces how often members are asked.
	Pace time.Duration
}

// Register registers every activity under its name.
func (a *Activities) Register(r worker.Registry) {
	for _, e := range []struct {
		name string
		fn   any
	}{
		{RingActivity, a.Ring}, {SurveyActivity, a.Survey}, {TemplateActivity, a.Template}, {ScaleActivity, a.Scale},
		{LoginsActivity, a.Logins}, {RaiseActivity, a.Raise}, {RepairActivity, a.Repair}, {SnapshotActivity, a.Snapshot},
		{LedgerActivity, a.Ledger}, {AuthErrorsActivity, a.AuthErrors}, {DecommissionActivity, a.Decommission},
	} {
		r.RegisterActivityWithOptions(e.fn, activity.RegisterOptions{Name: e.name})
	}
}

// Place is where the members are.
type Place struct {
	Target    kube.Target `json:"target"`
	Namespace string      `json:"namespace"`
	Members   Members     `json:"members,omitzero"`
	// Release and Holder name the Lease of the run. Every change asks whether
	// the run still holds it; without a holder nothing is asked.
	Release string `json:"release,omitempty"`
	Holder  string `json:"holder,omitempty"`
}

// Members says which pods are members and where they listen.
type Members struct {
	// StatefulSet (default cassandra) owns the pods; its name does not depend
	// on the release's. Container (default cassandra) runs the server.
	StatefulSet string `json:"statefulSet,omitempty"`
	Container   string `json:"container,omitempty"`
	// Port (default 9042) is that of CQL.
	Port int `json:"port,omitempty"`
}

// WithDefaults fills in what the chart of NVCF uses.
func (m Members) WithDefaults() Members {
	if m.StatefulSet == "" {
		m.StatefulSet = "cassandra"
	}
	if m.Container == "" {
		m.Container = "cassandra"
	}
	if m.Port == 0 {
		m.Port = 9042
	}
	return m
}

// Login is the administrator's. It holds a reference only; the password itself
// goes over the CQL protocol and nowhere else (N140).
type Login struct {
	// User is the role (default cassandra), not that of a service.
	User     string           `json:"user,omitempty"`
	Password secret.Reference `json:"password"`
}

// WithDefaults fills in the administrator's role.
func (l Login) WithDefaults() Login {
	if l.User == "" {
		l.User = "cassandra"
	}
	return l
}

func (a *Activities) pace() time.Duration {
	if a.Pace > 0 {
		return a.Pace
	}
	return pace
}
