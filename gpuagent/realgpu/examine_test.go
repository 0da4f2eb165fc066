package realgpu

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"sigs.k8s.io/yaml"

	"github.com/refit-run/refit/activities/gpu"
	"github.com/refit-run/refit/gpuagent/agent"
	"github.com/refit-run/refit/gpuagent/check"
	"github.com/refit-run/refit/gpuagent/cuda"
	"github.com/refit-run/refit/gpuagent/host"
	"github.com/refit-run/refit/gpuagent/mig"
	"github.com/refit-run/refit/gpuagent/nvml"
	"github.com/refit-run/refit/gpuagent/setup"
	"github.com/refit-run/refit/gpuagent/vgpu"
)

// study is everything that was seen.
type study struct {
	when     time.Time
	snapshot nvml.Snapshot
	host     host.Snapshot
	figures  []figure
	levels   []level
	probes   []cuda.Result
	plans    []plan

	before, after settings
}

// figure is one measured value. Goal 0 has none.
type figure struct {
	name  string
	value float64
	unit  string
	goal  float64
}

// level is one validation.
type level struct {
	name    gpu.Level
	checks  []gpu.Check
	verdict gpu.Verdict
}

// plan is one command with what it said.
type plan struct {
	what, text string
	code       int
	// idle: as the GPUs are found there must be nothing to do.
	idle bool
}

const node = "test-gpu"

// readLimit bounds one reading of the driver, probeLimit one probe.
const readLimit, probeLimit = time.Minute, 5 * time.Minute

// services are those that a GPU host may run; none is declared, so none is
// missed.
var services = []string{"nvidia-fabricmanager", "nvidia-imex", "nvidia-persistenced"}

func examine(ctx context.Context) (*study, error) {
	s := &study{when: time.Now().UTC(), host: host.New().Read(host.Options{Services: services})}
	var err error
	s.timed("one reading of the driver", func() { s.snapshot, err = take(ctx) })
	if err != nil {
		return nil, err
	}
	s.before = settingsOf(s.snapshot)
	a := agent.New(node)
	setters := agent.Refusing(agent.NewSetters(a.Host.Root))
	a.Preparer.Setters = setters
	if err := s.validate(ctx, a); err != nil {
		return nil, err
	}
	if err := s.probe(ctx); err != nil {
		return nil, err
	}
	if err := s.plan(ctx, setters); err != nil {
		return nil, err
	}
	after, err := take(ctx)
	s.after = settingsOf(after)
	return s, err
}

func take(ctx context.Context) (nvml.Snapshot, error) {
	s, err := nvml.Take(ctx, readLimit)
	switch {
	case err != nil:
		return s, err
	case s.Init != nvml.Success:
		return s, fmt.Errorf("NVML answers %s", s.Init)
	case len(s.Devices) == 0:
		return s, errors.New("NVML shows no GPU")
	}
	return s, nil
}

func (s *study) timed(name string, do func()) time.Duration {
	began := time.Now()
	do()
	took := time.Since(began)
	s.figures = append(s.figures, figure{name: name, value: took.Seconds(), unit: "s"})
	return took
}

// quickGoal is the time of a quick check of one GPU, in seconds.
const quickGoal = 3

// oneGPU names the figure that quickGoal is for. The GPUs of a host are checked
// at the same time, so that of several is no less than that of one, and is not
// divided by their number.
func oneGPU(n int) string {
	if n == 1 {
		return "quick check of one GPU"
	}
	return fmt.Sprintf("quick check of one GPU, at most: of %d at the same time", n)
}

// validate runs both levels against a baseline of the same GPUs.
func (s *study) validate(ctx context.Context, a *agent.Agent) error {
	var baseline gpu.Baseline
	var err error
	s.timed("baseline", func() { baseline, err = a.Baseline(ctx, gpu.BaselineRequest{Node: node}) })
	if err != nil {
		return fmt.Errorf("baseline: %w", err)
	}
	for _, name := range []gpu.Level{gpu.Quick, gpu.Standard} {
		l := level{name: name}
		took := s.timed(string(name)+" check of the host", func() {
			var r gpu.Result
			l.checks, r, err = a.Examine(ctx, gpu.ValidateRequest{Node: node, Level: name, Baseline: &baseline}, func(string) {})
			l.verdict = r.Verdict
		})
		if err != nil {
			return fmt.Errorf("%s check: %w", name, err)
		}
		if name == gpu.Quick {
			s.figures = append(s.figures, figure{oneGPU(len(s.snapshot.Devices)), took.Seconds(), "s", quickGoal})
		}
		s.levels = append(s.levels, l)
	}
	return nil
}

