package volume

import (
	"context"
	"fmt"
	"os"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
)

// tokenSeconds is how long a token is asked to hold at least: nothing here
// renews it, and no sandbox should outlive it.
const tokenSeconds int64 = 30 * 24 * 3600

func (s Source) project(ctx context.Context, p corev1.VolumeProjection, mode int32) (map[string]file, error) {
	switch {
	case p.ConfigMap != nil:
		what := "ConfigMap " + p.ConfigMap.Name
		object, err := s.Client.CoreV1().ConfigMaps(s.Pod.Namespace).Get(ctx, p.ConfigMap.Name, metav1.GetOptions{})
		if err != nil {
			return nil, unlessOptional(err, p.ConfigMap.Optional)
		}
		data := map[string][]byte{}
		for key, value := range object.Data {
			data[key] = []byte(value)
		}
		for key, value := range object.BinaryData {
			data[key] = value
		}
		return pick(what, data, p.ConfigMap.Items, p.ConfigMap.Optional, mode)
	case p.Secret != nil:
		object, err := s.Client.CoreV1().Secrets(s.Pod.Namespace).Get(ctx, p.Secret.Name, metav1.GetOptions{})
		if err != nil {
			return nil, unlessOptional(err, p.Secret.Optional)
		}
		return pick("Secret "+p.Secret.Name, object.Data, p.Secret.Items, p.Secret.Optional, mode)
	case p.DownwardAPI != nil:
		return s.downward(p.DownwardAPI.Items, mode)
	case p.ServiceAccountToken != nil:
		return s.token(ctx, p.ServiceAccountToken, mode)
	}
	return nil, fmt.Errorf("expected a configMap, secret, downwardAPI or serviceAccountToken source, found another kind")
}

func unlessOptional(err error, optional *bool) error {
	if apierrors.IsNotFound(err) && ptr.Deref(optional, false) {
		return nil
	}
	return err
}

// pick takes all keys, or the wanted ones under their paths.
func pick(what string, data map[string][]byte, items []corev1.KeyToPath, optional *bool, mode int32) (map[string]file, error) {
	files := map[string]file{}
	if len(items) == 0 {
		for key, value := range data {
			files[key] = file{value, os.FileMode(mode)}
		}
		return files, nil
	}
	for _, item := range items {
		value, ok := data[item.Key]
		if !ok && !ptr.Deref(optional, false) {
			return nil, fmt.Errorf("%s: expected key %q, found none", what, item.Key)
		}
		if ok {
			files[item.Path] = file{value, os.FileMode(ptr.Deref(item.Mode, mode))}
		}
	}
	return files, nil
}

func (s Source) downward(items []corev1.DownwardAPIVolumeFile, mode int32) (map[string]file, error) {
	files := map[string]file{}
	for _, item := range items {
		var value string
		var err error
		if item.FieldRef != nil {
			value, err = s.Field(item.FieldRef.FieldPath)
		} else {
			value, err = s.Resource(item.ResourceFieldRef)
		}
		if err != nil {
			return nil, err
		}
		files[item.Path] = file{[]byte(value), os.FileMode(ptr.Deref(item.Mode, mode))}
	}
	return files, nil
}

func (s Source) token(ctx context.Context, p *corev1.ServiceAccountTokenProjection, mode int32) (map[string]file, error) {
	request := &authenticationv1.TokenRequest{Spec: authenticationv1.TokenRequestSpec{
		ExpirationSeconds: ptr.To(max(ptr.Deref(p.ExpirationSeconds, 0), tokenSeconds)),
		BoundObjectRef:    &authenticationv1.BoundObjectReference{Kind: "Pod", APIVersion: "v1", Name: s.Pod.Name, UID: s.Pod.UID},
	}}
	if p.Audience != "" {
		request.Spec.Audiences = []string{p.Audience}
	}
	account := s.Pod.Spec.ServiceAccountName
	reply, err := s.Client.CoreV1().ServiceAccounts(s.Pod.Namespace).CreateToken(ctx, account, request, metav1.CreateOptions{})
	if err != nil {
		return nil, fmt.Errorf("token of ServiceAccount %s: %w", account, err)
	}
	return map[string]file{p.Path: {[]byte(reply.Status.Token), os.FileMode(mode)}}, nil
}
