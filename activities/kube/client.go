package kube

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"strings"

	corev1 "k8s.io/api/core/v1"
	apiextensionsclientset "k8s.io/apiextensions-apiserver/pkg/client/clientset/clientset"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/discovery/cached/memory"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/restmapper"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
)

// Client is a connection to one API server.
type Client struct {
	// Cluster is the name it was reached by; empty for a client made from a
	// bare configuration.
	Cluster    string
	Config     *rest.Config
	Typed      kubernetes.Interface
	Dynamic    dynamic.Interface
	Extensions apiextensionsclientset.Interface
	Discovery  discovery.CachedDiscoveryInterface
	// Mapper asks the server again by itself when it does not know a kind.
	Mapper meta.ResettableRESTMapper

	source source
	// inside: the worker runs in this cluster, so that pods may be near.
	inside bool
}

// NewClient connects with a bare configuration; Clusters.Connect is the way of
// activities. The configuration is copied.
func NewClient(config *rest.Config) (*Client, error) {
	config = rest.CopyConfig(config)
	config.QPS, config.Burst, config.UserAgent = clientQPS, clientBurst, UserAgent
	shared, err := rest.HTTPClientFor(config)
	if err != nil {
		return nil, err
	}
	c := &Client{Config: config}
	// Kinds of Kubernetes itself as protobuf; custom resources know JSON only.
	core := rest.CopyConfig(config)
	core.ContentType = runtime.ContentTypeProtobuf
	core.AcceptContentTypes = runtime.ContentTypeProtobuf + "," + runtime.ContentTypeJSON
	typed, err := kubernetes.NewForConfigAndClient(core, shared)
	if err != nil {
		return nil, err
	}
	c.Typed = typed
	if c.Dynamic, err = dynamic.NewForConfigAndClient(config, shared); err != nil {
		return nil, err
	}
	if c.Extensions, err = apiextensionsclientset.NewForConfigAndClient(config, shared); err != nil {
		return nil, err
	}
	c.Discovery = memory.NewMemCacheClient(typed.Discovery())
	c.Mapper = freshMapper{restmapper.NewDeferredDiscoveryRESTMapper(c.Discovery)}
	return c, nil
}

// Kubeconfig is a self-contained kubeconfig of this connection, for a child
// process. It holds credentials: it goes over a pipe, never to a file or into
// history. An in-cluster connection has none (nil): the child finds its own.
func (c *Client) Kubeconfig() ([]byte, error) {
	var config *clientcmdapi.Config
	switch {
	case c.source.path != "":
		loaded, err := c.source.kubeconfig()
		if err != nil {
			return nil, err
		}
		config = loaded
	case c.Cluster != "":
		return nil, nil
	default:
		config = fromREST(c.Config)
	}
	if err := clientcmdapi.FlattenConfig(config); err != nil {
		return nil, err
	}
	return clientcmd.Write(*config)
}

func fromREST(r *rest.Config) *clientcmdapi.Config {
	const name = "refit"
	config := clientcmdapi.NewConfig()
	config.Clusters[name] = &clientcmdapi.Cluster{
		Server: r.Host, TLSServerName: r.TLSClientConfig.ServerName, InsecureSkipTLSVerify: r.Insecure,
		CertificateAuthority: r.CAFile, CertificateAuthorityData: r.CAData,
	}
	config.AuthInfos[name] = &clientcmdapi.AuthInfo{
		Token: r.BearerToken, TokenFile: r.BearerTokenFile, Username: r.Username, Password: r.Password, Exec: r.ExecProvider,
		ClientCertificate: r.CertFile, ClientCertificateData: r.CertData, ClientKey: r.KeyFile, ClientKeyData: r.KeyData,
	}
	config.Contexts[name] = &clientcmdapi.Context{Cluster: name, AuthInfo: name}
	config.CurrentContext = name
	return config
}

// Mapping finds the resource of a kind.
func (c *Client) Mapping(gvk schema.GroupVersionKind) (*meta.RESTMapping, error) {
	return c.Mapper.RESTMapping(gvk.GroupKind(), gvk.Version)
}

// ResourceOf is the dynamic interface for an object; a namespaced object
// without namespace is an error here and not a silent "default".
func (c *Client) ResourceOf(gvk schema.GroupVersionKind, namespace string) (dynamic.ResourceInterface, error) {
	mapping, err := c.Mapping(gvk)
	if err != nil {
		return nil, err
	}
	if mapping.Scope.Name() == meta.RESTScopeNameRoot {
		return c.Dynamic.Resource(mapping.Resource), nil
	}
	if namespace == "" {
		return nil, fmt.Errorf("%s is namespaced, but no namespace is given", gvk.Kind)
	}
	return c.Dynamic.Resource(mapping.Resource).Namespace(namespace), nil
}

// Apply is a server-side apply under the given field manager. With force it
// takes fields over from other managers; with dryRun nothing is stored. It
// returns the object as the server holds (or would hold) it.
func (c *Client) Apply(ctx context.Context, obj *unstructured.Unstructured, manager string, force, dryRun bool) (*unstructured.Unstructured, error) {
	what := "apply " + Name(obj)
	resource, err := c.ResourceOf(obj.GroupVersionKind(), obj.GetNamespace())
	if err != nil {
		return nil, Wrap(err, what)
	}
	data, err := json.Marshal(obj)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", what, err)
	}
	options := metav1.PatchOptions{FieldManager: manager, Force: &force}
	if dryRun {
		options.DryRun = []string{metav1.DryRunAll}
	}
	applied, err := resource.Patch(ctx, obj.GetName(), types.ApplyPatchType, data, options)
	if err != nil {
		return nil, Wrap(err, what)
	}
	return applied, nil
}

// Name is how errors, diffs and status name an object: Kind/namespace/name.
func Name(obj *unstructured.Unstructured) string {
	parts := []string{obj.GetKind()}
	if obj.GetNamespace() != "" {
		parts = append(parts, obj.GetNamespace())
	}
	return strings.Join(append(parts, obj.GetName()), "/")
}

// PodLogTail is the end of a container's log, at most lines lines and 64 KiB;
// previous asks for the container's former life. Callers mask it before it
// leaves the activity.
func (c *Client) PodLogTail(ctx context.Context, namespace, pod, container string, lines int64, previous bool) (string, error) {
	const limit int64 = 64 << 10
	what := fmt.Sprintf("log of Pod/%s/%s container %q", namespace, pod, container)
	max := limit
	stream, err := c.Typed.CoreV1().Pods(namespace).GetLogs(pod, &corev1.PodLogOptions{
		Container: container, TailLines: &lines, LimitBytes: &max, Previous: previous,
	}).Stream(ctx)
	if err != nil {
		return "", Wrap(err, what)
	}
	defer stream.Close()
	text, err := io.ReadAll(io.LimitReader(stream, limit))
	if err != nil {
		return "", Wrap(err, what)
	}
	return string(text), nil
}
