// Package bench measures what Refit costs beside a bare loop that does the
// same rollout: time, history, API requests, memory, and the time to be back
// after a kill. It runs the binaries against one sandbox, as the end-to-end
// tests do, and prints one line per figure; a missed goal is a figure too and
// fails nothing. It must not import the product beyond the protocol's structs.
package bench

import (
	"fmt"
	"os"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	lines "github.com/refit-run/refit/tests/bench/figure"
	"github.com/refit-run/refit/workflows/protocol"
)

const (
	// pool is the only one; a tenth of it is a batch.
	pool         = "shared"
	batchPercent = 10
	// Times of the simulated hosts: compressed, so that overhead shows.
	readyAfter    = 10 * time.Second
	validateTakes = 2 * time.Second

	defaultNodes = 1000
)

// BenchmarkRollout takes one pool through the floor, an upgrade and a kill.
// REFIT_BENCH_NODES makes it smaller for a try.
func BenchmarkRollout(b *testing.B) {
	nodes := defaultNodes
	if s := os.Getenv("REFIT_BENCH_NODES"); s != "" {
		n, err := strconv.Atoi(s)
		require.NoError(b, err, "REFIT_BENCH_NODES")
		nodes = n
	}
	for b.Loop() {
		measure(b, nodes)
	}
}

func measure(b *testing.B, nodes int) {
	w := up(b, nodes)

	floor := w.floor()
	logf(b, "the floor took %s", floor.Round(time.Millisecond))

	run := w.start("2.17.0")
	r := w.receipt(run)
	require.Equal(b, protocol.OutcomeDone, r.Outcome)
	memory := w.peakMemory()
	h := w.history(run)
	requests := w.requests(h.began, h.ended)
	back := w.backToWork("2.16.3") // not newer than the controller

	wall := h.ended.Sub(h.began)
	batches := float64((nodes + w.batch() - 1) / w.batch())
	logf(b, "the rollout took %s over %d histories with %d events; requests: %s",
		wall.Round(time.Millisecond), h.count, h.events, requests)
	for _, f := range []figure{
		{"floor", floor.Seconds(), "s", "", 0},
		{"rollout", wall.Seconds(), "s", "", 0},
		{"overhead", 100 * (wall.Seconds()/floor.Seconds() - 1), "%", "<", 20},
		{fmt.Sprintf("overhead-per-batch-of-%d", w.batch()), (wall - floor).Seconds() / batches, "s", "<=", 2.5},
		{"rollout-look", h.parts.look.Seconds(), "s", "", 0},
		{"rollout-baseline", h.parts.baseline.Seconds(), "s", "", 0},
		{"rollout-replace", h.parts.replace.Seconds(), "s", "", 0},
		{"rollout-validate", h.parts.validate.Seconds(), "s", "", 0},
		{"rollout-rest", h.parts.rest().Seconds(), "s", "", 0},
		{"floor-replace", floor.Seconds() - (batches+1)*validateTakes.Seconds(), "s", "", 0},
		{"history-events-per-host", float64(h.events) / float64(nodes), "events", "<=", 15},
		{"longest-history", float64(h.longest), "events", "<=", 4096},
		{"api-requests-per-host", float64(requests.total()) / float64(nodes), "requests", "<=", 12},
		{"worker-peak-memory", float64(memory) / (1 << 20), "MiB", "", 0},
		{"back-after-kill", back.Seconds(), "s", "<=", 15},
	} {
		fmt.Println(f)
	}
}

// figure is one measured value with its goal, if it has one.
type figure struct {
	name  string
	value float64
	unit  string
	op    string // "<", "<=", or empty without a goal
	goal  float64
}

func (f figure) String() string { return lines.Line(f.name, f.value, f.unit, f.op, f.goal) }

// logf tells at once how far it is: a run takes minutes.
func logf(b *testing.B, format string, args ...any) {
	b.Helper()
	fmt.Fprintf(os.Stderr, "%s  %s\n", time.Now().Format(time.TimeOnly), fmt.Sprintf(format, args...))
}
