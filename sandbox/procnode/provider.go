package procnode

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/virtual-kubelet/virtual-kubelet/errdefs"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	corelisters "k8s.io/client-go/listers/core/v1"
	"k8s.io/client-go/tools/record"

	"github.com/refit-run/refit/sandbox/procnode/address"
	"github.com/refit-run/refit/sandbox/procnode/names"
	"github.com/refit-run/refit/sandbox/procnode/pod"
)

// provider is what virtual-kubelet drives. Its own life of a pod ends with the
// object's deletion, which happens here, when the processes are gone.
type provider struct {
	life      context.Context
	config    Config
	kube      kubernetes.Interface
	objects   corelisters.PodLister
	services  corelisters.ServiceLister
	names     *names.Table
	addresses *address.Pool
	host      *pod.Host
	running   sync.WaitGroup

	mu   sync.Mutex
	pods map[types.UID]*pod.Pod
	// byName is the youngest pod of each name: virtual-kubelet asks by name.
	byName map[types.NamespacedName]*pod.Pod
	ending bool

	naming sync.Mutex
}

func newProvider(
	ctx context.Context, c Config, kube kubernetes.Interface, objects corelisters.PodLister, services corelisters.ServiceLister,
	table *names.Table, events record.EventRecorder,
) (*provider, error) {
	pool, err := address.NewPool(c.First.Next(), c.Addresses)
	if err != nil {
		return nil, err
	}
	backoff := c.Backoff
	if backoff == 0 {
		backoff = defaultBackoff
	}
	return &provider{
		life: ctx, config: c, kube: kube, objects: objects, services: services, names: table, addresses: pool,
		pods: map[types.UID]*pod.Pod{}, byName: map[types.NamespacedName]*pod.Pod{},
		host: &pod.Host{
			Name: c.Name, IP: c.First.String(), Mark: c.Dir, Hosts: c.hosts(), DNS: c.dns(), Client: kube,
			Images: c.Images, Backoff: backoff, Events: events, Log: slog.Default(),
		},
	}, nil
}

// adopt takes over the pods of an earlier node process.
func (p *provider) adopt() error {
	entries, err := os.ReadDir(p.config.pods())
	if err != nil {
		return err
	}
	for _, e := range entries {
		dir := filepath.Join(p.config.pods(), e.Name())
		found, err := pod.Load(p.host, dir)
		if err == nil {
			err = p.addresses.Reserve(found.IP())
		}
		if err != nil {
			// The node died before it knew the pod: it is created again.
			slog.Warn("a pod of an earlier node process is not known any more; what it left is ended", "folder", dir, "error", err)
			if err := pod.Discard(dir); err != nil {
				return err
			}
			continue
		}
		object := found.Object()
		slog.Info("a pod of an earlier node process is taken over", "pod", object.Namespace+"/"+object.Name, "uid", object.UID)
		p.mu.Lock()
		p.pods[object.UID], p.byName[nameOf(object)] = found, found
		p.mu.Unlock()
		p.run(object, found, nil)
	}
	return nil
}

func nameOf(object *corev1.Pod) types.NamespacedName {
	return types.NamespacedName{Namespace: object.Namespace, Name: object.Name}
}

// CreatePod starts a pod; one of the same name that still ends is waited for.
func (p *provider) CreatePod(_ context.Context, object *corev1.Pod) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if _, known := p.pods[object.UID]; known || p.ending {
		return nil
	}
	ip, err := p.addresses.Take()
	if err != nil {
		return err
	}
	created := pod.New(p.host, object, filepath.Join(p.config.pods(), string(object.UID)), ip)
	former := p.byName[nameOf(object)]
	p.pods[object.UID], p.byName[nameOf(object)] = created, created
	p.run(object, created, former)
	return nil
}

// run lives a pod's life: its processes, its status, its end.
func (p *provider) run(object *corev1.Pod, one, former *pod.Pod) {
	p.running.Go(func() {
		if former != nil {
			former.Stop(0)
			<-former.Done()
		}
		p.rename()
		one.Run()
		p.mu.Lock()
		ending := p.ending
		p.mu.Unlock()
		if ending {
			return
		}
		p.addresses.Release(one.IP())
		p.remove(object)
		p.mu.Lock()
		delete(p.pods, object.UID)
		if p.byName[nameOf(object)] == one {
			delete(p.byName, nameOf(object))
		}
		p.mu.Unlock()
		if err := one.Remove(); err != nil {
			slog.Error("the folder of a pod", "pod", nameOf(object), "error", err)
		}
		p.rename()
	})
	p.running.Go(func() { p.publish(object, one) })
}

