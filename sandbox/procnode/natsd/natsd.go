// Package natsd is the real NATS server as a program of the process node. It
// is nats-server but for two things: it finds names by the node's DNS server,
// and where a container would listen everywhere it listens on the pod's
// address.
package natsd

import (
	"flag"
	"fmt"
	"net"
	"os"

	"github.com/nats-io/nats-server/v2/server"

	"github.com/refit-run/refit/sandbox/procnode/names"
	"github.com/refit-run/refit/sandbox/procnode/pod"
)

// Run is the server until it was asked to end; args are nats-server's own.
func Run(args []string) error {
	if dns := os.Getenv(pod.DNSVariable); dns != "" {
		net.DefaultResolver = names.Resolver(dns)
	}
	flags := flag.NewFlagSet("nats-server", flag.ContinueOnError)
	options, err := server.ConfigureOptions(flags, args, server.PrintServerAndExit, flags.Usage, server.PrintTLSHelpAndDie)
	if err != nil {
		return fmt.Errorf("nats-server: %w", err)
	}
	if ip := os.Getenv(pod.IPVariable); ip != "" {
		for _, host := range []*string{&options.Host, &options.HTTPHost, &options.Cluster.Host} {
			if *host == "" || *host == server.DEFAULT_HOST {
				*host = ip
			}
		}
	}
	s, err := server.NewServer(options)
	if err != nil {
		return fmt.Errorf("nats-server: %w", err)
	}
	s.ConfigureLogger()
	if err := server.Run(s); err != nil {
		return fmt.Errorf("nats-server: %w", err)
	}
	s.WaitForShutdown()
	return nil
}
