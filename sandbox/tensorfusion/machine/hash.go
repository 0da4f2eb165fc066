package machine

import (
	"encoding/json"
	"fmt"
	"hash/fnv"
	"sort"

	corev1 "k8s.io/api/core/v1"
)

// hash is FNV-1a of 64 bits over JSON (rule 1).
func hash(v any) (string, error) {
	data, err := json.Marshal(v)
	if err != nil {
		return "", fmt.Errorf("hash: %w", err)
	}
	sum := fnv.New64a()
	sum.Write(data)
	return fmt.Sprintf("%016x", sum.Sum64()), nil
}

func sortVolumes(volumes []corev1.Volume) {
	sort.Slice(volumes, func(i, j int) bool { return volumes[i].Name < volumes[j].Name })
}

// hypervisorInput is what both hypervisor hashes are taken over. Fields that a
// version does not hash stay empty, so that H == Hn where nothing tells them
// apart (rule 2).
type hypervisorInput struct {
	Spec        corev1.PodSpec    `json:"spec"`
	Composition string            `json:"composition"`
	Revisions   map[string]string `json:"revisions,omitempty"`
	Revision    string            `json:"revision,omitempty"`
	Default     string            `json:"default,omitempty"`
	Rules       []IsolationRule   `json:"rules,omitempty"`
	Mode        string            `json:"mode,omitempty"`
}

func (p Process) hypervisorInput(pool *PoolSpec) (hypervisorInput, error) {
	spec, err := p.composeHypervisor(pool, nil)
	return hypervisorInput{Spec: spec, Composition: p.Version.composition()}, err
}

// poolHash is H under an isolation policy.
func (p Process) poolHash(pool *Pool, policy string) (string, error) {
	input, err := p.hypervisorInput(&pool.Spec)
	if err != nil {
		return "", err
	}
	if p.Version.batchesProvider() {
		input.Revisions = revisions(pool)
	}
	if p.Version.poolIsolation() && policy != DynamicPolicy {
		input.Default = "soft"
		if config := pool.Spec.NodeManagerConfig; config != nil {
			if config.DefaultIsolationMode != "" {
				input.Default = config.DefaultIsolationMode
			}
			input.Rules = config.IsolationModeRules
		}
	}
	return hash(input)
}

// effectivePolicy is the policy that H is taken under: only 2.17 has one.
func (p Process) effectivePolicy() string {
	if p.Version.hasIsolationPolicy() {
		return p.policy()
	}
	return StaticPolicy
}

// PoolHash is H, what the pool records in componentStatus.hypervisor.
func (p Process) PoolHash(pool *Pool) (string, error) { return p.poolHash(pool, p.effectivePolicy()) }

// NodeHash is Hn, the label of a hypervisor pod on a node of that isolation
// mode. The policy is no part of it.
func (p Process) NodeHash(pool *Pool, mode string) (string, error) {
	input, err := p.hypervisorInput(&pool.Spec)
	if err != nil {
		return "", err
	}
	if p.Version.batchesProvider() {
		input.Revision = revisions(pool)[vendorKey(pool.Spec.vendor())]
	}
	if p.Version.poolIsolation() {
		input.Mode = mode
	}
	return hash(input)
}

// WorkerHash is W (rule 3).
func WorkerHash(pool *PoolSpec) (string, error) {
	var config *WorkerConfig
	if pool.ComponentConfig != nil {
		config = pool.ComponentConfig.Worker
	}
	return hash(map[string]any{"worker": config, "port": pool.HypervisorPort()})
}

// WorkloadHash is hash(W, workload.spec): the label of worker pods.
func WorkloadHash(pool *PoolSpec, spec json.RawMessage) (string, error) {
	base, err := WorkerHash(pool)
	if err != nil {
		return "", err
	}
	return hash([]any{base, spec})
}

// ClientHash is C (rule 3): the label of client pods.
func ClientHash(pool *PoolSpec) (string, error) {
	var config ClientConfig
	if pool.ComponentConfig != nil && pool.ComponentConfig.Client != nil {
		config = *pool.ComponentConfig.Client
	}
	config.PatchToEmbeddedWorker, config.PatchEmbeddedWorkerToPodField = nil, nil
	return hash(config)
}
