package openbao

import (
	"fmt"

	"go.temporal.io/sdk/workflow"

	acts "github.com/refit-run/refit/activities/openbao"

	"github.com/refit-run/refit/workflows/datastore"
	"github.com/refit-run/refit/workflows/protocol"
	"github.com/refit-run/refit/workflows/release"
	"github.com/refit-run/refit/workflows/stage"
	"github.com/refit-run/refit/workflows/window"
)

// run is what the two workflows have in common.
type run struct {
	*datastore.Run
	site Site
}

func newRun(ctx workflow.Context, kind string, site Site, windows []window.Spec) (*run, error) {
	shared, err := datastore.New(ctx, datastore.Options{Kind: kind, Site: site.Site, Windows: windows, Look: acts.LookLimit})
	if err != nil {
		return nil, err
	}
	return &run{Run: shared, site: site}, nil
}

func (r *run) place() acts.Place {
	return acts.Place{Target: r.Site.Target, Namespace: r.Site.Namespace, Servers: r.site.Servers, Token: *r.site.Token,
		Release: r.Site.Release, Holder: r.Site.Holder}
}

// Snapshot stores a Raft snapshot of the active member and the Secrets without
// which it is useless (N97-N99, N102, N104). It changes nothing in the cluster.
func Snapshot(ctx workflow.Context, in SnapshotInput) (SnapshotResult, error) {
	if problems := in.Validate(); len(problems) > 0 {
		return SnapshotResult{}, release.BadInput("input", problems)
	}
	in = in.withDefaults()
	r, err := newRun(ctx, protocol.OpenBaoSnapshot, in.Site, nil)
	if err != nil {
		return SnapshotResult{}, err
	}
	var out SnapshotResult
	outcome, err := r.Through(stage.Stage{Name: "snapshot", Purpose: "store a whole Raft snapshot of the active member, and what unseals it",
		Do: func(ctx workflow.Context, s *stage.Scope) error { return r.snapshot(ctx, s, in, &out) }})
	if err != nil {
		return SnapshotResult{}, err
	}
	out.Receipt = r.Close(outcome)
	return out, nil
}

func (r *run) snapshot(ctx workflow.Context, s *stage.Scope, in SnapshotInput, out *SnapshotResult) error {
	var got acts.SnapshotResult
	err := r.Do(ctx, s, acts.SnapshotActivity, "snapshot of OpenBao in "+r.Site.Namespace, acts.SnapshotTries*(in.Limit+in.TransferLimit),
		acts.SnapshotRequest{Place: r.place(), Secrets: in.Secrets, Limit: in.Limit.D(), Transfer: in.TransferLimit.D()}, &got)
	if err != nil {
		return err
	}
	r.Keep(got.Evidence)
	if len(got.Findings) > 0 {
		return datastore.Parking(got.Findings)
	}
	out.Active, out.ClusterID, out.Snapshot, out.Secrets = got.Active, got.ClusterID, got.Snapshot, got.Secrets
	r.Artifact(got.Snapshot)
	for _, ref := range got.Secrets {
		r.Artifact(ref)
	}
	s.Note("%s", fmt.Sprintf("snapshot of %s (cluster %s) as %s, %d bytes, with %d Secrets",
		got.Active, got.ClusterID, got.Snapshot.URL, got.Snapshot.Size, len(got.Secrets)))
	return nil
}
