package openbao

import (
	"context"
	"time"

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
	Active    string `json:"active,omitempty"`
	// Versions and Images (of all containers, N168) are by pod.
	Versions map[string]string   `json:"versions,omitempty"`
	Images   map[string][]string `json:"images,omitempty"`
	Findings []finding.Finding   `json:"findings,omitempty"`
	Evidence evidence.Trail      `json:"evidence"`
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
	out.Evidence = l.record.Trail
	return out, err
}

// survey is the pure part.
func survey(v View, found []finding.Finding) SurveyResult {
	out := SurveyResult{Versions: v.Versions(), Images: map[string][]string{}, Findings: evidence.Shown(found)}
	for _, m := range v.Members {
		out.Images[m.Pod] = m.Images
	}
	if len(found) > 0 {
		return out
	}
	active, _ := v.Active()
	out.Step, out.Steps = Next(v), Steps(v)
	out.ClusterID, out.Committed, out.Active = active.ClusterID, active.Committed, active.Pod
	return out
}
