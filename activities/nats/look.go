package nats

import (
	"context"
	"fmt"
	"io"
	"net"
	"sync"
	"time"

	"go.temporal.io/sdk/activity"
	corev1 "k8s.io/api/core/v1"

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
	beat     *kube.Beat
	evidence Evidence
}

// looker connects to the cluster, and beats from here on until it is closed.
func (a *Activities) looker(ctx context.Context, p Place) (*looker, error) {
	if p.Namespace == "" {
		return nil, finding.Finding{Object: "request", Expected: "the namespace of the NATS servers", Found: "none"}.Error(finding.Stop)
	}
	p.Servers = p.Servers.WithDefaults()
	l := &looker{a: a, place: p, monitors: map[string]*monitor{}}
	var say func(string)
	if activity.IsActivity(ctx) {
		say = func(found string) { activity.RecordHeartbeat(ctx, found) }
	}
	l.beat = kube.StartBeat(0, say)
	var err error
	if l.client, err = a.Clusters.Connect(ctx, p.Target); err != nil {
		l.close()
		return nil, err
	}
	return l, nil
}

func (l *looker) close() {
	l.beat.Stop()
	for _, m := range l.monitors {
		m.close()
	}
}

// look asks every server at the same time. A server that does not answer is
// part of the answer; an error means that the pods could not be listed.
func (l *looker) look(ctx context.Context) ([]Answer, error) {
	ctx, cancel := context.WithTimeout(ctx, LookLimit)
	defer cancel()
	members, err := l.client.Members(ctx, l.place.Namespace, l.place.Servers.Selector, l.place.Servers.Container)
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
		return l.a.dial(ctx, l.client, l.place.Namespace, name, l.place.Servers.MonitorPort)
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
// Every look begins anew. What it saw is kept as an artifact of its own
// whenever it came to something else than the look before.
func (l *looker) until(ctx context.Context, limit, pace time.Duration, judge func(ctx context.Context, answers []Answer) (verdict, error)) error {
	if l.a.Pace > 0 {
		pace = l.a.Pace
	}
	first, said := true, ""
	_, err := kube.Poll(ctx, limit, pace, func(ctx context.Context) (bool, error) {
		answers, err := l.look(ctx)
		if err != nil {
			return false, err
		}
		l.evidence.Looks++
		v, err := judge(ctx, answers)
		if err != nil {
			return false, err
		}
		l.beat.Set(v.found)
		if first || v.done || v.found != said {
			first, said = false, v.found
			name := fmt.Sprintf("look-%04d.json", l.evidence.Looks)
			l.evidence.Last, err = l.a.store(ctx, name, len(answers), seen{At: time.Now().UTC(), Verdict: v.value, Answers: answers})
		}
		return v.done, err
	})
	return err
}

// seen is what is kept of one look.
type seen struct {
	At      time.Time `json:"at"`
	Verdict any       `json:"verdict"`
	Answers []Answer  `json:"answers"`
}

// writing is a whole text as a writer of an artifact.
func writing(data []byte) func(io.Writer) error {
	return func(w io.Writer) error {
		_, err := w.Write(data)
		return err
	}
}
