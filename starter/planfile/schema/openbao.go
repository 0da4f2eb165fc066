package schema

import (
	"encoding/json"
	"fmt"

	"github.com/refit-run/refit/starter/planfile"
	"github.com/refit-run/refit/workflows/openbao"
)

func openbaoSnapshot(doc []byte) (planfile.Plan, error) {
	var in openbao.SnapshotInput
	if err := json.Unmarshal(doc, &in); err != nil {
		return planfile.Plan{}, err
	}
	return planfile.Plan{
		Cluster: in.Target.Cluster,
		Object:  in.Object(),
		Summary: fmt.Sprintf("store a Raft snapshot of %s in %s", in.Object(), in.Target.Cluster),
		Input:   in,
		Rules:   rules(in.Validate()),
	}, nil
}

func openbaoReplace(doc []byte) (planfile.Plan, error) {
	var in openbao.ReplaceInput
	if err := json.Unmarshal(doc, &in); err != nil {
		return planfile.Plan{}, err
	}
	return planfile.Plan{
		Cluster: in.Target.Cluster,
		Object:  in.Object(),
		Summary: fmt.Sprintf("replace the members of %s in %s by %s", in.Object(), in.Target.Cluster, in.Image),
		Input:   in,
		Rules:   rules(in.Validate()),
		Planned: func() any { p := in; p.PlanOnly = true; return p },
	}, nil
}
