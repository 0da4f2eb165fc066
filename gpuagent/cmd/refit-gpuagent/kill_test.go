package main

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/refit-run/refit/activities/gpu"
	"github.com/refit-run/refit/gpuagent/agent"
	"github.com/refit-run/refit/gpuagent/host"
)

// actAsPreparer makes the test binary an agent that serves one request, the
// variable's value, so that it can be killed.
const actAsPreparer = "REFIT_TEST_ACT_AS_PREPARER"

// Words of a preparer, one a line.
const (
	saysStep   = "step "
	saysResult = "result "
)

func prepareOnce(request string) int {
	var req gpu.PrepareRequest
	err := json.Unmarshal([]byte(request), &req)
	var r gpu.PrepareResult
	if err == nil {
		r, err = agent.NewPreparer(node, host.New().Root).Prepare(context.Background(), req, func(s string) { fmt.Println(saysStep + s) })
	}
	if err != nil {
		fmt.Println(err)
		return 1
	}
	text, err := json.Marshal(r)
	if err != nil {
		fmt.Println(err)
		return 1
	}
	fmt.Println(saysResult + string(text))
	return 0
}

// preparer is a running agent.
type preparer struct {
	t   *testing.T
	cmd *exec.Cmd
	out *bufio.Scanner
}

func startPreparer(t *testing.T, req gpu.PrepareRequest) *preparer {
	t.Helper()
	text, err := json.Marshal(req)
	require.NoError(t, err)
	self, err := os.Executable()
	require.NoError(t, err)
	p := &preparer{t: t, cmd: exec.Command(self)}
	p.cmd.Env = append(os.Environ(), actAsPreparer+"="+string(text))
	out, err := p.cmd.StdoutPipe()
	require.NoError(t, err)
	p.out = bufio.NewScanner(out)
	require.NoError(t, p.cmd.Start())
	t.Cleanup(p.kill)
	return p
}

// kill leaves it no moment for anything.
func (p *preparer) kill() {
	_ = p.cmd.Process.Kill()
	_ = p.cmd.Wait()
}

// reach waits until step k begins; false when the set-up has fewer.
func (p *preparer) reach(k int) bool {
	p.t.Helper()
	for p.out.Scan() {
		require.True(p.t, strings.HasPrefix(p.out.Text(), saysStep) || strings.HasPrefix(p.out.Text(), saysResult), p.out.Text())
		if !strings.HasPrefix(p.out.Text(), saysStep) {
			return false
		}
		if k--; k < 0 {
			return true
		}
	}
	return false
}

// within waits until a child of the agent is in the call that it announces.
func (p *preparer) within(stage string) {
	p.t.Helper()
	require.Eventually(p.t, func() bool {
		lists, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", p.cmd.Process.Pid))
		for _, list := range lists {
			pids, _ := os.ReadFile(list)
			for _, pid := range strings.Fields(string(pids)) {
				if strings.Contains(logOf(pid), stage) {
					return true
				}
			}
		}
		return false
	}, time.Minute, time.Millisecond)
}

// logOf is what a child has written: a file in memory.
func logOf(pid string) string {
	f, err := os.Open("/proc/" + pid + "/fd/2")
	if err != nil {
		return ""
	}
	defer f.Close()
	text, _ := io.ReadAll(f)
	return string(text)
}

// prepared runs an agent to its end.
func prepared(t *testing.T, req gpu.PrepareRequest) (r gpu.PrepareResult) {
	t.Helper()
	p := startPreparer(t, req)
	var said []string
	for p.out.Scan() {
		said = append(said, p.out.Text())
		if text, ok := strings.CutPrefix(p.out.Text(), saysResult); ok {
			require.NoError(t, json.Unmarshal([]byte(text), &r))
		}
	}
	require.NoError(t, p.cmd.Wait(), said)
	return r
}

// scene is a host before its set-up.
type scene struct {
	world
	req gpu.PrepareRequest
	// state is what the set-up has changed so far, proof that it is as declared.
	state func() string
	proof func(*testing.T)
}

func read(t *testing.T, path string) string {
	t.Helper()
	text, err := os.ReadFile(path)
	require.NoError(t, err)
	return string(text)
}

var instance = regexp.MustCompile(`(?m)^gpu\.0\.gi\.(\d+)=(\d+):`)

