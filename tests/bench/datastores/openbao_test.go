package datastores

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

const (
	openbaoSystem  = "vault-system"
	openbaoImage   = "nvcf-openbao:2.6.3-nv-1.3.7"
	openbaoVersion = "2.6.3"
	// openbaoTurn is how often the clients come.
	openbaoTurn = 100 * time.Millisecond
	// askOpenBao bounds one question to a member.
	askOpenBao = 3 * time.Second
)

var openbaoMembers = names(3, "openbao-server-%d")

// BenchmarkOpenBaoReplace replaces all pods by the script and by Refit in turn.
// Only the first replacement, which nobody measures, changes the version: every
// other one finds what the one before has left, with another label.
func BenchmarkOpenBaoReplace(b *testing.B) {
	times := repetitions(b)
	for b.Loop() {
		w := up(b, "openbao")
		s := &openbao{world: w, token: w.secret(openbaoSystem, "openbao-server-root-token", "root_token")}
		s.template("bench-0")
		_, _, err := w.guide("openbao.sh", openbaoImage, openbaoVersion)
		require.NoError(b, err)
		var script, refit []cost
		for i := range times {
			s.template(fmt.Sprintf("bench-%d-script", i+1))
			script = append(script, s.measured(func(*watcher) (wall, gates time.Duration) {
				_, at, err := w.guide("openbao.sh", openbaoImage, openbaoVersion)
				require.NoError(b, err)
				return at.took(), 0
			}))
			s.template(fmt.Sprintf("bench-%d-refit", i+1))
			refit = append(refit, s.measured(func(seen *watcher) (wall, gates time.Duration) {
				run, at := w.refit("examples/openbao-replace.yaml", fmt.Sprintf("replace-%d", i+1))
				return at.took(), seen.gates(b, w.acts(run, at))
			}))
			logf("OpenBao %d of %d: script %+v, Refit %+v", i+1, times, script[i], refit[i])
		}
		out := sheet{"openbao-replace", times}
		out.walls(median(script), median(refit))
		out.refused("writes", openbaoTurn, median(script).writes, median(refit).writes)
		out.refused("reads", openbaoTurn, median(script).reads, median(refit).reads)
	}
}

// openbao is the world with OpenBao.
type openbao struct {
	*world
	token string
}

// template makes every pod stale, as the dependency stage does.
func (o *openbao) template(label string) {
	o.b.Helper()
	image := "registry.refit.local/nvcf/" + openbaoImage
	patch := fmt.Appendf(nil, `{"spec":{"template":{"metadata":{"labels":{"helm.sh/chart":%q}},
		"spec":{"containers":[{"name":"openbao","image":%q},{"name":"auto-unseal-sidecar","image":%q}]}}}}`, label, image, image)
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	_, err := o.Kube.AppsV1().StatefulSets(openbaoSystem).Patch(ctx, "openbao-server", types.StrategicMergePatchType, patch, metav1.PatchOptions{})
	require.NoError(o.b, err)
}

// measured does the work while one client writes, another reads with its token,
// and a watcher looks at the members.
func (o *openbao) measured(work func(*watcher) (wall, gates time.Duration)) cost {
	o.b.Helper()
	require.NoError(o.b, o.anyone(http.MethodPut, "/v1/cubbyhole/bench", `{"n":"first"}`))
	var writes, reads meter
	seen := &watcher{}
	ends := []func(){
		always(openbaoTurn, func(n int) {
			began := time.Now()
			err := o.anyone(http.MethodPut, "/v1/cubbyhole/bench", fmt.Sprintf(`{"n":"%d"}`, n))
			writes.tried(began, time.Now(), err)
		}),
		always(openbaoTurn, func(int) {
			began := time.Now()
			err := o.anyone(http.MethodGet, "/v1/cubbyhole/bench", "")
			reads.tried(began, time.Now(), err)
		}),
		always(100*time.Millisecond, func(int) { seen.look(o) }),
	}
	var c cost
	c.wall, c.gates = work(seen)
	for _, end := range ends {
		end()
	}
	require.Positive(o.b, writes.tries-writes.refusals, "the client has written: %s", writes.first)
	c.writes, c.reads = writes.refused(time.Now()), reads.refused(time.Now())
	return c
}

// anyone asks all members at the same time and is content with one that does
// it, as a client behind the active member's Service is.
func (o *openbao) anyone(method, path, body string) error {
	answers := make(chan error, len(openbaoMembers))
	for _, m := range openbaoMembers {
		go func() { answers <- o.ask(method, m, path, body, nil) }()
	}
	var all []error
	for range openbaoMembers {
		err := <-answers
		if err == nil {
			return nil
		}
		all = append(all, err)
	}
	return errors.Join(all...)
}

// ask asks one member, which must answer itself.
func (o *openbao) ask(method, member, path, body string, into any) error {
	ctx, cancel := context.WithTimeout(context.Background(), askOpenBao)
	defer cancel()
	client := http.Client{
		Transport: &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return o.DialPod(ctx, openbaoSystem, member, 8200)
		}},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
	r, err := http.NewRequestWithContext(ctx, method, "http://"+member+path, strings.NewReader(body))
	if err != nil {
		return err
	}
	r.Header.Set("X-Vault-Token", o.token)
	r.Header.Set("X-Vault-No-Request-Forwarding", "true")
	response, err := client.Do(r)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	switch {
	case err != nil:
		return err
	case response.StatusCode >= http.StatusMultipleChoices:
		return fmt.Errorf("%s %s: code %d: %s", member, path, response.StatusCode, bytes.TrimSpace(text))
	case into == nil:
		return nil
	}
	return json.Unmarshal(text, into)
}

// watcher notes when the members are as the guide wants them.
type watcher struct {
	mu    sync.Mutex
	looks []membersSeen
}

