// Package window holds maintenance windows: a calendar with a duration, a time
// zone and exclusions, expanded to plain intervals that the workflow compares
// with its own clock. It must not start, stop or schedule anything.
package window

import (
	"time"

	"github.com/refit-run/refit/activities/duration"
)

// Duration is one of a plan.
type Duration = duration.Duration

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
