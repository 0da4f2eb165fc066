package tensorfusion

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"go.temporal.io/sdk/activity"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/refit-run/refit/activities/finding"
	"github.com/refit-run/refit/activities/kube"
)

// ReplaceHypervisors replaces the hypervisor pods of the given hosts, all at
// once, and proves each (T14, facts section 6). All hosts share four watches;
// the only request per host is its delete, which carries the pod's UID.
//
// Attempts may follow each other at any point: what is done is seen from the
// pods, and the heartbeat keeps what cannot be seen (inventory before, when
// the host's time began).
func (a *Activities) ReplaceHypervisors(ctx context.Context, req ReplaceRequest) (ReplaceResult, error) {
	c, err := a.connect(ctx, req.Scope)
	if err != nil {
		return ReplaceResult{}, err
	}
	var kept map[string]hostMemory
	if activity.IsActivity(ctx) && activity.HasHeartbeatDetails(ctx) {
		// Details of another build are no reason to fail: the pods tell the rest.
		_ = activity.GetHeartbeatDetails(ctx, &kept)
	}
	return replace(ctx, c, req, kept)
}

// hostMemory is what a later attempt cannot see in the cluster.
type hostMemory struct {
	Started time.Time `json:"started"`
	// Deleted: this run asked for the deletion of a pod of the host.
	Deleted bool        `json:"deleted,omitempty"`
	Before  *gpusBefore `json:"before,omitempty"`
	// Outcome is empty until the host is finished.
	Outcome string `json:"outcome,omitempty"`
}

// replacement is one attempt over all hosts.
type replacement struct {
	client *kube.Client
	req    ReplaceRequest
	nodes  map[string]*corev1.Node
	reader hostReader

	mu     sync.Mutex // memory is read by the heartbeat
	memory map[string]hostMemory
	// sent are the pods whose delete the API server has taken: the watch may
	// show them unchanged for a while, and asking again tells nothing.
	sent  map[types.UID]bool
	views map[string]hostView
	found map[string]string // what is missing from each host's proof
	done  map[string]HostResult
	// unlabelled: GPUs are not found by the label of their node.
	unlabelled bool
	// record has the server keep the memory before it returns.
	record func(context.Context) error
}

// parallelRequests bounds the requests that are in flight at once.
const parallelRequests = 16

func replace(ctx context.Context, c *kube.Client, req ReplaceRequest, kept map[string]hostMemory) (ReplaceResult, error) {
	return newReplacement(c, req, kept).run(ctx)
}

func newReplacement(c *kube.Client, req ReplaceRequest, kept map[string]hostMemory) *replacement {
	r := &replacement{
		client: c, req: req,
		memory: map[string]hostMemory{},
		sent:   map[types.UID]bool{},
		found:  map[string]string{},
		done:   map[string]HostResult{},
	}
	for _, h := range req.Hosts {
		if m, ok := kept[h.Name]; ok {
			m.Outcome = "" // proven anew: the world may have moved since
			r.memory[h.Name] = m
		}
	}
	r.record = r.report
	return r
}

// report sends the memory as a heartbeat and waits until the server has it,
// where a heartbeat of the SDK may stay here for as long as two seconds.
func (r *replacement) report(ctx context.Context) error {
	if !activity.IsActivity(ctx) {
		return nil
	}
	memory := r.remember()
	activity.RecordHeartbeat(ctx, memory) // what the SDK still has to send is not to be older
	if err := activity.GetClient(ctx).RecordActivityHeartbeat(ctx, activity.GetInfo(ctx).TaskToken, memory); err != nil {
		return fmt.Errorf("recording which hypervisors of GPUPool/%s are about to be deleted: %w", r.req.Pool, err)
	}
	return nil
}

func (r *replacement) run(ctx context.Context) (ReplaceResult, error) {
	defer pulse(ctx, func() any { return r.remember() })()
	for len(r.done) < len(r.req.Hosts) {
		err := r.round(ctx)
		if errors.Is(err, errUnlabelled) {
			r.unlabelled = true
			continue
		}
		if err = r.expire(ctx, err); err != nil {
			return ReplaceResult{}, inRow(err, "T14")
		}
	}
	var out ReplaceResult
	for _, h := range r.req.Hosts {
		out.Hosts = append(out.Hosts, r.done[h.Name])
	}
	return out, nil
}

