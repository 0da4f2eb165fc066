package world

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"time"

	"golang.org/x/sync/errgroup"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/cache"
	toolswatch "k8s.io/client-go/tools/watch"

	"github.com/refit-run/refit/sandbox/charts"
	"github.com/refit-run/refit/sandbox/controller"
	"github.com/refit-run/refit/sandbox/controlplane"
	"github.com/refit-run/refit/sandbox/endpoints"
	"github.com/refit-run/refit/sandbox/folder"
	"github.com/refit-run/refit/sandbox/kwok"
	"github.com/refit-run/refit/sandbox/registry"
	"github.com/refit-run/refit/sandbox/release"
	"github.com/refit-run/refit/sandbox/tensorfusion"
)

// releaseName is the one that the chart's fixed names need.
const releaseName = "tensor-fusion-sys"

// What the operator's values say about the database.
const (
	greptimeUser     = "refit"
	greptimePassword = "fake-greptime-password-0000"
)

// sampleImage is what the sample applications run.
const sampleImage = registry.Host + "/apps/sample:1.0.0"

// installTimeout covers the chart's hooks.
const installTimeout = 2 * time.Minute

// publish pushes every chart and every image that one may name.
func (w *World) publish(ctx context.Context) error {
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(4)
	images := map[string]bool{}
	for _, version := range charts.Versions() {
		archive, err := charts.Archive(version)
		if err != nil {
			return err
		}
		if err := w.registry.PushChart(archive, charts.Name, version); err != nil {
			return err
		}
		for _, image := range charts.Images(version) {
			images[image] = true
		}
	}
	for _, image := range append(charts.Upgrades(), sampleImage) {
		images[image] = true
	}
	for image := range images {
		group.Go(func() error { return w.registry.PushImage(ctx, image) })
	}
	if err := group.Wait(); err != nil {
		return err
	}
	w.report(fmt.Sprintf("the registry serves %d charts and %d images at %s", len(charts.Versions()), len(images), w.registry.Address()))
	return nil
}

// startTensorFusion installs the release, starts the double and waits until
// it has brought up every node; then come the sample applications.
func (w *World) startTensorFusion(ctx context.Context) error {
	cfg, err := w.plane.Config(controlplane.TensorFusion)
	if err != nil {
		return err
	}
	options := tensorfusion.Options{
		Config: cfg, Namespace: Namespace, Release: releaseName, GPUsPerNode: w.state.Options.GPUs, LeaseDuration: w.state.Options.Lease,
		WebhookAddr: folder.Address(w.state.Ports.Webhook), APIAddr: folder.Address(w.state.Ports.ControllerAPI),
		Log: slog.With("part", "tensorfusion"),
	}
	if w.state.Options.Controller != "" {
		// The controller's port is the real one's.
		options.HypervisorsOnly, options.WebhookAddr, options.APIAddr = true, controller.WebhookAddr, ""
	}
	if w.double, err = tensorfusion.New(options); err != nil {
		return err
	}
	addresses, err := kwok.Addresses(w.state.Options.Pools, w.state.Ports)
	if err != nil {
		return err
	}
	if w.pods, err = endpoints.ServeHypervisors(addresses, w.double.APIAddr()); err != nil {
		return err
	}
	if err := endpoints.Forward(ctx, w.dynamic, Namespace, addresses, w.state.Ports.ControllerAPI); err != nil {
		return err
	}
	version := w.state.Options.Chart
	archive, err := charts.Archive(version)
	if err != nil {
		return err
	}
	err = release.Install(ctx, release.Release{
		Name: releaseName, Namespace: Namespace, Kubeconfig: w.plane.Kubeconfig(controlplane.Sandbox),
		Archive: archive, Values: w.values(), Timeout: installTimeout,
	})
	if err != nil {
		return err
	}
	w.report(fmt.Sprintf("TensorFusion chart %s is installed", version))
	w.task("tensorfusion", w.double.Run)
	if w.state.Options.Controller != "" {
		if err := w.startController(ctx); err != nil {
			return err
		}
	}
	if err := w.clusterRunning(ctx); err != nil {
		return err
	}
	w.report(fmt.Sprintf("TensorFusion runs a hypervisor on %d nodes", w.state.Options.Nodes()))
	if w.state.Complete {
		return nil
	}
	return w.double.Seed(ctx)
}

// startController runs the real controller instead of the double's.
func (w *World) startController(ctx context.Context) error {
	cert, key := w.double.WebhookCertificate()
	c := controller.New(controller.Options{
		Kube: w.kube, Program: w.state.Options.Controller, Dir: w.folder.Path("controller"),
		Kubeconfig: w.plane.Kubeconfig(controlplane.TensorFusion), Namespace: Namespace, Release: releaseName,
		APIPort: w.state.Ports.ControllerAPI, ProbePort: w.state.Ports.ControllerProbes, Cert: cert, Key: key,
	})
	w.mu.Lock()
	w.real = c
	w.mu.Unlock()
	if err := os.MkdirAll(w.folder.Path("controller"), 0o700); err != nil {
		return err
	}
	if err := c.Start(ctx); err != nil {
		return err
	}
	w.task("controller", c.Follow)
	w.report("the real TensorFusion controller runs: " + w.state.Options.Controller)
	return nil
}

var clusterResource = schema.GroupVersionResource{Group: "tensor-fusion.ai", Version: "v1", Resource: "tensorfusionclusters"}

// clusterRunning watches until the TensorFusionCluster says Running: then all
// its pools and nodes do.
func (w *World) clusterRunning(ctx context.Context) error {
	api := w.dynamic.Resource(clusterResource)
	lw := &cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) { return api.List(ctx, o) },
		WatchFuncWithContext: func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
			return api.Watch(ctx, o)
		},
	}
	phase := "no TensorFusionCluster"
	_, err := toolswatch.UntilWithSync(ctx, lw, &unstructured.Unstructured{}, nil, func(e watch.Event) (bool, error) {
		u, ok := e.Object.(*unstructured.Unstructured)
		if !ok {
			return false, nil
		}
		phase, _, _ = unstructured.NestedString(u.Object, "status", "phase")
		ready, _, _ := unstructured.NestedInt64(u.Object, "status", "totalNodes")
		return phase == "Running" && int(ready) == w.state.Options.Nodes(), nil
	})
	if err != nil {
		return fmt.Errorf("TensorFusionCluster: expected Running, found %q: %w", phase, err)
	}
	return nil
}

// values are the operator's, with the sandbox's pools and addresses.
func (w *World) values() map[string]any {
	values := charts.Values()
	var pools []any
	for _, p := range w.state.Options.Pools {
		pools = append(pools, map[string]any{"name": p.Name, "nodeSelectorKey": kwok.PoolLabel, "nodeSelectorValue": p.Name})
	}
	values["cluster"].(map[string]any)["pools"] = pools
	values["controller"].(map[string]any)["admissionWebhooks"] = map[string]any{"url": w.double.WebhookURL()}
	database := values["greptime"].(map[string]any)
	database["host"], database["port"] = "127.0.0.1", w.state.Ports.GreptimeMySQL
	return values
}
