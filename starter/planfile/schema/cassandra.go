package schema

import (
	"encoding/json"
	"fmt"

	"github.com/refit-run/refit/starter/planfile"
	"github.com/refit-run/refit/workflows/cassandra"
)

func cassandraBackup(doc []byte) (planfile.Plan, error) {
	var in cassandra.BackupInput
	if err := json.Unmarshal(doc, &in); err != nil {
		return planfile.Plan{}, err
	}
	return planfile.Plan{
		Cluster: in.Target.Cluster,
		Object:  in.Object(),
		Summary: fmt.Sprintf("snapshot every member of %s in %s under %s", in.Object(), in.Target.Cluster, in.Tag),
		Input:   in,
		Rules:   rules(in.Validate()),
	}, nil
}

func cassandraExpand(doc []byte) (planfile.Plan, error) {
	var in cassandra.ExpandInput
	if err := json.Unmarshal(doc, &in); err != nil {
		return planfile.Plan{}, err
	}
	return planfile.Plan{
		Cluster: in.Target.Cluster,
		Object:  in.Object(),
		Summary: fmt.Sprintf("expand %s in %s from one member to three", in.Object(), in.Target.Cluster),
		Input:   in,
		Rules:   rules(in.Validate()),
		Planned: func() any { p := in; p.PlanOnly = true; return p },
	}, nil
}

func cassandraReplication(doc []byte) (planfile.Plan, error) {
	var in cassandra.ReplicationInput
	if err := json.Unmarshal(doc, &in); err != nil {
		return planfile.Plan{}, err
	}
	return planfile.Plan{
		Cluster: in.Target.Cluster,
		Object:  in.Object(),
		Summary: fmt.Sprintf("raise the keyspaces of %s in %s to three copies", in.Object(), in.Target.Cluster),
		Input:   in,
		Rules:   rules(in.Validate()),
		Planned: func() any { p := in; p.PlanOnly = true; return p },
	}, nil
}

func cassandraLedger(doc []byte) (planfile.Plan, error) {
	var in cassandra.LedgerInput
	if err := json.Unmarshal(doc, &in); err != nil {
		return planfile.Plan{}, err
	}
	return planfile.Plan{
		Cluster: in.Target.Cluster,
		Object:  in.Object(),
		Summary: fmt.Sprintf("check the migrations of %s in %s", in.Object(), in.Target.Cluster),
		Input:   in,
		Rules:   rules(in.Validate()),
	}, nil
}
