package schema

import (
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/invopop/jsonschema"
	"github.com/stretchr/testify/require"

	"github.com/refit-run/refit/starter/planfile"
	"github.com/refit-run/refit/starter/run"
	"github.com/refit-run/refit/workflows/cassandra"
	"github.com/refit-run/refit/workflows/gpunode"
	"github.com/refit-run/refit/workflows/nats"
	"github.com/refit-run/refit/workflows/openbao"
	"github.com/refit-run/refit/workflows/protocol"
	"github.com/refit-run/refit/workflows/rollout"
	"github.com/refit-run/refit/workflows/rollout/plan"
	"github.com/refit-run/refit/workflows/tensorfusion"
	"github.com/refit-run/refit/workflows/window"
)

var update = flag.Bool("update", false, "write the schema files anew")

// TestSchemasAreThoseOfTheInputStructs regenerates each schema and compares.
func TestSchemasAreThoseOfTheInputStructs(t *testing.T) {
	inputs := map[string]any{
		protocol.TensorFusionUpgrade:  tensorfusion.UpgradeInput{},
		protocol.TensorFusionRollback: tensorfusion.RollbackInput{},
		protocol.Rollout:              rollout.Input{},
		protocol.GPUNode:              gpunode.Input{},
		protocol.NATSDrain:            nats.DrainInput{},
		protocol.NATSReplicas:         nats.ReplicasInput{},
		protocol.NATSRoll:             nats.RollInput{},
		protocol.CassandraBackup:      cassandra.BackupInput{},
		protocol.CassandraExpand:      cassandra.ExpandInput{},
		protocol.CassandraReplication: cassandra.ReplicationInput{},
		protocol.CassandraLedger:      cassandra.LedgerInput{},
		protocol.OpenBaoSnapshot:      openbao.SnapshotInput{},
		protocol.OpenBaoReplace:       openbao.ReplaceInput{},
	}
	for name, input := range inputs {
		t.Run(name, func(t *testing.T) {
			want := generate(t, name, input)
			if *update {
				require.NoError(t, os.WriteFile(name+".json", want, 0o644))
			}
			got, err := os.ReadFile(name + ".json")
			require.NoError(t, err, "make it with: go test ./starter/planfile/schema -update")
			require.Equal(t, string(want), string(got), "the input struct changed: go test ./starter/planfile/schema -update")
		})
	}
}

func generate(t *testing.T, name string, input any) []byte {
	t.Helper()
	reflector := jsonschema.Reflector{Anonymous: true, ExpandedStruct: true, Mapper: mapped, Namer: namer()}
	schema := reflector.Reflect(input)
	schema.Title = "Refit plan file: " + name
	// A plan file says which workflow it asks for, and nothing that only one
	// run tells another.
	schema.Properties.Set("kind", &jsonschema.Schema{Type: "string", Enum: []any{name}})
	require.NoError(t, schema.Properties.MoveToFront("kind"))
	schema.Required = append([]string{"kind"}, schema.Required...)
	for _, internal := range []string{"parent", "resume", "of"} {
		schema.Properties.Delete(internal)
	}
	prune(t, schema)
	raw, err := json.Marshal(schema)
	require.NoError(t, err)
	var out bytes.Buffer
	require.NoError(t, json.Indent(&out, raw, "", "  "))
	out.WriteByte('\n')
	return out.Bytes()
}

// prune drops definitions that can't be reached from the top.
func prune(t *testing.T, schema *jsonschema.Schema) {
	t.Helper()
	all := schema.Definitions
	schema.Definitions = nil
	reached := jsonschema.Definitions{}
	for queue := []*jsonschema.Schema{schema}; len(queue) > 0; queue = queue[1:] {
		raw, err := json.Marshal(queue[0])
		require.NoError(t, err)
		for _, m := range reference.FindAllSubmatch(raw, -1) {
			name := string(m[1])
			if _, seen := reached[name]; !seen {
				reached[name] = all[name]
				queue = append(queue, all[name])
			}
		}
	}
	schema.Definitions = reached
}

var reference = regexp.MustCompile(`"\$ref":"#/\$defs/([^"]+)"`)

