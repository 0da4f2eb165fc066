package names

import (
	"context"
	"errors"
	"net"

	"golang.org/x/net/dns/dnsmessage"
)

// seconds an answer may be remembered: pods come back with new addresses.
const ttl = 1

// maxQuestion is the largest UDP message without extensions, with room.
const maxQuestion = 4096

// Serve answers questions until the socket is closed.
func (t *Table) Serve(socket net.PacketConn) error {
	buffer := make([]byte, maxQuestion)
	for {
		n, from, err := socket.ReadFrom(buffer)
		if errors.Is(err, net.ErrClosed) {
			return nil
		}
		if err != nil {
			return err
		}
		if reply := t.answer(buffer[:n]); reply != nil {
			// The asker asks again when an answer is lost.
			_, _ = socket.WriteTo(reply, from)
		}
	}
}

// answer is nil for what is no question.
func (t *Table) answer(message []byte) []byte {
	var m dnsmessage.Message
	if err := m.Unpack(message); err != nil || m.Response || len(m.Questions) != 1 {
		return nil
	}
	q := m.Questions[0]
	reply := dnsmessage.Message{
		Header: dnsmessage.Header{
			ID: m.ID, Response: true, Authoritative: true, RecursionDesired: m.RecursionDesired, RCode: dnsmessage.RCodeNameError,
		},
		Questions: m.Questions,
	}
	if ips, ok := t.Lookup(q.Name.String()); ok {
		reply.RCode = dnsmessage.RCodeSuccess
		if q.Type == dnsmessage.TypeA {
			for _, ip := range ips {
				reply.Answers = append(reply.Answers, dnsmessage.Resource{
					Header: dnsmessage.ResourceHeader{Name: q.Name, Type: q.Type, Class: q.Class, TTL: ttl},
					Body:   &dnsmessage.AResource{A: ip.As4()},
				})
			}
		}
	}
	packed, err := reply.Pack()
	if err != nil {
		return nil
	}
	return packed
}

// Resolver asks the server at address and nobody else.
func Resolver(address string) *net.Resolver {
	return &net.Resolver{PreferGo: true, Dial: func(ctx context.Context, _, _ string) (net.Conn, error) {
		var d net.Dialer
		return d.DialContext(ctx, "udp", address)
	}}
}
