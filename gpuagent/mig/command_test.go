package mig

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/refit-run/refit/gpuagent/nvml"
	"github.com/refit-run/refit/gpuagent/setup"
)

// person is somebody at the host: a layout file, and the command's answer.
type person struct {
	t          *testing.T
	file, root string
	host       Host
	reset      func(context.Context, ...string) error
}

func newPerson(t *testing.T, entry string) person {
	p := person{t: t, file: filepath.Join(t.TempDir(), "layout.yaml"), root: t.TempDir(), host: nvml.Setters{}, reset: Reset}
	require.NoError(t, os.WriteFile(p.file, []byte("version: v1\nmig-configs:\n  a:\n    - "+entry+"\n"), 0o600))
	return p
}

// types runs the command: what it printed, what it said of its steps, the error
// that the process ends with, the exit code.
func (p person) types(words ...string) (out, steps, end string, code int) {
	c := Command(p.host, p.reset)
	var o, e bytes.Buffer
	c.SetOut(&o)
	c.SetErr(&e)
	c.SetArgs(append(words, "-f", p.file, "--root", p.root))
	err := c.ExecuteContext(p.t.Context())
	var exit *setup.Exit
	if errors.As(err, &exit) {
		if code = exit.ExitCode(); !exit.Silent() {
			end = exit.Error()
		}
	} else {
		require.NoError(p.t, err)
	}
	return o.String(), e.String(), end, code
}

const mixedEntry = "{devices: all, mig-enabled: true, mig-devices: {3g.40gb: 1, 2g.20gb: 1, 1g.10gb: 2}}"

// lines puts before in front of each line of text.
func lines(before, text string) string {
	return before + strings.ReplaceAll(strings.TrimSpace(text), "\n", "\n"+before) + "\n"
}

func TestAPersonReadsThePlanThenWhatWasDone(t *testing.T) {
	h := host(t, true, "gpu.0.gi.1", "5:0:4", "gpu.0.ci.1.0", "3:0:4", "gpu.0.gi.2", "9:4:4")
	p := newPerson(t, mixedEntry)
	gpu := h.UUID(0)

	out, said, end, code := p.types("plan")
	require.Equal(t, lines("would  "+gpu+"  ", `
create the missing compute instance 3g.40gb in GPU instance 2 (3g.40gb at 4)
remove compute instance 0 of GPU instance 1 (4g.40gb at 0)
remove GPU instance 1 (4g.40gb at 0)
create GPU instance 1g.10gb at 2
create compute instance 1g.10gb in it
create GPU instance 1g.10gb at 3
create compute instance 1g.10gb in it
create GPU instance 2g.20gb at 0
create compute instance 2g.20gb in it
`)+"has    "+h.MIGUUID(0, 1, 0)+"  NVIDIA H100 80GB HBM3 MIG 4g\n", out)
	require.Empty(t, said+end)
	require.Zero(t, code)

	const steps = `
create the missing compute instance 3g.40gb in GPU instance 2 (3g.40gb at 4)
remove compute instance 0 of GPU instance 1 (4g.40gb at 0)
remove GPU instance 1 (4g.40gb at 0)
create GPU instance 1g.10gb at 2
create the missing compute instance 1g.10gb in GPU instance 1 (1g.10gb at 2)
create GPU instance 1g.10gb at 3
create the missing compute instance 1g.10gb in GPU instance 3 (1g.10gb at 3)
create GPU instance 2g.20gb at 0
create the missing compute instance 2g.20gb in GPU instance 4 (2g.20gb at 0)
`
	var has strings.Builder
	for _, d := range []struct {
		instance int
		name     string
	}{{1, "1g"}, {2, "3g"}, {3, "1g"}, {4, "2g"}} {
		has.WriteString("has    " + h.MIGUUID(0, d.instance, 0) + "  NVIDIA H100 80GB HBM3 MIG " + d.name + "\n")
	}
	out, said, end, code = p.types("apply")
	require.Equal(t, lines("did    "+gpu+"  ", steps)+has.String(), out)
	require.Equal(t, lines(gpu+": ", steps), said, "each step is told before it is taken")
	require.Empty(t, end)
	require.Zero(t, code)

	out, said, _, code = p.types("apply")
	require.Equal(t, "nothing to do\n"+has.String(), out)
	require.Empty(t, said)
	require.Zero(t, code)
	out, _, _, code = p.types("plan", "--exit-code", "-o", "json")
	require.Zero(t, code)
	require.Contains(t, out, `"actions": []`)
}

