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

// TestOpenBaoKills kills the worker with -9 at every step: at each stage, at
// each change of what is in work, whenever a pod is gone or a new one is there,
// and when leadership moves.
func TestOpenBaoKills(t *testing.T) {
	onlyLong(t, "a kill of the worker at every step")
	w := up(t, "openbao")
	w.openbaoWhole()
	w.openbaoTemplate(openbaoNew, "openbao-0.28.4")
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
		require.Less(t, time.Since(began), 15*time.Minute, "the run must end; killed %v", seen)
		// The cluster first: it does not wait for a worker.
		for name, n := range o.replacements() {
			if n > 0 {
				kill("after " + name + " was replaced")
			}
		}
		o.mu.Lock()
		moved := len(o.actives) > 1
		o.mu.Unlock()
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
		require.Contains(t, killed, "after "+openbaoPod(i)+" was replaced")
	}
	var out baoReplaced
	w.Result(run, &out)
	w.openbaoReplaced(out)
	o.judged(t, 1)
	forward(t, o.actives)
}

// TestOpenBaoHardCases takes one set of members through what may happen to it.
// A newer chart makes them stale each time; the image stays.
func TestOpenBaoHardCases(t *testing.T) {
	onlyLong(t, "OpenBao's hard cases")
	w := up(t, "openbao")
	w.openbaoWhole()
	for _, test := range []struct {
		behaviour string
		run       func(w *world)
	}{
		{"a token that is not good parks before anything is touched", (*world).openbaoWrongToken},
		{"a snapshot that breaks off is not stored", (*world).openbaoTruncated},
		{"a second member that is down is waited for, then a person is asked", (*world).openbaoSecondDown},
		{"a standby that stays sealed parks with the runbook's hint", (*world).openbaoStaysSealed},
		{"the order is found anew when leadership moves with a deletion", (*world).openbaoMoves},
		{"a lost reply to a step-down is no second one", (*world).openbaoLostReply},
		{"a step-down without effect is asked thrice, then a person", (*world).openbaoDeaf},
		{"without a quorum nothing is replaced and no snapshot is taken", (*world).openbaoNoQuorum},
	} {
		if !t.Run(test.behaviour, func(t *testing.T) { test.run(w.in(t)) }) {
			return // the next one would find what this one has left
		}
	}
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
	o.judged(w.t, 1)
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
	active := w.openbaoWhole()
	down := openbaoPod(0)
	if active == down {
		down = openbaoPod(1)
	}
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
	o := w.watchBao()
	run = w.staleBao("second-down-again")
	w.ends(run, o)
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
	run := w.staleBao("stays-sealed", "limit=20s")
	parked := w.parks(run, "Ready and sealed")
	require.Contains(w.t, parked.Helps, "runbook")
	touched := 0
	for _, n := range o.replacements() {
		touched += n
	}
	require.Equal(w.t, 1, touched, "no other member was touched")
	w.Answer(protocol.Retry, run)
	w.parks(run, "Ready and sealed")
	release()
	w.openbaoWhole()
	w.Answer(protocol.Retry, run)
	w.ends(run, o)
}

// openbaoMoves deposes the active member at the moment at which the first
// standby is deleted, as a cluster may by itself. What follows is the order of
// the cluster as it is then, not the one that was planned.
func (w *world) openbaoMoves() {
	token, o := w.rootToken(), w.watchBao()
	former := w.openbaoWhole()
	run := w.staleBao("moves")
	w.eventually("a standby is deleted", func(context.Context) error {
		for _, n := range o.replacements() {
			if n > 0 {
				return nil
			}
		}
		return errors.New("none is")
	})
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	said, err := w.bao(ctx, http.MethodPut, former, "/v1/sys/step-down", token)
	require.NoError(w.t, err)
	require.Equal(w.t, http.StatusNoContent, said.Code, "%s was asked", former)
	w.ends(run, o)
	// The order as it was seen: the first new pod, the second active member
	// before any other new pod, then by what that member is.
	var made, led []string
	for _, event := range o.order {
		if name, ok := strings.CutPrefix(event, "new "); ok {
			made = append(made, name)
		} else if name, ok := strings.CutPrefix(event, "active "); ok {
			led = append(led, name)
			require.False(w.t, len(led) == 2 && len(made) > 1, "leadership moved only after a second replacement: %v", o.order)
		}
	}
	require.GreaterOrEqual(w.t, len(led), 2, "leadership moved: %v", o.order)
	require.Equal(w.t, former, led[0])
	require.Len(w.t, made, openbaoMembers)
	require.NotEqual(w.t, former, made[0], "it was active")
	if second := led[1]; second == made[0] {
		require.Len(w.t, led, 2, "a new member leads: nobody is asked to step down: %v", o.order)
		require.True(w.t, slices.IsSorted(made[1:]), "standbys go by name: %v", o.order)
	} else {
		require.Equal(w.t, []string{former, second}, made[1:], "the former active member is a standby now, the present one is the last: %v", o.order)
	}
}

// attempted is what an attempt to move leadership came to, by its evidence.
type attempted struct {
	Sent  bool   `json:"sent"`
	Reply string `json:"reply"`
}

// stepDowns are all attempts of a run.
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
		all = append(all, kept.Verdict)
	}
	return all
}

func (w *world) openbaoLostReply() {
	o := w.watchBao()
	mend := w.spoil(w.openbaoWhole(), "stepDown", "lost")
	defer mend()
	run := w.staleBao("lost-reply")
	attempts := w.stepDowns(w.ends(run, o))
	require.Len(w.t, attempts, 1)
	require.True(w.t, attempts[0].Sent)
	require.NotEmpty(w.t, attempts[0].Reply)
	require.NotEqual(w.t, "accepted", attempts[0].Reply, "the reply was lost")
	require.Len(w.t, o.actives, 2, "leadership has moved once: %v", o.actives)
}

func (w *world) openbaoDeaf() {
	o := w.watchBao()
	mend := w.spoil(w.openbaoWhole(), "stepDown", "ignored")
	run := w.staleBao("deaf", "transferLimit=8s")
	w.parks(run, "N166")
	mend()
	w.Answer(protocol.Retry, run)
	attempts := w.stepDowns(w.ends(run, o))
	require.Len(w.t, attempts, 4, "thrice, and once more after a person's retry")
	for _, a := range attempts {
		require.Equal(w.t, attempted{Sent: true, Reply: "accepted"}, a)
	}
}

func (w *world) openbaoNoQuorum() {
	active := w.openbaoWhole()
	var rest []string
	for i := range openbaoMembers {
		if openbaoPod(i) != active {
			rest = append(rest, openbaoPod(i))
		}
	}
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
	// It gives out what it has, as a real one was seen to.
	mend := w.spoil(active, "snapshot", "local")
	before := w.openbaoUIDs()
	run := w.Start(openbaoSnapshotPlan, []string{"limit=10s"}, "--id", "snapshot-no-quorum")
	w.parks(run, "N97")
	w.aborts(run)
	w.openbaoTemplate(openbaoOld, "openbao-no-quorum")
	run = w.Start(openbaoReplacePlan, []string{"image=" + openbaoOld, "limit=20s"}, "--id", "no-quorum")
	w.parks(run, "sealed")
	require.Equal(w.t, before, w.openbaoUIDs())
	release()
	mend()
	w.openbaoWhole()
	o := w.watchBao()
	w.Answer(protocol.Retry, run)
	w.ends(run, o)
}
