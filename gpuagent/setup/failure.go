// Package setup is what the MIG and the vGPU set-up of a host share: how a
// declared layout names its GPUs, how failures are classed, the lock that
// keeps two set-ups apart, and what a person is shown. It must know neither
// MIG nor vGPU, and touches no GPU.
package setup

import (
	"errors"
	"strings"
	"time"
)

// Class says what a failure means for whoever asked. The values are those of
// the application errors of the activities.
type Class string

const (
	// Stop needs a person: a plan that cannot work, a refusal, a defect.
	Stop Class = "stop"
	// Wait passes once the GPU is idle, or who is at work has ended.
	Wait Class = "wait"
	// Retry is transient.
	Retry Class = "retry"
)

// Failure is one reason why a host is not as declared.
type Failure struct {
	Class    Class  `json:"-"`
	Object   string `json:"object"`
	Expected string `json:"expected,omitempty"`
	Found    string `json:"found"`
	Why      string `json:"why,omitempty"`
	Next     string `json:"next,omitempty"`
	// Again is when the request may be sent once more by whoever retries it; 0
	// leaves that to the class.
	Again time.Duration `json:"-"`
	// Cause is what the failure was made of; it does not leave the process.
	Cause error `json:"-"`
}

// Unwrap gives the cause.
func (f *Failure) Unwrap() error { return f.Cause }

func (f *Failure) Error() string {
	var b strings.Builder
	b.WriteString(f.Object + ": ")
	if f.Expected != "" {
		b.WriteString("expected " + f.Expected + ", found ")
	}
	b.WriteString(f.Found)
	if f.Next != "" {
		b.WriteString("; " + f.Next)
	}
	return b.String()
}

// ErrBadLayout marks a declared layout that cannot be read or can never fit.
var ErrBadLayout = errors.New("bad layout")

// BadLayout is a Failure of class Stop that is the declaration's own fault.
type BadLayout struct{ Failure }

// Is makes errors.Is(err, ErrBadLayout) true.
func (b *BadLayout) Is(target error) bool { return target == ErrBadLayout }

// Unwrap gives the failure in it.
func (b *BadLayout) Unwrap() error { return &b.Failure }

// Bad is the error of a declaration.
func Bad(object, expected, found, next string) error {
	return &BadLayout{Failure{Class: Stop, Object: object, Expected: expected, Found: found, Next: next}}
}

// ClassOf is the class of an error: Retry unless it says otherwise.
func ClassOf(err error) Class {
	var f *Failure
	if errors.As(err, &f) {
		return f.Class
	}
	return Retry
}
