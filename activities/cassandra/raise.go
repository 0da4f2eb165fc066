package cassandra

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/refit-run/refit/activities/artifact"
	"github.com/refit-run/refit/activities/evidence"
	"github.com/refit-run/refit/activities/finding"
	"github.com/refit-run/refit/activities/kube"
)

// RaiseRequest raises keyspaces to so many copies.
type RaiseRequest struct {
	Place
	Login     Login    `json:"login"`
	Keyspaces []string `json:"keyspaces,omitempty"`
	// All raises every keyspace that is not a member's own, system_auth last.
	All    bool `json:"all,omitempty"`
	Factor int  `json:"factor"`
	// PlanOnly stops once it is known what would be altered.
	PlanOnly bool `json:"planOnly,omitempty"`
	// Seen: all members were seen up just now, so that they are not asked again
	// before the first statement.
	Seen bool `json:"seen,omitempty"`
	// Limit is how long a missing quorum is waited for.
	Limit time.Duration `json:"limit"`
}

// RaiseResult is what was there before, and what was done.
type RaiseResult struct {
	DataCenter string `json:"dataCenter"`
	Plan
	// Before is the list of all keyspaces with their replication, kept before
	// the first statement (N185).
	Before artifact.Ref `json:"before,omitzero"`
	// At is the member's clock when the keyspaces had their copies: a repair
	// that counts has started after it.
	At time.Time `json:"at"`
}

// Raise is the activity cassandra.Raise (N139, N141, N144, N184-N186, N188): it
// proves that the data centre that the pods are told is the one that the
// members are in, keeps the replication of all keyspaces, and alters what needs
// it. It may run twice.
func (a *Activities) Raise(ctx context.Context, r RaiseRequest) (out RaiseResult, err error) {
	c, err := a.open(ctx, r.Place)
	if err != nil {
		return out, err
	}
	defer c.close()
	told, err := c.dataCenter(ctx)
	if err != nil {
		return out, err
	}
	err = c.patient(ctx, r.Limit, func(ctx context.Context) error {
		err := a.raise(ctx, c, r, told, &out)
		if err != nil && r.All && letsNobodyIn(err) && c.authHas(ctx, told, r.Factor) {
			return unanswered(r.Factor)
		}
		return err
	})
	return out, err
}

// unanswered ends the wait for a quorum that can't come: the roles ask for more
// copies than there are members, and only more members let anybody in again.
func unanswered(factor int) error {
	return finding.Finding{
		Row: "N188", Object: "keyspace " + AuthKeyspace, Expected: "an answer to who has logged in", Found: fmt.Sprintf("it has its %d copies, and nobody is let in any more", factor),
		Why: "a quorum of the copies is more than the members that are there", Next: "bring the other members at once",
	}.Error(finding.Stop)
}

// authHas asks the first member, without a login, whether system_auth has so
// many copies.
func (c *cluster) authHas(ctx context.Context, center string, factor int) bool {
	description, err := c.firstDescribes(ctx)
	return err == nil && slices.ContainsFunc(description.Keyspaces, func(k Keyspace) bool {
		return k.Name == AuthKeyspace && k.Raised(center, factor)
	})
}

// raise is one try.
func (a *Activities) raise(ctx context.Context, c *cluster, r RaiseRequest, told string, out *RaiseResult) error {
	s, err := c.loginFirst(ctx, r.Login)
	if err != nil {
		return err
	}
	defer s.Close()
	if out.DataCenter, err = s.sameCenter(ctx, told); err != nil {
		return err
	}
	live, err := s.keyspaces(ctx)
	if err != nil {
		return err
	}
	var strange []finding.Finding
	if out.Plan, strange = plan(live, r.Keyspaces, r.All, told, r.Factor); len(strange) > 0 {
		return strange[0].Error(finding.Stop)
	}
	if out.Before.Name == "" {
		if out.Before, err = evidence.Store(ctx, a.Artifacts, "keyspaces.json", len(live), live); err != nil {
			return err
		}
	}
	if r.PlanOnly {
		out.At, err = s.clock(ctx)
		return err
	}
	if len(out.Raise) > 0 && !r.Seen {
		if err := c.together(ctx); err != nil {
			return err
		}
	}
	for _, k := range out.Raise {
		c.record.Say("raise " + k.Name)
		if err := c.fence(ctx); err != nil {
			return err
		}
		if err := s.statement(ctx, alter(k.Name, told, r.Factor)); err != nil {
			return err
		}
	}
	if live, err = s.keyspaces(ctx); err != nil {
		return err
	}
	if left, _ := plan(live, r.Keyspaces, r.All, told, r.Factor); len(left.Raise) > 0 {
		return finding.Finding{Row: "N188", Object: "keyspace " + left.Raise[0].Name, Expected: fmt.Sprintf("%d copies in %s", r.Factor, told), Found: left.Raise[0].String(),
			Next: "somebody else alters it, or members disagree on the schema"}.Error(finding.Wait)
	}
	out.At, err = s.clock(ctx)
	return err
}

