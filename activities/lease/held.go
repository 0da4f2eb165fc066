package lease

import (
	"context"

	"k8s.io/client-go/kubernetes"

	"github.com/refit-run/refit/activities/finding"
)

// Held names the Lease under which a run works, as its activities carry it.
// Without a holder the run has none: nothing is checked.
type Held struct {
	Namespace string `json:"namespace,omitempty"`
	Release   string `json:"release,omitempty"`
	Holder    string `json:"holder,omitempty"`
}

// Check stops a run that has lost its Lease; it belongs right before a write.
// Locked closes a run that never began: one that is at work parks.
func (h Held) Check(ctx context.Context, k kubernetes.Interface) error {
	if h.Holder == "" {
		return nil
	}
	err := Verify(ctx, k, h.Namespace, h.Release, h.Holder, "")
	if f, lost := LockedFinding(err); lost {
		return f.Error(finding.Stop)
	}
	return err
}
