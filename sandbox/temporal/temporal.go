// Package temporal runs the Temporal development server with its UI on a
// database file, as a child process. It must not know workflows.
package temporal

import (
	"context"
	"fmt"
	"time"

	"go.temporal.io/sdk/client"

	"github.com/refit-run/refit/sandbox/folder"
	"github.com/refit-run/refit/sandbox/process"
)

// Namespace is the one that the development server always has.
const Namespace = "default"

// Server is the running development server.
type Server struct {
	*process.Keeper
	address string
	ui      string
}

// longPolls is the limit of concurrent long polls in a namespace. Every agent
// of every node keeps one open; the server's default of 1200 would leave no
// room beside a thousand nodes.
const longPolls = 6000

// New prepares a server that stores everything in one file of the folder, so
// that it goes on where it was after kill -9.
func New(f folder.Folder, ports folder.Ports, program string) *Server {
	set := func(key string, value int) string { return fmt.Sprintf("%s=%d", key, value) }
	return &Server{
		address: folder.Address(ports.TemporalGRPC),
		ui:      "http://" + folder.Address(ports.TemporalUI),
		Keeper: process.Keep(process.Spec{
			Name: "temporal", Path: program, Dir: f.Root, Log: f.Path("temporal.log"), Grace: 10 * time.Second,
			Args: []string{
				"server", "start-dev", "--ip", "127.0.0.1", "--port", fmt.Sprint(ports.TemporalGRPC),
				"--ui-ip", "127.0.0.1", "--ui-port", fmt.Sprint(ports.TemporalUI),
				"--http-port", fmt.Sprint(ports.TemporalHTTP), "--metrics-port", fmt.Sprint(ports.TemporalMetrics),
				"--db-filename", f.Path("temporal.db"), "--log-level", "warn",
				"--dynamic-config-value", set("frontend.namespaceCount", longPolls),
				// A thousand agents start at once.
				"--dynamic-config-value", set("frontend.namespaceRPS", 12000),
				"--dynamic-config-value", set("frontend.rps", 12000),
				"--dynamic-config-value", set("matching.rps", 12000),
				// An agent has one poller; with several partitions its poll
				// would wait on one while the task lies in another.
				"--dynamic-config-value", set("matching.numTaskqueueReadPartitions", 1),
				"--dynamic-config-value", set("matching.numTaskqueueWritePartitions", 1),
			},
		}),
	}
}

// Address of the gRPC frontend.
func (s *Server) Address() string { return s.address }

// UI is the web page's address.
func (s *Server) UI() string { return s.ui }

// Connect waits until the namespace can be used and returns a client.
func (s *Server) Connect(ctx context.Context, options client.Options) (client.Client, error) {
	options.HostPort, options.Namespace = s.address, Namespace
	var c client.Client
	err := s.Keeper.Ready(ctx, 100*time.Millisecond, func(ctx context.Context) error {
		attempt, cancel := context.WithTimeout(ctx, 2*time.Second)
		defer cancel()
		var err error
		c, err = client.DialContext(attempt, options)
		return err
	})
	return c, err
}
