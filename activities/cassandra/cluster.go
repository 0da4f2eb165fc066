package cassandra

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/refit-run/refit/activities/evidence"
	"github.com/refit-run/refit/activities/finding"
	"github.com/refit-run/refit/activities/kube"
	"github.com/refit-run/refit/activities/lease"
)

// cluster is one activity's connection to the members, with what it saw.
type cluster struct {
	a      *Activities
	client *kube.Client
	place  Place
	record *evidence.Record
	// look looks repairs up in the history.
	look func(ctx context.Context, r RepairRequest, keyspaces []string, since time.Time) (trace, error)
}

// open connects to the Kubernetes cluster, and beats from here on until it is
// closed.
func (a *Activities) open(ctx context.Context, p Place) (*cluster, error) {
	if p.Namespace == "" {
		return nil, finding.Finding{Object: "request", Expected: "the namespace of Cassandra", Found: "none", Next: "name it in the plan (namespace)"}.Error(finding.Stop)
	}
	p.Members = p.Members.WithDefaults()
	c := &cluster{a: a, place: p, record: evidence.Begin(ctx, a.Artifacts)}
	c.look = c.lookUp
	var err error
	if c.client, err = a.Clusters.Connect(ctx, p.Target); err != nil {
		c.close()
		return nil, err
	}
	if err := c.fence(ctx); err != nil {
		c.close()
		return nil, err
	}
	return c, nil
}

// fence stops a run that has lost its Lease; it comes before each change too.
func (c *cluster) fence(ctx context.Context) error {
	return lease.Held{Namespace: c.place.Namespace, Release: c.place.Release, Holder: c.place.Holder}.Check(ctx, c.client.Typed)
}

func (c *cluster) close() { c.record.End() }

// set is the StatefulSet.
func (c *cluster) set(ctx context.Context) (*appsv1.StatefulSet, error) {
	name := c.place.Members.StatefulSet
	set, err := c.client.Typed.AppsV1().StatefulSets(c.place.Namespace).Get(ctx, name, metav1.GetOptions{})
	return set, kube.Wrap(err, fmt.Sprintf("StatefulSet/%s/%s", c.place.Namespace, name))
}

// pods are the members' pods in the order of their ordinals, and the names of
// those that the StatefulSet asks for and nobody has.
func (c *cluster) pods(ctx context.Context) ([]corev1.Pod, []string, error) {
	all, err := c.client.Members(ctx, c.place.Namespace, "", c.place.Members.Container)
	if err != nil {
		return nil, nil, err
	}
	ours := func(name string) bool { _, ok := ordinal(c.place.Members.StatefulSet, name); return ok }
	pods := slices.DeleteFunc(all.Pods, func(p corev1.Pod) bool { return !ours(p.Name) })
	slices.SortFunc(pods, func(x, y corev1.Pod) int {
		i, _ := ordinal(c.place.Members.StatefulSet, x.Name)
		j, _ := ordinal(c.place.Members.StatefulSet, y.Name)
		return i - j
	})
	return pods, slices.DeleteFunc(all.Missing, func(name string) bool { return !ours(name) }), nil
}

// ordinal is the number of a StatefulSet's pod.
func ordinal(set, pod string) (int, bool) {
	digits, ok := strings.CutPrefix(pod, set+"-")
	n, err := strconv.Atoi(digits)
	return n, ok && err == nil && n >= 0
}

// nodetool runs nodetool in a member's pod; JMX listens on nothing but its
// loopback. A command that fails is told by Exit.Code.
func (c *cluster) nodetool(ctx context.Context, pod string, limit time.Duration, args ...string) (kube.Exit, error) {
	cmd := kube.Command{
		Namespace: c.place.Namespace, Pod: pod, Container: c.place.Members.Container,
		Argv: append([]string{"nodetool"}, args...), Limit: limit, Output: 8 << 20,
	}
	exec := c.a.Exec
	if exec == nil {
		exec = func(ctx context.Context, client *kube.Client, cmd kube.Command) (kube.Exit, error) {
			return client.Exec(ctx, cmd)
		}
	}
	exit, err := exec(ctx, c.client, cmd)
	if err == nil && exit.Cut {
		err = finding.Finding{Object: cmd.String(), Expected: "at most 8 MiB of output", Found: "more",
			Next: "run it by hand, and find out why it says so much"}.Error(finding.Stop)
	}
	return exit, err
}

// failed is the finding of a nodetool that ran and failed.
func failed(pod string, exit kube.Exit, args ...string) finding.Finding {
	text := exit.Stderr
	if strings.TrimSpace(text) == "" {
		text = exit.Stdout
	}
	return finding.Finding{
		Object: fmt.Sprintf("nodetool %s on %s", strings.Join(args, " "), pod), Expected: "exit code 0",
		Found: fmt.Sprintf("%d: %s", exit.Code, complaint(text)), Next: "look at the log of " + pod + ", then retry",
	}
}

// complaint is the line of nodetool's output that says what is wrong: the
// stack trace that follows it says nothing to a person.
func complaint(text string) string {
	const most = 300
	for _, line := range strings.Split(text, "\n") {
		line = strings.TrimSpace(line)
		low := strings.ToLower(line)
		if strings.HasPrefix(low, "error:") || strings.HasPrefix(low, "nodetool:") || strings.Contains(low, "exception") || strings.Contains(low, "failed") {
			return line[:min(len(line), most)]
		}
	}
	first, _, _ := strings.Cut(strings.TrimSpace(text), "\n")
	if first == "" {
		return "no word of explanation"
	}
	return first[:min(len(first), most)]
}

// until looks at the members until the wait is over.
func (c *cluster) until(ctx context.Context, limit time.Duration, look func(ctx context.Context) (evidence.Look, error)) error {
	return c.record.Until(ctx, limit, c.a.pace(), look)
}

// patient repeats what a person need not mend (class wait) until the limit.
func (c *cluster) patient(ctx context.Context, limit time.Duration, act func(ctx context.Context) error) error {
	var last error
	done, err := kube.Poll(ctx, limit, c.a.pace(), func(ctx context.Context) (bool, error) {
		last = act(ctx)
		if last == nil {
			return true, nil
		}
		c.record.Say(last.Error())
		if _, class, ok := finding.Of(last); ok && class == finding.Wait {
			return false, nil
		}
		return false, last
	})
	if err != nil || done {
		return err
	}
	if last == nil {
		last = errors.New("nothing was tried")
	}
	return last
}
