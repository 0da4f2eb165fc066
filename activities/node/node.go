// Package node keeps others off one Kubernetes node while it is worked on, and
// gives it back: cordon, uncordon, and the label by which foreign repair
// automation is told to stand aside. What was there before is remembered on
// the Node itself, in the same write that changes it, so that any later run
// can restore it. It must not know GPUs or TensorFusion.
package node

import (
	"context"
	"encoding/json"
	"fmt"

	"go.temporal.io/sdk/activity"
	"go.temporal.io/sdk/worker"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/refit-run/refit/activities/finding"
	"github.com/refit-run/refit/activities/kube"
	"github.com/refit-run/refit/activities/lease"
)

// Activity names.
const (
	ObserveActivity  = "node.Observe"
	KeepOffActivity  = "node.KeepOff"
	GiveBackActivity = "node.GiveBack"
	CordonActivity   = "node.Cordon"
	UncordonActivity = "node.Uncordon"
)

const (
	// ManagedLabel is read by NVSentinel: "false" keeps it off the node. It
	// takes a set-up for a fault otherwise.
	ManagedLabel = "k8saas.nvidia.com/ManagedByNVSentinel"
	keepOff      = "false"

	// managedBefore remembers the label's value as it was; absent says that
	// there was none.
	managedBefore = "refit.run/managed-by-nvsentinel-before"
	absent        = "<absent>"

	// CordonedBy marks a cordon as ours and names the run, as WORKFLOW/RUN. It
	// stays behind when somebody uncordons by hand, and is then no proof of the
	// next cordon: see ours.
	CordonedBy = "refit.run/cordoned-by"

	// driverUpgrade is the GPU operator's label while it works on the node.
	driverUpgrade     = "nvidia.com/gpu-driver-upgrade-state"
	driverUpgradeDone = "upgrade-done"
)

// Activities of one worker.
type Activities struct{ Clusters *kube.Clusters }

// Register registers every activity under its name.
func (a *Activities) Register(r worker.Registry) {
	for name, fn := range map[string]any{
		ObserveActivity: a.Observe, KeepOffActivity: a.KeepOff, GiveBackActivity: a.GiveBack, CordonActivity: a.Cordon, UncordonActivity: a.Uncordon,
	} {
		r.RegisterActivityWithOptions(fn, activity.RegisterOptions{Name: name})
	}
}

// Request names a node. UID is that of the Node object as the run saw it
// first: another machine under the same name is refused. Empty takes any.
type Request struct {
	Target kube.Target `json:"target"`
	Node   string      `json:"node"`
	UID    string      `json:"uid,omitempty"`
	// Lease is the run's, of this node: one that has lost it writes nothing.
	Lease lease.Held `json:"lease,omitzero"`
}

// Result is the node afterwards.
type Result struct {
	UID string `json:"uid"`
	// BootID is that of the boot which the kubelet has reported last.
	BootID string `json:"bootID,omitempty"`
	// Changed is false when the node was so before.
	Changed bool `json:"changed"`
	// Foreign: the node was cordoned by somebody else, or the label set anew;
	// theirs is left as it is.
	Foreign bool `json:"foreign,omitempty"`
	// Inherited: the node is cordoned by an earlier run of ours.
	Inherited bool `json:"inherited,omitempty"`
	// Before is what was remembered, in words.
	Before string `json:"before,omitempty"`
}

// Observe changes nothing.
func (a *Activities) Observe(ctx context.Context, r Request) (Result, error) {
	return a.change(ctx, r, mustExist, func(*corev1.Node) (Result, map[string]any, error) { return Result{}, nil, nil })
}

// KeepOff sets the label that keeps foreign automation off and remembers what
// it was. A value that an earlier run remembered is kept: that run was ended
// before it could restore it. Where the label is no longer as that run left it,
// somebody has set it since, and theirs is what is remembered.
func (a *Activities) KeepOff(ctx context.Context, r Request) (Result, error) {
	return a.change(ctx, r, mustExist, func(n *corev1.Node) (Result, map[string]any, error) {
		if state := n.Labels[driverUpgrade]; state != "" && state != driverUpgradeDone {
			return Result{}, nil, finding.Finding{
				Object: "Node/" + n.Name, Expected: "no driver upgrade in progress", Found: driverUpgrade + "=" + state,
				Why: "the GPU operator replaces the driver under whatever is done here", Next: "let the driver upgrade finish, then retry",
			}.Error(finding.Stop)
		}
		before, remembered := n.Annotations[managedBefore]
		value, set := n.Labels[ManagedLabel]
		if remembered && value == keepOff {
			return Result{Before: before}, nil, nil
		}
		before = absent
		if set {
			before = value
		}
		return Result{Before: before}, metadata(map[string]any{ManagedLabel: keepOff}, map[string]any{managedBefore: before}), nil
	})
}

// GiveBack restores the label. A value that somebody has set meanwhile stays:
// it is the younger decision. Nothing remembered means nothing to do.
func (a *Activities) GiveBack(ctx context.Context, r Request) (Result, error) {
	return a.change(ctx, r, orGone, func(n *corev1.Node) (Result, map[string]any, error) {
		before, remembered := n.Annotations[managedBefore]
		if !remembered {
			return Result{}, nil, nil
		}
		out := Result{Before: before, Inherited: inherited(ctx, n)}
		var value any
		if before != absent {
			value = before
		}
		if n.Labels[ManagedLabel] != keepOff {
			out.Foreign = true
			return out, metadata(nil, map[string]any{managedBefore: nil}), nil
		}
		return out, metadata(map[string]any{ManagedLabel: value}, map[string]any{managedBefore: nil}), nil
	})
}

