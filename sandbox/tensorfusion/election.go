package tensorfusion

import (
	"context"
	"fmt"
	"math"
	"sort"
	"strconv"
	"strings"
	"sync"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/yaml"

	"github.com/refit-run/refit/sandbox/tensorfusion/machine"
)

const (
	leaseName      = "85104305.tensor-fusion.ai"
	leaderInfoName = "tensor-fusion-operator-leader-info"
	// look is how often the election looks at the controller's pods besides
	// their events; the lease runs out without any event.
	look = 500 * time.Millisecond
)

// process is one controller process that leads. It begins with empty memory.
type process struct {
	machine.Process
	memory   machine.Memory
	pod      string
	uid      string
	selector string
	mu       sync.Mutex // guards memory
}

// election knows which controller pod leads.
type election struct {
	mu      sync.Mutex
	current *process
	lease   machine.Lease
	written time.Time
	// restarts counts crashes by pod UID: a restarted process is another
	// candidate.
	restarts map[string]int
	live     int
}

func (e *election) leading() *process {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.current
}

// alive is how many controller replicas answer the webhook.
func (e *election) alive() int {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.live
}

// crash ends the leading process; its pod comes back as another candidate.
func (e *election) crash() {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.current == nil {
		return
	}
	e.restarts[e.current.uid]++
	e.current = nil
}

// identity is NAME_UID of the pod, and after restarts NAME_UID-rN.
func identity(name, uid string, restarts int) string {
	if restarts == 0 {
		return name + "_" + uid
	}
	return fmt.Sprintf("%s_%s-r%d", name, uid, restarts)
}

// restartsOf reads an identity back.
func restartsOf(identity string) (uid string, restarts int) {
	_, rest, _ := strings.Cut(identity, "_")
	uid, count, ok := strings.Cut(rest, "-r")
	if n, err := strconv.Atoi(count); ok && err == nil {
		restarts = n
	}
	return uid, restarts
}

// controllerPods are the Ready pods of the controller's Deployment, oldest first.
func (d *Double) controllerPods() []*corev1.Pod {
	var pods []*corev1.Pod
	for _, o := range d.caches.pods.GetStore().List() {
		p := o.(*corev1.Pod)
		if p.Namespace == d.options.Namespace && p.Labels[machine.ComponentLabel] == "operator" &&
			p.Labels["app.kubernetes.io/instance"] == d.options.Release &&
			p.DeletionTimestamp == nil && p.Status.Phase == corev1.PodRunning && podReady(p) {
			pods = append(pods, p)
		}
	}
	sort.Slice(pods, func(i, j int) bool {
		if !pods[i].CreationTimestamp.Equal(&pods[j].CreationTimestamp) {
			return pods[i].CreationTimestamp.Before(&pods[j].CreationTimestamp)
		}
		return pods[i].Name < pods[j].Name
	})
	return pods
}

func (d *Double) runElection(ctx context.Context) error {
	d.election.restarts = map[string]int{}
	ticker := d.clock.NewTicker(look)
	defer ticker.Stop()
	read := false
	for {
		if d.caches.synced() {
			if !read {
				if err := d.readLease(ctx); err != nil {
					return err
				}
				read = true
			}
			if err := d.elect(ctx); err != nil && ctx.Err() == nil {
				d.log.Info("election", "error", err.Error())
			}
		}
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C():
		}
	}
}

// readLease takes over the lease of a former run of the double.
func (d *Double) readLease(ctx context.Context) error {
	found, err := d.client.CoordinationV1().Leases(d.options.Namespace).Get(ctx, leaseName, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return err
	}
	l := machine.Lease{Holder: ptr.Deref(found.Spec.HolderIdentity, ""), Transitions: ptr.Deref(found.Spec.LeaseTransitions, 0)}
	if found.Spec.RenewTime != nil {
		l.Renewed = found.Spec.RenewTime.Time
	}
	if found.Spec.AcquireTime != nil {
		l.Acquired = found.Spec.AcquireTime.Time
	}
	uid, restarts := restartsOf(l.Holder)
	d.election.restarts[uid] = restarts
	d.election.lease = l
	return nil
}

