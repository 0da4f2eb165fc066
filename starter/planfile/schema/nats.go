package schema

import (
	"encoding/json"
	"fmt"

	"github.com/refit-run/refit/starter/planfile"
	"github.com/refit-run/refit/workflows/nats"
)

func natsDrain(doc []byte) (planfile.Plan, error) {
	var in nats.DrainInput
	if err := json.Unmarshal(doc, &in); err != nil {
		return planfile.Plan{}, err
	}
	return planfile.Plan{
		Cluster: in.Target.Cluster,
		Object:  in.Object(),
		Summary: fmt.Sprintf("wait until the memory streams of %s in %s are drained", in.Object(), in.Target.Cluster),
		Input:   in,
		Rules:   rules(in.Validate()),
	}, nil
}

func natsReplicas(doc []byte) (planfile.Plan, error) {
	var in nats.ReplicasInput
	if err := json.Unmarshal(doc, &in); err != nil {
		return planfile.Plan{}, err
	}
	return planfile.Plan{
		Cluster: in.Target.Cluster,
		Object:  in.Object(),
		Summary: fmt.Sprintf("raise the streams of %s in %s to three replicas", in.Object(), in.Target.Cluster),
		Input:   in,
		Rules:   rules(in.Validate()),
		Planned: func() any { p := in; p.PlanOnly = true; return p },
	}, nil
}

// natsRoll has an ID for each phase: the receipt of the phase before names the
// list that the phase after needs.
func natsRoll(doc []byte) (planfile.Plan, error) {
	var in nats.RollInput
	if err := json.Unmarshal(doc, &in); err != nil {
		return planfile.Plan{}, err
	}
	return planfile.Plan{
		Cluster: in.Target.Cluster,
		Object:  in.Object() + "." + in.Phase,
		Summary: fmt.Sprintf("check %s in %s %s a roll", in.Object(), in.Target.Cluster, in.Phase),
		Input:   in,
		Rules:   rules(in.Validate()),
	}, nil
}
