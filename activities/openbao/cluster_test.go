package openbao

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"filippo.io/age"
	"github.com/stretchr/testify/require"
	appsv1 "k8s.io/api/apps/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"

	"github.com/refit-run/refit/activities/artifact"
	"github.com/refit-run/refit/activities/internal/apiservertest"
	"github.com/refit-run/refit/activities/kube"
	"github.com/refit-run/refit/activities/lease"
	"github.com/refit-run/refit/activities/secret"
	"github.com/refit-run/refit/tests/freeport"
)

func TestMain(m *testing.M) { os.Exit(apiservertest.Main(m)) }

const (
	members = 3
	// patience bounds waits on a machine that has other work.
	patience = 2 * time.Minute

	realBao    = "REFIT_TEST_BAO"
	realBaoOld = "REFIT_TEST_BAO_OLD"
)

// cluster is three OpenBao servers as processes of their own and the pods that
// stand for them in a real API server. The test plays the StatefulSet's
// controller, the kubelet and the unseal sidecar.
type cluster struct {
	t        *testing.T
	acts     *Activities
	place    Place
	client   *kube.Client
	identity string
	programs map[string][]string // by image
	nodes    [members]*node
	key      string
	// asks sees every request to a member before it leaves, answers each request
	// again when its answer has come and nobody has read it yet.
	asks, answers atomic.Pointer[func(request string)]
	// least is the fewest members that were unsealed at a time.
	least atomic.Int32

	mu     sync.Mutex
	sealed map[string]bool // pods that the sidecar leaves alone
	made   int
}

// start brings the members up on the older image, the template on the newer.
func start(t *testing.T) *cluster {
	t.Helper()
	c := &cluster{t: t, sealed: map[string]bool{}, programs: programs(t)}
	api := apiservertest.Shared(t)
	identity, err := age.GenerateX25519Identity()
	require.NoError(t, err)
	store, err := artifact.Open(t.TempDir(), []string{identity.Recipient().String()})
	require.NoError(t, err)
	c.client, c.identity = api.Client(t), identity.String()
	c.place = Place{Target: api.Target(t, "prod"), Namespace: api.Namespace(t), Servers: Servers{StatefulSet: "bao"},
		Token:   secret.Reference{Secret: "openbao-server-root-token", Key: "root_token"},
		Release: "bao", Holder: "run-1"}
	_, err = c.client.Typed.CoordinationV1().Leases(c.place.Namespace).Create(t.Context(), &coordinationv1.Lease{
		ObjectMeta: metav1.ObjectMeta{Name: lease.Name(c.place.Release)}, Spec: coordinationv1.LeaseSpec{HolderIdentity: &c.place.Holder}}, metav1.CreateOptions{})
	require.NoError(t, err)
	c.acts = &Activities{Clusters: api.Clusters(t, "prod"), Artifacts: store, Dial: c.dial, Pace: 100 * time.Millisecond, Stable: time.Second}

	ports, err := freeport.Get(2 * members)
	require.NoError(t, err)
	joins := ""
	for i := range c.nodes {
		n := &node{name: fmt.Sprintf("bao-%d", i), ip: fmt.Sprintf("127.0.0.%d", i+1), port: ports[i], dir: t.TempDir()}
		n.config = filepath.Join(t.TempDir(), "bao.hcl")
		joins += fmt.Sprintf("  retry_join {\n    leader_api_addr = \"http://%s:%d\"\n  }\n", n.ip, n.port)
		c.nodes[i] = n
	}
	for i, n := range c.nodes {
		raft := fmt.Sprintf("%s:%d", n.ip, ports[members+i])
		require.NoError(t, os.WriteFile(n.config, fmt.Appendf(nil, `disable_standby_reads = true
disable_mlock = true
api_addr = "http://%[1]s:%[2]d"
cluster_addr = "https://%[3]s"
listener "tcp" {
  address = "%[1]s:%[2]d"
  cluster_address = "%[3]s"
  tls_disable = true
}
storage "raft" {
  path = %[4]q
  node_id = %[5]q
%[6]s}
`, n.ip, n.port, raft, n.dir, n.name, joins), 0o600))
		require.NoError(t, c.run(n, oldImage))
	}
	t.Cleanup(func() {
		for _, n := range c.nodes {
			c.end(n, syscall.SIGKILL)
		}
	})
	c.initialise()
	for _, n := range c.nodes {
		require.NoError(t, c.unseal(n))
	}
	c.objects()
	c.play()
	c.settled()
	c.least.Store(members)
	c.observe()
	return c
}

