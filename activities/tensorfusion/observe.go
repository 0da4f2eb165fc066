package tensorfusion

import (
	"context"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"k8s.io/apimachinery/pkg/labels"

	"github.com/refit-run/refit/activities/finding"
	"github.com/refit-run/refit/activities/kube"
)

// observe reads the live installation: everything that several activities
// judge. What only one of them needs (images, database, rights) it adds itself.
func observe(ctx context.Context, c *kube.Client, s Scope, goal Goal) (*Observation, error) {
	o := &Observation{Scope: s, Goal: goal, CRDs: map[string]*apiextensionsv1.CustomResourceDefinition{}}
	crds, err := list[apiextensionsv1.CustomResourceDefinition](ctx, c, crdsGVR, "", "")
	if err != nil {
		return nil, kube.Wrap(err, "CustomResourceDefinitions")
	}
	for i := range crds {
		if crds[i].Spec.Group == apiGroup {
			o.CRDs[crds[i].Name] = &crds[i]
		}
	}
	if o.Clusters, err = readClusters(ctx, c); err != nil {
		return nil, err
	}
	for _, step := range []struct {
		what string
		read func() error
	}{
		{"GPUPools", func() (err error) { o.Pools, err = list[FusionPool](ctx, c, poolsGVR, "", ""); return }},
		{"GPU hosts", func() (err error) { o.Hosts, err = readHosts(ctx, c, s.Release.Namespace, ""); return }},
		{"Nodes", func() error { return o.readNodes(ctx, c) }},
		{"TensorFusionWorkloads", func() (err error) {
			o.Workloads, err = list[FusionWorkload](ctx, c, workloadsGVR, "", "")
			return
		}},
		{"worker pods", func() (err error) {
			o.Workers, err = list[corev1.Pod](ctx, c, podsGVR, "", workerSelector)
			return
		}},
		{"client pods", func() (err error) {
			o.Clients, err = list[corev1.Pod](ctx, c, podsGVR, "", clientPods)
			return
		}},
		{"ProviderConfigs", func() (err error) {
			o.Providers, err = listIfServed[FusionProvider](ctx, c, providerConfigsGVR)
			return
		}},
		{"controller", func() error { return o.readController(ctx, c) }},
	} {
		if err := step.read(); err != nil {
			return nil, kube.Wrap(err, step.what)
		}
	}
	return o, nil
}

func (o *Observation) readNodes(ctx context.Context, c *kube.Client) error {
	nodes, err := list[corev1.Node](ctx, c, nodesGVR, "", "")
	if err != nil {
		return err
	}
	o.Nodes = make(map[string]corev1.Node, len(nodes))
	for _, n := range nodes {
		o.Nodes[n.Name] = n
	}
	return nil
}

// readController reads the Deployment labelled as the operator, its leader and
// the leader's allocations.
func (o *Observation) readController(ctx context.Context, c *kube.Client) error {
	d, err := controllerDeployment(ctx, c, o.Scope.Release.Namespace)
	if err != nil {
		return err
	}
	image, policy := controllerOf(d.Spec.Template.Spec)
	o.Controller = Controller{
		Deployment: "Deployment/" + d.Namespace + "/" + d.Name, Image: image,
		Replicas: desired(d.Spec.Replicas), Ready: d.Status.ReadyReplicas, Updated: d.Status.UpdatedReplicas,
		RolledOut: rolloutOf(d.Generation, d.Status.ObservedGeneration, desired(d.Spec.Replicas), d.Status.UpdatedReplicas, d.Status.AvailableReplicas, d.Status.Replicas),
	}
	o.Source = Side{ControllerImage: image, Controller: imageVersion(image), Replicas: o.Controller.Replicas, IsolationPolicy: policy}
	selector := labels.Everything().String()
	if d.Spec.Selector != nil {
		selector = labels.SelectorFromSet(d.Spec.Selector.MatchLabels).String()
	}
	pods, err := list[corev1.Pod](ctx, c, podsGVR, d.Namespace, selector)
	if err != nil {
		return err
	}
	lease, err := readLease(ctx, c, d.Namespace)
	if err != nil {
		return err
	}
	o.Controller.Leader, o.Controller.LeaderTrouble = leaderOf(lease, pods, now())
	if o.Controller.LeaderTrouble == "" {
		o.Allocated = allocations(ctx, c, d.Namespace, o.Controller.Leader)
	}
	return nil
}

// policies of every pool entry, in the order of the clusters' lists: what an
// earlier run's hold wrote down, where it still holds.
func (o *Observation) policies() []PoolPolicy {
	var out []PoolPolicy
	for _, c := range o.Clusters {
		recorded := recordedPolicies(c)
		for _, e := range c.Spec.GPUPools {
			p := policyOf(c.Name, e)
			if was, ok := recorded[p.Pool]; ok && p.held() {
				p = was
			}
			out = append(out, p)
		}
	}
	return out
}

// poolSummaries for the plan.
func (o *Observation) poolSummaries() []Pool {
	var out []Pool
	for _, c := range o.Clusters {
		for _, e := range c.Spec.GPUPools {
			name := poolName(c.Name, e.Name)
			out = append(out, Pool{Name: name, Entry: e.Name, Nodes: o.nodesIn(name)})
			for _, p := range o.Pools {
				if s := p.Status.Components; p.Name == name {
					last := &out[len(out)-1]
					last.Hash, last.Settled = s.Hypervisor, s.HypervisorSynced && s.HypervisorProgress == 100
				}
			}
		}
	}
	return out
}

// allOnGoal reports that every host meets the Goal now.
func (o *Observation) allOnGoal() bool {
	for _, h := range o.Hosts {
		if h.unproven(o.Goal, nil) != "" {
			return false
		}
	}
	return true
}

// rolloutOf says why a workload's rollout is not complete, "" when it is.
func rolloutOf(generation, observed int64, want, updated, available, total int32) string {
	switch {
	case observed < generation:
		return "its controller has not seen the change yet"
	case updated < want:
		return fmt.Sprintf("%d of %d replicas updated", updated, want)
	case total > updated:
		return fmt.Sprintf("%d old replicas still there", total-updated)
	case available < want:
		return fmt.Sprintf("%d of %d replicas available", available, want)
	}
	return ""
}

func desired(replicas *int32) int32 {
	if replicas == nil {
		return 1
	}
	return *replicas
}

func noController(namespace string, n int) error {
	return finding.Finding{
		Object:   "Deployment in namespace " + namespace + " with " + labelComponent + "=" + componentOperator,
		Expected: "exactly one", Found: fmt.Sprint(n),
		Next: "check the release's namespace in the plan; builds with another label domain are not supported",
	}.Error(finding.Stop)
}
