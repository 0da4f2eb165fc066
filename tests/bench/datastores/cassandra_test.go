package datastores

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/gocql/gocql"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/refit-run/refit/tests/sandbox"
)

// What the sandbox's Cassandra begins with.
const (
	cassandraSystem = "cassandra-system"
	cassandraRows   = 1000
	cassandraRoles  = 20
	// cassandraTurn is how often the client comes.
	cassandraTurn = 500 * time.Millisecond
)

// guideStops is how the script ends where the guide says stop.
const guideStops = "exit 3"

// copiesWanted are those of every keyspace at the end.
const copiesWanted = 3

var cassandraMembers = names(3, "cassandra-%d")

// BenchmarkCassandraExpand expands one member to three by the guide's script,
// by the same script with the seeds that let it get to its end, and by Refit,
// in turn: every one takes a world of its own, and minutes. What clients lose
// is compared with the guide's order, the time with the script that ends.
func BenchmarkCassandraExpand(b *testing.B) {
	times := repetitions(b)
	costs := map[string][]cost{}
	stopped := 0
	ways := []struct {
		name string
		work func(c *cassandra) (wall, gates time.Duration)
	}{
		{"guide", func(c *cassandra) (wall, gates time.Duration) {
			_, at, err := c.guide("cassandra.sh")
			if err != nil {
				require.ErrorContains(c.b, err, guideStops)
				logf("the guide's order has not come to its end: %v", err)
				stopped++
			}
			return at.took(), 0
		}},
		{"script", func(c *cassandra) (wall, gates time.Duration) {
			_, at, err := c.guide("cassandra.sh", "seeds")
			require.NoError(c.b, err)
			return at.took(), 0
		}},
		{"refit", func(c *cassandra) (wall, gates time.Duration) {
			run, at := c.refit("examples/cassandra-expand.yaml", "expand")
			acts := c.acts(run, at)
			began := time.Now()
			out, code := c.Run("kubectl", "-n", cassandraSystem, "exec", cassandraMembers[0], "-c", "cassandra", "--", "nodetool", "status")
			require.Zero(c.b, code, out)
			return at.took(), cassandraGates(c.b, acts, c.whole.time().Add(time.Since(began)))
		}},
	}
	for i := range times {
		for _, way := range ways {
			b.Run(fmt.Sprintf("%s-%d", way.name, i+1), func(b *testing.B) {
				for b.Loop() {
					c := &cassandra{world: up(b, "cassandra")}
					c.password = c.secret(cassandraSystem, "cassandra-admin", "password")
					costs[way.name] = append(costs[way.name], c.measured(way.work))
					logf("Cassandra by %s, %d of %d: %+v", way.name, i+1, times, costs[way.name][i])
				}
			})
		}
	}
	for _, way := range ways {
		if len(costs[way.name]) < times {
			return // one was not asked for, or has failed and says so
		}
	}
	guide, script, refit := median(costs["guide"]), median(costs["script"]), median(costs["refit"])
	out := sheet{"cassandra-expand", times}
	out.line("guide-stopped", float64(stopped), "times", "", 0)
	out.line("guide-ended-after", guide.wall.Seconds(), "s", "", 0)
	out.walls(script, refit)
	out.refused("writes", cassandraTurn, guide.writes, refit.writes)
	out.refused("logins", cassandraTurn, guide.logins, refit.logins)
	out.rows("at-worst", guide.missing, refit.missing)
	out.rows("at-end", guide.left, refit.left)
}

// cassandraGates is how long a run took for what the guide does not have:
// looks at the ring, of the one after the scale the part from the moment when
// the guide's own look would have been over; logins but for the last proof,
// looks at the keyspaces that alter nothing, the step to two copies with its
// repairs, and what no guide has.
func cassandraGates(b testing.TB, acts []act, looked time.Time) time.Duration {
	b.Helper()
	total, last := unguided(acts), -1
	for i, a := range acts {
		if a.kind == "cassandra.Logins" {
			last = i
		}
	}
	scaled, seen := false, false
	for i, a := range acts {
		var in struct {
			Factor   int  `json:"factor"`
			Copies   int  `json:"copies"`
			PlanOnly bool `json:"planOnly"`
		}
		require.NoError(b, json.Unmarshal(a.input, &in))
		gate := false
		switch a.kind {
		case "cassandra.Scale":
			scaled = true
		case "cassandra.Ring":
			if scaled && !seen {
				require.False(b, looked.Before(a.from), "all pods were seen Ready before they were looked for")
				total += max(0, a.to.Sub(looked))
				seen = true
				continue
			}
			gate = true
		case "cassandra.Logins":
			gate = i != last
		case "cassandra.Raise":
			gate = in.PlanOnly || in.Factor < copiesWanted
		case "cassandra.Repair":
			gate = in.Copies < copiesWanted
		}
		if gate {
			total += a.took()
		}
	}
	require.True(b, seen, "the look at the ring after the scale")
	return total
}

// cassandra is the world with Cassandra.
type cassandra struct {
	*world
	password string

	logins, writes meter
	// whole is when a bystander saw all pods Ready, for which the guide waits
	// before its look at the ring.
	whole sighting
	// confirmed are the rows that were written, worst is how many were missing.
	confirmed []int
	worst     int
}

