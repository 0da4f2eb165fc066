package controller

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/refit-run/refit/sandbox/folder"
)

// container is the controller's name in its Deployment.
const container = "controller"

// gpuInfo is the ConfigMap with a fixed name.
const gpuInfo = "tensor-fusion-sys-public-gpu-info"

// certDir is where the webhook server of the program looks below TMPDIR.
const certDir = "k8s-webhook-server/serving-certs"

// runtimeSpec is a container as a process: files by their path below the
// folder, and what leads the program to them.
type runtimeSpec struct {
	args, env []string
	files     map[string]string
}

func (s runtimeSpec) write(dir string) error {
	for name, content := range s.files {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			return err
		}
		if err := folder.WriteFile(path, []byte(content), 0o600); err != nil {
			return err
		}
	}
	return nil
}

// compose translates the container: its arguments and environment, then ours,
// which win because a program takes the last of two. The node's network, the
// service account's files and the mounts do not exist for a process; ports, a
// kubeconfig and paths of the folder take their place.
func (o Options) compose(ctx context.Context, d *appsv1.Deployment) (runtimeSpec, error) {
	var s runtimeSpec
	i := slices.IndexFunc(d.Spec.Template.Spec.Containers, func(c corev1.Container) bool { return c.Name == container })
	if i < 0 {
		return s, fmt.Errorf("Deployment %s/%s: expected a container called %s, found none; the sandbox can't tell how its program is started", d.Namespace, d.Name, container)
	}
	c := d.Spec.Template.Spec.Containers[i]
	command := append(slices.Clone(c.Command), c.Args...)
	if len(command) > 0 {
		command = command[1:] // the program's path in the image
	}
	s.args = append(command,
		"-metrics-path="+filepath.Join(o.Dir, "metrics.log"),
		"-health-probe-bind-address="+folder.Address(o.ProbePort),
		"-dynamic-config="+filepath.Join(o.Dir, "config.yaml"),
		"-scheduler-config="+filepath.Join(o.Dir, "scheduler-config.yaml"),
		"-gpu-info-config="+filepath.Join(o.Dir, "gpu-info.yaml"),
	)
	for _, v := range c.Env {
		value, err := o.value(ctx, v)
		if err != nil {
			return s, fmt.Errorf("Deployment %s/%s: environment variable %s: %w", d.Namespace, d.Name, v.Name, err)
		}
		s.env = append(s.env, v.Name+"="+value)
	}
	temp := filepath.Join(o.Dir, "tmp")
	s.env = append(s.env, "KUBECONFIG="+o.Kubeconfig, fmt.Sprintf("PORT=%d", o.APIPort), "TMPDIR="+temp)
	var err error
	s.files, err = o.mounts(ctx)
	return s, err
}

// value resolves what a kubelet would.
func (o Options) value(ctx context.Context, v corev1.EnvVar) (string, error) {
	from := v.ValueFrom
	switch {
	case from == nil:
		return v.Value, nil
	case from.FieldRef != nil && from.FieldRef.FieldPath == "metadata.namespace":
		return o.Namespace, nil
	case from.SecretKeyRef != nil:
		secret, err := o.Kube.CoreV1().Secrets(o.Namespace).Get(ctx, from.SecretKeyRef.Name, metav1.GetOptions{})
		if err != nil {
			return "", err
		}
		value, ok := secret.Data[from.SecretKeyRef.Key]
		if !ok {
			return "", fmt.Errorf("Secret %s: expected the key %s, found none", secret.Name, from.SecretKeyRef.Key)
		}
		return string(value), nil
	}
	return "", fmt.Errorf("expected a value, the namespace's field or a Secret's key, found another source")
}

// mounts are the files of the container, by the ConfigMaps that hold them.
func (o Options) mounts(ctx context.Context) (map[string]string, error) {
	files := map[string]string{
		filepath.Join("tmp", certDir, "tls.crt"): string(o.Cert),
		filepath.Join("tmp", certDir, "tls.key"): string(o.Key),
	}
	for name, keys := range map[string][]string{
		o.Release + "-config": {"config.yaml", "scheduler-config.yaml"}, gpuInfo: {"gpu-info.yaml"},
	} {
		config, err := o.Kube.CoreV1().ConfigMaps(o.Namespace).Get(ctx, name, metav1.GetOptions{})
		if err != nil {
			return nil, fmt.Errorf("ConfigMap %s/%s: %w", o.Namespace, name, err)
		}
		for _, key := range keys {
			content, ok := config.Data[key]
			if !ok {
				return nil, fmt.Errorf("ConfigMap %s/%s: expected the key %s, found none", o.Namespace, name, key)
			}
			files[key] = content
		}
	}
	return files, nil
}
