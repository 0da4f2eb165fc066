package openbao

import (
	"slices"
	"strings"
)

// Act is what is to be done next.
type Act string

const (
	// Replace deletes a stale standby.
	Replace Act = "replace"
	// StepDown makes the stale active member a standby; nothing else does.
	StepDown Act = "stepDown"
	// Done: no member is stale.
	Done Act = "done"
)

// Step is the next act and the pod that it is about.
type Step struct {
	Act Act    `json:"act"`
	Pod string `json:"pod,omitempty"`
	UID string `json:"uid,omitempty"`
}

func (s Step) String() string {
	switch s.Act {
	case Replace:
		return "replacement of " + s.Pod
	case StepDown:
		return "step-down of " + s.Pod
	}
	return "nothing"
}

// Next decides the next step from what is seen now, so that it makes no
// difference what was planned before leadership moved: stale standbys first,
// one after the other by name, then the step-down of a stale active member,
// which makes it the last stale standby (N162-N167). A member of the present
// template that leads is never asked to step down: leadership never goes from
// a newer to an older member by our doing. The view must be free of refusals
// and of anything to wait for.
func Next(v View) Step {
	if steps := Steps(v); len(steps) > 0 {
		return steps[0]
	}
	return Step{Act: Done}
}

// Stale are the members to be replaced, by name.
func (v View) Stale() []Member {
	var out []Member
	for _, m := range v.Members {
		if v.stale(m) {
			out = append(out, m)
		}
	}
	slices.SortFunc(out, func(a, b Member) int { return strings.Compare(a.Pod, b.Pod) })
	return out
}

// Steps is the whole way as it looks now, for a person: leadership may move
// meanwhile, and only Next decides.
func Steps(v View) []Step {
	var out []Step
	active, _ := v.Active()
	stale := v.Stale()
	for _, m := range stale {
		if m.Pod != active.Pod {
			out = append(out, Step{Act: Replace, Pod: m.Pod, UID: m.UID})
		}
	}
	if len(out) < len(stale) {
		out = append(out, Step{Act: StepDown, Pod: active.Pod, UID: active.UID}, Step{Act: Replace, Pod: active.Pod, UID: active.UID})
	}
	return out
}
