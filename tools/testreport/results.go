package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"regexp"
	"slices"
	"strings"
)

// meant marks the reasons of skips that are no hole: tests of `make test-long`,
// and tests of what can't be installed everywhere.
var meant = []string{"REFIT_TEST_LONG", "optional:"}

// proofs are outputs that a second try must not outshine: a race that was seen
// is there, and a run that was too slow would take as long again.
var proofs = map[string]string{
	"WARNING: DATA RACE":          "has a data race",
	"panic: test timed out after": "timed out",
}

// event is one line of test2json.
type event struct {
	Action      string
	Package     string
	Test        string
	Output      string
	FailedBuild string
}

// failure is a package that failed, with its failed top-level tests. No tests
// means all of them: the package ended before its last test, or failed outside
// of one.
type failure struct {
	Package string
	Tests   []string
	// Final says why it is not run again, "" when it may be.
	Final string
}

func (f failure) String() string {
	if len(f.Tests) == 0 {
		return f.Package
	}
	return f.Package + " " + strings.Join(f.Tests, " ")
}

// flags make `go test` run exactly the tests, and really run them.
func (f failure) flags() []string {
	flags := []string{"-count=1"}
	if len(f.Tests) > 0 {
		var names []string
		for _, t := range f.Tests {
			names = append(names, regexp.QuoteMeta(t))
		}
		flags = append(flags, "-run=^("+strings.Join(names, "|")+")$")
	}
	return flags
}

// results is what one `go test` said.
type results struct {
	passed  map[string]bool // "package test", and "package " for whole ones
	failed  int
	skipped []string
	broken  []failure
}

func (r *results) missing() []string {
	return slices.DeleteFunc(slices.Clone(r.skipped), func(skip string) bool {
		return slices.ContainsFunc(meant, func(m string) bool { return strings.Contains(skip, m) })
	})
}

func (r *results) ok(strict bool) bool {
	return r.failed == 0 && (!strict || len(r.missing()) == 0)
}

// mayRunAgain is false when a second try could not make the run pass; it says
// why where that is not told already.
func (r *results) mayRunAgain(strict bool, out io.Writer) bool {
	may := len(r.broken) > 0 && (!strict || len(r.missing()) == 0)
	for _, f := range r.broken {
		if f.Final != "" {
			fmt.Fprintf(out, "NOT RUN AGAIN: %s %s\n", f.Package, f.Final)
			may = false
		}
	}
	return may
}

// passedAll reports whether everything that had failed was run and passed: a
// test that is skipped at the second try has not passed.
func (r *results) passedAll(f failure) bool {
	for _, t := range f.Tests {
		if !r.passed[f.Package+" "+t] {
			return false
		}
	}
	return r.passed[f.Package+" "]
}

func (r *results) summary(out io.Writer, strict bool) {
	for _, s := range r.skipped {
		fmt.Fprintln(out, "SKIPPED", s)
	}
	if missing := len(r.missing()); strict && missing > 0 {
		fmt.Fprintf(out, "%d required tests were skipped: what they need is named above\n", missing)
	}
	tests := 0
	for key := range r.passed {
		if !strings.HasSuffix(key, " ") {
			tests++
		}
	}
	fmt.Fprintf(out, "%d passed, %d failed, %d skipped\n", tests, r.failed, len(r.skipped))
}

// read follows the events to their end and prints the package lines and the
// output of what failed.
func read(in io.Reader, out io.Writer) (*results, error) {
	p := reader{
		out: out, results: results{passed: map[string]bool{}},
		output: map[string][]string{}, tests: map[string][]string{}, ended: map[string]bool{}, proof: map[string]string{},
	}
	lines := bufio.NewReader(in)
	for {
		line, err := lines.ReadBytes('\n')
		if len(line) > 0 {
			var e event
			if json.Unmarshal(line, &e) == nil {
				p.take(e)
			} else {
				fmt.Fprintf(out, "%s", line) // what go test says before it knows of packages
			}
		}
		if errors.Is(err, io.EOF) {
			return &p.results, nil
		}
		if err != nil {
			return nil, err
		}
	}
}

type reader struct {
	results
	out    io.Writer
	output map[string][]string // by "package test", of what has not ended yet
	tests  map[string][]string // package -> failed top-level tests
	ended  map[string]bool     // packages whose last test was reached
	proof  map[string]string   // package -> why it is not run again
}

func (p *reader) take(e event) {
	key := e.Package + " " + e.Test
	switch e.Action {
	case "build-output":
		fmt.Fprint(p.out, e.Output)
	case "output":
		p.takeOutput(e, key)
	case "pass":
		p.passed[key] = true
		delete(p.output, key)
	case "skip":
		if e.Test != "" {
			p.skipped = append(p.skipped, fmt.Sprintf("%s %s: %s", e.Package, e.Test, reason(p.output[key])))
		} else {
			p.passed[key] = true // a package without tests
		}
		delete(p.output, key)
	case "fail":
		p.failed++
		switch {
		case e.Test == "":
			p.takePackage(e)
		case !strings.Contains(e.Test, "/"):
			p.tests[e.Package] = append(p.tests[e.Package], e.Test)
		}
		p.flush(key)
	}
}

func (p *reader) takeOutput(e event, key string) {
	for mark, why := range proofs {
		if strings.Contains(e.Output, mark) {
			p.proof[e.Package] = why
		}
	}
	if e.Test != "" {
		p.output[key] = append(p.output[key], e.Output)
		return
	}
	switch {
	case e.Output == "FAIL\n": // the testing package says so after the last test
		p.ended[e.Package] = true
	case strings.HasPrefix(e.Output, "ok "), strings.HasPrefix(e.Output, "FAIL\t"):
		fmt.Fprint(p.out, e.Output)
	default:
		p.output[key] = append(p.output[key], e.Output)
	}
}

// takePackage keeps a package that failed. What its unfinished tests wrote is
// printed, because they get no event of their own.
func (p *reader) takePackage(e event) {
	for _, key := range slices.Sorted(maps.Keys(p.output)) {
		if strings.HasPrefix(key, e.Package+" ") {
			p.flush(key)
		}
	}
	f := failure{Package: e.Package, Final: p.proof[e.Package]}
	if e.FailedBuild != "" {
		f.Final = "does not build"
	}
	if p.ended[e.Package] {
		f.Tests = p.tests[e.Package]
	}
	p.broken = append(p.broken, f)
}

func (p *reader) flush(key string) {
	fmt.Fprint(p.out, strings.Join(p.output[key], ""))
	delete(p.output, key)
}

// reason is the text that the test gave for its skip.
func reason(lines []string) string {
	var texts []string
	for _, l := range lines {
		l = strings.TrimSpace(l)
		if l != "" && !strings.HasPrefix(l, "=== ") && !strings.HasPrefix(l, "--- ") {
			texts = append(texts, l)
		}
	}
	return strings.Join(texts, " ")
}
