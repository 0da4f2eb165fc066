package bench

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	commonpb "go.temporal.io/api/common/v1"
	enums "go.temporal.io/api/enums/v1"
	historypb "go.temporal.io/api/history/v1"
	"google.golang.org/protobuf/types/known/timestamppb"
)

// parts are where a rollout's time went. Batches of at most one shard come one
// after another, so the parts add up to the whole.
type parts struct {
	// look is what the rollout's own activities take between batches: is auto
	// update off, what does the pool look like.
	look time.Duration
	// baseline, replace and validate are each phase of the shards, from its
	// first activity scheduled to its last completed.
	baseline, replace, validate time.Duration
	whole                       time.Duration
}

// rest is everything else: workflow tasks, and the children's start and end.
func (p parts) rest() time.Duration { return p.whole - p.look - p.baseline - p.replace - p.validate }

// rollout adds the Rollout's own history.
func (p *parts) rollout(events []*historypb.HistoryEvent) {
	for _, length := range phases(events) {
		p.look += length
	}
	p.whole += events[len(events)-1].EventTime.AsTime().Sub(events[0].EventTime.AsTime())
}

// shard adds a child's history.
func (p *parts) shard(events []*historypb.HistoryEvent) {
	for activity, length := range phases(events) {
		switch {
		case strings.HasSuffix(activity, ".Baseline"):
			p.baseline += length
		case strings.HasSuffix(activity, ".Validate"):
			p.validate += length
		default:
			p.replace += length
		}
	}
}

// phases are the stretches in which a history has activities of one type open.
func phases(events []*historypb.HistoryEvent) map[string]time.Duration {
	kind, open, since := map[int64]string{}, map[string]int{}, map[string]time.Time{}
	out := map[string]time.Duration{}
	for _, e := range events {
		switch e.EventType {
		case enums.EVENT_TYPE_ACTIVITY_TASK_SCHEDULED:
			k := e.GetActivityTaskScheduledEventAttributes().GetActivityType().GetName()
			if kind[e.EventId] = k; open[k] == 0 {
				since[k] = e.EventTime.AsTime()
			}
			open[k]++
		case enums.EVENT_TYPE_ACTIVITY_TASK_COMPLETED:
			k := kind[e.GetActivityTaskCompletedEventAttributes().GetScheduledEventId()]
			if open[k]--; open[k] == 0 {
				out[k] += e.EventTime.AsTime().Sub(since[k])
			}
		}
	}
	return out
}

func TestAPhaseLastsFromItsFirstActivityToItsLast(t *testing.T) {
	at := func(s int) *timestamppb.Timestamp { return timestamppb.New(time.Unix(int64(s), 0)) }
	id := int64(0)
	scheduled := func(s int, name string) *historypb.HistoryEvent {
		id++
		return &historypb.HistoryEvent{EventId: id, EventTime: at(s), EventType: enums.EVENT_TYPE_ACTIVITY_TASK_SCHEDULED,
			Attributes: &historypb.HistoryEvent_ActivityTaskScheduledEventAttributes{
				ActivityTaskScheduledEventAttributes: &historypb.ActivityTaskScheduledEventAttributes{ActivityType: &commonpb.ActivityType{Name: name}},
			}}
	}
	completed := func(s int, of int64) *historypb.HistoryEvent {
		id++
		return &historypb.HistoryEvent{EventId: id, EventTime: at(s), EventType: enums.EVENT_TYPE_ACTIVITY_TASK_COMPLETED,
			Attributes: &historypb.HistoryEvent_ActivityTaskCompletedEventAttributes{
				ActivityTaskCompletedEventAttributes: &historypb.ActivityTaskCompletedEventAttributes{ScheduledEventId: of},
			}}
	}
	var p parts
	p.rollout([]*historypb.HistoryEvent{scheduled(0, "Look"), completed(3, 1), scheduled(90, "Look"), completed(91, 3), completed(100, 0)})
	id = 0
	p.shard([]*historypb.HistoryEvent{
		scheduled(10, "gpu.Baseline"), scheduled(10, "gpu.Baseline"), completed(11, 2), completed(14, 1),
		scheduled(14, "Replace"), completed(34, 5), scheduled(35, "gpu.Validate"), completed(42, 7),
	})
	assert.Equal(t, parts{look: 4 * time.Second, baseline: 4 * time.Second, replace: 20 * time.Second, validate: 7 * time.Second, whole: 100 * time.Second}, p)
	assert.Equal(t, 65*time.Second, p.rest())
}
