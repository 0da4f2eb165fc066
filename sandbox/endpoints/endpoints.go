// Package endpoints gives the fake pods of TensorFusion the HTTP endpoints
// that the double serves in one place: a hypervisor's at its node's address,
// and all of them through the API server's port-forward. It must not answer
// anything itself.
package endpoints

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"time"

	"golang.org/x/sync/errgroup"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/dynamic"
)

// The ports that the pods declare.
const (
	hypervisorPort = 8000
	controllerPort = 8080
)

// parallel bounds the writes at start.
const parallel = 16

// Hypervisors serves the endpoints of every node's hypervisor at that node's
// own address, so that their equal host ports do not meet.
type Hypervisors struct {
	server *http.Server
}

// ServeHypervisors listens at the address of every node; addresses maps it to
// the node's name. api is the double's HTTP address.
func ServeHypervisors(addresses map[string]string, api string) (*Hypervisors, error) {
	proxy := &httputil.ReverseProxy{Rewrite: func(r *httputil.ProxyRequest) {
		local, _ := r.In.Context().Value(http.LocalAddrContextKey).(net.Addr)
		host, _, _ := net.SplitHostPort(local.String())
		r.SetURL(&url.URL{Scheme: "http", Host: api, Path: "/nodes/" + addresses[host]})
	}}
	h := &Hypervisors{server: &http.Server{Handler: proxy, ReadHeaderTimeout: 10 * time.Second}}
	for address, node := range addresses {
		l, err := net.Listen("tcp", fmt.Sprintf("%s:%d", address, hypervisorPort))
		if err != nil {
			_ = h.server.Close()
			return nil, fmt.Errorf("hypervisor of node %s: %w", node, err)
		}
		go func() { _ = h.server.Serve(l) }()
	}
	return h, nil
}

// Close ends all of them.
func (h *Hypervisors) Close() { _ = h.server.Close() }

var (
	forwards        = schema.GroupVersionResource{Group: "kwok.x-k8s.io", Version: "v1alpha1", Resource: "portforwards"}
	clusterForwards = schema.GroupVersionResource{Group: "kwok.x-k8s.io", Version: "v1alpha1", Resource: "clusterportforwards"}
)

// Forward maps port-forwards of hypervisor pods to their node's address and
// those of the controller to the double.
func Forward(ctx context.Context, client dynamic.Interface, namespace string, addresses map[string]string, apiPort int) error {
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(parallel)
	for address, node := range addresses {
		// Controllers before 2.14 name the pod in the second way.
		for _, prefix := range []string{"hypervisor-", "tf-hypervisor-"} {
			group.Go(func() error {
				object := forward("PortForward", prefix+node, nil, hypervisorPort, address, hypervisorPort)
				return create(ctx, client.Resource(forwards).Namespace(namespace), object)
			})
		}
	}
	selector := map[string]any{"matchNamespaces": []any{namespace}}
	controller := forward("ClusterPortForward", "tensor-fusion-controller", selector, controllerPort, "127.0.0.1", apiPort)
	group.Go(func() error { return create(ctx, client.Resource(clusterForwards), controller) })
	return group.Wait()
}

func forward(kind, name string, selector map[string]any, port int, address string, target int) *unstructured.Unstructured {
	spec := map[string]any{"forwards": []any{map[string]any{
		"ports":  []any{int64(port)},
		"target": map[string]any{"address": address, "port": int64(target)},
	}}}
	if selector != nil {
		spec["selector"] = selector
	}
	return &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": forwards.GroupVersion().String(), "kind": kind,
		"metadata": map[string]any{"name": name}, "spec": spec,
	}}
}

func create(ctx context.Context, api dynamic.ResourceInterface, object *unstructured.Unstructured) error {
	_, err := api.Create(ctx, object, metav1.CreateOptions{})
	if err != nil && !apierrors.IsAlreadyExists(err) {
		return fmt.Errorf("%s %s: %w", object.GetKind(), object.GetName(), err)
	}
	return nil
}