// UpdatePod takes new labels, annotations and images.
func (p *provider) UpdatePod(ctx context.Context, object *corev1.Pod) error {
	if one := p.byUID(object.UID); one != nil {
		one.Update(object)
		return nil
	}
	return p.CreatePod(ctx, object)
}

// DeletePod begins the end of a pod; one that is gone from the API server has
// no grace left.
func (p *provider) DeletePod(_ context.Context, object *corev1.Pod) error {
	one := p.byUID(object.UID)
	if one == nil {
		return errdefs.NotFoundf("pod %s/%s (%s): not on this node", object.Namespace, object.Name, object.UID)
	}
	one.Stop(graceOf(object))
	return nil
}

func graceOf(object *corev1.Pod) time.Duration {
	if object.DeletionTimestamp == nil || object.DeletionGracePeriodSeconds == nil {
		return 0
	}
	return time.Duration(*object.DeletionGracePeriodSeconds) * time.Second
}

func (p *provider) byUID(uid types.UID) *pod.Pod {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.pods[uid]
}

// current is the pod under this name that the API server means: virtual-kubelet
// knows no UIDs, and the former pod of a name may still be ending.
func (p *provider) current(namespace, name string) (*pod.Pod, error) {
	p.mu.Lock()
	one := p.byName[types.NamespacedName{Namespace: namespace, Name: name}]
	p.mu.Unlock()
	if one != nil {
		known, err := p.objects.Pods(namespace).Get(name)
		if err != nil || known.UID == one.UID() {
			return one, nil
		}
	}
	return nil, errdefs.NotFoundf("pod %s/%s: not on this node", namespace, name)
}

// GetPod is the pod with its status here.
func (p *provider) GetPod(_ context.Context, namespace, name string) (*corev1.Pod, error) {
	one, err := p.current(namespace, name)
	if err != nil {
		return nil, err
	}
	return one.Object(), nil
}

// GetPodStatus is the pod's status here.
func (p *provider) GetPodStatus(ctx context.Context, namespace, name string) (*corev1.PodStatus, error) {
	object, err := p.GetPod(ctx, namespace, name)
	if err != nil {
		return nil, err
	}
	return &object.Status, nil
}

// GetPods are all pods here, those of an earlier node process too.
func (p *provider) GetPods(context.Context) ([]*corev1.Pod, error) {
	var objects []*corev1.Pod
	for _, one := range p.all() {
		objects = append(objects, one.Object())
	}
	return objects, nil
}

func (p *provider) all() []*pod.Pod {
	p.mu.Lock()
	defer p.mu.Unlock()
	all := make([]*pod.Pod, 0, len(p.pods))
	for _, one := range p.pods {
		all = append(all, one)
	}
	return all
}

// NotifyPods exists so that virtual-kubelet does not poll. The callback is not
// used: virtual-kubelet would send whole pods, and with them labels that were
// changed meanwhile; publish writes the status alone.
func (p *provider) NotifyPods(context.Context, func(*corev1.Pod)) {}

// shutdownGrace is what pods get when the node itself ends.
const shutdownGrace = 3 * time.Second

// shutdown ends all processes without telling anybody.
func (p *provider) shutdown() {
	p.mu.Lock()
	p.ending = true
	p.mu.Unlock()
	for _, one := range p.all() {
		one.Freeze()
		one.Stop(shutdownGrace)
	}
	p.running.Wait()
}

// rename tells the processes who is where: members of headless Services by
// their own names, other pods as parts of the Services that select them.
func (p *provider) rename() {
	p.naming.Lock()
	defer p.naming.Unlock()
	table, err := p.table()
	if err == nil {
		err = p.names.Replace(table)
	}
	if err != nil {
		slog.Error("the names of pods", "error", fmt.Errorf("process node %s: %w", p.config.Name, err))
	}
}
