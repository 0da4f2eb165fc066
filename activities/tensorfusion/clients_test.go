package tensorfusion

import (
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	policyv1 "k8s.io/api/policy/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/client-go/rest"

	"github.com/refit-run/refit/activities/finding"
	"github.com/refit-run/refit/activities/internal/apiservertest"
	"github.com/refit-run/refit/activities/kube"
)

func (w *world) clients(limit time.Duration, leave ...string) ClientsRequest {
	return ClientsRequest{Scope: w.scope, Pool: w.pool, PerOwner: 1, Leave: leave, Limit: limit}
}

func (w *world) evict(limit time.Duration, leave ...string) (ClientsResult, error) {
	return newEviction(w.client, w.clients(limit, leave...)).run(w.t.Context())
}

// budget allows no disruption of the application.
func (w *world) budget(name, app string) {
	w.t.Helper()
	_, err := w.admin.Typed.PolicyV1().PodDisruptionBudgets(w.scope.Release.Namespace).Create(w.t.Context(), &policyv1.PodDisruptionBudget{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: policyv1.PodDisruptionBudgetSpec{
			MinAvailable: pointer(intstr.FromInt32(2)), Selector: &metav1.LabelSelector{MatchLabels: map[string]string{labelApp: app}},
		},
	}, metav1.CreateOptions{})
	require.NoError(w.t, err)
}

func (w *world) refusals() int {
	return w.writes.count(func(key string) bool { return strings.HasPrefix(key, "POST") && strings.HasSuffix(key, "/eviction") })
}

const (
	deployment = "apps/v1/Deployment"
	replicaSet = "apps/v1/ReplicaSet"
)

// Whatever owns them, of one owner's pods no more than the plan says are away
// at any moment, and the end comes when every one is back.
func TestNoMorePodsOfAnOwnerAreAwayAtOnceThanThePlanSays(t *testing.T) {
	for kind, make := range map[string]func(w *world) *tally{
		"ReplicaSet":  func(w *world) *tally { w.app(replicaSet, "web", 4, nil); return w.tally(4, "web") },
		"one replica": func(w *world) *tally { w.app(replicaSet, "web", 1, nil); return w.tally(1, "web") },
		"StatefulSet": func(w *world) *tally { w.app("apps/v1/StatefulSet", "web", 4, nil); return w.tally(4, "web") },
		"DaemonSet":   func(w *world) *tally { w.app("apps/v1/DaemonSet", "web", 6, nil); return w.tally(6, "web") },
		"ReplicationController": func(w *world) *tally {
			w.app("v1/ReplicationController", "web", 4, nil)
			return w.tally(4, "web")
		},
		"Deployment in the middle of a rollout": func(w *world) *tally {
			d := w.made(deployment, "web", 5, nil)
			w.app(replicaSet, "web-a", 4, d)
			w.app(replicaSet, "web-b", 1, d)
			return w.tally(5, "web-a", "web-b")
		},
	} {
		for perOwner := range 3 {
			t.Run(fmt.Sprintf("%s, %d at a time", kind, perOwner), func(t *testing.T) {
				t.Parallel() // they mostly wait
				w := newWorld(t)
				w.poolStatus(map[string]any{"client": "new"})
				seen := make(w)
				req := w.clients(30 * time.Second)
				req.PerOwner = perOwner // 0 is taken for 1
				out, err := newEviction(w.client, req).run(t.Context())
				require.NoError(t, err)
				assert.Equal(t, int(seen.wanted.Load()), out.Evicted)
				assert.Empty(t, out.Stale)
				peak, away := seen.end()
				assert.LessOrEqual(t, peak, max(1, perOwner))
				assert.GreaterOrEqual(t, peak, 1)
				assert.Zero(t, away, "the end must not come before the last one is back")
			})
		}
	}
}

