// Package pod runs one pod as local processes: it makes its volumes, starts
// and restarts its containers, probes them, ends them and knows its status. It
// writes nothing to the API server about itself: that is the node's.
package pod

import (
	"context"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/record"

	"github.com/refit-run/refit/sandbox/procnode/environ"
	"github.com/refit-run/refit/sandbox/procnode/proc"
	"github.com/refit-run/refit/sandbox/procnode/volume"
)

// Variables in the environment of every process. The marks tell whose it is;
// the others are for programs that are built for this node.
const (
	NodeMark = "REFIT_SANDBOX_NODE"
	podMark  = "REFIT_SANDBOX_POD"
	// containerMark's value is the pod's UID and the container's name.
	containerMark = "REFIT_SANDBOX_CONTAINER"
	// IPVariable holds the pod's address, to listen on.
	IPVariable = "SANDBOX_POD_IP"
	// DNSVariable and HostsVariable hold where names are found.
	DNSVariable   = "SANDBOX_DNS"
	HostsVariable = "SANDBOX_HOSTS"
)

// Host is the node that a pod runs on.
type Host struct {
	Name string
	// IP is the node's own address, Mark the value of NodeMark.
	IP, Mark string
	// Hosts is the hosts file, DNS the address of the DNS server.
	Hosts, DNS string
	Client     kubernetes.Interface
	Images     map[string]environ.Image
	// Backoff is the delay before the second restart of a container; it doubles.
	Backoff time.Duration
	Events  record.EventRecorder
	Log     *slog.Logger
}

// Pod is one pod and its processes.
type Pod struct {
	host *Host
	dir  string
	uid  string
	ip   netip.Addr
	log  *slog.Logger

	mu         sync.Mutex
	object     *corev1.Pod
	started    metav1.Time
	volumes    map[string]string
	message    string
	containers []*container
	conditions map[corev1.PodConditionType]corev1.PodCondition
	grace      time.Duration
	// frozen keeps the record as it is: the node ends, the pod does not.
	frozen bool

	changed  chan struct{}
	stopOnce sync.Once
	stopping chan struct{}
	// hurry ends when no grace is left.
	hurry    context.Context
	noGrace  context.CancelFunc
	finished chan struct{}
}

// New makes a pod in the folder; nothing runs yet.
func New(host *Host, object *corev1.Pod, dir string, ip netip.Addr) *Pod {
	p := &Pod{
		host: host, dir: dir, uid: string(object.UID), ip: ip, object: object.DeepCopy(), started: metav1.Now(),
		log:        host.Log.With("pod", object.Namespace+"/"+object.Name, "uid", object.UID),
		conditions: map[corev1.PodConditionType]corev1.PodCondition{},
		changed:    make(chan struct{}, 1), stopping: make(chan struct{}), finished: make(chan struct{}),
	}
	p.hurry, p.noGrace = context.WithCancel(context.Background())
	for i := range object.Spec.InitContainers {
		p.containers = append(p.containers, newContainer(p, object.Spec.InitContainers[i], true))
	}
	for i := range object.Spec.Containers {
		p.containers = append(p.containers, newContainer(p, object.Spec.Containers[i], false))
	}
	return p
}

// Object is the pod as the API server last showed it, with the status that it
// has here.
func (p *Pod) Object() *corev1.Pod {
	p.mu.Lock()
	defer p.mu.Unlock()
	object := p.object.DeepCopy()
	object.Status = p.status()
	return object
}

// UID tells pods of one name apart.
func (p *Pod) UID() types.UID { return types.UID(p.uid) }

// IP is the pod's address.
func (p *Pod) IP() netip.Addr { return p.ip }

// Changed signals that the status may have changed since it was last read.
func (p *Pod) Changed() <-chan struct{} { return p.changed }

// Done is closed when Run has returned: every process is proven dead.
func (p *Pod) Done() <-chan struct{} { return p.finished }

// Update takes new labels, annotations and images; a container whose image
// changed is started again.
func (p *Pod) Update(object *corev1.Pod) {
	p.update(func() {
		p.object = object.DeepCopy()
		for i := range object.Spec.Containers {
			spec := object.Spec.Containers[i].DeepCopy()
			if c := p.find(spec.Name); c != nil && c.image() != spec.Image {
				c.next = spec
				c.ask("the image changed to "+spec.Image, p.ownGrace())
			}
		}
	})
}

func (p *Pod) ownGrace() time.Duration {
	if s := p.object.Spec.TerminationGracePeriodSeconds; s != nil {
		return time.Duration(*s) * time.Second
	}
	return corev1.DefaultTerminationGracePeriodSeconds * time.Second
}

