package datastores

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/refit-run/refit/workflows/protocol"
)

// TestOpenBaoHardCases takes one set of members through what may happen to it.
// A newer chart makes them stale each time; the image stays.
func TestOpenBaoHardCases(t *testing.T) {
	t.Parallel()
	w := up(t, "openbao")
	w.openbaoWhole()
	w.through(t, []step{
		{"a token that is not good parks before anything is touched", (*world).openbaoWrongToken},
		{"a snapshot that breaks off is not stored", (*world).openbaoTruncated},
		{"a second member that is down is waited for, then a person is asked", (*world).openbaoSecondDown},
		{"a standby that stays sealed parks with the runbook's hint", (*world).openbaoStaysSealed},
		{"the order is found anew when leadership moves with a deletion", (*world).openbaoMoves},
		{"a step-down without effect is asked thrice, then a person; a lost reply is no second one", (*world).openbaoDeafThenLost},
		{"without a quorum nothing is replaced and no snapshot is taken", (*world).openbaoNoQuorum},
	})
}

// TestOpenBaoKills kills the worker with -9 at every step: at each stage, at
// each change of what is in work, when a member is away and when its new pod is
// there, and when leadership has moved.
func TestOpenBaoKills(t *testing.T) {
	t.Parallel()
	w := up(t, "openbao")
	w.openbaoWhole()
	w.openbaoTemplate(openbaoNew, "openbao-0.28.4")
	// Each member comes back Ready and stays sealed for longer than the kills
	// hold the run up: one that went on by Ready would have two away.
	const sealedFor = 30 * time.Second
	held, back := map[string]func(){}, map[string]time.Time{}
	for i := range openbaoMembers {
		held[openbaoPod(i)] = w.hold(openbaoPod(i))
	}
	o := w.watchBao()
	run := w.Start(openbaoReplacePlan, nil, "--id", "openbao-kills")
	seen := map[string]bool{}
	kill := func(where string) {
		if seen[where] {
			return
		}
		seen[where] = true
		t.Logf("kill -9 %s", where)
		w.KillWorker()
		w.StartWorker()
	}
	every := time.NewTicker(100 * time.Millisecond)
	defer every.Stop()
	for began := time.Now(); ; <-every.C {
		require.Less(t, time.Since(began), 10*time.Minute, "the run must end; killed %v", seen)
		// The cluster first: it does not wait for a worker.
		for _, name := range o.seenAway() {
			kill("while " + name + " was away")
		}
		for name, n := range o.replacements() {
			if n == 0 {
				continue
			}
			if kill("after " + name + " was replaced"); back[name].IsZero() {
				back[name] = time.Now()
			}
			if time.Since(back[name]) > sealedFor {
				held[name]()
			}
		}
		o.mu.Lock()
		moved, worst := len(o.actives) > 1, o.worst
		o.mu.Unlock()
		require.LessOrEqual(t, worst, 1, "members away at a time")
		if moved {
			kill("after leadership had moved")
		}
		s, err := w.StatusWithin(run, 2*time.Second)
		if err != nil {
			continue // the worker is not up again
		}
		require.False(t, s.WaitingFor != nil && s.WaitingFor.Kind == protocol.WaitParked, "it parked: %+v", s.WaitingFor)
		if s.Phase == protocol.PhaseDone {
			break
		}
		kill(fmt.Sprintf("at stage %s %v", s.Stage, s.Current))
	}
	killed := strings.Join(slices.Sorted(maps.Keys(seen)), "\n")
	require.Contains(t, killed, "after leadership had moved")
	require.Contains(t, killed, "[step-down of ")
	for i := range openbaoMembers {
		require.Contains(t, killed, "[replacement of "+openbaoPod(i)+"]")
		require.Contains(t, killed, "while "+openbaoPod(i)+" was away")
		require.Contains(t, killed, "after "+openbaoPod(i)+" was replaced")
	}
	var out baoReplaced
	w.Result(run, &out)
	w.openbaoReplaced(out)
	o.judged(w, 1)
	forward(t, o.actives)
	once(t, o.actives)
	w.secretly(run, w.rootToken(), w.unsealKey())
}

// once requires that leadership has reached the newer members and then stayed: a
// step-down that was sent twice would have deposed the new leader.
func once(t *testing.T, actives []string) {
	t.Helper()
	newer := 0
	for _, a := range actives {
		if strings.HasSuffix(a, " 2.6.3") {
			newer++
		}
	}
	require.Equal(t, 1, newer, "active members in their order: %v", actives)
}

