package tensorfusion

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/refit-run/refit/activities/finding"
	"github.com/refit-run/refit/activities/helm"
	"github.com/refit-run/refit/activities/kube"
)

// annotationRestarted on the pod template says for which intent the controller
// was restarted, so that a second attempt does not restart it again.
const (
	annotationRestarted   = "refit.run/restarted-for"
	annotationRestartedAt = "refit.run/restarted-at-second"
)

// AwaitController waits for the controller's rollout, its neighbours and its
// leader (T09, T10, P06), after a restart when only mounted configuration
// changed (T12), asks for the controller's rights (P05), and compares with the
// snapshot (P12, P13).
func (a *Activities) AwaitController(ctx context.Context, req ControllerRequest) (ControllerResult, error) {
	defer pulse(ctx, nil)()
	c, err := a.connect(ctx, req.Scope)
	if err != nil {
		return ControllerResult{}, err
	}
	r, err := a.resolve(ctx, c, req.Scope, req.Intent)
	if err != nil {
		return ControllerResult{}, err
	}
	out, err := awaitController(ctx, c, req, r)
	return out, r.masker.Error(inRow(err, "T09"))
}

func awaitController(ctx context.Context, c *kube.Client, req ControllerRequest, r *resolved) (ControllerResult, error) {
	var out ControllerResult
	start := time.Now()
	target, err := r.targetSide()
	if err != nil {
		return out, err
	}
	namespace := req.Release.Namespace
	d, err := controllerDeployment(ctx, c, namespace)
	if err != nil {
		return out, err
	}
	if out.Restarted, err = restartIfNeeded(ctx, c, req, r, d); err != nil {
		return out, err
	}
	if err := awaitRollout(ctx, c, req, r, d); err != nil {
		return out, err
	}
	if err := awaitReturn(ctx, c, req); err != nil {
		return out, err
	}
	err = wait.PollUntilContextTimeout(ctx, askAgain, time.Until(start.Add(req.Limit)), true, func(context.Context) (bool, error) {
		o, err := observeController(ctx, c, req, r, target)
		if err != nil {
			return false, err
		}
		out.Image, out.Replicas, out.Leader = o.Controller.Image, int(o.Controller.Replicas), o.Controller.Leader
		out.Checks, out.Pools = runChecks(o, StageController, nil), o.poolSummaries()
		out.Objects, out.Told = o.Objects, toldOf(o.Neighbours)
		beat(ctx, "checking the controller and its neighbours")
		return !waiting(out.Checks), nil
	})
	maskChecks(r, out.Checks)
	if wait.Interrupted(err) && ctx.Err() == nil { // the checks say what is still open
		err = nil
	}
	return out, err
}

// askAgain is the time between two questions that no watch answers, such as
// whether the webhook admits a pod.
const askAgain = 2 * time.Second

// soon are rows that settle by themselves after the Helm step, whatever their
// class: a new leader reads the allocations from the pods one after another
// (P13), and the API server learns of changed roles a moment later (P05).
var soon = []string{"P05", "P13"}

// waiting reports that nothing is open but what may settle by itself.
func waiting(checks []Check) bool {
	open := slices.DeleteFunc(slices.Clone(checks), func(c Check) bool { return c.OK })
	return len(open) > 0 && !slices.ContainsFunc(open, func(c Check) bool { return c.Class != finding.Wait && !slices.Contains(soon, c.Row) })
}

// observeController reads what the checks of the controller stage judge.
func observeController(ctx context.Context, c *kube.Client, req ControllerRequest, r *resolved, target Side) (*Observation, error) {
	o, err := observe(ctx, c, req.Scope, Goal{PodName: podPrefix})
	if err != nil {
		return nil, err
	}
	// Hypervisors are still the old line's pods: compare whichever is there.
	o.Target, o.Intent, o.Before = target, r.intent, req.Snapshot
	o.Controller.WebhookTrouble = webhookTrouble(ctx, c, namesOf(r.rendered.Objects, "MutatingWebhookConfiguration"), firstPool(o))
	deployed, err := helm.Current(ctx, c, req.Release.Namespace, req.Release.Name)
	if err != nil {
		return nil, err
	}
	o.Values.Live = r.differing(deployed.Config)
	objects, err := releaseObjects(c, deployed.Manifest, req.Release.Namespace)
	if err != nil {
		return nil, err
	}
	if o.Objects, err = digests(ctx, c, objects); err != nil {
		return nil, err
	}
	if o.Neighbours, err = neighbours(ctx, c, req, r, deployed, o.Objects); err != nil {
		return nil, err
	}
	o.Lacking, err = lacking(ctx, c, req.Release.Namespace, target.CRDs)
	return o, err
}