// elect lets the machine choose, ends a process whose pod is gone and starts
// the next one.
func (d *Double) elect(ctx context.Context) error {
	pods := d.controllerPods()
	e := &d.election
	e.mu.Lock()
	e.live = len(pods)
	byIdentity := map[string]*corev1.Pod{}
	var candidates []string
	for _, p := range pods {
		id := identity(p.Name, string(p.UID), e.restarts[string(p.UID)])
		byIdentity[id] = p
		candidates = append(candidates, id)
	}
	now := d.clock.Now()
	next, leads := machine.Elect(e.lease, candidates, d.options.LeaseDuration, now)
	changed := next.Holder != e.lease.Holder
	e.lease = next
	if !leads || changed {
		e.current = nil
	}
	start := leads && e.current == nil
	renew := leads && (changed || now.Sub(e.written) >= d.options.LeaseDuration/3)
	if renew {
		e.written = now
	}
	e.mu.Unlock()
	if renew {
		if err := d.writeLease(ctx, next); err != nil {
			return err
		}
	}
	if !start {
		return nil
	}
	pod := byIdentity[next.Holder]
	p, err := d.newProcess(ctx, pod)
	if err != nil {
		return err
	}
	if err := d.writeLeader(ctx, pod.Status.PodIP); err != nil {
		return err
	}
	d.log.Info("controller process leads", "pod", pod.Name, "version", p.Version.String(), "policy", p.Policy)
	d.startProcess(ctx, p)
	e.mu.Lock()
	e.current = p
	e.mu.Unlock()
	d.enqueueAll()
	d.readyOnce.Do(func() { close(d.ready) })
	return nil
}

// newProcess reads what a controller reads at its start: its image, its
// environment and the mounted configuration.
func (d *Double) newProcess(ctx context.Context, pod *corev1.Pod) (*process, error) {
	p := &process{pod: pod.Name, uid: string(pod.UID), selector: "nvidia.com/gpu.present=true"}
	p.MaxCrash = 5
	for _, c := range pod.Spec.Containers {
		if c.Name != "controller" {
			continue
		}
		tag := c.Image[strings.LastIndex(c.Image, ":")+1:]
		version, err := machine.ParseVersion(tag)
		if err != nil {
			d.log.Info("controller version is unknown, playing the newest", "image", c.Image, "reason", err.Error())
			version = machine.Newest
		}
		p.Version = version
		for _, env := range c.Env {
			switch env.Name {
			case "TF_ISOLATION_MODE_POLICY":
				p.Policy = env.Value
			case "KUBE_API_VERSION_MINOR":
				if p.KubeMinor, err = strconv.Atoi(env.Value); err != nil {
					p.KubeMinor = 0
				}
			case "INITIAL_GPU_NODE_LABEL_SELECTOR":
				p.selector = env.Value
			case "DEBUG_FORCE_GPUNODE_STATE":
				if err := yaml.Unmarshal([]byte(env.Value), &p.ForcedNodes); err != nil {
					d.log.Info("DEBUG_FORCE_GPUNODE_STATE is not a JSON object", "error", err.Error())
				}
			}
		}
		for _, argument := range append(append([]string{}, c.Command...), c.Args...) {
			if argument == "-compatible-with-nvidia-container-toolkit" {
				p.Toolkit = true
			}
		}
	}
	config, err := d.client.CoreV1().ConfigMaps(d.options.Namespace).Get(ctx, d.options.Release+"-config", metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return p, nil
	}
	if err != nil {
		return nil, err
	}
	var dynamicConfig struct {
		MaxCrash *int32 `json:"hypervisorMaxCrashCount"`
	}
	if err := yaml.Unmarshal([]byte(config.Data["config.yaml"]), &dynamicConfig); err != nil {
		return nil, fmt.Errorf("ConfigMap %s: config.yaml: %w", config.Name, err)
	}
	p.MaxCrash = ptr.Deref(dynamicConfig.MaxCrash, 5)
	return p, nil
}

func (d *Double) writeLease(ctx context.Context, l machine.Lease) error {
	leases := d.client.CoordinationV1().Leases(d.options.Namespace)
	spec := coordinationv1.LeaseSpec{
		HolderIdentity:       ptr.To(l.Holder),
		LeaseDurationSeconds: ptr.To(int32(math.Ceil(d.options.LeaseDuration.Seconds()))),
		AcquireTime:          &metav1.MicroTime{Time: l.Acquired},
		RenewTime:            &metav1.MicroTime{Time: l.Renewed},
		LeaseTransitions:     ptr.To(l.Transitions),
	}
	found, err := leases.Get(ctx, leaseName, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		_, err = leases.Create(ctx, &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Name: leaseName}, Spec: spec}, metav1.CreateOptions{})
		return err
	}
	if err != nil {
		return err
	}
	found.Spec = spec
	_, err = leases.Update(ctx, found, metav1.UpdateOptions{})
	return err
}

func (d *Double) writeLeader(ctx context.Context, ip string) error {
	maps := d.client.CoreV1().ConfigMaps(d.options.Namespace)
	found, err := maps.Get(ctx, leaderInfoName, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		_, err = maps.Create(ctx, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: leaderInfoName}, Data: map[string]string{"leader-ip": ip}}, metav1.CreateOptions{})
		return err
	}
	if err != nil {
		return err
	}
	found.Data = map[string]string{"leader-ip": ip}
	_, err = maps.Update(ctx, found, metav1.UpdateOptions{})
	return err
}
