package openbao

import (
	"errors"
	"fmt"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/refit-run/refit/activities/artifact"
	"github.com/refit-run/refit/activities/finding"
)

// wire is the tunnel to a member, which a test may look into.
type wire struct {
	net.Conn
	c  *cluster
	mu sync.Mutex
	// asked is the request that is not answered yet.
	asked string
}

func (w *wire) Write(p []byte) (int, error) {
	request, _, _ := strings.Cut(string(p), " HTTP/")
	w.mu.Lock()
	w.asked = request
	w.mu.Unlock()
	if f := w.c.asks.Load(); f != nil {
		(*f)(request)
	}
	return w.Conn.Write(p)
}

func (w *wire) Read(p []byte) (int, error) {
	n, err := w.Conn.Read(p)
	w.mu.Lock()
	request := w.asked
	w.asked = ""
	w.mu.Unlock()
	if f := w.c.answers.Load(); f != nil && request != "" && err == nil {
		(*f)(request)
	}
	return n, err
}

// meanwhile runs f once, between the answer to the request and its reader.
func (c *cluster) meanwhile(request string, f func()) {
	var g func(string)
	g = func(r string) {
		if r == request && c.answers.CompareAndSwap(&g, nil) {
			f()
		}
	}
	c.answers.Store(&g)
}

const (
	askStepDown = "PUT /v1/sys/step-down"
	askSnapshot = "GET /v1/sys/storage/raft/snapshot"
)

// slowLease makes the looker's next questions to Kubernetes end no sooner than
// at a time.
func (c *cluster) slowLease(l *looker, until time.Time) {
	c.t.Helper()
	config := rest.CopyConfig(l.client.Config)
	config.Wrap(func(next http.RoundTripper) http.RoundTripper {
		return roundTrip(func(r *http.Request) (*http.Response, error) {
			reply, err := next.RoundTrip(r)
			if strings.Contains(r.URL.Path, "/leases/") {
				over := time.NewTimer(time.Until(until))
				<-over.C
			}
			return reply, err
		})
	})
	typed, err := kubernetes.NewForConfig(config)
	require.NoError(c.t, err)
	slow := *l.client
	slow.Typed = typed
	l.client = &slow
}

type roundTrip func(*http.Request) (*http.Response, error)

func (f roundTrip) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

