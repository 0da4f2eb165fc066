package helm

import (
	"context"
	"net/http"
	"sync"
	"time"

	"k8s.io/client-go/kubernetes"

	"github.com/refit-run/refit/activities/lease"
)

// fenceAge is how old a look at the Lease may be when a write is sent: young
// enough that a fenced engine stops within fenceMargin, old enough that a
// chart of 60 objects does not double its requests.
const fenceAge = time.Second

// fence lets writes through only while the Lease names this holder and engine.
// A child that outlives a network split stops by itself: its worker can't kill
// it, but nothing that it sends changes the release any more.
type fence struct {
	leases                             kubernetes.Interface
	namespace, release, holder, engine string

	mu      sync.Mutex
	looked  time.Time
	refused error
}

func newFence(k kubernetes.Interface, namespace, release, holder, engine string) *fence {
	return &fence{leases: k, namespace: namespace, release: release, holder: holder, engine: engine}
}

func (f *fence) check(ctx context.Context) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.refused != nil {
		return f.refused
	}
	if time.Since(f.looked) < fenceAge {
		return nil
	}
	began := time.Now()
	if err := lease.Verify(ctx, f.leases, f.namespace, f.release, f.holder, f.engine); err != nil {
		// An API server that does not answer refuses this write only.
		if _, locked := lease.LockedFinding(err); locked {
			f.refused = err
		}
		return err
	}
	f.looked = began
	return nil
}

// refusal is the Lease's final no, if there was one.
func (f *fence) refusal() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.refused
}

func (f *fence) wrap(next http.RoundTripper) http.RoundTripper {
	return roundTripper(func(r *http.Request) (*http.Response, error) {
		switch r.Method {
		case http.MethodGet, http.MethodHead, http.MethodOptions:
		default:
			if err := f.check(r.Context()); err != nil {
				return nil, err
			}
		}
		return next.RoundTrip(r)
	})
}

type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }
