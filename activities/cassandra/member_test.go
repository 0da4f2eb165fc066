//go:build linux

package cassandra

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/refit-run/refit/activities/artifact"
	"github.com/refit-run/refit/activities/internal/apiservertest"
	"github.com/refit-run/refit/activities/kube"
	"github.com/refit-run/refit/activities/secret"
	"github.com/refit-run/refit/tests/freeport"
)

// jarsVariable names the folder with the jars of Apache Cassandra.
const jarsVariable = "REFIT_TEST_CASSANDRA"

// ring is up to three real members on loopback, and the pods that stand for
// them in a real API server. They have no kubelet: tunnel and exec are
// replaced by a plain connection and a local process.
type ring struct {
	t         *testing.T
	acts      *Activities
	place     Place
	client    *kube.Client
	jars      string
	root      string
	addresses []string
	jmx       []int
	// seeds and tokens of the members; usually the first is the only seed, and
	// tokens are drawn.
	seeds  string
	admin  Login
	tokens [3]string

	mu      sync.Mutex
	members [3]*exec.Cmd
	// lost makes the next exec whose arguments hold it lose its end: the
	// command runs, and nobody hears how it went.
	lost string
	ran  []string
}

// opens are the flags that a Java 17 needs.
var opens = strings.Fields(`--add-exports java.base/jdk.internal.misc=ALL-UNNAMED --add-exports java.base/jdk.internal.ref=ALL-UNNAMED
--add-exports java.base/sun.nio.ch=ALL-UNNAMED --add-exports java.management.rmi/com.sun.jmx.remote.internal.rmi=ALL-UNNAMED
--add-exports java.rmi/sun.rmi.registry=ALL-UNNAMED --add-exports java.rmi/sun.rmi.server=ALL-UNNAMED
--add-exports java.rmi/sun.rmi.transport.tcp=ALL-UNNAMED --add-exports java.sql/java.sql=ALL-UNNAMED
--add-opens java.base/java.lang.module=ALL-UNNAMED --add-opens java.base/jdk.internal.loader=ALL-UNNAMED
--add-opens java.base/jdk.internal.ref=ALL-UNNAMED --add-opens java.base/jdk.internal.reflect=ALL-UNNAMED
--add-opens java.base/jdk.internal.math=ALL-UNNAMED --add-opens java.base/jdk.internal.module=ALL-UNNAMED
--add-opens java.base/jdk.internal.util.jar=ALL-UNNAMED --add-opens jdk.management/com.sun.management.internal=ALL-UNNAMED
--add-opens java.base/sun.nio.ch=ALL-UNNAMED --add-opens java.base/java.io=ALL-UNNAMED --add-opens java.base/java.lang=ALL-UNNAMED
--add-opens java.base/java.lang.reflect=ALL-UNNAMED --add-opens java.base/java.util=ALL-UNNAMED
--add-opens java.base/java.util.concurrent=ALL-UNNAMED --add-opens java.base/java.util.concurrent.atomic=ALL-UNNAMED
--add-opens java.base/java.nio=ALL-UNNAMED`)

// newRing starts the first member, with the StatefulSet that asks for it.
func newRing(t *testing.T, options ...func(*ring)) *ring {
	t.Helper()
	if os.Getenv("REFIT_TEST_LONG") == "" {
		t.Skip("real members of Cassandra by hand take minutes: runs with REFIT_TEST_LONG=1 (make test-long)")
	}
	jars := os.Getenv(jarsVariable)
	if jars == "" {
		t.Skipf("%s names no folder with the jars of Cassandra", jarsVariable)
	}
	api := apiservertest.Shared(t)
	store, err := artifact.Open(t.TempDir(), nil)
	require.NoError(t, err)
	r := &ring{t: t, client: api.Client(t), jars: jars, root: t.TempDir()}
	r.jmx, err = freeport.Get(len(r.members))
	require.NoError(t, err)
	for i := range r.members {
		r.addresses = append(r.addresses, fmt.Sprintf("127.%d.%d.%d", 64+os.Getpid()>>8&63, os.Getpid()&255, 11+i))
	}
	r.seeds, r.tokens = r.addresses[0], [3]string{"num_tokens: 8", "num_tokens: 8", "num_tokens: 8"}
	r.admin = Login{Password: secret.Reference{Secret: "cassandra-admin", Key: "password"}}
	r.place = Place{Target: api.Target(t, "prod"), Namespace: api.Namespace(t)}
	r.acts = &Activities{Clusters: api.Clusters(t, "prod"), Artifacts: store, Dial: r.dial, Exec: r.exec, Pace: 200 * time.Millisecond}
	_, err = r.client.Typed.CoreV1().Secrets(r.place.Namespace).Create(t.Context(), &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: "cassandra-admin"},
		Data: map[string][]byte{"password": []byte("cassandra"), "wrong": []byte("fake-wrong-password"), "changed": []byte("fake-changed-password")}}, metav1.CreateOptions{})
	require.NoError(t, err)
	one := int32(1)
	labels := map[string]string{"app.kubernetes.io/name": "cassandra"}
	_, err = r.client.Typed.AppsV1().StatefulSets(r.place.Namespace).Create(t.Context(), &appsv1.StatefulSet{
		ObjectMeta: metav1.ObjectMeta{Name: "cassandra"},
		Spec: appsv1.StatefulSetSpec{Replicas: &one, ServiceName: "cassandra-headless", Selector: &metav1.LabelSelector{MatchLabels: labels},
			Template: corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: labels}, Spec: podSpec("dc1")}},
	}, metav1.CreateOptions{})
	require.NoError(t, err)
	t.Cleanup(func() {
		for i := range r.members {
			r.kill(i)
		}
	})
	for _, o := range options {
		o(r)
	}
	r.join(0)
	require.Eventually(t, func() bool { // the server makes its first role after it has begun to listen
		out, err := r.acts.Logins(t.Context(), LoginsRequest{Place: r.place, Login: r.admin, Limit: time.Millisecond})
		return err == nil && out.OK
	}, time.Minute, 500*time.Millisecond)
	return r
}