func TestWhatWasSeenIsOldOrOverByTheTimeOfTheAct(t *testing.T) {
	c := start(t)
	want := c.want()
	s := c.survey(want, patience)
	former := c.active()
	uids := func() (out []string) {
		for _, n := range c.nodes {
			out = append(out, c.uid(n.name))
		}
		return out
	}
	before := uids()
	// asked counts the step-downs that left for a member.
	var asked atomic.Int32
	count := func(request string) {
		if request == askStepDown {
			asked.Add(1)
		}
	}
	c.asks.Store(&count)
	leading := StepDownRequest{Place: c.place, Want: want, Pod: former.Pod, UID: former.UID, BeginBy: time.Now().Add(time.Hour)}

	t.Run("a look that grew old while the Lease was asked for", func(t *testing.T) {
		l, err := c.acts.looker(t.Context(), c.place)
		require.NoError(t, err)
		defer l.close()
		at := time.Now().Add(200*time.Millisecond - freshFor) // young enough still
		require.Empty(t, missed(at, time.Now().Add(time.Hour), "test"))
		c.slowLease(l, at.Add(freshFor+time.Millisecond))
		var kept ReplaceResult
		require.NoError(t, l.delete(t.Context(), c.replacement(want, s), at, &kept))
		require.Contains(t, kept.Moved, "expected a look at all members within 3s")
		require.False(t, kept.Touched)
		var still StepDownResult
		require.NoError(t, l.stepDown(t.Context(), leading, at, &still))
		require.Contains(t, still.Moved, "expected a look at all members within 3s")
		require.False(t, still.Sent)
	})

	t.Run("an act that was to begin before", func(t *testing.T) {
		r := c.replacement(want, s)
		r.BeginBy = time.Now().Add(-time.Second)
		require.Contains(t, c.replace(r).Moved, "was to begin by")
		l, err := c.acts.looker(t.Context(), c.place)
		require.NoError(t, err)
		defer l.close()
		var late ReplaceResult
		require.NoError(t, l.delete(t.Context(), r, time.Now(), &late), "it became too late after the last look")
		require.Contains(t, late.Moved, "was to begin by")
		require.False(t, late.Touched)
		r.BeginBy = time.Time{}
		require.Contains(t, c.replace(r).Moved, "has not begun", "what a section before has not begun is not begun outside of one")
	})
	require.Equal(t, before, uids(), "no pod was deleted")
	require.Zero(t, asked.Load(), "and nobody asked to step down")
	require.Equal(t, former.Pod, c.active().Pod)

	t.Run("a token that may not step a member down", func(t *testing.T) {
		l, err := c.acts.looker(t.Context(), c.place)
		require.NoError(t, err)
		defer l.close()
		l.servers[former.UID] = member(t, func(w http.ResponseWriter, _ *http.Request) {
			w.WriteHeader(http.StatusForbidden)
			_, _ = w.Write([]byte(`{"errors":["permission denied"]}`))
		})
		var out StepDownResult
		err = l.stepDown(t.Context(), leading, time.Now(), &out)
		f, class, ok := finding.Of(err)
		require.True(t, ok, err)
		require.Equal(t, finding.Stop, class)
		require.Equal(t, "N165", f.Row)
		require.False(t, out.Sent, "it was refused: nothing is half done")
	})

	t.Run("what the plan names and nobody has made", func(t *testing.T) {
		for _, change := range []func(*Place){
			func(p *Place) { p.Servers.StatefulSet = "other" },
			func(p *Place) { p.Token.Secret = "other" },
		} {
			r := SurveyRequest{Place: c.place, Want: want, Limit: patience}
			change(&r.Place)
			_, err := c.acts.Survey(t.Context(), r)
			f, class, ok := finding.Of(err)
			require.True(t, ok, err)
			require.Equal(t, finding.Stop, class)
			require.Contains(t, f.Object, "other")
			require.NotEmpty(t, f.Expected)
			require.Contains(t, f.Next, "in the plan")
		}
		r := c.backup(patience)
		r.Secrets = []Held{{"other", "unseal_key"}}
		_, err := c.acts.Snapshot(t.Context(), r)
		f, _, ok := finding.Of(err)
		require.True(t, ok, err)
		require.Equal(t, "N99", f.Row)
		require.Contains(t, f.Next, "correct secrets in the plan")
	})

	t.Run("a volume claim that is being deleted", func(t *testing.T) {
		claims := c.client.Typed.CoreV1().PersistentVolumeClaims(c.place.Namespace)
		claim := &corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Name: "data-" + s.Step.Pod, Finalizers: []string{"kubernetes.io/pvc-protection"}},
			Spec: corev1.PersistentVolumeClaimSpec{AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce},
				Resources: corev1.VolumeResourceRequirements{Requests: corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("1Gi")}}}}
		_, err := claims.Create(t.Context(), claim, metav1.CreateOptions{})
		require.NoError(t, err)
		require.Empty(t, c.survey(want, patience).Findings)
		require.NoError(t, claims.Delete(t.Context(), claim.Name, metav1.DeleteOptions{}))
		require.Contains(t, c.survey(want, patience).Findings[0].String(), "N158: OpenBao member "+s.Step.Pod+": expected volume claims that stay, found "+claim.Name+" is being deleted")
		_, err = claims.Patch(t.Context(), claim.Name, types.JSONPatchType, []byte(`[{"op":"remove","path":"/metadata/finalizers"}]`), metav1.PatchOptions{})
		require.NoError(t, err)
	})

	stored := func() (out []artifact.Ref) {
		refs, err := c.acts.Artifacts.List(t.Context(), "")
		require.NoError(t, err)
		for _, r := range refs {
			if r.Kind == artifact.Secret {
				out = append(out, r)
			}
		}
		return out
	}
	t.Run("a snapshot of a member that is active no more", func(t *testing.T) {
		c.meanwhile(askSnapshot, func() { c.depose(former) })
		_, err := c.acts.Snapshot(t.Context(), c.backup(patience))
		f, class, ok := finding.Of(err)
		require.True(t, ok, err)
		require.Equal(t, finding.Retry, class)
		require.Equal(t, "N97", f.Row)
		require.Empty(t, stored())
	})

	c.settled()
	for s = c.survey(want, patience); s.Step.Act == Replace; s = c.survey(want, patience) {
		out := c.replace(c.replacement(want, s))
		require.True(t, out.OK, "%+v", out)
	}
	require.Equal(t, StepDown, s.Step.Act)

	t.Run("a step-down whose sending is kept before it leaves", func(t *testing.T) {
		l, err := c.acts.looker(t.Context(), c.place)
		require.NoError(t, err)
		defer l.close()
		v, err := l.look(t.Context())
		require.NoError(t, err)
		asked.Store(0)
		r := c.handover(want, s)
		var out StepDownResult
		l.mark = func(string) error { return errors.New("the server is away") }
		require.ErrorContains(t, l.stepDown(t.Context(), r, v.At, &out), "the server is away")
		require.Zero(t, asked.Load(), "the next try would not know of it")
		require.False(t, out.Sent)
		var kept []string
		l.mark = func(what string) error {
			require.Zero(t, asked.Load(), "it has left already")
			kept = append(kept, what)
			return nil
		}
		require.NoError(t, l.stepDown(t.Context(), r, time.Now(), &out))
		require.Equal(t, []string{sent + " to " + s.Step.Pod}, kept)
		require.EqualValues(t, 1, asked.Load())
		require.True(t, out.Sent)
		led := c.stepDown(r)
		require.True(t, led.OK, "%+v", led)
		require.EqualValues(t, 1, asked.Load(), "the new leader is not asked")
	})

	t.Run("a snapshot of a member that has lost its quorum", func(t *testing.T) {
		active := c.active().Pod
		c.meanwhile(askSnapshot, func() {
			for _, n := range c.nodes {
				if n.name != active {
					c.end(n, syscall.SIGKILL)
				}
			}
		})
		_, err := c.acts.Snapshot(t.Context(), c.backup(patience))
		f, class, ok := finding.Of(err)
		require.True(t, ok, err)
		require.Equal(t, finding.Retry, class)
		require.Equal(t, "N97", f.Row)
		require.Empty(t, stored())
	})
}

// depose moves leadership away from a member, as a cluster may by itself.
func (c *cluster) depose(m Member) {
	l, err := c.acts.looker(c.t.Context(), c.place)
	if err == nil {
		defer l.close()
		if _, err = l.look(c.t.Context()); err == nil {
			err = l.servers[m.UID].stepDown(c.t.Context())
		}
	}
	if err == nil {
		err = c.eventually("another member leads", func() error {
			v, err := l.look(c.t.Context())
			if err != nil {
				return err
			}
			if active, none := v.Active(); none != "" || active.Pod == m.Pod {
				return errors.New(fmt.Sprint("active is ", active.Pod, none))
			}
			return nil
		})
	}
	if err != nil {
		c.t.Error(err)
	}
}
