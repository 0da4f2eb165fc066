package plan

import (
	"bytes"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/refit-run/refit/workflows/window"
)

var update = flag.Bool("update", false, "write the golden narratives")

// world is a simulated pool that obeys the planner's decisions and misbehaves
// as told, or by a seed.
type world struct {
	t      *testing.T
	layout Layout
	state  State
	hosts  []Host
	rng    *rand.Rand // nil: fixed order, nothing unasked happens
	// fails is how often a host still fails before it works.
	fails map[string]int
	// before runs ahead of decision n, counted from 1.
	before map[int]func(w *world)
	alarms []string
	// answers to parkings, in order: retry (default) or skip.
	answers []string

	story   bytes.Buffer
	step    int
	touched map[string]bool
	gated   int // batches approved by a person
	parked  int
	last    Decision
}

func (w *world) host(name string) *Host {
	i := slices.IndexFunc(w.hosts, func(h Host) bool { return h.Name == name })
	require.GreaterOrEqual(w.t, i, 0, "host %s", name)
	return &w.hosts[i]
}

func (w *world) say(format string, args ...any) { fmt.Fprintf(&w.story, format+"\n", args...) }

// play runs the rollout to its end and checks the limits at every step.
func (w *world) play() {
	w.t.Helper()
	w.touched = map[string]bool{}
	w.say("strategy: %d batches over %d hosts, at most %d away, budget %d in all", len(w.layout.Batches), w.layout.Total(), w.layout.MaxUnavailable, w.layout.Budget)
	for _, b := range w.layout.Batches {
		w.say("  %s: %s", b.Name, strings.Join(b.Hosts, " "))
	}
	if len(w.layout.Done) > 0 {
		w.say("  done before: %s", strings.Join(w.layout.Done, " "))
	}
	look := true
	for {
		w.step++
		require.Less(w.t, w.step, 2000, "the rollout does not end")
		if f := w.before[w.step]; f != nil {
			f(w)
		}
		w.chance()
		o := Observation{Alarms: w.alarms}
		w.alarms = nil
		if look {
			o.Hosts = slices.Clone(w.hosts)
		}
		d := Next(w.layout, w.state, o)
		w.check(d)
		for _, n := range d.Notes {
			w.say("%3d seen: %s", w.step, n)
		}
		w.say("%3d %s %s: %s", w.step, d.Kind, d.Batch, d.Reason)
		w.state, w.last = d.State, d
		look = true
		switch d.Kind {
		case Done:
			return
		case Park:
			w.answer(d)
		case Replace:
			w.state = w.state.After(d, w.replace(d))
			look = w.rng != nil && w.rng.IntN(3) == 0
		default:
			if d.Kind == Gate {
				w.gated++
			}
			w.state = w.state.After(d, nil)
		}
	}
}

// replace takes the hosts of a wave and returns their results in the order in
// which they come back.
func (w *world) replace(d Decision) []Result {
	wave := slices.Clone(d.Hosts)
	if w.rng != nil {
		w.rng.Shuffle(len(wave), func(i, j int) { wave[i], wave[j] = wave[j], wave[i] })
	}
	var out []Result
	for _, name := range wave {
		w.touched[name] = true
		h := w.host(name)
		if w.fails[name] > 0 {
			w.fails[name]--
			h.Broken = "hypervisor not Ready"
			out = append(out, Result{Host: name, Status: Failed, Why: h.Broken})
			w.say("        %s failed: %s", name, h.Broken)
			continue
		}
		h.OnTarget, h.Broken = true, ""
		out = append(out, Result{Host: name, Status: Proven})
		w.say("        %s proven", name)
	}
	return out
}

func (w *world) answer(d Decision) {
	w.parked++
	verb := "retry"
	if len(w.answers) > 0 {
		verb, w.answers = w.answers[0], w.answers[1:]
	}
	w.say("        a person answers %s", verb)
	if verb == "skip" {
		w.state = w.state.Leave(w.layout)
		if w.state.Batch+1 < len(w.layout.Batches) {
			w.state = w.state.After(Decision{Kind: Advance}, nil)
		}
		return
	}
	for _, name := range d.Hosts {
		w.fails[name] = 0
	}
	w.state = w.state.Retry(w.layout)
}

// chance lets the world move by itself in seeded runs.
func (w *world) chance() {
	if w.rng == nil || w.rng.IntN(4) > 0 {
		return
	}
	h := &w.hosts[w.rng.IntN(len(w.hosts))]
	switch w.rng.IntN(4) {
	case 0, 1:
		h.OnTarget, h.Broken = true, ""
	case 2:
		h.Broken = "GPU fell off the bus"
	case 3:
		h.OnTarget = false
	}
}