// pod leads a session to the pod that has the name now.
type pod struct {
	w    *world
	name string
}

func (p pod) DialContext(ctx context.Context, _, _ string) (net.Conn, error) {
	return p.w.DialPod(ctx, cassandraSystem, p.name, 9042)
}

// measured does the work while a client uses Cassandra.
func (c *cassandra) measured(work func(c *cassandra) (wall, gates time.Duration)) (out cost) {
	c.b.Helper()
	self, err := os.Executable()
	require.NoError(c.b, err)
	c.Setenv(toolVariable, self)
	admin, err := sandbox.CQL(pod{c.world, cassandraMembers[0]}, "cassandra", c.password)
	require.NoError(c.b, err)
	for i := range cassandraRoles {
		require.NoError(c.b, admin.Query(fmt.Sprintf("GRANT MODIFY ON KEYSPACE nvcf_api TO service_%02d", i)).Exec())
	}
	admin.Close()
	ends := []func(){
		always(cassandraTurn, c.use),
		always(200*time.Millisecond, func(int) {
			if len(c.ready()) == len(cassandraMembers) {
				c.whole.seen(time.Now())
			}
		}),
	}
	out.wall, out.gates = work(c)
	for _, end := range ends {
		end()
	}
	now := time.Now()
	require.NotEmpty(c.b, c.confirmed, "the client has written: %s", c.writes.first)
	out.writes, out.logins, out.missing, out.left = c.writes.refused(now), c.logins.refused(now), c.worst, c.atEnd()
	return out
}

// use is one turn of the client: log in to a Ready member, as its Service leads
// there, each time as another service; write a row; read all rows at a quorum.
func (c *cassandra) use(n int) {
	began := time.Now()
	ready := c.ready()
	if len(ready) == 0 {
		err := errors.New("no member is Ready")
		c.logins.tried(began, time.Now(), err)
		c.writes.tried(began, time.Now(), err)
		return
	}
	db, err := sandbox.CQL(pod{c.world, ready[n%len(ready)]}, fmt.Sprintf("service_%02d", n%cassandraRoles), c.password)
	c.logins.tried(began, time.Now(), err)
	if err != nil {
		c.writes.tried(began, time.Now(), err)
		return
	}
	defer db.Close()
	err = db.Query("INSERT INTO nvcf_api.records (id, body) VALUES (?, ?)", cassandraRows+n, "written").Consistency(gocql.LocalQuorum).Exec()
	c.writes.tried(began, time.Now(), err)
	if err == nil {
		c.confirmed = append(c.confirmed, cassandraRows+n)
	}
	if held, err := rowsHeld(db, gocql.LocalQuorum); err == nil {
		c.worst = max(c.worst, c.missing(held))
	}
}

// rowsHeld are the rows that are shown, by their id.
func rowsHeld(db *gocql.Session, at gocql.Consistency) (map[int]bool, error) {
	held, id := map[int]bool{}, 0
	rows := db.Query("SELECT id FROM nvcf_api.records").Consistency(at).Iter()
	for rows.Scan(&id) {
		held[id] = true
	}
	return held, rows.Close()
}

// missing counts the rows of the beginning and the confirmed ones that are not
// held. Rows that were written without an answer in time are beside them: a sum
// would hide what is lost.
func (c *cassandra) missing(held map[int]bool) (n int) {
	for id := range cassandraRows {
		if !held[id] {
			n++
		}
	}
	for _, id := range c.confirmed {
		if !held[id] {
			n++
		}
	}
	return n
}

func TestAWriteWithoutAnAnswerHidesNoMissingRow(t *testing.T) {
	c := &cassandra{confirmed: []int{cassandraRows + 1, cassandraRows + 2}}
	held := map[int]bool{cassandraRows + 2: true, cassandraRows + 3: true} // the third one was never confirmed
	for id := range cassandraRows - 1 {
		held[id] = true
	}
	require.Equal(t, 2, c.missing(held))
}

// ready are the members that a Service would lead to.
func (c *cassandra) ready() (all []string) {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	pods, err := c.Kube.CoreV1().Pods(cassandraSystem).List(ctx, metav1.ListOptions{LabelSelector: "app.kubernetes.io/name=cassandra"})
	if err != nil {
		return nil
	}
	for _, p := range pods.Items {
		if p.DeletionTimestamp == nil && slices.ContainsFunc(p.Status.Conditions, func(is corev1.PodCondition) bool {
			return is.Type == corev1.PodReady && is.Status == corev1.ConditionTrue
		}) {
			all = append(all, p.Name)
		}
	}
	return all
}

// atEnd is how many rows the member that has the fewest does not show by
// itself; where nobody is let in, all are missing.
func (c *cassandra) atEnd() (missing int) {
	for _, name := range cassandraMembers {
		var held map[int]bool
		for role := range cassandraRoles {
			db, err := sandbox.CQL(pod{c.world, name}, fmt.Sprintf("service_%02d", role), c.password)
			if err != nil {
				continue
			}
			shown, err := rowsHeld(db, gocql.LocalOne)
			db.Close()
			if err == nil {
				held = shown
				break
			}
		}
		missing = max(missing, c.missing(held))
	}
	return missing
}
