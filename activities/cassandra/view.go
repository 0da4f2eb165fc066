package cassandra

import (
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"github.com/refit-run/refit/activities/finding"
)

// Answer is what one member said.
type Answer struct {
	Pod       string   `json:"pod"`
	Addresses []string `json:"addresses,omitempty"`
	// Unready says why Kubernetes does not call the pod Ready. Ready itself
	// proves little: it is the member's own view of itself.
	Unready string `json:"unready,omitempty"`
	// Trouble says why there is no answer.
	Trouble string `json:"trouble,omitempty"`
	// Unasked: the member was left alone, because not all pods are Ready.
	Unasked     bool        `json:"unasked,omitempty"`
	Ring        []Neighbour `json:"ring,omitempty"`
	Description Description `json:"description,omitzero"`
}

// Ring is what all answers together say.
type Ring struct {
	OK bool `json:"ok"`
	// Members are the pods in the order of their ordinals.
	Members []string `json:"members,omitempty"`
	// Hosts are the members' host IDs by pod: a pod's name and address outlive
	// its place in the ring.
	Hosts      map[string]string `json:"hosts,omitempty"`
	DataCenter string            `json:"dataCenter,omitempty"`
	Schema     string            `json:"schema,omitempty"`
	Keyspaces  []Keyspace        `json:"keyspaces,omitempty"`
	Findings   []finding.Finding `json:"findings,omitempty"`
}

// JudgeRing puts the answers together: one member's table is not enough, a dead
// member stands in it as up for a while, and an isolated one calls itself up.
func JudgeRing(answers []Answer, want int, row string) Ring {
	r := Ring{}
	bad := func(f finding.Finding) { f.Row = row; r.Findings = append(r.Findings, f) }
	addresses := map[string]string{} // address -> pod
	for _, a := range answers {
		for _, ip := range a.Addresses {
			addresses[ip] = a.Pod
		}
	}
	schemas, centers := map[string][]string{}, map[string]bool{}
	for _, a := range answers {
		r.Members = append(r.Members, a.Pod)
		object := "Cassandra member " + a.Pod
		if a.Trouble != "" {
			bad(finding.Finding{Object: object, Expected: "an answer of nodetool", Found: withReason(a.Trouble, a.Unready),
				Next: nextFor(a.Trouble)})
			continue
		}
		if a.Unready != "" {
			bad(finding.Finding{Object: object, Expected: "a pod that is Ready", Found: a.Unready, Next: "look at the pod's events and log"})
		}
		if a.Unasked {
			continue
		}
		for _, f := range a.complaints(addresses, want) {
			bad(f)
		}
		for _, n := range a.Ring {
			centers[n.DataCenter] = true
		}
		for _, v := range a.Description.Versions {
			if !slices.Contains(schemas[v.Version], a.Pod) {
				schemas[v.Version] = append(schemas[v.Version], a.Pod)
			}
		}
		if len(r.Keyspaces) == 0 {
			r.Keyspaces, r.DataCenter, r.Hosts = a.Description.Keyspaces, a.Ring[0].DataCenter, map[string]string{}
			for _, n := range a.Ring {
				if pod := addresses[n.Address]; pod != "" {
					r.Hosts[pod] = n.HostID
				}
			}
		}
	}
	if len(answers) != want {
		bad(finding.Finding{Object: "members of Cassandra", Expected: fmt.Sprint(want), Found: fmt.Sprintf("%d pods", len(answers)), Next: "check namespace, StatefulSet and container in the plan"})
	}
	if len(centers) > 1 {
		bad(finding.Finding{Object: "data centres of Cassandra", Expected: "one for all members", Found: strings.Join(slices.Sorted(maps.Keys(centers)), ", "),
			Why: "copies are asked for in one: members of another hold none of them", Next: "find out which member was told another " + dataCenterVariable + ", and take it out by the vendor's procedure"})
	}
	versions := slices.Sorted(maps.Keys(schemas))
	switch {
	case len(versions) == 0:
	case len(versions) == 1 && plainVersion.MatchString(versions[0]):
		r.Schema = versions[0]
	default:
		bad(finding.Finding{Object: "schema of Cassandra", Expected: "one version on all members", Found: strings.Join(versions, ", "),
			Why: "statements that change the schema may be lost while members disagree", Next: "it usually passes within a minute; if not, look at the members' logs"})
	}
	r.OK = len(r.Findings) == 0
	return r
}

// plainVersion is a schema version and not a word for members without one.
var plainVersion = regexp.MustCompile(`^[0-9a-f-]{36}$`)

// complaints is what is wrong with the others as this member sees them.
func (a Answer) complaints(addresses map[string]string, want int) []finding.Finding {
	var out []finding.Finding
	var up []string
	for _, n := range a.Ring {
		pod, known := addresses[n.Address]
		switch {
		case n.State != UpNormal:
			out = append(out, finding.Finding{Object: "Cassandra member " + name(pod, n), Expected: UpNormal, Found: fmt.Sprintf("%s as %s sees it", n.State, a.Pod),
				Next: "wait until it has started or joined; if it stays so, look at its log"})
		case !known:
			out = append(out, finding.Finding{Object: "Cassandra member " + n.Address, Expected: "a pod with this address", Found: "none; " + a.Pod + " sees it",
				Why: "somebody holds tokens whom nobody here can ask", Next: "find out whose it is before anything else: a member of another data centre or StatefulSet holds data and is not to be removed; bring the pod of a lost one back"})
		case !slices.Contains(up, n.Address):
			up = append(up, n.Address)
		}
	}
	if len(up) != want {
		out = append(out, finding.Finding{Object: "the ring as " + a.Pod + " sees it", Expected: fmt.Sprintf("%d members %s", want, UpNormal), Found: fmt.Sprint(len(up)),
			Next: "wait until all members have joined; if one does not, look at its log"})
	}
	return out
}

func name(pod string, n Neighbour) string {
	if pod == "" {
		return n.Address
	}
	return pod
}

func withReason(found, unready string) string {
	if unready == "" || strings.Contains(found, unready) {
		return found
	}
	return found + "; the pod: " + unready
}

func nextFor(trouble string) string {
	if strings.HasPrefix(trouble, pending) {
		return "check the capacity of nodes and volumes first; a volume binds its member to one zone for ever"
	}
	return "bring the member back (pod status, events, log)"
}

// pending begins the reason of a pod that runs nowhere yet.
const pending = "Pending"

// Pending says why a pod has not started at all; "" when it has.
func Pending(p *corev1.Pod) string {
	if p.Status.Phase != corev1.PodPending {
		return ""
	}
	for _, c := range p.Status.Conditions {
		if c.Type == corev1.PodScheduled && c.Status != corev1.ConditionTrue {
			return strings.TrimSpace(fmt.Sprintf("%s: %s %s", pending, c.Reason, c.Message))
		}
	}
	for _, list := range [][]corev1.ContainerStatus{p.Status.InitContainerStatuses, p.Status.ContainerStatuses} {
		for _, s := range list {
			if w := s.State.Waiting; w != nil && w.Reason != "" {
				return strings.TrimSpace(fmt.Sprintf("%s: container %s waits: %s %s", pending, s.Name, w.Reason, w.Message))
			}
		}
	}
	if p.Spec.NodeName == "" {
		return pending + ": not scheduled yet"
	}
	return pending + ": starting on node " + p.Spec.NodeName
}
