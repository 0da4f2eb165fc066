package tensorfusion

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"slices"
	"strings"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/refit-run/refit/activities/helm"
	"github.com/refit-run/refit/activities/kube"
)

// neighbours looks at the other objects that the Helm step touches (T10): those
// that must be ready, those that are not what the release says, and those that
// the release left alone and that have changed nevertheless.
func neighbours(ctx context.Context, c *kube.Client, req ControllerRequest, r *resolved, deployed *helm.Release, now map[string]string) ([]Neighbour, error) {
	out, err := readiness(ctx, c, r, req.Release.Namespace)
	if err != nil || req.FromRevision == 0 || req.FromRevision == deployed.Version {
		return out, err // Helm had nothing to do in this run
	}
	former, err := helm.Stored(ctx, c, req.Release.Namespace, req.Release.Name, req.FromRevision)
	if err != nil {
		return nil, err
	}
	left, err := leftOver(ctx, c, req, r, former, deployed)
	if err != nil {
		return nil, err
	}
	beside, err := changedBeside(ctx, c, req, former, deployed, now)
	return slices.Concat(out, left, beside), err
}

// readiness of what the release renders.
func readiness(ctx context.Context, c *kube.Client, r *resolved, namespace string) ([]Neighbour, error) {
	var out []Neighbour
	for _, u := range r.rendered.Objects {
		n := Neighbour{Object: kube.Name(u)}
		switch u.GetKind() {
		case "StatefulSet":
			live, err := c.Dynamic.Resource(statefulSetsGVR).Namespace(orNamespace(u.GetNamespace(), namespace)).Get(ctx, u.GetName(), metav1.GetOptions{})
			if err == nil {
				n.Trouble, err = statefulSetTrouble(live)
			}
			if err != nil {
				n.Trouble = err.Error()
			}
		case "SchedulingConfigTemplate":
			if _, err := c.Dynamic.Resource(templatesGVR).Get(ctx, u.GetName(), metav1.GetOptions{}); err != nil {
				n.Trouble = err.Error()
			}
		case "TensorFusionCluster":
			live, err := c.Dynamic.Resource(clustersGVR).Get(ctx, u.GetName(), metav1.GetOptions{})
			if err != nil {
				n.Trouble = err.Error()
				break
			}
			fc, err := decode[FusionCluster](live)
			if err != nil {
				return nil, err
			}
			for _, e := range fc.Spec.GPUPools {
				if p := policyOf(fc.Name, e); !p.held() {
					n.Trouble = "the policy of GPUPool/" + p.Pool + " is not held any more"
				}
				if h := e.Spec.Components.Hypervisor; h != nil && r.intent.HypervisorImage != "" && h.Image != r.intent.HypervisorImage {
					n.Trouble = "hypervisor.image of entry " + e.Name + " is " + orNone(h.Image) + ", not " + r.intent.HypervisorImage
				}
			}
		default:
			continue
		}
		out = append(out, n)
	}
	return out, nil
}

func statefulSetTrouble(u metav1.Object) (string, error) {
	s, err := decode[appsv1.StatefulSet](u)
	if err != nil {
		return "", err
	}
	if s.Status.ObservedGeneration < s.Generation {
		return "its controller has not seen the change yet", nil
	}
	if want := desired(s.Spec.Replicas); s.Status.ReadyReplicas < want || s.Status.UpdatedReplicas < want {
		return fmt.Sprintf("%d of %d replicas ready, %d updated", s.Status.ReadyReplicas, want, s.Status.UpdatedReplicas), nil
	}
	return "", nil
}

// leftOver asks for the diff of the Helm step again: once the step is done,
// nothing of it may be left to do. A TensorFusionCluster whose hold was just
// taken back is not as rendered, and is judged by its fields.
func leftOver(ctx context.Context, c *kube.Client, req ControllerRequest, r *resolved, former, deployed *helm.Release) ([]Neighbour, error) {
	changes, err := helm.Diff(ctx, c, helm.DiffRequest{
		Namespace: req.Release.Namespace, Release: req.Release.Name,
		Current: former.Manifest, Target: deployed.Manifest, Masker: r.masker,
	})
	var out []Neighbour
	for _, ch := range changes {
		if ch.Kind == "TensorFusionCluster" && len(req.Return) > 0 {
			continue
		}
		n := Neighbour{Object: ch.Object(), Content: true, Trouble: strings.TrimSpace("not what revision " + fmt.Sprint(deployed.Version) + " says, " +
			"to which Helm would still " + ch.Action + " it: " + ch.Refused + " " + firstLines(ch.UnifiedDiff))}
		if !slices.Contains(req.Told, n.told()) {
			out = append(out, n)
		}
	}
	return out, err
}

// told is a digest of what a finding tells of it.
func (n Neighbour) told() string {
	sum := sha256.Sum256([]byte(n.Object + "\n" + n.Trouble))
	return hex.EncodeToString(sum[:8])
}

// toldOf are those of what may be accepted.
func toldOf(all []Neighbour) []string {
	var out []string
	for _, n := range all {
		if n.Content {
			out = append(out, n.told())
		}
	}
	return out
}

// diffLines of a change are quoted in a finding.
const diffLines = 4

func firstLines(diff string) string {
	var out []string
	for l := range strings.Lines(diff) {
		if isChange(l) && len(out) < diffLines {
			out = append(out, strings.Join(strings.Fields(l), " "))
		}
	}
	return strings.Join(out, "; ")
}

// changedBeside compares the objects whose manifest the step did not change
// with what they were right before it.
func changedBeside(ctx context.Context, c *kube.Client, req ControllerRequest, former, deployed *helm.Release, now map[string]string) ([]Neighbour, error) {
	was, err := releaseObjects(c, former.Manifest, req.Release.Namespace)
	if err != nil {
		return nil, err
	}
	is, err := releaseObjects(c, deployed.Manifest, req.Release.Namespace)
	if err != nil {
		return nil, err
	}
	var out []Neighbour
	for _, name := range sortedKeys(req.Snapshot.Objects) {
		if now[name] == req.Snapshot.Objects[name] || was[name] == nil || is[name] == nil || !sameContent(was[name], is[name]) {
			continue
		}
		n := Neighbour{Object: name, Content: true, Trouble: "deleted since right before the Helm step"}
		live, err := liveObject(ctx, c, is[name])
		if err != nil {
			return nil, err
		}
		if live != nil {
			n.Trouble = "changed since right before the Helm step, which leaves it as it is" + lastWriter(live)
		}
		out = append(out, n)
	}
	return out, nil
}

// lastWriter names who wrote an object last beside Helm and us.
func lastWriter(u *unstructured.Unstructured) string {
	var last metav1.ManagedFieldsEntry
	for _, e := range u.GetManagedFields() {
		ours := e.Manager == helm.FieldManager || e.Manager == fieldManager
		if !ours && e.Subresource == "" && e.Time != nil && (last.Time == nil || last.Time.Before(e.Time)) {
			last = e
		}
	}
	if last.Time == nil {
		return ""
	}
	return fmt.Sprintf("; last written by %s at %s", last.Manager, last.Time.UTC().Format(time.RFC3339))
}
