package datastores

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/gocql/gocql"
	"github.com/stretchr/testify/require"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/refit-run/refit/workflows/protocol"
)

// replicated is the result of a CassandraReplication.
type replicated struct {
	protocol.Receipt
	Raised  []struct{} `json:"raised"`
	Already []string   `json:"already"`
	Absent  []string   `json:"absent"`
	Outside []struct {
		Name string `json:"name"`
	} `json:"outside"`
	Repairs []struct {
		Pod      string `json:"pod"`
		Attempts int    `json:"attempts"`
	} `json:"repairs"`
}

// cassandraReplicated raises what is raised, and what nobody has.
func (w *world) cassandraReplicated() {
	before := w.schema(0)
	var out replicated
	w.finish(w.Start(cassandraReplicationPlan, []string{"keyspaces=[nvcf_api, absent_api]"}, "--id", "replicated"), &out)
	require.Equal(w.t, protocol.OutcomeNoChange, out.Outcome)
	require.Equal(w.t, []string{"nvcf_api"}, out.Already)
	require.Equal(w.t, []string{"absent_api"}, out.Absent)
	var outside []string
	for _, k := range out.Outside {
		outside = append(outside, k.Name)
	}
	require.Contains(w.t, outside, "schema_migrations")
	require.Contains(w.t, outside, "ess_api")
	require.Empty(w.t, out.Repairs)
	require.Equal(w.t, before, w.schema(0), "no ALTER")
	w.Record("cassandra-replication", "replicated")
}

// cassandraOtherDataCentre has the pods' template tell a name that the members
// don't live by; they are left running.
func (w *world) cassandraOtherDataCentre() {
	before := w.schema(0)
	for _, c := range []struct{ told, row, found string }{
		{"ncp-2", "N184", `"ncp" on cassandra-0`},
		{"ncp': '3'} AND comment = '", "N139", "letters, digits, underscores and hyphens"},
	} {
		w.tells(c.told)
		run := w.Start(cassandraReplicationPlan, []string{"keyspaces=[ess_api]"})
		parked := w.parks(run, "data centre of Cassandra")
		require.Contains(w.t, parked.Found, c.row)
		require.Contains(w.t, parked.Found, c.found)
		w.Answer(protocol.Abort, run)
		var out replicated
		w.finish(run, &out)
		require.Equal(w.t, protocol.OutcomeAborted, out.Outcome)
	}
	require.Equal(w.t, before, w.schema(0), "no ALTER, although ess_api has one copy")
	w.tells("ncp")
}

// tells sets the data centre in the pod template, and no pod is replaced.
func (w *world) tells(center string) {
	w.t.Helper()
	patch := fmt.Appendf(nil, `{"spec":{"updateStrategy":{"rollingUpdate":{"partition":%d}},"template":{"spec":{"containers":[{"name":"cassandra","env":[{"name":"CASSANDRA_DC","value":%q}]}]}}}}`, cassandraMembers, center)
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	_, err := w.Kube.AppsV1().StatefulSets(cassandraSystem).Patch(ctx, "cassandra", types.StrategicMergePatchType, patch, metav1.PatchOptions{})
	require.NoError(w.t, err)
}

// cassandraDisagrees changes the schema while one member does not listen. Once
// it listens again all are up, and it takes a minute until it asks for what it
// has missed.
// A member takes another schema over at once in the first minute of its life
// (cassandra.migration_delay_ms), and later after a minute.
func (w *world) cassandraDisagrees() {
	w.eventually("cassandra-2 has run for its first minute", func(ctx context.Context) error {
		pod, err := w.Kube.CoreV1().Pods(cassandraSystem).Get(ctx, "cassandra-2", metav1.GetOptions{})
		if err != nil {
			return err
		}
		running := pod.Status.ContainerStatuses[0].State.Running
		if running == nil || time.Since(running.StartedAt.Time) < 70*time.Second {
			return fmt.Errorf("it runs since %v", running)
		}
		return nil
	})
	before := w.schema(0)
	w.nodetool("cassandra-2", "disablegossip")
	// A late message may let it be up once more, and then it is told of the change:
	// so both look twice.
	for _, pod := range []string{"cassandra-0", "cassandra-1", "cassandra-0", "cassandra-1"} {
		w.eventually(pod+" sees cassandra-2 down", func(context.Context) error {
			if status := w.nodetool(pod, "status"); !strings.Contains(status, "\nDN ") {
				return errors.New(status)
			}
			return nil
		})
	}
	w.altersAlone(0, "ALTER TABLE nvct_api.records WITH comment = 'seen by two'")
	require.NotEqual(w.t, before, w.schema(0))
	w.nodetool("cassandra-2", "enablegossip")
	require.Equal(w.t, before, w.schema(2), "a member that disagrees")

	run := w.Start(cassandraReplicationPlan, []string{"keyspaces=[nvcf_api]", "limits.join=10s"}, "--id", "disagree")
	parked := w.parks(run, "schema of Cassandra: expected one version on all members")
	require.Contains(w.t, parked.Found, before.String())
	w.eventually("all members have one schema", func(context.Context) error {
		if other := w.schema(2); other != w.schema(0) {
			return fmt.Errorf("cassandra-2 has %s", other)
		}
		return nil
	})
	w.Answer(protocol.Retry, run)
	var out replicated
	w.finish(run, &out)
	require.Equal(w.t, protocol.OutcomeNoChange, out.Outcome)
}

