package openbao

import (
	"cmp"
	"fmt"
	"net"
	"slices"
	"strconv"
	"strings"

	"github.com/refit-run/refit/activities/finding"
)

// refusals are what no waiting mends: with any of them nothing is touched, and
// nothing more is once one appears (N90, N158-N161).
func refusals(v View, want Want) []finding.Finding {
	return slices.Concat(refuseOwner(v), refuseSet(v.Set, want), refuseMembers(v, want), refusePeers(v))
}

// refuseOwner compares the release that has made the StatefulSet with the one
// whose Lease the run holds: another run on the same members would hold
// another Lease.
func refuseOwner(v View) []finding.Finding {
	differ := func(run, found string) bool { return run != "" && found != "" && run != found }
	if !differ(v.Run.Release, v.Set.Owner.Release) && !differ(v.Run.Namespace, v.Set.Owner.Namespace) {
		return nil
	}
	named := func(o Owner) string {
		return "release " + o.Release + " in namespace " + cmp.Or(o.Namespace, v.Run.Namespace)
	}
	return []finding.Finding{{
		Object: "StatefulSet " + v.Set.Name, Expected: "made by " + named(v.Run), Found: "made by " + named(v.Set.Owner),
		Why:  "the Lease of the plan's release keeps no other run off these members",
		Next: "abort, correct release and namespace in the plan, and start again",
	}}
}

func refuseSet(s Set, want Want) (out []finding.Finding) {
	object := "StatefulSet " + s.Name
	if s.Deleting {
		out = append(out, finding.Finding{
			Row: "N158", Object: object, Expected: "a StatefulSet that stays", Found: "it is being deleted",
			Why:  "nothing would make a deleted member's next pod",
			Next: "find out who deletes it and what holds it; delete no pod and no volume claim",
		})
	}
	switch {
	case s.Replicas == 1:
		out = append(out, finding.Finding{
			Row: "N160", Object: object, Expected: fmt.Sprintf("%d members", want.Members), Found: "1",
			Why:  "there is no standby to replace first and no handover: OpenBao is away while its one pod restarts and unseals",
			Next: "a single member has no procedure: confirm the Raft snapshot and plan the change with your NVCF contact, by the OpenBao patch upgrade runbook",
		})
	case s.Replicas != want.Members:
		out = append(out, finding.Finding{
			Row: "N160", Object: object, Expected: fmt.Sprintf("%d members", want.Members), Found: strconv.Itoa(s.Replicas),
			Why:  "quorum is counted from the members that the plan knows",
			Next: "correct members in the plan, or finish the change of size first",
		})
	}
	if s.Strategy != "OnDelete" {
		out = append(out, finding.Finding{
			Row: "N161", Object: object, Expected: "update strategy OnDelete", Found: s.Strategy,
			Why:  "with any other strategy its controller replaces members by itself, the active one too, whether they are unsealed or not",
			Next: "apply the dependency stage of the target release; do not patch the strategy by hand",
		})
	}
	if !sameImage(s.Image, want.Image) {
		out = append(out, finding.Finding{
			Row: "N161", Object: object, Expected: "the template's server image " + want.Image, Found: s.Image,
			Why:  "a deleted member comes back with the template's image",
			Next: "apply the dependency stage of the target release first, or correct image in the plan",
		})
	}
	return out
}

func refuseMembers(v View, want Want) (out []finding.Finding) {
	if n := len(v.Members); n > v.Set.Replicas {
		out = append(out, finding.Finding{
			Row: "N160", Object: "pods of StatefulSet " + v.Set.Name, Expected: fmt.Sprintf("at most %d", v.Set.Replicas), Found: fmt.Sprintf("%d: %s", n, v.names()),
			Next: "remove the pods that are no members, or give the plan a selector that leaves them out",
		})
	}
	id := want.ClusterID
	for _, m := range v.Members {
		if len(m.Leaving) > 0 {
			out = append(out, finding.Finding{
				Row: "N158", Object: "OpenBao member " + m.Pod, Expected: "volume claims that stay", Found: strings.Join(m.Leaving, ", ") + " is being deleted",
				Why:  "only the pod holds it: the volume, and the member's data, would go with the pod",
				Next: "delete no pod; keep the volume (its reclaim policy: Retain), copy the data, and give the member its claim back, by the OpenBao patch upgrade runbook",
			})
		}
		if !m.serving() {
			continue
		}
		if m.Storage != "raft" {
			out = append(out, finding.Finding{Row: "N160", Object: "OpenBao member " + m.Pod, Expected: "storage raft", Found: m.Storage,
				Next: "this procedure is for Raft clusters only"})
		}
		if id == "" {
			id = m.ClusterID
		}
		if m.ClusterID != "" && m.ClusterID != id {
			out = append(out, finding.Finding{
				Row: "N90", Object: "OpenBao member " + m.Pod, Expected: "cluster id " + id, Found: m.ClusterID,
				Why:  "it belongs to another cluster: its data is not the others'",
				Next: "replace nothing more and never initialise it; follow the OpenBao patch upgrade runbook",
			})
		}
		// Which members are stale is not known before the controller has seen
		// the template: that is waited for.
		switch fresh := !v.stale(m) && !v.Set.Unobserved; {
		case fresh && m.Image != v.Set.Image:
			out = append(out, finding.Finding{Row: "N163", Object: "OpenBao member " + m.Pod, Expected: "the template's image " + v.Set.Image, Found: m.Image,
				Next: "find out what changes the pod on its way in (a webhook), then retry"})
		case fresh && sameImage(v.Set.Image, want.Image) && !sameVersion(m.Version, want.Version):
			out = append(out, finding.Finding{
				Row: "N163", Object: "OpenBao member " + m.Pod, Expected: "version " + want.Version + " of image " + m.Image, Found: m.Version,
				Why:  "the image does not hold what its tag says",
				Next: "replace nothing more: check the image in the registry, or correct version in the plan",
			})
		case newer(m.Version, want.Version):
			out = append(out, finding.Finding{
				Row: "N240", Object: "OpenBao member " + m.Pod, Expected: "a version up to " + want.Version, Found: m.Version,
				Why:  "leadership must not go from a newer to an older member, and a downgrade is not validated",
				Next: "correct image in the plan; for a recovery follow the OpenBao patch upgrade runbook",
			})
		}
	}
	return out
}

