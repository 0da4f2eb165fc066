package tensorfusion

import (
	"encoding/binary"
	"net"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// mysqlServer speaks as much of the protocol as a login and a query need.
func mysqlServer(t *testing.T, password string, serve func(net.Conn)) (host, port string) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	t.Cleanup(func() { l.Close() })
	salt := []byte("abcdefghijklmnopqrst")
	if serve == nil {
		serve = func(c net.Conn) {
			greeting := append([]byte{10}, "8.4-fake\x00"...)
			greeting = append(greeting, 1, 0, 0, 0)
			greeting = append(append(greeting, salt[:8]...), 0)
			greeting = append(greeting, 0xff, 0xff, utf8mb4, 2, 0, 0xff, 0xff, 21)
			greeting = append(append(greeting, make([]byte, 10)...), salt[8:]...)
			greeting = append(append(greeting, 0), nativePassword+"\x00"...)
			_ = writePacket(c, 0, greeting)
			login, seq, err := readPacket(c)
			if err != nil {
				return
			}
			if !strings.Contains(string(login), string(scramble(password, salt))) {
				_ = writePacket(c, seq+1, append(binary.LittleEndian.AppendUint16([]byte{0xff}, 1045), "#28000Access denied"...))
				return
			}
			_ = writePacket(c, seq+1, []byte{0, 0, 0, 2, 0, 0, 0})
			if query, _, err := readPacket(c); err == nil && string(query[1:]) == "SELECT 1" {
				_ = writePacket(c, 1, []byte{1})
			}
		}
	}
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			serve(c)
			c.Close()
		}
	}()
	host, port, err = net.SplitHostPort(l.Addr().String())
	require.NoError(t, err)
	return host, port
}

func databaseValues(host, port, password string) map[string]any {
	return map[string]any{"greptime": map[string]any{"host": host, "port": port, "isCloud": true, "user": "u", "password": password, "db": "public"}}
}

// P02: a port that accepts connections is not a database that answers.
func TestTheDatabaseMustAnswerLoginAndQuery(t *testing.T) {
	const password = "fake-greptime-password"
	host, port := mysqlServer(t, password, nil)
	good := askDatabase(t.Context(), nil, databaseValues(host, port, password))
	assert.Empty(t, good.Trouble)
	assert.Contains(t, good.answered(), "asked from the worker", "who reads the verdict must not take it for the controller's side")
	refused := &Observation{Database: askDatabase(t.Context(), nil, databaseValues(host, port, "fake-other"))}
	require.Len(t, checkDatabase(refused), 1, "an answer counts wherever it was asked from")
	assert.Contains(t, checkDatabase(refused)[0].Found, "1045")

	silent, silentPort := mysqlServer(t, "", func(net.Conn) {})
	assert.Contains(t, askDatabase(t.Context(), nil, databaseValues(silent, silentPort, "")).Trouble, "greeting")

	web, webPort := mysqlServer(t, "", func(c net.Conn) { _ = writePacket(c, 0, []byte("HTTP/1.1 400")) })
	assert.Contains(t, askDatabase(t.Context(), nil, databaseValues(web, webPort, "")).Trouble, "MySQL protocol")

	assert.NotEmpty(t, askDatabase(t.Context(), nil, databaseValues("127.0.0.1", "1", "")).Trouble)
	closed := &Observation{Database: askDatabase(t.Context(), nil, databaseValues("127.0.0.1", "1", ""))}
	assert.Empty(t, checkDatabase(closed), "the controller's pods may reach it")
	require.Len(t, doubtDatabase(closed), 1)
	assert.Contains(t, doubtDatabase(closed)[0].Expected, "asked from the worker")
	assert.Contains(t, doubtDatabase(closed)[0].Next, "acknowledge P02")
	assert.Empty(t, Database{}.answered())
	assert.Equal(t, Database{}, askDatabase(t.Context(), nil, map[string]any{}), "a release without a database has nothing to ask")
}

func TestAServiceOfTheClusterIsRecognised(t *testing.T) {
	name, namespace, ok := serviceOf("greptimedb-standalone.greptimedb.svc.cluster.local")
	assert.Equal(t, []any{"greptimedb-standalone", "greptimedb", true}, []any{name, namespace, ok})
	_, _, ok = serviceOf("db.example.test")
	assert.False(t, ok)
}
