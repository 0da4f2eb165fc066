package finding_test

import (
	"errors"
	"testing"

	"github.com/stretchr/testify/require"
	"go.temporal.io/sdk/converter"
	"go.temporal.io/sdk/temporal"

	"github.com/refit-run/refit/activities/finding"
)

var sample = finding.Finding{Row: "T01", Object: "Deployment/a", Expected: "2 replicas", Found: "1", Why: "no failover", Next: "scale it"}

func TestFindingReadsAsOneLine(t *testing.T) {
	require.Equal(t, "T01: Deployment/a: expected 2 replicas, found 1; scale it", sample.String())
	require.Equal(t, "Deployment/a: gone", finding.Finding{Object: "Deployment/a", Found: "gone"}.String())
}

func TestClassDecidesWhoRetries(t *testing.T) {
	for class, byTemporal := range map[finding.Class]bool{finding.Stop: false, finding.Wait: false, finding.Retry: true} {
		var app *temporal.ApplicationError
		require.ErrorAs(t, sample.Error(class), &app)
		require.Equal(t, !byTemporal, app.NonRetryable(), class)
	}
}

// The same finding comes out before and after an error crosses a boundary, and
// details of another kind are no reason to panic.
func TestFindingSurvivesTheBoundary(t *testing.T) {
	codec := temporal.NewDefaultFailureConverter(temporal.DefaultFailureConverterOptions{DataConverter: converter.GetDefaultDataConverter()})
	cross := func(err error) error { return codec.FailureToError(codec.ErrorToFailure(err)) }
	foreign := temporal.NewNonRetryableApplicationError("full", string(finding.Stop), nil, map[string]any{"disk": 3})
	for name, err := range map[string]error{"here": sample.Error(finding.Wait), "there": cross(sample.Error(finding.Wait))} {
		f, class, ok := finding.Of(err)
		require.True(t, ok, name)
		require.Equal(t, finding.Wait, class, name)
		require.Equal(t, sample, f, name)
	}
	for name, err := range map[string]error{"here": foreign, "there": cross(foreign)} {
		f, class, ok := finding.Of(err)
		require.True(t, ok, name)
		require.Equal(t, finding.Stop, class, name)
		require.Equal(t, finding.Finding{Object: "activity", Found: "full"}, f, name)
	}
	for _, err := range []error{nil, errors.New("plain"), temporal.NewApplicationError("x", "BadInput")} {
		_, _, ok := finding.Of(err)
		require.False(t, ok)
	}
}
