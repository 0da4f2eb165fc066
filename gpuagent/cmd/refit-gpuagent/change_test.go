package main

import (
	"fmt"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/refit-run/refit/activities/gpu"
)

// killedAt ends the agent of the next request, and its child, right before or
// right after the k-th call of NVML from now on that changes something.
func (s scene) killedAt(t *testing.T, moment string, k int) {
	t.Helper()
	require.NoError(t, s.gpus.Set("fail."+moment+".change", fmt.Sprintf("1@%d", k)))
}

// completes runs an agent; false when it was killed.
func (s scene) completes(t *testing.T) bool {
	t.Helper()
	p := startPreparer(t, s.req)
	for p.reach(0) {
	}
	state := p.cmd.Wait()
	if state != nil {
		require.EqualError(t, state, "signal: killed")
	}
	return state == nil
}

// made are the instances that are there and wanted: none of them may go again.
func (s scene) made() []string {
	return regexp.MustCompile(`(?m)^gpu\.0\.(?:gi\.(?:\d+)=(?:9|14|19):|ci\.[2-9]\.).*$`).FindAllString(s.state(), -1)
}

// migBackedScene is the host of vgpuScene whose types live in MIG instances that
// are not there yet.
func migBackedScene(t *testing.T) scene {
	s := vgpuScene(t)
	for k := range 4 {
		require.NoError(t, s.tree.Write(onBus+virtual(k)+"/nvidia/creatable_vgpu_types", "ID    : vGPU Name\n1103   : NVIDIA H100-3-40C\n"))
	}
	s.req.MIG = &gpu.MIGRequest{Config: "version: v1\nmig-configs: {a: [{devices: all, mig-enabled: true, mig-devices: {3g.40gb: 2}}]}\n"}
	s.req.VGPU = &gpu.VGPURequest{Config: "version: v1\nvgpu-configs: {a: [{devices: all, vgpu-devices: {H100-3-40C: 2}}]}\n"}
	s.proof = func(t *testing.T) {
		for k, want := range []string{"1103", "1103", "0", "0"} {
			require.Equal(t, want, strings.TrimSpace(read(t, filepath.Join(s.tree.Root, typeOf(k)))))
		}
		require.Len(t, instance.FindAllString(s.state(), -1), 2)
	}
	return s
}

func TestTypesThatLiveInMIGInstancesAreMadeOnceThoseAreThere(t *testing.T) {
	s := migBackedScene(t)
	var systems []string
	for _, a := range prepared(t, s.req).Actions {
		systems = append(systems, a.System)
	}
	require.Equal(t, []string{"mig", "mig", "mig", "mig", "mig", "vgpu", "vgpu"}, systems)
	s.proof(t)
}

func TestNoTypeIsMadeOnAGPUThatWaitsForItsReset(t *testing.T) {
	s := migBackedScene(t)
	require.NoError(t, s.gpus.Set("gpu.0.mig.needs.reset", "1"))
	r := prepared(t, s.req)
	require.Len(t, r.Actions, 1)
	require.Len(t, r.Needs, 1)
	require.Equal(t, gpu.NeedsReset, r.Needs[0].Kind)
	require.NoError(t, s.gpus.ResetGPU(0))
	s.finish(t)
}

// changing are the scenes with how many calls of NVML change something in each.
// The other layout of MIG loses GPU instance 1 with its compute instance.
var changing = map[string]int{"MIG from nothing": 9, "MIG from another layout": 9, "vGPU": 2, "vGPU in MIG": 5}

func TestAnAgentKilledRightBeforeOrAfterAnyChangeIsFinishedByTheNext(t *testing.T) {
	for name, changes := range changing {
		for _, moment := range []string{"before", "after"} {
			t.Run(moment+", "+name, func(t *testing.T) {
				for k := 1; ; k++ {
					s := scenes[name](t)
					s.killedAt(t, moment, k)
					if s.completes(t) {
						require.Equal(t, changes, k-1, "calls that the agent could be killed at")
						return
					}
					before := s.made()
					s.finish(t)
					require.Subset(t, s.made(), before, "killed %s change %d", moment, k)
				}
			})
		}
		t.Run("after each, "+name, func(t *testing.T) {
			s := scenes[name](t)
			s.killedAt(t, "after", 1)
			for runs := 1; !s.completes(t); runs++ {
				require.LessOrEqual(t, runs, changes, "each run gets on by one change")
				s.killedAt(t, "after", 1)
			}
			s.proof(t)
		})
	}
}

func TestAnAgentKilledBesideTheResetOfAGPUIsFinishedByTheNext(t *testing.T) {
	const effect = `sed -i -e '/mig.needs.reset=/d' "$REFIT_FAKE_GPU_STATE"; echo gpu.0.mig.current=1 >>"$REFIT_FAKE_GPU_STATE"`
	for moment, script := range map[string]string{"before": "kill -9 $PPID", "after": effect + "\nkill -9 $PPID"} {
		t.Run(moment, func(t *testing.T) {
			s := migScene(t, "gpu.0.mig.needs.reset", "1")
			tool(t, script)
			require.False(t, s.completes(t))
			tool(t, effect)
			r := prepared(t, s.req)
			require.Equal(t, moment == "before", resets(r), "a GPU is not reset twice")
			s.finish(t)
		})
	}
}

func resets(r gpu.PrepareResult) bool {
	for _, a := range r.Actions {
		if a.What == "reset the GPU" {
			return true
		}
	}
	return false
}
