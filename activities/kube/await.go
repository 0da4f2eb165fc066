package kube

import (
	"context"
	"errors"
	"fmt"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/refit-run/refit/activities/finding"
)

// Selection names what a watch sees: all objects of a resource, narrowed by
// namespace, name, labels and fields.
type Selection struct {
	Resource  schema.GroupVersionResource
	Namespace string
	Name      string
	Labels    string
	Fields    string
	// Only keeps what it is true for, where the server can't tell it apart;
	// nil keeps everything.
	Only func(metav1.Object) bool
}

func (s Selection) wants(obj metav1.Object) bool { return s.Only == nil || s.Only(obj) }

func (s Selection) String() string {
	text := s.Resource.Resource
	if s.Namespace != "" {
		text += "/" + s.Namespace
	}
	if s.Name != "" {
		text += "/" + s.Name
	}
	if s.Labels != "" {
		text += " with labels " + s.Labels
	}
	return text
}

func (s Selection) fieldSelector() string {
	if s.Name == "" {
		return s.Fields
	}
	name := fields.OneTermEqualSelector("metadata.name", s.Name).String()
	if s.Fields == "" {
		return name
	}
	return name + "," + s.Fields
}

// Wait bounds an Await and says what it is for.
type Wait struct {
	// What names the state that is waited for; it is the finding's Object.
	What string
	// Limit is the deadline; 0 leaves it to the context.
	Limit time.Duration
	// Heartbeat is called about every Every (default one second) while
	// waiting, from another goroutine than cond's, with what cond found last.
	Heartbeat func(found string)
	Every     time.Duration
	// Next is what usually helps when the deadline passes.
	Next string
}

// Objects holds, per selection and in their order, the objects as last seen:
// Pods and Nodes as those of corev1, everything else as *unstructured.Unstructured. They are
// shared with the watch: read them only.
type Objects [][]metav1.Object

// Condition looks at the objects and says whether the wait is over, and in a
// few words what it found (for heartbeats and the deadline's finding). An
// error ends the wait.
type Condition func(Objects) (done bool, found string, err error)

// looksApart is the least time between two looks: a hundred hosts that change
// at once send thousands of events, and each look reads every object.
const looksApart = 100 * time.Millisecond

// Await lists and watches the selections until cond is done, its error, or the
// deadline. cond runs after the first lists and after each change, changes
// within 100 ms of a look together. An API
// server that is away is asked again, with a growing pause, until the
// deadline; only an answer that a person must mend (forbidden, unknown
// resource) ends the wait early. A deadline is a finding of class stop.
func (c *Client) Await(ctx context.Context, w Wait, cond Condition, selections ...Selection) error {
	if len(selections) == 0 {
		return errors.New("await: no selection given")
	}
	if w.Limit > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, w.Limit)
		defer cancel()
	}
	watchCtx, stop := context.WithCancel(ctx)
	mirror := newMirror(c, selections)
	finished := mirror.start(watchCtx)
	defer func() { stop(); <-finished }()

	beat := StartBeat(w.Every, w.Heartbeat)
	defer beat.Stop()
	var rested <-chan time.Time // nil before the first look
	for {
		if rested != nil {
			select {
			case <-ctx.Done():
				return w.deadline(ctx, beat.Last(), mirror.trouble())
			case <-rested:
			}
		}
		select {
		case <-ctx.Done():
			return w.deadline(ctx, beat.Last(), mirror.trouble())
		case err := <-mirror.fatal:
			return Wrap(err, w.What)
		case <-mirror.changed:
		}
		objects, complete := mirror.objects()
		if !complete {
			continue
		}
		done, found, err := cond(objects)
		beat.Set(found)
		if err != nil || done {
			return err
		}
		rested = time.After(looksApart)
	}
}

// deadline is the error of a context that ended before the condition.
func (w Wait) deadline(ctx context.Context, found string, trouble error) error {
	if !errors.Is(ctx.Err(), context.DeadlineExceeded) {
		return context.Cause(ctx)
	}
	if found == "" {
		found = "nothing seen yet"
	}
	if trouble != nil {
		found += fmt.Sprintf(" (the API server does not answer now: %v)", trouble)
	}
	expected := "before its deadline"
	if w.Limit > 0 {
		expected = "within " + w.Limit.String()
	}
	return finding.Finding{Object: w.What, Expected: expected, Found: found, Next: w.Next}.Error(finding.Stop)
}
