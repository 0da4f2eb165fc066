package child

import (
	"fmt"
	"regexp"
	"strings"
	"time"
)

// MissingSymbol is the exit status with which the dynamic loader ends a
// process that calls a function its library lacks.
const MissingSymbol = 127

// Error is what the function itself returned.
type Error struct {
	Name    string
	Message string
}

func (e Error) Error() string { return e.Message }

// Exit: the child ended without a reply.
type Exit struct {
	Name   string
	Code   int
	Stage  string
	Stderr string
}

func (e Exit) Error() string {
	what := fmt.Sprintf("child %s ended with status %d and no reply", e.Name, e.Code)
	if e.Code == MissingSymbol {
		what = fmt.Sprintf("child %s ended with status 127: the driver library on this host lacks a symbol", e.Name)
	}
	return what + during(e.Stage) + detail(e.Stderr)
}

// Crash: the child was ended by a signal that it raised itself.
type Crash struct {
	Name   string
	Signal string
	Stage  string
	Stderr string
}

func (e Crash) Error() string {
	return fmt.Sprintf("child %s crashed (%s)%s%s", e.Name, e.Signal, during(e.Stage), detail(e.Stderr))
}

// Timeout: the child gave no reply before its deadline and was killed.
type Timeout struct {
	Name   string
	After  time.Duration
	Stage  string
	Stderr string
}

func (e Timeout) Error() string {
	return fmt.Sprintf("child %s gave no reply in %s and was killed%s", e.Name, e.After, during(e.Stage))
}

// Wedged: the child survives SIGKILL, so the driver holds it in the kernel.
// Nothing is started under the same key until it is gone: the GPU needs a
// reset, or the host a reboot.
type Wedged struct {
	Name   string
	PID    int
	State  string // of /proc/PID/stat: D is an uninterruptible wait
	WChan  string // where in the kernel it waits
	Stack  string // its kernel stack, where this process may read it
	Stage  string
	Stderr string
}

func (e Wedged) Error() string {
	return fmt.Sprintf("child %s is wedged: process %d survives SIGKILL in state %s, wchan %s%s%s: the driver holds it; reset the GPU or reboot the host",
		e.Name, e.PID, orUnknown(e.State), orUnknown(e.WChan), frames(e.Stack), during(e.Stage))
}

// framesTold are the innermost ones of a kernel stack: the driver's own call and
// who made it.
const framesTold = 4

// frames writes a stack of /proc, whose lines are like [<0>] rm_ioctl+0x1/0x2.
func frames(stack string) string {
	var told []string
	for line := range strings.Lines(stack) {
		if _, frame, ok := strings.Cut(strings.TrimSpace(line), "] "); ok && len(told) < framesTold {
			told = append(told, frame)
		}
	}
	if len(told) == 0 {
		return ""
	}
	return ", kernel stack " + strings.Join(told, " < ")
}

func during(stage string) string {
	if stage == "" {
		return ""
	}
	return " during " + stage
}

func detail(stderr string) string {
	var kept []string
	for line := range strings.Lines(stderr) {
		line = strings.TrimSpace(line)
		if line != "" && !strings.HasPrefix(line, stagePrefix) {
			kept = append(kept, line)
		}
	}
	if len(kept) == 0 {
		return ""
	}
	return ": " + limit(strings.Join(kept[:min(len(kept), 3)], "; "), 300)
}

func limit(s string, n int) string {
	if len(s) > n {
		return s[:n] + "…"
	}
	return s
}

func orUnknown(s string) string {
	if s == "" {
		return "unknown"
	}
	return s
}

func lastStage(stderr string) string {
	stage := ""
	for line := range strings.Lines(stderr) {
		if s, ok := strings.CutPrefix(strings.TrimSpace(line), stagePrefix); ok {
			stage = s
		}
	}
	return stage
}

// goCrash: the Go runtime catches a fatal signal of C code, prints it and ends
// the process with status 2.
var goCrash = regexp.MustCompile(`(?m)^(SIG[A-Z]+): |\[signal (SIG[A-Z]+)|^(panic|fatal error): `)

func crashSignal(stderr string) (string, bool) {
	m := goCrash.FindAllStringSubmatch(stderr, -1)
	if m == nil {
		return "", false
	}
	word := ""
	for _, groups := range m {
		for _, g := range groups[1:3] {
			if g != "" {
				return g, true
			}
		}
		word = groups[3]
	}
	return word, true
}
