package nats

import (
	"go.temporal.io/sdk/workflow"

	acts "github.com/refit-run/refit/activities/nats"

	"github.com/refit-run/refit/workflows/datastore"
	"github.com/refit-run/refit/workflows/window"
)

// run is what the three workflows have in common.
type run struct {
	*datastore.Run
	servers acts.Servers
	// held are the streams that were not empty when an attempt last saw them.
	held []acts.Record
}

func newRun(ctx workflow.Context, kind string, site Site, windows []window.Spec) (*run, error) {
	site = site.withDefaults()
	shared, err := datastore.New(ctx, datastore.Options{Kind: kind, Site: site.Site, Windows: windows, Look: acts.LookLimit})
	if err != nil {
		return nil, err
	}
	return &run{Run: shared, servers: site.Servers}, nil
}

func (r *run) place() acts.Place {
	return acts.Place{Target: r.Site.Target, Namespace: r.Site.Namespace, Servers: r.servers, Release: r.Site.Release, Holder: r.Site.Holder}
}
