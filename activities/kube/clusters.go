package kube

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"sort"
	"strings"
	"sync"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"github.com/refit-run/refit/activities/finding"
)

// InCluster is the source of the cluster that the worker itself runs in.
const InCluster = "in-cluster"

// UserAgent is how the API server's audit log names us.
const UserAgent = "refit-worker"

const (
	// A batch of 200 hosts starts its deletes at once; client-go's default of
	// 5 a second would make the client the slowest part of a rollout.
	clientQPS   = 100
	clientBurst = 200
	// identityLimit bounds the one GET that proves which cluster was reached.
	identityLimit = 15 * time.Second
)

// IdentifyActivity is the activity name of Clusters.Identify.
const IdentifyActivity = "kube.Identify"

// Clusters maps the names that workflow inputs use to API servers. A name
// stands for one context of one kubeconfig, or for the worker's own cluster;
// a kubeconfig's current-context is never used.
type Clusters struct {
	sources map[string]source
	mu      sync.Mutex
	clients map[string]cached
}

// source is where a name's configuration comes from; path is empty for
// InCluster.
type source struct {
	path    string
	context string
}

// stamp tells one version of a kubeconfig file from another.
type stamp struct {
	modified time.Time
	size     int64
}

type cached struct {
	stamp  stamp
	client *Client
}

// Parse reads the worker's cluster map, comma-separated:
// "prod=/path/kubeconfig#context,lab=in-cluster". Files are read at Connect,
// so a kubeconfig may appear or change later.
func Parse(spec string) (*Clusters, error) {
	c := &Clusters{sources: map[string]source{}, clients: map[string]cached{}}
	for _, item := range strings.Split(spec, ",") {
		item = strings.TrimSpace(item)
		if item == "" {
			continue
		}
		name, from, ok := strings.Cut(item, "=")
		name, from = strings.TrimSpace(name), strings.TrimSpace(from)
		if !ok || name == "" || from == "" {
			return nil, fmt.Errorf("cluster map entry %q: expected NAME=KUBECONFIG#CONTEXT or NAME=%s", item, InCluster)
		}
		if strings.ContainsAny(name, "/ \t") {
			return nil, fmt.Errorf("cluster map entry %q: a name must not contain a slash or a space: it becomes part of the task queue cluster/NAME", item)
		}
		if _, dup := c.sources[name]; dup {
			return nil, fmt.Errorf("cluster map: name %q is given twice", name)
		}
		if from == InCluster {
			c.sources[name] = source{}
			continue
		}
		// The last '#': a path may hold one, a context made by us never does.
		at := strings.LastIndex(from, "#")
		if at <= 0 || at == len(from)-1 {
			return nil, fmt.Errorf("cluster map entry %q: the context is missing; write NAME=KUBECONFIG#CONTEXT (current-context is never used)", item)
		}
		path, err := filepath.Abs(from[:at])
		if err != nil {
			return nil, fmt.Errorf("cluster map entry %q: %w", item, err)
		}
		c.sources[name] = source{path: path, context: from[at+1:]}
	}
	return c, nil
}

// Names lists the clusters that this worker serves, sorted.
func (c *Clusters) Names() []string {
	names := make([]string, 0, len(c.sources))
	for name := range c.sources {
		names = append(names, name)
	}
	sort.Strings(names)
	return names
}

// Connect returns a client for the target and proves that the API server it
// reaches is the one the run began with. The proof is made on every call: the
// kubeconfig may have been swapped since the last activity.
func (c *Clusters) Connect(ctx context.Context, t Target) (*Client, error) {
	client, err := c.client(t.Cluster)
	if err != nil {
		return nil, err
	}
	if t.UID == "" {
		return nil, finding.Finding{
			Object: fmt.Sprintf("cluster %q", t.Cluster), Expected: "the UID of its namespace kube-system in the request", Found: "none",
			Why: "without it a swapped kubeconfig would not be noticed", Next: "begin the run with " + IdentifyActivity,
		}.Error(finding.Stop)
	}
	if err := client.Verify(ctx, t); err != nil {
		return nil, err
	}
	return client, nil
}

// IdentifyRequest names the cluster whose identity a run records first.
type IdentifyRequest struct {
	Cluster string `json:"cluster"`
}

// IdentifyResult is the identity of an API server.
type IdentifyResult struct {
	// UID is that of namespace kube-system; it becomes Target.UID.
	UID     string `json:"uid"`
	Version string `json:"version"`
}

