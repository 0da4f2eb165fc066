package procnode

import (
	"context"
	"encoding/json"
	"log/slog"
	"net/netip"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	typedcorev1 "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/utils/ptr"

	"github.com/refit-run/refit/sandbox/procnode/names"
	"github.com/refit-run/refit/sandbox/procnode/pod"
)

// retryEvery is the delay between attempts while the API server is away.
const retryEvery = 500 * time.Millisecond

// publish writes a pod's status whenever it changes, the last one before the
// object goes.
func (p *provider) publish(object *corev1.Pod, one *pod.Pod) {
	for {
		select {
		case <-one.Changed():
			p.rename()
			p.untilDone("the status of a pod", object, one.Done(), func(ctx context.Context) error {
				return p.patchStatus(ctx, object, one)
			})
		case <-one.Done():
			return
		case <-p.life.Done():
			return
		}
	}
}

// insist writes a pod's status again when somebody else said otherwise: a
// controller marks the pods of a node that was away as not Ready.
func (p *provider) insist(changed any) {
	object, ok := changed.(*corev1.Pod)
	if !ok {
		return
	}
	if one := p.byUID(object.UID); one != nil && isReady(object) != isReady(one.Object()) {
		one.Announce()
	}
}

// untilDone tries again until it worked, the pod has no object any more, done
// is closed or the node ends.
func (p *provider) untilDone(what string, object *corev1.Pod, done <-chan struct{}, try func(context.Context) error) {
	tick := time.NewTicker(retryEvery)
	defer tick.Stop()
	for {
		err := try(p.life)
		// A conflict is about the UID: another pod of the name.
		if err == nil || apierrors.IsNotFound(err) || apierrors.IsConflict(err) || p.life.Err() != nil {
			return
		}
		slog.Warn(what+" can't be written; it is tried again", "pod", nameOf(object), "error", err)
		select {
		case <-tick.C:
		case <-done:
			return
		case <-p.life.Done():
			return
		}
	}
}

// patchStatus writes the status and nothing else: labels, foreign conditions
// and what others write meanwhile stay.
func (p *provider) patchStatus(ctx context.Context, object *corev1.Pod, one *pod.Pod) error {
	status := one.Object().Status
	// The API server's own.
	status.QOSClass = ""
	data, err := json.Marshal(status)
	if err != nil {
		return err
	}
	fields := map[string]any{}
	if err := json.Unmarshal(data, &fields); err != nil {
		return err
	}
	if status.Message == "" {
		fields["message"] = nil
	}
	patch, err := json.Marshal(map[string]any{"metadata": map[string]any{"uid": object.UID}, "status": fields})
	if err != nil {
		return err
	}
	_, err = p.kube.CoreV1().Pods(object.Namespace).Patch(ctx, object.Name, types.StrategicMergePatchType, patch, metav1.PatchOptions{}, "status")
	return err
}

// remove deletes the object of a pod whose processes are gone. virtual-kubelet
// would wait for the end of the grace period.
func (p *provider) remove(object *corev1.Pod) {
	api := p.kube.CoreV1().Pods(object.Namespace)
	p.untilDone("the end of a pod", object, nil, func(ctx context.Context) error {
		if err := p.patchStatus(ctx, object, p.byUID(object.UID)); err != nil {
			return err
		}
		return api.Delete(ctx, object.Name, metav1.DeleteOptions{
			GracePeriodSeconds: ptr.To[int64](0), Preconditions: metav1.NewUIDPreconditions(string(object.UID)),
		})
	})
}

// podClient is virtual-kubelet's: it must not delete a pod that still has
// processes.
type podClient struct {
	typedcorev1.PodsGetter
	provider *provider
}

// Pods wraps the namespace's client.
func (c podClient) Pods(namespace string) typedcorev1.PodInterface {
	return podDeleter{c.PodsGetter.Pods(namespace), c.provider, namespace}
}

type podDeleter struct {
	typedcorev1.PodInterface
	provider  *provider
	namespace string
}

// Delete of a pod that is here only begins its end, which deletes the object:
// virtual-kubelet comes here without ending the pod when all its containers
// happen to wait, for instance to be started again.
func (d podDeleter) Delete(ctx context.Context, name string, o metav1.DeleteOptions) error {
	if o.Preconditions == nil || o.Preconditions.UID == nil {
		return d.PodInterface.Delete(ctx, name, o)
	}
	one := d.provider.byUID(*o.Preconditions.UID)
	if one == nil {
		return d.PodInterface.Delete(ctx, name, o)
	}
	grace := time.Duration(0)
	if object, err := d.provider.objects.Pods(d.namespace).Get(name); err == nil && object.UID == *o.Preconditions.UID {
		grace = graceOf(object)
	}
	one.Stop(grace)
	return nil
}

// table is the names of all pods that may be found: a Service's, if it says
// so, before they are Ready.
func (p *provider) table() (map[string][]netip.Addr, error) {
	services, err := p.services.List(labels.Everything())
	if err != nil {
		return nil, err
	}
	table := map[string][]netip.Addr{}
	for _, one := range p.all() {
		object := one.Object()
		host := object.Spec.Hostname
		if host == "" {
			host = object.Name
		}
		for _, s := range services {
			if s.Namespace != object.Namespace || len(s.Spec.Selector) == 0 ||
				!labels.SelectorFromSet(s.Spec.Selector).Matches(labels.Set(object.Labels)) ||
				!s.Spec.PublishNotReadyAddresses && !isReady(object) {
				continue
			}
			name := s.Name + "." + s.Namespace + names.Domain
			table[name] = append(table[name], one.IP())
			if s.Name == object.Spec.Subdomain {
				table[host+"."+name] = []netip.Addr{one.IP()}
			}
		}
	}
	return table, nil
}

func isReady(object *corev1.Pod) bool {
	for _, c := range object.Status.Conditions {
		if c.Type == corev1.PodReady {
			return c.Status == corev1.ConditionTrue
		}
	}
	return false
}
