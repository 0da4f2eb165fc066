package volume

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/utils/ptr"
)

func mount(t *testing.T, dir string, v corev1.VolumeSource) error {
	t.Helper()
	client := fake.NewClientset(&corev1.ConfigMap{
		ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "there"}, Data: map[string]string{"key": "value"},
	})
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "p"},
		Spec:       corev1.PodSpec{Volumes: []corev1.Volume{{Name: "v", VolumeSource: v}}},
	}
	_, err := Mount(t.Context(), Source{Client: client, Pod: pod}, dir)
	return err
}

func configMap(name string, optional bool, items ...corev1.KeyToPath) corev1.VolumeSource {
	return corev1.VolumeSource{ConfigMap: &corev1.ConfigMapVolumeSource{
		LocalObjectReference: corev1.LocalObjectReference{Name: name}, Items: items, Optional: &optional,
	}}
}

func TestFilesHaveTheirModeAndAreReplaced(t *testing.T) {
	dir := t.TempDir()
	v := configMap("there", false, corev1.KeyToPath{Key: "key", Path: "sub/file", Mode: ptr.To[int32](0o400)})
	for range 2 {
		require.NoError(t, mount(t, dir, v))
		path := filepath.Join(dir, "v", "sub", "file")
		data, err := os.ReadFile(path)
		require.NoError(t, err)
		require.Equal(t, "value", string(data))
		info, err := os.Stat(path)
		require.NoError(t, err)
		require.EqualValues(t, 0o400, info.Mode().Perm())
	}
}

func TestWhatIsNotThereIsRefusedUnlessOptional(t *testing.T) {
	require.NoError(t, mount(t, t.TempDir(), configMap("absent", true)))
	require.ErrorContains(t, mount(t, t.TempDir(), configMap("absent", false)), "absent")
	missing := corev1.KeyToPath{Key: "other", Path: "file"}
	require.NoError(t, mount(t, t.TempDir(), configMap("there", true, missing)))
	require.ErrorContains(t, mount(t, t.TempDir(), configMap("there", false, missing)), `key "other"`)
	require.ErrorContains(t, mount(t, t.TempDir(), corev1.VolumeSource{NFS: &corev1.NFSVolumeSource{}}), "another kind")
}

func TestFilesStayInsideTheirVolume(t *testing.T) {
	dir := t.TempDir()
	escape := configMap("there", false, corev1.KeyToPath{Key: "key", Path: "../outside"})
	require.ErrorContains(t, mount(t, filepath.Join(dir, "in"), escape), "inside the volume")
	require.NoFileExists(t, filepath.Join(dir, "in", "outside"))
}