// An owner is scaled while its pods are held back by a budget, which is then
// taken away.
func TestAnOwnerThatIsScaledMeanwhileKeepsItsLimit(t *testing.T) {
	for _, c := range []struct{ from, to int }{{3, 10}, {10, 3}} {
		t.Run(fmt.Sprintf("from %d to %d", c.from, c.to), func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			w.poolStatus(map[string]any{"client": "new"})
			a := w.app(replicaSet, "web-a", c.from, w.made(deployment, "web", c.from, nil))
			a.hash.Store("old")
			w.budget("keep-web", "web-a")
			seen := w.tally(min(c.from, c.to), "web-a")
			type end struct {
				out ClientsResult
				err error
			}
			done := make(chan end, 1)
			go func() {
				out, err := w.evict(60 * time.Second)
				done <- end{out, err}
			}()
			require.Eventually(t, func() bool { return w.refusals() > 0 }, 30*time.Second, 20*time.Millisecond)
			w.scale(deployment, "web", c.to)
			w.scale(replicaSet, "web-a", c.to)
			require.Eventually(t, func() bool { return seen.readyNow() == c.to }, 30*time.Second, 20*time.Millisecond)
			seen.wanted.Store(int32(c.to))
			a.hash.Store("new")
			require.NoError(t, w.admin.Typed.PolicyV1().PodDisruptionBudgets(w.scope.Release.Namespace).Delete(t.Context(), "keep-web", metav1.DeleteOptions{}))
			got := <-done
			require.NoError(t, got.err)
			assert.Equal(t, c.to, got.out.Evicted)
			peak, away := seen.end()
			assert.Equal(t, 1, peak)
			assert.Zero(t, away)
		})
	}
}

// What the old injection broke is replaced first: that takes nothing away.
func TestOutdatedPodsThatDoNotWorkAreReplacedFirst(t *testing.T) {
	w := newWorld(t)
	w.poolStatus(map[string]any{"client": "new"})
	w.app(replicaSet, "web", 5, nil)
	pods := w.admin.Typed.CoreV1().Pods(w.scope.Release.Namespace)
	for i := range 2 {
		p, err := pods.Get(t.Context(), fmt.Sprintf("web-old-%d", i+3), metav1.GetOptions{})
		require.NoError(t, err)
		p.Status.Conditions = nil
		_, err = pods.UpdateStatus(t.Context(), p, metav1.UpdateOptions{})
		require.NoError(t, err)
	}
	seen := w.tally(5, "web")
	out, err := w.evict(30 * time.Second)
	require.NoError(t, err)
	assert.Equal(t, 5, out.Evicted)
	peak, away := seen.end()
	assert.LessOrEqual(t, peak, 2, "two were away from the start")
	assert.Zero(t, away)
}

func TestAnOwnerWhoseNewPodsAreOutdatedAgainIsNotEvictedForEver(t *testing.T) {
	w := newWorld(t)
	w.poolStatus(map[string]any{"client": "new"})
	w.app(replicaSet, "web", 2, nil).hash.Store("old")
	out, err := w.evict(30 * time.Second)
	f, class, ok := finding.Of(err)
	require.True(t, ok, err)
	assert.Equal(t, finding.Stop, class)
	assert.Contains(t, f.Object, "/web")
	assert.Contains(t, f.Found, "2 pods that were made since the eviction began were outdated again")
	assert.Equal(t, 4, out.Evicted)
}

func TestStaleClientsAreEvictedOneByOneAndBarePodsAreLeft(t *testing.T) {
	w := newWorld(t)
	w.poolStatus(map[string]any{"client": "new"})
	w.app(replicaSet, "web", 3, nil)
	require.NoError(t, w.clientPod(t.Context(), "bare", "bare", "old", nil, true))
	seen := w.tally(3, "web")
	out, err := w.evict(20 * time.Second)
	require.NoError(t, err)
	assert.Equal(t, 3, out.Evicted)
	require.Len(t, out.Left, 1)
	assert.Equal(t, "bare", out.Left[0].Name)
	assert.Equal(t, leftBare, out.Left[0].Left)
	peak, away := seen.end()
	assert.Equal(t, 1, peak)
	assert.Zero(t, away)
}

func TestPodsWhoseOwnerIsDeletedAreLeft(t *testing.T) {
	for _, above := range []bool{false, true} {
		w := newWorld(t)
		w.poolStatus(map[string]any{"client": "new"})
		kind, name := replicaSet, "web"
		if above {
			w.app(replicaSet, "web-a", 1, w.made(deployment, "web", 1, nil))
			kind = deployment
		} else {
			w.app(replicaSet, "web", 1, nil)
		}
		require.NoError(t, w.admin.Dynamic.Resource(resources[kind]).Namespace(w.scope.Release.Namespace).Delete(t.Context(), name, metav1.DeleteOptions{}))
		out, err := w.evict(20 * time.Second)
		require.NoError(t, err)
		assert.Zero(t, out.Evicted)
		require.Len(t, out.Left, 1)
		assert.Equal(t, leftGone, out.Left[0].Left)
	}
}

