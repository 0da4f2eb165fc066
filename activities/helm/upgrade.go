package helm

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/google/uuid"
	"helm.sh/helm/v3/pkg/chart"
	"helm.sh/helm/v3/pkg/release"

	"github.com/refit-run/refit/activities/finding"
	"github.com/refit-run/refit/activities/kube"
	"github.com/refit-run/refit/activities/lease"
	"github.com/refit-run/refit/activities/mask"
)

// FieldManager is the field manager of everything that Helm writes, the same
// as of helm's own command line, so that both own the same fields.
const FieldManager = "helm"

// UpgradeRequest says what the release shall become. Values are complete: the
// release's former values are not reused by Helm.
type UpgradeRequest struct {
	Target    kube.Target
	Namespace string
	Release   string
	Chart     *chart.Chart
	Values    map[string]any
	Pins      []Pin
	// Holder must hold the release's Lease, before and during the upgrade.
	Holder string
	// Mark identifies the intent (its digest). It is stored with the revision,
	// so that an attempt whose reply was lost is recognised.
	Mark string
	// SecretPaths are the dotted paths of Values that came from a secrets file or
	// a reference. They are stored with the revision: who shows a diff later must
	// know what to mask, and the keys do not always tell.
	SecretPaths []string
	// FromRevision is the deployed revision that the intent was planned from;
	// another one stops the upgrade. 0 accepts any.
	FromRevision int
	// Limit is the deadline of the whole act, hooks and readiness included; the
	// child is gone at the latest killGrace after it.
	Limit time.Duration
	// Heartbeat gets the engine's last line, masked, about once a second.
	Heartbeat func(note string)
	// Masker knows the release's secrets; errors and notes go through it.
	Masker *mask.Masker
}

// UpgradeResult names the revision that stands now.
type UpgradeResult struct {
	Revision int
	// Already: a former attempt had done it.
	Already bool
	// Recovered is the pending revision of a dead engine that was marked
	// failed on the way; 0 when there was none.
	Recovered int
}

// secretsMark stands before the JSON list of secret paths in a description.
const secretsMark = ", secret values at "

// markOf begins the description under which a revision of an intent is stored.
func markOf(mark string) string { return "Upgrade complete by refit, intent " + mark }

// description is what the revision is stored under.
func (r UpgradeRequest) description() string {
	if len(r.SecretPaths) == 0 {
		return markOf(r.Mark)
	}
	paths, err := json.Marshal(r.SecretPaths)
	if err != nil { // a list of texts always has JSON
		return markOf(r.Mark)
	}
	return markOf(r.Mark) + secretsMark + string(paths)
}

// made reports whether a description is of this intent.
func (r UpgradeRequest) made(description string) bool {
	mark, _, _ := strings.Cut(description, secretsMark)
	return mark == markOf(r.Mark)
}

// SecretPaths are those that the revision was stored with.
func SecretPaths(r *Release) []string {
	if r == nil || r.Info == nil {
		return nil
	}
	_, list, found := strings.Cut(r.Info.Description, secretsMark)
	var paths []string
	if !found || json.Unmarshal([]byte(list), &paths) != nil {
		return nil
	}
	return paths
}

// Upgrade brings the release to the request in a child process. It may be run
// again at any point: a revision with the same mark that is deployed is
// answered as done; one left pending by a dead engine is marked failed and the
// upgrade is made anew. Cancelling the context kills the child at once.
func Upgrade(ctx context.Context, c *kube.Client, r UpgradeRequest) (UpgradeResult, error) {
	result, err := upgrade(ctx, c, r)
	return result, r.Masker.Error(err)
}

func upgrade(ctx context.Context, c *kube.Client, r UpgradeRequest) (UpgradeResult, error) {
	var result UpgradeResult
	if err := r.validate(); err != nil {
		return result, err
	}
	recovered, engine, err := takeOver(ctx, c, r.Namespace, r.Release, r.Holder, r.Heartbeat)
	if err != nil {
		return result, err
	}
	result.Recovered = recovered
	history, err := Releases(ctx, c, r.Namespace, r.Release)
	if err != nil {
		return result, err
	}
	if deployed, ok := history.Deployed(); ok && r.made(deployed.Description) {
		result.Revision, result.Already = deployed.Revision, true
		return result, nil
	}
	if err := r.checkBase(history); err != nil {
		return result, err
	}
	result.Revision, err = runChild(ctx, c, r, engine)
	return result, err
}

func (r UpgradeRequest) validate() error {
	var missing []string
	for _, field := range []struct {
		name string
		ok   bool
	}{
		{"Namespace", r.Namespace != ""}, {"Release", r.Release != ""}, {"Holder", r.Holder != ""},
		{"Mark", r.Mark != ""}, {"Limit", r.Limit > 0}, {"Target.UID", r.Target.UID != ""},
	} {
		if !field.ok {
			missing = append(missing, field.name)
		}
	}
	if len(missing) > 0 {
		return finding.Finding{Object: fmt.Sprintf("upgrade of release %s/%s", r.Namespace, r.Release),
			Expected: "a complete request", Found: "no " + strings.Join(missing, ", ")}.Error(finding.Stop)
	}
	return CheckChart(r.Chart)
}

