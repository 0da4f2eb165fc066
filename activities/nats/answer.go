package nats

import (
	"encoding/json"
	"time"
)

// Answer is what one server said, or why it gave no valid answer.
type Answer struct {
	// Pod is empty where the pods could not be listed.
	Pod string `json:"pod"`
	// Unready says why the pod is not Ready; it may answer all the same.
	Unready string `json:"unready,omitempty"`
	// Trouble: there is no valid answer, and nothing else is set. Malformed:
	// there is one, of another shape than is known (N126).
	Trouble   string `json:"trouble,omitempty"`
	Malformed bool   `json:"malformed,omitempty"`
	// Raw is the beginning of the malformed page as the server sent it.
	Raw string `json:"raw,omitempty"`
	// Server is the name by which the others know it.
	Server  string `json:"server,omitempty"`
	Version string `json:"version,omitempty"`
	// Unhealthy is what the full /healthz complained about.
	Unhealthy string `json:"unhealthy,omitempty"`
	// Meta is nil for a server that is no member of a cluster.
	Meta    *Group   `json:"meta,omitempty"`
	Streams []Hosted `json:"streams,omitempty"`
}

// Group is a Raft group as one of its members sees it: Replicas are the others.
type Group struct {
	Leader   string `json:"leader"`
	Replicas []Peer `json:"replicas"`
}

// Peer is another member of a group.
type Peer struct {
	Name    string `json:"name"`
	Current bool   `json:"current"`
	Offline bool   `json:"offline"`
	Lag     uint64 `json:"lag"`
	// Pending: named for the group, and no member yet.
	Pending bool `json:"pending"`
}

// State is how far a stream is.
type State struct {
	Messages uint64 `json:"messages"`
	FirstSeq uint64 `json:"first_seq"`
	LastSeq  uint64 `json:"last_seq"`
	// FirstTime is when the first message was taken in.
	FirstTime time.Time `json:"first_ts,omitzero"`
}

// Hosted is a stream as one server holds it.
type Hosted struct {
	Account   string          `json:"account"`
	AccountID string          `json:"accountID"`
	Name      string          `json:"name"`
	Created   time.Time       `json:"created"`
	Config    json.RawMessage `json:"config"`
	Group     *Group          `json:"cluster,omitempty"`
	State     State           `json:"state"`
	Consumers []Consumer      `json:"consumers,omitempty"`

	config settings
}

// Consumer is one of a stream's consumers. Only its leader knows the counts.
type Consumer struct {
	Name    string `json:"name"`
	Group   *Group `json:"cluster,omitempty"`
	Pending uint64 `json:"num_pending"`
	Unacked uint64 `json:"num_ack_pending"`
}

// settings are the parts of a stream's configuration that verdicts rest on.
type settings struct {
	Storage   string        `json:"storage"`
	Replicas  int           `json:"num_replicas"`
	Retention string        `json:"retention"`
	MaxAge    time.Duration `json:"max_age"`
	MessageTT bool          `json:"allow_msg_ttl"`
	// Limits that make room for new messages by dropping old ones: -1 or 0 is
	// none. A message with a rollup header replaces others, too.
	MaxMessages   int64 `json:"max_msgs"`
	MaxBytes      int64 `json:"max_bytes"`
	MaxPerSubject int64 `json:"max_msgs_per_subject"`
	Rollup        bool  `json:"allow_rollup_hdrs"`
}

// jsz is one page of /jsz, with pointers where absence matters.
type jsz struct {
	Disabled bool           `json:"disabled"`
	Streams  int            `json:"streams"`
	Meta     *Group         `json:"meta_cluster"`
	Accounts *[]jszAccounts `json:"account_details"`
}

type jszAccounts struct {
	Name    string      `json:"name"`
	ID      string      `json:"id"`
	Streams []jszStream `json:"stream_detail"`
}

type jszStream struct {
	Name    string          `json:"name"`
	Created time.Time       `json:"created"`
	Config  json.RawMessage `json:"config"`
	Group   *Group          `json:"cluster"`
	State   struct {
		Messages  *uint64   `json:"messages"`
		FirstSeq  uint64    `json:"first_seq"`
		LastSeq   uint64    `json:"last_seq"`
		FirstTime time.Time `json:"first_ts"`
	} `json:"state"`
	Consumers []Consumer `json:"consumer_detail"`
}
