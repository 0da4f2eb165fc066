package openbao

import (
	"fmt"
	"slices"
	"time"
)

// View is what one look saw: what Kubernetes says of the StatefulSet and its
// pods, and what each server says of itself.
type View struct {
	// At is when the look began: nothing in it is older.
	At time.Time `json:"at,omitzero"`
	// Run is the release whose Lease the run holds.
	Run     Owner    `json:"run,omitzero"`
	Set     Set      `json:"set"`
	Members []Member `json:"members"`
	// Missing are pods that the StatefulSet asks for and nobody has.
	Missing []string `json:"missing,omitempty"`
	// Peers are the members as Raft counts them, told by the active one;
	// NoPeers says why they are not known.
	Peers   []Peer `json:"peers,omitempty"`
	NoPeers string `json:"noPeers,omitempty"`
}

// Set is the StatefulSet.
type Set struct {
	Name     string `json:"name"`
	Replicas int    `json:"replicas"`
	Strategy string `json:"strategy"`
	// Image is the server's in the template.
	Image string `json:"image"`
	// Revision is the one of the template: a pod of another one is stale. With
	// OnDelete the StatefulSet's current revision never advances.
	Revision string `json:"revision"`
	// Unobserved: its controller has not seen the template yet, and Revision is
	// that of the one before.
	Unobserved bool `json:"unobserved,omitempty"`
	Deleting   bool `json:"deleting,omitempty"`
	// Owner is the release that has made it, by Helm's annotations; where these
	// are missing its label says the name.
	Owner Owner `json:"owner,omitzero"`
	// Service gives the pods their names, in Namespace.
	Service   string `json:"service,omitempty"`
	Namespace string `json:"namespace,omitempty"`
}

// Owner is a Helm release; a part that is empty is not known.
type Owner struct {
	Release   string `json:"release,omitempty"`
	Namespace string `json:"namespace,omitempty"`
}

// Member is one pod and the server in it.
type Member struct {
	Pod      string `json:"pod"`
	UID      string `json:"uid"`
	Revision string `json:"revision"`
	IP       string `json:"ip,omitempty"`
	// Image is the server's, Images are those of all containers.
	Image    string   `json:"image"`
	Images   []string `json:"images,omitempty"`
	Deleting bool     `json:"deleting,omitempty"`
	// Claims are its volume claims, Leaving those of them that are being deleted.
	Claims  []string `json:"claims,omitempty"`
	Leaving []string `json:"leaving,omitempty"`
	// Unready says why the pod is not Ready. Ready never means unsealed.
	Unready string `json:"unready,omitempty"`
	Status
}

// Status is what a server says of itself.
type Status struct {
	// Trouble: it gave no valid answer, and nothing else counts.
	Trouble     string `json:"trouble,omitempty"`
	Initialized bool   `json:"initialized"`
	Sealed      bool   `json:"sealed"`
	Version     string `json:"version,omitempty"`
	Storage     string `json:"storage,omitempty"`
	// ClusterID is absent while sealed, and so is all that follows.
	ClusterID string `json:"clusterID,omitempty"`
	// Active is its own claim. During a step-down two members make it.
	Active bool `json:"active,omitempty"`
	// Leader is the address of the member that it follows.
	Leader    string `json:"leader,omitempty"`
	Committed uint64 `json:"committed,omitempty"`
	Applied   uint64 `json:"applied,omitempty"`
}

// Peer is one server of Raft's configuration.
type Peer struct {
	ID      string `json:"id"`
	Address string `json:"address"`
	Voter   bool   `json:"voter"`
}

// serving tells whether the server is unsealed and answers.
func (s Status) serving() bool { return s.Trouble == "" && s.Initialized && !s.Sealed }

func (v View) member(pod string) (Member, bool) {
	at := slices.IndexFunc(v.Members, func(m Member) bool { return m.Pod == pod })
	if at < 0 {
		return Member{}, false
	}
	return v.Members[at], true
}

// stale tells whether the pod was made of another template than the present.
func (v View) stale(m Member) bool { return m.Revision != v.Set.Revision }

// Active is the one member that leads: it alone says so, and every member that
// serves names the address that it names itself. The text says why there is
// none.
func (v View) Active() (Member, string) {
	var claim []Member
	for _, m := range v.Members {
		if m.serving() && m.Active {
			claim = append(claim, m)
		}
	}
	switch len(claim) {
	case 0:
		return Member{}, "no member is active"
	case 1:
	default:
		return Member{}, fmt.Sprintf("%s and %s are both active", claim[0].Pod, claim[1].Pod)
	}
	active := claim[0]
	for _, m := range v.Members {
		if m.serving() && m.Leader != active.Leader {
			return Member{}, fmt.Sprintf("%s is active at %q, and %s follows %q", active.Pod, active.Leader, m.Pod, m.Leader)
		}
	}
	return active, ""
}

// State is what a look says of all members, for receipts.
type State struct {
	Active string `json:"active,omitempty"`
	// Versions and Images (of all containers, N168) are by pod.
	Versions map[string]string   `json:"versions,omitempty"`
	Images   map[string][]string `json:"images,omitempty"`
	// Fresh are the pods of the present template, Stale those of another one.
	Fresh []string `json:"fresh,omitempty"`
	Stale []string `json:"stale,omitempty"`
}

// State of the members.
func (v View) State() State {
	active, _ := v.Active()
	out := State{Active: active.Pod, Versions: map[string]string{}, Images: map[string][]string{}}
	for _, m := range v.Members {
		version := m.Version
		if version == "" {
			version = "unknown"
		}
		out.Versions[m.Pod], out.Images[m.Pod] = version+" ("+m.Image+")", m.Images
		if v.stale(m) {
			out.Stale = append(out.Stale, m.Pod)
		} else {
			out.Fresh = append(out.Fresh, m.Pod)
		}
	}
	return out
}
