package nats

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/nats-io/nkeys"
	"github.com/stretchr/testify/require"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/refit-run/refit/activities/artifact"
	"github.com/refit-run/refit/activities/internal/apiservertest"
	"github.com/refit-run/refit/activities/kube"
	"github.com/refit-run/refit/tests/freeport"
)

func TestMain(m *testing.M) { os.Exit(apiservertest.Main(m)) }

// cluster is three real NATS servers in this process and the pods that stand
// for them in a real API server. They have no kubelet, so the tunnel is
// replaced by a plain connection.
type cluster struct {
	t       *testing.T
	acts    *Activities
	place   Place
	client  *kube.Client
	configs []string
	clients []int // client ports
	monitor []int

	mu      sync.Mutex
	servers []*server.Server
	cut     map[string]bool // pods that nobody reaches
}

const members = 3

// start runs the servers: account NVCF with a user by nkey, whose seed lies in
// the Secret nats-nkeys, and one who may change nothing, "reader"; and account
// OTHER with a user whose seed lies in "other", and PLAIN, without JetStream,
// with one in "plain".
func start(t *testing.T) *cluster {
	t.Helper()
	api := apiservertest.Shared(t)
	store, err := artifact.Open(t.TempDir(), nil)
	require.NoError(t, err)
	c := &cluster{t: t, client: api.Client(t), servers: make([]*server.Server, members), cut: map[string]bool{}}
	c.place = Place{Target: api.Target(t, "prod"), Namespace: api.Namespace(t)}
	c.acts = &Activities{Clusters: api.Clusters(t, "prod"), Artifacts: store, Dial: c.dial, Pace: 100 * time.Millisecond, Stable: time.Second}

	ports, err := freeport.Get(3 * members)
	require.NoError(t, err)
	c.clients, c.monitor = ports[:members], ports[members:2*members]
	routes := ""
	for _, p := range ports[2*members:] {
		routes += fmt.Sprintf("\"nats://127.0.0.1:%d\", ", p)
	}
	user := func(secret string) string {
		pair, err := nkeys.CreateUser()
		require.NoError(t, err)
		seed, err := pair.Seed()
		require.NoError(t, err)
		public, err := pair.PublicKey()
		require.NoError(t, err)
		_, err = c.client.Typed.CoreV1().Secrets(c.place.Namespace).Create(t.Context(), &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: secret},
			Data: map[string][]byte{"user.key": seed, "user.pub": []byte(public)}}, metav1.CreateOptions{})
		require.NoError(t, err)
		return public
	}
	accounts := fmt.Sprintf(`accounts {
	NVCF { jetstream: enabled, users: [{nkey: %s}, {nkey: %s, permissions: { publish: { deny: "$JS.API.STREAM.UPDATE.>" } }}] }
	OTHER { jetstream: enabled, users: [{nkey: %s}] }
	PLAIN { users: [{nkey: %s}] }
	SYS { users: [{user: sys, password: fake}] }
}
system_account: SYS`, user("nats-nkeys"), user("reader"), user("other"), user("plain"))
	for i := range members {
		file := filepath.Join(t.TempDir(), "nats.conf")
		require.NoError(t, os.WriteFile(file, fmt.Appendf(nil, `server_name: nats-%d
listen: 127.0.0.1:%d
http: 127.0.0.1:%d
jetstream { store_dir: %q, max_mem: 64MB, max_file: 64MB }
cluster { name: C, listen: "127.0.0.1:%d", routes: [%s] }
%s
`, i, c.clients[i], c.monitor[i], t.TempDir(), ports[2*members+i], routes, accounts), 0o600))
		c.configs = append(c.configs, file)
	}
	c.pods()
	for i := range members {
		c.up(i)
	}
	t.Cleanup(func() {
		for i := range members {
			c.down(i)
		}
	})
	c.healthy()
	return c
}

func (c *cluster) pods() {
	labels := map[string]string{"app.kubernetes.io/name": "nats"}
	spec := corev1.PodSpec{Containers: []corev1.Container{{Name: "nats", Image: "nats"}, {Name: "reloader", Image: "reloader"}}}
	replicas := int32(members)
	_, err := c.client.Typed.AppsV1().StatefulSets(c.place.Namespace).Create(c.t.Context(), &appsv1.StatefulSet{
		ObjectMeta: metav1.ObjectMeta{Name: "nats", Labels: labels},
		Spec: appsv1.StatefulSetSpec{Replicas: &replicas, ServiceName: "nats-headless", Selector: &metav1.LabelSelector{MatchLabels: labels},
			Template: corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: labels}, Spec: spec}},
	}, metav1.CreateOptions{})
	require.NoError(c.t, err)
	for i := range members {
		c.pod(i, labels, spec)
	}
}

func (c *cluster) pod(i int, labels map[string]string, spec corev1.PodSpec) {
	pods := c.client.Typed.CoreV1().Pods(c.place.Namespace)
	pod, err := pods.Create(c.t.Context(), &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("nats-%d", i), Labels: labels}, Spec: spec}, metav1.CreateOptions{})
	require.NoError(c.t, err)
	pod.Status.Phase = corev1.PodRunning
	pod.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}
	_, err = pods.UpdateStatus(c.t.Context(), pod, metav1.UpdateOptions{})
	require.NoError(c.t, err)
}

