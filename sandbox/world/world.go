// Package world puts a sandbox together: it starts the components in the
// order in which they need one another, keeps them running, answers the
// control API and takes everything down again. What each component does
// lives in its own package.
package world

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"sync"
	"time"

	"go.temporal.io/sdk/client"
	"golang.org/x/sync/errgroup"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"

	"github.com/refit-run/refit/sandbox/agents"
	"github.com/refit-run/refit/sandbox/control"
	"github.com/refit-run/refit/sandbox/controller"
	"github.com/refit-run/refit/sandbox/controlplane"
	"github.com/refit-run/refit/sandbox/endpoints"
	"github.com/refit-run/refit/sandbox/fault"
	"github.com/refit-run/refit/sandbox/folder"
	"github.com/refit-run/refit/sandbox/greptime"
	"github.com/refit-run/refit/sandbox/kwok"
	"github.com/refit-run/refit/sandbox/process"
	"github.com/refit-run/refit/sandbox/reaper"
	"github.com/refit-run/refit/sandbox/registry"
	"github.com/refit-run/refit/sandbox/temporal"
	"github.com/refit-run/refit/sandbox/tensorfusion"
)

// startDeadline is generous: the goal is 30 s on an idle machine, but a
// machine that runs several tests at once is not idle.
const startDeadline = 5 * time.Minute

// World is one running sandbox.
type World struct {
	folder folder.Folder
	state  folder.State
	report func(string)

	listener net.Listener
	control  *control.Server
	registry *registry.Registry
	greptime *greptime.Server
	temporal *temporal.Server
	client   client.Client
	plane    *controlplane.ControlPlane
	kubelet  *kwok.Kubelet
	kube     kubernetes.Interface
	dynamic  dynamic.Interface
	fleet    nodeAgents
	canary   *agents.Canary
	double   *tensorfusion.Double
	real     *controller.Controller
	pods     *endpoints.Hypervisors
	// gpuagent and hosts are what real agents need.
	gpuagent string
	hosts    agents.Hosts

	datastores datastores

	// life ends when the sandbox is asked to stop; tasks run until then.
	life  context.Context
	tasks sync.WaitGroup

	mu            sync.Mutex
	ready         bool
	cancelDelayed context.CancelFunc
}

// Run starts the sandbox of the folder, reports progress line by line, calls
// ready when everything stands, and works until ctx ends. The caller holds
// the folder's lock.
func Run(ctx context.Context, f folder.Folder, options folder.Options, report func(string), ready func()) error {
	life, end := context.WithCancel(ctx)
	defer end()
	w := &World{folder: f, report: report, life: life}
	defer func() {
		end()
		w.stop()
	}()
	if err := w.prepare(options); err != nil {
		return err
	}
	started, cancel := context.WithTimeoutCause(life, startDeadline, fmt.Errorf("the sandbox was not ready after %s", startDeadline))
	err := w.start(started)
	cancel()
	if err != nil {
		return err
	}
	w.mu.Lock()
	w.ready = true
	w.mu.Unlock()
	ready()
	<-ctx.Done()
	return nil
}

// prepare reads or makes the state and creates what runs in this process.
// What can be refused is refused here, before any component runs.
func (w *World) prepare(options folder.Options) error {
	state, err := w.folder.Load()
	known := err == nil
	if known {
		options = state.Options
	} else if !errors.Is(err, os.ErrNotExist) {
		return err
	}
	programs, err := findPrograms(options.RealAgents())
	if err != nil {
		return err
	}
	if options.Controller != "" && options.TensorFusion {
		if err := controller.Check(options.Controller); err != nil {
			return err
		}
	}
	if known {
		if w.listener, err = state.Ports.Reopen(); err != nil {
			return fmt.Errorf("port %d of this sandbox is taken: %w; run `refit-sandbox down` and start again", state.Ports.Registry, err)
		}
	} else {
		state = folder.State{Options: options, Socket: w.folder.SocketPath(os.TempDir())}
		if state.Ports, w.listener, err = w.folder.Reserve(); err != nil {
			return err
		}
	}
	w.state = state
	if err := w.folder.Save(state); err != nil {
		return err
	}
	if err := w.prepareAgents(programs.gpuagent); err != nil {
		return err
	}
	if err := writeSecrets(w.folder); err != nil {
		return err
	}
	if w.plane, err = controlplane.New(w.folder, state.Ports, state.Options.Cluster, programs.kube); err != nil {
		return err
	}
	if err := w.prepareDatastores(); err != nil {
		return err
	}
	w.temporal = temporal.New(w.folder, state.Ports, programs.temporal)
	w.kubelet, err = kwok.New(w.folder, state.Ports, w.plane.KwokKubeconfig(), programs.kwok, state.Options.ReadyAfter)
	if err != nil {
		return err
	}
	w.registry = registry.Serve(w.listener)
	w.greptime, err = greptime.Serve(folder.Address(state.Ports.GreptimeMySQL), folder.Address(state.Ports.GreptimeHTTP), greptimeUser, greptimePassword)
	if err != nil {
		return err
	}
	w.control, err = control.Serve(state.Socket, w)
	return err
}

// start brings everything up; what does not need one another starts together.
func (w *World) start(ctx context.Context) error {
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return w.startTemporal(ctx) })
	group.Go(func() error { return w.publish(ctx) })
	group.Go(func() error { return w.startCluster(ctx) })
	if err := group.Wait(); err != nil {
		return err
	}
	w.state.Complete = true
	return w.folder.Save(w.state)
}

