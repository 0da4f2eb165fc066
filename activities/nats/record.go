package nats

import (
	"bytes"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/refit-run/refit/activities/finding"
)

// Record is what is remembered of a stream before it or its servers change.
type Record struct {
	Account   string    `json:"account"`
	AccountID string    `json:"accountID"`
	Name      string    `json:"name"`
	Created   time.Time `json:"created"`
	Storage   string    `json:"storage"`
	// Replicas before.
	Replicas int   `json:"replicas"`
	State    State `json:"state"`
	// Leaving: messages leave by themselves (work queue, interest, maximum
	// age), so fewer of them is no loss. Bounded: new messages take the place of
	// old ones.
	Leaving bool `json:"leaving,omitempty"`
	Bounded bool `json:"bounded,omitempty"`
}

func (r Record) String() string { return "stream " + r.Account + "/" + r.Name }

func (s Stream) record() Record {
	return Record{
		Account: s.Account, AccountID: s.AccountID, Name: s.Name, Created: s.Created, Storage: s.Storage, Replicas: s.Replicas, State: s.State,
		Leaving: s.Retention == "workqueue" || s.Retention == "interest" || s.MaxAge > 0 || s.MessageTT,
		Bounded: s.MaxMessages > 0 || s.MaxBytes > 0 || s.MaxPerSubject > 0 || s.Rollup,
	}
}

// find returns the stream that a record is about. Accounts may share a name,
// not an ID.
func (v View) find(r Record) (Stream, bool) {
	i := slices.IndexFunc(v.Streams, func(s Stream) bool { return s.AccountID == r.AccountID && s.Name == r.Name })
	if i < 0 {
		return Stream{}, false
	}
	return v.Streams[i], true
}

// Lost says that a stream holds less than it did: its sequence went back, the
// first message is another one under the same number, or messages are missing
// although nobody has published meanwhile. Services publish and consume while a
// raise or a roll goes on, so nothing more can be asked of every stream.
func Lost(before Record, s Stream) (finding.Finding, bool) {
	b, now := before.State, s.State
	f := loss(before, s)
	switch {
	case !s.Created.Equal(before.Created):
		f.Found += ", and it was created anew at " + s.Created.Format(time.RFC3339)
		return f, true
	case now.LastSeq < b.LastSeq, now.FirstSeq < b.FirstSeq:
		return f, true
	case b.Messages > 0 && now.Messages > 0 && now.FirstSeq == b.FirstSeq && !b.FirstTime.IsZero() && !now.FirstTime.Equal(b.FirstTime):
		f.Found += ", the first of them from " + now.FirstTime.Format(time.RFC3339Nano) + " and not from " + b.FirstTime.Format(time.RFC3339Nano)
		return f, true
	case now.LastSeq == b.LastSeq && now.Messages < b.Messages && !before.Leaving:
		return f, true
	}
	return f, false
}

// lower says that a replicated stream holds fewer messages than it did although
// none of them leaves by itself or for a new one. A restart keeps them all.
func lower(before Record, s Stream) (finding.Finding, bool) {
	return loss(before, s), before.Replicas >= TargetReplicas && !before.Leaving && !before.Bounded && s.State.Messages < before.State.Messages
}

func loss(before Record, s Stream) finding.Finding {
	b, now := before.State, s.State
	return finding.Finding{
		Object: s.String(), Expected: fmt.Sprintf("nothing lost of %d messages (sequence %d to %d)", b.Messages, b.FirstSeq, b.LastSeq),
		Found: fmt.Sprintf("%d messages (sequence %d to %d)", now.Messages, now.FirstSeq, now.LastSeq),
		Why:   "messages are gone, although the stream is there and its replicas read current",
		Next:  "do not go on before it is known what the messages were; publishers may have to send them again",
	}
}

// drift compares a configuration with the one that was saved: every saved
// setting must be there with its value, except the number of replicas, which
// services raise by themselves. Settings that a newer server adds are defaults
// of its own as long as they are empty.
func drift(saved, now json.RawMessage) ([]string, error) {
	before, err := flat(saved)
	if err != nil {
		return nil, err
	}
	after, err := flat(now)
	if err != nil {
		return nil, err
	}
	var out []string
	for name, want := range before {
		got, ok := after[name]
		if name == "num_replicas" && string(got) >= string(want) && len(got) == len(want) {
			continue
		}
		if !ok && empty(want) || ok && bytes.Equal(want, got) {
			continue
		}
		out = append(out, fmt.Sprintf("%s was %s and is %s", name, want, orAbsent(got)))
	}
	for name, got := range after {
		if _, ok := before[name]; !ok && !empty(got) {
			out = append(out, fmt.Sprintf("%s was absent and is %s", name, got))
		}
	}
	slices.Sort(out)
	return out, nil
}

// flat is the configuration by setting, each in one spelling. Metadata loses
// what the server writes there about itself.
func flat(config json.RawMessage) (map[string]json.RawMessage, error) {
	var values map[string]any
	decoder := json.NewDecoder(bytes.NewReader(config))
	decoder.UseNumber()
	if err := decoder.Decode(&values); err != nil {
		return nil, fmt.Errorf("configuration of a stream: %w", err)
	}
	if meta, ok := values["metadata"].(map[string]any); ok {
		for k := range meta {
			if strings.HasPrefix(k, "_nats.") {
				delete(meta, k)
			}
		}
	}
	out := make(map[string]json.RawMessage, len(values))
	for k, v := range values {
		text, err := json.Marshal(v) // maps are sorted
		if err != nil {
			return nil, err
		}
		out[k] = text
	}
	return out, nil
}

func empty(v json.RawMessage) bool {
	return slices.Contains([]string{"", "null", "false", "0", `""`, "{}", "[]"}, string(v))
}

func orAbsent(v json.RawMessage) string {
	if v == nil {
		return "absent"
	}
	return string(v)
}
