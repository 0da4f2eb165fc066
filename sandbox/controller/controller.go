// Package controller runs a real TensorFusion controller program in a sandbox,
// in place of the double: with the arguments, the environment and the files
// that the live Deployment gives its container, as a process on this machine.
// It must not know what the controller does.
package controller

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"reflect"
	"sync"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"

	"github.com/refit-run/refit/sandbox/folder"
	"github.com/refit-run/refit/sandbox/process"
)

// Variable names the program that runs instead of the double.
const Variable = "REFIT_TEST_TENSORFUSION"

// WebhookAddr is where the program serves its webhook: it has no flag for it.
const WebhookAddr = "127.0.0.1:9443"

const (
	stopGrace  = 10 * time.Second
	probeEvery = 200 * time.Millisecond
)

// Program is the absolute path of the program that the environment names,
// empty for none. One that can't be run is refused.
func Program() (string, error) {
	name := os.Getenv(Variable)
	if name == "" {
		return "", nil
	}
	path, err := filepath.Abs(name)
	if err != nil {
		return "", fmt.Errorf("%s=%s: %w", Variable, name, err)
	}
	return path, executable(path)
}

func executable(path string) error {
	info, err := os.Stat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return fmt.Errorf("%s=%s: expected the program of a TensorFusion controller, found no such file; correct the path or unset the variable for the double", Variable, path)
	case err != nil:
		return fmt.Errorf("%s=%s: %w", Variable, path, err)
	case !info.Mode().IsRegular() || info.Mode()&0o111 == 0:
		return fmt.Errorf("%s=%s: expected an executable file, found mode %s; chmod +x it or unset the variable for the double", Variable, path, info.Mode())
	}
	return nil
}

// Check refuses what would keep the program from running: the file, or its
// webhook's port.
func Check(program string) error {
	if err := executable(program); err != nil {
		return err
	}
	l, err := net.Listen("tcp", WebhookAddr)
	if err != nil {
		return fmt.Errorf("the controller's webhook needs %s and has no flag for another port: %w; one sandbox at a time can run a real controller, end the other user of the port", WebhookAddr, err)
	}
	return l.Close()
}

// Options of a Controller; all are required.
type Options struct {
	Kube    kubernetes.Interface
	Program string
	// Dir receives the files that a container would have mounted, and the log.
	Dir        string
	Kubeconfig string
	Namespace  string
	Release    string
	// APIPort and ProbePort are loopback ports.
	APIPort, ProbePort int
	// Cert and Key of the webhook, PEM.
	Cert, Key []byte
}

// Controller is the process. It is started again when it ends, and anew when
// the Deployment's container changes.
type Controller struct {
	options Options

	mu      sync.Mutex
	keeper  *process.Keeper
	running runtimeSpec
}

// New prepares the process; Start starts it.
func New(o Options) *Controller { return &Controller{options: o} }

// Start reads the live Deployment, starts the program as its container and
// returns when it answers /readyz.
func (c *Controller) Start(ctx context.Context) error {
	if err := c.begin(ctx); err != nil {
		return err
	}
	url := "http://" + folder.Address(c.options.ProbePort) + "/readyz"
	return c.Keeper().Ready(ctx, probeEvery, func(ctx context.Context) error {
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
		if err != nil {
			return err
		}
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			return err
		}
		_ = resp.Body.Close()
		if resp.StatusCode != http.StatusOK {
			return fmt.Errorf("GET %s: expected 200, found %s", url, resp.Status)
		}
		return nil
	})
}

// begin ends a process that runs and starts one as the Deployment says now.
func (c *Controller) begin(ctx context.Context) error {
	spec, err := c.read(ctx)
	if err != nil {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.keeper != nil {
		c.keeper.Stop()
	}
	if err := spec.write(c.options.Dir); err != nil {
		return err
	}
	c.running = spec
	c.keeper = process.Keep(process.Spec{
		Name: "tensorfusion-controller", Path: c.options.Program, Args: spec.args, Env: spec.env,
		Dir: c.options.Dir, Log: filepath.Join(c.options.Dir, "controller.log"), Grace: stopGrace,
	})
	return c.keeper.Start()
}

// Restart ends the process and starts it again, with what the Deployment says
// now and without its memory.
func (c *Controller) Restart(ctx context.Context) error { return c.begin(ctx) }

// Follow starts the process anew whenever the Deployment's container changes,
// as a rollout would. It returns nil when ctx ends.
func (c *Controller) Follow(ctx context.Context) error {
	changed := make(chan struct{}, 1)
	factory := informers.NewSharedInformerFactoryWithOptions(c.options.Kube, 0, informers.WithNamespace(c.options.Namespace))
	informer := factory.Apps().V1().Deployments().Informer()
	notify := func(object any) {
		if d, ok := object.(*appsv1.Deployment); ok && d.Name == c.deployment() {
			select {
			case changed <- struct{}{}:
			default: // one look is due already
			}
		}
	}
	if _, err := informer.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc: notify, UpdateFunc: func(_, now any) { notify(now) },
	}); err != nil {
		return err
	}
	factory.Start(ctx.Done())
	defer factory.Shutdown()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-changed:
		}
		spec, err := c.read(ctx)
		if err == nil && !c.runs(spec) {
			err = c.begin(ctx)
		}
		if err != nil && ctx.Err() == nil {
			// The watch brings the Deployment again when the API server is back.
			slog.Error("the TensorFusion controller was not started anew", "error", err)
		}
	}
}

// runs compares arguments and environment: a changed ConfigMap reaches no
// running container, its files are mounted by subPath.
func (c *Controller) runs(spec runtimeSpec) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return reflect.DeepEqual(c.running.args, spec.args) && reflect.DeepEqual(c.running.env, spec.env)
}

// Keeper of the process that runs now; nil before Start.
func (c *Controller) Keeper() *process.Keeper {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.keeper
}

// Stop ends the process.
func (c *Controller) Stop() {
	if k := c.Keeper(); k != nil {
		k.Stop()
	}
}

func (c *Controller) deployment() string { return c.options.Release + "-controller" }

func (c *Controller) read(ctx context.Context) (runtimeSpec, error) {
	d, err := c.options.Kube.AppsV1().Deployments(c.options.Namespace).Get(ctx, c.deployment(), metav1.GetOptions{})
	if err != nil {
		return runtimeSpec{}, fmt.Errorf("Deployment %s/%s: %w", c.options.Namespace, c.deployment(), err)
	}
	return c.options.compose(ctx, d)
}