// check holds the planner to its limits.
func (w *world) check(d Decision) {
	w.t.Helper()
	l, s := w.layout, d.State
	failed := s.Failed(l)
	if d.Kind == Park {
		return
	}
	// Whoever goes on is within every budget.
	require.LessOrEqual(w.t, len(failed), l.Budget, "budget in all")
	for i, b := range l.Batches {
		n := 0
		for _, h := range failed {
			if s.Hosts[h].Batch == i {
				n++
			}
			require.False(w.t, b.Canary && slices.Contains(b.Hosts, h), "went on over a failed canary %s", h)
		}
		if i == s.Batch {
			require.LessOrEqual(w.t, n, b.Budget, "budget of %s", b.Name)
		}
	}
	if d.Kind != Replace {
		return
	}
	require.NotEmpty(w.t, d.Hosts)
	require.LessOrEqual(w.t, len(d.Hosts), l.MaxUnavailable, "hosts away at a time")
	var allowed []string
	for i := 0; i <= s.Batch; i++ {
		allowed = append(allowed, l.Batches[i].Hosts...)
	}
	seen := map[string]bool{}
	for _, h := range d.Hosts {
		require.Contains(w.t, allowed, h, "a host outside the current batch")
		require.False(w.t, seen[h], "%s twice in a wave", h)
		seen[h] = true
		require.True(w.t, s.Hosts[h].Status.due(), "%s is settled already", h)
	}
	// No host of a batch goes while an earlier batch has waiting hosts that
	// are not in this very decision's reach.
	for i := 0; i < s.Batch; i++ {
		for _, h := range l.Batches[i].Hosts {
			if s.Hosts[h].Status.due() {
				require.Equal(w.t, d.Hosts[:1], s.due(l)[:1], "earlier hosts first")
			}
		}
	}
	if l.Strategy.Gates == GateEachBatch && s.Batch > 0 && w.touched[l.Batches[0].Hosts[0]] && w.rng == nil && w.parked == 0 {
		require.GreaterOrEqual(w.t, w.gated, s.Batch, "a gate between batches was left out")
	}
}

func minutes(n int) window.Duration { return window.Duration(time.Duration(n) * time.Minute) }

func TestNarratives(t *testing.T) {
	heal := func(name string) func(*world) {
		return func(w *world) { h := w.host(name); h.OnTarget, h.Broken = true, "" }
	}
	for _, c := range []struct {
		name     string
		strategy Strategy
		hosts    int
		fails    map[string]int
		before   map[int]func(*world)
		answers  []string
	}{
		{name: "happy-path", hosts: 8, strategy: Strategy{Batch: Amount{Count: 3}, MaxUnavailable: Amount{Count: 2},
			SoakCanary: minutes(10), SoakBatch: minutes(2), Interval: minutes(5)}},
		{name: "canary-fails-then-retry", hosts: 4, strategy: Strategy{Batch: Amount{Count: 3}, Budget: Budget{Total: Amount{Count: 4}}},
			fails: map[string]int{"gpu-1": 1}},
		{name: "budget-per-batch", hosts: 9, strategy: Strategy{Batch: Amount{Count: 4}, MaxUnavailable: Amount{Count: 2},
			Budget: Budget{PerBatch: Amount{Count: 1}}}, fails: map[string]int{"gpu-2": 1, "gpu-5": 1}},
		{name: "budget-in-all", hosts: 7, strategy: Strategy{Batch: Amount{Count: 2}, Budget: Budget{Total: Amount{Count: 1}}},
			fails: map[string]int{"gpu-2": 9, "gpu-4": 1}},
		{name: "tolerated-failure", hosts: 5, strategy: Strategy{Batch: Amount{Count: 2}, Budget: Budget{Total: Amount{Count: 1}}},
			fails: map[string]int{"gpu-3": 9}},
		{name: "skip-a-batch", hosts: 6, strategy: Strategy{Batch: Amount{Count: 2}, MaxUnavailable: Amount{Count: 1}},
			fails: map[string]int{"gpu-2": 9}, answers: []string{"skip"}},
		{name: "spontaneous-replacement", hosts: 6, strategy: Strategy{Batch: Amount{Count: 2}, Gates: GateNone},
			before: map[int]func(*world){2: heal("gpu-3"), 3: func(w *world) { heal("gpu-4")(w); heal("gpu-5")(w) }}},
		{name: "proven-host-breaks-during-soak", hosts: 4, strategy: Strategy{Batch: Amount{Count: 3}, SoakCanary: minutes(30)},
			before: map[int]func(*world){3: func(w *world) { w.host("gpu-1").Broken = "GPU missing" }}},
		{name: "flag-flipped", hosts: 4, strategy: Strategy{Batch: Amount{Count: 2}},
			before: map[int]func(*world){3: func(w *world) { w.alarms = []string{"pool shared: autoUpdateHypervisor was true"} }}},
		{name: "host-leaves-the-pool", hosts: 4, strategy: Strategy{Batch: Amount{Count: 2}, Gates: GateNone},
			before: map[int]func(*world){2: func(w *world) {
				w.hosts = slices.DeleteFunc(w.hosts, func(h Host) bool { return h.Name == "gpu-3" })
			}}},
		{name: "gate-each-batch", hosts: 5, strategy: Strategy{Batch: Amount{Count: 2}, Gates: GateEachBatch}},
		{name: "host-done-before-is-not-judged", hosts: 5, strategy: Strategy{Batch: Amount{Count: 2}, Gates: GateNone},
			before: map[int]func(*world){
				0: heal("gpu-2"), 1: heal("gpu-2"), 3: func(w *world) { w.host("gpu-2").Broken = "crash loop" }}},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := &world{t: t, hosts: pool(c.hosts), fails: c.fails, before: c.before, answers: c.answers}
			if w.fails == nil {
				w.fails = map[string]int{}
			}
			if f := c.before[0]; f != nil {
				f(w)
			}
			l, err := Build(c.strategy, w.hosts, false)
			require.NoError(t, err)
			w.layout = l
			w.play()
			golden(t, c.name, w.story.Bytes())
		})
	}
}

