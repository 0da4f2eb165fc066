package openbao

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/url"
	"time"

	"github.com/openbao/openbao/api/v2"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"

	"github.com/refit-run/refit/activities/artifact"
	"github.com/refit-run/refit/activities/evidence"
	"github.com/refit-run/refit/activities/finding"
)

// Held is a key of a Secret without which a snapshot is useless.
type Held struct {
	Secret string `json:"secret"`
	Key    string `json:"key"`
}

// SnapshotRequest stores a Raft snapshot and what opens it.
type SnapshotRequest struct {
	Place
	// Secrets are stored beside the snapshot, whole; their keys must hold
	// something.
	Secrets []Held `json:"secrets"`
	// Limit is how long an active member is waited for, Transfer how long the
	// snapshot may take.
	Limit    time.Duration `json:"limit"`
	Transfer time.Duration `json:"transfer"`
}

// SnapshotResult names what was stored; with findings nothing was.
type SnapshotResult struct {
	// Active is the member that was active before and after.
	Active    string            `json:"active,omitempty"`
	ClusterID string            `json:"clusterID,omitempty"`
	Snapshot  artifact.Ref      `json:"snapshot,omitzero"`
	Secrets   []artifact.Ref    `json:"secrets,omitempty"`
	Findings  []finding.Finding `json:"findings,omitempty"`
	Evidence  evidence.Trail    `json:"evidence"`
}

// Snapshot is the activity openbao.Snapshot (N97-N99, N102, N104). The archive
// is streamed from the active member into the store, encrypted on the way; no
// file is left in the pod or on the worker. It is committed only when it was
// whole and the same member, followed by a majority, was active before and
// after: a member without quorum answers with a snapshot too.
func (a *Activities) Snapshot(ctx context.Context, r SnapshotRequest) (out SnapshotResult, err error) {
	if err := a.Artifacts.CheckRecipients(); err != nil {
		return out, finding.InRow(err, "N102")
	}
	l, err := a.looker(ctx, r.Place)
	if err != nil {
		return out, err
	}
	defer l.close()
	defer func() { out.Evidence = l.record.Trail }()
	secrets, err := l.secrets(ctx, r.Secrets)
	if err != nil {
		return out, err
	}
	for range SnapshotTries {
		var active Member
		err = l.until(ctx, r.Limit, func(v View) verdict {
			active, out.Findings = leading(v)
			return verdict{len(out.Findings) == 0, evidence.InWords(out.Findings), out}
		})
		if err != nil || len(out.Findings) > 0 {
			return out, err
		}
		out.Active, out.ClusterID = active.Pod, active.ClusterID
		if out.Snapshot, err = l.store(ctx, active, r.Transfer); err == nil {
			break
		}
		if err = l.snapshotError(active, err); !errors.Is(err, errArchive) {
			return out, err
		}
	}
	if err != nil {
		return out, broken(out.Active, err).Error(finding.Stop)
	}
	if _, err := evidence.Store(ctx, a.Artifacts, takenName, 1, taken{ClusterID: out.ClusterID, Cluster: r.Target.Cluster, Namespace: r.Namespace, At: time.Now().UTC()}); err != nil {
		return out, finding.InRow(err, "N104")
	}
	for _, s := range secrets {
		ref, err := a.Artifacts.Put(ctx, evidence.Key(ctx, s.name+".yaml"), artifact.Secret, 1, func(w io.Writer) error {
			_, err := w.Write(s.text)
			return err
		})
		if err != nil {
			return out, finding.InRow(err, "N99")
		}
		out.Secrets = append(out.Secrets, ref)
	}
	return out, nil
}

// The ends of the names of a stored snapshot and of what is known of it.
const (
	snapshotName = "openbao.snap"
	takenName    = "openbao.json"
)

// taken says of what a snapshot is and when it was taken.
type taken struct {
	// ClusterID is OpenBao's own, Cluster the name in the plan.
	ClusterID string    `json:"clusterID"`
	Cluster   string    `json:"cluster"`
	Namespace string    `json:"namespace"`
	At        time.Time `json:"at"`
}

// SnapshotTries is how often a snapshot that broke off is asked for again.
const SnapshotTries = 3

// leading is the active member, with a majority of all behind it.
func leading(v View) (Member, []finding.Finding) {
	f := finding.Finding{Row: "N97", Object: "OpenBao in " + v.Set.Name, Expected: "one active member that a majority follows",
		Why:  "a snapshot of any other member is incomplete or out of date",
		Next: "bring the members back: " + sealedHint}
	active, none := v.Active()
	if f.Found = none; none != "" {
		return Member{}, []finding.Finding{f}
	}
	following := 0
	for _, m := range v.Members {
		if m.serving() {
			following++
		}
	}
	if following*2 <= v.Set.Replicas {
		f.Found = fmt.Sprintf("%s is active, and %d of %d members serve", active.Pod, following, v.Set.Replicas)
		return Member{}, []finding.Finding{f}
	}
	return active, nil
}

