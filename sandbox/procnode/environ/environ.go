// Package environ makes what a container's process starts with: its
// environment, the downward API and its command line. It must not start
// anything.
package environ

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/kubernetes/pkg/api/v1/resource"
	"k8s.io/kubernetes/pkg/fieldpath"
	"k8s.io/kubernetes/third_party/forked/golang/expansion"
	"k8s.io/utils/ptr"
)

// Image is a container image as a local command.
type Image struct {
	// Command is the entrypoint: a container's command replaces it.
	Command []string `json:"command"`
	// Args are the default ones: a container's args or command replace them.
	Args []string `json:"args,omitempty"`
	// Env is the image's own environment.
	Env map[string]string `json:"env,omitempty"`
	// Path goes before PATH: the tools that the image brings for exec.
	Path string `json:"path,omitempty"`
}

// Source is what values are read from.
type Source struct {
	Client kubernetes.Interface
	Pod    *corev1.Pod
	// PodIP, HostIP and NodeName are not in the object yet.
	PodIP, HostIP, NodeName string
}

// Field resolves a path of the downward API.
func (s Source) Field(path string) (string, error) {
	switch path {
	case "status.podIP", "status.podIPs":
		return s.PodIP, nil
	case "status.hostIP", "status.hostIPs":
		return s.HostIP, nil
	case "spec.nodeName":
		return s.NodeName, nil
	case "spec.serviceAccountName":
		return s.Pod.Spec.ServiceAccountName, nil
	}
	return fieldpath.ExtractFieldPathAsString(s.Pod, path)
}

// Environment is the container's: known, then envFrom, then env in its order,
// each value expanded with what stands before it.
func (s Source) Environment(ctx context.Context, c *corev1.Container, known map[string]string) (map[string]string, error) {
	env := maps.Clone(known)
	for _, from := range c.EnvFrom {
		data, err := s.all(ctx, from)
		if err != nil {
			return nil, fmt.Errorf("envFrom: %w", err)
		}
		for key, value := range data {
			env[from.Prefix+key] = value
		}
	}
	expand := expansion.MappingFuncFor(env)
	for _, e := range c.Env {
		if e.ValueFrom == nil {
			env[e.Name] = expansion.Expand(e.Value, expand)
			continue
		}
		value, ok, err := s.value(ctx, c, e.ValueFrom)
		if err != nil {
			return nil, fmt.Errorf("variable %s: %w", e.Name, err)
		}
		if ok {
			env[e.Name] = value
		}
	}
	return env, nil
}

func (s Source) all(ctx context.Context, from corev1.EnvFromSource) (map[string]string, error) {
	switch {
	case from.ConfigMapRef != nil:
		return s.configMap(ctx, from.ConfigMapRef.Name, from.ConfigMapRef.Optional)
	case from.SecretRef != nil:
		return s.secret(ctx, from.SecretRef.Name, from.SecretRef.Optional)
	}
	return nil, nil
}

// value is not ok when an optional source is absent.
func (s Source) value(ctx context.Context, c *corev1.Container, from *corev1.EnvVarSource) (value string, ok bool, err error) {
	key := func(what, name, key string, optional *bool, data map[string]string, err error) (string, bool, error) {
		if err != nil {
			return "", false, err
		}
		value, ok := data[key]
		if !ok && !ptr.Deref(optional, false) {
			return "", false, fmt.Errorf("%s %s: expected key %q, found none", what, name, key)
		}
		return value, ok, nil
	}
	switch {
	case from.FieldRef != nil:
		value, err = s.Field(from.FieldRef.FieldPath)
		return value, err == nil, err
	case from.ResourceFieldRef != nil:
		value, err = s.Resource(from.ResourceFieldRef, c.Name)
		return value, err == nil, err
	case from.ConfigMapKeyRef != nil:
		r := from.ConfigMapKeyRef
		data, err := s.configMap(ctx, r.Name, r.Optional)
		return key("ConfigMap", r.Name, r.Key, r.Optional, data, err)
	case from.SecretKeyRef != nil:
		r := from.SecretKeyRef
		data, err := s.secret(ctx, r.Name, r.Optional)
		return key("Secret", r.Name, r.Key, r.Optional, data, err)
	}
	return "", false, fmt.Errorf("expected a fieldRef, resourceFieldRef, configMapKeyRef or secretKeyRef, found another source")
}

// Resource resolves an amount of a container's resources; container counts
// where the selector names none.
func (s Source) Resource(f *corev1.ResourceFieldSelector, container string) (string, error) {
	if f.ContainerName != "" {
		container = f.ContainerName
	}
	return resource.ExtractResourceValueByContainerName(f, s.Pod, container)
}

func (s Source) configMap(ctx context.Context, name string, optional *bool) (map[string]string, error) {
	object, err := s.Client.CoreV1().ConfigMaps(s.Pod.Namespace).Get(ctx, name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) && ptr.Deref(optional, false) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	return object.Data, nil
}

func (s Source) secret(ctx context.Context, name string, optional *bool) (map[string]string, error) {
	object, err := s.Client.CoreV1().Secrets(s.Pod.Namespace).Get(ctx, name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) && ptr.Deref(optional, false) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	data := map[string]string{}
	for key, value := range object.Data {
		data[key] = string(value)
	}
	return data, nil
}

// CommandLine is what runs: image and container as Kubernetes joins them,
// $(NAME) expanded.
func CommandLine(image Image, c *corev1.Container, env map[string]string) []string {
	line := slices.Clone(image.Command)
	if len(c.Command) > 0 {
		line = slices.Clone(c.Command)
	}
	switch {
	case len(c.Args) > 0:
		line = append(line, c.Args...)
	case len(c.Command) == 0:
		line = append(line, image.Args...)
	}
	expand := expansion.MappingFuncFor(env)
	for i := range line {
		line[i] = expansion.Expand(line[i], expand)
	}
	return line
}

// Volumes names the folder of each volume: VOLUME_name for $(VOLUME_name), and
// the same with underscores for shells.
func Volumes(where map[string]string) map[string]string {
	env := map[string]string{}
	for name, path := range where {
		env["VOLUME_"+name] = path
		env["VOLUME_"+strings.NewReplacer("-", "_", ".", "_").Replace(name)] = path
	}
	return env
}

// List writes an environment as a process takes it, sorted.
func List(env map[string]string) []string {
	var list []string
	for _, name := range slices.Sorted(maps.Keys(env)) {
		list = append(list, name+"="+env[name])
	}
	return list
}
