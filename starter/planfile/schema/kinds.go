// Package schema holds the workflows that a plan file can ask for, each with
// its JSON schema. The schema files are generated from the input structs; a
// test keeps them equal. It must not read plan files: planfile does.
package schema

import (
	"embed"
	"encoding/json"
	"fmt"
	"strings"

	"github.com/refit-run/refit/starter/planfile"
	"github.com/refit-run/refit/workflows/gpunode"
	"github.com/refit-run/refit/workflows/protocol"
	"github.com/refit-run/refit/workflows/rollout"
	"github.com/refit-run/refit/workflows/rollout/plan"
	"github.com/refit-run/refit/workflows/tensorfusion"
)

//go:embed *.json
var files embed.FS

// Kinds are every workflow a plan file can ask for.
func Kinds() []planfile.Kind {
	return []planfile.Kind{
		{Name: protocol.TensorFusionUpgrade, Schema: file(protocol.TensorFusionUpgrade), Read: upgrade},
		{Name: protocol.TensorFusionRollback, Schema: file(protocol.TensorFusionRollback), Read: rollback},
		{Name: protocol.Rollout, Schema: file(protocol.Rollout), Read: alone},
		{Name: protocol.GPUNode, Schema: file(protocol.GPUNode), Read: node},
		{Name: protocol.NATSDrain, Schema: file(protocol.NATSDrain), Read: natsDrain},
		{Name: protocol.NATSReplicas, Schema: file(protocol.NATSReplicas), Read: natsReplicas},
		{Name: protocol.NATSRoll, Schema: file(protocol.NATSRoll), Read: natsRoll},
		{Name: protocol.CassandraBackup, Schema: file(protocol.CassandraBackup), Read: cassandraBackup},
		{Name: protocol.CassandraExpand, Schema: file(protocol.CassandraExpand), Read: cassandraExpand},
		{Name: protocol.CassandraReplication, Schema: file(protocol.CassandraReplication), Read: cassandraReplication},
		{Name: protocol.CassandraLedger, Schema: file(protocol.CassandraLedger), Read: cassandraLedger},
		{Name: protocol.OpenBaoSnapshot, Schema: file(protocol.OpenBaoSnapshot), Read: openbaoSnapshot},
		{Name: protocol.OpenBaoReplace, Schema: file(protocol.OpenBaoReplace), Read: openbaoReplace},
	}
}

// file reads an embedded schema; a kind without one is a fault of the build
// that the package's test catches.
func file(kind string) []byte {
	content, err := files.ReadFile(kind + ".json")
	if err != nil {
		panic(fmt.Sprintf("schema of %s: %v", kind, err))
	}
	return content
}

func upgrade(doc []byte) (planfile.Plan, error) {
	var in tensorfusion.UpgradeInput
	if err := json.Unmarshal(doc, &in); err != nil {
		return planfile.Plan{}, err
	}
	return planfile.Plan{
		Cluster: in.Cluster,
		Object:  in.Release.Name,
		Summary: fmt.Sprintf("upgrade %s in %s to chart %s", in.Release.Name, in.Cluster, in.Chart.Version),
		Input:   in,
		Rules:   rules(in.Validate()),
		Planned: func() any { p := in; p.PlanOnly = true; return p },
	}, nil
}

func rollback(doc []byte) (planfile.Plan, error) {
	var in tensorfusion.RollbackInput
	if err := json.Unmarshal(doc, &in); err != nil {
		return planfile.Plan{}, err
	}
	to := "the revision before"
	if in.Revision != 0 {
		to = fmt.Sprintf("revision %d", in.Revision)
	}
	return planfile.Plan{
		Cluster: in.Cluster,
		Object:  in.Release.Name,
		Summary: fmt.Sprintf("roll %s in %s back to %s", in.Release.Name, in.Cluster, to),
		Input:   in,
		Rules:   rules(in.Validate()),
		Planned: func() any { p := in; p.PlanOnly = true; return p },
	}, nil
}

// alone reads a rollout that no other run starts: it has no plan stage, its
// own stages show what they are going to do.
func alone(doc []byte) (planfile.Plan, error) {
	var in rollout.Input
	if err := json.Unmarshal(doc, &in); err != nil {
		return planfile.Plan{}, err
	}
	entry := in.Entry
	if entry == "" {
		entry = in.Pool
	}
	return planfile.Plan{
		Cluster: in.Scope.Target.Cluster,
		Object:  strings.Join([]string{in.Scope.Release.Name, in.Component, entry}, "."),
		Summary: fmt.Sprintf("roll the %ss of pool %s in %s", in.Component, entry, in.Scope.Target.Cluster),
		Input:   in,
		Rules:   rules(in.Validate()),
	}, nil
}

func node(doc []byte) (planfile.Plan, error) {
	var in gpunode.Input
	if err := json.Unmarshal(doc, &in); err != nil {
		return planfile.Plan{}, err
	}
	what := "validate"
	if in.Prepare != nil {
		what = "prepare and validate"
	}
	return planfile.Plan{
		Cluster: in.Target.Cluster,
		Object:  in.Node,
		Summary: fmt.Sprintf("%s the GPUs of node %s in %s", what, in.Node, in.Target.Cluster),
		Input:   in,
		Rules:   rules(in.Validate()),
		Planned: func() any { p := in; p.PlanOnly = true; return p },
	}, nil
}

func rules(problems []plan.Problem) []planfile.Rule {
	out := make([]planfile.Rule, len(problems))
	for i, p := range problems {
		out[i] = planfile.Rule{Path: p.Path, Message: p.Message}
	}
	return out
}
