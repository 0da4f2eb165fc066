// Command testreport reads `go test -json` from standard input and prints what
// a person needs: the package lines, the output of what failed, every skipped
// test with its reason. A skip is a hole in the proof, so it fails the run when
// -strict is given, except for tests that are meant to be left out.
package main

import (
	"bufio"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
)

// meant marks the reasons of skips that are no hole: tests of `make test-long`,
// and tests of what can't be installed everywhere.
var meant = []string{"REFIT_TEST_LONG", "optional:"}

// isMeant reports whether the skip's line carries such a reason.
func isMeant(skip string) bool {
	return slices.ContainsFunc(meant, func(m string) bool { return strings.Contains(skip, m) })
}

// event is one line of test2json.
type event struct {
	Action  string
	Package string
	Test    string
	Output  string
}

func main() {
	strict := flag.Bool("strict", false, "fail when a required test was skipped")
	failures := flag.String("failures", "", "write the top-level tests that failed to this file, as a pattern for -run")
	flag.Parse()
	ok, failed, err := report(os.Stdin, os.Stdout, *strict)
	if err == nil && *failures != "" {
		err = os.WriteFile(*failures, []byte(pattern(failed)), 0o600)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "testreport:", err)
		os.Exit(2)
	}
	if !ok {
		os.Exit(1)
	}
}

// pattern matches exactly the tests, "" when there are none.
func pattern(tests []string) string {
	if len(tests) == 0 {
		return ""
	}
	return "^(" + strings.Join(tests, "|") + ")$"
}

// report returns whether everything passed, and the top-level tests that did
// not.
func report(in io.Reader, out io.Writer, strict bool) (ok bool, broken []string, err error) {
	output := map[string][]string{}
	var skipped []string
	passed, failed := 0, 0
	lines := bufio.NewReader(in)
	for {
		line, err := lines.ReadBytes('\n')
		if len(line) > 0 {
			var e event
			if json.Unmarshal(line, &e) != nil {
				fmt.Fprintf(out, "%s", line) // build errors come as plain text
				continue
			}
			key := e.Package + " " + e.Test
			switch e.Action {
			case "output", "build-output":
				switch {
				case e.Test == "" && (strings.HasPrefix(e.Output, "ok ") || strings.HasPrefix(e.Output, "FAIL\t") || e.Action == "build-output"):
					fmt.Fprint(out, e.Output)
				default:
					output[key] = append(output[key], e.Output)
				}
			case "pass":
				if e.Test != "" {
					passed++
				}
				delete(output, key)
			case "skip":
				if e.Test != "" {
					skipped = append(skipped, fmt.Sprintf("%s %s: %s", e.Package, e.Test, reason(output[key])))
				}
				delete(output, key)
			case "fail":
				failed++
				if e.Test != "" && !strings.Contains(e.Test, "/") {
					broken = append(broken, e.Test)
				}
				fmt.Fprint(out, strings.Join(output[key], ""))
				delete(output, key)
			}
		}
		if err == io.EOF {
			break
		}
		if err != nil {
			return false, broken, err
		}
	}
	missing := slices.DeleteFunc(slices.Clone(skipped), isMeant)
	for _, s := range skipped {
		fmt.Fprintln(out, "SKIPPED", s)
	}
	if strict && len(missing) > 0 {
		fmt.Fprintf(out, "%d required tests were skipped: what they need is named above\n", len(missing))
	}
	fmt.Fprintf(out, "%d passed, %d failed, %d skipped\n", passed, failed, len(skipped))
	return failed == 0 && (!strict || len(missing) == 0), broken, nil
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