// namer keeps types of one name in two packages apart.
func namer() func(reflect.Type) string {
	taken := map[string]reflect.Type{}
	return func(t reflect.Type) string {
		name := t.Name()
		if name == "" {
			return "" // lists and maps are written in place
		}
		if other, ok := taken[name]; ok && other != t {
			return path.Base(t.PkgPath()) + "." + name
		}
		taken[name] = t
		return name
	}
}

// mapped gives the schema of types whose JSON form is not their Go form, or
// whose values are few.
func mapped(t reflect.Type) *jsonschema.Schema {
	words := func(values ...any) *jsonschema.Schema {
		return &jsonschema.Schema{Type: "string", Enum: values}
	}
	switch t {
	case reflect.TypeFor[window.Duration]():
		return &jsonschema.Schema{Type: "string", Pattern: planfile.DurationPattern, Description: "a duration with a unit, for example 90s, 5m or 2h"}
	case reflect.TypeFor[plan.Gates]():
		return words(plan.GateAfterCanary, plan.GateEachBatch, plan.GateNone)
	case reflect.TypeFor[plan.Order]():
		return words(plan.ByName, plan.ByAge)
	}
	return nil
}

// TestTheExamplesAreGoodPlans reads the plan files that the docs show.
func TestTheExamplesAreGoodPlans(t *testing.T) {
	examples, err := filepath.Glob("../../../examples/*.yaml")
	require.NoError(t, err)
	require.NotEmpty(t, examples)
	for _, file := range examples {
		t.Run(filepath.Base(file), func(t *testing.T) {
			content, err := os.ReadFile(file)
			require.NoError(t, err)
			_, err = planfile.Load(Kinds(), file, content, nil)
			require.NoError(t, err)
		})
	}
}

// TestSecretsInThePlanAreRefusedWithTheirPlace plants a password.
func TestSecretsInThePlanAreRefusedWithTheirPlace(t *testing.T) {
	content, err := os.ReadFile("../../../examples/tensorfusion-upgrade.yaml")
	require.NoError(t, err)
	planted := string(content) + "values:\n  inline:\n    greptime:\n      password: fake-password\n"
	_, err = planfile.Load(Kinds(), "plan.yaml", []byte(planted), nil)
	line := strings.Count(planted, "\n")
	require.ErrorContains(t, err, fmt.Sprintf("plan.yaml:%d:17: values.inline.greptime.password is a secret key", line))
	require.NotContains(t, err.Error(), "fake-password")
}

// TestAStressIsGivenAsADurationAndABareNumberHasItsPlace: every length of time
// in a plan is written in one way.
func TestAStressIsGivenAsADurationAndABareNumberHasItsPlace(t *testing.T) {
	content, err := os.ReadFile("../../../examples/gpu-node.yaml")
	require.NoError(t, err)
	lines := strings.Count(string(content), "\n")
	with := func(value string) []byte {
		return append(slices.Clone(content), "expect:\n  stressFor: "+value+"\n"...)
	}
	_, err = planfile.Load(Kinds(), "plan.yaml", with("10m"), nil)
	require.NoError(t, err)
	for _, wrong := range []string{"600000000000", "10", "ten"} {
		_, err = planfile.Load(Kinds(), "plan.yaml", with(wrong), nil)
		require.ErrorContains(t, err, fmt.Sprintf("plan.yaml:%d:14: expect.stressFor", lines+2), wrong)
	}
}

// TestAWrongKeyDeepInAPlanHasItsPlace misspells a key of a strategy.
func TestAWrongKeyDeepInAPlanHasItsPlace(t *testing.T) {
	content, err := os.ReadFile("../../../examples/tensorfusion-upgrade.yaml")
	require.NoError(t, err)
	_, err = planfile.Load(Kinds(), "plan.yaml", []byte(strings.Replace(string(content), "maxUnavailable:", "maxUnavailible:", 1)), nil)
	require.ErrorContains(t, err, `rollouts[0].strategy.maxUnavailible is not a key that is known here; did you mean "maxUnavailable"?`)
	_, err = planfile.Load(Kinds(), "plan.yaml", []byte(strings.Replace(string(content), "hostTimeout: 3m", "hostTimeout: 3", 1)), nil)
	require.ErrorContains(t, err, "rollouts[0].strategy.hostTimeout is the number 3: want a string")
}

