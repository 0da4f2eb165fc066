package openbao

import (
	"fmt"
	"strings"

	"github.com/refit-run/refit/activities/finding"
)

const (
	sealedHint = "let auto-unseal finish, then retry; a member that stays sealed for more than five minutes: look at the log of its unseal sidecar and " + recovery
	deadHint   = "look at the pod's events and log, bring it back, then retry; a member that does not come back: " + recovery
	joinHint   = "never initialise it; look at its log for why it does not join, then retry; a member that does not join: " + recovery
	lagHint    = "it is still catching up: give it time, then retry; one that does not get nearer: look at its disk and network, and " + recovery
	learnHint  = "wait until it is promoted, then retry; one that stays a learner: " + recovery
	leaderHint = "bring members back until a majority is unsealed, then retry; a majority that elects nobody: look at their logs, and " + recovery
	recovery   = "follow the recovery guidance of the OpenBao patch upgrade runbook"
)

// waiting is all that stands between this look and a whole cluster, in which
// one member may be away: every member Ready, unsealed, a voter and as far as
// caught, exactly one active, and all following it (N89, N91, N164). Nothing
// here asks autopilot: it calls a sealed member healthy for seconds, and in a
// cluster of two versions it is wrong for as long as that lasts.
func waiting(v View, caught uint64) (out []finding.Finding) {
	if v.Set.Unobserved {
		out = append(out, finding.Finding{Row: "N161", Object: "StatefulSet " + v.Set.Name, Expected: "its template observed by the controller", Found: "not yet",
			Next: "see that the cluster's controller manager runs"})
	}
	for _, name := range v.Missing {
		out = append(out, finding.Finding{Row: "N89", Object: "OpenBao member " + name, Expected: "a pod", Found: "none",
			Why: "another member away would be no quorum", Next: deadHint})
	}
	for _, m := range v.Members {
		out = append(out, memberWaits(m, caught)...)
	}
	if active, why := v.Active(); why != "" {
		out = append(out, finding.Finding{Row: "N91", Object: "OpenBao in " + v.Set.Name, Expected: "one active member that all follow", Found: why,
			Why: "without a leader nothing is written, and a deletion could end the quorum", Next: leaderHint})
	} else if v.NoPeers != "" {
		out = append(out, finding.Finding{Row: "N160", Object: "Raft peers of " + v.Set.Name, Expected: "a list from " + active.Pod, Found: v.NoPeers,
			Next: "see that the token may read sys/storage/raft/configuration, then retry"})
	}
	var learning []string
	for _, p := range v.Peers {
		if !p.Voter {
			learning = append(learning, p.ID)
		}
	}
	switch short := v.Set.Replicas - len(v.Peers); {
	case len(learning) > 0:
		out = append(out, finding.Finding{Row: "N164", Object: "Raft peers of " + v.Set.Name, Expected: "voters only", Found: strings.Join(learning, ", ") + " still learns",
			Next: learnHint})
	case len(v.Peers) > 0 && short > 0:
		out = append(out, finding.Finding{Row: "N164", Object: "Raft peers of " + v.Set.Name, Expected: fmt.Sprintf("%d", v.Set.Replicas), Found: fmt.Sprintf("%d: a member has not joined", len(v.Peers)),
			Next: joinHint})
	}
	out = append(out, peersWait(v)...)
	return out
}

// peersWait are the peers that stand for no pod yet: what is more than that is
// refused (refusePeers).
func peersWait(v View) (out []finding.Finding) {
	for _, p := range v.Peers {
		if v.podAt(p.Address) == "" {
			out = append(out, finding.Finding{Row: "N160", Object: "Raft peers of " + v.Set.Name, Expected: "the address of a pod", Found: p.ID + " at " + p.Address,
				Why: "its pod was made anew and has not told Raft its address", Next: joinHint})
		}
	}
	return out
}

// memberWaits is what one member is waited for; only the first reason counts,
// the others follow from it.
func memberWaits(m Member, caught uint64) []finding.Finding {
	f := finding.Finding{Row: "N89", Object: "OpenBao member " + m.Pod, Next: deadHint, Why: "another member away would be no quorum"}
	switch {
	case m.Deleting:
		f.Expected, f.Found = "a pod that stays", "it is being deleted"
	case m.Trouble != "":
		f.Expected, f.Found = "an answer", m.Trouble
	case !m.Initialized:
		f.Expected, f.Found = "initialised", "it is not: it has not joined the cluster yet"
		f.Next = joinHint
	case m.Sealed:
		f.Row, f.Expected, f.Found, f.Next = "N163", "unsealed", "sealed", sealedHint
		if m.Unready == "" {
			f.Found = "Ready and sealed"
		}
	case m.Unready != "":
		f.Row, f.Expected, f.Found = "N162", "Ready", m.Unready
	case m.ClusterID == "":
		f.Row, f.Expected, f.Found = "N90", "a cluster id", "none"
	case m.Applied < caught:
		f.Row, f.Expected, f.Found = "N163", fmt.Sprintf("applied up to %d", caught), fmt.Sprintf("applied up to %d", m.Applied)
		f.Next = lagHint
	default:
		return nil
	}
	return []finding.Finding{f}
}
