package nats

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"time"

	"go.temporal.io/sdk/temporal"

	"github.com/refit-run/refit/activities/evidence"
	"github.com/refit-run/refit/activities/finding"
	"github.com/refit-run/refit/activities/lease"
)

// ListRequest asks which streams have fewer than three replicas.
type ListRequest struct {
	Place
	Logins []Login `json:"logins,omitempty"`
	// Leave names streams (ACCOUNT/STREAM) that are not touched.
	Leave []string `json:"leave,omitempty"`
	// Limit is how long servers that do not answer are waited for.
	Limit time.Duration `json:"limit"`
}

// ListResult is what is to be raised, and how each stream was before.
type ListResult struct {
	Raise []Record `json:"raise,omitempty"`
	// Already are those that have as many or more: an earlier run may have
	// ended before it had proven them. Left counts those that the plan leaves.
	Already []Record `json:"already,omitempty"`
	Left    int      `json:"left,omitempty"`
	// Unknown are names in leave that no stream has. A list that is made anew
	// may have some: streams are deleted meanwhile.
	Unknown  []finding.Finding `json:"unknown,omitempty"`
	Findings []finding.Finding `json:"findings,omitempty"`
	Evidence evidence.Trail    `json:"evidence"`
}

// List is the activity nats.List (N189). It proves that every stream can be
// raised before the first one is: all servers answer, every stream has a
// leader, and there is a login into its account that finds this very stream.
func (a *Activities) List(ctx context.Context, r ListRequest) (ListResult, error) {
	var out ListResult
	l, err := a.looker(ctx, r.Place)
	if err != nil {
		return out, err
	}
	defer l.close()
	err = l.until(ctx, r.Limit, settlePace, func(ctx context.Context, answers []Answer) (verdict, error) {
		v := Judge(answers)
		out = toRaise(v, r.Leave)
		found := evidence.InWords(out.Findings)
		out.Findings = evidence.Shown(out.Findings)
		if len(out.Findings) == 0 {
			if err := l.proveLogins(ctx, r.Logins, out.Raise, answers, v); err != nil {
				return verdict{}, err
			}
		}
		return verdict{len(out.Findings) == 0 || v.Malformed, found, out}, nil
	})
	out.Evidence = l.record.Trail
	return out, err
}

// toRaise is the pure part of List.
func toRaise(v View, leave []string) ListResult {
	out := ListResult{Findings: v.Troubles}
	if n := len(v.Servers); n < TargetReplicas && len(v.Troubles) == 0 {
		out.Findings = append(out.Findings, finding.Finding{
			Row: "N190", Object: "NATS servers", Expected: fmt.Sprintf("at least %d", TargetReplicas), Found: fmt.Sprint(n),
			Next: "scale NATS first (high availability mode preferred or enforced)",
		})
	}
	for _, name := range leave {
		if !slices.ContainsFunc(v.Streams, func(s Stream) bool { return name == s.Account+"/"+s.Name }) {
			out.Unknown = append(out.Unknown, finding.Finding{
				Row: "N189", Object: "stream " + name + " in leave", Expected: "a stream of that name", Found: "none on any server",
				Why: "the stream that is meant would be raised", Next: "correct leave in the plan and start again",
			})
		}
	}
	for _, s := range v.Streams {
		switch {
		case slices.Contains(leave, s.Account+"/"+s.Name):
			out.Left++
		case s.Leader == "":
			out.Findings = append(out.Findings, finding.Finding{Row: "N189", Object: s.String(), Expected: "a leader", Found: s.Unled,
				Next: "a stream without a leader can't be raised: bring its servers back, then retry"})
		case s.Replicas < TargetReplicas:
			out.Raise = append(out.Raise, s.record())
		default:
			out.Already = append(out.Already, s.record())
		}
	}
	return out
}

// proveLogins logs in to every account that has a stream to raise.
func (l *looker) proveLogins(ctx context.Context, logins []Login, raise []Record, answers []Answer, v View) error {
	proven := map[string]bool{}
	for _, r := range raise {
		s, _ := v.find(r)
		if proven[s.AccountID] {
			continue
		}
		if _, err := l.info(ctx, logins, s, answers); err != nil {
			return err
		}
		proven[s.AccountID] = true
	}
	return nil
}

// streamInfo is the part of the API's answer that is needed here.
type streamInfo struct {
	Config  map[string]json.RawMessage `json:"config"`
	Created time.Time                  `json:"created"`
}

func (i streamInfo) replicas() int {
	var n int
	if json.Unmarshal(i.Config["num_replicas"], &n) != nil || n == 0 {
		return 1 // the server's default
	}
	return n
}

// session is a login that has found its stream.
type session struct {
	update func(ctx context.Context, config map[string]json.RawMessage) (streamInfo, error)
	info   streamInfo
	close  func()
}

// info logs in to the stream's account and asks for the stream. Another stream
// under the same name, in another account, has another time of creation.
func (l *looker) info(ctx context.Context, logins []Login, s Stream, answers []Answer) (streamInfo, error) {
	open, err := l.open(ctx, logins, s, answers)
	if err != nil {
		return streamInfo{}, err
	}
	open.close()
	return open.info, nil
}