// firstLook is the least time for the first look of a round: a worker that was
// away for long must see the pods before it calls a host late.
const firstLook = 30 * time.Second

var (
	// errLate ends a round because a host ran out of time.
	errLate = errors.New("a host ran out of time")
	// errUnlabelled ends a round because a host shows no GPU by its label:
	// either it has none, or only their status names it.
	errUnlabelled = errors.New("a host without labelled GPUs")
)

// round watches until every host is finished or the first one is late. The
// hosts' time is only looked at once they have been.
func (r *replacement) round(ctx context.Context) error {
	watching, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var deadline *time.Timer
	defer func() {
		if deadline != nil {
			deadline.Stop()
		}
	}()
	return r.client.Await(watching, kube.Wait{
		What:  fmt.Sprintf("hypervisors of %d hosts of GPUPool/%s", len(r.req.Hosts), r.req.Pool),
		Limit: r.req.Limit + firstLook,
	}, func(objects kube.Objects) (bool, string, error) {
		err := r.step(ctx, objects)
		if deadline == nil {
			deadline = time.AfterFunc(r.nextDeadline(), func() { cancel(errLate) })
		}
		return len(r.done) == len(r.req.Hosts), fmt.Sprintf("%d of %d hosts proven", len(r.done), len(r.req.Hosts)), err
	}, r.selections()...)
}

// selections are the GPUNodes, hypervisor pods, Nodes and GPUs of the hosts that are
// replaced. Only GPUs have a label that tells their host, and a cluster has
// eight of them a host: the others are kept apart here.
func (r *replacement) selections() []kube.Selection {
	names := make([]string, len(r.req.Hosts))
	ours := make(map[string]bool, len(r.req.Hosts))
	for i, h := range r.req.Hosts {
		names[i], ours[h.Name] = h.Name, true
	}
	out := []kube.Selection{
		{Resource: gpuNodesGVR, Labels: poolLabel(r.req.Pool) + "=true", Only: func(o metav1.Object) bool { return ours[o.GetName()] }},
		{Resource: podsGVR, Namespace: r.req.Release.Namespace, Labels: labelComponent + "=" + componentHypervisor,
			Only: func(o metav1.Object) bool { return ours[o.(*corev1.Pod).Spec.NodeName] }},
		{Resource: nodesGVR, Only: func(o metav1.Object) bool { return ours[o.GetName()] }},
	}
	for _, selector := range gpuSelectors(names, r.unlabelled) {
		out = append(out, kube.Selection{Resource: gpusGVR, Labels: selector})
	}
	return out
}

// nextDeadline is how long until the first unfinished host runs out of time.
func (r *replacement) nextDeadline() time.Duration {
	next := r.req.Limit
	for _, h := range r.req.Hosts {
		m, started := r.memory[h.Name]
		if _, finished := r.done[h.Name]; finished || !started {
			continue
		}
		next = min(next, time.Until(m.Started.Add(r.req.Limit)))
	}
	return max(next, 0)
}

// remember copies the memory for the heartbeat.
func (r *replacement) remember() map[string]hostMemory {
	r.mu.Lock()
	defer r.mu.Unlock()
	out := make(map[string]hostMemory, len(r.memory))
	for name, m := range r.memory {
		out[name] = m
	}
	return out
}

func (r *replacement) setMemory(name string, change func(*hostMemory)) hostMemory {
	r.mu.Lock()
	defer r.mu.Unlock()
	m := r.memory[name]
	change(&m)
	r.memory[name] = m
	return m
}

