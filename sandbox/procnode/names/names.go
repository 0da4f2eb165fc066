// Package names tells the processes of pods one another's addresses: a hosts
// file for Java, which takes no other resolver, and a small DNS server for
// servers built in Go. It must not know where the names come from.
package names

import (
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"

	"maps"
)

// Domain ends every full name.
const Domain = ".svc.cluster.local"

// Table maps full names, in lower case, to addresses.
type Table struct {
	file string

	mu      sync.RWMutex
	current map[string][]netip.Addr
	written string
}

// NewTable keeps the hosts file in step.
func NewTable(file string) *Table { return &Table{file: file} }

// Replace puts new names in place of the old; readers of the hosts file see
// the old one or the new one.
func (t *Table) Replace(names map[string][]netip.Addr) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.current = names
	text := hosts(names)
	if text == t.written {
		return nil
	}
	next := t.file + ".next"
	if err := os.WriteFile(next, []byte(text), 0o644); err != nil {
		return fmt.Errorf("hosts file: %w", err)
	}
	if err := os.Rename(next, t.file); err != nil {
		return fmt.Errorf("hosts file: %w", err)
	}
	t.written = text
	return nil
}

// hosts has one line per name, with the shorter forms that a search list
// would allow.
func hosts(names map[string][]netip.Addr) string {
	var b strings.Builder
	b.WriteString("127.0.0.1 localhost\n")
	sorted := slices.Sorted(maps.Keys(names))
	for _, name := range sorted {
		short := strings.TrimSuffix(name, Domain)
		for _, ip := range names[name] {
			fmt.Fprintf(&b, "%s %s %s.svc %s\n", ip, name, short, short)
		}
	}
	return b.String()
}

// Lookup finds a full name or one without the domain.
func (t *Table) Lookup(name string) ([]netip.Addr, bool) {
	name = strings.ToLower(strings.TrimSuffix(name, "."))
	t.mu.RLock()
	defer t.mu.RUnlock()
	for _, full := range []string{name, name + ".cluster.local", name + Domain} {
		if ips, ok := t.current[full]; ok {
			return ips, true
		}
	}
	return nil, false
}