// dial is the tunnel: it knows the pods by their names.
func (c *cluster) dial(ctx context.Context, _ *kube.Client, namespace, pod string, port int) (net.Conn, error) {
	i := int(pod[len(pod)-1] - '0')
	if namespace != c.place.Namespace || port != 8200 || i >= members {
		return nil, fmt.Errorf("no port %d of pod %s/%s", port, namespace, pod)
	}
	conn, err := new(net.Dialer).DialContext(ctx, "tcp", fmt.Sprintf("%s:%d", c.nodes[i].ip, c.nodes[i].port))
	if err != nil {
		return nil, err
	}
	return &wire{Conn: conn, c: c}, nil
}

var labels = map[string]string{"app.kubernetes.io/name": "openbao", "component": "server"}

func podSpec(image string) corev1.PodSpec {
	return corev1.PodSpec{Containers: []corev1.Container{{Name: "openbao", Image: image}, {Name: "auto-unseal-sidecar", Image: image}}}
}

func (c *cluster) objects() {
	sets := c.client.Typed.AppsV1().StatefulSets(c.place.Namespace)
	replicas := int32(members)
	set, err := sets.Create(c.t.Context(), &appsv1.StatefulSet{ObjectMeta: metav1.ObjectMeta{Name: "bao"}, Spec: appsv1.StatefulSetSpec{
		Replicas: &replicas, ServiceName: "bao-internal", Selector: &metav1.LabelSelector{MatchLabels: labels},
		UpdateStrategy: appsv1.StatefulSetUpdateStrategy{Type: appsv1.OnDeleteStatefulSetStrategyType},
		Template:       corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: labels}, Spec: podSpec(newImage)},
	}}, metav1.CreateOptions{})
	require.NoError(c.t, err)
	set.Status = appsv1.StatefulSetStatus{ObservedGeneration: set.Generation, Replicas: replicas, CurrentRevision: "old", UpdateRevision: "new"}
	_, err = sets.UpdateStatus(c.t.Context(), set, metav1.UpdateOptions{})
	require.NoError(c.t, err)
	for _, n := range c.nodes {
		require.NoError(c.t, c.pod(n, "old", oldImage))
	}
}

// pod makes a member's pod, Ready whether or not its server is unsealed.
func (c *cluster) pod(n *node, revision, image string) error {
	pods := c.client.Typed.CoreV1().Pods(c.place.Namespace)
	ctx := context.WithoutCancel(c.t.Context())
	meta := metav1.ObjectMeta{Name: n.name, Labels: map[string]string{appsv1.ControllerRevisionHashLabelKey: revision}}
	for k, v := range labels {
		meta.Labels[k] = v
	}
	spec := podSpec(image)
	spec.Volumes = []corev1.Volume{{Name: "data", VolumeSource: corev1.VolumeSource{PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: "data-" + n.name}}}}
	pod, err := pods.Create(ctx, &corev1.Pod{ObjectMeta: meta, Spec: spec}, metav1.CreateOptions{})
	if err != nil {
		return err
	}
	pod.Status = corev1.PodStatus{Phase: corev1.PodRunning, PodIP: n.ip, PodIPs: []corev1.PodIP{{IP: n.ip}},
		Conditions: []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}}
	_, err = pods.UpdateStatus(ctx, pod, metav1.UpdateOptions{})
	return err
}