// altersAlone has a member change the schema and waits for no other.
func (w *world) altersAlone(member int, statement string) {
	w.t.Helper()
	db, err := w.cql(member, "cassandra", w.password())
	require.NoError(w.t, err)
	defer db.Close()
	ctx, cancel := context.WithTimeout(context.Background(), 3*time.Second)
	defer cancel()
	_ = db.Query(statement).WithContext(ctx).Exec() // the client would wait for all
}

// schema is the version that a member has by itself.
func (w *world) schema(member int) (version gocql.UUID) {
	w.t.Helper()
	require.NoError(w.t, w.asAdmin(member, "SELECT schema_version FROM system.local", &version))
	return version
}

// cassandraDiesInARepair holds a member until the repair of another one with it
// has failed, and kills it then. The kubelet starts it again, and the repair is
// tried again.
func (w *world) cassandraDiesInARepair() {
	run := w.Start(cassandraReplicationPlan, []string{"keyspaces=[nvcf_api]", "repair=always"}, "--id", "dies")
	w.inARepair(run, "cassandra-0", "nvcf_api", "cassandra-2")
	w.untilRing(run, "the end of the call", func(protocol.Status) bool { return !w.calls("cassandra-0", "repair", "nvcf_api") })
	w.signal("cassandra-2", syscall.SIGKILL)
	var out replicated
	w.finish(run, &out)
	require.Equal(w.t, protocol.OutcomeDone, out.Outcome)
	require.Empty(w.t, out.Raised)
	require.Len(w.t, out.Repairs, cassandraMembers)
	require.Equal(w.t, "cassandra-0", out.Repairs[0].Pod)
	require.Greater(w.t, out.Repairs[0].Attempts, 1, "a repair that failed is tried again")
	w.whole()
}

// cassandraRefusedOnOne goes on with three members. Two of them remember the
// administrator's old password, which the plan still names; the third asks the
// table. A service has been refused meanwhile, too.
func (w *world) cassandraRefusedOnOne() {
	w.logsOfAService("echo AuthenticationException: Provided username nvcf_api and/or password are incorrect")
	for _, member := range []string{"cassandra-0", "cassandra-1"} {
		w.nodetool(member, "setauthcacheconfig", "--cache-name", "CredentialsCache", "--validity-period", "3600000", "--update-interval", "3600000", "--disable-active-update")
	}
	for member := range 2 {
		require.NoError(w.t, w.asAdmin(member, "SELECT release_version FROM system.local", new(string)))
	}
	require.NoError(w.t, w.asAdmin(2, "ALTER ROLE cassandra WITH PASSWORD = 'another-not-a-secret'"))
	run := w.Start(cassandraExpandPlan, []string{oneKeyspace, "limits.authentication=5s"}, "--id", "refused")
	parked := w.ringParks(run, "N143: login of cassandra on cassandra-2")
	require.Contains(w.t, parked.Helps, "do not upgrade")
	require.Contains(w.t, parked.Helps, "restore from the backups by the reviewed procedure, and contact NVIDIA support")
	db, err := w.cql(2, "cassandra", "another-not-a-secret")
	require.NoError(w.t, err)
	defer db.Close()
	require.NoError(w.t, db.Query("ALTER ROLE cassandra WITH PASSWORD = '"+w.password()+"'").Exec())
	w.Answer(protocol.Retry, run)

	w.ringParks(run, "N146: log of Pod/nvcf/nvcf-api-")
	w.logsOfAService("echo logged in")
	w.Answer(protocol.Retry, run)
	var got expanded
	w.finish(run, &got)
	require.Equal(w.t, protocol.OutcomeDone, got.Outcome)
}

