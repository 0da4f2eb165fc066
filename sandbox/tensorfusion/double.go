// Package tensorfusion is the sandbox's double of the TensorFusion controller
// and its hypervisors on a real API server. It runs the rolling-update machine
// of its subpackage with caches and writes, takes the controller's version from
// the live Deployment's pods, and serves the webhook and HTTP endpoints. It
// must not decide anything the machine decides, and the product must never
// import it.
package tensorfusion

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"sync"
	"time"

	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/utils/clock"
)

// Options of a Double. Config, Namespace and Release are required.
type Options struct {
	Config    *rest.Config
	Namespace string
	Release   string
	// Clock times requeues and the lease; nil is the real one.
	Clock clock.WithTicker
	// LeaseDuration is how long a dead leader's lease lasts; 0 is 15 s, as the
	// real controller's.
	LeaseDuration time.Duration
	// WebhookAddr and APIAddr are loopback addresses; empty picks a port.
	WebhookAddr string
	APIAddr     string
	// HypervisorsOnly leaves the controller to a real process that serves its
	// webhook at WebhookAddr: no election, no lease, no webhook here. What has
	// no counterpart in a sandbox goes on: the hypervisors with their devices,
	// the chart's hook Jobs and the storage class.
	HypervisorsOnly bool
	// GPUsPerNode that each hypervisor reports; 0 is 2.
	GPUsPerNode int
	// Concurrency of the node reconciler; 0 is 8.
	Concurrency int
	Log         *slog.Logger
}

// Double plays the controller and the hypervisors of one release.
type Double struct {
	options Options
	client  kubernetes.Interface
	dynamic dynamic.Interface
	clock   clock.WithTicker
	log     *slog.Logger

	webhook     net.Listener // nil when a real controller serves it
	webhookAddr string
	api         net.Listener

	caches   *caches
	queues   *queues
	election election
	faults   faults
	created  createdPods
	pools    poolCache
	pace     pace
	ca       authority

	ready     chan struct{}
	readyOnce sync.Once
}

// New binds the listeners, so that their addresses are known before Run.
func New(options Options) (*Double, error) {
	if options.Config == nil || options.Namespace == "" || options.Release == "" {
		return nil, errors.New("tensorfusion double: Config, Namespace and Release must be set")
	}
	if options.Clock == nil {
		options.Clock = clock.RealClock{}
	}
	if options.LeaseDuration == 0 {
		options.LeaseDuration = 15 * time.Second
	}
	if options.GPUsPerNode == 0 {
		options.GPUsPerNode = 2
	}
	if options.Concurrency == 0 {
		options.Concurrency = 8
	}
	if options.Log == nil {
		options.Log = slog.New(slog.NewTextHandler(io.Discard, nil))
	}
	config := rest.CopyConfig(options.Config)
	// The double stands for many processes: it is not throttled.
	config.QPS, config.Burst = -1, 0
	config.UserAgent = "tensor-fusion-double"
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return nil, fmt.Errorf("tensorfusion double: %w", err)
	}
	custom, err := dynamic.NewForConfig(config)
	if err != nil {
		return nil, fmt.Errorf("tensorfusion double: %w", err)
	}
	d := &Double{
		options: options, client: client, dynamic: custom,
		clock: options.Clock, log: options.Log,
		ready: make(chan struct{}),
	}
	d.webhookAddr = options.WebhookAddr
	if !options.HypervisorsOnly {
		if d.webhook, err = listen(options.WebhookAddr); err != nil {
			return nil, fmt.Errorf("tensorfusion double: webhook: %w", err)
		}
		d.webhookAddr = d.webhook.Addr().String()
	}
	if d.api, err = listen(options.APIAddr); err != nil {
		return nil, errors.Join(fmt.Errorf("tensorfusion double: API: %w", err), d.closeWebhook())
	}
	if err := d.createAuthority(); err != nil {
		return nil, errors.Join(fmt.Errorf("tensorfusion double: webhook certificate: %w", err), d.api.Close(), d.closeWebhook())
	}
	d.queues = newQueues(d.clock)
	d.caches = newCaches(client, custom, options.Namespace)
	return d, nil
}

func listen(address string) (net.Listener, error) {
	if address == "" {
		address = "127.0.0.1:0"
	}
	return net.Listen("tcp", address)
}

// WebhookURL is the value for controller.admissionWebhooks.url.
func (d *Double) WebhookURL() string { return "https://" + d.webhookAddr + webhookPath }

// WebhookCertificate and its key are what the webhook's caller trusts, PEM.
func (d *Double) WebhookCertificate() (cert, key []byte) { return d.ca.pem, d.ca.key }

func (d *Double) closeWebhook() error {
	if d.webhook == nil {
		return nil
	}
	return d.webhook.Close()
}

// APIAddr serves /api/allocation (as the leader), and every hypervisor's own
// endpoints below /nodes/NODE, e.g. /nodes/gpu-0/readyz.
func (d *Double) APIAddr() string { return d.api.Addr().String() }

// Ready is closed when a controller process leads for the first time.
func (d *Double) Ready() <-chan struct{} { return d.ready }

// Run plays until ctx ends. It returns nil when it stopped because of ctx.
func (d *Double) Run(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	if err := d.createStorageClass(ctx); err != nil {
		return fmt.Errorf("tensorfusion double: StorageClass %s: %w", StorageClass, err)
	}
	d.route()
	failed := make(chan error, 8)
	var group sync.WaitGroup
	run := func(name string, part func(context.Context) error) {
		group.Add(1)
		go func() {
			defer group.Done()
			if err := part(ctx); err != nil && ctx.Err() == nil {
				failed <- fmt.Errorf("tensorfusion double: %s: %w", name, err)
			}
		}()
	}
	run("API", d.serveAPI)
	run("caches", d.caches.run)
	if !d.options.HypervisorsOnly {
		run("webhook", d.serveWebhook)
		run("election", d.runElection)
		run("heartbeats", d.runHeartbeats)
	}
	d.startWorkers(ctx, &group)
	var err error
	select {
	case <-ctx.Done():
	case err = <-failed:
	}
	cancel()
	d.queues.shutDown()
	group.Wait()
	return err
}