// play is the controller, the kubelet and the sidecar: a deleted pod's process
// ends, the next one starts from the template.
func (c *cluster) play() {
	ctx, stop := context.WithCancel(context.Background())
	seen, err := c.client.Typed.CoreV1().Pods(c.place.Namespace).Watch(ctx, metav1.ListOptions{})
	require.NoError(c.t, err)
	var playing sync.WaitGroup
	playing.Go(func() {
		for event := range seen.ResultChan() {
			if event.Type != watch.Deleted || ctx.Err() != nil {
				continue
			}
			if err := c.renew(c.node(event.Object.(*corev1.Pod).Name)); err != nil {
				c.t.Error(err)
			}
		}
	})
	c.t.Cleanup(func() {
		stop()
		seen.Stop()
		playing.Wait()
	})
}

// renew gives a member whose pod is gone the next one.
func (c *cluster) renew(n *node) error {
	c.end(n, syscall.SIGTERM)
	if err := c.run(n, newImage); err != nil {
		return err
	}
	c.mu.Lock()
	c.made++
	sealed := c.sealed[n.name]
	c.mu.Unlock()
	if err := c.pod(n, "new", newImage); err != nil || sealed {
		return err
	}
	return c.unseal(n)
}

// observe counts the members that are unsealed, all the time.
func (c *cluster) observe() {
	ctx, stop := context.WithCancel(context.Background())
	var watching sync.WaitGroup
	watching.Go(func() {
		tick := time.NewTicker(20 * time.Millisecond)
		defer tick.Stop()
		for ctx.Err() == nil {
			there := int32(0)
			for _, n := range c.nodes {
				if status, err := c.ask(n, http.MethodGet, "sys/seal-status", nil); err == nil && status["sealed"] == false {
					there++
				}
			}
			c.least.Store(min(there, c.least.Load()))
			<-tick.C
		}
	})
	c.t.Cleanup(func() {
		stop()
		watching.Wait()
	})
}

func (c *cluster) node(pod string) *node { return c.nodes[pod[len(pod)-1]-'0'] }

// settled waits until the cluster is whole.
func (c *cluster) settled() {
	c.t.Helper()
	require.NoError(c.t, c.eventually("the cluster is whole", func() error {
		v := c.look()
		if found := waiting(v, 0); len(found) > 0 {
			return errors.New(found[0].String())
		}
		return nil
	}))
}

func (c *cluster) look() View {
	c.t.Helper()
	l, err := c.acts.looker(c.t.Context(), c.place)
	require.NoError(c.t, err)
	defer l.close()
	v, err := l.look(c.t.Context())
	require.NoError(c.t, err)
	return v
}

// active is the pod that leads.
func (c *cluster) active() Member {
	c.t.Helper()
	active, none := c.look().Active()
	require.Empty(c.t, none)
	return active
}

func (c *cluster) uid(pod string) string {
	c.t.Helper()
	p, err := c.client.Typed.CoreV1().Pods(c.place.Namespace).Get(c.t.Context(), pod, metav1.GetOptions{})
	require.NoError(c.t, err)
	return string(p.UID)
}

func (c *cluster) leaveSealed(pod string, sealed bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.sealed[pod] = sealed
}

// fault makes a member of the double do something wrong; a real server can't
// be told to.
func (c *cluster) fault(pod, text string) bool {
	c.t.Helper()
	if os.Getenv(realBao) != "" {
		return false
	}
	require.NoError(c.t, os.WriteFile(filepath.Join(c.node(pod).dir, "faults.json"), []byte(text), 0o600))
	return true
}

// want is the target, with the version that its program tells.
func (c *cluster) want() Want {
	c.t.Helper()
	w := target()
	w.ClusterID, w.Version = c.active().ClusterID, c.version(newImage)
	return w
}
