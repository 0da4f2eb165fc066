package setup

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"

	"github.com/refit-run/refit/activities/gpu"
)

// Exit codes of the commands.
const (
	ExitDone    = 0 // nothing to do, or done
	ExitError   = 1
	ExitBad     = 2 // the layout is bad
	ExitWaiting = 3 // busy, or a reset or reboot is needed
	ExitRefused = 6
	ExitChanges = 7 // plan --exit-code found something to do
)

// ErrRefused marks a set-up that this run does not do.
var ErrRefused = errors.New("refused")

// Exit is an error with the code that the process ends with.
type Exit struct {
	Code int
	Err  error
}

func (e *Exit) Error() string {
	if e.Err == nil {
		return fmt.Sprintf("exit code %d", e.Code)
	}
	return e.Err.Error()
}

// Unwrap gives the cause.
func (e *Exit) Unwrap() error { return e.Err }

// ExitCode is what main ends the process with.
func (e *Exit) ExitCode() int { return e.Code }

// Silent reports that the output has already said everything.
func (e *Exit) Silent() bool { return e.Err == nil }

// ExitFor gives an error its exit code.
func ExitFor(err error) error {
	if err == nil {
		return nil
	}
	code := ExitError
	switch {
	case errors.Is(err, ErrBadLayout):
		code = ExitBad
	case errors.Is(err, ErrRefused):
		code = ExitRefused
	case ClassOf(err) == Wait:
		code = ExitWaiting
	}
	return &Exit{Code: code, Err: err}
}

// Report is what plan and apply of a set-up found and did.
type Report struct {
	Actions []gpu.Action `json:"actions"`
	Needs   []gpu.Need   `json:"needs,omitempty"`
	Devices []gpu.Device `json:"devices,omitempty"`
	// Notes say what was left alone, and why.
	Notes []string `json:"notes,omitempty"`
}

// Print writes the report as table or json.
func (r Report) Print(w io.Writer, format string, planned bool) error {
	if format == "json" {
		if r.Actions == nil {
			r.Actions = []gpu.Action{}
		}
		e := json.NewEncoder(w)
		e.SetIndent("", "  ")
		return e.Encode(r)
	}
	verb := "did"
	if planned {
		verb = "would"
	}
	for _, a := range r.Actions {
		fmt.Fprintf(w, "%-5s  %s  %s\n", verb, a.Device, a.What)
	}
	if len(r.Actions) == 0 {
		fmt.Fprintln(w, "nothing to do")
	}
	for _, n := range r.Needs {
		fmt.Fprintf(w, "needs  %s  %s: %s\n", n.Device, n.Kind, n.Why)
	}
	for _, d := range r.Devices {
		fmt.Fprintf(w, "has    %s  %s\n", d.UUID, d.Model)
	}
	for _, n := range r.Notes {
		fmt.Fprintf(w, "note   %s\n", n)
	}
	return nil
}
