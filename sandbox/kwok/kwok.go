// Package kwok runs the fake kubelet: nodes and pods that exist only in the
// API server, become Ready, complete, crash and go away as their annotations
// say. It must not know TensorFusion beyond the label of hypervisor pods.
package kwok

import (
	"context"
	_ "embed"
	"fmt"
	"net/http"
	"strings"
	"time"

	"sigs.k8s.io/yaml"

	"github.com/refit-run/refit/sandbox/folder"
	"github.com/refit-run/refit/sandbox/process"
)

// Annotations that change what the fake kubelet does with one object.
const (
	// NotReady on a Node makes it NotReady for as long as it is there.
	NotReady = "refit.sandbox/not-ready"
	// ReadyAfter on a Pod delays readiness (a Go duration).
	ReadyAfter = "refit.sandbox/ready-after"
	// Hold on a Pod keeps it Pending.
	Hold = "refit.sandbox/hold"
	// CrashLoop on a Pod restarts its containers for ever, one crash per its
	// value (a Go duration).
	CrashLoop = "refit.sandbox/crash-loop"
)

// NodeAnnotation marks the nodes that the fake kubelet manages.
const NodeAnnotation = "kwok.x-k8s.io/node"

//go:embed stages.yaml
var stages string

const readyStage = "pod-ready"

// configuration is kwok's own; left out, the parallelisms are 0 and nothing
// is simulated although the process reports to be healthy.
const configuration = `apiVersion: config.kwok.x-k8s.io/v1alpha1
kind: KwokConfiguration
options:
  enableDebuggingHandlers: true
  nodeLeaseParallelism: 8
  podPlayStageParallelism: 16
  nodePlayStageParallelism: 8
  podsOnNodeSyncParallelism: 8
  enablePodsOnNodeSyncStreamWatch: true
  serverAddress: 127.0.0.1:%[1]d
  nodePort: %[1]d
  nodeIP: 127.0.0.1
  cidr: 10.0.0.0/14
  manageAllNodes: false
  manageNodesWithAnnotationSelector: kwok.x-k8s.io/node=fake
  nodeLeaseDurationSeconds: 40
  enableCRDs: [PortForward, ClusterPortForward]
---
`

// Kubelet is the running fake kubelet.
type Kubelet struct {
	*process.Keeper
	port int
}

// New writes the configuration. readyAfter is how long hypervisor pods take
// to become Ready when their annotation does not say otherwise.
func New(f folder.Folder, ports folder.Ports, kubeconfig, program string, readyAfter time.Duration) (*Kubelet, error) {
	text, err := render(ports.Kwok, readyAfter)
	if err != nil {
		return nil, err
	}
	path := f.Path("kwok.yaml")
	if err := folder.WriteFile(path, []byte(text), 0o600); err != nil {
		return nil, err
	}
	return &Kubelet{port: ports.Kwok, Keeper: process.Keep(process.Spec{
		Name: "kwok", Path: program, Args: []string{"--config", path, "--kubeconfig", kubeconfig},
		Dir: f.Root, Log: f.Path("kwok.log"), Grace: 3 * time.Second,
	})}, nil
}

// render adds to the stages the one of hypervisor pods: the pod-ready stage
// with the default delay, so that both make a pod Ready in the same way.
func render(port int, readyAfter time.Duration) (string, error) {
	var b strings.Builder
	fmt.Fprintf(&b, configuration, port)
	b.WriteString(stages)
	for _, doc := range strings.Split(stages, "\n---\n") {
		var stage map[string]any
		if err := yaml.Unmarshal([]byte(doc), &stage); err != nil {
			return "", fmt.Errorf("stages: %w", err)
		}
		if stage["metadata"].(map[string]any)["name"] != readyStage {
			continue
		}
		stage["metadata"].(map[string]any)["name"] = "hypervisor-ready"
		spec := stage["spec"].(map[string]any)
		for _, e := range spec["selector"].(map[string]any)["matchExpressions"].([]any) {
			if m := e.(map[string]any); strings.Contains(m["key"].(string), "tensor-fusion.ai/component") {
				m["operator"] = "In"
			}
		}
		spec["delay"].(map[string]any)["durationMilliseconds"] = readyAfter.Milliseconds()
		out, err := yaml.Marshal(stage)
		if err != nil {
			return "", err
		}
		b.WriteString("---\n")
		b.Write(out)
		return b.String(), nil
	}
	return "", fmt.Errorf("stages: expected one called %s, found none", readyStage)
}

// Ready waits until the kubelet's server answers.
func (k *Kubelet) Ready(ctx context.Context) error {
	url := fmt.Sprintf("http://%s/healthz", folder.Address(k.port))
	return k.Keeper.Ready(ctx, 100*time.Millisecond, func(ctx context.Context) error {
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
		if err != nil {
			return err
		}
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			return err
		}
		_ = resp.Body.Close()
		if resp.StatusCode != http.StatusOK {
			return fmt.Errorf("GET %s: expected 200, found %s", url, resp.Status)
		}
		return nil
	})
}
