package realgpu

import (
	"context"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/refit-run/refit/activities/gpu"
	"github.com/refit-run/refit/gpuagent/agent"
	"github.com/refit-run/refit/gpuagent/check"
	"github.com/refit-run/refit/gpuagent/fakes"
	"github.com/refit-run/refit/gpuagent/host"
	"github.com/refit-run/refit/gpuagent/host/hosttest"
	"github.com/refit-run/refit/gpuagent/nvml"
)

// cards are fake GPUs, as found.
func cards(t *testing.T, state ...string) (*fakes.Host, *hosttest.Tree) {
	t.Helper()
	h := fakes.NewHost(t)
	require.NoError(t, h.Set(append([]string{"gpus", "1", "model", "h200"}, state...)...))
	tree, err := hosttest.Create(t.TempDir(), fakes.DefaultDriver, 1)
	require.NoError(t, err)
	t.Setenv(host.RootVariable, tree.Root)
	return h, tree
}

func found(t *testing.T) *study {
	t.Helper()
	s, err := examine(t.Context())
	require.NoError(t, err)
	return s
}

func TestThePageHoldsEveryRowFigureAndPlan(t *testing.T) {
	h, tree := cards(t)
	before, err := os.ReadFile(h.StateFile())
	require.NoError(t, err)
	require.NoError(t, tree.ServiceVersion("nvidia-fabricmanager", "nv-fabricmanager", fakes.DefaultDriver))
	s := found(t)
	require.Empty(t, s.problems())
	fake, err := fakes.Is(s.probes[0].Library)
	require.NoError(t, err)
	require.True(t, fake, "what is found here is never written as a real card's page")
	page := s.page()
	require.Contains(t, page, "# The node agent on NVIDIA H200")
	require.Contains(t, page, "| "+s.when.Format(time.DateOnly)+" | 1 | "+fakes.DefaultDriver+" | 13.0 | 9.0 | ")
	require.Regexp(t, regexp.MustCompile(`\| quick check of one GPU \| \d+\.\d\d s \| <= 3 s \|`), page)
	require.Regexp(t, regexp.MustCompile(`\| device to device, GPU 0 \| \d+\.\d\d GB/s \|`), page)
	require.Contains(t, page, "quick: pass | standard: pass")
	for _, l := range []gpu.Level{gpu.Quick, gpu.Standard} {
		rows, gpuRows := check.Rows(l)
		for _, name := range append(rows, gpuRows...) {
			require.Contains(t, page, "\n| "+name+" | ")
		}
	}
	require.Contains(t, page, "| systemd, nvidia-fabricmanager | active "+fakes.DefaultDriver+" |")
	require.Contains(t, page, "switch MIG mode on")
	require.Contains(t, page, "mig plan, the layout as found (exit code 0)")
	require.Contains(t, page, "vgpu plan, no virtual GPUs (exit code 0)")
	require.Contains(t, page, "| GPU 0 | compute mode | 0 | 0 |")
	require.Contains(t, page, "proven on the fakes alone")
	require.NotContains(t, page, h.UUID(0), "what names one card in the world is not shown")
	require.NotContains(t, page, s.snapshot.Devices[0].Serial.Value)
	require.NotContains(t, page, "skipped: not visible")
	var lines strings.Builder
	s.bench(&lines)
	require.Regexp(t, regexp.MustCompile(`^bench: quick check of one GPU \d+\.\d\d s \(goal <= 3\) (ok|miss)\n$`), lines.String())
	after, err := os.ReadFile(h.StateFile())
	require.NoError(t, err)
	require.Equal(t, string(before), string(after))
}

func TestWhatTheHostHidesIsSkippedAndNoFault(t *testing.T) {
	_, tree := cards(t)
	for _, path := range []string{"sys", "dev/kmsg", "proc/driver/nvidia/version"} {
		require.NoError(t, tree.Remove(path))
	}
	s := found(t)
	require.Empty(t, s.problems())
	page := s.page()
	require.Contains(t, page, "| kernel log | skipped: not visible: kernel log: ")
	require.Contains(t, page, "| sysfs, PCI bus | skipped: not visible |")
	require.Contains(t, page, "| systemd, nvidia-imex | skipped: not visible |")
	require.Contains(t, page, "skipped: not visible: /sys/module/nvidia/version")
	require.Contains(t, page, "quick: unproven", "the page hides nothing")
}

