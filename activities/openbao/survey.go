package openbao

import (
	"context"
	"path"
	"strings"
	"time"

	"github.com/refit-run/refit/activities/artifact"
	"github.com/refit-run/refit/activities/evidence"
	"github.com/refit-run/refit/activities/finding"
)

// SurveyRequest asks what is to be done next.
type SurveyRequest struct {
	Place
	Want Want `json:"want"`
	// Limit is how long members that are sealed, join or lag are waited for,
	// and a leader.
	Limit time.Duration `json:"limit"`
	// Snapshot, where it is given, is the URL of the Raft snapshot that was
	// stored before: it must be there.
	Snapshot string `json:"snapshot,omitempty"`
}

// SurveyResult is the state of a whole cluster and the next step; with
// findings there is no step.
type SurveyResult struct {
	Step Step `json:"step"`
	// Steps is the whole way as it looks now.
	Steps []Step `json:"steps,omitempty"`
	// ClusterID and Committed are what a member must keep, and catch up with.
	ClusterID string `json:"clusterID,omitempty"`
	Committed uint64 `json:"committed,omitempty"`
	State
	// Snapshot is the one that was asked for.
	Snapshot artifact.Ref      `json:"snapshot,omitzero"`
	Findings []finding.Finding `json:"findings,omitempty"`
	Evidence evidence.Trail    `json:"evidence"`
}

// Survey is the activity openbao.Survey (N89-N91, N158-N162, N168). It refuses
// at once what no waiting mends, waits for the cluster to be whole, and says
// what is to be done next. It only reads.
func (a *Activities) Survey(ctx context.Context, r SurveyRequest) (out SurveyResult, err error) {
	l, err := a.looker(ctx, r.Place)
	if err != nil {
		return out, err
	}
	defer l.close()
	var snapshot artifact.Ref
	if r.Snapshot != "" {
		if snapshot, out.Findings, err = a.backup(ctx, r.Snapshot); err != nil || len(out.Findings) > 0 {
			return out, err
		}
	}
	var mark uint64
	err = l.until(ctx, r.Limit, func(v View) verdict {
		// What had been committed when it was first seen: a mark that moved
		// with every write would never be reached.
		if active, none := v.Active(); none == "" && mark == 0 {
			mark = active.Committed
		}
		refused := refusals(v, r.Want)
		out = survey(v, append(refused, waiting(v, mark)...))
		return verdict{len(out.Findings) == 0 || len(refused) > 0, evidence.InWords(out.Findings), out}
	})
	out.Snapshot, out.Evidence = snapshot, l.record.Trail
	return out, err
}

// backup finds the snapshot that an OpenBaoSnapshot has stored (N104). What is
// stored was proven then, and is read only by who holds the key.
func (a *Activities) backup(ctx context.Context, address string) (artifact.Ref, []finding.Finding, error) {
	f := finding.Finding{Row: "N104", Object: "Raft snapshot " + address, Expected: "a snapshot that OpenBaoSnapshot has stored in the worker's artifact store", Found: "none",
		Why: "nothing else brings back what is lost with the members", Next: "take one (OpenBaoSnapshot) and name its URL in snapshot: abort, and start again"}
	parts := strings.Split(address, "/")
	// The names of the run, of its try and of the archive, as evidence.Key gives them.
	refs, err := a.Artifacts.List(ctx, strings.Join(parts[max(0, len(parts)-4):], "/"))
	if err != nil {
		return artifact.Ref{}, nil, finding.InRow(err, f.Row)
	}
	for _, ref := range refs {
		if ref.URL == address && ref.Kind == artifact.Secret && path.Base(ref.Name) == snapshotName {
			return ref, nil, nil
		}
	}
	return artifact.Ref{}, []finding.Finding{f}, nil
}

// survey is the pure part.
func survey(v View, found []finding.Finding) SurveyResult {
	out := SurveyResult{State: v.State(), Findings: evidence.Shown(found)}
	if len(found) > 0 {
		return out
	}
	active, _ := v.Active()
	out.Step, out.Steps = Next(v), Steps(v)
	out.ClusterID, out.Committed = active.ClusterID, active.Committed
	return out
}
