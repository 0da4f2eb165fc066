package procnode

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"time"

	vklog "github.com/virtual-kubelet/virtual-kubelet/log"
	vkslog "github.com/virtual-kubelet/virtual-kubelet/log/slog"
	"github.com/virtual-kubelet/virtual-kubelet/node"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"
	typedcorev1 "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/client-go/tools/record"

	"github.com/refit-run/refit/sandbox/procnode/names"
)

const (
	// workers handle pods at the same time.
	workers = 16
	// headerTimeout bounds how long a client may take to say what it wants.
	headerTimeout = 30 * time.Second
)

// Run is the node until ctx ends; then it ends its pods' processes, but leaves
// the pods as they are in the API server: a node that starts again in the same
// folder starts them again. Killed, it leaves the processes running, and the
// next one takes them over.
func Run(ctx context.Context, c Config) error {
	if err := c.check(); err != nil {
		return err
	}
	if err := os.MkdirAll(c.pods(), 0o700); err != nil {
		return err
	}
	vklog.L = vkslog.FromSlog(slog.With("part", "virtual-kubelet"))
	config, err := clientcmd.BuildConfigFromFlags("", c.Kubeconfig)
	if err != nil {
		return fmt.Errorf("process node: kubeconfig %s: %w", c.Kubeconfig, err)
	}
	config.QPS, config.UserAgent = -1, c.Name
	kube, err := kubernetes.NewForConfig(config)
	if err != nil {
		return err
	}
	table := names.NewTable(c.hosts())
	socket, err := net.ListenPacket("udp", c.dns())
	if err != nil {
		return fmt.Errorf("process node: DNS server: %w", err)
	}
	defer socket.Close()
	broadcaster := record.NewBroadcaster()
	defer broadcaster.Shutdown()
	broadcaster.StartRecordingToSink(&typedcorev1.EventSinkImpl{Interface: kube.CoreV1().Events(metav1.NamespaceAll)})
	events := broadcaster.NewRecorder(scheme.Scheme, corev1.EventSource{Component: "kubelet", Host: c.Name})

	mine := informers.NewSharedInformerFactoryWithOptions(kube, 0, informers.WithTweakListOptions(func(o *metav1.ListOptions) {
		o.FieldSelector = fields.OneTermEqualSelector("spec.nodeName", c.Name).String()
	}))
	all := informers.NewSharedInformerFactory(kube, 0)
	pods, core := mine.Core().V1().Pods(), all.Core().V1()
	p, err := newProvider(ctx, c, kube, pods.Lister(), core.Services().Lister(), table, events)
	if err != nil {
		return err
	}
	_, err = core.Services().Informer().AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc: func(any) { p.rename() }, UpdateFunc: func(any, any) { p.rename() }, DeleteFunc: func(any) { p.rename() },
	})
	if err != nil {
		return err
	}
	_, err = pods.Informer().AddEventHandler(cache.ResourceEventHandlerFuncs{UpdateFunc: func(_, object any) { p.insist(object) }})
	if err != nil {
		return err
	}
	podController, err := node.NewPodController(node.PodControllerConfig{
		PodClient: podClient{kube.CoreV1(), p}, EventRecorder: events, Provider: p, PodInformer: pods,
		SecretInformer: core.Secrets(), ConfigMapInformer: core.ConfigMaps(), ServiceInformer: core.Services(),
		// A pod's address is known only once it was created.
		SkipDownwardAPIResolution: true,
	})
	if err != nil {
		return fmt.Errorf("process node: %w", err)
	}
	server, listener, err := c.listen(p.routes())
	if err != nil {
		return err
	}
	defer server.Close()
	if err := p.adopt(); err != nil {
		return err
	}
	go serve("DNS server", func() error { return table.Serve(socket) })
	go serve("kubelet API", func() error { return server.ServeTLS(listener, "", "") })
	mine.StartWithContext(ctx)
	all.StartWithContext(ctx)
	err = control(ctx, c, kube, podController)
	mine.Shutdown()
	all.Shutdown()
	p.shutdown()
	if left := Sweep(c.Dir); left != nil {
		return left
	}
	return err
}

func serve(what string, run func() error) {
	if err := run(); err != nil && !errors.Is(err, http.ErrServerClosed) {
		slog.Error("a part of the process node ended", "part", what, "error", err)
	}
}

// control registers the node and runs its controllers until ctx ends.
func control(ctx context.Context, c Config, kube kubernetes.Interface, pods *node.PodController) error {
	working, cancel := context.WithCancel(ctx)
	defer cancel()
	go serve("pod controller", func() error { return pods.Run(working, workers) })
	select {
	case <-pods.Ready():
	case <-pods.Done():
		return ended(ctx, "pod controller", pods.Err())
	}
	leases := kube.CoordinationV1().Leases(corev1.NamespaceNodeLease)
	nodes, err := node.NewNodeController(node.NaiveNodeProvider{}, c.object(), kube.CoreV1().Nodes(), node.WithNodeEnableLeaseV1(leases, node.DefaultLeaseDuration))
	if err != nil {
		return fmt.Errorf("process node: %w", err)
	}
	go serve("node controller", func() error { return nodes.Run(working) })
	select {
	case <-nodes.Done():
		err = nodes.Err()
	case <-pods.Done():
		err = pods.Err()
	}
	cancel()
	<-nodes.Done()
	<-pods.Done()
	return ended(ctx, "controllers", err)
}

// ended is nil when the node was asked to end.
func ended(ctx context.Context, what string, err error) error {
	if ctx.Err() != nil {
		return nil
	}
	return fmt.Errorf("process node: %s: expected it to run until the node ends, found it ended: %w", what, err)
}

func (c Config) listen(handler http.Handler) (*http.Server, net.Listener, error) {
	certificates, err := c.tls()
	if err != nil {
		return nil, nil, err
	}
	listener, err := net.Listen("tcp", c.kubelet())
	if err != nil {
		return nil, nil, fmt.Errorf("process node: kubelet API: %w", err)
	}
	// HTTP/2 has no upgrade, which exec and port-forward need.
	protocols := &http.Protocols{}
	protocols.SetHTTP1(true)
	return &http.Server{Handler: handler, TLSConfig: certificates, ReadHeaderTimeout: headerTimeout, Protocols: protocols}, listener, nil
}