// migScene is a GPU that is to become 3g + 2g + 2 x 1g.
func migScene(t *testing.T, state ...string) scene {
	s := scene{world: newWorld(t)}
	require.NoError(t, s.gpus.Set(append([]string{"model", "h100"}, state...)...))
	s.req = gpu.PrepareRequest{Node: node, MIG: &gpu.MIGRequest{AllowReset: true, Config: "version: v1\n" +
		"mig-configs: {a: [{devices: all, mig-enabled: true, mig-devices: {3g.40gb: 1, 2g.20gb: 1, 1g.10gb: 2}}]}\n"}}
	s.state = func() string { return read(t, s.gpus.StateFile()) }
	s.proof = func(t *testing.T) {
		var profiles []string
		for _, gi := range instance.FindAllStringSubmatch(s.state(), -1) {
			profiles = append(profiles, gi[2])
			require.Len(t, regexp.MustCompile(`(?m)^gpu\.0\.ci\.`+gi[1]+`\.`).FindAllString(s.state(), -1), 1, "compute instances of %s", gi[0])
		}
		slices.Sort(profiles)
		require.Equal(t, []string{"14", "19", "19", "9"}, profiles)
	}
	return s
}

const (
	physical = "0000:10:00.0"
	onBus    = "sys/bus/pci/devices/"
)

func virtual(k int) string { return fmt.Sprintf("0000:10:00.%d", k+1) }

func typeOf(k int) string { return onBus + virtual(k) + "/nvidia/current_vgpu_type" }

// vgpuScene is a host of four virtual functions, of which two are to become
// H100-20C (number 1002) under other modes. A plain file keeps what is written
// to it, as this one of the kernel's does.
func vgpuScene(t *testing.T) scene {
	yes := true
	s := scene{world: newWorld(t)}
	require.NoError(t, s.gpus.Set("model", "h100", "vgpu.virtualization", "3"))
	write := func(name, text string) { require.NoError(t, s.tree.Write(name, text)) }
	require.NoError(t, s.tree.Service("nvidia-vgpu-mgr", true))
	write(onBus+physical+"/sriov_totalvfs", "4\n")
	write(onBus+physical+"/sriov_numvfs", "4\n")
	for k := range 4 {
		write(typeOf(k), "0\n")
		write(onBus+virtual(k)+"/nvidia/creatable_vgpu_types", "ID    : vGPU Name\n1002   : NVIDIA H100-20C\n")
		require.NoError(t, os.Symlink("../"+virtual(k), filepath.Join(s.tree.Root, onBus+physical, "virtfn"+strconv.Itoa(k))))
	}
	s.req = gpu.PrepareRequest{Node: node, VGPU: &gpu.VGPURequest{Scheduler: "fixed-share", Heterogeneous: &yes,
		Config: "version: v1\nvgpu-configs: {a: [{devices: all, vgpu-devices: {H100-20C: 2}}]}\n"}}
	types := func() (out []string) {
		for k := range 4 {
			out = append(out, strings.TrimSpace(read(t, filepath.Join(s.tree.Root, typeOf(k)))))
		}
		return out
	}
	s.state = func() string { return read(t, s.gpus.StateFile()) + strings.Join(types(), " ") }
	s.proof = func(t *testing.T) {
		require.Equal(t, []string{"1002", "1002", "0", "0"}, types())
		policy, err := s.gpus.Get("gpu.0.vgpu.scheduler.policy")
		require.NoError(t, err)
		require.Equal(t, "3", policy)
		heterogeneous, err := s.gpus.Get("gpu.0.vgpu.heterogeneous")
		require.NoError(t, err)
		require.Equal(t, "1", heterogeneous)
	}
	return s
}

// finish runs the agent again at once, and once more: the first brings the host
// to what is declared, whatever the killed one left, the second does nothing.
func (s scene) finish(t *testing.T) {
	t.Helper()
	prepared(t, s.req)
	s.proof(t)
	require.Empty(t, prepared(t, s.req).Actions)
	s.proof(t)
}

// otherLayout is MIG with an instance that has to go, which takes two steps
// more, and one that has lost its compute instance.
var otherLayout = []string{"gpu.0.mig.current", "1", "gpu.0.mig.pending", "1",
	"gpu.0.gi.1", "5:0:4", "gpu.0.ci.1.0", "3:0:4", "gpu.0.gi.2", "9:4:4"}

