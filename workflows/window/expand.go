package window

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/robfig/cron/v3"
)

// maxDuration bounds one opening, so that an expansion looks back only so far.
const maxDuration = 31 * 24 * time.Hour

// everyHour is the bit with which the cron package marks a field written "*".
const everyHour = 1 << 63

// parser reads the five standard fields. Descriptors such as @daily are
// refused: they hide at which hour machines are touched.
var parser = cron.NewParser(cron.Minute | cron.Hour | cron.Dom | cron.Month | cron.Dow)

// Validate checks the spec by itself; every problem is reported.
func (s Spec) Validate() error {
	_, err := s.parse()
	return err
}

// calendar is a parsed Spec.
type calendar struct {
	schedule *cron.SpecSchedule
	zone     *time.Location
	duration time.Duration
	exclude  []string
}

func (s Spec) parse() (calendar, error) {
	c := calendar{duration: s.Duration.D(), exclude: s.Exclude, zone: time.UTC}
	var problems []error
	if parsed, err := parser.Parse(s.Opens); err != nil {
		problems = append(problems, fmt.Errorf("opens %q: want five cron fields (minute hour day month weekday): %w", s.Opens, err))
	} else if spec, ok := parsed.(*cron.SpecSchedule); !ok || spec.Location != time.Local {
		problems = append(problems, fmt.Errorf("opens %q: name the time zone in timeZone, not in the expression", s.Opens))
	} else {
		c.schedule = spec
	}
	if c.duration < time.Minute || c.duration > maxDuration {
		problems = append(problems, fmt.Errorf("duration %s: want between 1m and %s", s.Duration, maxDuration))
	}
	if s.TimeZone == "Local" {
		problems = append(problems, errors.New(`timeZone "Local": want an IANA name such as Europe/Berlin; workers differ in their local zone`))
	} else if zone, err := time.LoadLocation(s.TimeZone); err != nil {
		problems = append(problems, fmt.Errorf("timeZone %q: want an IANA name such as Europe/Berlin: %w", s.TimeZone, err))
	} else {
		c.zone = zone
	}
	for _, day := range s.Exclude {
		if _, err := time.Parse(time.DateOnly, day); err != nil {
			problems = append(problems, fmt.Errorf("exclude %q: want a day as YYYY-MM-DD", day))
		}
	}
	return c, errors.Join(problems...)
}

// Expand lists when the windows are open: every opening that ends after from
// and starts before until, overlapping or touching ones merged, sorted. It
// depends on the machine's time-zone rules; workflows record its result.
//
// An hour named in the expression is wall-clock time: when the clocks skip it,
// the window opens at the moment they skip; when the clocks show it twice, it
// opens the first time only. An expression for every hour ("*") follows
// elapsed time. The duration is always elapsed time.
func Expand(specs []Spec, from, until time.Time) ([]Interval, error) {
	var all []Interval
	var problems []error
	for i, s := range specs {
		c, err := s.parse()
		if err != nil {
			problems = append(problems, fmt.Errorf("windows[%d]: %w", i, err))
			continue
		}
		all = append(all, c.between(from, until)...)
	}
	if len(problems) > 0 {
		return nil, errors.Join(problems...)
	}
	return merge(all), nil
}

func (c calendar) between(from, until time.Time) []Interval {
	var out []Interval
	next := c.openings(from.Add(-c.duration))
	for {
		start, wall := next()
		if start.IsZero() || !start.Before(until) {
			return out
		}
		end := start.Add(c.duration)
		if end.After(from) && !slices.Contains(c.exclude, wall) {
			out = append(out, Interval{Start: start.UTC(), End: end.UTC()})
		}
	}
}

// openings iterates over the openings from about after on, each with its day
// in the calendar's zone.
func (c calendar) openings(after time.Time) func() (time.Time, string) {
	if c.schedule.Hour&everyHour != 0 {
		t := after.In(c.zone)
		return func() (time.Time, string) {
			if t = c.schedule.Next(t); t.IsZero() {
				return t, ""
			}
			return t, t.Format(time.DateOnly)
		}
	}
	// The expression is walked in a calendar without daylight saving (UTC as
	// plain wall clock) and each hit is then placed in the zone. One day of
	// slack covers every zone's offset; what lies before is filtered by its end.
	a := after.In(c.zone)
	wall := time.Date(a.Year(), a.Month(), a.Day()-1, a.Hour(), a.Minute(), a.Second(), 0, time.UTC)
	return func() (time.Time, string) {
		if wall = c.schedule.Next(wall); wall.IsZero() {
			return wall, ""
		}
		return place(wall, c.zone), wall.Format(time.DateOnly)
	}
}

// place finds the instant at which the zone's clocks show the wall time.
func place(wall time.Time, zone *time.Location) time.Time {
	t := time.Date(wall.Year(), wall.Month(), wall.Day(), wall.Hour(), wall.Minute(), 0, 0, zone)
	start, end := t.ZoneBounds()
	shown := time.Date(t.Year(), t.Month(), t.Day(), t.Hour(), t.Minute(), 0, 0, time.UTC)
	switch {
	case shown.After(wall): // skipped; time.Date chose the side after the skip
		return start
	case shown.Before(wall): // skipped; time.Date chose the side before it
		return end
	case start.IsZero():
		return t
	}
	_, now := t.Zone()
	_, before := start.Add(-time.Second).Zone()
	if first := t.Add(time.Duration(now-before) * time.Second); first.Before(start) {
		return first // shown twice; the first counts
	}
	return t
}

func merge(all []Interval) []Interval {
	slices.SortFunc(all, func(a, b Interval) int {
		if c := a.Start.Compare(b.Start); c != 0 {
			return c
		}
		return a.End.Compare(b.End)
	})
	var out []Interval
	for _, in := range all {
		if n := len(out); n > 0 && !in.Start.After(out[n-1].End) {
			if in.End.After(out[n-1].End) {
				out[n-1].End = in.End
			}
			continue
		}
		out = append(out, in)
	}
	return out
}

// Open reports whether now lies within a window.
func Open(intervals []Interval, now time.Time) bool {
	return Fits(intervals, now, 0)
}

// Fits reports whether now lies within a window that stays open for estimate.
func Fits(intervals []Interval, now time.Time, estimate time.Duration) bool {
	for _, in := range intervals {
		if !now.Before(in.Start) && now.Before(in.End) {
			return !now.Add(estimate).After(in.End)
		}
	}
	return false
}

// Next returns the first window that opens after now and stays open for at
// least estimate; ok is false when none is known.
func Next(intervals []Interval, now time.Time, estimate time.Duration) (in Interval, ok bool) {
	for _, in := range intervals {
		if in.Start.After(now) && in.End.Sub(in.Start) >= estimate {
			return in, true
		}
	}
	return Interval{}, false
}