func TestInstancesAsFoundNeedNothing(t *testing.T) {
	cards(t, "model", "h100", "gpu.0.mig.current", "1", "gpu.0.mig.pending", "1",
		"gpu.0.gi.1", "9:4:4", "gpu.0.ci.1.0", "2:0:3", "gpu.0.gi.2", "19:0:1", "gpu.0.ci.2.0", "0:0:1")
	s := found(t)
	require.Empty(t, s.problems())
	require.Len(t, s.probes, 2)
	require.Contains(t, s.page(), "MIG device 0.1")
	require.Contains(t, s.page(), "3g.40gb (id 1) at 4 with compute instances [3g.40gb]")
}

// newer reads a GPU with an instance of a profile that the agent does not know.
type newer struct{ agent.Setters }

func (n newer) ReadMIG(ctx context.Context) (nvml.MIGHost, error) {
	h, err := n.Setters.ReadMIG(ctx)
	h.GPUs[0].Current, h.GPUs[0].Pending = true, true
	h.GPUs[0].Instances = []nvml.MIGInstance{{ID: 3, ProfileID: 99, Compute: []nvml.MIGComputeInstance{{Slices: 1}}}}
	return h, err
}

func TestAnInstanceOfAnUnknownProfileIsAProblemAndTheOtherPlansAreMade(t *testing.T) {
	h, tree := cards(t, "model", "h100")
	s := &study{}
	require.NoError(t, s.plan(t.Context(), newer{agent.Refusing(agent.NewSetters(tree.Root))}))
	require.Len(t, s.plans, 4)
	require.Len(t, s.problems(), 1)
	require.Contains(t, s.problems()[0], "the layout as found ended with 1: GPU "+h.UUID(0)+": GPU instance 3 has profile 99, which is none that this GPU offers: 19 (1g.10gb)")
}

func TestTheTimeOfSeveralGPUsIsNamedAsThatAndNotDivided(t *testing.T) {
	cards(t, "gpus", "2")
	s := found(t)
	at := slices.IndexFunc(s.figures, func(f figure) bool { return f.goal == quickGoal })
	require.Equal(t, "quick check of one GPU, at most: of 2 at the same time", s.figures[at].name)
	whole := slices.IndexFunc(s.figures, func(f figure) bool { return f.name == "quick check of the host" })
	require.Equal(t, s.figures[whole].value, s.figures[at].value)
}

func TestAFaultOfTheCardIsAProblemAndStillOnThePage(t *testing.T) {
	cards(t, "gpu.0.ecc.volatile.uncorrected", "3", "gpu.0.cuda.bad.word", "7")
	s := found(t)
	problems := strings.Join(s.problems(), "\n")
	require.Contains(t, problems, "level quick: ECC volatile")
	require.Contains(t, problems, "CUDA probe of")
	require.Contains(t, s.page(), "- level quick: ECC volatile of GPU 0: expected")
	require.Contains(t, s.page(), "**fatal**: expected 0 uncorrected errors since the driver was loaded, found 3")
}

func TestAHostWithoutADriverIsToldAsThat(t *testing.T) {
	h, _ := cards(t)
	require.NoError(t, h.RemoveLibraries())
	_, err := examine(t.Context())
	require.ErrorContains(t, err, "LIBRARY_NOT_FOUND")
}

func TestAChangedSettingIsNoticed(t *testing.T) {
	for name, state := range map[string][]string{
		migMode: {"gpu.0.mig.pending", "1"}, powerLimit: {"gpu.0.power.limit", "400000"}, persistence: {"gpu.0.persistence", "0"}, computeMode: {"gpu.0.compute.mode", "3"},
		instances: {"gpu.0.gi.1", "", "gpu.0.ci.1.0", ""},
	} {
		t.Run(name, func(t *testing.T) {
			on := []string{}
			if name == instances {
				on = []string{"model", "h100", "gpu.0.mig.current", "1", "gpu.0.mig.pending", "1", "gpu.0.gi.1", "9:4:4", "gpu.0.ci.1.0", "2:0:3"}
			}
			h, _ := cards(t, on...)
			settings := func() settings {
				s, err := nvml.Take(t.Context(), readLimit)
				require.NoError(t, err)
				return settingsOf(s)
			}
			before := settings()
			require.Empty(t, before.changes(settings()))
			require.NoError(t, h.Set(state...))
			changed := before.changes(settings())
			require.Len(t, changed, 1)
			require.Contains(t, changed[0], name)
			s := study{before: before, after: settings()}
			require.Contains(t, s.problems()[0], "a setting changed")
		})
	}
	require.Equal(t, []string{"GPU a: gone", "GPU b: new"}, settings{"a": {}}.changes(settings{"b": {}}))
}
