package openbao

import (
	"fmt"
	"strings"

	acts "github.com/refit-run/refit/activities/openbao"

	"github.com/refit-run/refit/workflows/protocol"
)

// saw keeps what was seen last of all members: an abort may come before they
// are looked at again. An activity that has decided on no look has seen nothing.
func (r *replacing) saw(s acts.State) {
	if len(s.Versions) > 0 {
		r.last = s
	}
}

// complete adds the members to the receipt, as they were and as they are.
func (r *replacing) complete(receipt *protocol.Receipt) {
	receipt.Before, receipt.After, receipt.Plan = r.first.Versions, r.last.Versions, planned(r.first.Steps)
	if len(r.first.Versions) == 0 { // no survey was passed, so nothing was touched
		receipt.Before = r.last.Versions
	}
	receipt.Acknowledged = r.in.Acknowledge
	if old, fresh := r.last.Stale, r.last.Fresh; receipt.Outcome == protocol.OutcomeAborted && r.done > 0 && len(old) > 0 && len(fresh) > 0 {
		receipt.LeftBehind = append(receipt.LeftBehind, fmt.Sprintf("a cluster of two templates: %s of the present one, %s of an older one; start again to finish",
			strings.Join(fresh, ", "), strings.Join(old, ", ")))
	}
}

func planned(steps []acts.Step) *protocol.Plan {
	p := &protocol.Plan{}
	for _, s := range steps {
		action := "replace"
		if s.Act == acts.StepDown {
			action = "step down"
		}
		p.Changes = append(p.Changes, protocol.PlannedChange{Action: action, Object: "OpenBao member " + s.Pod})
	}
	return p
}