// together sees right before a statement that no member is away, by its pods
// and by the first member's own table: copies that are asked for while one is
// make more rows unavailable than are without them, and can't be repaired.
func (c *cluster) together(ctx context.Context) error {
	pods, missing, err := c.pods(ctx)
	if err != nil {
		return err
	}
	away := func(object, found string) error {
		return finding.Finding{Row: "N187", Object: object, Expected: "all members up before the keyspaces are raised", Found: found,
			Why: "with more copies than can answer, more rows are unavailable than now", Next: "bring it back, then retry"}.Error(finding.Wait)
	}
	if len(missing) > 0 {
		return away("Cassandra member "+missing[0], "there is no such pod")
	}
	for i := range pods {
		if why := kube.Unready(&pods[i]); why != "" {
			return away("Cassandra member "+pods[i].Name, why)
		}
	}
	ring, err := c.firstSees(ctx)
	if err != nil {
		return err
	}
	for _, n := range ring {
		if n.State != UpNormal {
			return away("Cassandra member "+n.Address, n.State+" as "+c.firstName()+" sees it")
		}
	}
	if len(ring) != len(pods) {
		return away("the ring as "+c.firstName()+" sees it", fmt.Sprintf("%d members of %d pods", len(ring), len(pods)))
	}
	return nil
}

// loginFirst logs in to the first member that is Ready.
func (c *cluster) loginFirst(ctx context.Context, l Login) (*session, error) {
	pod, err := c.first(ctx)
	if err != nil {
		return nil, err
	}
	return c.login(ctx, &pod, l)
}

// dataCenter is the name that the pods are told (N139).
func (c *cluster) dataCenter(ctx context.Context) (string, error) {
	set, err := c.set(ctx)
	if err != nil {
		return "", err
	}
	value, _ := variable(set.Spec.Template.Spec, c.place.Members.Container, dataCenterVariable)
	return value, ValidDataCenter(value)
}

const (
	dataCenterVariable = "CASSANDRA_DC"
	seedsVariable      = "CASSANDRA_SEEDS"
)

// variable is a plain value in a container's environment.
func variable(spec corev1.PodSpec, container, name string) (string, bool) {
	for _, c := range spec.Containers {
		if c.Name != container {
			continue
		}
		for _, e := range c.Env {
			if e.Name == name && e.ValueFrom == nil {
				return e.Value, true
			}
		}
	}
	return "", false
}

// sameCenter proves that the member is in the data centre that the pods are
// told: a factor under another name would take all copies away (N184).
func (s *session) sameCenter(ctx context.Context, told string) (string, error) {
	rows, err := s.rows(ctx, "SELECT data_center FROM system.local")
	if err != nil {
		return "", err
	}
	live := ""
	if len(rows) == 1 {
		live, _ = rows[0]["data_center"].(string)
	}
	if live == told {
		return live, nil
	}
	return live, finding.Finding{
		Row: "N184", Object: "data centre of Cassandra", Expected: told + " (" + dataCenterVariable + " of the StatefulSet)", Found: fmt.Sprintf("%q on %s", live, s.pod),
		Why: "copies would be asked for in a data centre without members", Next: "find out which of the two is right; nothing was altered",
	}.Error(finding.Stop)
}

func (s *session) keyspaces(ctx context.Context) ([]Keyspace, error) {
	rows, err := s.rows(ctx, "SELECT keyspace_name, replication FROM system_schema.keyspaces")
	if err != nil {
		return nil, err
	}
	out := make([]Keyspace, 0, len(rows))
	for _, row := range rows {
		name, _ := row["keyspace_name"].(string)
		options, _ := row["replication"].(map[string]string)
		out = append(out, replication(name, options))
	}
	sortKeyspaces(out)
	return out, nil
}

// clock is the member's.
func (s *session) clock(ctx context.Context) (time.Time, error) {
	rows, err := s.rows(ctx, "SELECT toTimestamp(now()) AS now FROM system.local")
	if err != nil {
		return time.Time{}, err
	}
	if len(rows) == 1 {
		if now, ok := rows[0]["now"].(time.Time); ok {
			return now.UTC(), nil
		}
	}
	return time.Time{}, finding.Finding{Object: "clock of " + s.pod, Expected: "one row", Found: strings.TrimSpace(fmt.Sprint(rows))}.Error(finding.Stop)
}