// checkBase compares the deployed revision with the one the plan was made on.
// Between Helm's two last writes no revision is deployed; then the newest
// superseded one is what counts.
func (r UpgradeRequest) checkBase(h History) error {
	base, found := 0, "no stored revision"
	if deployed, ok := h.Deployed(); ok {
		base = deployed.Revision
	} else {
		for _, i := range h {
			if i.Status == string(release.StatusSuperseded) {
				base = i.Revision
			}
		}
	}
	if base > 0 {
		found = fmt.Sprintf("revision %d", base)
	}
	if base > 0 && (r.FromRevision == 0 || base == r.FromRevision) {
		return nil
	}
	expected := "a deployed revision to upgrade"
	if r.FromRevision > 0 {
		expected = fmt.Sprintf("revision %d, from which the plan was made", r.FromRevision)
	}
	return finding.Finding{
		Object: fmt.Sprintf("release %s/%s", r.Namespace, r.Release), Expected: expected, Found: found,
		Why:  "somebody upgraded or rolled back the release since; the approved diff no longer holds",
		Next: fmt.Sprintf("look at `helm -n %s history %s`, then start a new run", r.Namespace, r.Release),
	}.Error(finding.Stop)
}

// fenceMargin is how long an engine may still write after the Lease names
// another: it looks at the Lease at most fenceAge before each write.
const fenceMargin = 3 * time.Second

// takeOver makes this process the only engine: it writes a new engine name
// into the Lease, waits until a former engine must have stopped writing, and
// marks the revision that such an engine left pending as failed. Nothing is
// rolled back.
func takeOver(ctx context.Context, c *kube.Client, namespace, name, holder string, heartbeat func(string)) (recovered int, engine string, err error) {
	engine = uuid.NewString()
	if _, err := lease.ClaimEngine(ctx, c.Typed, namespace, name, holder, engine); err != nil {
		return 0, "", err
	}
	history, err := Releases(ctx, c, namespace, name)
	if err != nil {
		return 0, "", err
	}
	last, ok := history.Last()
	if !ok || !last.Pending {
		return 0, engine, nil
	}
	if !last.Ours {
		return 0, "", pendingError(last)
	}
	if err := wait(ctx, fenceMargin, heartbeat, fmt.Sprintf("revision %d is %s; waiting until its engine must have stopped", last.Revision, last.Status)); err != nil {
		return 0, "", err
	}
	recovered, err = markFailed(ctx, c, namespace, name, holder, engine)
	return recovered, engine, err
}

func pendingError(i ReleaseInfo) error {
	return finding.Finding{
		Object:   fmt.Sprintf("release %s/%s", i.Namespace, i.Name),
		Expected: "no operation in progress",
		Found:    fmt.Sprintf("revision %d is %s since %s and was not begun by Refit", i.Revision, i.Status, i.Updated.UTC().Format(time.RFC3339)),
		Why:      "another Helm may be at work on it; two engines on one release destroy it",
		Next:     fmt.Sprintf("wait for it; once it is proven dead, `helm -n %s rollback` or delete Secret sh.helm.release.v1.%s.v%d", i.Namespace, i.Name, i.Revision),
	}.Error(finding.Stop)
}

func markFailed(ctx context.Context, c *kube.Client, namespace, name, holder, engine string) (int, error) {
	if err := lease.Verify(ctx, c.Typed, namespace, name, holder, engine); err != nil {
		return 0, err
	}
	releases := store(c, namespace)
	last, err := releases.Last(name)
	if err != nil {
		return 0, kube.Wrap(err, fmt.Sprintf("release %s/%s", namespace, name))
	}
	if !last.Info.Status.IsPending() {
		return 0, nil // it came to its end while we waited
	}
	if last.Info.Status == release.StatusPendingInstall {
		return 0, finding.Finding{
			Object: fmt.Sprintf("release %s/%s revision %d", namespace, name, last.Version), Expected: "an installed release", Found: "an install that never ended",
			Next: "look at what it made, then uninstall and install anew",
		}.Error(finding.Stop)
	}
	was := last.Info.Status
	last.Info.Status = release.StatusFailed
	last.Info.Description = fmt.Sprintf("Marked failed by refit: its engine died while the revision was %s", was)
	if err := releases.Update(last); err != nil {
		return 0, kube.Wrap(err, fmt.Sprintf("mark revision %d of release %s/%s failed", last.Version, namespace, name))
	}
	return last.Version, nil
}

// wait is a timer with heartbeats.
func wait(ctx context.Context, d time.Duration, heartbeat func(string), note string) error {
	until := time.NewTimer(d)
	defer until.Stop()
	beat := time.NewTicker(time.Second)
	defer beat.Stop()
	for {
		if heartbeat != nil {
			heartbeat(note)
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-until.C:
			return nil
		case <-beat.C:
		}
	}
}

// classOf tells what an error of the Helm engine means. Helm joins the errors
// of several objects into one text, so the way to the server is also known by
// its words; everything else needs a person.
func classOf(err error) finding.Class {
	if errors.Is(err, context.DeadlineExceeded) {
		return finding.Stop
	}
	text := err.Error()
	for _, passing := range []string{
		"connection refused", "connection reset", "unexpected EOF", "http2: client connection lost", "i/o timeout",
		"TLS handshake timeout", "the object has been modified", "etcdserver:", "the server is currently unable to handle the request",
		"Too many requests", "apiserver is shutting down", "the server was unable to return a response",
	} {
		if strings.Contains(text, passing) {
			return finding.Retry
		}
	}
	return finding.Stop
}