// Cordon makes the node unschedulable. One that somebody else has cordoned
// stays theirs.
func (a *Activities) Cordon(ctx context.Context, r Request) (Result, error) {
	return a.change(ctx, r, mustExist, func(n *corev1.Node) (Result, map[string]any, error) {
		switch {
		case n.Spec.Unschedulable && ours(n):
			return Result{Inherited: inherited(ctx, n)}, nil, nil
		case n.Spec.Unschedulable:
			return Result{Foreign: true}, unmark(n), nil
		}
		patch := metadata(nil, map[string]any{CordonedBy: run(ctx)})
		patch["spec"] = map[string]any{"unschedulable": true}
		return Result{}, patch, nil
	})
}

// Uncordon undoes a cordon of ours; any other is left.
func (a *Activities) Uncordon(ctx context.Context, r Request) (Result, error) {
	return a.change(ctx, r, orGone, func(n *corev1.Node) (Result, map[string]any, error) {
		if !ours(n) {
			return Result{Foreign: n.Spec.Unschedulable}, unmark(n), nil
		}
		patch := metadata(nil, map[string]any{CordonedBy: nil})
		patch["spec"] = map[string]any{"unschedulable": nil}
		return Result{}, patch, nil
	})
}

// ours reports whether the node is cordoned, and by us: it is marked, and the
// API server has us as who set spec.unschedulable. The mark alone is no proof.
// Both are written at once, but kubectl uncordon leaves the mark, and whoever
// cordons after that would find their cordon taken for ours. A server that
// does not tell who set the field leaves the mark.
func ours(n *corev1.Node) bool {
	if _, marked := n.Annotations[CordonedBy]; !marked || !n.Spec.Unschedulable {
		return false
	}
	told := false
	for _, e := range n.ManagedFields {
		var set struct {
			Spec map[string]json.RawMessage `json:"f:spec"`
		}
		if e.FieldsV1 == nil || json.Unmarshal(e.FieldsV1.Raw, &set) != nil || set.Spec["f:unschedulable"] == nil {
			continue
		}
		if e.Manager == kube.UserAgent {
			return true
		}
		told = true
	}
	return !told
}

func inherited(ctx context.Context, n *corev1.Node) bool {
	return ours(n) && n.Annotations[CordonedBy] != run(ctx)
}

// KeptOff reports whether foreign automation is told to keep off the node, by
// the run that works on it or by one that was ended before it could give it back.
func KeptOff(n *corev1.Node) bool {
	_, remembered := n.Annotations[managedBefore]
	return remembered
}

// unmark takes a mark off that its cordon has outlived; nil without one.
func unmark(n *corev1.Node) map[string]any {
	if _, marked := n.Annotations[CordonedBy]; !marked {
		return nil
	}
	return metadata(nil, map[string]any{CordonedBy: nil})
}

// run names the run that an activity works for.
func run(ctx context.Context) string {
	if activity.IsActivity(ctx) {
		of := activity.GetInfo(ctx).WorkflowExecution
		return of.ID + "/" + of.RunID
	}
	return kube.UserAgent
}

func metadata(labels, annotations map[string]any) map[string]any {
	m := map[string]any{}
	if labels != nil {
		m["labels"] = labels
	}
	if annotations != nil {
		m["annotations"] = annotations
	}
	return map[string]any{"metadata": m}
}

// conflicts bounds how often a node that others write to is looked at again
// before the activity's own retry takes over.
const conflicts = 5

// What a Node that is not there means: an error, or nothing to do.
const (
	mustExist = false
	orGone    = true
)

// change observes the node and makes one write that holds only for what was
// observed. decide returns no patch when there is nothing to do.
func (a *Activities) change(ctx context.Context, r Request, mayBeGone bool, decide func(*corev1.Node) (Result, map[string]any, error)) (Result, error) {
	what := "Node/" + r.Node
	k, err := a.Clusters.Connect(ctx, r.Target)
	if err != nil {
		return Result{}, err
	}
	nodes := k.Typed.CoreV1().Nodes()
	for try := 1; ; try++ {
		n, err := nodes.Get(ctx, r.Node, metav1.GetOptions{})
		if mayBeGone && apierrors.IsNotFound(err) {
			return Result{}, nil
		}
		if err != nil {
			return Result{}, kube.Wrap(err, what)
		}
		if r.UID != "" && string(n.UID) != r.UID {
			return Result{}, finding.Finding{
				Object: what, Expected: "UID " + r.UID + ", as this run saw it first", Found: "UID " + string(n.UID),
				Why: "another machine has joined under this name", Next: "start again with this machine",
			}.Error(finding.Stop)
		}
		out, patch, err := decide(n)
		if err != nil {
			return Result{}, err
		}
		out.UID, out.BootID = string(n.UID), n.Status.NodeInfo.BootID
		if patch == nil {
			return out, nil
		}
		m := patch["metadata"].(map[string]any)
		m["uid"], m["resourceVersion"] = n.UID, n.ResourceVersion
		data, err := json.Marshal(patch)
		if err != nil {
			return Result{}, fmt.Errorf("%s: %w", what, err)
		}
		if err := r.Lease.Check(ctx, k.Typed); err != nil {
			return Result{}, err
		}
		_, err = nodes.Patch(ctx, r.Node, types.MergePatchType, data, metav1.PatchOptions{FieldManager: kube.UserAgent})
		if err == nil {
			out.Changed = true
			return out, nil
		}
		if !apierrors.IsConflict(err) || try == conflicts {
			return Result{}, kube.Wrap(err, "change of "+what)
		}
	}
}
