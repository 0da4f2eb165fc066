package cassandra

import (
	"context"
	"fmt"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/refit-run/refit/activities/evidence"
	"github.com/refit-run/refit/activities/finding"
	"github.com/refit-run/refit/activities/kube"
)

// RingRequest asks whether all members serve.
type RingRequest struct {
	Place
	// Want is how many members there must be; 0 takes what the StatefulSet asks
	// for.
	Want int `json:"want,omitempty"`
	// Row is the catalogue row of this look.
	Row   string        `json:"row,omitempty"`
	Limit time.Duration `json:"limit"`
}

// RingResult is the verdict of the last look.
type RingResult struct {
	Ring
	Evidence evidence.Trail `json:"evidence"`
}

// Ring is the activity cassandra.Ring (N84, N137, N183): it looks until every
// member sees every member up and normal, with one version of the schema, or
// the limit has passed. It only reads and needs no login.
func (a *Activities) Ring(ctx context.Context, r RingRequest) (out RingResult, err error) {
	c, err := a.open(ctx, r.Place)
	if err != nil {
		return out, err
	}
	defer c.close()
	err = c.until(ctx, r.Limit, func(ctx context.Context) (evidence.Look, error) {
		answers, want, err := c.ask(ctx)
		if err != nil {
			return evidence.Look{}, err
		}
		if r.Want > 0 {
			want = r.Want
		}
		out.Ring = JudgeRing(answers, want, r.Row)
		found := evidence.InWords(out.Findings)
		out.Findings = evidence.Shown(out.Findings)
		return evidence.Look{Done: out.OK, Found: found, Entries: len(answers), Seen: seenRing{time.Now().UTC(), out.Ring, answers}}, nil
	})
	out.Evidence = c.record.Trail
	return out, err
}

// seenRing is what is kept of one look.
type seenRing struct {
	At      time.Time `json:"at"`
	Verdict Ring      `json:"verdict"`
	Answers []Answer  `json:"answers"`
}

// ask asks all members at the same time; want is how many the StatefulSet asks
// for. A member that does not answer is part of the answer.
func (c *cluster) ask(ctx context.Context) ([]Answer, int, error) {
	pods, missing, err := c.pods(ctx)
	if err != nil {
		return nil, 0, err
	}
	answers := make([]Answer, len(pods))
	var asked sync.WaitGroup
	for i := range pods {
		asked.Go(func() { answers[i] = c.askMember(ctx, &pods[i]) })
	}
	asked.Wait()
	for _, name := range missing {
		answers = append(answers, Answer{Pod: name, Trouble: "there is no such pod"})
	}
	set, err := c.set(ctx)
	if err != nil {
		return nil, 0, err
	}
	return answers, replicas(set.Spec.Replicas), nil
}

func replicas(n *int32) int {
	if n == nil {
		return 1
	}
	return int(*n)
}

func (c *cluster) askMember(ctx context.Context, pod *corev1.Pod) Answer {
	a := Answer{Pod: pod.Name, Unready: kube.Unready(pod)}
	for _, ip := range pod.Status.PodIPs {
		a.Addresses = append(a.Addresses, ip.IP)
	}
	if why := Pending(pod); why != "" {
		a.Trouble = why
		return a
	}
	tell := func(err error) Answer { a.Trouble = err.Error(); return a }
	status, err := c.nodetool(ctx, pod.Name, toolLimit, "status")
	if err == nil && status.Code != 0 {
		err = fmt.Errorf("%s", failed(pod.Name, status, "status"))
	}
	if err != nil {
		return tell(err)
	}
	if a.Ring, err = parseStatus(status.Stdout); err != nil {
		return tell(err)
	}
	about, err := c.nodetool(ctx, pod.Name, toolLimit, "describecluster")
	if err == nil && about.Code != 0 {
		err = fmt.Errorf("%s", failed(pod.Name, about, "describecluster"))
	}
	if err != nil {
		return tell(err)
	}
	if a.Description, err = parseDescription(about.Stdout); err != nil {
		return tell(err)
	}
	return a
}

// first is a member's pod that is Ready, the lowest ordinal of them.
func (c *cluster) first(ctx context.Context) (corev1.Pod, error) {
	pods, _, err := c.pods(ctx)
	if err != nil {
		return corev1.Pod{}, err
	}
	for _, p := range pods {
		if kube.Unready(&p) == "" {
			return p, nil
		}
	}
	return corev1.Pod{}, finding.Finding{Row: "N183", Object: "pods of Cassandra in " + c.place.Namespace, Expected: "one that is Ready", Found: fmt.Sprintf("none of %d", len(pods)),
		Next: "look at the pods' events and logs"}.Error(finding.Wait)
}
