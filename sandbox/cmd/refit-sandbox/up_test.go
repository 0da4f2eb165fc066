package main

import (
	"testing"

	"github.com/spf13/cobra"
	"github.com/stretchr/testify/require"

	"github.com/refit-run/refit/sandbox/agents"
	"github.com/refit-run/refit/sandbox/charts"
	"github.com/refit-run/refit/sandbox/controller"
	"github.com/refit-run/refit/sandbox/folder"
	"github.com/refit-run/refit/sandbox/world"
)

func TestNodesAreSpreadOverTwoPools(t *testing.T) {
	u := upFlags{nodes: 7, line: charts.Versions()[0], agents: folder.SimulatedAgents}
	o, err := u.options("demo")
	require.NoError(t, err)
	require.Equal(t, []folder.Pool{{Name: "shared", Nodes: 4}, {Name: "training", Nodes: 3}}, o.Pools)
}

func TestLineNamesTheChartThatBringsIt(t *testing.T) {
	for line, chart := range map[string]string{"2.16": "1.8.6", "2.17": "1.8.7", "2.17.0": "1.8.7", "1.8.6": "1.8.6"} {
		got, err := chartOf(line)
		require.NoError(t, err, line)
		require.Equal(t, chart, got, line)
	}
	_, err := chartOf("1")
	require.Error(t, err)
}

// The daemon is started with arguments that must mean the same options.
func TestOptionsSurviveTheCommandLine(t *testing.T) {
	for _, u := range []upFlags{
		{cluster: "alpha", line: "2.17", pools: []string{"a=1", "b=2"}, gpus: 2, noTensorFusion: true, datastores: []string{"nats", "cassandra"}, cassandraMembers: 3, readyAfter: 10e9, validates: 2e9, lease: 5e9, agents: folder.SimulatedAgents},
		{cluster: "beta", line: "2.16", pools: []string{"a=1"}, gpus: 8, validates: validateTakes, agents: folder.RealAgents},
	} {
		survives(t, u)
	}
}

func survives(t *testing.T, u upFlags) {
	t.Helper()
	want, err := u.options("demo")
	require.NoError(t, err)
	run := runCommand(&where{})
	require.NoError(t, run.ParseFlags(arguments(want)))
	var again upFlags
	again.cluster, _ = run.Flags().GetString("cluster")
	again.line, _ = run.Flags().GetString("line")
	again.pools, _ = run.Flags().GetStringSlice("pools")
	again.gpus, _ = run.Flags().GetInt("gpus")
	again.noTensorFusion, _ = run.Flags().GetBool("no-tensorfusion")
	again.datastores, _ = run.Flags().GetStringSlice("datastores")
	again.cassandraMembers, _ = run.Flags().GetInt("cassandra-members")
	again.readyAfter, _ = run.Flags().GetDuration("ready-after")
	again.validates, _ = run.Flags().GetDuration("validate-takes")
	again.lease, _ = run.Flags().GetDuration("lease")
	again.agents, _ = run.Flags().GetString("agents")
	got, err := again.options("demo")
	require.NoError(t, err)
	require.Equal(t, want, got)
}

func TestDatastoresAreAllOrThoseThatAreNamed(t *testing.T) {
	for arg, want := range map[string][]string{
		"--datastores": world.Datastores(), "--datastores=all": world.Datastores(), "--datastores=nats": {"nats"}, "--datastores=": nil, "--nodes=1": nil,
	} {
		u := upFlags{}
		c := &cobra.Command{}
		u.bind(c)
		require.NoError(t, c.ParseFlags([]string{arg}))
		o, err := u.options("demo")
		require.NoError(t, err)
		require.Equal(t, want, o.Datastores, arg)
	}
}

func TestNonsenseIsRefused(t *testing.T) {
	for _, u := range []upFlags{
		{line: "9.9", pools: []string{"a=1"}}, {line: "2.16", pools: []string{"a"}},
		{line: "2.16", pools: []string{"=1"}}, {line: "2.16", pools: []string{"a=-1"}},
		{line: "2.16", pools: []string{"a=1"}, datastores: []string{"ledger"}},
		{line: "2.16", pools: []string{"a=1"}, datastores: []string{"cassandra"}, cassandraMembers: 2},
	} {
		u.agents = folder.SimulatedAgents
		_, err := u.options("demo")
		require.Error(t, err, u)
	}
	for want, u := range map[string]upFlags{
		"--agents":         {agents: "imagined"},
		"--gpus":           {agents: folder.RealAgents, gpus: agents.MaxFakeGPUs + 1, validates: validateTakes},
		"--validate-takes": {agents: folder.RealAgents, gpus: 8, validates: validateTakes + 1},
	} {
		u.line = "2.16"
		_, err := u.options("demo")
		require.ErrorContains(t, err, want)
	}
	t.Setenv(controller.Variable, "/nonexistent/controller")
	u := upFlags{line: "2.16", agents: folder.SimulatedAgents}
	_, err := u.options("demo")
	require.ErrorContains(t, err, "/nonexistent/controller")
}
