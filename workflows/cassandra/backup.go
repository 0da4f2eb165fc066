package cassandra

import (
	"fmt"
	"time"

	"go.temporal.io/sdk/workflow"

	acts "github.com/refit-run/refit/activities/cassandra"

	"github.com/refit-run/refit/workflows/datastore"
	"github.com/refit-run/refit/workflows/protocol"
	"github.com/refit-run/refit/workflows/release"
	"github.com/refit-run/refit/workflows/stage"
	"github.com/refit-run/refit/workflows/window"
)

const defaultBackup = window.Duration(15 * time.Minute)

// backup is one CassandraBackup.
type backup struct {
	*run
	in    BackupInput
	limit window.Duration
	out   BackupResult
}

// Backup flushes every member and snapshots it under a tag (N84, N94-N96). The
// snapshots lie on the members' volumes: somebody copies these off the cluster
// and says so.
func Backup(ctx workflow.Context, in BackupInput) (BackupResult, error) {
	if problems := in.Validate(); len(problems) > 0 {
		return BackupResult{}, release.BadInput("input", problems)
	}
	shared, err := newRun(ctx, protocol.CassandraBackup, in.Site, acts.Login{}, Limits{}, in.Windows)
	if err != nil {
		return BackupResult{}, err
	}
	b := &backup{run: shared, in: in, limit: datastore.Or(in.Limit, defaultBackup)}
	outcome, err := b.Through(
		stage.Stage{Name: "ring", Purpose: "see that every member is up, and record how many there are", Do: b.count},
		stage.Stage{Name: "snapshot", Purpose: "flush and snapshot every member, one after the other", Mutates: true, Do: b.snapshot},
		stage.Stage{Name: "copy", Purpose: "have the volumes copied off the cluster", Do: b.copied})
	if err != nil {
		return BackupResult{}, err
	}
	b.out.Receipt = b.Close(outcome)
	return b.out, nil
}

func (b *backup) count(ctx workflow.Context, s *stage.Scope) error {
	err := b.look(ctx, s, 0, "N84", b.limit)
	b.out.Members = len(b.ring.Members)
	return err
}

func (b *backup) snapshot(ctx workflow.Context, s *stage.Scope) error {
	b.out.Snapshots = nil
	for i, pod := range b.ring.Members {
		if err := s.Safe(ctx); err != nil {
			return err
		}
		s.Current(pod)
		s.Progress(i, len(b.ring.Members), 0)
		var got acts.SnapshotResult
		err := b.Do(ctx, s, acts.SnapshotActivity, "snapshot "+pod+" under "+b.in.Tag, 2*b.limit+window.Duration(5*time.Minute),
			acts.SnapshotRequest{Place: b.place(), Pod: pod, Tag: b.in.Tag, Limit: b.limit.D()}, &got)
		if err != nil {
			return err
		}
		b.Keep(got.Evidence)
		b.out.Snapshots = append(b.out.Snapshots, got)
	}
	s.Progress(len(b.ring.Members), len(b.ring.Members), 0)
	s.Note("snapshot %s on %d members", b.in.Tag, len(b.out.Snapshots))
	return nil
}

// copied asks for the copy off the cluster (N96); the plan may name one.
func (b *backup) copied(ctx workflow.Context, s *stage.Scope) error {
	if b.in.Copied != "" {
		s.Note("copied off the cluster, says the plan: %s", b.in.Copied)
		return nil
	}
	return s.Gate(ctx, stage.Gate{
		Found: fmt.Sprintf("snapshot %s lies on the volumes of %d members, and nowhere else", b.in.Tag, len(b.out.Snapshots)),
		Why:   "N96: a volume that is lost takes its snapshot along",
		Helps: "copy or snapshot the volumes off the cluster by the storage provider's procedure, then approve and say in the comment where the copy is",
	})
}
