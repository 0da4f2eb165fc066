package host

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// numbered are records of /dev/kmsg with these sequences, as ours count from 1.
func numbered(sequences ...uint64) []record {
	var out []record
	for _, n := range sequences {
		out = append(out, record{sequence: n})
	}
	return out
}

func TestALogIsWholeFromTheKnownRecordOrFromTheBootOn(t *testing.T) {
	stamped := ringRecords
	at := func(seconds uint64) uint64 { return timed | seconds*1e6 }
	for _, c := range []struct {
		what    string
		since   uint64
		records []record
		want    bool
	}{
		{"all of it since the boot", 0, numbered(1, 2, 3), false},
		{"overwritten since the boot", 0, numbered(900, 901), true},
		{"one overwritten while it was read, since the boot", 0, numbered(1, 2, 4), true},
		{"what was known is still there", 5, numbered(3, 4, 5, 6), false},
		{"it begins with the next one", 5, numbered(6, 7), false},
		{"the next one is gone", 5, numbered(7, 8), true},
		{"a gap in what was known", 5, numbered(1, 3, 4, 5, 6), false},
		{"a gap after what was known", 5, numbered(4, 5, 6, 8), true},
		{"nothing new", 5, numbered(4, 5), false},
		{"not one record", 0, nil, true},
		{"not one record though some were known", 5, nil, true},
		{"by time, from the boot on", 0, stamped("<6>[    0.000000] Linux version\n<6>[    9.000000] a\n"), false},
		{"by time, overwritten since the boot", 0, stamped("<6>[  812.000000] a\n"), true},
		{"by time, what was known is still there", at(9), stamped("<6>[    9.000000] a\n<6>[   10.000000] b\n"), false},
		{"by time, cleared since", at(9), stamped("<6>[   10.000000] b\n"), true},
	} {
		require.Equal(t, c.want, lost(c.since, c.records), c.what)
	}
}

func TestARecordOfTheKernelsOwnFileIsParsed(t *testing.T) {
	r, ok := kmsgRecord("4,339,5140900,-;NVRM: Xid (PCI:0000:03:00): 79, lost\n SUBSYSTEM=pci\n")
	require.True(t, ok)
	require.Equal(t, record{sequence: 340, at: 5140900 * time.Microsecond, text: "NVRM: Xid (PCI:0000:03:00): 79, lost"}, r)
	for _, s := range []string{"", "no header", "a,b,c,-;text", "1,2;text"} {
		_, ok := kmsgRecord(s)
		require.False(t, ok, "%q", s)
	}
}
