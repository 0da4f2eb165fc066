package planfile_test

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/refit-run/refit/starter/planfile"
)

const toySchema = `{
  "$schema": "https://json-schema.org/draft/2020-12/schema",
  "type": "object",
  "required": ["kind", "cluster", "release"],
  "additionalProperties": false,
  "properties": {
    "kind": {"type": "string"},
    "cluster": {"type": "string"},
    "release": {"$ref": "#/$defs/Release"},
    "policy": {"type": "string", "enum": ["restore", "seal", "keepOff"]},
    "limit": {"type": "string", "pattern": "^([0-9]+(\\.[0-9]+)?(ns|us|ms|s|m|h))+$"},
    "values": {"type": "object"},
    "password": {"type": "object"},
    "rollouts": {"type": "array", "items": {"$ref": "#/$defs/Rollout"}}
  },
  "$defs": {
    "Release": {"type": "object", "additionalProperties": false, "required": ["name"],
      "properties": {"name": {"type": "string"}, "namespace": {"type": "string"}}},
    "Rollout": {"type": "object", "additionalProperties": false,
      "properties": {"component": {"type": "string"}, "count": {"type": "integer"}}}
  }
}`

var toy = planfile.Kind{
	Name:   "Toy",
	Schema: []byte(toySchema),
	Read: func(doc []byte) (planfile.Plan, error) {
		var in struct {
			Cluster string
			Release struct{ Name string }
			Values  map[string]any
		}
		if err := json.Unmarshal(doc, &in); err != nil {
			return planfile.Plan{}, err
		}
		p := planfile.Plan{Cluster: in.Cluster, Object: in.Release.Name, Input: in}
		if _, planted := in.Values["agent.token"]; planted {
			p.Rules = append(p.Rules, planfile.Rule{Path: "values.agent.token", Message: "is a secret key"})
		}
		if in.Cluster == "" {
			p.Rules = append(p.Rules, planfile.Rule{Path: "cluster", Message: "is missing"})
		}
		return p, nil
	},
}

const good = `kind: Toy
cluster: prod
release:
  name: tf
rollouts:
  - component: hypervisor
    count: 1
`

func load(content string, sets ...string) (planfile.Plan, error) {
	return planfile.Load([]planfile.Kind{toy}, "plan.yaml", []byte(content), sets)
}

func TestAGoodPlanBecomesAnInputWithItsID(t *testing.T) {
	p, err := load(good)
	require.NoError(t, err)
	require.Equal(t, "Toy.prod.tf", p.ID())
	require.JSONEq(t, `{"kind":"Toy","cluster":"prod","release":{"name":"tf"},"rollouts":[{"component":"hypervisor","count":1}]}`, string(p.Document))
}