// stillLeading is what stands against a snapshot that has come: another member
// may have become active while it was taken.
func stillLeading(v View, before Member) []finding.Finding {
	after, found := leading(v)
	if len(found) == 0 && after.UID != before.UID {
		found = []finding.Finding{{Row: "N97", Object: "OpenBao in " + v.Set.Name, Expected: before.Pod + " active after the snapshot as before", Found: after.Pod + " is",
			Next: "nothing was stored; it is asked for again"}}
	}
	return found
}

// store streams the snapshot of a member into the artifact store.
func (l *looker) store(ctx context.Context, active Member, limit time.Duration) (artifact.Ref, error) {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	l.record.Say("snapshot of " + active.Pod)
	var broke error // the store's own words would hide what it was
	ref, err := l.a.Artifacts.Put(ctx, evidence.Key(ctx, snapshotName), artifact.Secret, len(archiveFiles), func(w io.Writer) error {
		kept := &noted{to: w}
		if broke = l.stream(ctx, active, kept); kept.err != nil && ctx.Err() == nil {
			broke = nil // the store itself says what is wrong with it
			return kept.err
		}
		if broke != nil {
			return broke
		}
		v, err := l.look(ctx)
		if err != nil {
			return err
		}
		if found := stillLeading(v, active); len(found) > 0 {
			return found[0].Error(finding.Retry)
		}
		return nil
	})
	if broke != nil {
		err = broke
	}
	return ref, err
}

// noted remembers that it could not write.
type noted struct {
	to  io.Writer
	err error
}

func (n *noted) Write(p []byte) (int, error) {
	k, err := n.to.Write(p)
	if err != nil {
		n.err = err
	}
	return k, err
}

// stream writes the archive to w and checks it on the way. An archive that
// breaks off, on the wire or because its time is over, is one that is not
// whole; a member that gives none out is another matter.
func (l *looker) stream(ctx context.Context, active Member, w io.Writer) error {
	in, out := io.Pipe()
	checked := make(chan error, 1)
	go func() {
		err := checkArchive(in)
		// What is bad already still comes to its end, which tells more.
		_, _ = io.Copy(io.Discard, in)
		checked <- err
	}()
	err := l.servers[active.UID].snapshot(ctx, io.MultiWriter(w, out))
	out.Close()
	bad := <-checked
	var unasked *url.Error
	var refused *api.ResponseError
	switch {
	case err == nil, bad != nil && errors.Is(err, api.ErrIncompleteSnapshot): // ours says where it ends
		return bad
	case errors.Is(ctx.Err(), context.DeadlineExceeded):
		return fmt.Errorf("%w: %w: %w", errArchive, errSlow, err)
	case ctx.Err() != nil, errors.As(err, &unasked), errors.As(err, &refused), errors.Is(err, errDenied):
		return err
	}
	return fmt.Errorf("%w: it breaks off: %w", errArchive, err)
}

// snapshotError gives an error its class; that of a broken archive depends on
// how often it was tried.
func (l *looker) snapshotError(active Member, err error) error {
	switch _, _, told := finding.Of(err); {
	case told, errors.Is(err, errArchive), errors.Is(err, context.Canceled):
		return err
	case errors.Is(err, errDenied):
		return l.denied(active.Pod, err)
	}
	return broken(active.Pod, err).Error(finding.Retry)
}

// errSlow marks a snapshot that was still on its way when its time was over.
var errSlow = errors.New("it did not come within its time")

func broken(pod string, err error) finding.Finding {
	f := finding.Finding{Row: "N98", Object: "Raft snapshot of " + pod, Expected: "a whole archive", Found: inShort(err),
		Why: "a snapshot that breaks off can't be restored", Next: "nothing was stored: look at the member's log, at its disk and at its seal, then retry"}
	if errors.Is(err, errSlow) {
		f.Next = "nothing was stored: abort, raise transferLimit in the plan and start again; a retry has no more time. It grows with what is stored and with the way to the artifact store"
	}
	return f
}

type stored struct {
	name string
	text []byte
}

// secrets reads the Secrets before the snapshot is taken: with an empty unseal
// key nothing could be restored from it.
func (l *looker) secrets(ctx context.Context, held []Held) ([]stored, error) {
	var out []stored
	ns := l.place.Namespace
	for _, h := range held {
		what := fmt.Sprintf("Secret/%s/%s", ns, h.Secret)
		s, err := l.client.Typed.CoreV1().Secrets(ns).Get(ctx, h.Secret, metav1.GetOptions{})
		if err != nil {
			return nil, finding.InRow(absent(err, what, "a Secret that belongs to the snapshot", "secrets"), "N99")
		}
		if len(s.Data[h.Key]) == 0 {
			return nil, finding.Finding{Row: "N99", Object: what, Expected: "a value under " + h.Key, Found: "none",
				Why: "a snapshot is useless without it", Next: "find out where the key is kept and name that Secret in the plan"}.Error(finding.Stop)
		}
		s.TypeMeta = metav1.TypeMeta{APIVersion: corev1.SchemeGroupVersion.String(), Kind: "Secret"}
		s.ManagedFields = nil
		text, err := yaml.Marshal(s)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", what, err)
		}
		out = append(out, stored{h.Secret, text})
	}
	return out, nil
}