// TestARolloutIsReadAlone has an ID of its own and no plan stage.
func TestARolloutIsReadAlone(t *testing.T) {
	p, err := planfile.Load(Kinds(), "plan.yaml", []byte(`kind: Rollout
scope:
  target: {cluster: prod}
  release: {name: tf, namespace: tf}
component: client
pool: tf-shared
entry: shared
`), nil)
	require.NoError(t, err)
	require.Equal(t, "Rollout.prod.tf.client.shared", p.ID())
	require.Nil(t, p.Planned)
}

// TestAGPUNodePlanHasAnIDAndAPlanStage reads the example.
func TestAGPUNodePlanHasAnIDAndAPlanStage(t *testing.T) {
	content, err := os.ReadFile("../../../examples/gpu-node.yaml")
	require.NoError(t, err)
	p, err := planfile.Load(Kinds(), "plan.yaml", content, []string{"node=gpu-7"})
	require.NoError(t, err)
	require.Equal(t, "GPUNode.sandbox.gpu-7", p.ID())
	in := p.Planned().(gpunode.Input)
	require.True(t, in.PlanOnly)
	require.Contains(t, in.Prepare.MIG.Config, "1g.10gb: 7")
	require.False(t, p.Input.(gpunode.Input).PlanOnly)
}

// TestANATSRollHasAnIDForEachPhase reads the example for both.
func TestANATSRollHasAnIDForEachPhase(t *testing.T) {
	content, err := os.ReadFile("../../../examples/nats-roll.yaml")
	require.NoError(t, err)
	before, err := planfile.Load(Kinds(), "plan.yaml", content, nil)
	require.NoError(t, err)
	require.Equal(t, "NATSRoll.sandbox.nats.before", before.ID())
	after, err := planfile.Load(Kinds(), "plan.yaml", content, []string{"phase=after", "saved=file:///list.json"})
	require.NoError(t, err)
	require.Equal(t, "NATSRoll.sandbox.nats.after", after.ID())
	_, err = planfile.Load(Kinds(), "plan.yaml", content, []string{"phase=after"})
	require.ErrorContains(t, err, "saved is missing")
}

// TestASetUpThatMakesNoSenseHasItsPlace puts a set-up where it can't be
// carried out, empties one, and takes its time away.
func TestASetUpThatMakesNoSenseHasItsPlace(t *testing.T) {
	content, err := os.ReadFile("../../../examples/tensorfusion-upgrade-prepare.yaml")
	require.NoError(t, err)
	for set, want := range map[string]string{
		"rollouts[0].component=client":          `rollouts[0].prepare is set for component "client"`,
		"rollouts[0].prepare.limit=0s":          "rollouts[0].prepare.limit is 0s: want a positive duration",
		"rollouts[0].prepare.limit=-5m":         "rollouts[0].prepare.limit",
		"rollouts[0].prepare.mig.config=\" \"":  "rollouts[0].prepare.mig.config is empty",
		"rollouts[0].prepare.mig.allowRest=yes": `did you mean "allowReset"?`,
	} {
		_, err = planfile.Load(Kinds(), "plan.yaml", content, []string{set})
		require.ErrorContains(t, err, want, set)
	}
	empty := regexp.MustCompile(`(?s)    prepare:\n.*?      limit: 15m\n`).ReplaceAllString(string(content), "    prepare: {}\n")
	_, err = planfile.Load(Kinds(), "plan.yaml", []byte(empty), nil)
	require.ErrorContains(t, err, "rollouts[0].prepare declares neither mig nor vgpu")
}

// TestWhatCanBeStartedIsListed keeps runs of every kind findable.
func TestWhatCanBeStartedIsListed(t *testing.T) {
	for _, k := range Kinds() {
		require.Contains(t, run.Kinds, k.Name)
	}
}
