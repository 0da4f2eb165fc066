package evidence

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"time"

	"go.temporal.io/sdk/activity"

	"github.com/refit-run/refit/activities/artifact"
	"github.com/refit-run/refit/activities/kube"
)

// maxKept bounds what one wait keeps besides its end: a system that swings
// between two states would fill the store.
const maxKept = 100

// Record is what one activity sees of a system: it keeps the looks, and beats
// until it is stopped.
type Record struct {
	Trail Trail
	store *artifact.Store
	beat  *kube.Beat
	tell  func(string)
	// keep has the server keep what is told before it returns.
	keep func(string) error

	former string // what the try before has told last
	mu     sync.Mutex
	kept   string
}

// Begin starts the record, and the heartbeat with it. Until something was
// found the heartbeat tells what the try before has told last: were it told
// nothing, that would be lost for the try after.
func Begin(ctx context.Context, store *artifact.Store) *Record {
	r := &Record{store: store}
	if activity.IsActivity(ctx) {
		if activity.HasHeartbeatDetails(ctx) {
			_ = activity.GetHeartbeatDetails(ctx, &r.former, &r.kept) // of another kind: not ours
		}
		r.tell = func(found string) { activity.RecordHeartbeat(ctx, r.details(found)...) }
		r.keep = func(found string) error {
			return activity.GetClient(ctx).RecordActivityHeartbeat(ctx, activity.GetInfo(ctx).TaskToken, r.details(found)...)
		}
	}
	r.beat = kube.StartBeat(0, r.tell)
	return r
}

// details are what a heartbeat carries: what was found, then what was kept.
func (r *Record) details(found string) []any {
	if found == "" {
		found = r.former
	}
	if kept := r.Kept(); kept != "" {
		return []any{found, kept}
	}
	return []any{found}
}

// Say is what the next heartbeats tell.
func (r *Record) Say(found string) { r.beat.Set(found) }

// Mark says it, and returns once the server has it, where a heartbeat of the
// SDK may stay here for seconds: what the next try must know is kept before it
// is done. On an error it must not be done.
func (r *Record) Mark(found string) error {
	r.Say(found)
	if r.keep == nil {
		return nil
	}
	r.tell(found) // what the SDK still has to send is not to be older
	if err := r.keep(found); err != nil {
		return fmt.Errorf("recording %q: %w", found, err)
	}
	return nil
}

// Keep has every heartbeat carry a text besides what was found, for the try
// after this one, and returns once the server has it.
func (r *Record) Keep(text string) error {
	r.mu.Lock()
	r.kept = text
	r.mu.Unlock()
	return r.Mark(r.beat.Last())
}

// Kept is what this try, or the one before it, was last given to keep.
func (r *Record) Kept() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.kept
}

// End stops the heartbeat.
func (r *Record) End() { r.beat.Stop() }

// Look is what one look came to: whether the wait is over, in a few words what
// was found, and all that was seen, which has so many entries.
type Look struct {
	Done    bool
	Found   string
	Entries int
	Seen    any
}

// Until looks until the wait is over or the limit has passed. Every look
// begins anew. What it saw is kept as an artifact of its own whenever it came
// to something else than the look before, counts aside. While it waits, a look
// that can't be kept is told and no reason to stop; the last one must be kept.
func (r *Record) Until(ctx context.Context, limit, pace time.Duration, look func(ctx context.Context) (Look, error)) error {
	kept, said := 0, ""
	_, err := kube.Poll(ctx, limit, pace, func(ctx context.Context) (bool, error) {
		l, err := look(ctx)
		if err != nil {
			return false, err
		}
		r.Trail.Looks++
		r.Say(l.Found)
		key := gist(l.Found)
		if !l.Done && (kept >= maxKept || kept > 0 && key == said) {
			return false, nil
		}
		ref, err := Store(ctx, r.store, fmt.Sprintf("look-%04d.json", r.Trail.Looks), l.Entries, l.Seen)
		if err != nil && !l.Done {
			r.Say(l.Found + "; evidence not kept: " + err.Error())
			return false, nil
		}
		kept, said = kept+1, key
		if err == nil {
			r.Trail.Last = ref
		}
		return l.Done, err
	})
	return err
}

// gist is what was found without the counts and the ends of connections, which
// change with every look and say nothing new. Names keep their numbers.
func gist(found string) string {
	words := strings.Fields(found)
	for i, w := range words {
		if strings.Trim(w, `0123456789.,;:()"`) == "" && strings.Count(w, ".") < 2 || strings.Contains(w, "->") {
			words[i] = "#"
		}
	}
	return strings.Join(words, " ")
}