// logsOfAService has Deployment nvcf-api run a line of shell, and its pod stays.
func (w *world) logsOfAService(line string) {
	w.t.Helper()
	const name = "nvcf-api"
	labels := map[string]string{"app": name}
	like := w.statefulSet(cassandraSystem).Spec.Template.Spec
	d := &appsv1.Deployment{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: appsv1.DeploymentSpec{
		Selector: &metav1.LabelSelector{MatchLabels: labels}, Strategy: appsv1.DeploymentStrategy{Type: appsv1.RecreateDeploymentStrategyType},
		Template: corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: labels}, Spec: corev1.PodSpec{
			NodeSelector: like.NodeSelector, Tolerations: like.Tolerations,
			Containers: []corev1.Container{{Name: name, Image: like.Containers[0].Image, Command: []string{"/bin/sh", "-c", line + "; exec tail -f /dev/null"}}}}},
	}}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	_, err := w.Kube.CoreV1().Namespaces().Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "nvcf"}}, metav1.CreateOptions{})
	require.True(w.t, err == nil || apierrors.IsAlreadyExists(err), "%v", err)
	deployments := w.Kube.AppsV1().Deployments("nvcf")
	if _, err = deployments.Create(ctx, d, metav1.CreateOptions{}); apierrors.IsAlreadyExists(err) {
		_, err = deployments.Update(ctx, d, metav1.UpdateOptions{})
	}
	require.NoError(w.t, err)
	w.eventually("Deployment "+name, func(ctx context.Context) error {
		now, err := deployments.Get(ctx, name, metav1.GetOptions{})
		if err == nil && (now.Status.ObservedGeneration < now.Generation || now.Status.UpdatedReplicas != 1 || now.Status.ReadyReplicas != 1) {
			err = fmt.Errorf("%d pods of the newest kind, %d ready", now.Status.UpdatedReplicas, now.Status.ReadyReplicas)
		}
		return err
	})
}

// repairsBegun counts the repairs that a member's process has begun as their
// coordinator, by its log.
func (w *world) repairsBegun(pod, keyspace string) int {
	w.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	log, _ := w.Kube.CoreV1().Pods(cassandraSystem).GetLogs(pod, &corev1.PodLogOptions{Container: "cassandra"}).DoRaw(ctx) // there may be none yet
	return strings.Count(string(log), "repairing keyspace "+keyspace+" with")
}

// inARepair waits until a member repairs a keyspace, and holds another one so
// that the repair can't end: a signal lets that one go on, or kills it.
func (w *world) inARepair(run, pod, keyspace, held string) {
	w.t.Helper()
	begun := w.repairsBegun(pod, keyspace)
	w.untilRing(run, "the call of a repair", func(protocol.Status) bool { return w.calls(pod, "repair", keyspace) })
	w.signal(held, syscall.SIGSTOP) // nodetool takes its time until it asks the server
	w.untilRing(run, "the repair", func(protocol.Status) bool { return w.repairsBegun(pod, keyspace) > begun })
}

// calls says whether nodetool runs in a member's pod with these arguments.
func (w *world) calls(pod string, args ...string) bool {
	w.t.Helper()
	ip := w.address(pod)
	return ip != "" && len(w.processes(append(args, "org.apache.cassandra.tools.NodeTool", ip)...)) > 0
}

// signal sends a signal to the server of a member.
func (w *world) signal(pod string, s syscall.Signal) {
	w.t.Helper()
	servers := w.processes("-Dcom.sun.management.jmxremote.host="+w.address(pod), "org.apache.cassandra.service.CassandraDaemon")
	require.Len(w.t, servers, 1, "servers of %s", pod)
	require.NoError(w.t, syscall.Kill(servers[0], s))
}

// address is that of a member's pod; "" while there is none.
func (w *world) address(pod string) string {
	p, err := w.pod(cassandraSystem, pod)
	if err != nil {
		return ""
	}
	return p.Status.PodIP
}

// processes are those with all of these arguments: a pod is a process here.
func (w *world) processes(args ...string) (pids []int) {
	w.t.Helper()
	files, err := filepath.Glob("/proc/[0-9]*/cmdline")
	require.NoError(w.t, err)
	for _, file := range files {
		line, _ := os.ReadFile(file) // it may have ended
		has := strings.Split(string(line), "\x00")
		if slices.ContainsFunc(args, func(a string) bool { return !slices.Contains(has, a) }) {
			continue
		}
		pid, err := strconv.Atoi(filepath.Base(filepath.Dir(file)))
		require.NoError(w.t, err)
		pids = append(pids, pid)
	}
	return pids
}