// returnLimit is how long a controller that came back may take to look at
// every pool again.
const returnLimit = 30 * time.Second

// awaitReturn waits until the pools show the hypervisor template of before the
// change that is being undone. Not seeing it is no error: then every host is
// made anew.
func awaitReturn(ctx context.Context, c *kube.Client, req ControllerRequest) error {
	if len(req.Return) == 0 {
		return nil
	}
	err := c.Await(ctx, kube.Wait{What: "former template in every GPUPool", Limit: returnLimit, Heartbeat: beater(ctx)},
		func(objects kube.Objects) (bool, string, error) {
			pools, err := decodeAll[FusionPool](objects[0])
			if err != nil {
				return false, "", err
			}
			for _, before := range req.Return {
				for _, p := range pools {
					if p.Name == before.Name && p.Status.Components.Hypervisor != before.Hash {
						return false, "GPUPool/" + p.Name + " shows another template", nil
					}
				}
			}
			return true, "", nil
		}, kube.Selection{Resource: poolsGVR})
	if _, _, timeout := finding.Of(err); err != nil && (!timeout || ctx.Err() != nil) {
		return err
	}
	return nil
}

// awaitRollout waits until the Deployment, the release's StatefulSets and a
// leader of the new pods are there.
func awaitRollout(ctx context.Context, c *kube.Client, req ControllerRequest, r *resolved, d *appsv1.Deployment) error {
	namespace := req.Release.Namespace
	selector := labels.SelectorFromSet(d.Spec.Selector.MatchLabels).String()
	sets := map[string]bool{}
	for _, u := range r.rendered.Objects {
		if u.GetKind() == "StatefulSet" {
			sets[orNamespace(u.GetNamespace(), namespace)+"/"+u.GetName()] = true
		}
	}
	return c.Await(ctx, kube.Wait{
		What: "rollout of Deployment/" + namespace + "/" + d.Name, Limit: req.Limit, Heartbeat: beater(ctx),
		Next: "look at the controller pods: events, log, image pull; GreptimeDB must answer when they start",
	}, func(objects kube.Objects) (bool, string, error) {
		found, err := rolloutTrouble(objects, sets)
		return found == "", found, err
	},
		kube.Selection{Resource: deploymentsGVR, Namespace: namespace, Name: d.Name},
		kube.Selection{Resource: podsGVR, Namespace: namespace, Labels: selector},
		kube.Selection{Resource: schema.GroupVersionResource{Group: "coordination.k8s.io", Version: "v1", Resource: "leases"}, Namespace: namespace, Name: leaderLease},
		kube.Selection{Resource: statefulSetsGVR},
	)
}

// rolloutTrouble looks at Deployment, pods, lease and StatefulSets, in the
// order of awaitRollout's selections.
func rolloutTrouble(objects kube.Objects, sets map[string]bool) (string, error) {
	if len(objects[0]) == 0 {
		return "the Deployment is gone", nil
	}
	d, err := decode[appsv1.Deployment](objects[0][0])
	if err != nil {
		return "", err
	}
	if why := rolloutOf(d.Generation, d.Status.ObservedGeneration, desired(d.Spec.Replicas), d.Status.UpdatedReplicas, d.Status.AvailableReplicas, d.Status.Replicas); why != "" {
		return why, nil
	}
	var pods []corev1.Pod
	for _, u := range objects[1] {
		p, err := decode[corev1.Pod](u)
		if err != nil {
			return "", err
		}
		pods = append(pods, p)
	}
	var lease *coordinationv1.Lease
	if len(objects[2]) > 0 {
		l, err := decode[coordinationv1.Lease](objects[2][0])
		if err != nil {
			return "", err
		}
		lease = &l
	}
	if _, trouble := leaderOf(lease, pods, now()); trouble != "" {
		return "no leader yet: " + trouble, nil
	}
	for _, u := range objects[3] {
		if !sets[u.GetNamespace()+"/"+u.GetName()] {
			continue
		}
		if why, err := statefulSetTrouble(u); why != "" || err != nil {
			return fmt.Sprintf("StatefulSet/%s/%s: %s", u.GetNamespace(), u.GetName(), why), err
		}
	}
	return "", nil
}

