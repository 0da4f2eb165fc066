package cassandra

import (
	"context"
	"fmt"
	"slices"
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
	var asked time.Time
	err = c.until(ctx, r.Limit, func(ctx context.Context) (evidence.Look, error) {
		pods, missing, err := c.pods(ctx)
		if err != nil {
			return evidence.Look{}, err
		}
		set, err := c.set(ctx)
		if err != nil {
			return evidence.Look{}, err
		}
		want := replicas(set.Spec.Replicas)
		if r.Want > 0 {
			want = r.Want
		}
		unready := slices.ContainsFunc(pods, func(p corev1.Pod) bool { return kube.Unready(&p) != "" })
		ask := len(pods) == want && !unready || time.Since(asked) > askUnready
		answers := c.ask(ctx, pods, ask)
		for _, name := range missing {
			answers = append(answers, Answer{Pod: name, Trouble: "there is no such pod"})
		}
		last := out.Ring
		out.Ring = JudgeRing(answers, want, r.Row)
		if ask {
			asked = time.Now()
		} else {
			out.DataCenter, out.Keyspaces, out.Hosts = last.DataCenter, last.Keyspaces, last.Hosts
		}
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

// askUnready is how often members are asked while not all pods are Ready: each
// question starts a Java program beside a member that has its own start to do,
// and the answer can't be the one that is waited for.
const askUnready = time.Minute

// ask asks all members at the same time, or takes what Kubernetes alone knows of
// them. One that does not answer is part of the answer.
func (c *cluster) ask(ctx context.Context, pods []corev1.Pod, members bool) []Answer {
	answers := make([]Answer, len(pods))
	var asked sync.WaitGroup
	for i := range pods {
		if !members {
			answers[i] = answer(&pods[i])
			answers[i].Unasked = answers[i].Trouble == ""
			continue
		}
		asked.Go(func() { answers[i] = c.askMember(ctx, &pods[i]) })
	}
	asked.Wait()
	return answers
}

// answer is the beginning of a member's: what its pod says.
func answer(pod *corev1.Pod) Answer {
	a := Answer{Pod: pod.Name, Unready: kube.Unready(pod), Trouble: Pending(pod)}
	for _, ip := range pod.Status.PodIPs {
		a.Addresses = append(a.Addresses, ip.IP)
	}
	return a
}

func replicas(n *int32) int {
	if n == nil {
		return 1
	}
	return int(*n)
}

func (c *cluster) askMember(ctx context.Context, pod *corev1.Pod) Answer {
	a := answer(pod)
	if a.Trouble != "" {
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