func TestOwnersThatThePlanNamesAreLeft(t *testing.T) {
	w := newWorld(t)
	w.poolStatus(map[string]any{"client": "new"})
	w.app(replicaSet, "web", 1, nil)
	out, err := w.evict(20*time.Second, "ReplicaSet/"+w.scope.Release.Namespace+"/web")
	require.NoError(t, err)
	assert.Zero(t, out.Evicted)
	require.Len(t, out.Left, 1)
	assert.Equal(t, leftByPlan, out.Left[0].Left)
}

func TestABudgetThatRefusesIsNamed(t *testing.T) {
	w := newWorld(t)
	w.poolStatus(map[string]any{"client": "new"})
	w.app(replicaSet, "web", 2, nil)
	w.budget("keep-web", "web")
	_, err := w.evict(2 * time.Second)
	f, class, ok := finding.Of(err)
	require.True(t, ok, err)
	assert.Equal(t, finding.Wait, class)
	assert.Contains(t, f.Found, "keep-web")
}

func TestAnOwnerWhoseNewPodsDoNotWorkIsNamed(t *testing.T) {
	w := newWorld(t)
	w.poolStatus(map[string]any{"client": "new"})
	w.app(replicaSet, "fine", 2, nil)
	w.app(replicaSet, "stuck", 2, nil).broken.Store(true)
	_, err := w.evict(3 * time.Second)
	f, class, ok := finding.Of(err)
	require.True(t, ok, err)
	assert.Equal(t, finding.Stop, class)
	assert.Contains(t, f.Found, "ReplicaSet/"+w.scope.Release.Namespace+"/stuck has 1 outdated pods and 1 away")
	assert.NotContains(t, f.Found, "/fine")
	assert.Contains(t, f.Expected, "3s")
}

// While one application is held back by its budget, the API server answers
// something else about another one: that is no matter of the budget.
func TestAnErrorIsNotToldAsARefusalOfABudget(t *testing.T) {
	for code, class := range map[int]finding.Class{
		http.StatusForbidden: finding.Stop, http.StatusInternalServerError: finding.Retry, http.StatusServiceUnavailable: finding.Retry,
	} {
		t.Run(fmt.Sprint(code), func(t *testing.T) {
			w := newWorld(t)
			w.poolStatus(map[string]any{"client": "new"})
			w.app(replicaSet, "held", 2, nil)
			w.app(replicaSet, "other", 1, nil)
			w.budget("keep-held", "held")
			config := rest.CopyConfig(apiservertest.Shared(t).Config(t))
			refused := atomic.Bool{}
			config.Wrap(func(next http.RoundTripper) http.RoundTripper {
				return roundTrip(func(r *http.Request) (*http.Response, error) {
					if strings.HasSuffix(r.URL.Path, "/replicasets/other") && refused.Load() {
						return answer(r, code), nil
					}
					resp, err := next.RoundTrip(r)
					if err == nil && resp.StatusCode == http.StatusTooManyRequests {
						refused.Store(true)
					}
					return resp, err
				})
			})
			client, err := kube.NewClient(config)
			require.NoError(t, err)
			_, err = newEviction(client, w.clients(20*time.Second)).run(t.Context())
			f, got, ok := finding.Of(err)
			require.True(t, ok, err)
			assert.True(t, refused.Load())
			assert.Equal(t, class, got)
			assert.NotContains(t, f.Found, "refused by")
			assert.Contains(t, f.Object, "/other")
		})
	}
}

// answer is an error that the API server itself might give.
func answer(r *http.Request, code int) *http.Response {
	reason := map[int]metav1.StatusReason{
		http.StatusForbidden: metav1.StatusReasonForbidden, http.StatusInternalServerError: metav1.StatusReasonInternalError,
		http.StatusServiceUnavailable: metav1.StatusReasonServiceUnavailable,
	}[code]
	body := fmt.Sprintf(`{"kind":"Status","apiVersion":"v1","status":"Failure","reason":%q,"code":%d,"message":"planned by the test"}`, reason, code)
	return &http.Response{
		StatusCode: code, Status: http.StatusText(code), Request: r, Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1,
		Header: http.Header{"Content-Type": {"application/json"}}, Body: io.NopCloser(strings.NewReader(body)), ContentLength: int64(len(body)),
	}
}