func (w *World) startTemporal(ctx context.Context) error {
	if err := w.temporal.Start(); err != nil {
		return err
	}
	c, err := w.temporal.Connect(ctx, client.Options{
		Identity: "refit-sandbox", Logger: agentLogger(),
		// Workers of a thousand nodes would report themselves for nobody.
		WorkerHeartbeatInterval: -1,
	})
	if err != nil {
		return err
	}
	w.client = c
	w.report("Temporal is ready, UI at " + w.temporal.UI())
	return w.startAgents(ctx)
}

func (w *World) startCluster(ctx context.Context) error {
	if err := w.plane.Start(ctx); err != nil {
		return err
	}
	w.report("the API server is ready")
	cfg, err := w.plane.Config(controlplane.Sandbox)
	if err != nil {
		return err
	}
	if w.kube, err = kubernetes.NewForConfig(cfg); err != nil {
		return err
	}
	if w.dynamic, err = dynamic.NewForConfig(cfg); err != nil {
		return err
	}
	if err := bootstrap(ctx, w.kube); err != nil {
		return err
	}
	if err := kwok.ApplyCRDs(ctx, cfg); err != nil {
		return err
	}
	if err := w.kubelet.Start(); err != nil {
		return err
	}
	if err := w.kubelet.Ready(ctx); err != nil {
		return err
	}
	options := w.state.Options
	if err := kwok.CreateNodes(ctx, w.kube, options.Pools, w.state.Ports); err != nil {
		return err
	}
	w.canary = agents.NewCanary(w.kube)
	w.task("canary", w.canary.Run)
	w.task("reaper", func(ctx context.Context) error {
		return reaper.Run(ctx, w.kube, kwok.NodeAnnotation, "fake")
	})
	if err := kwok.ReadyNodes(ctx, w.kube, options.Nodes()); err != nil {
		return err
	}
	if err := w.plane.ReadyControllers(ctx); err != nil {
		return err
	}
	w.report(fmt.Sprintf("%d nodes are Ready", options.Nodes()))
	if err := w.startDatastores(ctx); err != nil {
		return err
	}
	if !options.TensorFusion {
		return nil
	}
	return w.startTensorFusion(ctx)
}

// task runs a function for as long as the sandbox lives.
func (w *World) task(name string, run func(context.Context) error) {
	w.tasks.Go(func() {
		if err := run(w.life); err != nil && w.life.Err() == nil {
			slog.Error("a part of the sandbox ended", "part", name, "error", err)
		}
	})
}

// stop takes everything down, users of a component before the component.
func (w *World) stop() {
	if w.control != nil {
		w.control.Close()
	}
	w.tasks.Wait()
	if w.real != nil {
		w.real.Stop()
	}
	if w.fleet != nil {
		w.fleet.Stop()
	}
	if w.client != nil {
		w.client.Close()
	}
	var all sync.WaitGroup
	if w.temporal != nil {
		all.Go(w.temporal.Stop)
	}
	w.datastores.stop()
	if w.kubelet != nil {
		w.kubelet.Stop()
	}
	if w.plane != nil {
		w.plane.Stop()
	}
	all.Wait()
	if w.greptime != nil {
		w.greptime.Close()
	}
	if w.pods != nil {
		w.pods.Close()
	}
	switch {
	case w.registry != nil:
		w.registry.Close()
	case w.listener != nil:
		_ = w.listener.Close()
	}
}

// components are the child processes, for status.
func (w *World) components() []*process.Keeper {
	all := append(w.plane.Components(), w.kubelet.Keeper, w.temporal.Keeper)
	all = append(all, w.datastores.components()...)
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.real != nil && w.real.Keeper() != nil {
		all = append(all, w.real.Keeper())
	}
	if w.fleet != nil {
		all = append(all, w.fleet.Components()...)
	}
	return all
}

// Fault injects a fault by name; it is refused until the sandbox is ready.
func (w *World) Fault(ctx context.Context, name string, args []string) error {
	w.mu.Lock()
	ready := w.ready
	w.mu.Unlock()
	if !ready {
		return errors.New("the sandbox is still starting: faults need a ready one; wait for `refit-sandbox up`")
	}
	t := &fault.Targets{
		Kube: w.kube, Dynamic: w.dynamic, Namespace: Namespace, Agents: w.fleet, Canary: w.canary,
		Registry: w.registry, Greptime: w.greptime, APIServer: w.plane.APIServer, Temporal: w.temporal.Keeper,
		APIReady: w.plane.ReadyAPIServer, After: w.after,
		TemporalAddress: folder.Address(w.state.Ports.TemporalGRPC),
	}
	switch {
	case w.real != nil:
		t.RestartController = w.real.Restart
	case w.double != nil:
		t.RestartController = func(ctx context.Context) error { return w.double.Fault(ctx, tensorfusion.ControllerRestart) }
	}
	return fault.Inject(ctx, t, name, args)
}

// after runs a function later, unless the sandbox ends or another one is
// delayed before.
func (w *World) after(d time.Duration, run func(context.Context) error) {
	waiting, cancel := context.WithCancel(w.life)
	w.mu.Lock()
	if w.cancelDelayed != nil {
		w.cancelDelayed()
	}
	w.cancelDelayed = cancel
	w.mu.Unlock()
	w.task("delayed fault", func(ctx context.Context) error {
		defer cancel()
		timer := time.NewTimer(d)
		defer timer.Stop()
		select {
		case <-timer.C:
			return run(ctx)
		case <-waiting.Done():
			return nil
		}
	})
}
