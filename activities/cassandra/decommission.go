package cassandra

import (
	"context"
	"slices"
	"strings"
	"time"

	"github.com/refit-run/refit/activities/evidence"
	"github.com/refit-run/refit/activities/finding"
)

// DecommissionRequest takes one member out of the ring.
type DecommissionRequest struct {
	Place
	Pod string `json:"pod"`
	// HostID is the member's in the ring, from a look before anybody left.
	HostID string `json:"hostID"`
	// Keyspaces are the applications', which one member is to serve alone.
	Keyspaces []string      `json:"keyspaces,omitempty"`
	Limit     time.Duration `json:"limit"`
}

// DecommissionResult says whether the member was out already.
type DecommissionResult struct {
	Already  bool           `json:"already,omitempty"`
	Evidence evidence.Trail `json:"evidence"`
}

// AskMore are those of the named keyspaces, and of the roles', that ask for
// more than one copy: with fewer members than a quorum of them nobody reads
// them, and nobody logs in to ask for less.
func AskMore(described []Keyspace, names []string) []Keyspace {
	var out []Keyspace
	roles := false
	for _, k := range described {
		roles = roles || k.Name == AuthKeyspace
		if (k.Name == AuthKeyspace || slices.Contains(names, k.Name)) && k.Copies() != 1 {
			out = append(out, k)
		}
	}
	if !roles {
		out = append(out, Keyspace{Name: AuthKeyspace, Class: "not described"})
	}
	return out
}

// Decommission is the activity cassandra.Decommission: what the member holds is
// streamed back to the others. Without --force the server refuses, because
// keyspaces of its own ask for three members. It is done by approval only,
// never on the first member, which holds all that was there before, and only
// as long as that one describes the keyspaces with one copy.
func (a *Activities) Decommission(ctx context.Context, r DecommissionRequest) (out DecommissionResult, err error) {
	c, err := a.open(ctx, r.Place)
	if err != nil {
		return out, err
	}
	defer c.close()
	if n, ok := ordinal(c.place.Members.StatefulSet, r.Pod); !ok || n == 0 {
		return out, finding.Finding{Object: "Cassandra member " + r.Pod, Expected: "one that has joined", Found: "the first", Why: "it holds the data",
			Next: "take out " + c.place.Members.StatefulSet + "-2, then " + c.place.Members.StatefulSet + "-1"}.Error(finding.Stop)
	}
	if r.HostID == "" {
		return out, finding.Finding{Object: "request", Expected: "the host ID of " + r.Pod, Found: "none", Next: "look at the ring again before the member is taken out"}.Error(finding.Stop)
	}
	c.record.Say("decommission " + r.Pod)
	ring, err := c.firstSees(ctx)
	if err != nil {
		return out, err
	}
	if out.Already = !in(ring, r.HostID); out.Already {
		return out, nil
	}
	if err := c.oneCopyEach(ctx, r.Keyspaces); err != nil {
		return out, err
	}
	if err := c.fence(ctx); err != nil {
		return out, err
	}
	exit, lost := c.nodetool(ctx, r.Pod, r.Limit, "decommission", "--force")
	if ctx.Err() != nil {
		return out, context.Cause(ctx)
	}
	// Whatever the call said: the first member knows who is in the ring, and
	// the member itself how far it came.
	var left, refuses bool
	var mode string
	idle := 0
	err = c.until(ctx, r.Limit, func(ctx context.Context) (evidence.Look, error) {
		ring, err := c.firstSees(ctx)
		if err != nil {
			return evidence.Look{}, err
		}
		left, mode = !in(ring, r.HostID), c.mode(ctx, r.Pod)
		if idle++; mode != "NORMAL" {
			idle = 0
		}
		refuses = mode == decommissionFailed || exit.Code != 0 && idle > refusedLooks
		return evidence.Look{Done: left || refuses || idle > startLooks, Found: "mode " + mode, Entries: len(ring), Seen: ring}, nil
	})
	out.Evidence = c.record.Trail
	if err != nil || left {
		return out, err
	}
	said := "the call ended with exit code 0"
	switch {
	case lost != nil:
		said = "the call: " + lost.Error()
	case exit.Code != 0:
		said = "the call ended with " + failed(r.Pod, exit).Found
	}
	f := finding.Finding{Object: "nodetool decommission --force on " + r.Pod, Expected: "host " + r.HostID + " gone from the ring of " + c.firstName(),
		Found: "it is still in the ring, mode " + mode + "; " + said, Next: "look at the member's log and its nodetool netstats, then retry"}
	if !refuses && idle > startLooks { // it was not begun
		return out, f.Error(finding.Retry)
	}
	return out, f.Error(finding.Stop)
}

const (
	// startLooks is how many looks a call takes at most until it shows in the mode
	// of its member: nodetool, which nobody may hear any more, starts a JVM.
	startLooks = 20
	// refusedLooks is the same for an earlier call, where this one is refused.
	refusedLooks = 3
)

const decommissionFailed = "DECOMMISSION_FAILED"

func in(ring []Neighbour, hostID string) bool {
	return slices.ContainsFunc(ring, func(n Neighbour) bool { return n.HostID == hostID })
}

func (c *cluster) firstName() string { return c.place.Members.StatefulSet + "-0" }

// firstSees is the ring as the first member sees it.
func (c *cluster) firstSees(ctx context.Context) ([]Neighbour, error) {
	status, err := c.nodetool(ctx, c.firstName(), toolLimit, "status")
	if err == nil && status.Code != 0 {
		err = failed(c.firstName(), status, "status").Error(finding.Retry)
	}
	if err != nil {
		return nil, err
	}
	return parseStatus(status.Stdout)
}

// firstDescribes is the cluster as the first member describes it.
func (c *cluster) firstDescribes(ctx context.Context) (Description, error) {
	about, err := c.nodetool(ctx, c.firstName(), toolLimit, "describecluster")
	if err == nil && about.Code != 0 {
		err = failed(c.firstName(), about, "describecluster").Error(finding.Retry)
	}
	if err != nil {
		return Description{}, err
	}
	return parseDescription(about.Stdout)
}

// oneCopyEach proves by the first member's own description that it can serve
// the roles and the named keyspaces alone.
func (c *cluster) oneCopyEach(ctx context.Context, names []string) error {
	description, err := c.firstDescribes(ctx)
	if err != nil {
		return err
	}
	if more := AskMore(description.Keyspaces, names); len(more) > 0 {
		return finding.Finding{Object: "keyspace " + more[0].Name, Expected: "one copy, as long as members are taken out", Found: more[0].String(),
			Why: "fewer members than a quorum of its copies serve nothing of it, and without a login it can't be altered back", Next: "repair system_auth on every member instead, which needs no login"}.Error(finding.Stop)
	}
	return nil
}

// mode is how a member sees itself; one that has left answers only until its
// process ends.
func (c *cluster) mode(ctx context.Context, pod string) string {
	exit, err := c.nodetool(ctx, pod, toolLimit, "netstats")
	if err == nil && exit.Code == 0 {
		for line := range strings.Lines(exit.Stdout) {
			if mode, ok := strings.CutPrefix(line, "Mode: "); ok {
				return strings.TrimSpace(mode)
			}
		}
	}
	return "unknown"
}
