package kube

import (
	"context"
	"fmt"
	"sort"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/cache"

	"github.com/refit-run/refit/activities/finding"
)

const (
	// listLimit bounds one list, so that a hung server is asked again.
	listLimit = 30 * time.Second
	// listPage keeps one answer of the server small at fleet size.
	listPage = 500
	// watchSeconds ends a watch now and then: one that a broken middle box
	// holds open in silence is noticed at the latest by then.
	watchSeconds int64 = 240
)

// mirror keeps the objects of several selections as the server last told them.
type mirror struct {
	client     *Client
	selections []Selection
	// changed has room for one note: many events between two looks count once.
	changed chan struct{}
	fatal   chan error

	mu   sync.Mutex
	sets []set
}

type set struct {
	objects map[types.UID]metav1.Object
	listed  bool
	trouble error
}

func newMirror(c *Client, selections []Selection) *mirror {
	return &mirror{
		client: c, selections: selections, sets: make([]set, len(selections)),
		changed: make(chan struct{}, 1), fatal: make(chan error, len(selections)),
	}
}

// start follows every selection until the context ends; the channel closes
// when all have stopped.
func (m *mirror) start(ctx context.Context) <-chan struct{} {
	var running sync.WaitGroup
	for i := range m.selections {
		running.Go(func() {
			if err := m.follow(ctx, i); err != nil && ctx.Err() == nil {
				m.fatal <- err
			}
		})
	}
	finished := make(chan struct{})
	go func() { running.Wait(); close(finished) }()
	return finished
}

// follow lists, then watches from there; it lists again when the server has
// forgotten the version, and pauses between failures.
func (m *mirror) follow(ctx context.Context, i int) error {
	backoff := newBackoff()
	version := ""
	for ctx.Err() == nil {
		var err error
		if version == "" {
			version, err = m.list(ctx, i)
		} else {
			var events int
			version, events, err = m.watch(ctx, i, version)
			if events > 0 {
				backoff = newBackoff()
			}
		}
		m.report(i, err)
		if err == nil {
			continue
		}
		if apierrors.IsResourceExpired(err) || apierrors.IsGone(err) {
			version = ""
		} else if Class(err) == finding.Stop {
			return err
		}
		pause(ctx, backoff.Step())
	}
	return nil
}

// newBackoff: quick at first, and never so long that an API server that comes
// back is kept waiting for more than three seconds.
func newBackoff() *wait.Backoff {
	return &wait.Backoff{Duration: 100 * time.Millisecond, Factor: 1.7, Jitter: 0.2, Steps: 1 << 30, Cap: 3 * time.Second}
}

func pause(ctx context.Context, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
	case <-timer.C:
	}
}

// listWatch of a selection. Pods and Nodes travel as protobuf: they are the
// largest objects of a fleet, and as maps a thousand pods take most of a second.
func (c *Client) listWatch(s Selection) *cache.ListWatch {
	switch s.Resource {
	case corev1.SchemeGroupVersion.WithResource("pods"):
		pods := c.Typed.CoreV1().Pods(s.Namespace)
		return &cache.ListWatch{
			ListWithContextFunc:  func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) { return pods.List(ctx, o) },
			WatchFuncWithContext: pods.Watch,
		}
	case corev1.SchemeGroupVersion.WithResource("nodes"):
		nodes := c.Typed.CoreV1().Nodes()
		return &cache.ListWatch{
			ListWithContextFunc:  func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) { return nodes.List(ctx, o) },
			WatchFuncWithContext: nodes.Watch,
		}
	}
	objects := c.Dynamic.Resource(s.Resource).Namespace(s.Namespace)
	return &cache.ListWatch{
		ListWithContextFunc:  func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) { return objects.List(ctx, o) },
		WatchFuncWithContext: objects.Watch,
	}
}

func (m *mirror) list(ctx context.Context, i int) (version string, err error) {
	ctx, cancel := context.WithTimeout(ctx, listLimit)
	defer cancel()
	s := m.selections[i]
	seen := map[types.UID]metav1.Object{}
	options := metav1.ListOptions{LabelSelector: s.Labels, FieldSelector: s.fieldSelector(), Limit: listPage}
	for {
		page, err := m.client.listWatch(s).ListWithContext(ctx, options)
		if err != nil {
			return "", err
		}
		if err := meta.EachListItem(page, func(item runtime.Object) error {
			obj, err := meta.Accessor(item)
			if err == nil && s.wants(obj) {
				seen[obj.GetUID()] = obj
			}
			return err
		}); err != nil {
			return "", fmt.Errorf("list of %s: %w", s, err)
		}
		of, err := meta.ListAccessor(page)
		if err != nil {
			return "", fmt.Errorf("list of %s: %w", s, err)
		}
		if options.Continue = of.GetContinue(); options.Continue == "" {
			version = of.GetResourceVersion()
			break
		}
	}
	m.mu.Lock()
	m.sets[i].objects, m.sets[i].listed = seen, true
	m.mu.Unlock()
	m.note()
	return version, nil
}

// watch applies events until the watch ends; it returns the version reached,
// or none when the list must be made anew.
func (m *mirror) watch(ctx context.Context, i int, version string) (reached string, events int, err error) {
	s, seconds := m.selections[i], watchSeconds
	w, err := m.client.listWatch(s).WatchWithContext(ctx, metav1.ListOptions{
		LabelSelector: s.Labels, FieldSelector: s.fieldSelector(), ResourceVersion: version,
		AllowWatchBookmarks: true, TimeoutSeconds: &seconds,
	})
	if err != nil {
		return version, 0, err
	}
	defer w.Stop()
	began := time.Now()
	for event := range w.ResultChan() {
		if event.Type == watch.Error {
			return version, events, apierrors.FromObject(event.Object)
		}
		obj, err := meta.Accessor(event.Object)
		if err != nil {
			return "", events, fmt.Errorf("watch of %s: %w", s, err)
		}
		version = obj.GetResourceVersion()
		if event.Type == watch.Bookmark {
			continue
		}
		events++
		m.mu.Lock()
		if event.Type == watch.Deleted || !s.wants(obj) {
			delete(m.sets[i].objects, obj.GetUID())
		} else {
			m.sets[i].objects[obj.GetUID()] = obj
		}
		m.mu.Unlock()
		m.note()
	}
	// A watch that ends at once, again and again, must not become a busy loop.
	if events == 0 && time.Since(began) < time.Second && ctx.Err() == nil {
		return version, 0, fmt.Errorf("watch of %s ended at once", s)
	}
	return version, events, nil
}

func (m *mirror) note() {
	select {
	case m.changed <- struct{}{}:
	default:
	}
}

func (m *mirror) report(i int, err error) {
	m.mu.Lock()
	m.sets[i].trouble = err
	m.mu.Unlock()
}

// trouble is the error of the last request of a selection that fails now.
func (m *mirror) trouble() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, s := range m.sets {
		if s.trouble != nil {
			return s.trouble
		}
	}
	return nil
}

// objects copies the current sets, sorted by namespace and name; complete is
// false until every selection has been listed once.
func (m *mirror) objects() (all Objects, complete bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	all = make(Objects, len(m.sets))
	for i, s := range m.sets {
		if !s.listed {
			return nil, false
		}
		for _, obj := range s.objects {
			all[i] = append(all[i], obj)
		}
		sort.Slice(all[i], func(a, b int) bool {
			x, y := all[i][a], all[i][b]
			if x.GetNamespace() != y.GetNamespace() {
				return x.GetNamespace() < y.GetNamespace()
			}
			return x.GetName() < y.GetName()
		})
	}
	return all, true
}