// probe runs the CUDA proof by itself, for its figures.
func (s *study) probe(ctx context.Context) error {
	for _, d := range s.snapshot.Devices {
		devices := []string{d.UUID.Value}
		if d.MIGMode.OK() && d.MIGMode.Value.Current == 1 {
			devices = nil
			for _, m := range d.MIGDevices.Value {
				devices = append(devices, m.UUID)
			}
		}
		for _, uuid := range devices {
			var r cuda.Result
			var err error
			s.timed("CUDA probe of "+uuid+", a quarter of its memory", func() {
				r, err = cuda.Probe(ctx, cuda.Options{UUID: uuid, Card: d.UUID.Value, MemoryShare: 0.25, Copies: true, Timeout: probeLimit})
			})
			if err != nil {
				return fmt.Errorf("probe %s: %w", uuid, err)
			}
			r.UUID = uuid
			s.probes = append(s.probes, r)
			for _, f := range []figure{{"device to device", r.Bandwidth.DeviceToDevice, "GB/s", 0}, {"host to device", r.Bandwidth.HostToDevice, "GB/s", 0},
				{"device to host", r.Bandwidth.DeviceToHost, "GB/s", 0}} {
				f.name += ", " + uuid
				s.figures = append(s.figures, f)
			}
		}
	}
	return nil
}

// plan runs the plan commands on layouts made of what the GPUs have and offer.
func (s *study) plan(ctx context.Context, setters agent.Setters) error {
	found, err := setters.ReadMIG(ctx)
	if err != nil {
		return fmt.Errorf("read MIG: %w", err)
	}
	dir, err := os.MkdirTemp("", "refit-test-gpu")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	migCommand := func() *cobra.Command { return mig.Command(setters, setters.Reset) }
	vgpuCommand := func() *cobra.Command { return vgpu.Command(setters, func(string) vgpu.Writer { return setters }) }
	const same = "mig plan, the layout as found"
	type entry = map[string]any
	present, unknown := asFound(found)
	for _, c := range []struct {
		what, key string
		command   func() *cobra.Command
		entries   []entry
		idle      bool
	}{
		{same, "mig-configs", migCommand, present, true},
		{"mig plan, MIG off", "mig-configs", migCommand, []entry{{"devices": "all", "mig-enabled": false}}, false},
		{"mig plan, MIG on with the smallest instances", "mig-configs", migCommand, []entry{{"devices": "all", "mig-enabled": true, "mig-devices": smallest(found)}}, false},
		{"vgpu plan, no virtual GPUs", "vgpu-configs", vgpuCommand, []entry{{"devices": "all", "vgpu-devices": entry{}}}, false},
	} {
		if c.what == same && unknown != nil { // a problem of its own, and the rest goes on
			s.plans = append(s.plans, plan{what: c.what, code: setup.ExitError, text: unknown.Error() + "\n"})
			continue
		}
		text, err := yaml.Marshal(entry{"version": "v1", c.key: entry{"test": c.entries}})
		if err != nil {
			return err
		}
		file := filepath.Join(dir, "layout.yaml")
		if err := os.WriteFile(file, text, 0o600); err != nil {
			return err
		}
		p := plan{what: c.what, idle: c.idle}
		s.timed(c.what, func() { p.text, p.code = run(ctx, c.command(), "plan", "-f", file) })
		s.plans = append(s.plans, p)
	}
	return nil
}

func offered(g nvml.MIGGPU) string {
	var names []string
	for _, p := range g.Profiles {
		names = append(names, fmt.Sprintf("%d (%s)", p.ID, p.Name))
	}
	return strings.Join(names, ", ")
}

