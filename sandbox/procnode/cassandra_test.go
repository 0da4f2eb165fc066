package procnode_test

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/gocql/gocql"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/dynamic"

	"github.com/refit-run/refit/activities/kube"
	"github.com/refit-run/refit/sandbox/process"
	"github.com/refit-run/refit/sandbox/procnode/cassandrad"
	"github.com/refit-run/refit/sandbox/procnode/datastore"
)

// memberLimit bounds the start of one Cassandra member on a busy machine; it
// takes 15 s on an idle one.
const memberLimit = 5 * time.Minute

// ring is the Cassandra of a test, reached as the product reaches it.
type ring struct {
	*space
	client *kube.Client
}

func newRing(t *testing.T) *ring {
	t.Helper()
	s := newSpace(t)
	if s.cassandra == nil {
		_, err := cassandrad.Find()
		t.Skipf("not run: %v", err)
	}
	s.name = datastore.CassandraNamespace
	home, err := cassandrad.Find()
	require.NoError(t, err)
	_, err = home.Prepare(t.Context(), func(line string) { t.Log(line) })
	require.NoError(t, err)
	api, err := dynamic.NewForConfig(s.config)
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), memberLimit)
	defer cancel()
	began := time.Now()
	require.NoError(t, s.cassandra.Install(ctx, api, filepath.Join(s.root, "volumes")))
	require.NoError(t, s.cassandra.Ready(ctx, api))
	t.Logf("one Cassandra member was Ready in %s", time.Since(began))
	client, err := kube.NewClient(s.config)
	require.NoError(t, err)
	return &ring{space: s, client: client}
}

// wait is eventually with a member's patience.
func (r *ring) wait(what string, check func(context.Context) error) {
	r.Helper()
	ctx, cancel := context.WithTimeout(r.Context(), memberLimit)
	defer cancel()
	require.NoError(r, process.Until(ctx, time.Second, check), what)
}

// login opens a session that stays on one member.
func (r *ring) login(member int, role, password string) (*gocql.Session, error) {
	c := gocql.NewCluster("127.0.0.1")
	c.ProtoVersion, c.NumConns, c.DisableInitialHostLookup, c.ReconnectInterval = 4, 1, true, 0
	c.Events.DisableTopologyEvents, c.Events.DisableNodeStatusEvents, c.Events.DisableSchemaEvents = true, true, true
	c.Authenticator = gocql.PasswordAuthenticator{Username: role, Password: password}
	c.Timeout, c.ConnectTimeout, c.Consistency = 30*time.Second, 30*time.Second, gocql.LocalOne
	c.Dialer, c.Logger = memberDialer{r, fmt.Sprintf("cassandra-%d", member)}, noLog{}
	return c.CreateSession()
}

// noLog drops what gocql prints of logins that are refused on purpose.
type noLog struct{}

func (noLog) Print(...any)          {}
func (noLog) Printf(string, ...any) {}
func (noLog) Println(...any)        {}

type memberDialer struct {
	ring *ring
	pod  string
}

func (d memberDialer) DialContext(ctx context.Context, _, _ string) (net.Conn, error) {
	return d.ring.client.DialPod(ctx, datastore.CassandraNamespace, d.pod, 9042)
}

// rows counts what a member answers at LOCAL_ONE.
func (r *ring) rows(member int) int {
	r.Helper()
	db, err := r.login(member, "cassandra", cassandrad.Password)
	require.NoError(r, err)
	defer db.Close()
	var n int
	require.NoError(r, db.Query("SELECT count(*) FROM nvcf_api.records").Scan(&n))
	return n
}

// patch changes the StatefulSet and waits until so many members are Ready at
// its newest revision.
func (r *ring) patch(members int32, change any) {
	r.Helper()
	data, err := json.Marshal(change)
	require.NoError(r, err)
	sets := r.kube.AppsV1().StatefulSets(r.name)
	patched, err := sets.Patch(r.Context(), "cassandra", types.StrategicMergePatchType, data, metav1.PatchOptions{})
	require.NoError(r, err)
	began := time.Now()
	r.wait(fmt.Sprintf("%d members are Ready", members), func(ctx context.Context) error {
		set, err := sets.Get(ctx, "cassandra", metav1.GetOptions{})
		if err != nil {
			return err
		}
		s := set.Status
		if s.ObservedGeneration < patched.Generation || s.ReadyReplicas != members || s.UpdatedReplicas != members || s.Replicas != members {
			return fmt.Errorf("found %+v", s)
		}
		return nil
	})
	r.Logf("%d members of the newest revision were Ready in %s", members, time.Since(began))
}

func (r *ring) status(member int) string {
	r.Helper()
	out, errOut, code := r.exec(true, fmt.Sprintf("cassandra-%d", member), nil, "nodetool", "status")
	require.Zero(r, code, errOut)
	return out
}

func TestCassandraGrowsWithoutLossWhenTheNewMembersAreNoSeeds(t *testing.T) {
	r := newRing(t)
	require.Equal(t, cassandrad.Rows, r.rows(0))
	_, err := r.login(0, "cassandra", "not the password")
	require.ErrorContains(t, err, "incorrect")
	service, err := r.login(0, cassandrad.Service(0), cassandrad.Password)
	require.NoError(t, err)
	err = service.Query("SELECT dirty FROM schema_migrations.nvcf_api").Scan(new(bool))
	service.Close()
	require.ErrorContains(t, err, "no SELECT permission")
	require.Equal(t, 1, strings.Count(r.status(0), "\nUN "))
	_, _, code := r.exec(true, "cassandra-0", nil, "nodetool", "no-such-command")
	require.NotZero(t, code)
	_, errOut, code := r.exec(true, "cassandra-0", nil, "nodetool", "snapshot", "-t", "once", "nvcf_api")
	require.Zero(t, code, errOut)
	_, _, code = r.exec(true, "cassandra-0", nil, "nodetool", "snapshot", "-t", "once", "nvcf_api")
	require.Equal(t, 2, code, "a tag is taken once")

	r.patch(1, map[string]any{"spec": map[string]any{"template": map[string]any{"spec": map[string]any{"containers": []any{map[string]any{
		"name": "cassandra", "env": []corev1.EnvVar{{Name: cassandrad.SeedsVariable, Value: datastore.CassandraSeed(0)}},
	}}}}}})
	r.patch(3, map[string]any{"spec": map[string]any{"replicas": 3}})
	for member := range 3 {
		require.Equal(t, 3, strings.Count(r.status(member), "\nUN "))
		require.Equal(t, cassandrad.Rows, r.rows(member))
	}
	// The administrator's own row is cassandra-1's now: had that one joined as a
	// seed, without rows, nobody could log in as administrator.
	owner, errOut, code := r.exec(true, "cassandra-0", nil, "nodetool", "getendpoints", "system_auth", "roles", "cassandra")
	require.Zero(t, code, errOut)
	require.Equal(t, r.pod("cassandra-1").Status.PodIP, strings.TrimSpace(owner))
}
