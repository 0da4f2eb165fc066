package datastores

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/refit-run/refit/tests/sandbox"
	"github.com/refit-run/refit/workflows/protocol"
)

const (
	openbaoSnapshotPlan = "examples/openbao-snapshot.yaml"
	openbaoReplacePlan  = "examples/openbao-replace.yaml"
)

// TestOpenBao goes from the older release to the newer one.
func TestOpenBao(t *testing.T) {
	t.Parallel()
	w := up(t, "openbao")
	w.openbaoWhole()
	w.through(t, []step{
		{"the active member's snapshot is stored with what opens it", (*world).openbaoSnapshot},
		{"a template of another image is refused and a plan touches nothing", (*world).openbaoPlan},
		{"members are replaced one at a time, also when one is Ready and sealed and the worker dies", (*world).openbaoReplace},
	})
}

// snapped is the result of an OpenBaoSnapshot.
type snapped struct {
	protocol.Receipt
	Active    string `json:"active"`
	ClusterID string `json:"clusterID"`
	Snapshot  struct {
		URL  string `json:"url"`
		Size int64  `json:"size"`
	} `json:"snapshot"`
	Secrets []struct {
		URL string `json:"url"`
	} `json:"secrets"`
}

func (w *world) openbaoSnapshot() {
	active := w.openbaoWhole()
	run := w.Start(openbaoSnapshotPlan, nil, "--id", "openbao-snapshot")
	var out snapped
	w.Result(run, &out)
	require.Equal(w.t, protocol.OutcomeDone, out.Outcome)
	require.Equal(w.t, active, out.Active)
	require.NotEmpty(w.t, out.ClusterID)
	require.Positive(w.t, out.Snapshot.Size)
	require.Len(w.t, out.Secrets, 2, "the unseal key and the root token")
	w.secretly(run, w.rootToken(), w.unsealKey())
	w.Record("openbao-snapshot", run)
}

// baoReplaced is the result of an OpenBaoReplace.
type baoReplaced struct {
	protocol.Receipt
	ClusterID string              `json:"clusterID"`
	Active    string              `json:"active"`
	Images    map[string][]string `json:"images"`
}

func (w *world) openbaoPlan() {
	before := w.openbaoUIDs()
	run := w.Start(openbaoReplacePlan, []string{"limit=20s"}, "--id", "openbao-early")
	parked := w.parks(run, "N161")
	require.Contains(w.t, parked.Found, openbaoOld, "the dependency stage has not changed the template")
	w.Answer(protocol.Abort, run)
	var out baoReplaced
	w.Result(run, &out)
	require.Equal(w.t, protocol.OutcomeAborted, out.Outcome)

	w.openbaoTemplate(openbaoNew, "openbao-0.28.4")
	text, code := w.Refit("plan", "-f", openbaoReplacePlan, "--exit-code")
	require.Equal(w.t, sandbox.ExitChanges, code, text)
	for i := range openbaoMembers {
		require.Contains(w.t, text, openbaoPod(i))
	}
	require.Contains(w.t, text, "step down")
	require.Equal(w.t, before, w.openbaoUIDs())
}

func (w *world) openbaoReplace() {
	former := w.openbaoWhole()
	var all []string
	for i := range openbaoMembers {
		all = append(all, openbaoPod(i))
	}
	release := w.hold(all...)
	defer release()
	o := w.watchBao()
	run := w.Start(openbaoReplacePlan, nil, "--id", "openbao-replace")

	// The first standby comes back sealed: Ready, and not to be built on.
	first := ""
	w.Until(run, "the first replacement", patience, func(protocol.Status) bool {
		for name, n := range o.replacements() {
			if n > 0 {
				first = name
			}
		}
		return first != ""
	})
	require.NotEqual(w.t, former, first, "standbys come first")
	w.replaced(openbaoSystem, first, "")
	require.Never(w.t, func() bool {
		for name, n := range o.replacements() {
			if name != first && n > 0 {
				return true
			}
		}
		return false
	}, 5*time.Second, 200*time.Millisecond, "a sealed member is waited for")
	w.KillWorker()
	w.StartWorker()
	release()

	var out baoReplaced
	w.Result(run, &out)
	w.openbaoReplaced(out)
	o.judged(w, 1)
	require.NotEqual(w.t, former, out.Active, "leadership has moved")
	forward(w.t, o.actives)
	w.secretly(run, w.rootToken(), w.unsealKey())
	w.Record("openbao-replace", run)

	var again baoReplaced
	w.Result(w.Start(openbaoReplacePlan, nil, "--id", "openbao-again"), &again)
	require.Equal(w.t, protocol.OutcomeNoChange, again.Outcome)
}

// openbaoReplaced requires what N168 asks for.
func (w *world) openbaoReplaced(out baoReplaced) {
	w.t.Helper()
	require.Equal(w.t, protocol.OutcomeDone, out.Outcome)
	require.Equal(w.t, w.openbaoWhole(), out.Active)
	require.Empty(w.t, out.LeftBehind)
	require.Equal(w.t, []string{"N159"}, out.Acknowledged)
	for i := range openbaoMembers {
		require.Contains(w.t, out.Before[openbaoPod(i)], "2.5.5")
		require.Contains(w.t, out.After[openbaoPod(i)], "2.6.3")
		require.Contains(w.t, fmt.Sprint(out.Images[openbaoPod(i)]), openbaoNew)
	}
}

// forward requires that leadership never went from a newer to an older member.
func forward(t *testing.T, actives []string) {
	t.Helper()
	highest := ""
	for _, a := range actives {
		_, version, _ := strings.Cut(a, " ")
		require.GreaterOrEqual(t, version, highest, "active members in their order: %v", actives)
		highest = version
	}
}