func golden(t *testing.T, name string, got []byte) {
	t.Helper()
	path := filepath.Join("testdata", name+".golden")
	if *update {
		require.NoError(t, os.MkdirAll("testdata", 0o755))
		require.NoError(t, os.WriteFile(path, got, 0o644))
		return
	}
	want, err := os.ReadFile(path)
	require.NoError(t, err, "run go test -update once")
	require.Equal(t, string(want), string(got), "the narrative changed; run go test -update if it should")
}

// TestSeededWorlds plays random strategies over pools that fail, heal, break
// and get replaced by themselves, in a random order. The limits hold at every
// step and every rollout ends with every host settled.
func TestSeededWorlds(t *testing.T) {
	for seed := range uint64(400) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			rng := rand.New(rand.NewPCG(seed, 7))
			w := &world{t: t, rng: rng, hosts: pool(1 + rng.IntN(30)), fails: map[string]int{}}
			for i := range w.hosts {
				switch rng.IntN(8) {
				case 0:
					w.fails[w.hosts[i].Name] = 1 + rng.IntN(2)
				case 1:
					w.hosts[i].OnTarget = true
				case 2:
					w.hosts[i].Broken = "GPUNode Pending"
				}
			}
			l, err := Build(random(rng), w.hosts, rng.IntN(2) == 0)
			require.NoError(t, err)
			w.layout = l
			for range 3 {
				if rng.IntN(3) == 0 {
					w.answers = append(w.answers, "skip")
				} else {
					w.answers = append(w.answers, "retry")
				}
			}
			w.play()
			done, failed := w.state.Count(l)
			require.Equal(t, l.Total(), done+failed, "every host is settled\n%s", w.story.String())
		})
	}
}

func random(rng *rand.Rand) Strategy {
	amount := func() Amount {
		if rng.IntN(2) == 0 {
			return Amount{Count: 1 + rng.IntN(6)}
		}
		return Amount{Percent: 1 + rng.IntN(100)}
	}
	s := Strategy{
		Batch: amount(),
		Gates: []Gates{"", GateEachBatch, GateNone}[rng.IntN(3)], Order: []Order{ByName, ByAge}[rng.IntN(2)],
		SoakBatch: minutes(rng.IntN(3)), SoakCanary: minutes(rng.IntN(3)), Interval: minutes(rng.IntN(3)),
	}
	if rng.IntN(2) == 0 {
		s.MaxUnavailable = amount()
	}
	if rng.IntN(2) == 0 {
		s.Budget.Total = amount()
	}
	if rng.IntN(2) == 0 {
		s.Budget.PerBatch = amount()
	}
	if rng.IntN(4) == 0 {
		s.Canary = &Canary{}
	}
	return s
}

// A host that failed its validation looks on target; seeing it must not
// settle it, and neither may a wave whose outcome got lost.
func TestSeeingAHostOnTargetProvesNoHostThatWasTaken(t *testing.T) {
	l, err := Build(Strategy{Batch: Amount{Count: 4}}, pool(3), false)
	require.NoError(t, err)
	seen := pool(3)
	seen[0].OnTarget = true

	d := Next(l, State{}, Observation{})
	require.Equal(t, []string{"gpu-1"}, d.Hosts)
	lost := d.State.After(d, nil)
	require.Equal(t, []string{"gpu-1"}, Next(l, lost, Observation{Hosts: seen}).Hosts)

	failed := d.State.After(d, []Result{{Host: "gpu-1", Status: Failed, Why: "verdict unfit"}})
	require.Equal(t, Park, Next(l, failed, Observation{Hosts: seen}).Kind)
	again := Next(l, failed.Retry(l), Observation{Hosts: seen})
	require.Equal(t, Replace, again.Kind)
	require.Equal(t, []string{"gpu-1"}, again.Hosts)
}

func TestRemainingCountsWavesSoaksAndIntervals(t *testing.T) {
	l, err := Build(Strategy{Batch: Amount{Count: 4}, MaxUnavailable: Amount{Count: 2}, SoakCanary: minutes(10),
		SoakBatch: minutes(1), Interval: minutes(5)}, pool(9), false)
	require.NoError(t, err)
	// Canary 1 wave, two batches of 2 waves; soak 10 m, then 5 m, then only the last soak.
	require.Equal(t, 5*time.Minute+16*time.Minute, Remaining(l, State{}, time.Minute))
	later := State{Batch: 1, Hosts: map[string]HostState{"gpu-1": {Status: Proven}}}
	require.Equal(t, 4*time.Minute+6*time.Minute, Remaining(l, later, time.Minute))
}
