package procnode_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/refit-run/refit/sandbox/controlplane"
	"github.com/refit-run/refit/sandbox/folder"
	"github.com/refit-run/refit/sandbox/process"
	"github.com/refit-run/refit/sandbox/procnode"
	"github.com/refit-run/refit/sandbox/procnode/cassandrad"
	"github.com/refit-run/refit/sandbox/procnode/datastore"
	"github.com/refit-run/refit/sandbox/procnode/environ"
	"github.com/refit-run/refit/sandbox/procnode/natsd"
)

const (
	// limit bounds a wait on a busy machine.
	limit  = time.Minute
	look   = 20 * time.Millisecond
	node   = "process-0"
	image1 = "registry.test/echo:1"
	image2 = "registry.test/echo:2"
	shell  = "registry.test/shell:1"
)

// world is a control plane with one process node, the same for all tests.
type world struct {
	root    string
	plane   *controlplane.ControlPlane
	ports   folder.Ports
	listen  io.Closer
	config  *rest.Config
	kube    kubernetes.Interface
	node    *process.Keeper
	dir     string
	nats    datastore.Store
	openbao datastore.Store
	// cassandra is nil where its jars or Java are missing.
	cassandra *datastore.Store
}

var (
	once   sync.Once
	shared *world
	failed error
)

func cluster(t *testing.T) *world {
	t.Helper()
	program, err := process.Find("refit-kube", "REFIT_SANDBOX_KUBE")
	if err != nil {
		t.Skipf("not run: %v", err)
	}
	once.Do(func() { shared, failed = start(program) })
	require.NoError(t, failed)
	return shared
}

func start(program string) (*world, error) {
	root, err := os.MkdirTemp("", "refit-procnode-")
	if err != nil {
		return nil, err
	}
	w := &world{root: root, dir: filepath.Join(root, "node")}
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	f := folder.Folder{Root: root}
	if w.ports, w.listen, err = f.Reserve(); err != nil {
		return w, err
	}
	if w.plane, err = controlplane.New(f, w.ports, "test", program); err != nil {
		return w, err
	}
	if err := w.plane.Start(ctx); err != nil {
		return w, err
	}
	if w.config, err = w.plane.Config(controlplane.Sandbox); err != nil {
		return w, err
	}
	if w.kube, err = kubernetes.NewForConfig(w.config); err != nil {
		return w, err
	}
	if err := w.startNode(ctx); err != nil {
		return w, err
	}
	return w, w.plane.ReadyControllers(ctx)
}

// address is the first of those that no sandbox uses for its nodes.
func (w *world) address() netip.Addr {
	n := w.ports.Block * 2048
	return netip.AddrFrom4([4]byte{127, byte(64 + n>>16), byte(n >> 8), byte(n)}).Next()
}

func (w *world) startNode(ctx context.Context) error {
	self, err := os.Executable()
	if err != nil {
		return err
	}
	echo := func(version string) environ.Image {
		return environ.Image{Command: []string{self}, Args: []string{version}, Env: map[string]string{role: "echo"}}
	}
	config := procnode.Config{
		Name: node, Dir: w.dir, Kubeconfig: w.plane.Kubeconfig(controlplane.Sandbox), ClientCA: filepath.Join(w.root, "kube", "ca.crt"),
		First: w.address(), Addresses: 200, Backoff: time.Second,
		Images: map[string]environ.Image{image1: echo("1"), image2: echo("2"), shell: {Command: []string{"/bin/sh", "-c"}}},
	}
	tools := filepath.Join(w.root, "tools")
	if err := natsd.Tools(tools, self); err != nil {
		return err
	}
	w.nats, err = datastore.NATS(environ.Image{Command: []string{self}, Env: map[string]string{role: "nats"}, Path: tools})
	if err != nil {
		return err
	}
	maps.Copy(config.Images, w.nats.Images)
	if err := w.addCassandra(self, config.Images); err != nil {
		return err
	}
	if err := w.addOpenBao(self, config.Images); err != nil {
		return err
	}
	path := filepath.Join(w.root, "node.json")
	if err := config.Save(path); err != nil {
		return err
	}
	w.node = process.Keep(process.Spec{
		Name: "procnode", Path: self, Args: []string{path}, Env: []string{role + "=node"},
		Dir: w.root, Log: filepath.Join(w.root, "node.log"), Grace: 20 * time.Second,
	})
	if err := w.node.Start(); err != nil {
		return err
	}
	return w.node.Ready(ctx, look, func(ctx context.Context) error {
		n, err := w.kube.CoreV1().Nodes().Get(ctx, node, metav1.GetOptions{})
		if err != nil {
			return err
		}
		for _, c := range n.Status.Conditions {
			if c.Type == corev1.NodeReady && c.Status == corev1.ConditionTrue {
				return nil
			}
		}
		return errors.New("the node is not Ready")
	})
}

func (w *world) addCassandra(self string, images map[string]environ.Image) error {
	home, err := cassandrad.Find()
	if errors.Is(err, cassandrad.ErrNoJars) {
		return nil
	}
	if err != nil {
		return err
	}
	tools := filepath.Join(w.root, "tools-cassandra")
	if err := home.Tools(tools); err != nil {
		return err
	}
	env := home.Env(home.Prepared())
	env[role] = "cassandra"
	s, err := datastore.Cassandra(environ.Image{Command: []string{self}, Env: env, Path: tools}, 1)
	if err != nil {
		return err
	}
	w.cassandra = &s
	maps.Copy(images, s.Images)
	return nil
}

func (w *world) stop() {
	if w.node != nil {
		w.node.Stop()
	}
	if err := procnode.Sweep(w.dir); err != nil {
		fmt.Fprintln(os.Stderr, err)
	}
	if w.plane != nil {
		w.plane.Stop()
	}
	if w.listen != nil {
		_ = w.listen.Close()
	}
	_ = os.RemoveAll(w.root)
}