// Identify is the activity kube.Identify.
func (c *Clusters) Identify(ctx context.Context, r IdentifyRequest) (IdentifyResult, error) {
	client, err := c.client(r.Cluster)
	if err != nil {
		return IdentifyResult{}, err
	}
	uid, err := client.identity(ctx)
	if err != nil {
		return IdentifyResult{}, err
	}
	version, err := client.Typed.Discovery().ServerVersion()
	if err != nil {
		return IdentifyResult{}, Wrap(err, fmt.Sprintf("version of the API server of cluster %q", r.Cluster))
	}
	return IdentifyResult{UID: uid, Version: version.GitVersion}, nil
}

// client returns the cached client of a name unless its kubeconfig changed.
func (c *Clusters) client(name string) (*Client, error) {
	src, ok := c.sources[name]
	if !ok {
		return nil, finding.Finding{
			Object:   fmt.Sprintf("cluster %q", name),
			Expected: "one of " + strings.Join(c.Names(), ", "),
			Found:    "a name that this worker's cluster map does not hold",
			Next:     "correct the plan's cluster, or add the name to REFIT_CLUSTERS of the worker that polls cluster/" + name,
		}.Error(finding.Stop)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	now, err := src.stamp()
	if err != nil {
		return nil, configError(name, src, err)
	}
	if hit, ok := c.clients[name]; ok && hit.stamp == now {
		return hit.client, nil
	}
	config, err := src.load()
	if err != nil {
		return nil, configError(name, src, err)
	}
	client, err := NewClient(config)
	if err != nil {
		return nil, configError(name, src, err)
	}
	client.Cluster, client.source, client.inside = name, src, src.path == ""
	c.clients[name] = cached{stamp: now, client: client}
	return client, nil
}

func configError(name string, src source, err error) error {
	from := InCluster
	if src.path != "" {
		from = fmt.Sprintf("context %q of %s", src.context, src.path)
	}
	return finding.Finding{
		Object:   fmt.Sprintf("cluster %q", name),
		Expected: "a usable configuration from " + from,
		Found:    err.Error(),
		Next:     "correct REFIT_CLUSTERS or the kubeconfig on the worker, then retry",
	}.Error(finding.Stop)
}

func (s source) stamp() (stamp, error) {
	if s.path == "" {
		return stamp{}, nil
	}
	info, err := os.Stat(s.path)
	if err != nil {
		return stamp{}, err
	}
	return stamp{modified: info.ModTime(), size: info.Size()}, nil
}

// load reads the configuration of exactly the named context.
func (s source) load() (*rest.Config, error) {
	if s.path == "" {
		return rest.InClusterConfig()
	}
	config, err := s.kubeconfig()
	if err != nil {
		return nil, err
	}
	return clientcmd.NewNonInteractiveClientConfig(*config, s.context, &clientcmd.ConfigOverrides{}, nil).ClientConfig()
}

// kubeconfig is the file reduced to the named context, which becomes its
// current one, with every path resolved.
func (s source) kubeconfig() (*clientcmdapi.Config, error) {
	config, err := clientcmd.LoadFromFile(s.path)
	if err != nil {
		return nil, err
	}
	if _, ok := config.Contexts[s.context]; !ok {
		return nil, fmt.Errorf("no context %q in %s", s.context, s.path)
	}
	if err := clientcmd.ResolveLocalPaths(config); err != nil {
		return nil, err
	}
	config.CurrentContext = s.context
	if err := clientcmdapi.MinifyConfig(config); err != nil {
		return nil, err
	}
	return config, nil
}

// Verify compares the API server's identity with the target's.
func (c *Client) Verify(ctx context.Context, t Target) error {
	uid, err := c.identity(ctx)
	if err != nil {
		return err
	}
	if uid != t.UID {
		return finding.Finding{
			Object:   fmt.Sprintf("cluster %q", t.Cluster),
			Expected: "namespace kube-system with UID " + t.UID + ", as this run recorded it",
			Found:    "UID " + uid + " at " + c.Config.Host,
			Why:      "the name now leads to another cluster; anything written would change the wrong one",
			Next:     "give the worker the kubeconfig of the run's cluster again, then retry",
		}.Error(finding.Stop)
	}
	return nil
}

func (c *Client) identity(ctx context.Context) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, identityLimit)
	defer cancel()
	ns, err := c.Typed.CoreV1().Namespaces().Get(ctx, metav1.NamespaceSystem, metav1.GetOptions{})
	if err != nil {
		return "", Wrap(err, fmt.Sprintf("identity of cluster %q (namespace kube-system)", c.Cluster))
	}
	return string(ns.UID), nil
}
