package gpu

import (
	"errors"
	"testing"

	"github.com/stretchr/testify/require"
	"go.temporal.io/sdk/converter"
	"go.temporal.io/sdk/temporal"

	"github.com/refit-run/refit/activities/finding"
)

func TestARefusalOfASetUpSurvivesTheBoundaryBesideItsFinding(t *testing.T) {
	codec := temporal.NewDefaultFailureConverter(temporal.DefaultFailureConverterOptions{DataConverter: converter.GetDefaultDataConverter()})
	busy := finding.Finding{Object: "GPU GPU-1", Found: "2 clients"}
	failed := func(details ...any) error {
		return temporal.NewApplicationErrorWithOptions(busy.String(), string(finding.Wait), temporal.ApplicationErrorOptions{Details: details})
	}
	for name, c := range map[string]struct {
		err  error
		want bool
	}{
		"untouched":           {failed(busy, SetUpFailure{Untouched: true}), true},
		"begun":               {failed(busy, SetUpFailure{}), false},
		"does not tell":       {failed(busy), false},
		"without any details": {failed(), false},
	} {
		for _, err := range []error{c.err, codec.FailureToError(codec.ErrorToFailure(c.err))} {
			require.Equal(t, c.want, Untouched(err), name)
			f, class, ok := finding.Of(err)
			require.True(t, ok)
			require.Equal(t, finding.Wait, class)
			require.NotEmpty(t, f.Found)
		}
	}
	require.False(t, Untouched(errors.New("lost")))
	require.False(t, Untouched(nil))
}
