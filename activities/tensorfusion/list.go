package tensorfusion

import (
	"cmp"
	"context"
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/json"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes/scheme"

	"github.com/refit-run/refit/activities/kube"
)

// pageSize bounds one answer of the API server.
const pageSize = 1000

// object is what a list is sorted by.
type object interface {
	GetNamespace() string
	GetName() string
}

func byName[T object](a, b T) int {
	return cmp.Or(cmp.Compare(a.GetNamespace(), b.GetNamespace()), cmp.Compare(a.GetName(), b.GetName()))
}

// list reads every object of a resource, sorted by namespace and name. It
// decodes the answer straight into T: a cluster has eight GPU objects a host,
// and the way over maps takes a multiple of time and memory
// (BenchmarkDecodingAFleet). Pods and Nodes, the largest, come as protobuf.
func list[T any, P interface {
	*T
	object
}](ctx context.Context, c *kube.Client, gvr schema.GroupVersionResource, namespace, selector string) ([]T, error) {
	var out []T
	opts := metav1.ListOptions{LabelSelector: selector, Limit: pageSize}
	for {
		var next string
		var err error
		switch items := any(&out).(type) {
		case *[]corev1.Pod:
			var l *corev1.PodList
			if l, err = c.Typed.CoreV1().Pods(namespace).List(ctx, opts); err == nil {
				*items, next = append(*items, l.Items...), l.Continue
			}
		case *[]corev1.Node:
			var l *corev1.NodeList
			if l, err = c.Typed.CoreV1().Nodes().List(ctx, opts); err == nil {
				*items, next = append(*items, l.Items...), l.Continue
			}
		default:
			next, err = jsonPage(ctx, c, gvr, namespace, opts, &out)
		}
		if err != nil {
			return nil, fmt.Errorf("listing %s: %w", gvr.GroupResource(), err)
		}
		if opts.Continue = next; opts.Continue == "" {
			break
		}
	}
	slices.SortFunc(out, func(a, b T) int { return byName(P(&a), P(&b)) })
	return out, nil
}

// jsonPage appends one page of any kind and returns the token of the next.
func jsonPage[T any](ctx context.Context, c *kube.Client, gvr schema.GroupVersionResource, namespace string, opts metav1.ListOptions, out *[]T) (next string, err error) {
	path := "/apis/" + gvr.Group + "/" + gvr.Version
	if gvr.Group == "" {
		path = "/api/" + gvr.Version
	}
	raw, err := c.Typed.CoreV1().RESTClient().Get().AbsPath(path).NamespaceIfScoped(namespace, namespace != "").Resource(gvr.Resource).
		SetHeader("Accept", runtime.ContentTypeJSON).VersionedParams(&opts, scheme.ParameterCodec).Do(ctx).Raw()
	if err != nil {
		return "", err
	}
	var page struct {
		Metadata metav1.ListMeta `json:"metadata"`
		Items    []T             `json:"items"`
	}
	if err := json.Unmarshal(raw, &page); err != nil {
		return "", err
	}
	*out = append(*out, page.Items...)
	return page.Metadata.Continue, nil
}

// listIfServed is list for a resource that older installations lack.
func listIfServed[T any, P interface {
	*T
	object
}](ctx context.Context, c *kube.Client, gvr schema.GroupVersionResource) ([]T, error) {
	out, err := list[T, P](ctx, c, gvr, "", "")
	if apierrors.IsNotFound(err) {
		return nil, nil
	}
	return out, err
}

// listRaw is list for objects that are kept whole.
func listRaw(ctx context.Context, c dynamic.Interface, gvr schema.GroupVersionResource, namespace string) ([]unstructured.Unstructured, error) {
	var out []unstructured.Unstructured
	opts := metav1.ListOptions{Limit: pageSize}
	for {
		l, err := c.Resource(gvr).Namespace(namespace).List(ctx, opts)
		if err != nil {
			return nil, fmt.Errorf("listing %s: %w", gvr.GroupResource(), err)
		}
		out = append(out, l.Items...)
		if opts.Continue = l.GetContinue(); opts.Continue == "" {
			break
		}
	}
	slices.SortFunc(out, func(a, b unstructured.Unstructured) int { return byName(&a, &b) })
	return out, nil
}
