package nats

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/refit-run/refit/activities/finding"
)

// View is what all answers together say.
type View struct {
	// Troubles are what keeps the view from being whole: a server that gave no
	// valid answer, or one that nobody could ask. An R1 stream on such a server
	// appears nowhere else.
	Troubles []finding.Finding
	// Malformed: at least one of them is about the shape of an answer, which
	// does not pass by itself.
	Malformed bool
	// Servers are the names of those that answered, sorted.
	Servers []string
	// Streams are sorted by account and name.
	Streams []Stream
}

// Stream is a stream judged from its leader.
type Stream struct {
	Account, AccountID, Name string
	Created                  time.Time
	Config                   json.RawMessage
	settings
	// Leader is the server that says of itself that it leads; empty when none
	// does, with Unled saying why. All that follows is the leader's.
	Leader string
	Unled  string
	State  State
	Peers  []Peer
	// Copies is the state of the stream on every server that lists it.
	Copies map[string]State
	// Pending and Unacked are the deliveries that its consumers wait for, each
	// read from its own leader; Leaderless names consumers without one.
	Pending, Unacked uint64
	Leaderless       []string
}

func (s Stream) String() string { return "stream " + s.Account + "/" + s.Name }

// Judge puts the answers together.
func Judge(answers []Answer) View {
	v := View{}
	byStream := map[string][]held{}
	var order []string
	known := map[string]string{} // server name -> who named it
	for _, a := range answers {
		if f, ok := trouble(a); ok {
			v.Troubles = append(v.Troubles, f)
			v.Malformed = v.Malformed || a.Malformed
		}
		if a.Trouble != "" {
			continue
		}
		v.Servers = append(v.Servers, a.Server)
		named(known, a.Meta, "the cluster as "+a.Server+" sees it")
		for _, h := range a.Streams {
			k := h.AccountID + "/" + h.Name
			if byStream[k] == nil {
				order = append(order, k)
			}
			byStream[k] = append(byStream[k], held{a.Server, h})
			named(known, h.Group, "stream "+h.Account+"/"+h.Name)
		}
	}
	slices.Sort(v.Servers)
	if len(answers) == 0 {
		v.Troubles = append(v.Troubles, finding.Finding{Row: "N125", Object: "NATS servers", Expected: "at least one pod", Found: "none",
			Next: "check the namespace, the selector and the container's name in the plan"})
	}
	v.Troubles = append(v.Troubles, strangers(v, known)...)
	slices.Sort(order)
	for _, k := range order {
		v.Streams = append(v.Streams, lead(byStream[k]))
	}
	return v
}

type held struct {
	server string
	Hosted
}

// trouble is the finding about one server, if there is one.
func trouble(a Answer) (finding.Finding, bool) {
	f := finding.Finding{Row: "N125", Object: "NATS server " + a.Pod, Expected: "a whole answer on its monitoring port",
		Why: "a stream with one copy on this server appears nowhere else: unreachable is not drained"}
	switch {
	case a.Malformed:
		f.Row, f.Found = "N126", a.Trouble
		f.Next = "look at the page in the evidence, or at the server's /jsz by hand; this version of NATS may not be known here"
	case a.Trouble != "" && a.Pod == "":
		f.Object, f.Expected, f.Found = "NATS servers", "a list of their pods", a.Trouble
		f.Next = "see that the cluster's API server answers, then retry"
	case a.Trouble != "":
		f.Found = withReason(a.Trouble, a.Unready)
		f.Next = "bring the server back (pod status, events, log), then retry"
	case a.Unhealthy != "":
		f.Expected, f.Found = "a healthy server (the full /healthz)", withReason(a.Unhealthy, a.Unready)
		f.Next = "wait until it has recovered its streams; if it does not, look at its log"
	default:
		return f, false
	}
	return f, true
}

func withReason(found, unready string) string {
	if unready == "" {
		return found
	}
	return found + "; the pod: " + unready
}

func named(known map[string]string, g *Group, by string) {
	if g == nil {
		return
	}
	for _, p := range g.Replicas {
		if _, ok := known[p.Name]; !ok {
			known[p.Name] = by
		}
	}
}

// strangers are servers that others name and that did not answer, when every
// pod did: somebody may hold streams there that nobody here can see.
func strangers(v View, known map[string]string) []finding.Finding {
	if len(v.Troubles) > 0 {
		return nil // the server without an answer is most likely the one
	}
	var out []finding.Finding
	for name, by := range known {
		if !slices.Contains(v.Servers, name) {
			out = append(out, finding.Finding{Row: "N125", Object: "NATS server " + name, Expected: "a pod that answers for it",
				Found: "none; it is named by " + by, Why: "it may hold streams that no other server lists",
				Next: "bring it back, or if it is gone for good remove it from the cluster: nats server cluster peer-remove " + name})
		}
	}
	slices.SortFunc(out, func(a, b finding.Finding) int { return strings.Compare(a.Object, b.Object) })
	return out
}

// lead judges one stream from the server that leads it.
func lead(hosts []held) Stream {
	s := Stream{Copies: map[string]State{}}
	var leaders []held
	for _, h := range hosts {
		s.Copies[h.server] = h.State
		if h.Group == nil || h.Group.Leader == h.server {
			leaders = append(leaders, h)
		}
	}
	from := hosts[0]
	switch len(leaders) {
	case 1:
		from = leaders[0]
		s.Leader, s.State = from.server, from.State
		if from.Group != nil {
			s.Peers = from.Group.Replicas
		}
	case 0:
		s.Unled = fmt.Sprintf("no leader; %s names %q", from.server, from.Group.Leader)
	default:
		s.Unled = fmt.Sprintf("%s and %s both lead it", leaders[0].server, leaders[1].server)
	}
	s.Account, s.AccountID, s.Name, s.Created = from.Account, from.AccountID, from.Name, from.Created
	s.Config, s.settings = from.Config, from.config
	s.consumers(hosts)
	return s
}

// consumers adds up what each consumer's own leader says.
func (s *Stream) consumers(hosts []held) {
	led := map[string]bool{}
	for _, h := range hosts {
		for _, c := range h.Consumers {
			leads := c.Group == nil || c.Group.Leader == h.server
			if leads && !led[c.Name] {
				s.Pending += c.Pending
				s.Unacked += c.Unacked
			}
			led[c.Name] = led[c.Name] || leads
		}
	}
	for name, ok := range led {
		if !ok {
			s.Leaderless = append(s.Leaderless, name)
		}
	}
	slices.Sort(s.Leaderless)
}
