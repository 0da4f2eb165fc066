// Package openbao has the child runs that back OpenBao up and replace its
// pods, one at a time, standbys first. Each also runs alone. It must do no I/O
// of its own and hold no rule about members: the verdicts of activities/openbao
// decide, and say what comes next.
package openbao

import (
	"fmt"
	"time"

	acts "github.com/refit-run/refit/activities/openbao"

	"github.com/refit-run/refit/activities/artifact"
	"github.com/refit-run/refit/activities/secret"
	"github.com/refit-run/refit/workflows/datastore"
	"github.com/refit-run/refit/workflows/protocol"
	"github.com/refit-run/refit/workflows/rollout/plan"
	"github.com/refit-run/refit/workflows/window"
)

// Site is what every plan of this package says first: which OpenBao is meant
// (default: the release openbao-server in vault-system).
type Site struct {
	datastore.Site
	// Servers says which pods are members, where the chart was changed.
	Servers acts.Servers `json:"servers,omitzero"`
	// Token is a token by reference (default: key root_token of Secret
	// openbao-server-root-token).
	Token *secret.Reference `json:"token,omitempty"`
}

// SnapshotInput is the one JSON value of an OpenBaoSnapshot.
type SnapshotInput struct {
	Site
	// Secrets are stored beside the snapshot, which is useless without them
	// (default: those with the unseal key and the root token).
	Secrets []acts.Held `json:"secrets,omitempty"`
	// Limit is how long an active member is waited for (default 5 m),
	// TransferLimit how long the snapshot may take (default 15 m).
	Limit         window.Duration `json:"limit,omitempty"`
	TransferLimit window.Duration `json:"transferLimit,omitempty"`
}

// SnapshotResult of an OpenBaoSnapshot.
type SnapshotResult struct {
	protocol.Receipt
	// Active is the member that the snapshot was taken from.
	Active    string         `json:"active,omitempty"`
	ClusterID string         `json:"clusterID,omitempty"`
	Snapshot  artifact.Ref   `json:"snapshot,omitzero"`
	Secrets   []artifact.Ref `json:"secrets,omitempty"`
}

// ReplaceInput is the one JSON value of an OpenBaoReplace.
type ReplaceInput struct {
	Site
	// Image is the target of the server's container, with its tag; a registry
	// and a folder in front of it may be left out.
	Image string `json:"image"`
	// Version is what members of that image report (default: what the tag
	// begins with, 2.6.3 of 2.6.3-nv-1.3.7).
	Version string `json:"version,omitempty"`
	// Members is how many there are (default 3).
	Members int `json:"members,omitempty"`
	// ApproveStepDown asks a person before leadership is moved.
	ApproveStepDown bool `json:"approveStepDown,omitempty"`
	// Limit is how long members that are sealed, join or lag are waited for,
	// before each act and after it, until their 5 s of calm begin (default 5 m).
	Limit window.Duration `json:"limit,omitempty"`
	// DeleteLimit (default 3 m) and ReadyLimit (default 5 m) bound the deletion
	// of a pod and the start of the next, TransferLimit (default 1 m) each
	// attempt to move leadership, until the 5 s of calm begin.
	DeleteLimit   window.Duration `json:"deleteLimit,omitempty"`
	ReadyLimit    window.Duration `json:"readyLimit,omitempty"`
	TransferLimit window.Duration `json:"transferLimit,omitempty"`
	Windows       []window.Spec   `json:"windows,omitempty"`
	// Acknowledge names what the plan accepts: "N159", that the plugins, the
	// policies and the PKI are the chart's own. Without it the receipt warns.
	Acknowledge []string `json:"acknowledge,omitempty"`
	// Snapshot is the URL of the Raft snapshot that an OpenBaoSnapshot has stored
	// before (N104): it must be there. Without it the receipt warns.
	Snapshot string `json:"snapshot,omitempty"`
	// PlanOnly stops once it is known which members are to be replaced.
	PlanOnly bool `json:"planOnly,omitempty"`
}

// ReplaceResult of an OpenBaoReplace.
type ReplaceResult struct {
	protocol.Receipt
	ClusterID string `json:"clusterID,omitempty"`
	// Active is the member that leads at the end.
	Active string `json:"active,omitempty"`
	// Images are those of all containers, by pod (N168).
	Images map[string][]string `json:"images,omitempty"`
}

