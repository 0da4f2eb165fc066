// Package helm reads, renders, compares and upgrades Helm releases. An upgrade
// runs in a child process that the Lease fences, because the SDK neither stops
// when it is cancelled nor knows about other engines (design, contract 12). It
// must not know what a chart installs, nor use Helm's own rollback.
package helm

import (
	"context"
	"errors"
	"fmt"
	"sort"
	"time"

	"helm.sh/helm/v3/pkg/action"
	"helm.sh/helm/v3/pkg/chart"
	"helm.sh/helm/v3/pkg/release"
	"helm.sh/helm/v3/pkg/storage"
	"helm.sh/helm/v3/pkg/storage/driver"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/refit-run/refit/activities/finding"
	"github.com/refit-run/refit/activities/kube"
)

// Release is a stored revision, manifest, chart and user's values included. It
// holds secrets: it never leaves an activity.
type Release = release.Release

// ReleaseInfo is a revision without anything secret.
type ReleaseInfo struct {
	Name         string    `json:"name"`
	Namespace    string    `json:"namespace"`
	Revision     int       `json:"revision"`
	Status       string    `json:"status"`
	Chart        string    `json:"chart"`
	ChartVersion string    `json:"chartVersion"`
	AppVersion   string    `json:"appVersion"`
	Updated      time.Time `json:"updated"`
	// Description is not masked: a failed revision's may quote an object.
	Description string `json:"-"`
	// Pending: an engine is, or was when it died, at work on it.
	Pending bool `json:"pending,omitempty"`
	// Ours: the revision was made by an engine of Refit, which the Lease fences.
	Ours bool `json:"ours,omitempty"`
}

// History is every stored revision, oldest first, in all states.
type History []ReleaseInfo

// Last is the newest revision.
func (h History) Last() (ReleaseInfo, bool) {
	if len(h) == 0 {
		return ReleaseInfo{}, false
	}
	return h[len(h)-1], true
}

// Deployed is the newest revision in state deployed.
func (h History) Deployed() (ReleaseInfo, bool) {
	for i := len(h) - 1; i >= 0; i-- {
		if h[i].Status == string(release.StatusDeployed) {
			return h[i], true
		}
	}
	return ReleaseInfo{}, false
}

func store(c *kube.Client, namespace string) *storage.Storage {
	secrets := driver.NewSecrets(c.Typed.CoreV1().Secrets(namespace))
	secrets.Log = func(string, ...any) {}
	return storage.Init(secrets)
}

func info(r *Release) ReleaseInfo {
	i := ReleaseInfo{Name: r.Name, Namespace: r.Namespace, Revision: r.Version}
	if r.Info != nil {
		i.Status, i.Description, i.Updated = string(r.Info.Status), r.Info.Description, r.Info.LastDeployed.Time
		i.Pending = r.Info.Status.IsPending()
	}
	if r.Chart != nil && r.Chart.Metadata != nil {
		i.Chart, i.ChartVersion, i.AppVersion = r.Chart.Metadata.Name, r.Chart.Metadata.Version, r.Chart.Metadata.AppVersion
	}
	i.Ours = r.Labels[engineLabel] != "" && madeHere(r)
	return i
}

// Releases lists every revision of a release. A release that does not exist
// has an empty history.
func Releases(ctx context.Context, c *kube.Client, namespace, name string) (History, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	stored, err := store(c, namespace).History(name)
	if err != nil && !errors.Is(err, driver.ErrReleaseNotFound) {
		return nil, kube.Wrap(err, fmt.Sprintf("history of release %s/%s", namespace, name))
	}
	history := make(History, 0, len(stored))
	for _, r := range stored {
		history = append(history, info(r))
	}
	sort.Slice(history, func(i, j int) bool { return history[i].Revision < history[j].Revision })
	return history, nil
}

// Current is the deployed revision.
func Current(ctx context.Context, c *kube.Client, namespace, name string) (*Release, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	r, err := store(c, namespace).Deployed(name)
	if errors.Is(err, driver.ErrNoDeployedReleases) || errors.Is(err, driver.ErrReleaseNotFound) {
		return nil, finding.Finding{
			Object: fmt.Sprintf("release %s/%s", namespace, name), Expected: "a revision in state deployed", Found: "none",
			Next: fmt.Sprintf("look at `helm -n %s history %s`", namespace, name),
		}.Error(finding.Stop)
	}
	return r, kube.Wrap(err, fmt.Sprintf("release %s/%s", namespace, name))
}

// Stamp is when the API server stored the revision, which an engine does before
// it changes anything: the clock by which the cluster's objects are dated.
func Stamp(ctx context.Context, c *kube.Client, r *Release) (time.Time, error) {
	name := fmt.Sprintf("sh.helm.release.v1.%s.v%d", r.Name, r.Version)
	s, err := c.Typed.CoreV1().Secrets(r.Namespace).Get(ctx, name, metav1.GetOptions{})
	if err != nil {
		return time.Time{}, kube.Wrap(err, "Secret/"+r.Namespace+"/"+name)
	}
	return s.CreationTimestamp.UTC(), nil
}

// Stored is one revision of a release.
func Stored(ctx context.Context, c *kube.Client, namespace, name string, revision int) (*Release, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	r, err := store(c, namespace).Get(name, revision)
	if errors.Is(err, driver.ErrReleaseNotFound) {
		return nil, finding.Finding{
			Object: fmt.Sprintf("release %s/%s revision %d", namespace, name, revision), Expected: "to be stored", Found: "no such revision",
			Next: fmt.Sprintf("choose one of `helm -n %s history %s`; Helm keeps only the newest ones", namespace, name),
		}.Error(finding.Stop)
	}
	return r, kube.Wrap(err, fmt.Sprintf("release %s/%s revision %d", namespace, name, revision))
}

// CheckChart fails when a chart is not whole: Helm does not store the
// subcharts of a release, so a chart taken from a revision may lack them.
func CheckChart(c *chart.Chart) error {
	if c == nil || c.Metadata == nil {
		return finding.Finding{Object: "chart", Expected: "a chart with metadata", Found: "none"}.Error(finding.Stop)
	}
	if err := action.CheckDependencies(c, c.Metadata.Dependencies); err != nil {
		return finding.Finding{
			Object: "chart " + c.Name() + " " + c.Metadata.Version, Expected: "its subcharts", Found: err.Error(),
			Next: "a stored revision keeps no subcharts: name the chart by reference and version",
		}.Error(finding.Stop)
	}
	return nil
}
