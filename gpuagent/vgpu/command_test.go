package vgpu

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/refit-run/refit/gpuagent/nvml"
	"github.com/refit-run/refit/gpuagent/setup"
)

// types runs the command as a person at the host does, with one entry of a
// layout: what it printed, what it said of its steps, the error that the process
// ends with, the exit code.
func (k *kernel) types(t *testing.T, w Writer, layout string, words ...string) (out, steps, end string, code int) {
	t.Helper()
	file := filepath.Join(t.TempDir(), "layout.yaml")
	require.NoError(t, os.WriteFile(file, []byte("version: v1\nvgpu-configs:\n  a:\n    - "+layout+"\n"), 0o600))
	t.Setenv("NODE_NAME", "gpu-1")
	c := Command(nvml.Setters{}, func(root string) Writer {
		require.Equal(t, k.root, root)
		return w
	})
	var o, e bytes.Buffer
	c.SetOut(&o)
	c.SetErr(&e)
	c.SetArgs(append(words, "-f", file, "--root", k.root))
	err := c.ExecuteContext(t.Context())
	var exit *setup.Exit
	if errors.As(err, &exit) {
		if code = exit.ExitCode(); !exit.Silent() {
			end = exit.Error()
		}
	} else {
		require.NoError(t, err)
	}
	return o.String(), e.String(), end, code
}

// lines puts before in front of each line of text.
func lines(before, text string) string {
	return before + strings.ReplaceAll(strings.TrimSpace(text), "\n", "\n"+before) + "\n"
}

func TestAPersonReadsThePlanThenWhatWasDone(t *testing.T) {
	const two = "{devices: all, vgpu-devices: {H100-40C: 2}}"
	modes := []string{"--scheduler", "fixed-share", "--heterogeneous"}
	t.Run("vendor VFIO", func(t *testing.T) {
		k, _ := newKernel(t, Vendor, 4)
		out, said, end, code := k.types(t, k, two, append([]string{"plan", "--exit-code"}, modes...)...)
		require.Equal(t, lines("would  "+k.pci+"  ", `
switch heterogeneous vGPUs on
set the scheduler to fixed-share (is best-effort)
switch its 4 virtual functions on
create 2 x H100-40C on them
`), out)
		require.Empty(t, said+end)
		require.Equal(t, setup.ExitChanges, code)
		require.Empty(t, k.writes)

		steps := `
switch heterogeneous vGPUs on
set the scheduler to fixed-share (is best-effort)
switch its 4 virtual functions on
create H100-40C on ` + k.vf(0) + `
create H100-40C on ` + k.vf(1)
		has := "has    " + k.vf(0) + "  H100-40C\nhas    " + k.vf(1) + "  H100-40C\n"
		out, said, end, code = k.types(t, k, two, append([]string{"apply"}, modes...)...)
		require.Equal(t, lines("did    "+k.pci+"  ", steps)+has, out)
		require.Equal(t, lines(k.pci+": ", steps), said, "each step is told before it is taken")
		require.Empty(t, end)
		require.Zero(t, code)

		out, _, _, code = k.types(t, ReadOnly{}, two, append([]string{"apply"}, modes...)...)
		require.Equal(t, "nothing to do\n"+has, out)
		require.Zero(t, code, "a host that refuses every write is asked for none")

		out, _, _, code = k.types(t, k, "{devices: all, vgpu-devices: {}}", "apply", "--protect", k.vf(1))
		require.Equal(t, "did    "+k.pci+"  release H100-40C on "+k.vf(0)+"\n"+
			"has    "+k.vf(1)+"  H100-40C\nnote   H100-40C on "+k.vf(1)+" is surplus and protected: it stays\n", out)
		require.Zero(t, code)
	})
	t.Run("mdev", func(t *testing.T) {
		k, _ := newKernel(t, MDev, 4)
		require.NoError(t, k.EnableVFs(t.Context(), k.pci))
		id := func(n int) string { return ID("gpu-1", k.pci, "H100-40C", n) }
		steps := "create H100-40C " + id(0) + " on " + k.vf(0) + "\ncreate H100-40C " + id(1) + " on " + k.vf(1)
		out, _, _, _ := k.types(t, k, two, "plan")
		require.Equal(t, lines("would  "+k.pci+"  ", steps), out)
		out, _, _, code := k.types(t, k, two, "apply")
		require.Equal(t, lines("did    "+k.pci+"  ", steps)+"has    "+id(0)+"  H100-40C\nhas    "+id(1)+"  H100-40C\n", out)
		require.Zero(t, code)
		out, _, _, _ = k.types(t, k, "{devices: all, vgpu-devices: {H100-20C: 1}}", "plan")
		require.Contains(t, out, "would  "+k.pci+"  release H100-40C "+id(1)+" on "+k.vf(1)+"\n")
		require.Contains(t, out, "would  "+k.pci+"  create H100-20C where there is room then\n")
	})
}

func TestTheExitCodeOfACommandTellsAScriptWhatItMeans(t *testing.T) {
	const one, none = "{devices: all, vgpu-devices: {H100-40C: 1}}", "{devices: all, vgpu-devices: {}}"
	for name, c := range map[string]struct {
		layout string
		state  []string
		words  []string
		code   int
		says   string
	}{
		"nothing to do":           {none, nil, []string{"plan", "--exit-code"}, setup.ExitDone, "nothing to do"},
		"an unknown key":          {"{devices: all, vgpu-devices: {}, mig-enabled: true}", nil, []string{"plan"}, setup.ExitBad, `unknown field "mig-enabled"`},
		"a type of another board": {"{devices: all, vgpu-devices: {L40S-12Q: 1}}", nil, []string{"apply"}, setup.ExitBad, "does not offer the type"},
		"a GPU that is not there": {"{devices: [1], vgpu-devices: {}}", nil, []string{"apply"}, setup.ExitBad, "the host has fewer GPUs"},
		"no such scheduler":       {none, nil, []string{"apply", "--scheduler", "fair"}, setup.ExitBad, `"fair"`},
		"no vGPU host":            {one, []string{"vgpu.virtualization", "0"}, []string{"plan"}, setup.ExitBad, "not in host vGPU mode"},
		"in use, planned":         {one, []string{"vgpu.active", "1"}, []string{"plan", "--scheduler", "equal-share"}, setup.ExitWaiting, "stop the virtual machines"},
		"in use":                  {one, []string{"vgpu.active", "1"}, []string{"apply", "--scheduler", "equal-share"}, setup.ExitWaiting, "stop the virtual machines"},
		"no driver":               {one, []string{"module.driver", "none"}, []string{"plan"}, setup.ExitError, "load the NVIDIA kernel module"},
		"not root":                {none, []string{"not.root", "1"}, []string{"apply", "--scheduler", "equal-share"}, setup.ExitError, "run as root"},
	} {
		t.Run(name, func(t *testing.T) {
			k, h := newKernel(t, Vendor, 4)
			if len(c.state) > 0 {
				require.NoError(t, h.Set(c.state...))
			}
			out, _, end, code := k.types(t, k, c.layout, c.words...)
			require.Equal(t, c.code, code, out+end)
			require.Contains(t, out+end, c.says)
			require.Empty(t, k.writes)
		})
	}
	t.Run("a host that is only read", func(t *testing.T) {
		k, _ := newKernel(t, Vendor, 4)
		_, _, end, code := k.types(t, ReadOnly{}, one, "apply")
		require.Equal(t, setup.ExitRefused, code)
		require.Contains(t, end, "this run only reads")
	})
}
