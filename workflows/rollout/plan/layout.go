package plan

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"
)

// CanaryBatch is the name of the first batch where the strategy has a canary.
const CanaryBatch = "canary"

// Host is what the planner sees of a host.
type Host struct {
	Name    string            `json:"name"`
	Created time.Time         `json:"created,omitzero"`
	Labels  map[string]string `json:"labels,omitempty"`
	// OnTarget: it already is what the rollout makes of it.
	OnTarget bool `json:"onTarget,omitempty"`
	// Broken says why the host is not healthy now; empty when it is.
	Broken string `json:"broken,omitempty"`
}

func (h Host) done() bool { return h.OnTarget && h.Broken == "" }

// Batch is a set of hosts that is proven before the next one is touched.
type Batch struct {
	Name   string   `json:"name"`
	Hosts  []string `json:"hosts"`
	Canary bool     `json:"canary,omitempty"`
	// Budget is how many of its hosts may fail.
	Budget int `json:"budget,omitempty"`
}

// Layout is a strategy laid over a pool: who goes when, and the limits in
// hosts. It never changes during a rollout.
type Layout struct {
	Batches []Batch `json:"batches,omitempty"`
	// Done are the hosts that were on target before the rollout began.
	Done []string `json:"done,omitempty"`
	// Broken are the hosts to do that were not healthy at the start.
	Broken         []string `json:"broken,omitempty"`
	MaxUnavailable int      `json:"maxUnavailable"`
	// Budget is how many hosts may fail in all.
	Budget   int      `json:"budget"`
	Strategy Strategy `json:"strategy"`
}

// Total counts the hosts to do.
func (l Layout) Total() int {
	n := 0
	for _, b := range l.Batches {
		n += len(b.Hosts)
	}
	return n
}

// MaxHosts is how many hosts one rollout takes: it carries a record of each
// through every continue-as-new, and Temporal takes 2 MiB.
const MaxHosts = 5000

// Build lays the strategy over the hosts of a pool. It fails with *Invalid
// when they do not fit. Broken hosts go last, where they can't spoil the
// canary's verdict; fixFirst puts them first, as a rollback wants it.
func Build(s Strategy, hosts []Host, fixFirst bool) (Layout, error) {
	s = s.WithDefaults()
	p := &problems{}
	p.list = append(p.list, s.Validate("")...)
	if len(hosts) == 0 {
		p.add("canary", "can't be chosen: the pool has no hosts")
	}
	if len(hosts) > MaxHosts {
		p.add("hosts", "are %d: one rollout takes at most %d, split the pool", len(hosts), MaxHosts)
	}
	todo := make([]Host, 0, len(hosts))
	l := Layout{Strategy: s, MaxUnavailable: s.MaxUnavailable.of(len(hosts))}
	for _, h := range order(s.Order, hosts, fixFirst) {
		if h.done() {
			l.Done = append(l.Done, h.Name)
			continue
		}
		if h.Broken != "" {
			l.Broken = append(l.Broken, h.Name)
		}
		todo = append(todo, h)
	}
	canary := p.pickCanary(*s.Canary, hosts, todo)
	if len(p.list) > 0 {
		return Layout{}, &Invalid{Problems: p.list}
	}
	if len(canary) > 0 {
		l.Batches = append(l.Batches, Batch{Name: CanaryBatch, Hosts: canary, Canary: true})
	}
	rest := slices.DeleteFunc(todo, func(h Host) bool { return slices.Contains(canary, h.Name) })
	size := max(1, s.Batch.of(len(hosts)))
	for n := 1; len(rest) > 0; n++ {
		k := min(size, len(rest))
		b := Batch{Name: fmt.Sprintf("batch-%d", n), Hosts: names(rest[:k])}
		b.Budget = s.Budget.perBatch(k)
		l.Batches = append(l.Batches, b)
		rest = rest[k:]
	}
	l.Budget = s.Budget.total(l.Total())
	if l.MaxUnavailable == 0 {
		for _, b := range l.Batches {
			l.MaxUnavailable = max(l.MaxUnavailable, len(b.Hosts))
		}
	}
	return l, nil
}

func (b Budget) perBatch(size int) int {
	if b.PerBatch == (Amount{}) && b.Total != (Amount{}) {
		return size
	}
	return b.PerBatch.floor(size)
}