// membersSeen is one look: who had which pod, and what check_openbao would say.
type membersSeen struct {
	at      time.Time
	pods    map[string]string // UIDs by name, of those that nobody deletes
	healthy bool
	active  string
}

func (s *watcher) look(o *openbao) {
	ctx, cancel := context.WithTimeout(context.Background(), askOpenBao)
	defer cancel()
	pods, err := o.Kube.CoreV1().Pods(openbaoSystem).List(ctx, metav1.ListOptions{LabelSelector: "app.kubernetes.io/name=openbao,component=server"})
	if err != nil {
		return // the next look is soon
	}
	now := membersSeen{pods: map[string]string{}}
	for _, p := range pods.Items {
		if p.DeletionTimestamp == nil {
			now.pods[p.Name] = string(p.UID)
		}
	}
	whole, actives := 0, 0
	for _, m := range openbaoMembers {
		var status struct {
			Sealed  bool   `json:"sealed"`
			Version string `json:"version"`
		}
		var leader struct {
			Self bool `json:"is_self"`
		}
		if o.ask(http.MethodGet, m, "/v1/sys/seal-status", "", &status) != nil || o.ask(http.MethodGet, m, "/v1/sys/leader", "", &leader) != nil {
			continue
		}
		if !status.Sealed && status.Version == openbaoVersion {
			whole++
		}
		if leader.Self {
			now.active = m
			actives++
		}
	}
	now.at = time.Now()
	now.healthy = whole == len(openbaoMembers) && actives == 1
	s.mu.Lock()
	defer s.mu.Unlock()
	s.looks = append(s.looks, now)
}

// gates is how long a run has looked where the guide does not: in a survey, once
// the guide's own check had passed; before each step,
// from the beginning of the activity to the last look that saw the pod there, or
// the member active; after it, once the guide's own checks had been passed, to
// the end of the activity. For a replaced member these are three healthy
// members, the new pod among them; for a step-down, another active one. What no
// guide has is added.
func (s *watcher) gates(b testing.TB, acts []act) time.Duration {
	b.Helper()
	total := unguided(acts)
	s.mu.Lock()
	defer s.mu.Unlock()
	found := 0
	for _, a := range acts {
		var step struct {
			Pod string `json:"pod"`
			UID string `json:"uid"`
		}
		if a.kind == "openbao.Survey" {
			total += s.surely(a)
			continue
		}
		if a.kind != "openbao.Replace" && a.kind != "openbao.StepDown" {
			continue
		}
		require.NoError(b, json.Unmarshal(a.input, &step))
		total += s.before(a, func(l membersSeen) bool {
			return a.kind == "openbao.Replace" && l.pods[step.Pod] == step.UID || a.kind == "openbao.StepDown" && l.active == step.Pod
		})
		for _, l := range s.looks {
			if l.at.Before(a.from) || l.at.After(a.to) || !l.healthy {
				continue
			}
			if a.kind == "openbao.Replace" && l.pods[step.Pod] != "" && l.pods[step.Pod] != step.UID || a.kind == "openbao.StepDown" && l.active != step.Pod {
				total += a.to.Sub(l.at)
				found++
				break
			}
		}
	}
	require.Equal(b, len(openbaoMembers)+1, found, "steps in which the guide's check was seen to pass, of a run with a step-down")
	return total
}

// surely is how long a survey has gone on when the guide's own check had passed:
// it wants members that have all that was committed, too.
func (s *watcher) surely(a act) time.Duration {
	for _, l := range s.looks {
		if !l.at.Before(a.from) && !l.at.After(a.to) && l.healthy {
			return a.to.Sub(l.at)
		}
	}
	return 0
}

// before is how long an activity has run when its step was last seen undone.
func (s *watcher) before(a act, undone func(membersSeen) bool) (took time.Duration) {
	for _, l := range s.looks {
		if !l.at.Before(a.from) && !l.at.After(a.to) && undone(l) {
			took = l.at.Sub(a.from)
		}
	}
	return took
}

func TestOnlyWhatTheGuideLacksIsAGateOfOpenBao(t *testing.T) {
	start := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	at := func(seconds int) time.Time { return start.Add(time.Duration(seconds) * time.Second) }
	var acts []act
	s := &watcher{}
	step := func(kind string, from int, pod string, undone, done membersSeen) {
		acts = append(acts, act{span: span{at(from), at(from + 20)}, kind: kind, input: json.RawMessage(fmt.Sprintf(`{"pod":%q,"uid":"old"}`, pod))})
		undone.healthy, done.healthy = true, true
		for second, l := range map[int]membersSeen{2: undone, 5: undone, 9: {}, 13: done, 17: done} {
			l.at = at(from + second)
			s.looks = append(s.looks, l)
		}
	}
	for i, pod := range []string{"a", "b"} {
		step("openbao.Replace", 30*i, pod, membersSeen{pods: map[string]string{pod: "old"}}, membersSeen{pods: map[string]string{pod: "new"}})
	}
	step("openbao.StepDown", 60, "c", membersSeen{active: "c"}, membersSeen{active: "a"})
	step("openbao.Replace", 90, "c", membersSeen{pods: map[string]string{"c": "old"}}, membersSeen{pods: map[string]string{"c": "new"}})
	acts = append(acts, act{span: span{at(120), at(124)}, kind: "openbao.Survey"})
	for second, healthy := range map[int]bool{121: false, 122: true, 123: true} {
		s.looks = append(s.looks, membersSeen{at: at(second), healthy: healthy})
	}
	slices.SortFunc(s.looks, func(x, y membersSeen) int { return x.at.Compare(y.at) })
	require.Equal(t, (4*(5+7)+2)*time.Second, s.gates(t, acts), "five seconds before each step, seven after its check was passed; two of a survey")
}