// staleBao makes all members stale and starts the run on them.
func (w *world) staleBao(id string, set ...string) string {
	w.t.Helper()
	w.openbaoWhole()
	w.openbaoTemplate(openbaoOld, "openbao-"+id)
	return w.Start(openbaoReplacePlan, append([]string{"image=" + openbaoOld}, set...), "--id", id)
}

// ends requires that a run is done, with every member replaced once and never
// two of them away.
func (w *world) ends(run string, o *witness) (out baoReplaced) {
	w.t.Helper()
	w.Result(run, &out)
	require.Equal(w.t, protocol.OutcomeDone, out.Outcome)
	o.judged(w, 1)
	return out
}

// aborts ends a parked run.
func (w *world) aborts(run string) {
	w.t.Helper()
	w.Answer(protocol.Abort, run)
	var out baoReplaced
	w.Result(run, &out)
	require.Equal(w.t, protocol.OutcomeAborted, out.Outcome)
}

func (w *world) openbaoWrongToken() {
	secret := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: "wrong-token"}, StringData: map[string]string{"token": "s.this-is-no-token"}}
	_, err := w.Kube.CoreV1().Secrets(openbaoSystem).Create(context.Background(), secret, metav1.CreateOptions{})
	require.NoError(w.t, err)
	before := w.openbaoUIDs()
	run := w.staleBao("wrong-token", "token={secret: wrong-token, key: token}")
	parked := w.parks(run, "N165")
	require.Contains(w.t, parked.Found, "wrong-token", "the reference is named")
	require.NotContains(w.t, parked.Found, "this-is-no-token")
	w.aborts(run)
	require.Equal(w.t, before, w.openbaoUIDs())

	run = w.Start(openbaoSnapshotPlan, []string{"token={secret: wrong-token, key: token}"}, "--id", "snapshot-wrong-token")
	w.parks(run, "wrong-token")
	w.aborts(run)
	w.secretly(run, "s.this-is-no-token")
}

func (w *world) openbaoTruncated() {
	mend := w.spoil(w.openbaoWhole(), "snapshot", "truncated")
	run := w.Start(openbaoSnapshotPlan, nil, "--id", "truncated")
	parked := w.parks(run, "N98")
	require.Contains(w.t, parked.Found, "whole archive")
	mend()
	w.Answer(protocol.Retry, run)
	var out snapped
	w.Result(run, &out)
	require.Equal(w.t, protocol.OutcomeDone, out.Outcome)
	require.Positive(w.t, out.Snapshot.Size)
}

func (w *world) openbaoSecondDown() {
	down := standbys(w.openbaoWhole())[0]
	// Its next pod is of the old template: it is stale as the others.
	back := w.keepDown(openbaoSystem, down)
	before := w.openbaoPods()
	w.openbaoTemplate(openbaoOld, "openbao-second-down")
	run := w.Start(openbaoReplacePlan, []string{"image=" + openbaoOld, "limit=15s"}, "--id", "second-down")
	parked := w.parks(run, down)
	require.Contains(w.t, parked.Found, "N89")
	require.Equal(w.t, before, w.openbaoPods(), "nobody else was deleted")
	back()
	w.openbaoWhole()
	w.aborts(run)
}

// openbaoPods are the pods that are there.
func (w *world) openbaoPods() map[string]string {
	w.t.Helper()
	uids := map[string]string{}
	for i := range openbaoMembers {
		if p, err := w.pod(openbaoSystem, openbaoPod(i)); err == nil && p.Status.PodIP != "" {
			uids[p.Name] = string(p.UID)
		}
	}
	return uids
}

func (w *world) openbaoStaysSealed() {
	release := w.hold(openbaoPod(0), openbaoPod(1), openbaoPod(2))
	defer release()
	o := w.watchBao()
	run := w.staleBao("stays-sealed", "limit=25s")
	parked := w.parks(run, "Ready and sealed")
	require.Contains(w.t, parked.Helps, "runbook")
	w.Answer(protocol.Retry, run)
	w.parks(run, "Ready and sealed")
	touched := 0
	for _, n := range o.replacements() {
		touched += n
	}
	require.Equal(w.t, 1, touched, "no other member was touched")
	release()
	w.openbaoWhole()
	w.Answer(protocol.Retry, run)
	w.ends(run, o)
}

