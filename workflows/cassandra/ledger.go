package cassandra

import (
	"fmt"
	"time"

	"go.temporal.io/sdk/workflow"

	acts "github.com/refit-run/refit/activities/cassandra"

	"github.com/refit-run/refit/workflows/datastore"
	"github.com/refit-run/refit/workflows/protocol"
	"github.com/refit-run/refit/workflows/release"
	"github.com/refit-run/refit/workflows/stage"
	"github.com/refit-run/refit/workflows/window"
)

// Ledger reads what the migrations have recorded of each keyspace. A dirty
// ledger, or another version than the plan expects, parks for a person.
func Ledger(ctx workflow.Context, in LedgerInput) (LedgerResult, error) {
	if problems := in.Validate(); len(problems) > 0 {
		return LedgerResult{}, release.BadInput("input", problems)
	}
	r, err := newRun(ctx, protocol.CassandraLedger, in.Site, in.Login, Limits{Login: in.Limit}, nil)
	if err != nil {
		return LedgerResult{}, err
	}
	var out LedgerResult
	outcome, err := r.Through(stage.Stage{Name: "ledger", Purpose: "see that no migration of a keyspace was left half done",
		Do: func(ctx workflow.Context, s *stage.Scope) error {
			var got acts.LedgerResult
			err := r.Do(ctx, s, acts.LedgerActivity, "read the ledgers of the migrations", r.limits.Login+window.Duration(time.Minute), acts.LedgerRequest{
				Place: r.place(), Login: r.login, Keyspaces: keyspaces(in.Keyspaces), Expect: in.Expect, Limit: r.limits.Login.D(),
			}, &got)
			if err != nil {
				return err
			}
			r.Keep(got.Evidence)
			out.Entries, out.Absent = got.Entries, got.Absent
			if !got.OK {
				return datastore.Parking(got.Findings)
			}
			s.Note("%d ledgers clean, without one: %s", len(got.Entries), list(got.Absent))
			return nil
		}})
	if err != nil {
		return LedgerResult{}, err
	}
	if len(out.Absent) > 0 {
		r.Warn(fmt.Sprintf("no ledger: %s", list(out.Absent)))
	}
	out.Receipt = r.Close(outcome)
	return out, nil
}
