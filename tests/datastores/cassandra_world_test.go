package datastores

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/gocql/gocql"
	"github.com/stretchr/testify/require"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/client-go/tools/remotecommand"

	"github.com/refit-run/refit/tests/sandbox"
	"github.com/refit-run/refit/workflows/protocol"
)

// What the sandbox's Cassandra begins with.
const (
	cassandraSystem  = "cassandra-system"
	cassandraMembers = 3
	records          = 1000
	services         = 20
)

// ringLimit is for what members of Cassandra do, each in half a minute on an
// idle machine.
const ringLimit = 15 * time.Minute

// upCassandra is a sandbox with one member, unless this machine lacks what that
// needs.
func upCassandra(t *testing.T) *world {
	t.Helper()
	dir := os.Getenv("REFIT_SANDBOX_CASSANDRA")
	if dir == "" {
		dir = filepath.Join("..", "..", "bin", "cassandra")
	}
	if jars, _ := filepath.Glob(filepath.Join(dir, "lib", "cassandra-all-*.jar")); len(jars) == 0 {
		t.Skipf("not run: no jars of Cassandra in %s: run `make cassandra`", dir)
	}
	if _, err := exec.LookPath("java"); err != nil {
		t.Skipf("not run: %v: install a Java runtime of release 17", err)
	}
	return up(t, "cassandra")
}

// password is the administrator's, from where the plan says it is.
func (w *world) password() string {
	w.t.Helper()
	s, err := w.Kube.CoreV1().Secrets(cassandraSystem).Get(context.Background(), "cassandra-admin", metav1.GetOptions{})
	require.NoError(w.t, err)
	return string(s.Data["password"])
}

// toMember leads a session to the pod that has the name now.
type toMember struct {
	w   *world
	pod string
}

func (d toMember) DialContext(ctx context.Context, _, _ string) (net.Conn, error) {
	return d.w.dial(ctx, cassandraSystem, d.pod, 9042)
}

// cql logs in to one member and stays there.
func (w *world) cql(member int, role, password string) (*gocql.Session, error) {
	return sandbox.CQL(toMember{w, fmt.Sprintf("cassandra-%d", member)}, role, password)
}

// asAdmin runs one statement on a member and scans its only row, if asked.
func (w *world) asAdmin(member int, statement string, into ...any) error {
	w.t.Helper()
	db, err := w.cql(member, "cassandra", w.password())
	if err != nil {
		return err
	}
	defer db.Close()
	if len(into) == 0 {
		return db.Query(statement).Exec()
	}
	return db.Query(statement).Scan(into...)
}

// seen is how many rows a member shows at LOCAL_ONE.
func (w *world) seen(member int) int {
	w.t.Helper()
	var n int
	require.NoError(w.t, w.asAdmin(member, "SELECT count(*) FROM nvcf_api.records", &n))
	return n
}

// whole proves that every member has everything and lets the administrator in.
func (w *world) whole() {
	w.t.Helper()
	for member := range cassandraMembers {
		require.Equal(w.t, records, w.seen(member), "rows that cassandra-%d shows", member)
	}
	for _, keyspace := range []string{"system_auth", "nvcf_api"} {
		replication := map[string]string{}
		require.NoError(w.t, w.asAdmin(0, "SELECT replication FROM system_schema.keyspaces WHERE keyspace_name = '"+keyspace+"'", &replication))
		require.Equal(w.t, "3", replication["ncp"], keyspace)
	}
}

// nodetool runs in the member's own container.
func (w *world) nodetool(pod string, args ...string) string {
	w.t.Helper()
	config, err := clientcmd.BuildConfigFromFlags("", w.Vars["KUBECONFIG"])
	require.NoError(w.t, err)
	request := w.Kube.CoreV1().RESTClient().Post().Resource("pods").Namespace(cassandraSystem).Name(pod).SubResource("exec").VersionedParams(
		&corev1.PodExecOptions{Container: "cassandra", Command: append([]string{"nodetool"}, args...), Stdout: true, Stderr: true}, scheme.ParameterCodec)
	executor, err := remotecommand.NewSPDYExecutor(config, http.MethodPost, request.URL())
	require.NoError(w.t, err)
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	var out bytes.Buffer
	err = executor.StreamWithContext(ctx, remotecommand.StreamOptions{Stdout: &out, Stderr: &out})
	require.NoError(w.t, err, "nodetool %v on %s: %s", args, pod, &out)
	return out.String()
}

// tally is what a client met.
type tally struct {
	Answers, Refused, Missing, NoQuorum, Unreachable int
	// First is the first refusal or missing row, with what the run did then.
	First string
}

// meets sorts an error of CQL.
func (c *tally) meets(err error, where string) {
	text := fmt.Sprint(err)
	switch {
	case err == nil:
		c.Answers++
		return
	case errors.Is(err, gocql.ErrNotFound):
		c.Missing++
	case strings.Contains(text, "are incorrect"), strings.Contains(text, "permission"):
		c.Refused++
	case strings.Contains(text, "Cannot achieve consistency level"):
		c.NoQuorum++
		return
	default:
		c.Unreachable++
		return
	}
	if c.First == "" {
		c.First = where + ": " + text
	}
}

