// Package volume lays a pod's volumes out as folders. There are no mounts: a
// container learns where its volumes are from its environment. It must not
// know what runs in the pod.
package volume

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
)

// Source is what a volume's content is read from.
type Source struct {
	Client kubernetes.Interface
	Pod    *corev1.Pod
	// Field resolves a path of the downward API.
	Field func(path string) (string, error)
	// Resource resolves an amount of a container's resources.
	Resource func(*corev1.ResourceFieldSelector) (string, error)
}

// defaultMode is Kubernetes' own for files of ConfigMaps and Secrets.
const defaultMode int32 = 0o644

// Mount makes the folders below dir and returns where each volume is. It can
// be called again after an error.
func Mount(ctx context.Context, s Source, dir string) (map[string]string, error) {
	where := map[string]string{}
	for i := range s.Pod.Spec.Volumes {
		v := &s.Pod.Spec.Volumes[i]
		path, err := s.mount(ctx, v, filepath.Join(dir, v.Name))
		if err != nil {
			return nil, fmt.Errorf("volume %s: %w", v.Name, err)
		}
		where[v.Name] = path
	}
	return where, nil
}

func (s Source) mount(ctx context.Context, v *corev1.Volume, own string) (string, error) {
	path := own
	var sources []corev1.VolumeProjection
	mode := defaultMode
	set := func(m *int32) {
		if m != nil {
			mode = *m
		}
	}
	switch {
	case v.EmptyDir != nil:
	case v.HostPath != nil:
		path = v.HostPath.Path
	case v.PersistentVolumeClaim != nil:
		var err error
		if path, err = s.claim(ctx, v.PersistentVolumeClaim.ClaimName); err != nil {
			return "", err
		}
	case v.ConfigMap != nil:
		set(v.ConfigMap.DefaultMode)
		sources = []corev1.VolumeProjection{{ConfigMap: &corev1.ConfigMapProjection{
			LocalObjectReference: v.ConfigMap.LocalObjectReference, Items: v.ConfigMap.Items, Optional: v.ConfigMap.Optional,
		}}}
	case v.Secret != nil:
		set(v.Secret.DefaultMode)
		sources = []corev1.VolumeProjection{{Secret: &corev1.SecretProjection{
			LocalObjectReference: corev1.LocalObjectReference{Name: v.Secret.SecretName}, Items: v.Secret.Items, Optional: v.Secret.Optional,
		}}}
	case v.DownwardAPI != nil:
		set(v.DownwardAPI.DefaultMode)
		sources = []corev1.VolumeProjection{{DownwardAPI: &corev1.DownwardAPIProjection{Items: v.DownwardAPI.Items}}}
	case v.Projected != nil:
		set(v.Projected.DefaultMode)
		sources = v.Projected.Sources
	default:
		return "", errors.New("expected an emptyDir, hostPath, persistentVolumeClaim, configMap, secret, downwardAPI or projected volume, found another kind")
	}
	if err := os.MkdirAll(path, 0o755); err != nil {
		return "", err
	}
	for _, source := range sources {
		files, err := s.project(ctx, source, mode)
		if err != nil {
			return "", err
		}
		if err := write(path, files); err != nil {
			return "", err
		}
	}
	return path, nil
}

// claim finds the folder of a bound claim.
func (s Source) claim(ctx context.Context, name string) (string, error) {
	pvc, err := s.Client.CoreV1().PersistentVolumeClaims(s.Pod.Namespace).Get(ctx, name, metav1.GetOptions{})
	if err != nil {
		return "", err
	}
	if pvc.Status.Phase != corev1.ClaimBound {
		return "", fmt.Errorf("claim %s: expected Bound, found %s", name, pvc.Status.Phase)
	}
	pv, err := s.Client.CoreV1().PersistentVolumes().Get(ctx, pvc.Spec.VolumeName, metav1.GetOptions{})
	if err != nil {
		return "", err
	}
	switch {
	case pv.Spec.HostPath != nil:
		return pv.Spec.HostPath.Path, nil
	case pv.Spec.Local != nil:
		return pv.Spec.Local.Path, nil
	}
	return "", fmt.Errorf("claim %s: expected PersistentVolume %s to be a hostPath or local, found another kind", name, pv.Name)
}

type file struct {
	data []byte
	mode os.FileMode
}

// write replaces each file atomically: a server may read it meanwhile.
func write(dir string, files map[string]file) error {
	for name, f := range files {
		if !filepath.IsLocal(name) {
			return fmt.Errorf("file %q: expected a path inside the volume", name)
		}
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return err
		}
		next := path + ".next"
		if err := os.WriteFile(next, f.data, f.mode); err != nil {
			return err
		}
		// The umask may have taken bits away.
		if err := os.Chmod(next, f.mode); err != nil {
			return err
		}
		if err := os.Rename(next, path); err != nil {
			return err
		}
	}
	return nil
}