// asFound declares what is there.
func asFound(found nvml.MIGHost) ([]map[string]any, error) {
	var entries []map[string]any
	for _, g := range found.GPUs {
		e := map[string]any{"devices": []int{g.Index}, "mig-enabled": g.Current}
		if g.Current {
			devices := map[string]int{}
			for _, i := range g.Instances {
				at := slices.IndexFunc(g.Profiles, func(p nvml.MIGProfile) bool { return p.ID == i.ProfileID })
				if at < 0 {
					return nil, fmt.Errorf("GPU %s: GPU instance %d has profile %d, which is none that this GPU offers: %s", g.UUID, i.ID, i.ProfileID, offered(g))
				}
				for _, c := range i.Compute {
					devices[g.Profiles[at].Compute[c.Slices]]++
				}
			}
			e["mig-devices"] = devices
		}
		entries = append(entries, e)
	}
	return entries, nil
}

// smallest asks for one instance of the smallest profile, where the driver
// tells its profiles without MIG mode.
func smallest(found nvml.MIGHost) map[string]int {
	var name string
	least := 0
	for _, g := range found.GPUs {
		for _, p := range g.Profiles {
			if name == "" || p.Slices < least {
				name, least = p.Name, p.Slices
			}
		}
	}
	if name == "" {
		return map[string]int{}
	}
	return map[string]int{name: 1}
}

func run(ctx context.Context, c *cobra.Command, args ...string) (text string, code int) {
	var out bytes.Buffer
	c.SetOut(&out)
	c.SetErr(io.Discard)
	c.SetArgs(args)
	c.SilenceErrors, c.SilenceUsage = true, true
	err := c.ExecuteContext(ctx)
	if err == nil {
		return out.String(), setup.ExitDone
	}
	code = setup.ExitError
	var exit *setup.Exit
	if errors.As(err, &exit) {
		code = exit.ExitCode()
	}
	return out.String() + err.Error() + "\n", code
}

// problems are what fails the test: a row without any answer, a verdict that
// only a faulty card or a wrong row gives, a plan that failed or tried to
// change something, a setting that is not as it was.
func (s *study) problems() []string {
	var out []string
	for _, l := range s.levels {
		rows, gpuRows := check.Rows(l.name)
		for _, name := range rows {
			if !slices.ContainsFunc(l.checks, func(c gpu.Check) bool { return c.Name == name }) {
				out = append(out, fmt.Sprintf("level %s: row %q has no answer", l.name, name))
			}
		}
		for _, name := range gpuRows {
			answers := 0
			for _, c := range l.checks {
				if c.Name == name {
					answers++
				}
			}
			if answers < len(s.snapshot.Devices) {
				out = append(out, fmt.Sprintf("level %s: row %q has %d answers for %d GPUs", l.name, name, answers, len(s.snapshot.Devices)))
			}
		}
		for _, c := range l.checks {
			if failed(c) && (c.Severity == gpu.Fatal || c.Severity == gpu.Reset) {
				out = append(out, fmt.Sprintf("level %s: %s of %s: expected %s, found %s: a fault of the host, or a row that reads it wrongly", l.name, c.Name, c.Device, c.Expected, c.Found))
			}
		}
	}
	for _, r := range s.probes {
		if r.Verdict != cuda.Pass {
			out = append(out, fmt.Sprintf("CUDA probe of %s: %s during %s: %s", r.UUID, r.Verdict, r.Stage, r.Error))
		}
	}
	for _, p := range s.plans {
		switch {
		case p.code == setup.ExitError, p.code == setup.ExitRefused:
			out = append(out, fmt.Sprintf("%s ended with %d: %s", p.what, p.code, p.text))
		case p.idle && !bytes.Contains([]byte(p.text), []byte("nothing to do")):
			out = append(out, fmt.Sprintf("%s: expected nothing to do, found: %s", p.what, p.text))
		}
	}
	for _, c := range s.before.changes(s.after) {
		out = append(out, "a setting changed: "+c)
	}
	return out
}

func failed(c gpu.Check) bool { return !c.OK && c.Skipped == "" && c.Severity != gpu.Info }