// restartIfNeeded restarts the controller when a ConfigMap that it mounts
// changed and its pod template did not: subPath mounts never follow (T12).
func restartIfNeeded(ctx context.Context, c *kube.Client, req ControllerRequest, r *resolved, d *appsv1.Deployment) (bool, error) {
	former, err := formerManifest(ctx, c, req.Scope)
	if err != nil || former == nil {
		return false, err
	}
	if !onlyConfigChanged(former, r.rendered.Objects) {
		return false, nil
	}
	if d.Spec.Template.Annotations[annotationRestarted] == r.intent.Digest {
		return true, nil
	}
	patch, err := json.Marshal(map[string]any{
		"metadata": map[string]any{"resourceVersion": d.ResourceVersion},
		"spec": map[string]any{"template": map[string]any{"metadata": map[string]any{"annotations": map[string]string{
			annotationRestarted:   r.intent.Digest,
			annotationRestartedAt: time.Now().UTC().Format(time.RFC3339),
		}}}},
	})
	if err != nil {
		return false, err
	}
	_, err = c.Typed.AppsV1().Deployments(d.Namespace).Patch(ctx, d.Name, types.StrategicMergePatchType, patch, metav1.PatchOptions{FieldManager: fieldManager})
	return err == nil, inRow(kube.Wrap(err, "restart of Deployment/"+d.Namespace+"/"+d.Name), "T12")
}

// formerManifest is the manifest before the deployed one, nil when there is none.
func formerManifest(ctx context.Context, c *kube.Client, s Scope) ([]*unstructured.Unstructured, error) {
	history, err := helm.Releases(ctx, c, s.Release.Namespace, s.Release.Name)
	if err != nil {
		return nil, err
	}
	revision := 0
	for _, i := range history {
		if i.Status == "superseded" {
			revision = i.Revision
		}
	}
	if revision == 0 {
		return nil, nil
	}
	stored, err := helm.Stored(ctx, c, s.Release.Namespace, s.Release.Name, revision)
	if err != nil {
		return nil, err
	}
	return helm.Objects(stored.Manifest)
}

// onlyConfigChanged compares the controller's template and the ConfigMaps that
// it mounts between two manifests.
func onlyConfigChanged(before, after []*unstructured.Unstructured) bool {
	old, found := operatorOf(before)
	present, known := operatorOf(after)
	if !found || !known {
		return false
	}
	was, _, _ := unstructured.NestedMap(old.Object, "spec", "template")
	is, _, _ := unstructured.NestedMap(present.Object, "spec", "template")
	if !sameObject(&unstructured.Unstructured{Object: was}, &unstructured.Unstructured{Object: is}) {
		return false
	}
	pod, err := podSpec(present)
	if err != nil {
		return false
	}
	for _, v := range pod.Volumes {
		if v.ConfigMap == nil {
			continue
		}
		a, b := configData(before, v.ConfigMap.Name), configData(after, v.ConfigMap.Name)
		if !sameObject(&unstructured.Unstructured{Object: a}, &unstructured.Unstructured{Object: b}) {
			return true
		}
	}
	return false
}

func operatorOf(objects []*unstructured.Unstructured) (*unstructured.Unstructured, bool) {
	for _, u := range objects {
		if u.GetKind() == "Deployment" && u.GetLabels()[labelComponent] == componentOperator {
			return u, true
		}
	}
	return nil, false
}

func configData(objects []*unstructured.Unstructured, name string) map[string]any {
	for _, u := range objects {
		if u.GetKind() == "ConfigMap" && u.GetName() == name {
			data, _, _ := unstructured.NestedMap(u.Object, "data")
			return data
		}
	}
	return nil
}

func orNamespace(namespace, fallback string) string {
	if namespace == "" {
		return fallback
	}
	return namespace
}
