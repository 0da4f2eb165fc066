package folder

import (
	"fmt"
	"hash/fnv"
	"net"
	"net/netip"
)

// A sandbox owns a block of consecutive ports below the range from which the
// kernel takes ports for outgoing connections, so that a component that
// restarts finds its port free. The daemon keeps the first port of the block
// open all its life (the registry's): that reserves the block.
const (
	firstPort  = 20000
	blockSize  = 16
	blockCount = 750
)

// Ports of one sandbox, all on 127.0.0.1.
type Ports struct {
	Block             int `json:"block"`
	Registry          int `json:"registry"`
	TemporalGRPC      int `json:"temporalGRPC"`
	TemporalUI        int `json:"temporalUI"`
	TemporalHTTP      int `json:"temporalHTTP"`
	TemporalMetrics   int `json:"temporalMetrics"`
	EtcdClient        int `json:"etcdClient"`
	EtcdPeer          int `json:"etcdPeer"`
	APIServer         int `json:"apiServer"`
	ControllerManager int `json:"controllerManager"`
	Scheduler         int `json:"scheduler"`
	Kwok              int `json:"kwok"`
	GreptimeMySQL     int `json:"greptimeMySQL"`
	GreptimeHTTP      int `json:"greptimeHTTP"`
	Webhook           int `json:"webhook"`
	ControllerAPI     int `json:"controllerAPI"`
	ControllerProbes  int `json:"controllerProbes"`
}

func portsOf(block int) Ports {
	p := firstPort + block*blockSize
	return Ports{
		Block: block, Registry: p, TemporalGRPC: p + 1, TemporalUI: p + 2, TemporalHTTP: p + 3,
		TemporalMetrics: p + 4, EtcdClient: p + 5, EtcdPeer: p + 6, APIServer: p + 7,
		ControllerManager: p + 8, Scheduler: p + 9, Kwok: p + 10, GreptimeMySQL: p + 11,
		GreptimeHTTP: p + 12, Webhook: p + 13, ControllerAPI: p + 14,
		ControllerProbes: p + 15,
	}
}

// Reserve finds a free block, beginning at one derived from the folder's
// path, and returns it with the open listener that reserves it.
func (f Folder) Reserve() (Ports, net.Listener, error) {
	h := fnv.New32a()
	_, _ = h.Write([]byte(f.Root))
	start := int(h.Sum32() % blockCount)
	for i := range blockCount {
		p := portsOf((start + i) % blockCount)
		l, err := p.Reopen()
		if err != nil {
			continue
		}
		if p.othersFree() {
			return p, l, nil
		}
		_ = l.Close()
	}
	return Ports{}, nil, fmt.Errorf("no free block of %d ports between %d and %d on 127.0.0.1: stop another sandbox first",
		blockSize, firstPort, firstPort+blockCount*blockSize)
}

// Reopen takes the reservation of a known block again.
func (p Ports) Reopen() (net.Listener, error) {
	return net.Listen("tcp", Address(p.Registry))
}

func (p Ports) othersFree() bool {
	for port := p.Registry + 1; port < p.Registry+blockSize; port++ {
		l, err := net.Listen("tcp", Address(port))
		if err != nil {
			return false
		}
		_ = l.Close()
	}
	return true
}

// Address is the loopback address of a port.
func Address(port int) string { return fmt.Sprintf("127.0.0.1:%d", port) }

// nodesPerBlock bounds the nodes of one sandbox: each has a loopback address
// of its own, so that host ports of different nodes and sandboxes never meet.
const nodesPerBlock = 2048

// NodeIP is the address of the i-th node (from 0) of the sandbox.
func (p Ports) NodeIP(i int) (netip.Addr, error) {
	if i < 0 || i >= nodesPerBlock-1 {
		return netip.Addr{}, fmt.Errorf("node %d: a sandbox has room for %d nodes", i, nodesPerBlock-1)
	}
	n := uint32(127<<24|32<<16) + uint32(p.Block*nodesPerBlock+i+1)
	return netip.AddrFrom4([4]byte{byte(n >> 24), byte(n >> 16), byte(n >> 8), byte(n)}), nil
}

// maxSocketPath is what every unix allows for a socket's path.
const maxSocketPath = 100

// SocketPath is where the control API listens.
func (f Folder) SocketPath(temp string) string {
	p := f.Path("control.sock")
	if len(p) <= maxSocketPath {
		return p
	}
	h := fnv.New64a()
	_, _ = h.Write([]byte(f.Root))
	return fmt.Sprintf("%s/refit-sandbox-%x.sock", temp, h.Sum64())
}
