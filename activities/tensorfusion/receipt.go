package tensorfusion

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"path"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/refit-run/refit/activities/artifact"
	"github.com/refit-run/refit/activities/finding"
	"github.com/refit-run/refit/activities/helm"
	"github.com/refit-run/refit/activities/kube"
)

// receiptLimit keeps the ConfigMap below its 1 MiB.
const receiptLimit = 900 << 10

// WriteReceipt stores the receipt as evidence and as a ConfigMap in the
// release's namespace, whichever release that is; the rows per host go into an
// artifact only.
func (a *Activities) WriteReceipt(ctx context.Context, req ReceiptRequest) (ReceiptResult, error) {
	defer pulse(ctx, nil)()
	var out ReceiptResult
	req.Holder = "" // the record of a run that lost its Lease is kept too
	c, err := a.connect(ctx, req.Scope)
	if err != nil {
		return out, err
	}
	put := func(name string, data []byte, entries int) (artifact.Ref, error) {
		return a.Artifacts.Put(ctx, path.Join(req.Key, name), artifact.Evidence, entries, func(w io.Writer) error {
			_, err := io.Copy(w, bytes.NewReader(data))
			return err
		})
	}
	if len(req.Hosts) > 0 {
		var rows []json.RawMessage
		if err := json.Unmarshal(req.Hosts, &rows); err != nil {
			return out, fmt.Errorf("rows per host of the receipt: %w", err)
		}
		name := "hosts.json"
		if req.Page > 0 {
			name = fmt.Sprintf("hosts-%d.json", req.Page)
		}
		if out.Hosts, err = put(name, req.Hosts, len(rows)); err != nil {
			return out, err
		}
		if req.Pages = append(req.Pages, out.Hosts.URL); len(req.JSON) == 0 {
			return out, nil
		}
	}
	if out.Artifact, err = put("receipt.json", req.JSON, 1); err != nil {
		return out, err
	}
	if len(req.JSON) > receiptLimit {
		return out, finding.Finding{Object: "receipt", Expected: "at most 900 KiB for a ConfigMap", Found: plural(len(req.JSON), "bytes"),
			Next: "it is whole in " + out.Artifact.URL}.Error(finding.Stop)
	}
	out.ConfigMap = "refit-receipt-" + configMapKey(req.Key)
	cm := &corev1.ConfigMap{
		TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "ConfigMap"},
		ObjectMeta: metav1.ObjectMeta{
			Name: out.ConfigMap, Namespace: req.Release.Namespace,
			Labels: map[string]string{"app.kubernetes.io/managed-by": fieldManager, "refit.run/release": req.Release.Name},
		},
		Data: map[string]string{"receipt.json": string(req.JSON), "artifact": out.Artifact.URL},
	}
	if len(req.Pages) > 0 {
		cm.Data["hosts"] = strings.Join(req.Pages, "\n")
	}
	object, err := runtime.DefaultUnstructuredConverter.ToUnstructured(cm)
	if err != nil {
		return out, err
	}
	_, err = c.Apply(ctx, &unstructured.Unstructured{Object: object}, fieldManager, true, false)
	return out, err
}

// configMapKey makes a key fit into an object's name.
func configMapKey(key string) string {
	out := strings.Map(func(r rune) rune {
		switch {
		case r >= 'a' && r <= 'z', r >= '0' && r <= '9', r == '.', r == '-':
			return r
		case r >= 'A' && r <= 'Z':
			return r + ('a' - 'A')
		}
		return '-'
	}, key)
	if limit := 253 - len("refit-receipt-"); len(out) > limit {
		out = out[len(out)-limit:]
	}
	return strings.Trim(out, "-.")
}

// InspectRevision says what a stored revision holds, for a rollback to it; 0
// means the newest superseded one.
func (a *Activities) InspectRevision(ctx context.Context, req RevisionRequest) (RevisionResult, error) {
	defer pulse(ctx, nil)()
	c, err := a.connect(ctx, req.Scope)
	if err != nil {
		return RevisionResult{}, err
	}
	revision := req.Revision
	if revision == 0 {
		if revision, err = newestSuperseded(ctx, c, req.Scope); err != nil {
			return RevisionResult{}, inRow(err, "T21")
		}
	}
	r, err := a.resolve(ctx, c, req.Scope, Intent{Chart: Chart{Revision: revision}})
	if err != nil {
		return RevisionResult{}, inRow(err, "T21")
	}
	side, err := r.targetSide()
	if err != nil {
		return RevisionResult{}, r.masker.Error(err)
	}
	out := RevisionResult{
		Revision:    revision,
		Versions:    Versions{Chart: side.Chart, Controller: versionString(side.Controller), Revision: revision},
		Substituted: r.substituted,
	}
	for _, fc := range side.Clusters {
		for _, e := range fc.Spec.GPUPools {
			if h := e.Spec.Components.Hypervisor; h != nil && out.HypervisorImage == "" {
				out.HypervisorImage = h.Image
			}
		}
	}
	if out.HypervisorImage == "" {
		if v, ok := helm.GetPath(r.rendered.Values, pathHypervisorImage); ok {
			out.HypervisorImage, _ = v.(string)
		}
	}
	out.Versions.Hypervisor = out.HypervisorImage
	out.IsolationPolicy = side.IsolationPolicy
	return out, nil
}

func newestSuperseded(ctx context.Context, c *kube.Client, s Scope) (int, error) {
	history, err := helm.Releases(ctx, c, s.Release.Namespace, s.Release.Name)
	if err != nil {
		return 0, err
	}
	for i := len(history) - 1; i >= 0; i-- {
		if history[i].Status == "superseded" {
			return history[i].Revision, nil
		}
	}
	return 0, finding.Finding{
		Object: "release " + s.Release.Namespace + "/" + s.Release.Name, Expected: "a superseded revision to go back to", Found: "none in its history",
		Next: "name a chart and values in an upgrade plan instead",
	}.Error(finding.Stop)
}
