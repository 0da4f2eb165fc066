package local

import (
	"testing"

	"github.com/stretchr/testify/assert"
)

func TestAKilledProcessRunsUntilItsLastThreadHasEnded(t *testing.T) {
	const rest = " 1 7 7 0 -1 4227084 0 0 0 0 0 0 0 0 20 0 "
	for _, c := range []struct{ stat, start string }{
		{"42 (temporal) S" + rest + "9 0 31337 0 0", "31337"},
		{"42 (a (b) Z) S" + rest + "1 0 31337 0 0", "31337"},
		{"42 (temporal) Z" + rest + "9 0 31337 0 0", "31337"},
		{"42 (temporal) Z" + rest + "1 0 31337 0 0", ""},
		{"42 (temporal) X" + rest + "1 0 31337 0 0", ""},
		{"", ""},
	} {
		assert.Equal(t, c.start, startIn([]byte(c.stat)), c.stat)
	}
}
