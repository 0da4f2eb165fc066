package kube

import (
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// freshMapper asks the server again once when it does not know a kind: the
// cache is older than a CRD applied a moment ago.
type freshMapper struct {
	meta.ResettableRESTMapper
}

func again[T any](m freshMapper, look func() (T, error)) (T, error) {
	found, err := look()
	if meta.IsNoMatchError(err) {
		m.Reset()
		return look()
	}
	return found, err
}

// RESTMapping implements meta.RESTMapper.
func (m freshMapper) RESTMapping(gk schema.GroupKind, versions ...string) (*meta.RESTMapping, error) {
	return again(m, func() (*meta.RESTMapping, error) { return m.ResettableRESTMapper.RESTMapping(gk, versions...) })
}

// RESTMappings implements meta.RESTMapper.
func (m freshMapper) RESTMappings(gk schema.GroupKind, versions ...string) ([]*meta.RESTMapping, error) {
	return again(m, func() ([]*meta.RESTMapping, error) { return m.ResettableRESTMapper.RESTMappings(gk, versions...) })
}

// KindFor implements meta.RESTMapper.
func (m freshMapper) KindFor(r schema.GroupVersionResource) (schema.GroupVersionKind, error) {
	return again(m, func() (schema.GroupVersionKind, error) { return m.ResettableRESTMapper.KindFor(r) })
}

// ResourceFor implements meta.RESTMapper.
func (m freshMapper) ResourceFor(r schema.GroupVersionResource) (schema.GroupVersionResource, error) {
	return again(m, func() (schema.GroupVersionResource, error) { return m.ResettableRESTMapper.ResourceFor(r) })
}
