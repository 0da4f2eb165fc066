package cassandra

import (
	"context"
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/refit-run/refit/activities/evidence"
	"github.com/refit-run/refit/activities/finding"
)

// LoginsRequest proves the administrator's login on every member.
type LoginsRequest struct {
	Place
	Login Login `json:"login"`
	// Pod, when set, is the only member that is asked.
	Pod string `json:"pod,omitempty"`
	// Limit is how long a missing quorum is waited for. A refused login is asked
	// for again for a few seconds only, because members remember roles as they
	// were; after that its reason does not pass by itself.
	Limit time.Duration `json:"limit"`
}

// LoginsResult says how each member took the login.
type LoginsResult struct {
	OK bool `json:"ok"`
	// Accepted and Refused are pods.
	Accepted []string          `json:"accepted,omitempty"`
	Refused  []string          `json:"refused,omitempty"`
	Findings []finding.Finding `json:"findings,omitempty"`
	Evidence evidence.Trail    `json:"evidence"`
}

// LockedOut says that every member has answered and refused the login: one that
// did not answer may let the administrator in.
func (r LoginsResult) LockedOut() bool {
	return len(r.Refused) > 0 && len(r.Accepted) == 0 && len(r.Refused) == len(r.Findings)
}

// Logins is the activity cassandra.Logins (N143): one session for each member,
// which reads the roles there.
func (a *Activities) Logins(ctx context.Context, r LoginsRequest) (out LoginsResult, err error) {
	c, err := a.open(ctx, r.Place)
	if err != nil {
		return out, err
	}
	defer c.close()
	if _, err := c.password(ctx, r.Login); err != nil {
		return out, err
	}
	begun, remembered := time.Now(), 3*a.pace()
	err = c.until(ctx, r.Limit, func(ctx context.Context) (evidence.Look, error) {
		pods, missing, err := c.pods(ctx)
		if err != nil {
			return evidence.Look{}, err
		}
		if r.Pod != "" {
			missing, pods = nil, slices.DeleteFunc(pods, func(p corev1.Pod) bool { return p.Name != r.Pod })
		}
		trail := out.Evidence
		out = LoginsResult{Evidence: trail}
		for i := range pods {
			switch err := c.prove(ctx, &pods[i], r.Login); {
			case err == nil:
				out.Accepted = append(out.Accepted, pods[i].Name)
			case ctx.Err() != nil:
				return evidence.Look{}, context.Cause(ctx)
			default:
				f, class, told := finding.Of(err)
				refuses := f.Found == refusedLogin
				if !told || class == finding.Stop && !refuses { // the member was not asked: no word of its about the login
					return evidence.Look{}, finding.InRow(err, "N143")
				}
				f.Row = "N143"
				out.Findings = append(out.Findings, f)
				if refuses {
					out.Refused = append(out.Refused, pods[i].Name)
				}
			}
		}
		for _, name := range missing {
			out.Findings = append(out.Findings, finding.Finding{Row: "N143", Object: "login on " + name, Expected: "a pod", Found: "there is no such pod",
				Next: "look at the events of StatefulSet " + c.place.Members.StatefulSet})
		}
		out.OK = len(out.Findings) == 0 && len(pods) > 0
		waits := len(out.Findings) > len(out.Refused)
		return evidence.Look{Done: out.OK || !waits && time.Since(begun) > remembered, Found: fmt.Sprintf("%d members accept the login, %d refuse it: %s", len(out.Accepted), len(out.Refused), evidence.InWords(out.Findings)),
			Entries: len(pods), Seen: out}, nil
	})
	out.Evidence = c.record.Trail
	return out, err
}

// prove logs in to one member and reads the roles. A role that a member lets
// in and then can't read is no proof.
func (c *cluster) prove(ctx context.Context, pod *corev1.Pod, l Login) error {
	s, err := c.login(ctx, pod, l)
	if err != nil {
		return err
	}
	defer s.Close()
	rows, err := s.rows(ctx, "SELECT role FROM system_auth.roles WHERE role = ?", l.WithDefaults().User)
	if err != nil {
		return err
	}
	if len(rows) == 0 {
		return finding.Finding{Object: "roles as " + pod.Name + " reads them", Expected: "the row of " + l.WithDefaults().User, Found: "none",
			Why: "the row is missing on this member", Next: "repair system_auth on every member"}.Error(finding.Wait)
	}
	return nil
}
