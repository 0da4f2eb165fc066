package nats

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/refit-run/refit/activities/artifact"
	"github.com/refit-run/refit/activities/evidence"
	"github.com/refit-run/refit/activities/finding"
)

// Saved is the list of streams before a roll, as kept in the artifact store.
type Saved struct {
	Cluster   string        `json:"cluster"`
	Namespace string        `json:"namespace"`
	At        time.Time     `json:"at"`
	Streams   []SavedStream `json:"streams"`
}

// SavedStream is a stream with its whole configuration.
type SavedStream struct {
	Record
	Config json.RawMessage `json:"config"`
}

// SaveResult names the saved list; without it the verdict says why there is none.
type SaveResult struct {
	Drained
	Held     []Record       `json:"held,omitempty"`
	Streams  int            `json:"streams"`
	List     artifact.Ref   `json:"list,omitzero"`
	Evidence evidence.Trail `json:"evidence"`
}

// Save is the activity nats.Save: it waits like Drain and saves the list of
// all streams from the very look that found nothing left in the memory streams
// with one copy.
func (a *Activities) Save(ctx context.Context, r DrainRequest) (SaveResult, error) {
	var out SaveResult
	d, err := a.drained(ctx, r, func(ctx context.Context, v View) error {
		saved := save(r.Place, v)
		out.Streams = len(saved.Streams)
		var err error
		out.List, err = evidence.Store(ctx, a.Artifacts, "streams.json", out.Streams, saved)
		return err
	})
	out.Drained, out.Held, out.Evidence = d.Drained, d.Held, d.Evidence
	return out, err
}

func save(p Place, v View) Saved {
	saved := Saved{Cluster: p.Target.Cluster, Namespace: p.Namespace, At: time.Now().UTC(), Streams: []SavedStream{}}
	for _, s := range v.Streams {
		saved.Streams = append(saved.Streams, SavedStream{Record: s.record(), Config: s.Config})
	}
	return saved
}

// CompareRequest compares the streams with a saved list.
type CompareRequest struct {
	Place
	// List is the URL of what Save kept.
	List  string        `json:"list"`
	Limit time.Duration `json:"limit"`
}

// CompareResult is the verdict of the last look.
type CompareResult struct {
	OK      bool `json:"ok"`
	Streams int  `json:"streams"`
	// Emptied are memory streams with one copy that came back empty. Nothing was
	// in them when the list was saved; what was published from then on until
	// their server restarted is lost.
	Emptied  []string          `json:"emptied,omitempty"`
	Findings []finding.Finding `json:"findings,omitempty"`
	Evidence evidence.Trail    `json:"evidence"`
}

// Compare is the activity nats.Compare: it waits until every server is healthy
// and leads what it must, and compares. What was lost ends it at once: new
// messages would soon hide it. It only reads.
func (a *Activities) Compare(ctx context.Context, r CompareRequest) (out CompareResult, err error) {
	l, err := a.looker(ctx, r.Place)
	if err != nil {
		return out, err
	}
	defer l.close()
	saved, err := a.saved(ctx, r)
	if err != nil {
		return out, err
	}
	out.Streams = len(saved.Streams)
	err = l.until(ctx, r.Limit, settlePace, func(_ context.Context, answers []Answer) (verdict, error) {
		c, err := compare(answers, saved)
		if err != nil {
			return verdict{}, err
		}
		wrong := append(c.lost, c.waiting...)
		out.OK, out.Emptied, out.Findings = len(wrong) == 0, c.emptied, evidence.Shown(wrong)
		return verdict{out.OK || len(c.lost) > 0 || c.malformed, evidence.InWords(wrong), out}, nil
	})
	out.Evidence = l.record.Trail
	return out, err
}

func (a *Activities) saved(ctx context.Context, r CompareRequest) (Saved, error) {
	var text bytes.Buffer
	var saved Saved
	_, err := a.Artifacts.Get(ctx, r.List, nil, &text)
	if err == nil {
		err = json.Unmarshal(text.Bytes(), &saved)
	}
	if _, _, told := finding.Of(err); err != nil && !told && ctx.Err() == nil {
		err = finding.Finding{Object: "artifact " + r.List, Expected: "the list of streams that the phase before has saved", Found: err.Error(),
			Next: "give the URL that the receipt of the phase before names under saved"}.Error(finding.Stop)
	}
	if err != nil {
		return saved, err
	}
	if saved.Cluster != r.Target.Cluster || saved.Namespace != r.Namespace || saved.Streams == nil {
		return saved, finding.Finding{
			Object: "artifact " + r.List, Expected: fmt.Sprintf("the streams of %s in cluster %s", r.Namespace, r.Target.Cluster),
			Found: fmt.Sprintf("those of %q in %q", saved.Namespace, saved.Cluster), Next: "give the list that the phase before of this roll has saved",
		}.Error(finding.Stop)
	}
	return saved, nil
}

// comparison is the verdict on one look after a roll.
type comparison struct {
	waiting, lost []finding.Finding
	emptied       []string
	malformed     bool
}

// compare judges one look after a roll against the list from before it.
// Nothing is called lost while a server is away or still recovers.
func compare(answers []Answer, saved Saved) (comparison, error) {
	v := Judge(answers)
	c := comparison{waiting: v.Troubles, malformed: v.Malformed}
	for _, a := range answers {
		if a.Trouble == "" && a.Unhealthy == "" && a.Unready != "" {
			c.waiting = append(c.waiting, finding.Finding{Row: "N157", Object: "Pod " + a.Pod, Expected: "Ready", Found: a.Unready,
				Next: "read the pod's events and log: the image may not be pulled, the volume may not be writable for the pod's group"})
		}
	}
	for _, b := range saved.Streams {
		s, ok := v.find(b.Record)
		f := finding.Finding{Object: b.String(), Expected: "as before the roll", Next: "see that all servers are up and have recovered; then compare again with retry"}
		switch {
		case !ok:
			f.Found = "no server lists it"
			f.Why = "services that publish to it fail, or make it anew with another configuration"
			f.Next = "restart the services that create it, or create it with the configuration in the saved list, then retry"
			c.waiting = append(c.waiting, f)
			continue
		case s.Leader == "":
			f.Found = s.Unled
			c.waiting = append(c.waiting, f)
			continue
		}
		l, is := Lost(b.Record, s)
		if !is {
			l, is = lower(b.Record, s)
		}
		if is {
			switch {
			case b.Storage == memory && b.Replicas == 1 && b.State.Messages == 0 && s.Created.Equal(b.Created):
				c.emptied = append(c.emptied, b.Account+"/"+b.Name)
			case len(v.Troubles) > 0:
				c.waiting = append(c.waiting, l)
				continue
			default:
				c.lost = append(c.lost, l)
				continue
			}
		}
		changed, err := drift(b.Config, s.Config)
		if err != nil {
			return c, err
		}
		for _, what := range changed {
			d := f
			d.Found, d.Why = what, "the roll must not change how a stream works"
			d.Next = "find out who changed it; put it back, or skip if it was meant"
			c.waiting = append(c.waiting, d)
		}
	}
	return c, nil
}
