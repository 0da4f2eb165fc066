package nats

import (
	"context"
	"net"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/refit-run/refit/activities/evidence"
	"github.com/refit-run/refit/activities/finding"
	"github.com/refit-run/refit/activities/kube"
)

// looker looks at all servers again and again within one activity; a server's
// tunnel is kept open as long as its pod lives.
type looker struct {
	a        *Activities
	client   *kube.Client
	place    Place
	monitors map[string]*monitor // by pod UID
	record   *evidence.Record
}

// looker connects to the cluster, and beats from here on until it is closed.
func (a *Activities) looker(ctx context.Context, p Place) (*looker, error) {
	if p.Namespace == "" {
		return nil, finding.Finding{Object: "request", Expected: "the namespace of the NATS servers", Found: "none"}.Error(finding.Stop)
	}
	p.Servers = p.Servers.WithDefaults()
	l := &looker{a: a, place: p, monitors: map[string]*monitor{}, record: evidence.Begin(ctx, a.Artifacts)}
	var err error
	if l.client, err = a.Clusters.Connect(ctx, p.Target); err != nil {
		l.close()
		return nil, err
	}
	return l, nil
}

func (l *looker) close() {
	l.record.End()
	for _, m := range l.monitors {
		m.close()
	}
}

// look asks every server at the same time. A server that does not answer is
// part of the answer, and so is an API server that does not list the pods just
// now: what was seen before counts still. An error needs a person.
func (l *looker) look(ctx context.Context) ([]Answer, error) {
	ctx, cancel := context.WithTimeout(ctx, LookLimit)
	defer cancel()
	members, err := l.client.Members(ctx, l.place.Namespace, l.place.Servers.Selector, l.place.Servers.Container)
	if _, class, ok := finding.Of(err); ok && class == finding.Retry {
		return []Answer{{Trouble: err.Error()}}, nil
	}
	if err != nil {
		return nil, err
	}
	answers := make([]Answer, len(members.Pods))
	var asked sync.WaitGroup
	for i := range members.Pods {
		pod := &members.Pods[i]
		m := l.monitor(pod)
		asked.Go(func() {
			answers[i] = m.ask(ctx, pageSize)
			answers[i].Pod, answers[i].Unready = pod.Name, kube.Unready(pod)
		})
	}
	asked.Wait()
	for _, name := range members.Missing {
		answers = append(answers, Answer{Pod: name, Trouble: "there is no such pod"})
	}
	return answers, nil
}

func (l *looker) monitor(pod *corev1.Pod) *monitor {
	uid := string(pod.UID)
	if m, ok := l.monitors[uid]; ok {
		return m
	}
	name := pod.Name
	m := newMonitor(func(ctx context.Context) (net.Conn, error) {
		return l.a.Dial.Pod(ctx, l.client, l.place.Namespace, name, l.place.Servers.MonitorPort)
	})
	l.monitors[uid] = m
	return m
}

// verdict is what a look came to: whether the wait is over, and in a few words
// what was found. Value is kept with the answers.
type verdict struct {
	done  bool
	found string
	value any
}

// until looks until judge says that the wait is over, or the limit has passed.
func (l *looker) until(ctx context.Context, limit, pace time.Duration, judge func(ctx context.Context, answers []Answer) (verdict, error)) error {
	if l.a.Pace > 0 {
		pace = l.a.Pace
	}
	return l.record.Until(ctx, limit, pace, func(ctx context.Context) (evidence.Look, error) {
		answers, err := l.look(ctx)
		if err != nil {
			return evidence.Look{}, err
		}
		v, err := judge(ctx, answers)
		return evidence.Look{Done: v.done, Found: v.found, Entries: len(answers),
			Seen: seen{At: time.Now().UTC(), Verdict: v.value, Answers: answers}}, err
	})
}

// seen is what is kept of one look.
type seen struct {
	At      time.Time `json:"at"`
	Verdict any       `json:"verdict"`
	Answers []Answer  `json:"answers"`
}
