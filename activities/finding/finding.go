// Package finding holds what a check or an act reports when the world is not
// as it must be: the object, what was expected, what was found and what to do
// next, with the error class that decides whether anyone waits or retries.
// It must not know any system (Kubernetes, Helm, NVML).
package finding

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"

	"go.temporal.io/sdk/temporal"
)

// Class says what the workflow does with a finding (design, contract 7).
type Class string

const (
	// Stop needs a person: it is never retried by itself.
	Stop Class = "stop"
	// Wait is re-checked until the deadline in the plan, then it parks.
	Wait Class = "wait"
	// Retry is transient: the activity's retry policy handles it.
	Retry Class = "retry"
)

// Finding is one deviation. Row is the catalogue row (T.., P.., N..) where
// there is one. Why says why it matters, Next what usually helps.
type Finding struct {
	Row      string `json:"row,omitempty"`
	Object   string `json:"object"`
	Expected string `json:"expected,omitempty"`
	Found    string `json:"found"`
	Why      string `json:"why,omitempty"`
	Next     string `json:"next,omitempty"`
}

// String is the one-line form used in errors, logs and status.
func (f Finding) String() string {
	var b strings.Builder
	if f.Row != "" {
		fmt.Fprintf(&b, "%s: ", f.Row)
	}
	b.WriteString(f.Object)
	if f.Expected != "" {
		fmt.Fprintf(&b, ": expected %s, found %s", f.Expected, f.Found)
	} else {
		fmt.Fprintf(&b, ": %s", f.Found)
	}
	if f.Next != "" {
		fmt.Fprintf(&b, "; %s", f.Next)
	}
	return b.String()
}

// Error turns the finding into the application error of its class. Stop and
// Wait are non-retryable for Temporal: the workflow decides.
func (f Finding) Error(c Class) error {
	return temporal.NewApplicationErrorWithOptions(f.String(), string(c), temporal.ApplicationErrorOptions{
		NonRetryable: c != Retry,
		Details:      []any{f},
	})
}

// Of extracts the finding and its class from an error that crossed an
// activity or child workflow boundary. ok is false for every other error.
func Of(err error) (f Finding, c Class, ok bool) {
	var app *temporal.ApplicationError
	if !errors.As(err, &app) {
		return f, "", false
	}
	switch c = Class(app.Type()); c {
	case Stop, Wait, Retry:
	default:
		return f, "", false
	}
	if f, ok = Details(app); ok {
		return f, c, true
	}
	return Finding{Object: "activity", Found: app.Message()}, c, true
}

// InRow names the catalogue row in an error that a lower layer returned
// without one.
func InRow(err error, row string) error {
	f, class, ok := Of(err)
	if !ok || f.Row != "" {
		return err
	}
	f.Row = row
	return f.Error(class)
}

// Details is the finding that an application error of any type carries.
func Details(app *temporal.ApplicationError) (f Finding, ok bool) {
	if !app.HasDetails() {
		return f, false
	}
	// Before it crosses a boundary an error holds the value itself, and asking
	// it for another type panics: so ask for whatever is there.
	var detail any
	if err := app.Details(&detail); err != nil {
		return f, false
	}
	if f, ok = detail.(Finding); ok {
		return f, true
	}
	data, err := json.Marshal(detail)
	if err != nil {
		return f, false
	}
	if err := json.Unmarshal(data, &f); err != nil {
		return f, false
	}
	return f, f.Object != ""
}
