// Package window holds maintenance windows: a calendar with a duration, a time
// zone and exclusions, expanded to plain intervals that the workflow compares
// with its own clock. It must not start, stop or schedule anything.
package window

import (
	"encoding/json"
	"fmt"
	"time"
)

// Duration is a time.Duration that reads and writes "90s", "5m", "2h".
type Duration time.Duration

// D returns the standard type.
func (d Duration) D() time.Duration { return time.Duration(d) }

// String is the standard form, for example 1m30s.
func (d Duration) String() string { return time.Duration(d).String() }

// MarshalJSON writes the standard form.
func (d Duration) MarshalJSON() ([]byte, error) { return json.Marshal(d.String()) }

// UnmarshalJSON reads the standard form; a bare number is refused because its
// unit would be a guess.
func (d *Duration) UnmarshalJSON(b []byte) error {
	var s string
	if err := json.Unmarshal(b, &s); err != nil {
		return fmt.Errorf("duration %s: want a string with a unit such as \"5m\"", b)
	}
	v, err := time.ParseDuration(s)
	if err != nil {
		return fmt.Errorf("duration %q: want a number with a unit such as 90s, 5m or 2h", s)
	}
	*d = Duration(v)
	return nil
}

// Spec is one recurring window. Nothing new starts outside the windows of a
// plan; an unbreakable section starts only if its estimate fits.
type Spec struct {
	// Opens is a five-field cron expression: when the window opens.
	Opens string `json:"opens"`
	// Duration is how long it stays open.
	Duration Duration `json:"duration"`
	// TimeZone is an IANA name; empty means UTC.
	TimeZone string `json:"timeZone,omitempty"`
	// Exclude lists days (YYYY-MM-DD, in TimeZone) on which it does not open.
	Exclude []string `json:"exclude,omitempty"`
}

// Interval is one opening, [Start, End).
type Interval struct {
	Start time.Time `json:"start"`
	End   time.Time `json:"end"`
}