// Stop asks the pod to end. The first call sets the grace period; a later one
// with none makes it hurry.
func (p *Pod) Stop(grace time.Duration) {
	p.stopOnce.Do(func() {
		p.mu.Lock()
		p.grace = grace
		p.mu.Unlock()
		close(p.stopping)
	})
	if grace <= 0 {
		p.noGrace()
	}
}

// Freeze makes what happens from now on unknown to the next node process,
// which then finds a pod whose processes died.
func (p *Pod) Freeze() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.frozen = true
}

// Remove forgets the pod's folder once Run has returned.
func (p *Pod) Remove() error { return os.RemoveAll(p.dir) }

func (p *Pod) isStopping() bool {
	select {
	case <-p.stopping:
		return true
	default:
		return false
	}
}

// pause waits unless the pod is to stop; then it returns false.
func (p *Pod) pause(d time.Duration) bool {
	if d <= 0 {
		return !p.isStopping()
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-p.stopping:
		return false
	}
}

// retryEvery is the delay between attempts at what waits for others, such as
// a claim that is not bound yet.
const retryEvery = 500 * time.Millisecond

// Run lives the pod's life and returns when it was stopped and every one of
// its processes is proven dead. A pod that completed waits to be stopped.
func (p *Pod) Run() {
	defer close(p.finished)
	p.Announce()
	if p.prepare() && p.initialise() {
		var group sync.WaitGroup
		for _, c := range p.containers {
			if !c.init {
				group.Go(c.run)
			}
		}
		group.Wait()
	}
	<-p.stopping
	p.end()
}

// prepare makes the volumes, which an adopted pod has; false when the pod is
// to stop.
func (p *Pod) prepare() bool {
	for p.volumes == nil {
		where, err := p.mount()
		p.update(func() {
			p.message = ""
			if err != nil {
				p.message = err.Error()
			}
			p.volumes = where
		})
		if err == nil {
			break
		}
		p.log.Warn("the pod waits for its volumes", "error", err)
		if !p.pause(retryEvery) {
			return false
		}
	}
	return !p.isStopping()
}

func (p *Pod) mount() (map[string]string, error) {
	if err := os.MkdirAll(p.dir, 0o700); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(p.hurry, apiTimeout)
	defer cancel()
	p.mu.Lock()
	object := p.object.DeepCopy()
	p.mu.Unlock()
	source := p.source(object)
	return volume.Mount(ctx, volume.Source{
		Client: p.host.Client, Pod: object, Field: source.Field,
		Resource: func(f *corev1.ResourceFieldSelector) (string, error) { return source.Resource(f, "") },
	}, filepath.Join(p.dir, "volumes"))
}

// apiTimeout bounds the reads from the API server before a start.
const apiTimeout = 10 * time.Second

func (p *Pod) source(object *corev1.Pod) environ.Source {
	return environ.Source{Client: p.host.Client, Pod: object, PodIP: p.ip.String(), HostIP: p.host.IP, NodeName: p.host.Name}
}

// initialise runs the init containers one after the other; false when one of
// them failed for good or the pod is to stop.
func (p *Pod) initialise() bool {
	for _, c := range p.containers {
		if !c.init {
			continue
		}
		c.run()
		if p.isStopping() {
			return false
		}
		p.mu.Lock()
		failed := c.state.Terminated != nil && c.state.Terminated.ExitCode != 0
		p.mu.Unlock()
		if failed {
			p.update(func() {
				for _, other := range p.containers {
					other.finished = true
				}
			})
			return false
		}
	}
	return true
}

// end proves that nothing is left, however long that takes: the pod's address
// must not go to another while somebody may listen on it.
func (p *Pod) end() {
	for {
		err := proc.End(podMark, p.uid)
		if err == nil {
			break
		}
		p.log.Error("the pod can't end", "error", err)
		p.update(func() { p.message = err.Error() })
		<-time.After(retryEvery)
	}
	p.update(func() {
		for _, c := range p.containers {
			if !c.finished && c.state.Terminated == nil {
				c.state = corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{
					Reason: "ContainerStatusUnknown", Message: "the pod ended before the container ran", FinishedAt: metav1.Now(),
				}}
			}
			c.finished, c.ready = true, false
		}
	})
}

// update changes the pod's state, records it and tells the node.
func (p *Pod) update(change func()) {
	p.mu.Lock()
	change()
	p.transition()
	if err := p.save(); err != nil {
		p.log.Error("the pod's record", "error", err)
	}
	p.mu.Unlock()
	p.Announce()
}

// Announce asks the node to write the status, changed or not.
func (p *Pod) Announce() {
	select {
	case p.changed <- struct{}{}:
	default:
	}
}

func (p *Pod) find(name string) *container {
	for _, c := range p.containers {
		if c.name == name {
			return c
		}
	}
	return nil
}