// uses is a client that logs in to every member that is there, each time as
// another service, and reads a row, until done is called. run names what is
// going on, for the report.
func (w *world) uses(run string, consistency gocql.Consistency) (done func() tally) {
	var c tally
	password := w.password()
	stop := make(chan struct{})
	var working sync.WaitGroup
	working.Go(func() {
		tick := time.NewTicker(250 * time.Millisecond)
		defer tick.Stop()
		for n := 0; ; n++ {
			select {
			case <-stop:
				return
			case <-tick.C:
			}
			member := n % cassandraMembers
			if p, err := w.pod(cassandraSystem, fmt.Sprintf("cassandra-%d", member)); err != nil || p.Status.PodIP == "" {
				continue // nobody would be led there
			}
			err := w.readsOne(member, n, password, consistency)
			where := ""
			if err != nil && c.First == "" {
				s, _ := w.Status(run)
				where = fmt.Sprintf("cassandra-%d at stage %s, %v", member, s.Stage, s.Current)
			}
			c.meets(err, where)
		}
	})
	var once sync.Once
	done = func() tally {
		once.Do(func() { close(stop) })
		working.Wait()
		return c
	}
	w.t.Cleanup(func() { done() })
	return done
}

func (w *world) readsOne(member, n int, password string, consistency gocql.Consistency) error {
	db, err := w.cql(member, fmt.Sprintf("service_%02d", n%services), password)
	if err != nil {
		return err
	}
	defer db.Close()
	var body string
	return db.Query("SELECT body FROM nvcf_api.records WHERE id = ?", n*37%records).Consistency(consistency).Scan(&body)
}

// finish waits for the end of a run with the patience that members need.
func (w *world) finish(run string, result any) {
	w.t.Helper()
	w.Until(run, "the end", ringLimit, func(s protocol.Status) bool {
		return sandbox.Closed(s) || s.WaitingFor != nil && s.WaitingFor.Kind == protocol.WaitParked
	})
	w.Result(run, result)
}

// ringParks waits until the run parks with these words.
func (w *world) ringParks(run, found string) protocol.Waiting {
	w.t.Helper()
	s := w.Until(run, "parking with "+found, ringLimit, func(s protocol.Status) bool {
		return s.WaitingFor != nil && s.WaitingFor.Kind == protocol.WaitParked && strings.Contains(s.WaitingFor.Found, found)
	})
	return *s.WaitingFor
}

// inZones gives every node a zone of its own.
func (w *world) inZones() {
	w.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	nodes, err := w.Kube.CoreV1().Nodes().List(ctx, metav1.ListOptions{})
	require.NoError(w.t, err)
	require.Greater(w.t, len(nodes.Items), 1)
	for i, n := range nodes.Items {
		patch := fmt.Appendf(nil, `{"metadata":{"labels":{%q:"zone-%d"}}}`, corev1.LabelTopologyZone, i)
		_, err := w.Kube.CoreV1().Nodes().Patch(ctx, n.Name, types.MergePatchType, patch, metav1.PatchOptions{})
		require.NoError(w.t, err)
	}
}

func (w *world) statefulSet(namespace string) *appsv1.StatefulSet {
	w.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	set, err := w.Kube.AppsV1().StatefulSets(namespace).Get(ctx, "cassandra", metav1.GetOptions{})
	require.NoError(w.t, err)
	return set
}

// harmless looks back: none of what Refit has done in the cluster was a cleanup,
// a scale down or the end of a volume, in the pods it ran these commands of
// nodetool and nothing else, and nobody who reads what is kept of the runs learns
// the administrator's password.
func (w *world) harmless(commands []string, runs ...string) {
	w.t.Helper()
	log, err := os.ReadFile(w.Vars["REFIT_SANDBOX_AUDIT_LOG"])
	require.NoError(w.t, err)
	require.NotContains(w.t, string(log), url.QueryEscape(w.password()))
	var ran []string
	for line := range bytes.Lines(log[:bytes.LastIndexByte(log, '\n')+1]) {
		var e struct {
			Verb             string
			RequestURI       string
			ImpersonatedUser struct{ Username string }
			ObjectRef        struct{ Resource, Subresource, Name string }
		}
		require.NoError(w.t, json.Unmarshal(line, &e))
		if e.ImpersonatedUser.Username != shipped {
			continue
		}
		if e.Verb == "delete" || e.Verb == "deletecollection" {
			require.Equal(w.t, "leases", e.ObjectRef.Resource, "deleted %s", e.ObjectRef.Name)
		}
		at, err := url.Parse(e.RequestURI)
		require.NoError(w.t, err)
		if e.ObjectRef.Subresource == "exec" {
			argv := at.Query()["command"]
			require.Greater(w.t, len(argv), 1, "%v", argv)
			require.Equal(w.t, "nodetool", argv[0], "%v", argv)
			ran = append(ran, argv[1])
		}
	}
	slices.Sort(ran)
	require.Equal(w.t, commands, slices.Compact(ran))
	require.Equal(w.t, int32(cassandraMembers), *w.statefulSet(cassandraSystem).Spec.Replicas)
	for _, run := range runs {
		w.secretly(run, w.password())
	}
}