func (l *looker) open(ctx context.Context, logins []Login, s Stream, answers []Answer) (session, error) {
	at := slices.IndexFunc(logins, func(g Login) bool { return g.Account == s.Account || g.Account == s.AccountID })
	if at < 0 {
		return session{}, finding.Finding{
			Row: "N190", Object: s.String(), Expected: "a login into account " + s.Account, Found: "none in the plan",
			Why: "only a user of its account can change a stream", Next: "add the account to logins, or the stream to leave",
		}.Error(finding.Stop)
	}
	conn, err := l.connect(ctx, logins[at], answers)
	if err != nil {
		return session{}, finding.InRow(err, "N190")
	}
	var info streamInfo
	err = call(ctx, conn, "STREAM.INFO."+s.Name, nil, &info)
	if err == nil && !info.Created.Equal(s.Created) {
		err = l.another(ctx, s, info.Created)
	}
	if err != nil {
		conn.Close()
		return session{}, finding.InRow(err, "N190")
	}
	return session{info: info, close: conn.Close, update: func(ctx context.Context, config map[string]json.RawMessage) (streamInfo, error) {
		var changed streamInfo
		err := call(ctx, conn, "STREAM.UPDATE."+s.Name, config, &changed)
		return changed, finding.InRow(err, "N190")
	}}, nil
}

// another is the error of a stream that is not the one that was looked at: its
// service has made it anew since then, or the login leads elsewhere.
func (l *looker) another(ctx context.Context, s Stream, created time.Time) error {
	f := finding.Finding{Row: "N190", Object: s.String(), Expected: "the stream created at " + s.Created.Format(time.RFC3339Nano)}
	answers, err := l.look(ctx)
	if err != nil {
		return err
	}
	found := "one created at " + created.Format(time.RFC3339Nano)
	if now, ok := Judge(answers).find(s.record()); ok && now.Created.Equal(created) {
		f.Found, f.Next = found+": it was made anew since it was looked at", "it is looked at again"
		return f.Error(finding.Retry)
	}
	f.Found, f.Next = found+": the login leads into another account than "+s.Account, "correct logins in the plan"
	return f.Error(finding.Stop)
}

// RaiseRequest raises one stream.
type RaiseRequest struct {
	Place
	Logins []Login `json:"logins,omitempty"`
	// Stream is how it was before the run changed anything.
	Stream Record        `json:"stream"`
	Limit  time.Duration `json:"limit"`
}

// RaiseResult says whether the stream has three current copies now.
type RaiseResult struct {
	OK bool `json:"ok"`
	// Changed: it had fewer before the run and has three by now, whichever try
	// has sent the update.
	Changed bool `json:"changed,omitempty"`
	// Before is how it was right before this try raised it; if none was needed,
	// what the request says.
	Before   Record            `json:"before"`
	Findings []finding.Finding `json:"findings,omitempty"`
	Evidence evidence.Trail    `json:"evidence"`
}

// Raise is the activity nats.Raise (N190). It waits until every server
// answers, raises the stream if it is not raised, and waits until the copies
// are there for the first time; that they stay is proven by Settle. When the
// run is aborted meanwhile, what was changed by then is a result, not an error.
func (a *Activities) Raise(ctx context.Context, r RaiseRequest) (out RaiseResult, err error) {
	l, err := a.looker(ctx, r.Place)
	if err != nil {
		return out, err
	}
	defer l.close()
	kept, err := remembered([]Record{r.Stream}, l.record.Kept())
	if err != nil {
		return out, err
	}
	out.Before = kept[0]
	err = l.until(ctx, r.Limit, raisePace, func(ctx context.Context, answers []Answer) (verdict, error) {
		v := Judge(answers)
		s, known := v.find(r.Stream)
		known = known && s.Created.Equal(r.Stream.Created)
		single := known && s.Leader != "" && s.Replicas < TargetReplicas
		if single && out.Before.State.Messages == 0 {
			out.Before.State = s.State // there was nothing that a restart could have lost
		}
		waiting, lost := raised(v, []Record{out.Before})
		if single && len(v.Troubles) == 0 && len(lost) == 0 {
			before, err := json.Marshal([]Record{out.Before})
			if err != nil {
				return verdict{}, err
			}
			if err := l.record.Keep(string(before)); err != nil { // the next try judges by it
				return verdict{}, err
			}
			if err := l.raise(ctx, r.Logins, s, answers); err != nil {
				return verdict{}, err
			}
			out.Changed, out.Before.State = true, s.State
			return verdict{false, "raised; waiting for its replicas", out}, nil
		}
		out.Changed = out.Changed || known && s.Replicas >= TargetReplicas && r.Stream.Replicas < TargetReplicas
		found := append(lost, waiting...)
		out.OK, out.Findings = len(found) == 0, evidence.Shown(found)
		return verdict{out.OK || len(lost) > 0 || v.Malformed, evidence.InWords(found), out}, nil
	})
	out.Evidence = l.record.Trail
	if out.Changed && ctx.Err() != nil && temporal.IsCanceledError(context.Cause(ctx)) {
		return out, nil // a worker that stops has another cause: the next try goes on
	}
	return out, err
}

// raise sends the update unless the stream has as many replicas by now. The
// configuration is sent back as the server gave it, one number changed.
func (l *looker) raise(ctx context.Context, logins []Login, s Stream, answers []Answer) error {
	open, err := l.open(ctx, logins, s, answers)
	if err != nil {
		return err
	}
	defer open.close()
	if open.info.replicas() >= TargetReplicas {
		return nil
	}
	held := lease.Held{Namespace: l.place.Namespace, Release: l.place.Release, Holder: l.place.Holder}
	if err := held.Check(ctx, l.client.Typed); err != nil {
		return err
	}
	config := open.info.Config
	config["num_replicas"] = json.RawMessage(fmt.Sprint(TargetReplicas))
	changed, err := open.update(ctx, config)
	if err == nil && changed.replicas() != TargetReplicas {
		err = finding.Finding{Row: "N190", Object: s.String(), Expected: fmt.Sprintf("%d replicas after the update", TargetReplicas),
			Found: fmt.Sprint(changed.replicas()), Next: "look at the server's log"}.Error(finding.Stop)
	}
	return err
}
