package names

import (
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

func serve(t *testing.T) (*Table, *net.Resolver, string) {
	t.Helper()
	file := filepath.Join(t.TempDir(), "hosts")
	table := NewTable(file)
	socket, err := net.ListenPacket("udp", "127.0.0.1:0")
	require.NoError(t, err)
	done := make(chan error, 1)
	go func() { done <- table.Serve(socket) }()
	t.Cleanup(func() {
		require.NoError(t, socket.Close())
		require.NoError(t, <-done)
	})
	return table, Resolver(socket.LocalAddr().String()), file
}

func TestMembersAreFoundByEveryFormOfTheirName(t *testing.T) {
	table, resolver, file := serve(t)
	ip := netip.MustParseAddr("127.64.0.7")
	require.NoError(t, table.Replace(map[string][]netip.Addr{"nats-0.nats-headless.nats-system.svc.cluster.local": {ip}}))
	for _, name := range []string{
		"nats-0.nats-headless.nats-system.svc.cluster.local", "NATS-0.nats-headless.nats-system.svc.cluster.local.",
		"nats-0.nats-headless.nats-system.svc", "nats-0.nats-headless.nats-system",
	} {
		found, err := resolver.LookupNetIP(t.Context(), "ip4", name)
		require.NoError(t, err, name)
		require.Equal(t, []netip.Addr{ip}, found, name)
	}
	text, err := os.ReadFile(file)
	require.NoError(t, err)
	require.Contains(t, string(text), "127.64.0.7 nats-0.nats-headless.nats-system.svc.cluster.local nats-0.nats-headless.nats-system.svc nats-0.nats-headless.nats-system\n")
}

func TestNamesThatAreGoneAreNotFound(t *testing.T) {
	table, resolver, _ := serve(t)
	require.NoError(t, table.Replace(map[string][]netip.Addr{"a.b.c.svc.cluster.local": {netip.MustParseAddr("127.64.0.7")}}))
	require.NoError(t, table.Replace(nil))
	_, err := resolver.LookupNetIP(t.Context(), "ip4", "a.b.c.svc.cluster.local")
	var dns *net.DNSError
	require.ErrorAs(t, err, &dns)
	require.True(t, dns.IsNotFound)
}

func TestMessagesThatAreNoQuestionAreIgnored(t *testing.T) {
	require.Nil(t, NewTable("").answer([]byte("nonsense")))
}