func (b Budget) total(size int) int {
	if b.Total == (Amount{}) && b.PerBatch != (Amount{}) {
		return size
	}
	return b.Total.floor(size)
}

// pickCanary chooses the canary among the hosts to do. A named or selected
// host that is on target already is proven and needs no second turn.
func (p *problems) pickCanary(c Canary, hosts, todo []Host) []string {
	switch {
	case len(c.Nodes) > 0:
		for i, n := range c.Nodes {
			if !slices.ContainsFunc(hosts, func(h Host) bool { return h.Name == n }) {
				p.add(fmt.Sprintf("canary.nodes[%d]", i), "is %s, which is no host of the pool: %s", n, some(hosts))
			}
		}
		return names(keep(todo, func(h Host) bool { return slices.Contains(c.Nodes, h.Name) }))
	case len(c.Selector) > 0:
		match := func(h Host) bool { return matches(h.Labels, c.Selector) }
		if !slices.ContainsFunc(hosts, match) {
			p.add("canary.selector", "matches none of the pool's %d hosts: check the labels of the nodes", len(hosts))
		}
		return names(keep(todo, match))
	case c.Count > len(hosts):
		p.add("canary.count", "is %d, more than the pool's %d hosts", c.Count, len(hosts))
		return nil
	default:
		return names(todo[:min(c.Count, len(todo))])
	}
}

// matches reports whether labels hold every pair of the selector; the result
// does not depend on the order of the pairs.
func matches(labels, selector map[string]string) bool {
	n := 0
	for _, k := range sortedKeys(selector) {
		if v, ok := labels[k]; ok && v == selector[k] {
			n++
		}
	}
	return n == len(selector)
}

func sortedKeys(m map[string]string) []string {
	if len(m) == 0 {
		return nil
	}
	keys := make([]string, 0, len(m))
	//workflowcheck:ignore the keys are sorted before anyone sees them
	for k := range m {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	return keys
}

func keep(hosts []Host, want func(Host) bool) []Host {
	var out []Host
	for _, h := range hosts {
		if want(h) {
			out = append(out, h)
		}
	}
	return out
}

func names(hosts []Host) []string {
	out := make([]string, len(hosts))
	for i, h := range hosts {
		out[i] = h.Name
	}
	return out
}

// some names a few hosts, for messages.
func some(hosts []Host) string {
	n := names(hosts)
	slices.SortFunc(n, natural)
	if len(n) > 5 {
		return strings.Join(n[:5], ", ") + fmt.Sprintf(" and %d more", len(n)-5)
	}
	if len(n) == 0 {
		return "it has none"
	}
	return strings.Join(n, ", ")
}

// order sorts the hosts as the strategy says: broken ones first or last, then
// by name or age.
func order(o Order, hosts []Host, fixFirst bool) []Host {
	out := slices.Clone(hosts)
	slices.SortStableFunc(out, func(a, b Host) int {
		if x, y := a.Broken != "", b.Broken != ""; x != y {
			if x == fixFirst {
				return -1
			}
			return 1
		}
		if o == ByAge {
			if c := a.Created.Compare(b.Created); c != 0 {
				return c
			}
			return cmp.Compare(a.Name, b.Name)
		}
		return natural(a.Name, b.Name)
	})
	return out
}

// natural compares names with runs of digits as numbers: gpu-9 before gpu-10.
func natural(a, b string) int {
	x, y := a, b
	for x != "" && y != "" {
		dx, dy := digits(x), digits(y)
		if dx > 0 && dy > 0 {
			nx, ny := strings.TrimLeft(x[:dx], "0"), strings.TrimLeft(y[:dy], "0")
			if c := cmp.Or(cmp.Compare(len(nx), len(ny)), cmp.Compare(nx, ny)); c != 0 {
				return c
			}
			x, y = x[dx:], y[dy:]
			continue
		}
		if x[0] != y[0] {
			return cmp.Compare(x[0], y[0])
		}
		x, y = x[1:], y[1:]
	}
	// Equal as numbers, for example 01 and 1: the plain comparison decides.
	return cmp.Or(cmp.Compare(len(x), len(y)), cmp.Compare(a, b))
}

func digits(s string) int {
	n := 0
	for n < len(s) && s[n] >= '0' && s[n] <= '9' {
		n++
	}
	return n
}
