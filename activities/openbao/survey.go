package openbao

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"path"
	"slices"
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
	// Snapshot is the one that was asked for, Taken when it was taken.
	Snapshot artifact.Ref      `json:"snapshot,omitzero"`
	Taken    time.Time         `json:"taken,omitzero"`
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
	var of taken
	if r.Snapshot != "" {
		if snapshot, of, out.Findings, err = a.backup(ctx, r.Snapshot); err != nil || len(out.Findings) > 0 {
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
		refused := append(refusals(v, r.Want), of.refuse(v, r.Snapshot)...)
		out = survey(v, append(refused, waiting(v, mark)...))
		return verdict{len(out.Findings) == 0 || len(refused) > 0, evidence.InWords(out.Findings), out}
	})
	out.Snapshot, out.Taken, out.Evidence = snapshot, of.At, l.record.Trail
	return out, err
}

// missing is the finding of a snapshot that is not the one to have (N104).
func missing(address, expected, found string) finding.Finding {
	return finding.Finding{Row: "N104", Object: "Raft snapshot " + address, Expected: expected, Found: found,
		Why: "nothing else brings back what is lost with the members", Next: "take one (OpenBaoSnapshot) and name its URL in snapshot: abort, and start again"}
}

// backup finds the snapshot that an OpenBaoSnapshot has stored (N104), and what
// is known of it. What is stored was proven then, and is read only by who holds
// the key.
func (a *Activities) backup(ctx context.Context, address string) (ref artifact.Ref, of taken, found []finding.Finding, err error) {
	parts := strings.Split(address, "/")
	// The names of the run and of its try, as evidence.Key gives them.
	folder := strings.Join(parts[max(0, len(parts)-4):len(parts)-1], "/") + "/"
	refs, err := a.Artifacts.List(ctx, folder)
	if err != nil {
		return ref, of, nil, finding.InRow(err, "N104")
	}
	at := slices.IndexFunc(refs, func(r artifact.Ref) bool {
		return r.URL == address && r.Kind == artifact.Secret && path.Base(r.Name) == snapshotName
	})
	if at < 0 {
		return ref, of, []finding.Finding{missing(address, "a snapshot that OpenBaoSnapshot has stored in the worker's artifact store", "none")}, nil
	}
	about := slices.IndexFunc(refs, func(r artifact.Ref) bool { return path.Base(r.Name) == takenName })
	if about < 0 {
		return ref, of, []finding.Finding{missing(address, takenName+" beside it, which says of which cluster it is", "none")}, nil
	}
	var text bytes.Buffer
	if _, err := a.Artifacts.Get(ctx, refs[about].URL, nil, &text); err != nil {
		return ref, of, nil, finding.InRow(err, "N104")
	}
	if err := json.Unmarshal(text.Bytes(), &of); err != nil {
		return ref, of, nil, fmt.Errorf("%s: %w", refs[about].URL, err)
	}
	return refs[at], of, nil, nil
}

// refuse is what stands against a snapshot, once the cluster is known: of
// another one it is worth nothing.
func (t taken) refuse(v View, address string) []finding.Finding {
	active, none := v.Active()
	if address == "" || none != "" || active.ClusterID == t.ClusterID {
		return nil
	}
	return []finding.Finding{missing(address, "one of OpenBao's cluster "+active.ClusterID,
		fmt.Sprintf("one of %s (%s/%s), taken at %s", t.ClusterID, t.Cluster, t.Namespace, t.At.Format(time.RFC3339)))}
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
