package tensorfusion

import (
	"context"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/refit-run/refit/activities/finding"
	"github.com/refit-run/refit/activities/kube"
)

// SetPolicy sets the update policy once the run's rollouts are over: back to
// what it was, sealed, or off. A policy that lets the controller replace
// hypervisors is only set when every host is on the Goal: with one wrong
// argument left the controller would count it as updated and delete the pod
// later, outside any batch (rule 24).
func (a *Activities) SetPolicy(ctx context.Context, req PolicyRequest) (PolicyResult, error) {
	defer pulse(ctx, nil)()
	c, err := a.connect(ctx, req.Scope)
	if err != nil {
		return PolicyResult{}, err
	}
	out, err := setPolicyOrHold(ctx, c, req)
	return out, inRow(err, "T13")
}

// setPolicyOrHold leaves no flag on behind an error.
func setPolicyOrHold(ctx context.Context, c *kube.Client, req PolicyRequest) (PolicyResult, error) {
	out, err := setPolicy(ctx, c, req)
	if err != nil {
		err = holdBack(ctx, c, req, err)
	}
	return out, err
}

// holdBackLimit is how long switching the flags off again may take; it is not
// cut short by an abort, which is when it matters most.
const holdBackLimit = 30 * time.Second

// holdBack switches the flags off after a failure: an attempt before this one,
// or this one up to its failure, may have switched them on, and a run that
// parks must not leave the controller rolling by itself.
func holdBack(ctx context.Context, c *kube.Client, req PolicyRequest, cause error) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), holdBackLimit)
	defer cancel()
	if _, err := hold(ctx, c, HoldRequest{Scope: req.Scope, Limit: holdBackLimit, Assert: true}); err != nil {
		f, class, ok := finding.Of(cause)
		if !ok {
			return cause
		}
		f.Why = fmt.Sprintf("auto update may still be on, switching it off again failed: %v", err)
		return f.Error(class)
	}
	return cause
}

func setPolicy(ctx context.Context, c *kube.Client, req PolicyRequest) (PolicyResult, error) {
	var out PolicyResult
	before := map[string]PoolPolicy{}
	for _, p := range req.Before {
		before[p.Pool] = p
	}
	want := map[string]PoolPolicy{}
	clusters, err := readClusters(ctx, c)
	if err != nil {
		return out, err
	}
	for _, fc := range clusters {
		for _, e := range fc.Spec.GPUPools {
			live := policyOf(fc.Name, e)
			p, err := req.wanted(live, before)
			if err != nil {
				return out, err
			}
			want[live.Pool] = p
		}
	}
	hosts, err := readHosts(ctx, c, req.Release.Namespace, "")
	if err != nil {
		return out, kube.Wrap(err, "GPU hosts")
	}
	if err := mayRoll(req.Goal, hosts, want); err != nil {
		return out, err
	}
	if err := mayRollOthers(ctx, c, want); err != nil {
		return out, err
	}
	uids := map[string]string{}
	for _, h := range hosts {
		if p := h.pod(req.Goal); p != nil {
			uids[h.name] = string(p.UID)
		}
	}
	if err := patchClusters(ctx, c, func(b *clusterPatch) error {
		for i, e := range b.cluster.Spec.GPUPools {
			if p, ok := want[poolName(b.cluster.Name, e.Name)]; ok {
				b.set(i, p)
			}
		}
		b.annotate(annotationPolicyBefore, "")
		b.annotate(annotationRollingWorkers, "")
		return nil
	}); err != nil {
		return out, err
	}
	if err := awaitPolicy(ctx, c, req, want, uids); err != nil {
		return out, err
	}
	clusters, err = readClusters(ctx, c)
	if err != nil {
		return out, err
	}
	for _, fc := range clusters {
		for _, e := range fc.Spec.GPUPools {
			out.After = append(out.After, policyOf(fc.Name, e))
		}
	}
	return out, nil
}

// wanted is one pool's policy in the mode that is asked for.
func (r PolicyRequest) wanted(live PoolPolicy, before map[string]PoolPolicy) (PoolPolicy, error) {
	was, known := before[live.Pool]
	if !known { // a pool that came meanwhile stays off
		return live.hold(), nil
	}
	switch r.Mode {
	case PolicyRestore:
		was.Missing = false // a block with three false flags means the same
		return was, nil
	case PolicySeal:
		was.AutoHypervisor = true
		return was, nil
	case PolicyKeepOff:
		out := was.hold()
		return out, nil
	}
	return live, finding.Finding{Object: "request, mode", Expected: PolicyRestore + ", " + PolicySeal + " or " + PolicyKeepOff, Found: r.Mode}.Error(finding.Stop)
}