// AcknowledgeStandard records the decision that this procedure is the right one
// and not the patch upgrade runbook (N159).
const AcknowledgeStandard = "N159"

// Limits of the guide, 'Replace the OpenBao pods'.
const (
	defaultLimit    = window.Duration(5 * time.Minute)
	defaultDelete   = window.Duration(3 * time.Minute)
	defaultReady    = window.Duration(5 * time.Minute)
	defaultTransfer = window.Duration(time.Minute)
	// defaultStream is for a snapshot: it grows with what is stored.
	defaultStream  = window.Duration(15 * time.Minute)
	defaultMembers = 3
)

func (s Site) withDefaults() Site {
	out := Site{Site: s.Site.WithDefaults("vault-system", "openbao-server"), Servers: s.Servers.WithDefaults(), Token: s.Token}
	if out.Token == nil {
		out.Token = &secret.Reference{Secret: "openbao-server-root-token", Key: "root_token"}
	}
	return out
}

// Object names the release, for the receipt and the run's ID.
func (s Site) Object() string { return s.withDefaults().Release }

func (in SnapshotInput) withDefaults() SnapshotInput {
	in.Site = in.Site.withDefaults()
	if len(in.Secrets) == 0 {
		in.Secrets = []acts.Held{{Secret: "openbao-server-unseal", Key: "unseal_key"}, {Secret: "openbao-server-root-token", Key: "root_token"}}
	}
	in.Limit = datastore.Or(in.Limit, defaultLimit)
	in.TransferLimit = datastore.Or(in.TransferLimit, defaultStream)
	return in
}

func (in ReplaceInput) withDefaults() ReplaceInput {
	in.Site = in.Site.withDefaults()
	if in.Version == "" {
		in.Version = acts.VersionOf(in.Image)
	}
	if in.Members == 0 {
		in.Members = defaultMembers
	}
	in.Limit = datastore.Or(in.Limit, defaultLimit)
	in.DeleteLimit, in.ReadyLimit = datastore.Or(in.DeleteLimit, defaultDelete), datastore.Or(in.ReadyLimit, defaultReady)
	in.TransferLimit = datastore.Or(in.TransferLimit, defaultTransfer)
	return in
}

func (s Site) check(ps *datastore.Problems) {
	ps.Site(s.Site)
	ps.Port("servers.port", s.Servers.Port)
	if s.Token != nil {
		ps.Reference("token", *s.Token)
	}
}

// Validate returns every problem of the input at once.
func (in SnapshotInput) Validate() []plan.Problem {
	var ps datastore.Problems
	in.check(&ps)
	for i, s := range in.Secrets {
		if s.Secret == "" || s.Key == "" {
			ps.Add(fmt.Sprintf("secrets[%d]", i), "is incomplete: name a Secret and the key that must hold something")
		}
	}
	ps.Limit("limit", in.Limit)
	ps.Limit("transferLimit", in.TransferLimit)
	return ps
}

// Validate returns every problem of the input at once.
func (in ReplaceInput) Validate() []plan.Problem {
	var ps datastore.Problems
	in.check(&ps)
	switch {
	case in.Image == "":
		ps.Add("image", "is missing: name the server image of the target release, as nvcf-openbao:2.6.3-nv-1.3.7")
	case in.Version == "" && acts.VersionOf(in.Image) == "":
		ps.Add("image", "is %q: its tag does not begin with a version; give the version that its members report in version", in.Image)
	}
	if in.Members < 0 || in.Members > 0 && (in.Members < defaultMembers || in.Members%2 == 0) {
		ps.Add("members", "is %d: want 3, 5 or another odd number; with fewer members, or an even number, the quorum does not bear one that is away", in.Members)
	}
	ps.Limit("limit", in.Limit)
	ps.Limit("deleteLimit", in.DeleteLimit)
	ps.Limit("readyLimit", in.ReadyLimit)
	ps.Limit("transferLimit", in.TransferLimit)
	ps.Windows(in.Windows)
	for i, a := range in.Acknowledge {
		if a != AcknowledgeStandard {
			ps.Add(fmt.Sprintf("acknowledge[%d]", i), "is %q: a replacement asks for nothing but %q", a, AcknowledgeStandard)
		}
	}
	return ps
}
