package gpu

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestTheVerdictIsTheWorstOfTheRows(t *testing.T) {
	fatal, needs, warn := Check{Severity: Fatal}, Check{Severity: Reset}, Check{Severity: Warn}
	open, openReset := Check{Severity: Fatal, Skipped: "not visible"}, Check{Severity: Reset, Skipped: "not visible"}
	skipped, ok := Check{Severity: Info, Skipped: "not supported"}, Check{OK: true, Severity: Fatal}
	for _, c := range []struct {
		checks  []Check
		allowed int
		want    Verdict
	}{
		{nil, 0, Pass}, {[]Check{ok, skipped}, 0, Pass},
		{[]Check{warn}, 0, Degraded}, {[]Check{warn}, 1, Pass}, {[]Check{warn, warn}, 1, Degraded},
		{[]Check{open}, 0, Unproven}, {[]Check{openReset}, 0, Unproven}, {[]Check{warn, open}, 0, Unproven},
		{[]Check{warn, open, needs}, 0, ResetNeeded}, {[]Check{needs, fatal, warn, open}, 9, Unfit},
	} {
		require.Equal(t, c.want, VerdictOf(c.checks, c.allowed), "%+v", c)
	}
}
