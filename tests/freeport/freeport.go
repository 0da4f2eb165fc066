// Package freeport gives the tests' servers ports of their own on 127.0.0.1.
// It holds no server and must not be used by the product: a user names ports.
package freeport

import (
	"fmt"
	"math/rand/v2"
	"net"
)

// The ports lie below the range from which kernels take ports for outgoing
// connections, so that a server that ends and starts again finds its port
// free, and below the blocks of the sandboxes.
const (
	first = 11000
	count = 9000
)

// Get returns n different free ports. Nothing reserves them: their processes
// should listen soon.
func Get(n int) ([]int, error) {
	var ports []int
	for _, offset := range rand.Perm(count) {
		if len(ports) == n {
			return ports, nil
		}
		l, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", first+offset))
		if err != nil {
			continue
		}
		if err := l.Close(); err != nil {
			return nil, fmt.Errorf("port %d: %w", first+offset, err)
		}
		ports = append(ports, first+offset)
	}
	return nil, fmt.Errorf("expected %d free ports between %d and %d on 127.0.0.1, found %d", n, first, first+count-1, len(ports))
}
