package tensorfusion

import (
	"context"
	"sync"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/dynamic/dynamicinformer"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"

	"github.com/refit-run/refit/sandbox/tensorfusion/machine"
)

// Index names: worker pods by workload and by node, client pods by pool, GPUs
// by node, GPUNodes by pool, connections by workload.
const (
	byWorkload = "workload"
	byWorkers  = "workers"
	byClients  = "clients"
	byNode     = "node"
	byPool     = "pool"
)

// caches hold everything the double reads. Custom resources are watched only
// once their CRDs are established: the chart may be installed later.
type caches struct {
	nodes, pods, webhooks, claims cache.SharedIndexInformer
	custom                        map[schema.GroupVersionResource]cache.SharedIndexInformer
	crds                          cache.SharedIndexInformer

	mu      sync.Mutex
	ctx     context.Context
	started map[schema.GroupVersionResource]bool
	group   sync.WaitGroup
}

func newCaches(client kubernetes.Interface, custom dynamic.Interface, namespace string) *caches {
	factory := informers.NewSharedInformerFactory(client, 0)
	c := &caches{
		nodes:    factory.Core().V1().Nodes().Informer(),
		pods:     factory.Core().V1().Pods().Informer(),
		claims:   factory.Core().V1().PersistentVolumeClaims().Informer(),
		webhooks: factory.Admissionregistration().V1().MutatingWebhookConfigurations().Informer(),
		custom:   map[schema.GroupVersionResource]cache.SharedIndexInformer{},
		started:  map[schema.GroupVersionResource]bool{},
	}
	informer := func(r schema.GroupVersionResource, indexers cache.Indexers) cache.SharedIndexInformer {
		return dynamicinformer.NewFilteredDynamicInformer(custom, r, "", 0, indexers, nil).Informer()
	}
	labelled := func(label string) cache.IndexFunc {
		return func(o any) ([]string, error) {
			return []string{o.(*unstructured.Unstructured).GetLabels()[label]}, nil
		}
	}
	for _, r := range customResources {
		indexers := cache.Indexers{}
		switch r {
		case gpuResource:
			indexers[byNode] = labelled(machine.ManagedByLabel)
		case nodeResource:
			indexers[byPool] = func(o any) ([]string, error) {
				return []string{poolOf(o.(*unstructured.Unstructured).GetLabels())}, nil
			}
		case workloadResource:
			indexers[byPool] = labelled(machine.PoolLabel)
		case connectionResource:
			indexers[byWorkload] = func(o any) ([]string, error) {
				u := o.(*unstructured.Unstructured)
				name, _, err := unstructured.NestedString(u.Object, "spec", "workloadName")
				return []string{u.GetNamespace() + "/" + name}, err
			}
		}
		c.custom[r] = informer(r, indexers)
	}
	c.crds = informer(crdResource, nil)
	err := c.pods.AddIndexers(cache.Indexers{
		byWorkload: func(o any) ([]string, error) {
			if p := o.(*corev1.Pod); isWorker(p) {
				return []string{p.Namespace + "/" + p.Labels[machine.WorkloadLabel]}, nil
			}
			return nil, nil
		},
		byWorkers: func(o any) ([]string, error) {
			if p := o.(*corev1.Pod); isWorker(p) {
				return []string{p.Spec.NodeName}, nil
			}
			return nil, nil
		},
		byClients: func(o any) ([]string, error) {
			p := o.(*corev1.Pod)
			if pool := p.Labels[machine.PoolLabel]; pool != "" && p.Labels[machine.EnabledLabel] == "true" {
				return []string{pool}, nil
			}
			return nil, nil
		},
	})
	if err != nil {
		panic(err) // only after a start, which is not now
	}
	return c
}

// isWorker: local-GPU application pods carry the component too, but no workload.
func isWorker(p *corev1.Pod) bool {
	return p.Labels[machine.ComponentLabel] == "worker" && p.Labels[machine.WorkloadLabel] != ""
}

// run starts the caches and keeps them until ctx ends.
func (c *caches) run(ctx context.Context) error {
	c.mu.Lock()
	c.ctx = ctx
	c.mu.Unlock()
	_, err := c.crds.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc:    func(o any) { c.established(o.(*unstructured.Unstructured)) },
		UpdateFunc: func(_, o any) { c.established(o.(*unstructured.Unstructured)) },
	})
	if err != nil {
		return err
	}
	for _, i := range []cache.SharedIndexInformer{c.nodes, c.pods, c.webhooks, c.claims, c.crds} {
		c.start(i)
	}
	<-ctx.Done()
	c.group.Wait()
	return nil
}

func (c *caches) start(i cache.SharedIndexInformer) {
	c.group.Add(1)
	go func() {
		defer c.group.Done()
		i.RunWithContext(c.ctx)
	}()
}

// established starts the watch of a custom resource when its CRD is served.
func (c *caches) established(crd *unstructured.Unstructured) {
	plural, _, _ := unstructured.NestedString(crd.Object, "spec", "names", "plural")
	resource := custom(plural)
	if owner, _, _ := unstructured.NestedString(crd.Object, "spec", "group"); owner != group || c.custom[resource] == nil {
		return
	}
	conditions, _, _ := unstructured.NestedSlice(crd.Object, "status", "conditions")
	for _, each := range conditions {
		condition, ok := each.(map[string]any)
		if !ok || condition["type"] != "Established" || condition["status"] != "True" {
			continue
		}
		c.mu.Lock()
		if !c.started[resource] && c.ctx.Err() == nil {
			c.started[resource] = true
			c.start(c.custom[resource])
		}
		c.mu.Unlock()
	}
}

// synced: a controller process could start now.
func (c *caches) synced() bool {
	for _, i := range []cache.SharedIndexInformer{c.nodes, c.pods, c.crds} {
		if !i.HasSynced() {
			return false
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, r := range customResources {
		if !c.started[r] || !c.custom[r].HasSynced() {
			return false
		}
	}
	return true
}

func (c *caches) get(r schema.GroupVersionResource, key string) (*unstructured.Unstructured, bool) {
	o, ok, err := c.custom[r].GetStore().GetByKey(key)
	if err != nil || !ok {
		return nil, false
	}
	return o.(*unstructured.Unstructured), true
}

func (c *caches) list(r schema.GroupVersionResource) []*unstructured.Unstructured {
	return objects(c.custom[r].GetStore().List())
}

func (c *caches) indexed(r schema.GroupVersionResource, index, value string) []*unstructured.Unstructured {
	found, err := c.custom[r].GetIndexer().ByIndex(index, value)
	if err != nil {
		return nil
	}
	return objects(found)
}

func objects(found []any) []*unstructured.Unstructured {
	list := make([]*unstructured.Unstructured, 0, len(found))
	for _, o := range found {
		list = append(list, o.(*unstructured.Unstructured))
	}
	return list
}

func (c *caches) node(name string) *corev1.Node {
	o, ok, err := c.nodes.GetStore().GetByKey(name)
	if err != nil || !ok {
		return nil
	}
	return o.(*corev1.Node)
}

func (c *caches) pod(namespace, name string) *corev1.Pod {
	o, ok, err := c.pods.GetStore().GetByKey(namespace + "/" + name)
	if err != nil || !ok {
		return nil
	}
	return o.(*corev1.Pod)
}

func (c *caches) podsBy(index, value string) []*corev1.Pod {
	found, err := c.pods.GetIndexer().ByIndex(index, value)
	if err != nil {
		return nil
	}
	pods := make([]*corev1.Pod, 0, len(found))
	for _, o := range found {
		pods = append(pods, o.(*corev1.Pod))
	}
	return pods
}
