// Package agent holds the activities of one GPU host: baseline, validation and
// preparation, one at a time. It orchestrates; what is read, probed and judged
// is in the packages it uses, and no driver library is ever loaded into this
// process.
package agent

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/refit-run/refit/activities/gpu"
	"github.com/refit-run/refit/gpuagent/check"
	"github.com/refit-run/refit/gpuagent/cuda"
	"github.com/refit-run/refit/gpuagent/host"
	"github.com/refit-run/refit/gpuagent/nvml"
	"github.com/refit-run/refit/gpuagent/setup"
)

// readLimit bounds one reading of the driver: without persistence mode each of
// eight GPUs initialises anew for it, which takes seconds.
const readLimit = time.Minute

// hostLimit bounds the reading of the host: the kernel answers in milliseconds,
// a hypervisor and the programs that are asked for their version within 5 s each.
const hostLimit = 15 * time.Second

// Deadlines of a validation that brings none.
const (
	quickLimit    = 2 * time.Minute
	standardLimit = 5 * time.Minute
	stressDefault = 10 * time.Minute
)

// Agent serves one node.
type Agent struct {
	Node     string
	Host     host.Host
	Preparer *Preparer
	turn     *turn
}

// New is the agent of a node on the host that the environment names.
func New(node string) *Agent {
	h := host.New()
	return &Agent{Node: node, Host: h, Preparer: NewPreparer(node, h.Root), turn: newTurn()}
}

// look begins a request that changes nothing: after it no other request of this
// agent and no set-up or check of a person runs on the host. unseen says why a
// person's are not known of.
func (a *Agent) look(ctx context.Context, what string) (release func(), unseen string, err error) {
	done, err := a.turn.take(ctx, what)
	if err != nil {
		return nil, "", err
	}
	unlock, unseen, err := setup.LockToLook(ctx, a.Host.Root)
	if err != nil {
		done()
		return nil, "", err
	}
	return func() { unlock(); done() }, unseen, nil
}

// own refuses a request for another node than the one that is served, and one
// for a boot of it that this host is not in: then the agent runs on another
// machine than it says, or the Node object is still of the boot before.
func own(served string, h host.Host, asked, boot string) error {
	if asked == served {
		here := h.BootID()
		if boot == "" || boot == here {
			return nil
		}
		return &setup.Failure{Class: setup.Wait, Object: "boot of node " + served, Expected: boot + ", as the Node object says", Found: here + ", where this agent runs",
			Why: "what is read and set up here is not that node", Next: "wait for the kubelet if the host has just booted; else check NODE_NAME of the agent and look for a second one of that name"}
	}
	return &setup.Failure{Class: setup.Stop, Object: "agent of node " + served, Expected: "a request for this node", Found: "one for " + asked,
		Next: "check NODE_NAME of the agent, and node and cluster of the request"}
}

// Prepare is the activity gpu.Prepare.
func (a *Agent) Prepare(ctx context.Context, req gpu.PrepareRequest) (gpu.PrepareResult, error) {
	steps := newHeartbeat(ctx)
	defer steps.stop()
	release, err := a.turn.take(ctx, "set-up")
	if err != nil {
		return gpu.PrepareResult{}, asSetUpError(ctx, err, false)
	}
	defer release()
	return a.Preparer.Prepare(ctx, req, steps.set)
}

// Baseline is the activity gpu.Baseline: the host as it is before a component
// is replaced.
func (a *Agent) Baseline(ctx context.Context, req gpu.BaselineRequest) (gpu.Baseline, error) {
	steps := newHeartbeat(ctx)
	defer steps.stop()
	out, err := a.Record(ctx, req)
	return out, asActivityError(err)
}

// Record takes the baseline.
func (a *Agent) Record(ctx context.Context, req gpu.BaselineRequest) (gpu.Baseline, error) {
	if err := own(a.Node, a.Host, req.Node, req.NodeBootID); err != nil {
		return gpu.Baseline{}, err
	}
	release, _, err := a.look(ctx, "baseline")
	if err != nil {
		return gpu.Baseline{}, err
	}
	defer release()
	until := time.Now().Add(readLimit)
	s, err := settled(ctx, func() (limit, more time.Duration) { return time.Until(until), time.Until(until) - readLimit/2 }, func(string) {})
	if ctx.Err() != nil {
		return gpu.Baseline{}, context.Cause(ctx)
	}
	if why := unreadable(s, err); why != "" {
		return gpu.Baseline{}, &setup.Failure{Class: setup.Stop, Object: "baseline of node " + a.Node, Expected: "an answer of the driver", Found: why,
			Next: "bring the host in order first: refit-gpuagent check says what is wrong"}
	}
	h, err := a.Host.ReadApart(ctx, host.Options{}, hostLimit)
	if ctx.Err() != nil {
		return gpu.Baseline{}, context.Cause(ctx)
	}
	if err != nil {
		return gpu.Baseline{}, &setup.Failure{Class: setup.Stop, Object: "baseline of node " + a.Node, Expected: "a reading of the host", Found: err.Error(),
			Next: "look on the host for what hangs there (a mount, a file of sysfs, a program), then try again", Cause: err}
	}
	b := gpu.Baseline{Node: a.Node, BootID: h.BootID, Driver: s.Driver.Value, Taken: time.Now().UTC(), Devices: devices(&s),
		Readings: check.HostReadings(&s), KernelLog: gpu.KernelLogPosition{Visible: h.Log.Visible, Sequence: h.Log.Last}}
	for i := range b.Devices {
		at := slices.IndexFunc(s.Devices, func(d nvml.Device) bool { return d.UUID.Value == b.Devices[i].UUID })
		b.Devices[i].Readings = check.Readings(&s.Devices[at])
	}
	return b, nil
}

