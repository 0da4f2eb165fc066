// Package reaper ends pods of fake nodes: what a kubelet does last, once the
// containers have stopped. It exists because kwok's own deletion stage names a
// pod without its UID: under load it hits the next pod of the same name, and
// then the next one, for ever. It must not delete a pod that nobody asked to
// delete.
package reaper

import (
	"context"
	"fmt"
	"sync"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/utils/ptr"
)

// workers bound the deletions in flight.
const workers = 8

// Run removes every terminating pod of a node that carries the annotation,
// until ctx ends.
func Run(ctx context.Context, kube kubernetes.Interface, annotation, value string) error {
	factory := informers.NewSharedInformerFactory(kube, 0)
	nodes, pods := factory.Core().V1().Nodes(), factory.Core().V1().Pods()
	queue := workqueue.NewTypedRateLimitingQueue(workqueue.DefaultTypedControllerRateLimiter[string]())
	defer queue.ShutDown()
	add := func(o any) {
		if p, ok := o.(*corev1.Pod); ok && p.DeletionTimestamp != nil && len(p.Finalizers) == 0 && p.Spec.NodeName != "" {
			queue.Add(p.Namespace + "/" + p.Name)
		}
	}
	if _, err := pods.Informer().AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc: add, UpdateFunc: func(_, o any) { add(o) },
	}); err != nil {
		return fmt.Errorf("reaper: %w", err)
	}
	nodes.Informer()
	factory.StartWithContext(ctx)
	defer factory.Shutdown()
	if !cache.WaitForCacheSync(ctx.Done(), nodes.Informer().HasSynced, pods.Informer().HasSynced) {
		return nil
	}
	reap := func(key string) error {
		namespace, name, err := cache.SplitMetaNamespaceKey(key)
		if err != nil {
			return err
		}
		p, err := pods.Lister().Pods(namespace).Get(name)
		if err != nil || p.DeletionTimestamp == nil {
			return nil // gone, or already the next one of that name
		}
		n, err := nodes.Lister().Get(p.Spec.NodeName)
		if err != nil || n.Annotations[annotation] != value {
			return nil // not a fake node's
		}
		err = kube.CoreV1().Pods(namespace).Delete(ctx, name, metav1.DeleteOptions{
			GracePeriodSeconds: ptr.To[int64](0), Preconditions: metav1.NewUIDPreconditions(string(p.UID)),
		})
		if apierrors.IsNotFound(err) || apierrors.IsConflict(err) {
			return nil
		}
		return err
	}
	var group sync.WaitGroup
	for range workers {
		group.Go(func() {
			for {
				key, stop := queue.Get()
				if stop {
					return
				}
				if reap(key) != nil {
					queue.AddRateLimited(key)
				} else {
					queue.Forget(key)
				}
				queue.Done(key)
			}
		})
	}
	<-ctx.Done()
	queue.ShutDown()
	group.Wait()
	return nil
}