// step looks at every unfinished host: proven, to be deleted, or to be waited
// for.
func (r *replacement) step(ctx context.Context, objects kube.Objects) error {
	views, err := r.reader.views(objects[0], objects[1], slices.Concat(objects[3:]...))
	if err != nil {
		return err
	}
	r.nodes = make(map[string]*corev1.Node, len(objects[2]))
	for _, o := range objects[2] {
		r.nodes[o.GetName()] = o.(*corev1.Node)
	}
	r.views = make(map[string]hostView, len(views))
	for _, v := range views {
		r.views[v.name] = v
	}
	var doomed []doomedPod
	for _, h := range r.req.Hosts {
		if _, finished := r.done[h.Name]; finished {
			continue
		}
		v, known := r.views[h.Name]
		if !known {
			r.fail(h, finding.Finding{Object: hostObject(h.Name), Expected: "a GPUNode of GPUPool/" + r.req.Pool, Found: "none",
				Next: "the Node left the cluster or the pool: leave it out, or bring it back and retry"})
			continue
		}
		if len(v.gpus) == 0 && !r.unlabelled {
			return errUnlabelled
		}
		m := r.setMemory(h.Name, func(m *hostMemory) {
			if m.Started.IsZero() {
				m.Started, m.Before = time.Now().UTC(), newGPUsBefore(v.inventory())
			}
		})
		why := v.unproven(r.req.Goal, m.Before)
		r.found[h.Name] = why
		if why == "" {
			r.prove(h, v, m)
			continue
		}
		pods := r.doomed(h, v)
		if len(pods) == 0 {
			continue
		}
		if f := r.blocked(h.Name); f != nil {
			r.fail(h, *f)
			continue
		}
		doomed = append(doomed, pods...)
	}
	return r.delete(ctx, doomed)
}

// prove records a proven host.
func (r *replacement) prove(h HostTarget, v hostView, m hostMemory) {
	pod := v.pod(r.req.Goal)
	res := HostResult{Name: h.Name, OldUID: h.UID, NewUID: string(pod.UID), Outcome: OutcomeAlready}
	if n := r.nodes[h.Name]; n != nil {
		res.BootID = n.Status.NodeInfo.BootID
	}
	if m.Deleted {
		res.Outcome = OutcomeReplaced
		res.Seconds = time.Since(m.Started).Seconds()
	}
	r.finish(res)
}

func (r *replacement) fail(h HostTarget, f finding.Finding) {
	r.finish(HostResult{Name: h.Name, OldUID: h.UID, Outcome: OutcomeFailed, Failure: &f})
}

func (r *replacement) finish(res HostResult) {
	r.setMemory(res.Name, func(m *hostMemory) { m.Outcome = res.Outcome })
	r.done[res.Name] = res
}

// expire fails the hosts whose time is over, with the hint that fits their
// pod. It returns every error of a round that is not such a deadline.
func (r *replacement) expire(ctx context.Context, waited error) error {
	if !errors.Is(waited, errLate) {
		return waited
	}
	var late []HostTarget
	for _, h := range r.req.Hosts {
		m := r.memory[h.Name]
		_, finished := r.done[h.Name]
		if _, seen := r.found[h.Name]; !finished && seen && time.Since(m.Started) >= r.req.Limit {
			late = append(late, h)
		}
	}
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	failures := make([]finding.Finding, len(late))
	var wg sync.WaitGroup
	slots := make(chan struct{}, parallelRequests)
	for i, h := range late {
		slots <- struct{}{}
		wg.Go(func() {
			defer func() { <-slots }()
			failures[i] = r.diagnose(ctx, h.Name)
		})
	}
	wg.Wait()
	for i, h := range late {
		r.fail(h, failures[i])
	}
	return nil
}

// diagnose explains a host that did not come back in time (T25).
func (r *replacement) diagnose(ctx context.Context, name string) finding.Finding {
	f := notProven("T25", name, r.found[name])
	v := r.views[name]
	pod := v.pod(r.req.Goal)
	log := ""
	if pod != nil {
		if trouble := podTrouble(pod); trouble != "" {
			f.Found += "; " + trouble
		}
		if len(pod.Spec.Containers) > 0 && !ready(pod) {
			// Without a log the pod's states still tell something.
			log, _ = r.client.PodLogTail(ctx, pod.Namespace, pod.Name, pod.Spec.Containers[0].Name, 50, false)
		}
	}
	f.Found += fmt.Sprintf(" after %s", r.req.Limit)
	f.Next = hintFor(pod, log)
	return f
}