func (c *cluster) up(i int) {
	opts, err := server.ProcessConfigFile(c.configs[i])
	require.NoError(c.t, err)
	opts.NoSigs, opts.NoLog = true, true
	s, err := server.NewServer(opts)
	require.NoError(c.t, err)
	s.Start()
	c.mu.Lock()
	defer c.mu.Unlock()
	c.servers[i] = s
}

func (c *cluster) down(i int) {
	c.mu.Lock()
	s := c.servers[i]
	c.servers[i] = nil
	c.mu.Unlock()
	if s != nil {
		s.Shutdown()
		s.WaitForShutdown()
	}
}

// dial is the tunnel: it knows the pods, and finds nobody behind one that is
// cut off.
func (c *cluster) dial(ctx context.Context, _ *kube.Client, namespace, pod string, port int) (net.Conn, error) {
	var i int
	if _, err := fmt.Sscanf(pod, "nats-%d", &i); err != nil || namespace != c.place.Namespace {
		return nil, fmt.Errorf("no pod %s/%s", namespace, pod)
	}
	c.mu.Lock()
	cut := c.cut[pod]
	c.mu.Unlock()
	if cut {
		return nil, errors.New("error forwarding port: connection refused")
	}
	at := map[int]int{8222: c.monitor[i], 4222: c.clients[i]}[port]
	return new(net.Dialer).DialContext(ctx, "tcp", fmt.Sprintf("127.0.0.1:%d", at))
}

func (c *cluster) cutOff(pod string, cut bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.cut[pod] = cut
}

// healthy waits until every server answers its full /healthz.
func (c *cluster) healthy() {
	c.t.Helper()
	l, err := c.acts.looker(c.t.Context(), c.place)
	require.NoError(c.t, err)
	defer l.close()
	var v View
	require.Eventually(c.t, func() bool {
		answers, err := l.look(c.t.Context())
		if err != nil {
			return false
		}
		v = Judge(answers)
		for _, a := range answers {
			if a.Meta == nil || a.Meta.Leader == "" {
				return false
			}
		}
		return len(v.Troubles) == 0
	}, 30*time.Second, 100*time.Millisecond, "%+v", v.Troubles)
}

// js is a client in the account of a Secret's user.
func (c *cluster) js(secret string) jetstream.JetStream {
	c.t.Helper()
	js, err := jetstream.New(c.connect(secret))
	require.NoError(c.t, err)
	return js
}

// heard listens to what is asked of JetStream from now on in the account of a
// Secret's user, and tells each subject once.
func (c *cluster) heard(secret string) (subjects func() []string) {
	c.t.Helper()
	conn := c.connect(secret)
	s, err := conn.SubscribeSync("$JS.API.>")
	require.NoError(c.t, err)
	require.NoError(c.t, conn.Flush())
	return func() (out []string) {
		for {
			m, err := s.NextMsg(time.Second)
			if errors.Is(err, nats.ErrTimeout) {
				slices.Sort(out)
				return slices.Compact(out)
			}
			require.NoError(c.t, err)
			out = append(out, m.Subject)
		}
	}
}

func (c *cluster) connect(secret string) *nats.Conn {
	c.t.Helper()
	s, err := c.client.Typed.CoreV1().Secrets(c.place.Namespace).Get(c.t.Context(), secret, metav1.GetOptions{})
	require.NoError(c.t, err)
	pair, err := nkeys.FromSeed(s.Data["user.key"])
	require.NoError(c.t, err)
	var urls []string
	for _, p := range c.clients {
		urls = append(urls, fmt.Sprintf("nats://127.0.0.1:%d", p))
	}
	conn, err := nats.Connect(strings.Join(urls, ","), nats.Nkey(string(s.Data["user.pub"]), pair.Sign), nats.MaxReconnects(-1), nats.ReconnectWait(50*time.Millisecond))
	require.NoError(c.t, err)
	c.t.Cleanup(conn.Close)
	return conn
}

func (c *cluster) stream(js jetstream.JetStream, config jetstream.StreamConfig) jetstream.Stream {
	c.t.Helper()
	config.Subjects = []string{config.Name + ".>"}
	var s jetstream.Stream
	require.Eventually(c.t, func() bool {
		var err error
		s, err = js.CreateStream(c.t.Context(), config)
		return err == nil
	}, 20*time.Second, 100*time.Millisecond)
	return s
}

func (c *cluster) publish(js jetstream.JetStream, stream string, n int) {
	c.t.Helper()
	for range n {
		require.Eventually(c.t, func() bool {
			_, err := js.Publish(c.t.Context(), stream+".x", []byte("a request"))
			return err == nil
		}, 20*time.Second, 100*time.Millisecond)
	}
}

// leader is the number of the server that holds a stream.
func (c *cluster) leader(s jetstream.Stream) int {
	c.t.Helper()
	var i int
	require.Eventually(c.t, func() bool {
		info, err := s.Info(c.t.Context())
		if err != nil || info.Cluster == nil {
			return false
		}
		_, err = fmt.Sscanf(info.Cluster.Leader, "nats-%d", &i)
		return err == nil
	}, 20*time.Second, 100*time.Millisecond)
	return i
}

func (c *cluster) drain(limit time.Duration) DrainResult {
	c.t.Helper()
	out, err := c.acts.Drain(c.t.Context(), DrainRequest{Place: c.place, Least: 1, Limit: limit})
	require.NoError(c.t, err)
	return out
}