func TestWhatIsWrongIsSaidWithItsPlace(t *testing.T) {
	for _, c := range []struct{ name, content, want string }{
		{"unknown key with a near one", strings.Replace(good, "  name: tf", "  name: tf\n  namespce: x", 1),
			`plan.yaml:5:3: release.namespce is not a key that is known here; did you mean "namespace"?`},
		{"unknown key with none near", good + "zzzzzzzz: 1\n",
			`plan.yaml:8:1: zzzzzzzz is not a key that is known here; known: cluster, kind, limit, password, policy, release, rollouts, values`},
		{"unknown key in a list", strings.Replace(good, "count: 1", "cont: 1", 1),
			`plan.yaml:7:5: rollouts[0].cont is not a key that is known here; did you mean "count"?`},
		{"wrong type", strings.Replace(good, "count: 1", "count: many", 1),
			`plan.yaml:7:12: rollouts[0].count is "many": want a whole number`},
		{"number where a string is wanted", strings.Replace(good, "cluster: prod", "cluster: 2.17", 1),
			`plan.yaml:2:10: cluster is the number 2.17: want a string; put it in quotes`},
		{"mapping where a list is wanted", "kind: Toy\ncluster: prod\nrelease: {name: tf}\nrollouts:\n  component: x\n",
			`plan.yaml:4:1: rollouts is a mapping: want a list`},
		{"word out of a few", good + "policy: restor\n",
			`plan.yaml:8:9: policy is "restor": want one of restore, seal, keepOff; did you mean "restore"?`},
		{"duration without unit", good + "limit: \"5\"\n",
			`plan.yaml:8:8: limit is "5": want a duration with a unit such as 90s, 5m or 2h`},
		{"secret where a reference is wanted", good + "password: not-a-real-one\n",
			`plan.yaml:8:11: password is a string: want a mapping`},
		{"number as secret", good + "password: 12345\n",
			`plan.yaml:8:11: password is a number: want a mapping`},
		{"missing key of a mapping", strings.Replace(good, "  name: tf", "  namespace: x", 1),
			`plan.yaml:3:1: release.name is missing`},
		{"missing key at the top", strings.Replace(good, "cluster: prod\n", "", 1),
			`plan.yaml:1:1: cluster is missing`},
		{"unknown kind", strings.Replace(good, "Toy", "Toi", 1),
			`plan.yaml:1:7: kind is "Toi": want one of Toy; did you mean "Toy"?`},
		{"no kind", strings.Replace(good, "kind: Toy\n", "", 1),
			`plan.yaml:1:1: kind is missing: want one of Toy`},
		{"rule of the struct on a key with a dot", good + "values:\n  agent.token: fake-token\n",
			`plan.yaml:9:16: values.agent.token is a secret key`},
		{"rule of the struct", strings.Replace(good, "cluster: prod", `cluster: ""`, 1),
			`plan.yaml:2:10: cluster is missing`},
		{"empty file", "", "plan.yaml:1:1: holds no plan: want a mapping that begins with `kind:`"},
		{"a list", "- a\n", "plan.yaml:1:1: is a list: want a mapping that begins with `kind:`"},
		{"two documents", good + "---\n" + good, `plan.yaml:9:1: is a second YAML document: want one plan per file`},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := load(c.content)
			require.EqualError(t, err, c.want)
			var problems planfile.Problems
			require.ErrorAs(t, err, &problems)
		})
	}
}

func TestEveryProblemIsSaidInTheFilesOrder(t *testing.T) {
	_, err := load("kind: Toy\ncluster: 1\nrelease:\n  nam: x\npolicy: no\n")
	require.EqualError(t, err, strings.Join([]string{
		`plan.yaml:2:10: cluster is the number 1: want a string; put it in quotes`,
		`plan.yaml:3:1: release.name is missing`,
		`plan.yaml:4:3: release.nam is not a key that is known here; did you mean "name"?`,
		`plan.yaml:5:9: policy is "no": want one of restore, seal, keepOff`,
	}, "\n"))
}

func TestSyntaxErrorsAndDoubledKeysHaveTheirPlace(t *testing.T) {
	_, err := load("kind: Toy\ncluster: [a\n")
	require.ErrorContains(t, err, "plan.yaml:2:")
	_, err = load("kind: Toy\ncluster: a\ncluster: b\n")
	require.ErrorContains(t, err, "plan.yaml:3:1")
}

func TestSetPutsValuesIntoThePlan(t *testing.T) {
	p, err := load(good, "rollouts[0].count=3", "rollouts[1].component=worker", "release.namespace=ns", `cluster="7"`, "limit=5m")
	require.NoError(t, err)
	require.JSONEq(t, `{"kind":"Toy","cluster":"7","limit":"5m","release":{"name":"tf","namespace":"ns"},
		"rollouts":[{"component":"hypervisor","count":3},{"component":"worker"}]}`, string(p.Document))
}

func TestAWrongSetIsNamedByItsPath(t *testing.T) {
	for set, want := range map[string]string{
		"rollouts[0].count=fake-secret": `--set rollouts[0].count: rollouts[0].count is "fake-secret": want a whole number`,
		"rollouts[5].count=1":           `--set rollouts[5].count: rollouts is a list of 1: want an index from 0 to 1`,
		"cluster.name=x":                `--set cluster.name: cluster is a string: it has no key "name"`,
		"clutser=x":                     `--set clutser: clutser is not a key that is known here; did you mean "cluster"?`,
	} {
		_, err := load(good, set)
		require.EqualError(t, err, want)
	}
	_, err := load(good, "no-equals")
	require.ErrorContains(t, err, "--set no-equals: has no =")
}
