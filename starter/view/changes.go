package view

import (
	"fmt"

	"github.com/refit-run/refit/workflows/protocol"
)

// Changes tells what happened between two statuses, one line each, for
// places that are not a terminal. before is nil for the first look.
func Changes(before *protocol.Status, now protocol.Status, o Options) []string {
	var out []string
	say := func(format string, args ...any) {
		out = append(out, o.clock(o.Now)+" "+fmt.Sprintf(format, args...))
	}
	if before == nil {
		before = &protocol.Status{}
	}
	known := map[string]protocol.Stage{}
	for _, s := range before.Stages {
		known[s.Name] = s
	}
	for _, s := range now.Stages {
		was, seen := known[s.Name]
		switch {
		case s.State == protocol.Pending && !seen:
		case was.State != s.State:
			line := s.Name + ": " + o.state(s.State)
			if t := stageTimes(s, o.Now); t != "" && s.Ended != nil {
				line += " in " + t
			}
			if n := note(s); n != "" {
				line += " (" + n + ")"
			}
			say("%s", line)
		case s.State == protocol.Running && s.Note != "" && s.Note != was.Note:
			say("%s: %s", s.Name, s.Note)
		}
	}
	if now.Progress != before.Progress && now.Progress.Total > 0 {
		line := Counts(now.Kind, now.Progress)
		if now.ETA != nil {
			line += ", done about " + o.clock(*now.ETA)
		}
		say("progress: %s", line)
	}
	if now.Phase != before.Phase {
		say("run: %s", o.Phase(now.Phase))
	}
	if len(now.Ignored) > len(before.Ignored) {
		for _, i := range now.Ignored[len(before.Ignored):] {
			say("ignored: %s", ignored(i, o))
		}
	}
	if len(now.Warnings) > len(before.Warnings) {
		for _, w := range now.Warnings[len(before.Warnings):] {
			say("warning: %s", w)
		}
	}
	return out
}
