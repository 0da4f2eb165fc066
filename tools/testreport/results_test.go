package main

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

const ran = `{"Action":"output","Package":"p","Test":"TestA","Output":"=== RUN   TestA\n"}
{"Action":"pass","Package":"p","Test":"TestA"}
{"Action":"output","Package":"p","Test":"TestB","Output":"    b_test.go:3: no apiserver found\n"}
{"Action":"skip","Package":"p","Test":"TestB"}
{"Action":"output","Package":"p","Output":"ok  \tp\t0.1s\n"}
{"Action":"pass","Package":"p"}
`

// events reads a stream and returns what was printed.
func events(t *testing.T, stream string, strict bool) (*results, string) {
	t.Helper()
	var out strings.Builder
	r, err := read(strings.NewReader(stream), &out)
	require.NoError(t, err)
	r.summary(&out, strict)
	return r, out.String()
}

func TestASkippedRequiredTestFailsOnlyWhenStrict(t *testing.T) {
	r, out := events(t, ran, true)
	assert.Contains(t, out, "SKIPPED p TestB: b_test.go:3: no apiserver found")
	assert.Contains(t, out, "1 required tests were skipped")
	assert.Contains(t, out, "ok  \tp")
	assert.Contains(t, out, "1 passed, 0 failed, 1 skipped")
	assert.True(t, r.ok(false))
	assert.False(t, r.ok(true))
}

func TestASkipOfTheLongSuiteIsMeant(t *testing.T) {
	r, _ := events(t, strings.ReplaceAll(ran, "no apiserver found", "set REFIT_TEST_LONG=1"), true)
	assert.True(t, r.ok(true))
}

func TestAFailureShowsItsOutput(t *testing.T) {
	r, out := events(t, `{"Action":"output","Package":"p","Test":"TestC","Output":"    c_test.go:9: want 1, got 2\n"}
{"Action":"fail","Package":"p","Test":"TestC"}
{"Action":"output","Package":"p","Output":"FAIL\n"}
{"Action":"fail","Package":"p"}
go: a line for people
`, false)
	assert.False(t, r.ok(false))
	assert.Equal(t, []failure{{Package: "p", Tests: []string{"TestC"}}}, r.broken)
	assert.Contains(t, out, "want 1, got 2")
	assert.Contains(t, out, "go: a line for people")
}

// A package that died in the middle has tests that did not run: its failed
// ones alone would prove too little.
func TestAPackageThatDidNotReachItsEndIsBrokenAsAWhole(t *testing.T) {
	const failed = `{"Action":"fail","Package":"p","Test":"TestC"}
{"Action":"run","Package":"p","Test":"TestD"}
{"Action":"output","Package":"p","Test":"TestD","Output":"what TestD said last\n"}
`
	r, out := events(t, failed+`{"Action":"fail","Package":"p"}`, false)
	assert.Equal(t, []failure{{Package: "p"}}, r.broken)
	assert.Contains(t, out, "what TestD said last")
}

func TestWhatASecondTryMustNotOutshineIsFinal(t *testing.T) {
	for _, c := range []struct{ name, stream, why string }{
		{"a data race", `{"Action":"output","Package":"p","Test":"TestC","Output":"WARNING: DATA RACE\n"}
{"Action":"fail","Package":"p","Test":"TestC"}
{"Action":"output","Package":"p","Output":"FAIL\n"}
{"Action":"fail","Package":"p"}`, "p has a data race"},
		{"a timeout", `{"Action":"output","Package":"p","Test":"TestC","Output":"panic: test timed out after 40m\n"}
{"Action":"fail","Package":"p"}`, "p timed out"},
		{"a build", `{"Action":"fail","Package":"p","FailedBuild":"p [p.test]"}`, "p does not build"},
	} {
		t.Run(c.name, func(t *testing.T) {
			r, _ := events(t, c.stream, false)
			var out strings.Builder
			assert.False(t, r.mayRunAgain(false, &out))
			assert.Contains(t, out.String(), "NOT RUN AGAIN: "+c.why)
		})
	}
}

func TestASkipThatFailsTheRunLeavesNothingToRunAgain(t *testing.T) {
	r, _ := events(t, ran+`{"Action":"fail","Package":"q","Test":"TestC"}
{"Action":"output","Package":"q","Output":"FAIL\n"}
{"Action":"fail","Package":"q"}`, true)
	var out strings.Builder
	assert.False(t, r.mayRunAgain(true, &out))
	assert.True(t, r.mayRunAgain(false, &out))
}
