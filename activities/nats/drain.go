package nats

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/refit-run/refit/activities/evidence"
)

// DrainRequest waits until the memory streams with one copy are empty.
type DrainRequest struct {
	Place
	// Least is how many of them must have been seen.
	Least int           `json:"least,omitempty"`
	Limit time.Duration `json:"limit"`
	// Held is what an attempt before has returned. What an earlier try of this
	// one has seen is newer: heartbeats carry it.
	Held []Record `json:"held,omitempty"`
}

// DrainResult is the last look.
type DrainResult struct {
	Drained
	// Held are the streams that were not empty when they were last seen.
	Held     []Record       `json:"held,omitempty"`
	Evidence evidence.Trail `json:"evidence"`
}

// Drain is the activity nats.Drain: it looks until everything is drained or
// the limit has passed, and returns the verdict on the last look either way.
// It only reads.
func (a *Activities) Drain(ctx context.Context, r DrainRequest) (DrainResult, error) {
	return a.drained(ctx, r, func(context.Context, View) error { return nil })
}

// drained calls then with the look that found everything drained.
func (a *Activities) drained(ctx context.Context, r DrainRequest, then func(context.Context, View) error) (out DrainResult, err error) {
	l, err := a.looker(ctx, r.Place)
	if err != nil {
		return out, err
	}
	defer l.close()
	if out.Held, err = remembered(r.Held, l.record.Kept()); err != nil {
		return out, err
	}
	next := successor{keep: l.record.Keep}
	if next.known, err = json.Marshal(out.Held); err != nil {
		return out, err
	}
	err = l.until(ctx, r.Limit, drainPace, func(ctx context.Context, answers []Answer) (verdict, error) {
		v := Judge(answers)
		d := JudgeDrained(v, r.Least)
		lost, held := emptied(v, out.Held)
		d.Findings = append(lost, d.Findings...)
		d.OK = d.OK && len(lost) == 0
		out.Drained, out.Held = d, held
		out.Findings = evidence.Shown(d.Findings)
		if len(lost) == 0 { // a loss is to be found again until its verdict was heard
			if err := next.hears(held); err != nil {
				return verdict{}, err
			}
		}
		if d.OK {
			if err := then(ctx, v); err != nil {
				return verdict{}, err
			}
		}
		return verdict{d.OK || d.Malformed || len(lost) > 0, fmt.Sprintf("%d streams, %d messages: %s", d.Seen, d.Messages, evidence.InWords(d.Findings)), d}, nil
	})
	out.Evidence = l.record.Trail
	return out, err
}

// remembered is what was held when it was last seen: by the try before, if it
// kept something, or by the attempt before.
func remembered(held []Record, kept string) ([]Record, error) {
	if kept == "" {
		return held, nil
	}
	var now []Record
	if err := json.Unmarshal([]byte(kept), &now); err != nil {
		return nil, fmt.Errorf("what the try before has seen: %w", err)
	}
	return now, nil
}

// successor is the try after this one, which knows what this one has kept.
type successor struct {
	keep  func(string) error
	known []byte
}

// hears keeps what is held now, if it is not known: also under the same names,
// because a stream that was emptied may have come further by then than it was
// when it was first seen. What can't be kept, the next look keeps.
func (s *successor) hears(held []Record) error {
	now, err := json.Marshal(held)
	if err == nil && !bytes.Equal(now, s.known) && s.keep(string(now)) == nil {
		s.known = now
	}
	return err
}
