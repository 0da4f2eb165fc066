// Package duration holds a length of time as plans and results write it: with
// its unit, because a bare number is read as one unit and meant as another.
package duration

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
