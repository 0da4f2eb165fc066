package datastores

import (
	"encoding/json"
	"fmt"
	"os"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/refit-run/refit/tests/bench/figure"
)

// goal is what Refit may take, without the gates that the guide lacks, as a
// share of what the script takes.
const goal = 1.05

// repetitions is how often each way is measured where that takes no world of
// its own. REFIT_BENCH_TIMES makes it less for a try.
func repetitions(b *testing.B) int {
	b.Helper()
	text := os.Getenv("REFIT_BENCH_TIMES")
	if text == "" {
		return 3
	}
	n, err := strconv.Atoi(text)
	require.NoError(b, err, "REFIT_BENCH_TIMES")
	require.Positive(b, n, "REFIT_BENCH_TIMES")
	return n
}

// cost is what one way of doing it took, and cost others.
type cost struct {
	wall, gates time.Duration
	// writes, reads and logins are how long they were refused.
	writes, reads, logins time.Duration
	// missing is how many rows could not be read at the worst, left at the end.
	missing, left int
}

// median takes the middle of every cost by itself.
func median(of []cost) cost {
	return cost{
		wall: middle(of, func(c cost) time.Duration { return c.wall }), gates: middle(of, func(c cost) time.Duration { return c.gates }),
		writes: middle(of, func(c cost) time.Duration { return c.writes }), reads: middle(of, func(c cost) time.Duration { return c.reads }), logins: middle(of, func(c cost) time.Duration { return c.logins }),
		missing: middle(of, func(c cost) int { return c.missing }), left: middle(of, func(c cost) int { return c.left }),
	}
}

func middle[T time.Duration | int](costs []cost, of func(cost) T) T {
	var all []T
	for _, c := range costs {
		all = append(all, of(c))
	}
	slices.Sort(all)
	return all[len(all)/2]
}

// sheet prints figures of one piece of work, whose names tell of how many
// repetitions they are the median.
type sheet struct {
	work  string
	times int
}

func (s sheet) line(what string, value float64, unit, op string, goal float64) {
	fmt.Println(figure.Line(fmt.Sprintf("%s-%s-median-of-%d", s.work, what, s.times), value, unit, op, goal))
}

// walls prints how long both took and judges it.
func (s sheet) walls(script, refit cost) {
	s.line("script", script.wall.Seconds(), "s", "", 0)
	s.line("refit", refit.wall.Seconds(), "s", "", 0)
	s.line("refit-gates", refit.gates.Seconds(), "s", "", 0)
	s.line("refit-without-gates", (refit.wall-refit.gates).Seconds()/script.wall.Seconds(), "x-script", "<=", goal)
}

// refused prints how long something was refused and requires no more of Refit
// than of the script. turn is how often the client tries: no time of a refusal
// is known more exactly.
func (s sheet) refused(what string, turn, script, refit time.Duration) {
	s.line("script-refused-"+what, rounded(script), "s", "", 0)
	s.line("refit-refused-"+what, rounded(refit), "s", "<=", rounded(script+turn))
}

// rows does the same for what could not be read.
func (s sheet) rows(what string, script, refit int) {
	s.line("script-rows-missing-"+what, float64(script), "rows", "", 0)
	s.line("refit-rows-missing-"+what, float64(refit), "rows", "<=", float64(script))
}

// unguided is how long a run took for what the guide has nowhere: it asks whose
// cluster this is, keeps others away from it, and leaves a receipt.
func unguided(acts []act) (total time.Duration) {
	for _, a := range acts {
		switch a.kind {
		case "kube.Identify", "lease.Acquire", "lease.Release", "tensorfusion.WriteReceipt":
			total += a.took()
		}
	}
	return total
}

// rounded is a time as its line shows it: what looks equal is equal.
func rounded(d time.Duration) float64 { return d.Round(10 * time.Millisecond).Seconds() }

// meter adds up for how long something is refused: from the first refusal to
// the next time that it is accepted.
type meter struct {
	mu    sync.Mutex
	since time.Time
	total time.Duration
	// tries and refusals count; first is what was said at the first refusal.
	tries, refusals int
	first           string
}

// tried notes one try: what is refused was refused from its beginning.
func (m *meter) tried(began, ended time.Time, err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.tries++
	switch {
	case err != nil:
		m.refusals++
		if m.first == "" {
			m.first = err.Error()
		}
		if m.since.IsZero() {
			m.since = began
		}
	case !m.since.IsZero():
		m.total += ended.Sub(m.since)
		m.since = time.Time{}
	}
}

// refused is the sum up to a moment; what is refused still counts.
func (m *meter) refused(at time.Time) time.Duration {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.since.IsZero() {
		return m.total
	}
	return m.total + at.Sub(m.since)
}

// sighting is when something was first seen.
type sighting struct {
	mu sync.Mutex
	at time.Time
}

func (s *sighting) seen(at time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.at.IsZero() {
		s.at = at
	}
}

func (s *sighting) time() time.Time {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.at
}

// always does something again and again until end is called.
func always(every time.Duration, do func(n int)) (end func()) {
	stop := make(chan struct{})
	var working sync.WaitGroup
	working.Go(func() {
		tick := time.NewTicker(every)
		defer tick.Stop()
		for n := 0; ; n++ {
			select {
			case <-stop:
				return
			case <-tick.C:
				do(n)
			}
		}
	})
	return sync.OnceFunc(func() {
		close(stop)
		working.Wait()
	})
}

func TestARefusalLastsUntilTheNextSuccess(t *testing.T) {
	var m meter
	at := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	refusal := assert.AnError
	for i, err := range []error{nil, refusal, refusal, nil, nil, refusal, nil, refusal} {
		began := at.Add(time.Duration(i) * time.Second)
		m.tried(began, began, err)
	}
	assert.Equal(t, 3*time.Second, m.refused(at.Add(7*time.Second)))
	assert.Equal(t, 5*time.Second, m.refused(at.Add(9*time.Second)), "it is refused still")
	assert.Equal(t, 4, m.refusals)
}

func TestTheMiddleOfEveryCostIsTakenByItself(t *testing.T) {
	got := median([]cost{{wall: 3, missing: 1}, {wall: 1, missing: 9}, {wall: 2, missing: 5}})
	assert.Equal(t, cost{wall: 2, missing: 5}, got)
}

func TestOnlyWhatTheGuideLacksIsAGateOfCassandra(t *testing.T) {
	now := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	one := func(kind, input string, took time.Duration) act {
		from := now
		now = now.Add(took)
		return act{span: span{from, now}, kind: kind, input: json.RawMessage(input)}
	}
	acts := []act{
		one("cassandra.Ring", "{}", 1), one("cassandra.Logins", "{}", 2), one("cassandra.Raise", `{"planOnly":true,"factor":3}`, 4),
		one("cassandra.Scale", "{}", 1000), one("cassandra.Ring", "{}", 1000+128),
	}
	looked := now.Add(-128)
	acts = append(acts,
		one("cassandra.Ring", "{}", 8), one("cassandra.Raise", `{"factor":2}`, 16), one("cassandra.Repair", `{"copies":2}`, 32),
		one("cassandra.Raise", `{"factor":3}`, 1000), one("cassandra.Repair", `{"copies":3}`, 1000),
		one("cassandra.Logins", "{}", 1000), one("cassandra.AuthErrors", "{}", 1000), one("tensorfusion.WriteReceipt", "{}", 64),
	)
	assert.Equal(t, time.Duration(1+2+4+8+16+32+64+128), cassandraGates(t, acts, looked))
}
