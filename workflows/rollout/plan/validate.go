package plan

import (
	"fmt"
	"slices"
	"strings"

	"github.com/refit-run/refit/workflows/window"
)

// Problem is one thing that is wrong with a plan, at its JSON path.
type Problem struct {
	Path    string `json:"path"`
	Message string `json:"message"`
}

func (p Problem) String() string { return p.Path + " " + p.Message }

// Invalid is the error of Build: the strategy does not fit the pool.
type Invalid struct{ Problems []Problem }

func (e *Invalid) Error() string {
	lines := make([]string, len(e.Problems))
	for i, p := range e.Problems {
		lines[i] = p.String()
	}
	return "the strategy can't be carried out: " + strings.Join(lines, "; ")
}

type problems struct {
	base string
	list []Problem
}

func (p *problems) add(path, format string, args ...any) {
	full := path
	if p.base != "" {
		full = p.base + "." + path
	}
	p.list = append(p.list, Problem{Path: full, Message: fmt.Sprintf(format, args...)})
}

// Validate returns every problem that can be seen without the pool; path is
// where the strategy stands in the plan. Build adds those that need the pool.
func (s Strategy) Validate(path string) []Problem {
	p := &problems{base: path}
	p.zeros(s)
	p.canary(s)
	p.amount("batch", s.Batch)
	p.amount("maxUnavailable", s.MaxUnavailable)
	p.amount("budget.perBatch", s.Budget.PerBatch)
	p.amount("budget.total", s.Budget.Total)
	p.oneOf("order", string(s.Order), string(ByName), string(ByAge))
	p.oneOf("gates", string(s.Gates), string(GateAfterCanary), string(GateEachBatch), string(GateNone))
	if s.Gates == GateAfterCanary && s.Canary != nil && s.Canary.none() {
		p.add("gates", "is afterCanary, but the canary is empty: name a canary, or choose eachBatch or none")
	}
	if s.Approvers < 0 {
		p.add("approvers", "is %d: want 1 or more", s.Approvers)
	}
	p.duration("soakCanary", s.SoakCanary)
	p.duration("soakBatch", s.SoakBatch)
	p.duration("interval", s.Interval)
	p.duration("hostTimeout", s.HostTimeout)
	p.duration("maxDuration", s.MaxDuration)
	if s.MaxDuration > 0 && s.HostTimeout > s.MaxDuration {
		p.add("maxDuration", "is %s, shorter than the %s that one host may take", s.MaxDuration, s.HostTimeout)
	}
	return p.list
}

// zeros refuses explicit zeros. A budget's count of 0 says "none may fail",
// which is sound unless the other limit makes it meaningless.
func (p *problems) zeros(s Strategy) {
	for _, z := range s.zeros {
		switch {
		case z == "budget.perBatch.count":
			if s.Budget.Total != (Amount{}) {
				p.add(z, "is 0 next to a total of %s: the first failure of a batch would park, so the total is never reached; leave one of them out", s.Budget.Total)
			}
		case z == "budget.total.count":
			if s.Budget.PerBatch != (Amount{}) {
				p.add(z, "is 0 next to %s per batch: no failure is tolerated in all; leave one of them out", s.Budget.PerBatch)
			}
		case z == "approvers":
			p.add(z, "is 0: want 1 or more; a rollout without questions has gates: none")
		case strings.HasSuffix(z, ".percent"):
			p.add(z, "is 0: want 1 to 100, or leave it out for the default")
		case strings.HasSuffix(z, ".count"):
			p.add(z, "is 0: want 1 or more, or leave it out for the default")
		default:
			p.add(z, "is 0s: want a positive duration, or leave it out")
		}
	}
}

func (p *problems) canary(s Strategy) {
	c := s.Canary
	if c == nil {
		return
	}
	if c.Count < 0 {
		p.add("canary.count", "is %d: want 1 or more", c.Count)
	}
	ways := 0
	for _, set := range []bool{c.Count != 0, len(c.Nodes) > 0, len(c.Selector) > 0} {
		if set {
			ways++
		}
	}
	if ways > 1 {
		p.add("canary", "selects hosts in %d ways: give one of count, nodes and selector", ways)
	}
	for i, n := range c.Nodes {
		if n == "" {
			p.add(fmt.Sprintf("canary.nodes[%d]", i), "is empty: want a node's name")
		} else if j := slices.Index(c.Nodes[:i], n); j >= 0 {
			p.add(fmt.Sprintf("canary.nodes[%d]", i), "is %s, as is canary.nodes[%d]: name each node once", n, j)
		}
	}
	if _, ok := c.Selector[""]; ok {
		p.add("canary.selector", "has an empty label key")
	}
}

func (p *problems) amount(path string, a Amount) {
	if a.Count != 0 && a.Percent != 0 {
		p.add(path, "has count %d and percent %d: give one of them", a.Count, a.Percent)
	}
	if a.Count < 0 {
		p.add(path+".count", "is %d: want 1 or more", a.Count)
	}
	if a.Percent < 0 || a.Percent > 100 {
		p.add(path+".percent", "is %d: want 1 to 100", a.Percent)
	}
}

func (p *problems) duration(path string, d window.Duration) {
	if d < 0 {
		p.add(path, "is %s: want a positive duration", d)
	}
}

func (p *problems) oneOf(path, got string, want ...string) {
	if got != "" && !slices.Contains(want, got) {
		p.add(path, "is %q: want one of %s", got, strings.Join(want, ", "))
	}
}
