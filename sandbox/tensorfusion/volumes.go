package tensorfusion

import (
	"context"
	"time"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
)

const (
	// StorageClass is the cluster's default class; volumes of it hold nothing.
	StorageClass          = "refit-sandbox"
	provisioner           = "refit.sandbox/volumes"
	provisionerAnnotation = "volume.kubernetes.io/storage-provisioner"
)

// createStorageClass makes the default class, without which a StatefulSet with
// claims would never become ready here.
func (d *Double) createStorageClass(ctx context.Context) error {
	_, err := d.client.StorageV1().StorageClasses().Create(ctx, &storagev1.StorageClass{
		ObjectMeta: metav1.ObjectMeta{
			Name: StorageClass, Annotations: map[string]string{"storageclass.kubernetes.io/is-default-class": "true"},
		},
		Provisioner:       provisioner,
		ReclaimPolicy:     ptr.To(corev1.PersistentVolumeReclaimDelete),
		VolumeBindingMode: ptr.To(storagev1.VolumeBindingImmediate),
	}, metav1.CreateOptions{})
	if apierrors.IsAlreadyExists(err) {
		return nil
	}
	return err
}

// reconcileClaim gives a pending claim of the class a volume.
func (d *Double) reconcileClaim(ctx context.Context, key string) (time.Duration, error) {
	o, ok, err := d.caches.claims.GetStore().GetByKey(key)
	if err != nil || !ok {
		return 0, err
	}
	claim := o.(*corev1.PersistentVolumeClaim)
	if claim.Status.Phase != corev1.ClaimPending || claim.Spec.VolumeName != "" || claim.Annotations[provisionerAnnotation] != provisioner {
		return 0, nil
	}
	name := "pvc-" + string(claim.UID)
	_, err = d.client.CoreV1().PersistentVolumes().Create(ctx, &corev1.PersistentVolume{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: corev1.PersistentVolumeSpec{
			AccessModes:                   claim.Spec.AccessModes,
			Capacity:                      corev1.ResourceList{corev1.ResourceStorage: claim.Spec.Resources.Requests[corev1.ResourceStorage]},
			StorageClassName:              StorageClass,
			PersistentVolumeReclaimPolicy: corev1.PersistentVolumeReclaimRetain,
			ClaimRef: &corev1.ObjectReference{
				APIVersion: "v1", Kind: "PersistentVolumeClaim", Namespace: claim.Namespace, Name: claim.Name, UID: claim.UID,
			},
			PersistentVolumeSource: corev1.PersistentVolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: "/var/lib/refit-sandbox/" + name}},
		},
	}, metav1.CreateOptions{})
	if apierrors.IsAlreadyExists(err) {
		return 0, nil
	}
	return 0, err
}
