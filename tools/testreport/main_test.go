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

func TestASkippedRequiredTestFailsOnlyWhenStrict(t *testing.T) {
	var out strings.Builder
	ok, _, err := report(strings.NewReader(ran), &out, false)
	require.NoError(t, err)
	assert.True(t, ok)
	assert.Contains(t, out.String(), "SKIPPED p TestB: b_test.go:3: no apiserver found")
	assert.Contains(t, out.String(), "ok  \tp")
	ok, _, err = report(strings.NewReader(ran), &out, true)
	require.NoError(t, err)
	assert.False(t, ok)
}

func TestASkipOfTheLongSuiteIsMeant(t *testing.T) {
	var out strings.Builder
	ok, _, err := report(strings.NewReader(strings.ReplaceAll(ran, "no apiserver found", "set REFIT_TEST_LONG=1")), &out, true)
	require.NoError(t, err)
	assert.True(t, ok)
}

func TestAFailureShowsItsOutput(t *testing.T) {
	var out strings.Builder
	ok, broken, err := report(strings.NewReader(`{"Action":"output","Package":"p","Test":"TestC","Output":"    c_test.go:9: want 1, got 2\n"}
{"Action":"fail","Package":"p","Test":"TestC"}
./x.go:1: undefined: y
`), &out, false)
	require.NoError(t, err)
	assert.False(t, ok)
	assert.Equal(t, "^(TestC)$", pattern(broken))
	assert.Empty(t, pattern(nil))
	assert.Contains(t, out.String(), "want 1, got 2")
	assert.Contains(t, out.String(), "undefined: y")
}
