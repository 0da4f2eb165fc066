package cuda

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/refit-run/refit/gpuagent/child"
)

// defaultTimeout is what a probe without a soak may take: a cold context on a
// host with many GPUs and a JIT take seconds, a wedged GPU takes for ever.
const defaultTimeout = time.Minute

// minMemory is the least that is pattern-tested: enough to be spread over every
// memory channel.
const minMemory = 2 << 20

// request is what the child is asked. Interposed calls go through what is
// preloaded; with LimitBytes an allocation above it is made as well.
type request struct {
	UUID        string        `json:"uuid,omitempty"`
	Ordinal     int32         `json:"ordinal,omitempty"`
	Library     string        `json:"library"`
	MemoryBytes uint64        `json:"memoryBytes"`
	MemoryShare float64       `json:"memoryShare"`
	Soak        time.Duration `json:"soak"`
	Copies      bool          `json:"copies"`
	Interposed  bool          `json:"interposed,omitempty"`
	LimitBytes  uint64        `json:"limitBytes,omitempty"`
}

// reply is the child's answer.
type reply struct {
	Result
	Refused    bool   `json:"refused"`
	LimitFound string `json:"limitFound"`
}

// Probe proves one device. Everything that the probe can find is in the
// Result; an error says that it could not be made, or that ctx ended.
func Probe(ctx context.Context, o Options) (Result, error) {
	req := request{UUID: o.UUID, Ordinal: int32(o.Ordinal), Library: o.Library, MemoryBytes: o.MemoryMiB << 20, MemoryShare: o.MemoryShare,
		Soak: o.Soak, Copies: o.Copies}
	if req.Library == "" {
		req.Library = "libcuda.so.1"
	}
	if req.MemoryBytes == 0 && req.MemoryShare <= 0 {
		req.MemoryBytes = 64 << 20
	}
	if o.Limit != nil && o.Limit.Bytes == 0 {
		return Result{}, errors.New("a limit of 0 bytes of device memory cannot be proven: give the limit, or none")
	}
	got, err := run(ctx, o, req, o.Preload)
	if err != nil {
		return Result{}, err
	}
	got.Slow, got.Drained = nil, req.MemoryBytes == 0
	if o.Copies && got.Verdict == Pass {
		got.Slow = got.Bandwidth.below(o.Floors)
	}
	if o.Limit == nil || got.Verdict != Pass {
		return got.Result, nil
	}
	limited, err := probeLimit(ctx, o, req, got.Result)
	if err != nil {
		return Result{}, err
	}
	got.Result.Limit = &limited
	return got.Result, nil
}

// probeLimit runs again as a limited workload. Where the device has more memory
// than the limit but less free, a refusal would come from the driver and prove
// nothing; a device that shows no more than the limit is limited already.
func probeLimit(ctx context.Context, o Options, req request, plain Result) (LimitResult, error) {
	if plain.UsableBytes > o.Limit.Bytes && plain.FreeBytes < o.Limit.Bytes+limitStep {
		return LimitResult{Verdict: plain.Verdict, Skipped: fmt.Sprintf(
			"%d MiB are free, the limit is %d MiB: a refusal would be the driver's", plain.FreeBytes>>20, o.Limit.Bytes>>20)}, nil
	}
	req.MemoryBytes, req.MemoryShare, req.Soak, req.Copies = minMemory, 0, 0, false
	req.LimitBytes = o.Limit.Bytes
	got, err := run(ctx, o, req, o.Limit.Preload)
	if err != nil {
		return LimitResult{}, err
	}
	out := LimitResult{Verdict: got.Verdict, Refused: got.Refused, Found: got.LimitFound}
	if got.Verdict != Pass && out.Found == "" {
		out.Found = fmt.Sprintf("%s during %s: %s", got.Verdict, got.Stage, got.Error)
	}
	return out, nil
}

// limitStep is how far above the limit the allocation goes: more than what a
// context and a rounding of pages may add.
const limitStep = 64 << 20

// environment of the child. The order makes ordinals match NVML's; without the
// cache every probe compiles, and needs no writable home.
func environment(o Options, preload string) []string {
	add := []string{"CUDA_DEVICE_ORDER=PCI_BUS_ID", "CUDA_CACHE_DISABLE=1", "CUDA_MODULE_LOADING=EAGER"}
	if o.UUID != "" {
		add = append(add, "CUDA_VISIBLE_DEVICES="+o.UUID)
	}
	for _, kv := range o.Env {
		if !strings.HasPrefix(kv, "LD_PRELOAD=") {
			add = append(add, kv)
		}
	}
	if preload != "" {
		add = append(add, "LD_PRELOAD="+preload)
	}
	return child.Env(add...)
}

func run(ctx context.Context, o Options, req request, preload string) (reply, error) {
	timeout := o.Timeout
	if timeout <= 0 {
		timeout = defaultTimeout + req.Soak
	}
	// A limit can hold without LD_PRELOAD, by /etc/ld.so.preload.
	req.Interposed = preload != "" || req.LimitBytes > 0
	var out reply
	err := child.Run(ctx, child.Spec{Name: childName, Request: req, Env: environment(o, preload), Timeout: timeout,
		Reply: &out, Key: key(o)})
	if err == nil {
		return out, nil
	}
	// A caller that has gone gets no verdict, except that its child stays.
	if ctx.Err() != nil && !errors.As(err, new(child.Wedged)) {
		return reply{}, err
	}
	return became(o.UUID, err)
}

// key names what a wedged child blocks: the card, whichever device of it.
func key(o Options) string {
	card := o.Card
	if card == "" {
		card = o.UUID
	}
	return fmt.Sprintf("cuda %s %d", card, o.Ordinal)
}

// became turns the fate of a child into a verdict.
func became(uuid string, err error) (reply, error) {
	out := reply{Result: Result{UUID: uuid, Error: err.Error()}}
	var (
		exit    child.Exit
		crash   child.Crash
		timeout child.Timeout
		wedged  child.Wedged
		failed  child.Error
	)
	switch {
	case errors.As(err, &timeout):
		out.Verdict, out.Stage = Timeout, timeout.Stage
	case errors.As(err, &wedged):
		out.Verdict, out.Stage = Wedged, wedged.Stage
	case errors.As(err, &crash):
		out.Verdict, out.Stage = Crash, crash.Stage
	case errors.As(err, &exit):
		out.Verdict, out.Stage = Crash, exit.Stage
	case errors.As(err, &failed):
		out.Verdict = Fail
	default:
		return reply{}, err
	}
	return out, nil
}

// isMIG tells a MIG device by the name that was asked for, or by the one that
// CUDA gives it, which ends in its profile: "NVIDIA H100 80GB HBM3 MIG 3g.40gb".
// In a pod nobody asks for a name.
func isMIG(wanted, model string) bool {
	return strings.HasPrefix(strings.ToUpper(wanted), "MIG-") || strings.Contains(model, " MIG ")
}

// sameUUID compares names of devices: NVML, CUDA and a person differ in case,
// and the legacy name of a MIG device says nothing about its UUID.
func sameUUID(wanted, got string) bool {
	legacy := strings.HasPrefix(strings.ToUpper(wanted), "MIG-GPU-")
	return wanted == "" || legacy || strings.EqualFold(wanted, got)
}