// openbaoMoves deposes the active member while the first standby is away, as a
// cluster may by itself when one is deleted. What follows is the order of the
// cluster as it is then, not the one that was planned.
func (w *world) openbaoMoves() {
	former := w.openbaoWhole()
	others := standbys(former)
	// Sealed, the first one has no part in the choice of a leader.
	release := w.hold(others[0])
	defer release()
	o := w.watchBao()
	run := w.staleBao("moves")
	w.eventually(others[0]+" is replaced", func(context.Context) error {
		if o.replacements()[others[0]] == 0 {
			return errors.New("it is not yet")
		}
		return nil
	})
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	token := w.rootToken()
	for _, ask := range []struct{ path, body string }{
		// A leader hands over to who has most of the log: with this one, which
		// the sealed member lacks, that is the other standby.
		{"/v1/cubbyhole/moves", `{"a":"b"}`},
		{"/v1/sys/step-down", ""},
	} {
		said, err := w.bao(ctx, http.MethodPut, former, ask.path, token, ask.body)
		require.NoError(w.t, err)
		require.Equal(w.t, http.StatusNoContent, said.Code, "%s of %s", ask.path, former)
	}
	w.eventually(others[1]+" is active", func(ctx context.Context) error {
		now, err := w.activeBao(ctx)
		if err == nil && now != others[1] {
			err = fmt.Errorf("%s is", now)
		}
		return err
	})
	release()
	w.ends(run, o)
	var made, led []string
	for _, event := range o.order {
		if name, ok := strings.CutPrefix(event, "new "); ok {
			made = append(made, name)
		} else if name, ok := strings.CutPrefix(event, "active "); ok {
			led = append(led, name)
		}
	}
	require.Equal(w.t, []string{others[0], former, others[1]}, made, "the former active member is a standby now, the present one is the last: %v", o.order)
	require.GreaterOrEqual(w.t, len(led), 3, "moved, and then by our step-down: %v", o.order)
	require.Equal(w.t, []string{former, others[1]}, led[:2], "%v", o.order)
}

// attempted is what an attempt to move leadership came to, by its evidence.
type attempted struct {
	Sent  bool   `json:"sent"`
	Reply string `json:"reply"`
}

// stepDowns are the attempts of a run that have sent a request.
func (w *world) stepDowns(out baoReplaced) (all []attempted) {
	w.t.Helper()
	for _, a := range out.Artifacts {
		if !strings.Contains(a.URL, "openbao.StepDown") {
			continue
		}
		text, err := os.ReadFile(strings.TrimPrefix(a.URL, "file://"))
		require.NoError(w.t, err)
		var kept struct {
			Verdict attempted `json:"verdict"`
		}
		require.NoError(w.t, json.Unmarshal(text, &kept))
		if kept.Verdict.Sent {
			all = append(all, kept.Verdict)
		}
	}
	return all
}

func (w *world) openbaoDeafThenLost() {
	o := w.watchBao()
	active := w.openbaoWhole()
	hears := w.spoil(active, "stepDown", "ignored")
	run := w.staleBao("deaf", "transferLimit=15s")
	w.parks(run, "N166")
	hears()
	answers := w.spoil(active, "stepDown", "lost")
	defer answers()
	w.Answer(protocol.Retry, run)
	attempts := w.stepDowns(w.ends(run, o))
	require.Len(w.t, attempts, 4, "thrice, and once more after a person's retry")
	for _, a := range attempts[:3] {
		require.Equal(w.t, attempted{Sent: true, Reply: "accepted"}, a)
	}
	require.NotEmpty(w.t, attempts[3].Reply)
	require.NotEqual(w.t, "accepted", attempts[3].Reply, "the reply was lost")
	require.Len(w.t, o.actives, 2, "leadership has moved once: %v", o.actives)
}

func (w *world) openbaoNoQuorum() {
	active := w.openbaoWhole()
	rest := standbys(active)
	release := w.hold(rest...)
	defer release()
	for _, name := range rest {
		former := w.deletePod(openbaoSystem, name)
		w.replaced(openbaoSystem, name, former)
	}
	w.eventually("nobody is active", func(ctx context.Context) error {
		if now, err := w.activeBao(ctx); err == nil {
			return fmt.Errorf("%s is", now)
		}
		return nil
	})
	// It gives out what it has, as a real one was seen to by itself.
	mend := func() {}
	if !real() {
		mend = w.spoil(active, "snapshot", "local")
	}
	before := w.openbaoUIDs()
	run := w.Start(openbaoSnapshotPlan, []string{"limit=10s"}, "--id", "snapshot-no-quorum")
	w.parks(run, "N97")
	w.aborts(run)
	w.openbaoTemplate(openbaoOld, "openbao-no-quorum")
	run = w.Start(openbaoReplacePlan, []string{"image=" + openbaoOld, "limit=25s"}, "--id", "no-quorum")
	w.parks(run, "sealed")
	require.Equal(w.t, before, w.openbaoUIDs())
	release()
	mend()
	w.openbaoWhole()
	o := w.watchBao()
	w.Answer(protocol.Retry, run)
	w.ends(run, o)
	w.secretly(run, w.rootToken(), w.unsealKey(), "s.this-is-no-token") // of all these cases
}