func TestTheExitCodeOfACommandTellsAScriptWhatItMeans(t *testing.T) {
	const whole, off = "{devices: all, mig-enabled: true, mig-devices: {7g.80gb: 1}}", "{devices: all, mig-enabled: false}"
	const client = "gpu.0.processes.compute"
	for name, c := range map[string]struct {
		entry string
		state []string
		words []string
		code  int
		says  string
	}{
		"something to do":         {whole, nil, []string{"plan", "--exit-code"}, setup.ExitChanges, ""},
		"nothing to do":           {off, nil, []string{"plan", "--exit-code"}, setup.ExitDone, "nothing to do"},
		"an unknown key":          {"{devices: all, mig-enabled: false, reset: true}", nil, []string{"plan"}, setup.ExitBad, `unknown field "reset"`},
		"an impossible layout":    {"{devices: all, mig-enabled: true, mig-devices: {7g.80gb: 2}}", nil, []string{"apply"}, setup.ExitBad, "not even on an empty GPU"},
		"a GPU that is not there": {"{devices: [1], mig-enabled: false}", nil, []string{"plan"}, setup.ExitBad, "the host has fewer GPUs"},
		"no such layout":          {whole, nil, []string{"plan", "--label", "b"}, setup.ExitBad, `label "b"`},
		"no such format":          {whole, nil, []string{"plan", "-o", "xml"}, setup.ExitBad, "table or json, found xml"},
		"busy, planned":           {whole, []string{client, "4711:100"}, []string{"plan", "--exit-code"}, setup.ExitWaiting, "found 1 client; drain the GPU"},
		"busy":                    {whole, []string{client, "4711:100"}, []string{"apply"}, setup.ExitWaiting, "found 1 client; drain the GPU"},
		"a reset is needed":       {whole, []string{"gpu.0.mig.needs.reset", "1"}, []string{"apply"}, setup.ExitWaiting, "reset: the MIG mode is pending"},
		"a driver that fails":     {whole, []string{"gpu.0.fail.nvmlDeviceSetMigMode", "999"}, []string{"apply"}, setup.ExitError, "UNKNOWN"},
		"no driver":               {whole, []string{"module.driver", "none"}, []string{"plan"}, setup.ExitError, "load the NVIDIA kernel module"},
		"not root":                {whole, []string{"not.root", "1"}, []string{"apply"}, setup.ExitError, "run as root"},
	} {
		t.Run(name, func(t *testing.T) {
			host(t, false, c.state...)
			out, _, end, code := newPerson(t, c.entry).types(c.words...)
			require.Equal(t, c.code, code, out+end)
			require.Contains(t, out+end, c.says)
		})
	}
	t.Run("a driver that fails in the middle", func(t *testing.T) {
		h := host(t, true, "gpu.0.fail.nvmlGpuInstanceCreateComputeInstance", "999")
		out, _, end, code := newPerson(t, whole).types("apply")
		require.Equal(t, setup.ExitError, code)
		require.Equal(t, "did    "+h.UUID(0)+"  create GPU instance 7g.80gb at 0\n", out, "what was done is told all the same")
		require.Contains(t, end, "create the missing compute instance 7g.80gb in GPU instance 1")
	})
	t.Run("another is at work", func(t *testing.T) {
		host(t, false)
		p := newPerson(t, whole)
		unlock, err := setup.Lock(t.Context(), p.root)
		require.NoError(t, err)
		defer unlock()
		_, _, end, code := p.types("apply")
		require.Equal(t, setup.ExitWaiting, code)
		require.Contains(t, end, "one is at work")
		_, _, _, code = p.types("plan")
		require.Zero(t, code, "who only looks need not wait")
	})
	t.Run("a host that is only read", func(t *testing.T) {
		host(t, false)
		p := newPerson(t, whole)
		p.host = ReadOnly{nvml.Setters{}}
		_, _, end, code := p.types("apply")
		require.Equal(t, setup.ExitRefused, code)
		require.Contains(t, end, "this run only reads")
	})
}

func TestAPersonAllowsTheResetOrTheModeAlone(t *testing.T) {
	h := host(t, false, "gpu.0.mig.needs.reset", "1")
	p := newPerson(t, mixedEntry)
	var reset []string
	p.reset = func(_ context.Context, pci ...string) error {
		reset = append(reset, pci...)
		return h.ResetGPU(0)
	}
	out, _, _, code := p.types("apply", "--mode-only")
	require.Equal(t, setup.ExitWaiting, code)
	require.Empty(t, reset)
	require.Contains(t, out, "needs  "+h.UUID(0)+"  reset: ")

	out, _, _, code = p.types("apply", "--mode-only", "--allow-reset")
	require.Zero(t, code, out)
	require.Len(t, reset, 1)
	require.Contains(t, out, "did    "+h.UUID(0)+"  reset the GPU\n")
	require.Contains(t, out, "note   GPU "+h.UUID(0)+": mode only, ")
	require.NotContains(t, out, "has ")
}
