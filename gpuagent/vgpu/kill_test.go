package vgpu

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/refit-run/refit/gpuagent/child"
	"github.com/refit-run/refit/gpuagent/nvml"
)

// agentChild is an agent that serves one layout in a process of its own, so
// that it can be killed at a change.
const agentChild = "test.vgpu.agent"

func init() {
	child.Register(agentChild, func(ctx context.Context, raw json.RawMessage) (any, error) {
		var o order
		if err := json.Unmarshal(raw, &o); err != nil {
			return nil, err
		}
		m := &mortal{kernel: recall(failing{}, o.Kernel), Driver: nvml.Setters{}, order: o}
		r, err := Applier{Root: m.root, Driver: m, Writer: m}.Apply(ctx, entry(o.Types), o.Options)
		return done(r), err
	})
}

// order is what an agent is to do, and at which change, counted from one, it is
// killed: right before it or right after it.
type order struct {
	Kernel        memory
	Types         map[string]int
	Options       Options
	Before, After int
}

// memory is what the kernel knows, whoever asks it.
type memory struct {
	Root, PCI, Framework string
	VFs                  int
}

// Files of the kernel's memory: what was made, and every change in its order.
const (
	madeFile    = "made.json"
	changesFile = "changes"
)

func (k *kernel) memory() memory { return memory{k.root, k.pci, k.framework, k.vfs} }

func (k *kernel) keep() {
	text, err := json.Marshal(k.made)
	require.NoError(k.t, err)
	require.NoError(k.t, os.WriteFile(k.path(madeFile), text, 0o600))
}

func recall(t require.TestingT, m memory) *kernel {
	k := &kernel{t: t, root: m.Root, pci: m.PCI, framework: m.Framework, vfs: m.VFs, open: map[string]bool{}, faults: map[string]error{}}
	text, err := os.ReadFile(k.path(madeFile))
	require.NoError(t, err)
	require.NoError(t, json.Unmarshal(text, &k.made))
	return k
}

// mortal is the kernel and the driver to an agent that dies.
type mortal struct {
	*kernel
	Driver
	order order
	count int
}

func (m *mortal) change(what string, do func() error) error {
	m.count++
	if m.count == m.order.Before {
		die()
	}
	if err := do(); err != nil {
		return err
	}
	m.keep()
	log, err := os.OpenFile(m.path(changesFile), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	require.NoError(m.t, err)
	_, err = fmt.Fprintln(log, what)
	require.NoError(m.t, err)
	require.NoError(m.t, log.Close())
	if m.count == m.order.After {
		die()
	}
	return nil
}

func die() {
	_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
	select {}
}

func (m *mortal) ActVGPU(ctx context.Context, a nvml.VGPUAct) (out nvml.VGPUGPU, err error) {
	err = m.change(a.Kind, func() error {
		out, err = m.Driver.ActVGPU(ctx, a)
		return err
	})
	return out, err
}

func (m *mortal) Write(ctx context.Context, path, value string) error {
	return m.change(path+"="+value, func() error { return m.kernel.Write(ctx, path, value) })
}

func (m *mortal) SetVF(ctx context.Context, vf, value, was string) error {
	return m.change(vf+"="+value, func() error { return m.kernel.SetVF(ctx, vf, value, was) })
}

func (m *mortal) EnableVFs(ctx context.Context, pci string) error {
	return m.change("sriov-manage", func() error { return m.kernel.EnableVFs(ctx, pci) })
}

// failing stands for the test in a process that has none.
type failing struct{}

func (failing) Errorf(format string, args ...any) { panic(fmt.Sprintf(format, args...)) }
func (failing) FailNow()                          { panic("failed") }

// serve runs an agent: what it did, or killed.
func (k *kernel) serve(t *testing.T, o order) (did []string, killed bool) {
	t.Helper()
	k.keep()
	o.Kernel = k.memory()
	err := child.Run(t.Context(), child.Spec{Name: agentChild, Request: o, Timeout: time.Minute, Reply: &did})
	var crash child.Crash
	if killed = errors.As(err, &crash); killed {
		require.Equal(t, unix.SignalName(unix.SIGKILL), crash.Signal, "%v", err)
	} else {
		require.NoError(t, err)
	}
	k.made = recall(t, k.memory()).made
	return did, killed
}

// holdings are the virtual GPUs that are there: slot, id and type.
func (k *kernel) holdings() []string {
	var out []string
	for slot, devices := range k.made {
		for id, typ := range devices {
			out = append(out, fmt.Sprintf("%s %s %d", slot, strings.TrimPrefix(id, slot), typ))
		}
	}
	slices.Sort(out)
	return out
}

func (k *kernel) changes(t *testing.T) int {
	text, err := os.ReadFile(k.path(changesFile))
	require.NoError(t, err)
	return strings.Count(string(text), "\n")
}

func TestAnAgentKilledRightBeforeOrAfterAnyChangeIsFinishedByTheNext(t *testing.T) {
	modes := Options{Node: "gpu-1", Scheduler: "fixed-share", Heterogeneous: ptr(true)}
	for name, c := range map[string]struct {
		framework string
		vfs       int
		from, to  map[string]int
		// changes: modes 2, virtual functions 1, then one for each virtual GPU.
		changes int
	}{
		"vendor VFIO, from nothing":     {Vendor, 4, nil, map[string]int{"H100-20C": 3}, 6},
		"vendor VFIO, another layout":   {Vendor, 4, map[string]int{"H100-40C": 2}, map[string]int{"H100-20C": 4}, 6},
		"vendor VFIO, fewer":            {Vendor, 4, map[string]int{"H100-20C": 4}, map[string]int{"H100-20C": 1}, 3},
		"mdev, from nothing":            {MDev, 4, nil, map[string]int{"H100-20C": 3}, 6},
		"mdev, another layout":          {MDev, 4, map[string]int{"H100-40C": 2}, map[string]int{"H100-20C": 4}, 6},
		"mdev, fewer":                   {MDev, 4, map[string]int{"H100-20C": 4}, map[string]int{"H100-20C": 1}, 3},
		"mdev on the physical function": {MDev, 0, nil, map[string]int{"H100-20C": 3}, 5},
	} {
		t.Run(name, func(t *testing.T) {
			begin := func() *kernel {
				k, _ := newKernel(t, c.framework, c.vfs)
				if c.from != nil {
					apply(t, k, c.from, modes)
				}
				return k
			}
			k := begin()
			_, killed := k.serve(t, order{Types: c.to, Options: modes})
			require.False(t, killed)
			require.Equal(t, c.changes, k.changes(t))
			want := k.holdings()
			for n := 1; n <= c.changes; n++ {
				for _, o := range []order{{Before: n}, {After: n}} {
					o.Types, o.Options = c.to, modes
					k := begin()
					_, killed := k.serve(t, o)
					require.True(t, killed, "change %d", n)
					made := k.holdings()
					_, killed = k.serve(t, order{Types: c.to, Options: modes})
					require.False(t, killed)
					require.Equal(t, want, k.holdings(), "killed at change %d", n)
					require.Equal(t, c.changes, k.changes(t), "nothing is made or released twice")
					if c.from == nil {
						require.Subset(t, want, made, "what was made is not lost")
					}
					did, _ := k.serve(t, order{Types: c.to, Options: modes, Before: 1})
					require.Empty(t, did)
				}
			}
		})
	}
}
