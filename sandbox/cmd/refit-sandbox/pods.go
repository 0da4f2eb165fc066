package main

import (
	"github.com/spf13/cobra"

	"github.com/refit-run/refit/sandbox/openbao"
	"github.com/refit-run/refit/sandbox/procnode"
	"github.com/refit-run/refit/sandbox/procnode/cassandrad"
	"github.com/refit-run/refit/sandbox/procnode/natsd"
	"github.com/refit-run/refit/sandbox/world"
)

// podCommands are what the sandbox starts of itself for its datastores.
func podCommands() []*cobra.Command {
	return []*cobra.Command{
		{
			Use: world.ProcessNodeCommand + " CONFIGURATION", Hidden: true, Args: cobra.ExactArgs(1),
			Short: "Be the node whose pods are processes (what `up --datastores` starts)",
			RunE: func(cmd *cobra.Command, args []string) error {
				config, err := procnode.Load(args[0])
				if err != nil {
					return err
				}
				return procnode.Run(cmd.Context(), config)
			},
		},
		{
			Use: world.NATSCommand, Hidden: true, DisableFlagParsing: true,
			Short: "Be a NATS server, with nats-server's arguments",
			RunE:  func(_ *cobra.Command, args []string) error { return natsd.Run(args) },
		},
		{
			Use: world.CassandraCommand, Hidden: true,
			Short: "Be a Cassandra member, or with `init` write the static part of its configuration",
			RunE:  func(_ *cobra.Command, args []string) error { return cassandrad.Run(args) },
		},
		{
			Use: world.BaoCommand + " --as=VERSION", Hidden: true, DisableFlagParsing: true,
			Short: "Be the double of OpenBao's program bao, with its arguments",
			RunE: func(cmd *cobra.Command, args []string) error {
				return openbao.Program(cmd.Context(), args, cmd.OutOrStdout())
			},
		},
	}
}
