package address

import (
	"net/netip"
	"testing"

	"github.com/stretchr/testify/require"
)

var first = netip.MustParseAddr("127.64.0.254")

func pool(t *testing.T, size int) *Pool {
	t.Helper()
	p, err := NewPool(first, size)
	require.NoError(t, err)
	return p
}

func TestReleasedAddressRestsUntilAllOthersWereUsed(t *testing.T) {
	p := pool(t, 3)
	a, err := p.Take()
	require.NoError(t, err)
	p.Release(a)
	for range 2 {
		b, err := p.Take()
		require.NoError(t, err)
		require.NotEqual(t, a, b)
	}
	again, err := p.Take()
	require.NoError(t, err)
	require.Equal(t, a, again)
}

func TestHeldAddressesAreNeverGivenTwice(t *testing.T) {
	p := pool(t, 300)
	require.NoError(t, p.Reserve(netip.MustParseAddr("127.64.1.1")))
	seen := map[netip.Addr]bool{netip.MustParseAddr("127.64.1.1"): true}
	for range 299 {
		a, err := p.Take()
		require.NoError(t, err)
		require.False(t, seen[a], a)
		seen[a] = true
	}
	_, err := p.Take()
	require.ErrorContains(t, err, "taken")
	require.Error(t, p.Reserve(first))
}

func TestOnlyLoopbackIsGivenOut(t *testing.T) {
	for _, bad := range []string{"10.0.0.1", "::1"} {
		_, err := NewPool(netip.MustParseAddr(bad), 10)
		require.Error(t, err, bad)
	}
	_, err := NewPool(first, 0)
	require.Error(t, err)
}
