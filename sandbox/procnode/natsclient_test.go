package procnode_test

import (
	"bufio"
	"context"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nkeys"
	"github.com/stretchr/testify/require"
)

// client speaks as much NATS as the tests need: login by nkey and requests.
type client struct {
	t    *testing.T
	conn net.Conn
	in   *bufio.Reader
	next int
}

const answerLimit = 10 * time.Second

// login answers the server's challenge with the seed.
func login(t *testing.T, conn net.Conn, seed string) *client {
	t.Helper()
	c := &client{t: t, conn: conn, in: bufio.NewReader(conn)}
	t.Cleanup(func() { _ = conn.Close() })
	var info struct {
		Nonce string `json:"nonce"`
	}
	require.NoError(t, json.Unmarshal([]byte(strings.TrimPrefix(c.line(), "INFO ")), &info))
	pair, err := nkeys.FromSeed([]byte(seed))
	require.NoError(t, err)
	public, err := pair.PublicKey()
	require.NoError(t, err)
	signature, err := pair.Sign([]byte(info.Nonce))
	require.NoError(t, err)
	options, err := json.Marshal(map[string]any{
		"verbose": false, "pedantic": false, "protocol": 1, "headers": true, "no_responders": false,
		"nkey": public, "sig": base64.RawURLEncoding.EncodeToString(signature),
	})
	require.NoError(t, err)
	c.send("CONNECT %s\r\nPING\r\n", options)
	require.Equal(t, "PONG", c.line())
	return c
}

func (c *client) send(format string, args ...any) {
	c.t.Helper()
	_, err := fmt.Fprintf(c.conn, format, args...)
	require.NoError(c.t, err)
}

// line is the next one that is no housekeeping.
func (c *client) line() string {
	c.t.Helper()
	require.NoError(c.t, c.conn.SetReadDeadline(time.Now().Add(answerLimit)))
	for {
		line, err := c.in.ReadString('\n')
		require.NoError(c.t, err)
		line = strings.TrimSpace(line)
		switch {
		case line == "PING":
			c.send("PONG\r\n")
		case strings.HasPrefix(line, "INFO ") && c.next > 0:
		default:
			return line
		}
	}
}

// request publishes and returns the answer.
func (c *client) request(subject string, body any) map[string]any {
	c.t.Helper()
	data := []byte{}
	if body != nil {
		var err error
		data, err = json.Marshal(body)
		require.NoError(c.t, err)
	}
	c.next++
	inbox := fmt.Sprintf("_INBOX.test.%d", c.next)
	c.send("SUB %s %d\r\nPUB %s %s %d\r\n%s\r\n", inbox, c.next, subject, inbox, len(data), data)
	line := c.line()
	var size int
	words := strings.Fields(line)
	require.Equal(c.t, "MSG", words[0], line)
	_, err := fmt.Sscan(words[len(words)-1], &size)
	require.NoError(c.t, err)
	payload := make([]byte, size+len("\r\n"))
	_, err = io.ReadFull(c.in, payload)
	require.NoError(c.t, err)
	c.send("UNSUB %d\r\n", c.next)
	answer := map[string]any{}
	require.NoError(c.t, json.Unmarshal(payload, &answer))
	return answer
}

// number digs a figure out of an answer.
func number(answer map[string]any, path ...string) int {
	var value any = answer
	for _, key := range path {
		m, _ := value.(map[string]any)
		value = m[key]
	}
	n, _ := value.(float64)
	return int(n)
}

// until bounds a context for the product's dialer.
func until(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	t.Cleanup(cancel)
	return ctx
}