var scenes = map[string]func(*testing.T) scene{
	"MIG from nothing":        func(t *testing.T) scene { return migScene(t) },
	"MIG from another layout": func(t *testing.T) scene { return migScene(t, otherLayout...) },
	"vGPU":                    vgpuScene,
	"vGPU in MIG":             migBackedScene,
}

// The calls of NVML are in change_test.go: this has the writes to sysfs too.
func TestAnAgentKilledAtAnyStepOfASetUpIsFinishedByTheNext(t *testing.T) {
	for _, moment := range []string{"as a step begins", "once a step has its effect"} {
		t.Run(moment, func(t *testing.T) {
			for k := 0; ; k++ {
				s := vgpuScene(t)
				p := startPreparer(t, s.req)
				if !p.reach(k) {
					require.Greater(t, k, 2, "the set-up had steps to be killed in")
					return
				}
				if moment != "as a step begins" {
					before := s.state()
					require.Eventually(t, func() bool { return s.state() != before || ended(p) }, time.Minute, 100*time.Microsecond)
				}
				p.kill()
				s.finish(t)
			}
		})
	}
}

// ended reports that the agent is done: its last step had its effect before
// anybody could look.
func ended(p *preparer) bool { return !alive(p.cmd.Process.Pid) }

func TestAnAgentKilledWithinASetterIsFinishedByTheNext(t *testing.T) {
	for _, c := range []struct {
		scene, function, stage string
	}{
		{"MIG from nothing", "nvmlDeviceSetMigMode", "stage mode on"},
		{"MIG from nothing", "nvmlDeviceCreateGpuInstanceWithPlacement", "stage createGPU on"},
		{"MIG from nothing", "nvmlGpuInstanceCreateComputeInstance", "stage createCompute on"},
		{"MIG from another layout", "nvmlComputeInstanceDestroy", "stage destroyCompute on"},
		{"MIG from another layout", "nvmlGpuInstanceDestroy", "stage destroyGPU on"},
		{"vGPU", "nvmlDeviceSetVgpuSchedulerState", "stage scheduler on"},
	} {
		t.Run(c.function, func(t *testing.T) {
			s := scenes[c.scene](t)
			require.NoError(t, s.gpus.Set("hang."+c.function, "1"))
			p := startPreparer(t, s.req)
			p.within(c.stage)
			p.kill()
			require.NoError(t, s.gpus.Set("hang."+c.function, ""))
			s.finish(t)
		})
	}
	t.Run("the write of a vGPU type", func(t *testing.T) {
		s := vgpuScene(t)
		// Who opens a file for writing waits while another has a lease on it.
		f, err := os.Open(filepath.Join(s.tree.Root, typeOf(1)))
		require.NoError(t, err)
		defer f.Close()
		_, err = unix.FcntlInt(f.Fd(), unix.F_SETLEASE, unix.F_RDLCK)
		require.NoError(t, err)
		p := startPreparer(t, s.req)
		p.within(`stage the write of "1002" to ` + typeOf(1))
		p.kill()
		_, err = unix.FcntlInt(f.Fd(), unix.F_SETLEASE, unix.F_UNLCK)
		require.NoError(t, err)
		s.finish(t)
	})
	t.Run("the reset of a GPU", func(t *testing.T) {
		s := migScene(t, "gpu.0.mig.needs.reset", "1")
		tool(t, `echo "stage reset" >&2; exec sleep 1000`)
		p := startPreparer(t, s.req)
		p.within("stage reset")
		p.kill()
		tool(t, `sed -i -e '/mig.needs.reset=/d' "$REFIT_FAKE_GPU_STATE"; echo gpu.0.mig.current=1 >>"$REFIT_FAKE_GPU_STATE"`)
		s.finish(t)
	})
}

// tool puts a script in the place of nvidia-smi.
func tool(t *testing.T, script string) {
	t.Helper()
	dir := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(dir, "nvidia-smi"), []byte("#!/bin/sh\n"+script+"\n"), 0o755))
	t.Setenv("PATH", dir+":"+os.Getenv("PATH"))
}