// join starts a member, waits until it serves, and lets its pod appear.
func (r *ring) join(i int) {
	r.t.Helper()
	r.start(i)
	pods := r.client.Typed.CoreV1().Pods(r.place.Namespace)
	pod, err := pods.Create(r.t.Context(), &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("cassandra-%d", i), Labels: map[string]string{"app.kubernetes.io/name": "cassandra"}},
		Spec: podSpec("dc1")}, metav1.CreateOptions{})
	require.NoError(r.t, err)
	pod.Status.Phase = corev1.PodRunning
	// The API server takes no loopback address as a pod's.
	pod.Status.PodIP, pod.Status.PodIPs = "10.0.0."+fmt.Sprint(11+i), []corev1.PodIP{{IP: "10.0.0." + fmt.Sprint(11+i)}}
	pod.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}
	_, err = pods.UpdateStatus(r.t.Context(), pod, metav1.UpdateOptions{})
	require.NoError(r.t, err)
	count := int32(i + 1)
	_, err = r.client.Typed.AppsV1().StatefulSets(r.place.Namespace).Patch(r.t.Context(), "cassandra", "application/merge-patch+json",
		fmt.Appendf(nil, `{"spec":{"replicas":%d}}`, count), metav1.PatchOptions{})
	require.NoError(r.t, err)
}

