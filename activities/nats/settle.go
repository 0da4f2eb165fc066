package nats

import (
	"context"
	"fmt"
	"time"

	"github.com/refit-run/refit/activities/evidence"
	"github.com/refit-run/refit/activities/finding"
)

// SettleRequest proves the raise of several streams.
type SettleRequest struct {
	Place
	Streams []Record      `json:"streams"`
	Limit   time.Duration `json:"limit"`
}

// SettleResult is the verdict of the last look.
type SettleResult struct {
	OK       bool              `json:"ok"`
	Findings []finding.Finding `json:"findings,omitempty"`
	Evidence evidence.Trail    `json:"evidence"`
}

// Settle is the activity nats.Settle (N191): every stream has a leader and two
// current replicas, nothing was lost, and all that without a break and with
// the same leaders for StableFor, in looks that are never far apart. It only
// reads.
func (a *Activities) Settle(ctx context.Context, r SettleRequest) (out SettleResult, err error) {
	l, err := a.looker(ctx, r.Place)
	if err != nil {
		return out, err
	}
	defer l.close()
	var calm steady
	all := fmt.Sprintf("%d raised streams", len(r.Streams))
	err = l.until(ctx, r.Limit, settlePace, func(_ context.Context, answers []Answer) (verdict, error) {
		v := Judge(answers)
		waiting, lost := raised(v, r.Streams)
		wrong := append(lost, waiting...)
		held := calm.look(time.Now(), v, r.Streams, len(wrong) == 0)
		out.OK, out.Findings = len(wrong) == 0 && held >= a.stable(), evidence.Shown(wrong)
		if len(wrong) > 0 || out.OK {
			return verdict{out.OK || len(lost) > 0 || v.Malformed, evidence.InWords(wrong), out}, nil
		}
		out.Findings = []finding.Finding{{
			Row: "N191", Object: all, Expected: fmt.Sprintf("current, with the same leaders, for %s", a.stable()),
			Found: fmt.Sprintf("for %s", held.Round(time.Millisecond)),
			Next:  fmt.Sprintf("replicas or leaders flap, or a look takes more than %s: see that all servers are up and not short of CPU, then retry", maxGap),
		}}
		return verdict{false, "all current, waiting whether they stay so", out}, nil
	})
	out.Evidence = l.record.Trail
	return out, err
}
