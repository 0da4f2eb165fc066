package openbao

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"sync"
	"time"

	"github.com/hashicorp/raft"
)

// port is the cluster port: members speak Raft on it and pass requests on, as
// the real ones do by ALPN. The first byte of a connection says which.
type port struct {
	net.Listener
	reach Dial
	// name is where the others find it.
	name string

	raft, requests chan net.Conn
	done           chan struct{}
	once           sync.Once
}

const (
	speaksRaft     = 'R'
	speaksRequests = 'H'
	// helloLimit bounds the wait for the first byte.
	helloLimit = 10 * time.Second
)

func openPort(address, name string, reach Dial) (*port, error) {
	l, err := net.Listen("tcp", address)
	if err != nil {
		return nil, fmt.Errorf("cluster port: %w", err)
	}
	p := &port{
		Listener: l, name: name, reach: reach,
		raft: make(chan net.Conn), requests: make(chan net.Conn), done: make(chan struct{}),
	}
	go p.accept()
	return p, nil
}

func (p *port) accept() {
	for {
		conn, err := p.Listener.Accept()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err == nil {
			go p.greet(conn)
		}
	}
}

func (p *port) greet(conn net.Conn) {
	var hello [1]byte
	_ = conn.SetReadDeadline(time.Now().Add(helloLimit))
	if _, err := conn.Read(hello[:]); err != nil {
		_ = conn.Close()
		return
	}
	_ = conn.SetReadDeadline(time.Time{})
	to := p.requests
	switch hello[0] {
	case speaksRaft:
		to = p.raft
	case speaksRequests:
	default:
		_ = conn.Close()
		return
	}
	select {
	case to <- conn:
	case <-p.done:
		_ = conn.Close()
	}
}

func (p *port) take(from chan net.Conn) (net.Conn, error) {
	select {
	case c := <-from:
		return c, nil
	case <-p.done:
		return nil, net.ErrClosed
	}
}

func (p *port) dial(ctx context.Context, address string, speaks byte) (net.Conn, error) {
	conn, err := p.reach(ctx, "tcp", address)
	if err != nil {
		return nil, err
	}
	if _, err := conn.Write([]byte{speaks}); err != nil {
		return nil, errors.Join(err, conn.Close())
	}
	return conn, nil
}

// Accept, Dial and Close make it Raft's stream layer.
func (p *port) Accept() (net.Conn, error) { return p.take(p.raft) }

func (p *port) Dial(address raft.ServerAddress, timeout time.Duration) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	return p.dial(ctx, string(address), speaksRaft)
}

func (p *port) Addr() net.Addr { return named(p.name) }

// Close may be called by each of its users.
func (p *port) Close() (err error) {
	p.once.Do(func() {
		close(p.done)
		err = p.Listener.Close()
	})
	return err
}

// requestsOnly is the port as the listener of passed-on requests.
type requestsOnly struct{ *port }

func (r requestsOnly) Accept() (net.Conn, error) { return r.take(r.requests) }

// client passes requests on to the member whose cluster address it is given.
func (p *port) client() *http.Transport {
	return &http.Transport{
		DisableCompression: true,
		DialContext: func(ctx context.Context, _, address string) (net.Conn, error) {
			return p.dial(ctx, address, speaksRequests)
		},
	}
}

// named is the address of a member by its name.
type named string

func (named) Network() string  { return "tcp" }
func (n named) String() string { return string(n) }
