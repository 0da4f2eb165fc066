package nats

import (
	"context"
	"fmt"
	"time"
)

// DrainRequest waits until the memory streams with one copy are empty.
type DrainRequest struct {
	Place
	// Least is how many of them must have been seen.
	Least int           `json:"least,omitempty"`
	Limit time.Duration `json:"limit"`
}

// DrainResult is the last look.
type DrainResult struct {
	Drained
	Evidence Evidence `json:"evidence"`
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
	err = l.until(ctx, r.Limit, drainPace, func(ctx context.Context, answers []Answer) (verdict, error) {
		v := Judge(answers)
		d := JudgeDrained(v, r.Least)
		out.Drained = d
		out.Findings = shown(d.Findings)
		if d.OK {
			if err := then(ctx, v); err != nil {
				return verdict{}, err
			}
		}
		return verdict{d.OK || d.Malformed, fmt.Sprintf("%d streams, %d messages: %s", d.Seen, d.Messages, inWords(d.Findings)), d}, nil
	})
	out.Evidence = l.evidence
	return out, err
}
