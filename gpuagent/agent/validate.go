package agent

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/refit-run/refit/activities/gpu"
	"github.com/refit-run/refit/gpuagent/check"
	"github.com/refit-run/refit/gpuagent/cuda"
	"github.com/refit-run/refit/gpuagent/host"
	"github.com/refit-run/refit/gpuagent/nvml"
)

// What the probe takes of each GPU, by level.
const (
	quickMiB      = 64
	standardShare = 0.25
	stressShare   = 0.90
)

// lookAgain is how often what is coming up is looked at again.
const lookAgain = 2 * time.Second

// killTime is kept back from the deadline of a child: so long may it take to
// end one and to judge.
const killTime = 500 * time.Millisecond

// readAgain is kept back from the probes for the second reading, or a quarter
// of a short deadline: a GPU that hangs must not take the others' answers.
const readAgain = 10 * time.Second

// probesAtOnce bounds the quick probes, which share the host's processors and
// memory bus. The timed copies of level standard run alone: another probe would
// slow them.
const probesAtOnce = 8

// soakEnds is what a stress needs beside its soak, or a fifth of a short
// deadline.
const soakEnds = 3 * time.Minute

// hypervisorPort is the default of a pool's portNumber.
const hypervisorPort = 8000

// validation is one request under way.
type validation struct {
	agent    *Agent
	req      gpu.ValidateRequest
	expect   gpu.Expect
	step     func(string)
	limit    time.Duration
	deadline time.Time // of the driver's part
	forHost  time.Duration
}

// newValidation keeps the time for the host back from that of the driver: both
// end within the limit.
func newValidation(a *Agent, req gpu.ValidateRequest, limit time.Duration, step func(string)) *validation {
	v := &validation{agent: a, req: req, step: step, forHost: min(hostLimit, limit/8)}
	v.limit = limit - v.forHost
	v.deadline = time.Now().Add(v.limit)
	if req.Expect != nil {
		v.expect = *req.Expect
	}
	if t := v.expect.TensorFusion; t != nil && t.Port == 0 {
		declared := *t
		declared.Port = hypervisorPort
		v.expect.TensorFusion = &declared
	}
	return v
}

func (v *validation) left() time.Duration {
	return max(time.Until(v.deadline)-killTime, time.Millisecond)
}

// errDeadline ends the children at the deadline of the validation; the answer
// is then a verdict, not an error.
var errDeadline = errors.New("the deadline of the validation has passed")

// observe reads the driver, lets every GPU work, and reads driver and host
// again: errors that the work raised are in the second reading.
func (v *validation) observe(caller context.Context) (check.Input, error) {
	ctx, cancel := context.WithDeadlineCause(caller, v.deadline, errDeadline)
	defer cancel()
	in := check.Input{Level: v.req.Level, Baseline: v.req.Baseline, Expect: v.expect, Soak: v.soak()}
	v.step("read the driver")
	s, err := v.read(ctx)
	in.NVML, in.Trouble = s, trouble(err)
	if err == nil && s.Init == nvml.Success {
		v.work(ctx, &in)
		v.step("read the driver again")
		after, err := nvml.Snapshot{}, errDeadline
		// A driver that held the watch has used up the time: a reading without any
		// would only blame it once more, in the wrong place.
		if !check.Holds(in.WatchTrouble) {
			after, err = v.read(ctx)
		}
		in.NVML, in.Trouble = readings(s, after, err)
	}
	if err := caller.Err(); err != nil {
		return in, context.Cause(caller)
	}
	v.step("read the host")
	in.Host, err = v.agent.Host.ReadApart(caller, v.hostOptions(&in.NVML), v.forHost)
	if caller.Err() != nil {
		return in, context.Cause(caller)
	}
	if err != nil {
		in.Host, in.HostTrouble = host.Snapshot{BootID: v.agent.Host.BootID()}, err.Error()
	}
	return in, nil
}

func trouble(err error) string {
	if err != nil {
		return err.Error()
	}
	return ""
}

// readings are those of after the work. Where the time was over before they
// were made, what was read before stands: the probe's rows tell that. A driver
// that held, ended or crashed the child is never passed over.
func readings(before, after nvml.Snapshot, err error) (nvml.Snapshot, string) {
	if errors.Is(err, errDeadline) {
		return before, ""
	}
	return after, trouble(err)
}

// read takes a snapshot; half of the time stays for the probe and the second
// reading.
func (v *validation) read(ctx context.Context) (nvml.Snapshot, error) {
	return settled(ctx, func() (limit, more time.Duration) {
		return min(readLimit, v.left()), v.left() - v.limit/2
	}, v.step)
}

// settled takes a snapshot, again while something of the host is coming up and
// there is more time for it; limit bounds one reading.
func settled(ctx context.Context, left func() (limit, more time.Duration), step func(string)) (nvml.Snapshot, error) {
	for {
		limit, _ := left()
		s, err := nvml.Take(ctx, limit)
		if err != nil {
			return nvml.Snapshot{}, err
		}
		up := check.ComingUp(&s)
		if _, more := left(); up == "" || more <= 0 {
			return s, nil
		}
		step("wait for the " + up)
		again := time.NewTimer(lookAgain)
		select {
		case <-again.C:
		case <-ctx.Done():
			again.Stop()
			return s, nil
		}
	}
}