// mayRoll refuses to switch autoUpdateHypervisor on in a pool with a host that
// is not on the Goal.
func mayRoll(goal Goal, hosts []hostView, want map[string]PoolPolicy) error {
	for _, pool := range sortedKeys(want) {
		if !want[pool].AutoHypervisor {
			continue
		}
		for _, h := range hosts {
			if h.gpuNode.Labels[poolLabel(pool)] != "true" {
				continue
			}
			if why := h.unproven(goal, nil); why != "" {
				return finding.Finding{
					Row: "T14", Object: hostObject(h.name), Expected: "proven before GPUPool/" + pool + " may roll by itself again", Found: why,
					Why:  "the controller would replace it outside our batches, or count it as updated and delete it later",
					Next: "finish the host's rollout and answer retry, or answer skip to keep auto update off",
				}.Error(finding.Stop)
			}
		}
	}
	return nil
}

// mayRollOthers refuses to switch worker or client updates on in a pool with
// workers or clients of another template: the controller would begin with them
// at once, in its own batches, and delete client pods past their budgets (rules
// 10 and 18). Nobody has asked this run for that.
func mayRollOthers(ctx context.Context, c *kube.Client, want map[string]PoolPolicy) error {
	for _, pool := range sortedKeys(want) {
		if want[pool].AutoWorker {
			seen, err := observeWorkers(ctx, c, WorkersRequest{Pool: pool})
			if err != nil {
				return err
			}
			for _, w := range seen.Workloads {
				if w.Stale {
					return unasked("T15", "TensorFusionWorkload/"+w.Namespace+"/"+w.Name, "worker", pool)
				}
			}
		}
		if want[pool].AutoClient {
			pods, err := list[corev1.Pod](ctx, c, podsGVR, "", clientSelector(pool))
			if err != nil {
				return kube.Wrap(err, "client pods of GPUPool/"+pool)
			}
			e := newEviction(c, ClientsRequest{Pool: pool})
			if err := e.refresh(ctx); err != nil {
				return err
			}
			for i := range pods {
				if staleClient(&pods[i], e.hash) {
					return unasked("T16", "Pod/"+pods[i].Namespace+"/"+pods[i].Name, "client", pool)
				}
			}
		}
	}
	return nil
}

func unasked(row, object, component, pool string) error {
	return finding.Finding{
		Row: row, Object: object, Expected: "of its present template before GPUPool/" + pool + " may update its " + component + "s by itself again", Found: "an older one",
		Why:  "the controller would roll the pool's " + component + "s at once, and this run was not asked to",
		Next: "roll them (a rollout of component " + component + "), then answer retry; or answer skip to keep auto update off",
	}.Error(finding.Stop)
}

// awaitPolicy waits until the GPUPools show the policy; when sealing, until
// they say synced. A hypervisor that the controller replaces meanwhile ends
// the wait: the flags go off again.
func awaitPolicy(ctx context.Context, c *kube.Client, req PolicyRequest, want map[string]PoolPolicy, uids map[string]string) error {
	var replaced *finding.Finding
	err := c.Await(ctx, kube.Wait{
		What: "update policy " + req.Mode + " in every GPUPool", Limit: req.Limit, Heartbeat: beater(ctx),
		Next: "check that the controller runs and has a leader",
	}, func(objects kube.Objects) (bool, string, error) {
		var err error
		if replaced, err = touched(objects[1], uids); err != nil {
			return false, "", err
		}
		if replaced != nil {
			return true, replaced.Found, nil
		}
		found, err := poolsShow(objects[0], want)
		if err == nil && found == "" && req.Mode == PolicySeal {
			found, err = poolsSealed(objects[0], want)
		}
		return found == "", found, err
	},
		kube.Selection{Resource: poolsGVR},
		kube.Selection{Resource: podsGVR, Namespace: req.Release.Namespace, Labels: labelComponent + "=" + componentHypervisor})
	if err != nil || replaced == nil {
		return err
	}
	replaced.Next = "the flags are switched off again; look at the controller's log, then answer retry, or skip to keep them off"
	return replaced.Error(finding.Stop)
}

// touched finds a hypervisor whose pod is not the proven one any more.
func touched(pods []metav1.Object, uids map[string]string) (*finding.Finding, error) {
	for _, o := range pods {
		pod, err := decode[corev1.Pod](o)
		if err != nil {
			return nil, err
		}
		node := pod.Spec.NodeName
		if was, known := uids[node]; known && (string(pod.UID) != was || pod.DeletionTimestamp != nil) {
			return &finding.Finding{
				Row: "P12", Object: "hypervisor of " + node, Expected: "the proven pod " + was, Found: "the controller replaces it",
				Why: "with autoUpdateHypervisor true it rolls what it holds to be outdated",
			}, nil
		}
	}
	return nil, nil
}

// poolsSealed says which pool has not walked to 100/synced yet.
func poolsSealed(pools []metav1.Object, want map[string]PoolPolicy) (string, error) {
	for _, u := range pools {
		p, err := decode[FusionPool](u)
		if err != nil {
			return "", err
		}
		s := p.Status.Components
		// An empty pool never writes its progress (rule 11), one that stays off
		// never says synced (rule 9).
		if !want[p.Name].AutoHypervisor || s.HypervisorSynced || p.Status.ReadyNodes+p.Status.NotReadyNodes == 0 {
			continue
		}
		return fmt.Sprintf("GPUPool/%s is at %d %%, not synced", p.Name, s.HypervisorProgress), nil
	}
	return "", nil
}