// State says in words what the driver shows of this host; an error says what
// keeps it from answering. Neither stops an agent: the driver may be installed
// while it runs.
func State(ctx context.Context, limit time.Duration) (string, error) {
	s, err := nvml.Take(ctx, limit)
	switch {
	case err != nil:
		return "", err
	case s.Init == nvml.LibraryNotFound:
		return "no driver library (libnvidia-ml.so.1) on this host: validations will say unfit until it is installed", nil
	case s.Init == nvml.DriverNotLoaded:
		return "the kernel module nvidia is not loaded: validations will say unfit until it is", nil
	case s.Init != nvml.Success:
		return "the driver answers " + s.Init.String(), nil
	}
	return fmt.Sprintf("driver %s, %d GPUs", s.Driver.Value, s.Count.Value), nil
}

// unreadable says why a snapshot tells nothing, empty when it tells.
func unreadable(s nvml.Snapshot, err error) string {
	switch {
	case err != nil:
		return err.Error()
	case s.Init != nvml.Success:
		return s.Init.String()
	}
	return ""
}

func devices(s *nvml.Snapshot) []gpu.Device {
	var out []gpu.Device
	for _, d := range s.Devices {
		if d.UUID.OK() && d.Handle == nvml.Success {
			out = append(out, gpu.Device{UUID: d.UUID.Value, Model: d.Name.Value, MemoryBytes: d.Memory.Value.Total})
		}
	}
	return out
}

// Validate is the activity gpu.Validate: the verdict on the host as it is now.
// It changes nothing, so running it again after the death of the agent is the
// repair of every interruption.
func (a *Agent) Validate(ctx context.Context, req gpu.ValidateRequest) (gpu.Result, error) {
	steps := newHeartbeat(ctx)
	defer steps.stop()
	checks, out, err := a.Examine(ctx, req, steps.set)
	out.Take(checks, cuda.ToldByFigures...)
	return out, asActivityError(err)
}

// ErrBadRequest marks a request that can never be served.
var ErrBadRequest = errors.New("bad request")

// badRequest is a Failure of class Stop that is the request's own fault.
func badRequest(object, expected, found, next string) error {
	return &setup.Failure{Class: setup.Stop, Object: object, Expected: expected, Found: found, Next: next, Cause: ErrBadRequest}
}

// Examine answers every row, and gives the result without its rows.
func (a *Agent) Examine(ctx context.Context, req gpu.ValidateRequest, step func(string)) ([]gpu.Check, gpu.Result, error) {
	out := gpu.Result{Node: a.Node, BootID: a.Host.BootID(), Verdict: gpu.Unproven}
	if err := own(a.Node, a.Host, req.Node, req.NodeBootID); err != nil {
		return nil, out, err
	}
	if req.Level == "" {
		req.Level = gpu.Quick
	}
	if !slices.Contains([]gpu.Level{gpu.Quick, gpu.Standard, gpu.Stress}, req.Level) {
		return nil, out, badRequest("level", "quick, standard or stress", string(req.Level), "correct the request")
	}
	if req.Baseline != nil && req.Baseline.Node != a.Node {
		return nil, out, badRequest("baseline", "one of node "+a.Node, "one of node "+req.Baseline.Node, "give the baseline that was taken on this host, or none")
	}
	if e := req.Expect; e != nil && e.TensorFusion != nil && e.TensorFusion.Limiter != "" && e.TensorFusion.LimitMiB == 0 {
		return nil, out, badRequest("tensorFusion.limitMiB", "the memory that the limiter allows, in MiB", "0", "give the limit, or leave the limiter out")
	}
	release, unseen, err := a.look(ctx, "validation at level "+string(req.Level))
	if err != nil {
		return nil, out, err
	}
	defer release()
	limit := req.Deadline
	if limit <= 0 {
		limit = defaultLimit(req)
	}
	v := newValidation(a, req, limit, step)
	in, err := v.observe(ctx)
	if err != nil {
		return nil, out, fmt.Errorf("validate node %s: %w", a.Node, err)
	}
	in.Unseen = unseen
	checks := check.Evaluate(in)
	out.Driver, out.Devices, out.Proofs = in.NVML.Driver.Value, devices(&in.NVML), check.Figures(in.Proofs)
	out.Verdict = gpu.VerdictOf(checks, v.expect.AllowedWarnings)
	return checks, out, nil
}

func defaultLimit(req gpu.ValidateRequest) time.Duration {
	switch req.Level {
	case gpu.Standard:
		return standardLimit
	case gpu.Stress:
		if req.Expect != nil && req.Expect.StressFor > 0 {
			return req.Expect.StressFor.D() + standardLimit
		}
		return stressDefault + standardLimit
	}
	return quickLimit
}
