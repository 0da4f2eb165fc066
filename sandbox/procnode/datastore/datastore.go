// Package datastore describes the datastores that a sandbox can bring: which
// images they need and which objects make them, with the names, labels, ports
// and probes of the charts that they stand for. It must not run anything.
package datastore

import (
	"context"
	"fmt"
	"path/filepath"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/tools/cache"
	toolswatch "k8s.io/client-go/tools/watch"
	"k8s.io/utils/ptr"

	"github.com/refit-run/refit/sandbox/procnode"
	"github.com/refit-run/refit/sandbox/procnode/environ"
)

// StorageClass is that of every claim. As the guide asks of real ones, it binds
// a claim only when its pod is placed.
const StorageClass = "refit-sandbox"

// Store is one datastore: a StatefulSet and what belongs to it.
type Store struct {
	// Name is the StatefulSet's.
	Name, Namespace string
	Members         int32
	// Images are what the process node must know.
	Images map[string]environ.Image
	// Claim is the name of the volume claim template, Size of each volume.
	Claim, Size string
	// Volumes is how many members may ever have one.
	Volumes int
	// Objects are created in their order, unless they are there: a Secret made
	// anew would lock the servers' clients out.
	Objects []runtime.Object
	// After makes a store usable whose members are Ready before they are; nil
	// where there is nothing to do. It may be called again.
	After func(ctx context.Context, kube kubernetes.Interface) error
}

// resources maps the kinds that stores are made of.
var resources = map[string]string{
	"Namespace": "namespaces", "ServiceAccount": "serviceaccounts", "Service": "services", "Secret": "secrets", "ConfigMap": "configmaps",
	"PersistentVolume": "persistentvolumes", "StorageClass": "storageclasses", "StatefulSet": "statefulsets",
}

// Install creates what is not there. Volumes are folders below dir; nothing
// provisions them.
func (s Store) Install(ctx context.Context, client dynamic.Interface, dir string) error {
	class := &storagev1.StorageClass{
		ObjectMeta:        metav1.ObjectMeta{Name: StorageClass},
		Provisioner:       "kubernetes.io/no-provisioner",
		VolumeBindingMode: ptr.To(storagev1.VolumeBindingWaitForFirstConsumer),
	}
	objects := []runtime.Object{
		class,
		&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: s.Namespace}},
		&corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: "default", Namespace: s.Namespace}},
	}
	for i := range s.Volumes {
		objects = append(objects, s.volume(fmt.Sprintf("%s-%s-%d", s.Claim, s.Name, i), dir))
	}
	for _, object := range append(objects, s.Objects...) {
		if err := create(ctx, client, object); err != nil {
			return fmt.Errorf("datastore %s: %w", s.Name, err)
		}
	}
	return nil
}

// volume is kept for one claim.
func (s Store) volume(claim, dir string) *corev1.PersistentVolume {
	return &corev1.PersistentVolume{
		ObjectMeta: metav1.ObjectMeta{Name: s.Namespace + "-" + claim},
		Spec: corev1.PersistentVolumeSpec{
			StorageClassName: StorageClass, AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce},
			PersistentVolumeReclaimPolicy: corev1.PersistentVolumeReclaimRetain,
			Capacity:                      corev1.ResourceList{corev1.ResourceStorage: resource.MustParse(s.Size)},
			PersistentVolumeSource:        corev1.PersistentVolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: filepath.Join(dir, claim)}},
			ClaimRef:                      &corev1.ObjectReference{Kind: "PersistentVolumeClaim", APIVersion: "v1", Namespace: s.Namespace, Name: claim},
		},
	}
}

// claims are the volume claim templates of the StatefulSet.
func (s Store) claims() []corev1.PersistentVolumeClaim {
	return []corev1.PersistentVolumeClaim{{
		ObjectMeta: metav1.ObjectMeta{Name: s.Claim},
		Spec: corev1.PersistentVolumeClaimSpec{
			StorageClassName: ptr.To(StorageClass), AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce},
			Resources: corev1.VolumeResourceRequirements{Requests: corev1.ResourceList{corev1.ResourceStorage: resource.MustParse(s.Size)}},
		},
	}}
}

func create(ctx context.Context, client dynamic.Interface, object runtime.Object) error {
	kinds, _, err := scheme.Scheme.ObjectKinds(object)
	if err != nil {
		return err
	}
	name, ok := resources[kinds[0].Kind]
	if !ok {
		return fmt.Errorf("kind %s: expected one that datastores are made of", kinds[0].Kind)
	}
	fields, err := runtime.DefaultUnstructuredConverter.ToUnstructured(object)
	if err != nil {
		return err
	}
	u := &unstructured.Unstructured{Object: fields}
	u.SetGroupVersionKind(kinds[0])
	var api dynamic.ResourceInterface = client.Resource(kinds[0].GroupVersion().WithResource(name))
	if u.GetNamespace() != "" {
		api = client.Resource(kinds[0].GroupVersion().WithResource(name)).Namespace(u.GetNamespace())
	}
	if _, err := api.Create(ctx, u, metav1.CreateOptions{}); err != nil && !apierrors.IsAlreadyExists(err) {
		return fmt.Errorf("%s %s: %w", u.GetKind(), u.GetName(), err)
	}
	return nil
}

var statefulSets = schema.GroupVersionResource{Group: "apps", Version: "v1", Resource: "statefulsets"}

// Ready watches until every member is Ready.
func (s Store) Ready(ctx context.Context, client dynamic.Interface) error {
	api := client.Resource(statefulSets).Namespace(s.Namespace)
	only := "metadata.name=" + s.Name
	lw := &cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
			o.FieldSelector = only
			return api.List(ctx, o)
		},
		WatchFuncWithContext: func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
			o.FieldSelector = only
			return api.Watch(ctx, o)
		},
	}
	var ready int64
	_, err := toolswatch.UntilWithSync(ctx, lw, &unstructured.Unstructured{}, nil, func(e watch.Event) (bool, error) {
		if u, ok := e.Object.(*unstructured.Unstructured); ok {
			ready, _, _ = unstructured.NestedInt64(u.Object, "status", "readyReplicas")
		}
		return ready == int64(s.Members), nil
	})
	if err != nil {
		return fmt.Errorf("StatefulSet %s/%s: expected %d members Ready, found %d: %w", s.Namespace, s.Name, s.Members, ready, err)
	}
	return nil
}

// onNode places a pod on the process node.
func onNode(spec corev1.PodSpec) corev1.PodSpec {
	spec.Tolerations = []corev1.Toleration{{Key: procnode.Taint, Operator: corev1.TolerationOpExists, Effect: corev1.TaintEffectNoSchedule}}
	spec.NodeSelector = map[string]string{procnode.Label: "true"}
	return spec
}

func field(path string) *corev1.EnvVarSource {
	return &corev1.EnvVarSource{FieldRef: &corev1.ObjectFieldSelector{FieldPath: path}}
}

func secretKey(name, key string) *corev1.EnvVarSource {
	return &corev1.EnvVarSource{SecretKeyRef: &corev1.SecretKeySelector{LocalObjectReference: corev1.LocalObjectReference{Name: name}, Key: key}}
}
