package host

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/refit-run/refit/gpuagent/child"
)

const readChild = "host.read"

type readRequest struct {
	Root    string
	Options Options
}

func init() {
	child.Register(readChild, func(_ context.Context, raw json.RawMessage) (any, error) {
		var req readRequest
		if err := json.Unmarshal(raw, &req); err != nil {
			return nil, fmt.Errorf("decode the request to read the host: %w", err)
		}
		return Host{Root: req.Root}.read(req.Options, func(step string) { child.Stage("%s", step) }), nil
	})
}

// ReadApart takes a snapshot in a child process: a file of sysfs or a mount that
// hangs holds the child, not the agent. An error is one of the child package and
// names what was being read.
func (h Host) ReadApart(ctx context.Context, o Options, limit time.Duration) (Snapshot, error) {
	var s Snapshot
	err := child.Run(ctx, child.Spec{Name: readChild, Request: readRequest{Root: h.Root, Options: o}, Timeout: limit, Reply: &s})
	return s, err
}