// refusePeers compares Raft's list with the pods. A peer that is no pod counts
// for the quorum and never votes.
func refusePeers(v View) (out []finding.Finding) {
	if v.NoPeers != "" || len(v.Peers) == 0 {
		return nil
	}
	refuse := func(expected, found string) {
		out = append(out, finding.Finding{
			Row: "N160", Object: "Raft peers of " + v.Set.Name, Expected: expected, Found: found,
			Why:  "with a peer too many or one that nobody answers for, one more member away is no quorum",
			Next: "bring Raft's configuration in order first (bao operator raft list-peers), by the OpenBao patch upgrade runbook",
		})
	}
	taken := map[string]string{}
	coming := v.coming()
	for _, p := range v.Peers {
		pod := v.podAt(p.Address)
		switch other, twice := taken[pod]; {
		case pod == "" && coming > 0 && net.ParseIP(hostOf(p.Address)) != nil:
			coming-- // that of a pod before, until its successor has joined: waited for
		case pod == "":
			refuse("the address of a pod", fmt.Sprintf("%s at %s", p.ID, p.Address))
		case twice:
			refuse("one peer for each pod", fmt.Sprintf("%s and %s are both %s", other, p.ID, pod))
		default:
			taken[pod] = p.ID
		}
	}
	whole := len(v.Missing) == 0 && !slices.ContainsFunc(v.Members, func(m Member) bool { return !m.serving() })
	switch n := len(v.Peers); {
	case n > v.Set.Replicas, whole && n != v.Set.Replicas:
		refuse(fmt.Sprintf("%d", v.Set.Replicas), strconv.Itoa(n))
	}
	return out
}

// coming is how many pods may not have told Raft their address yet: those that
// are not there, do not serve, or were made anew, and that no peer stands for.
func (v View) coming() int {
	taken := map[string]bool{}
	for _, p := range v.Peers {
		taken[v.podAt(p.Address)] = true
	}
	n := 0
	for _, m := range v.Members {
		if !taken[m.Pod] && (!m.serving() || !v.stale(m)) {
			n++
		}
	}
	for _, name := range v.Missing {
		if !taken[name] {
			n++
		}
	}
	return n
}

// podAt is the pod that an address stands for: its IP, its name, or its name
// in the headless Service.
func (v View) podAt(address string) string {
	host := hostOf(address)
	for _, m := range v.Members {
		if v.named(host, m.Pod) || m.IP != "" && host == m.IP {
			return m.Pod
		}
	}
	for _, name := range v.Missing {
		if v.named(host, name) {
			return name
		}
	}
	return ""
}

func hostOf(address string) string {
	if host, _, err := net.SplitHostPort(address); err == nil {
		return host
	}
	return address
}

// named tells whether a host is a pod's name: alone, or in the StatefulSet's
// own Service and namespace, and in no other.
func (v View) named(host, pod string) bool {
	rest, ok := strings.CutPrefix(host, pod)
	if !ok || rest == "" {
		return ok
	}
	parts := strings.Split(strings.TrimSuffix(rest, "."), ".")[1:]
	switch {
	case rest[0] != '.' || len(parts) == 0 || parts[0] != v.Set.Service:
		return false
	case len(parts) == 1:
		return true
	}
	return parts[1] == v.Set.Namespace && (len(parts) == 2 || parts[2] == "svc")
}

func (v View) names() string {
	var names []string
	for _, m := range v.Members {
		names = append(names, m.Pod)
	}
	return strings.Join(names, ", ")
}

// newer tells whether a version is above another one; what is no version is not.
func newer(version, than string) bool {
	a, aOK := numbers(version)
	b, bOK := numbers(than)
	return aOK && bOK && slices.Compare(a, b) > 0
}

func numbers(version string) (out []int, ok bool) {
	core := tagCore.FindStringSubmatch(version)
	if core == nil {
		return nil, false
	}
	for _, part := range strings.Split(core[1], ".") {
		n, err := strconv.Atoi(part)
		if err != nil {
			return nil, false
		}
		out = append(out, n)
	}
	return out, true
}
