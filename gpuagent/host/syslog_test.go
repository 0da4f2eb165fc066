package host

import (
	"errors"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestTheRingBufferIsReadAsTheSystemCallGivesIt(t *testing.T) {
	records := ringRecords("cut off\n<6>[    0.000001] Linux version\n<4>[  812.250000] NVRM: Xid (PCI:0000:01:00): 79, GPU has fallen off the bus\n a second line\n")
	require.Len(t, records, 2)
	require.Equal(t, "NVRM: Xid (PCI:0000:01:00): 79, GPU has fallen off the bus", records[1].text)
	require.Equal(t, 812250*time.Millisecond, records[1].at)
	require.Greater(t, records[1].sequence, records[0].sequence)
}

func TestALineThatNamesItsCallerIsALine(t *testing.T) {
	records := ringRecords("<6>[    0.000001][    T0] Linux version\n<4>[    2.500000][  C11] NVRM: Xid (PCI:0000:01:00): 79, lost\n")
	require.Len(t, records, 2)
	require.Equal(t, "NVRM: Xid (PCI:0000:01:00): 79, lost", records[1].text)
}

func TestAPositionInALogOfTheOtherKindCountsForNothing(t *testing.T) {
	byTime, byNumber := ringRecords("<6>[    5.000000] a\n"), []record{{sequence: 7}}
	require.Equal(t, timed|4, sameKind(timed|4, byTime))
	require.Equal(t, uint64(6), sameKind(6, byNumber))
	require.Zero(t, sameKind(6, byTime), "all of it is looked at: an Xid told twice does less harm than one missed")
	require.Zero(t, sameKind(timed|4, byNumber))
	require.Equal(t, uint64(6), sameKind(6, nil))
}

func TestTheRingBufferIsAskedOnlyWhereTheDeviceIsRefused(t *testing.T) {
	_, err := ring(os.ErrNotExist)
	require.Equal(t, os.ErrNotExist, err)
	_, err = ring(os.ErrPermission)
	require.True(t, err == nil || errors.Is(err, os.ErrPermission))
}
