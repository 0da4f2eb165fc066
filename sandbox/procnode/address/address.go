// Package address gives every pod a loopback address of its own. An address
// goes back only when its holder says that nothing can listen on it any more.
package address

import (
	"fmt"
	"net/netip"
	"sync"
)

// Pool is a range of addresses, given out in turn, so that a returned one
// rests as long as possible.
type Pool struct {
	mu    sync.Mutex
	first netip.Addr
	size  uint32
	next  uint32
	taken map[netip.Addr]bool
}

// NewPool holds size addresses from first on.
func NewPool(first netip.Addr, size int) (*Pool, error) {
	if !first.Is4() || !first.IsLoopback() || size < 1 {
		return nil, fmt.Errorf("addresses of pods: expected at least one in 127.0.0.0/8, found %d from %s", size, first)
	}
	return &Pool{first: first, size: uint32(size), taken: map[netip.Addr]bool{}}, nil
}

// Take gives out a free address.
func (p *Pool) Take() (netip.Addr, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for range p.size {
		a := p.at(p.next)
		p.next = (p.next + 1) % p.size
		if !p.taken[a] {
			p.taken[a] = true
			return a, nil
		}
	}
	return netip.Addr{}, fmt.Errorf("addresses of pods: all %d from %s are taken; delete pods of this node", p.size, p.first)
}

// Reserve takes a known address for a pod that already has it.
func (p *Pool) Reserve(a netip.Addr) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.taken[a] {
		return fmt.Errorf("address %s: expected it free, found it taken by another pod", a)
	}
	p.taken[a] = true
	return nil
}

// Release takes an address back.
func (p *Pool) Release(a netip.Addr) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.taken, a)
}

func (p *Pool) at(i uint32) netip.Addr {
	b := p.first.As4()
	n := uint32(b[0])<<24 | uint32(b[1])<<16 | uint32(b[2])<<8 | uint32(b[3])
	n += i
	return netip.AddrFrom4([4]byte{byte(n >> 24), byte(n >> 16), byte(n >> 8), byte(n)})
}
