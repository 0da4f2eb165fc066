package host

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestARecordOfTheKernelsOwnFileIsParsed(t *testing.T) {
	r, ok := kmsgRecord("4,339,5140900,-;NVRM: Xid (PCI:0000:03:00): 79, lost\n SUBSYSTEM=pci\n")
	require.True(t, ok)
	require.Equal(t, record{sequence: 340, at: 5140900 * time.Microsecond, text: "NVRM: Xid (PCI:0000:03:00): 79, lost"}, r)
	for _, s := range []string{"", "no header", "a,b,c,-;text", "1,2;text"} {
		_, ok := kmsgRecord(s)
		require.False(t, ok, "%q", s)
	}
}