func (r *ring) start(i int) {
	r.t.Helper()
	home := filepath.Join(r.root, fmt.Sprint(i))
	conf := filepath.Join(home, "conf")
	require.NoError(r.t, os.MkdirAll(conf, 0o755))
	for name, text := range map[string]string{
		"cassandra.yaml":              fmt.Sprintf(yaml, r.tokens[i], home, home, home, home, home, r.seeds, r.addresses[i], r.addresses[i]),
		"cassandra-rackdc.properties": fmt.Sprintf("dc=dc1\nrack=rack%d\n", i),
		"logback.xml": fmt.Sprintf(`<configuration><appender name="F" class="ch.qos.logback.core.FileAppender"><file>%s/system.log</file>
<encoder><pattern>%%-5level %%date{ISO8601} %%msg%%n</pattern></encoder></appender><root level="INFO"><appender-ref ref="F"/></root></configuration>`, home),
	} {
		require.NoError(r.t, os.WriteFile(filepath.Join(conf, name), []byte(text), 0o600))
	}
	args := append([]string{"-Xms256m", "-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xss256k", "-Djdk.attach.allowAttachSelf=true", "-Djava.net.preferIPv4Stack=true"}, opens...)
	args = append(args, fmt.Sprintf("-Dcassandra.jmx.local.port=%d", r.jmx[i]), "-Dcassandra.config=file://"+conf+"/cassandra.yaml",
		"-Dcassandra-rackdc.properties=file://"+conf+"/cassandra-rackdc.properties", "-Dlogback.configurationFile="+conf+"/logback.xml",
		"-Dcassandra.storagedir="+home, "-Dcassandra.logdir="+home, "-Dcassandra.ring_delay_ms=5000", "-Dcassandra.superuser_setup_delay_ms=0",
		"-Dcassandra.skip_wait_for_gossip_to_settle=0", "-Dcassandra-foreground=yes", "-cp", conf+":"+r.jars+"/*", "org.apache.cassandra.service.CassandraDaemon")
	cmd := exec.Command("java", args...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	output, err := os.Create(filepath.Join(home, "stdout.log"))
	require.NoError(r.t, err)
	defer output.Close()
	cmd.Stdout, cmd.Stderr = output, output
	require.NoError(r.t, cmd.Start())
	r.members[i] = cmd
	require.Eventually(r.t, func() bool {
		exit, err := r.tool(r.t.Context(), i, "status")
		return err == nil && strings.Contains(exit.Stdout, "UN  "+r.addresses[i]+" ") && r.listens(i)
	}, 4*time.Minute, 500*time.Millisecond, "member %d does not come up; see %s", i, home)
}

func (r *ring) listens(i int) bool {
	conn, err := net.Dial("tcp", r.addresses[i]+":9042")
	if err == nil {
		conn.Close()
	}
	return err == nil
}

func (r *ring) kill(i int) {
	if cmd := r.members[i]; cmd != nil {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		r.members[i] = nil
	}
}

func (r *ring) dial(ctx context.Context, _ *kube.Client, _, pod string, port int) (net.Conn, error) {
	i, _ := ordinal("cassandra", pod)
	var d net.Dialer
	return d.DialContext(ctx, "tcp", fmt.Sprintf("%s:%d", r.addresses[i], port))
}

// exec runs nodetool for a pod. Addresses are those that the pods have.
func (r *ring) exec(ctx context.Context, _ *kube.Client, cmd kube.Command) (kube.Exit, error) {
	i, _ := ordinal("cassandra", cmd.Pod)
	if cmd.Limit > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, cmd.Limit)
		defer cancel()
	}
	line := cmd.Pod + " " + strings.Join(cmd.Argv[1:], " ")
	r.mu.Lock()
	r.ran = append(r.ran, line)
	lost := r.lost != "" && strings.Contains(line, r.lost)
	if lost {
		r.lost = ""
	}
	r.mu.Unlock()
	exit, err := r.tool(ctx, i, cmd.Argv[1:]...)
	if lost && err == nil {
		return kube.Exit{}, errors.New("the stream broke")
	}
	for n, a := range r.addresses {
		exit.Stdout = strings.ReplaceAll(exit.Stdout, a, fmt.Sprintf("10.0.0.%d", 11+n))
	}
	return exit, err
}

func (r *ring) tool(ctx context.Context, i int, args ...string) (kube.Exit, error) {
	home := filepath.Join(r.root, fmt.Sprint(i))
	all := append([]string{"-Xmx64m", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-Dlogback.configurationFile=" + home + "/conf/logback.xml", "-Djava.net.preferIPv4Stack=true",
		"-Dcassandra.config=file://" + home + "/conf/cassandra.yaml", "-Dcassandra.storagedir=" + home}, opens...)
	all = append(all, "-cp", r.jars+"/*", "org.apache.cassandra.tools.NodeTool", "-h", "127.0.0.1", "-p", fmt.Sprint(r.jmx[i]))
	cmd := exec.CommandContext(ctx, "java", append(all, args...)...)
	var out, complaints bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &complaints
	err := cmd.Run()
	var failed *exec.ExitError
	if errors.As(err, &failed) && ctx.Err() == nil {
		err = nil
	}
	return kube.Exit{Code: cmd.ProcessState.ExitCode(), Stdout: out.String(), Stderr: complaints.String()}, err
}

// yaml is a member's configuration, as small as it goes.
const yaml = `cluster_name: refit-test
%s
authenticator: {class_name: PasswordAuthenticator}
authorizer: {class_name: CassandraAuthorizer}
role_manager: {class_name: CassandraRoleManager}
roles_validity: 1s
partitioner: org.apache.cassandra.dht.Murmur3Partitioner
data_file_directories: [%s/data]
commitlog_directory: %s/commitlog
hints_directory: %s/hints
saved_caches_directory: %s/saved
cdc_raw_directory: %s/cdc
commitlog_sync: periodic
commitlog_sync_period: 10000ms
commitlog_total_space: 64MiB
commitlog_segment_size: 8MiB
seed_provider:
  - class_name: org.apache.cassandra.locator.SimpleSeedProvider
    parameters: [{seeds: "%s"}]
listen_address: %s
rpc_address: %s
storage_port: 7000
native_transport_port: 9042
endpoint_snitch: GossipingPropertyFileSnitch
memtable_heap_space: 32MiB
memtable_offheap_space: 32MiB
key_cache_size: 2MiB
file_cache_size: 32MiB
networking_cache_size: 16MiB
concurrent_reads: 4
concurrent_writes: 4
concurrent_compactors: 1
auto_snapshot: false
`