func (v *validation) hostOptions(s *nvml.Snapshot) host.Options {
	o := host.Options{Services: v.expect.Services}
	if b := v.req.Baseline; b != nil && b.BootID == v.agent.Host.BootID() {
		o.Since = b.KernelLog.Sequence
	}
	for _, d := range s.Devices {
		if d.Minor.OK() && d.Handle == nvml.Success {
			o.Minors = append(o.Minors, d.Minor.Value)
		}
	}
	if t := v.expect.TensorFusion; t != nil {
		o.TensorFusion = &host.TensorFusionOptions{Port: t.Port, Accelerator: t.AcceleratorLibrary}
	}
	return o
}

// work probes every GPU while another child watches the driver.
func (v *validation) work(ctx context.Context, in *check.Input) {
	stop := make(chan struct{})
	var watching sync.WaitGroup
	watching.Go(func() {
		o, err := nvml.Watch(ctx, v.left(), stop)
		switch {
		case errors.Is(err, errDeadline):
		case err != nil:
			in.WatchTrouble = err
		case o.Init != nvml.Success:
			in.WatchTrouble = errors.New("the driver answers " + o.Init.String())
		default:
			in.Watch = &o
		}
	})
	in.Proofs = v.probe(ctx, in.NVML.Devices)
	close(stop)
	watching.Wait()
}

// target is one device to probe.
type target struct{ gpu, uuid string }

func targets(devices []nvml.Device) []target {
	var out []target
	for _, d := range devices {
		if d.Handle != nvml.Success || !d.UUID.OK() {
			continue
		}
		for _, uuid := range d.CUDADevices() {
			out = append(out, target{d.UUID.Value, uuid})
		}
	}
	return out
}

func (v *validation) probe(ctx context.Context, devices []nvml.Device) []check.Proof {
	all := targets(devices)
	proofs := make([]*check.Proof, len(all))
	limit := probesAtOnce
	switch v.req.Level {
	case gpu.Standard:
		limit = 1
	case gpu.Stress: // each has the whole time: the last ones must not get what is left
		limit = max(len(all), 1)
	}
	places := make(chan struct{}, limit)
	var begun atomic.Int32
	var probing sync.WaitGroup
	for i, t := range all {
		probing.Go(func() {
			places <- struct{}{}
			defer func() { <-places }()
			if ctx.Err() != nil {
				return
			}
			v.step(fmt.Sprintf("probe %s (%d of %d)", t.uuid, i+1, len(all)))
			o := v.options(t, len(all)-int(begun.Add(1))+1)
			r, err := cuda.Probe(ctx, o)
			switch {
			case err != nil && ctx.Err() != nil:
				// Cut short by the deadline: the row stays unanswered.
				return
			case err != nil:
				r = cuda.Result{UUID: t.uuid, Verdict: cuda.Fail, Error: err.Error()}
			}
			r.UUID = t.uuid
			proofs[i] = &check.Proof{GPU: t.gpu, Result: r}
		})
	}
	probing.Wait()
	var out []check.Proof
	for _, p := range proofs {
		if p != nil {
			out = append(out, *p)
		}
	}
	return out
}

// soak is how long level stress is to keep at it.
func (v *validation) soak() time.Duration {
	if v.expect.StressFor > 0 {
		return v.expect.StressFor.D()
	}
	return stressDefault
}

// options of one probe; open counts the devices that have no answer yet, this
// one among them.
func (v *validation) options(t target, open int) cuda.Options {
	left := v.left()
	o := cuda.Options{UUID: t.uuid, Card: t.gpu, Timeout: left - min(readAgain, left/4)}
	if v.req.Level == gpu.Standard && open > 1 {
		// One after the other: the first that hangs must leave time to the rest.
		o.Timeout /= 2
	}
	switch v.req.Level {
	case gpu.Quick:
		o.MemoryMiB = quickMiB
		if m := v.expect.SharedMemoryMiB; m > 0 {
			o.MemoryMiB = m
		}
	case gpu.Standard:
		o.MemoryShare, o.Copies = standardShare, true
	case gpu.Stress:
		o.MemoryShare, o.Copies = stressShare, true
		o.Soak = min(v.soak(), o.Timeout-min(soakEnds, o.Timeout/5))
	}
	if b := v.expect.Bandwidth; b != nil && v.req.Level != gpu.Stress { // under stress the others slow the copies
		o.Floors = cuda.Bandwidth(*b)
	}
	if t := v.expect.TensorFusion; t != nil && t.Limiter != "" {
		o.Limit = &cuda.Limit{Preload: t.Limiter, Bytes: t.LimitMiB << 20}
	}
	return o
}
