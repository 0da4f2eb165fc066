// Package realgpu runs the node agent on the GPUs of this machine as they are
// found, and only reads: every row of levels quick and standard, the CUDA
// probe, `mig plan` and `vgpu plan`. It writes what it found as a page. It must
// never change a GPU: every change is refused, and the settings are compared
// before and after. The same code runs on the fakes in every test run, so that
// it works when a GPU is at hand.
package realgpu

import (
	"context"
	"flag"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/refit-run/refit/gpuagent/child"
	"github.com/refit-run/refit/gpuagent/fakes"
)

// enable is the variable that a real GPU is asked for with.
const enable = "REFIT_TEST_GPU"

var pageFile = flag.String("page", "", "file that the page is written to; empty logs it")

// limit is generous: the standard check alone may take minutes on a host of
// eight large GPUs.
const limit = 30 * time.Minute

func TestMain(m *testing.M) {
	if child.Main() {
		return
	}
	flag.Parse()
	os.Exit(m.Run())
}

func TestTheGPUsAsFound(t *testing.T) {
	if os.Getenv(enable) == "" {
		t.Skip("optional: needs an NVIDIA GPU with its driver: run `make test-gpu`, which sets " + enable)
	}
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	s, err := examine(ctx)
	require.NoError(t, err, "examine the GPUs of this host: is the driver installed and loaded (nvidia-smi)?")
	for _, r := range s.probes {
		if r.Library != "" {
			fake, err := fakes.Is(r.Library)
			require.NoError(t, err)
			require.False(t, fake, "%s is a fake library: take it out of LD_LIBRARY_PATH, this page is about real GPUs", r.Library)
		}
	}
	text := s.page()
	if *pageFile == "" {
		t.Log("\n" + text)
	} else {
		require.NoError(t, os.WriteFile(*pageFile, []byte(text), 0o644))
	}
	s.bench(os.Stdout)
	// The page is written first: it is what tells a fault of the card from a
	// row that reads a real driver wrongly.
	for _, problem := range s.problems() {
		t.Error(problem)
	}
}
