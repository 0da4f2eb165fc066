package e2e

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/refit-run/refit/workflows/protocol"
)

// turn is a time in which hosts of a pool may lose their hypervisors, each
// once: a batch, or what a test did to a host itself.
type turn struct {
	name     string
	hosts    []string
	from, to time.Time
}

func (t turn) String() string {
	return fmt.Sprintf("%s of %s from %s to %s", t.name, strings.Join(t.hosts, ", "), clock(t.from), clock(t.to))
}

// turns are the batches that were shown before a run changed anything, each in
// the time of its stage. A batch whose stage never began has no turn.
func turns(r protocol.Receipt) []turn {
	stages := map[string]protocol.Stage{}
	for _, s := range r.Stages {
		stages[s.Name] = s
	}
	var out []turn
	for _, b := range r.Plan.Batches {
		if s := stages[b.Stage]; s.Started != nil && s.Ended != nil {
			out = append(out, turn{b.Stage, b.Hosts, *s.Started, *s.Ended})
		}
	}
	return out
}

// violations says where more was taken away than the turns allow: hypervisors
// of hosts that had no turn then, a host twice in one turn, or more hosts of a
// pool at once than its largest turn has.
func (o *observer) violations(allowed []turn) []string {
	o.mu.Lock()
	defer o.mu.Unlock()
	var out []string
	type lost struct {
		turn int
		node string
	}
	used := map[lost]bool{}
	for _, d := range o.deleted {
		free := -1
		for i, t := range allowed {
			if slices.Contains(t.hosts, d.node) && !used[lost{i, d.node}] && !d.at.Before(t.from) && !d.at.After(t.to) {
				free = i
			}
		}
		if free < 0 {
			out = append(out, fmt.Sprintf("%s: the hypervisor of %s was deleted outside every turn of this host; turns: %v", clock(d.at), d.node, allowed))
		}
		used[lost{free, d.node}] = true
	}
	largest := map[string]int{}
	for _, t := range allowed {
		for _, node := range t.hosts {
			largest[o.pool[node]] = max(largest[o.pool[node]], len(t.hosts))
		}
	}
	for pool, n := range o.away {
		if n > largest[pool] {
			out = append(out, fmt.Sprintf("pool %s had %d nodes without a Ready hypervisor at once, its largest turn has %d", pool, n, largest[pool]))
		}
	}
	return out
}

// loss is a hypervisor that goes and comes back, in seconds after noon.
type loss struct {
	node           string
	deleted, ready int
}

// TestTheObserverSeesWhatGoesOutsideABatch replaces hypervisors within the
// times that a receipt tells, and outside of them.
func TestTheObserverSeesWhatGoesOutsideABatch(t *testing.T) {
	t.Parallel()
	stage := func(name string, from, to int) protocol.Stage {
		began, ended := afterNoon(from), afterNoon(to)
		return protocol.Stage{Name: name, Started: &began, Ended: &ended}
	}
	stages := []protocol.Stage{stage("canary", 0, 10), stage("batch-1", 10, 20), stage("batch-2", 20, 30), {Name: "batch-3"}}
	single := []protocol.PlannedBatch{{Stage: "canary", Hosts: []string{"a"}}, {Stage: "batch-1", Hosts: []string{"b"}}}
	all := append(slices.Clone(single), protocol.PlannedBatch{Stage: "batch-2", Hosts: []string{"c", "d"}},
		protocol.PlannedBatch{Stage: "batch-3", Hosts: []string{"e"}})
	for _, c := range []struct {
		name    string
		batches []protocol.PlannedBatch
		lost    []loss
		want    []string // of each violation
	}{
		{"each in its turn", all, []loss{{"a", 1, 5}, {"b", 11, 15}, {"c", 21, 25}, {"d", 22, 26}}, nil},
		{"in another host's turn", all, []loss{{"b", 2, 5}}, []string{"12:00:02.000: the hypervisor of b was deleted outside"}},
		{"before its turn", all, []loss{{"a", -1, 5}}, []string{"the hypervisor of a was deleted outside"}},
		{"after its turn", all, []loss{{"a", 11, 15}}, []string{"the hypervisor of a was deleted outside"}},
		{"twice in its turn", all, []loss{{"a", 1, 3}, {"a", 4, 6}}, []string{"12:00:04.000: the hypervisor of a was deleted outside"}},
		{"a turn that never came", all, []loss{{"e", 25, 26}}, []string{"the hypervisor of e was deleted outside"}},
		{"the next goes before the last is back", single, []loss{{"a", 9, 14}, {"b", 11, 15}}, []string{"2 nodes without a Ready hypervisor at once, its largest turn has 1"}},
		{"both at once", single, []loss{{"a", 1, 5}, {"b", 1, 5}}, []string{"the hypervisor of b was deleted outside", "2 nodes without"}},
		{"no host was to be replaced", nil, []loss{{"a", 1, 5}}, []string{"the hypervisor of a was deleted outside", "1 nodes without"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			o := seeing(c.lost)
			found := o.violations(turns(protocol.Receipt{Stages: stages, Plan: &protocol.Plan{Batches: c.batches}}))
			require.Len(t, found, len(c.want), "%q", found)
			for i, want := range c.want {
				assert.Contains(t, found[i], want)
			}
			assert.Equal(t, len(c.lost), o.deletions())
		})
	}
}

func afterNoon(seconds int) time.Time {
	return time.Date(2026, 1, 1, 12, 0, seconds, 0, time.UTC)
}

// seeing is an observer of one pool, of which all nodes have a Ready
// hypervisor at first, that saw these losses.
func seeing(lost []loss) *observer {
	type event struct {
		at   int
		pod  *corev1.Pod
		gone bool
	}
	var events []event
	pods := map[string]int{} // node -> its pods so far
	pod := func(node string, ready, deleting bool) *corev1.Pod {
		p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{
			Name: node, UID: types.UID(fmt.Sprint(node, pods[node])), Labels: map[string]string{"tensor-fusion.ai/pool-shared": "true"},
		}}
		p.Spec.NodeName = node
		if ready {
			p.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}
		}
		if deleting {
			p.DeletionTimestamp = &metav1.Time{}
		}
		return p
	}
	for _, node := range []string{"a", "b", "c", "d", "e"} {
		events = append(events, event{at: -10, pod: pod(node, true, false)})
	}
	for _, l := range lost {
		events = append(events, event{at: l.deleted, pod: pod(l.node, true, true)}, event{at: l.deleted, pod: pod(l.node, false, true), gone: true})
		pods[l.node]++
		events = append(events, event{at: l.deleted, pod: pod(l.node, false, false)}, event{at: l.ready, pod: pod(l.node, true, false)})
	}
	slices.SortStableFunc(events, func(a, b event) int { return a.at - b.at })
	o := newObserver()
	for _, e := range events {
		o.seen(afterNoon(e.at), e.pod, e.gone)
	}
	return o
}
