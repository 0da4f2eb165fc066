package cuda

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/refit-run/refit/activities/gpu"
)

// Variables of a canary pod.
const (
	countVariable = "REFIT_PROBE_GPU_COUNT"
	limitVariable = "REFIT_PROBE_VRAM_LIMIT"
	nodeVariable  = "NODE_NAME"
)

// terminationLog is where Kubernetes reads a container's last words, at most
// 4096 bytes of them.
const (
	terminationLog   = "/dev/termination-log"
	terminationLimit = 4096
)

// Job is the probe as the program of a canary pod: it proves every device that
// the pod was given, by the path that a workload takes (what was injected with
// LD_PRELOAD stays), and the pod's memory limit where it has one.
type Job struct {
	Probe Options
	// Count is the number of devices that the pod must see; 0 is not checked.
	Count int
	// LimitBytes is the pod's device memory; 0 has no limit to prove.
	LimitBytes uint64
	Node       string
	// Output is the file that the result goes to, beside standard output.
	Output string
}

// FromEnvironment reads what the canary pod carries.
func FromEnvironment(getenv func(string) string) (Job, error) {
	j := Job{Node: getenv(nodeVariable), Output: terminationLog}
	if text := getenv(countVariable); text != "" {
		n, err := strconv.Atoi(text)
		if err != nil || n < 1 {
			return j, fmt.Errorf("%s=%q is no number of devices", countVariable, text)
		}
		j.Count = n
	}
	if text := getenv(limitVariable); text != "" {
		n, err := quantity(text)
		if err != nil {
			return j, fmt.Errorf("%s: %w", limitVariable, err)
		}
		j.LimitBytes = n
	}
	return j, nil
}

// quantity reads sizes as Kubernetes writes them: 2Gi, 512Mi, 2000000000.
func quantity(text string) (uint64, error) {
	number, unit := strings.TrimRight(text, "KMGTiB"), uint64(1)
	switch suffix := strings.TrimSuffix(text[len(number):], "B"); suffix {
	case "":
	case "Ki", "Mi", "Gi", "Ti":
		unit = 1 << (10 * (strings.Index("KMGT", suffix[:1]) + 1))
	case "K", "M", "G", "T":
		for range strings.Index("KMGT", suffix) + 1 {
			unit *= 1000
		}
	default:
		return 0, fmt.Errorf("%q is no size: write 2Gi, 512Mi or bytes", text)
	}
	n, err := strconv.ParseFloat(number, 64)
	if err != nil || n <= 0 {
		return 0, fmt.Errorf("%q is no size: write 2Gi, 512Mi or bytes", text)
	}
	return uint64(n * float64(unit)), nil
}

// Main runs the probe, writes its verdict as a gpu.Result and returns the exit
// code: 0 only for pass.
func Main(ctx context.Context, j Job, stdout, stderr io.Writer) int {
	result, err := j.Run(ctx)
	if err != nil {
		fmt.Fprintln(stderr, "probe:", err)
		return 1
	}
	text, err := message(result)
	if err != nil {
		fmt.Fprintln(stderr, "probe:", err)
		return 1
	}
	fmt.Fprintf(stdout, "%s\n", text)
	if j.Output != "" {
		// The container runtime made the file; by hand there may be none.
		if err := os.WriteFile(j.Output, text, 0o644); err != nil {
			fmt.Fprintf(stderr, "probe: write the verdict: %v; give --output, or leave it empty to print it only\n", err)
			return 1
		}
	}
	if result.Verdict != gpu.Pass {
		return 1
	}
	return 0
}

// Run proves each visible device.
func (j Job) Run(ctx context.Context) (gpu.Result, error) {
	out := gpu.Result{Node: j.Node, BootID: firstLine("/proc/sys/kernel/random/boot_id"), Driver: firstLine("/sys/module/nvidia/version")}
	var checks []gpu.Check
	seen := 0
	for ordinal := 0; ordinal == 0 || ordinal < seen; ordinal++ {
		o := j.Probe
		o.Ordinal, o.Preload = ordinal, os.Getenv("LD_PRELOAD")
		if j.LimitBytes > 0 {
			// The context needs some of the pod's memory too.
			o.MemoryMiB = min(o.MemoryMiB, j.LimitBytes>>21)
			o.Limit = &Limit{Preload: o.Preload, Bytes: j.LimitBytes}
		}
		r, err := Probe(ctx, o)
		if err != nil {
			return out, err
		}
		if ordinal == 0 && o.UUID == "" {
			seen = r.Devices
		}
		if r.UUID != "" {
			out.Devices = append(out.Devices, gpu.Device{UUID: r.UUID, Model: r.Name, MemoryBytes: r.TotalBytes})
		}
		checks = append(checks, r.Checks()...)
		if r.Verdict == Pass {
			out.Proofs = append(out.Proofs, r.Figures())
		}
	}
	if j.Count > 0 {
		checks = append(checks, gpu.Check{Name: "device count", Severity: gpu.Fatal, OK: len(out.Devices) == j.Count,
			Expected: strconv.Itoa(j.Count), Found: strconv.Itoa(len(out.Devices)),
			Hint: "compare the pod's GPU request with what was injected into it"})
	}
	out.Take(checks, ToldByFigures...)
	out.Verdict = gpu.VerdictOf(checks, 0)
	return out, nil
}

// message is the result in at most as many bytes as Kubernetes keeps: a cut
// JSON text would be no verdict at all. What passed goes first, then what was
// measured, then rows that failed; the verdict stays.
func message(r gpu.Result) ([]byte, error) {
	for {
		text, err := json.Marshal(r)
		if err != nil || len(text) <= terminationLimit {
			return text, err
		}
		switch {
		case len(r.Found) > 0:
			r.Found = nil
		case shortened(r.Checks):
		case len(r.Proofs) > 0:
			r.Proofs = nil
		case len(r.Checks) > 1:
			r.Checks = r.Checks[:len(r.Checks)-1]
		case len(r.Devices) > 1:
			return nil, errors.New("the result of this many devices does not fit a termination message: give the pod fewer")
		default:
			return nil, errors.New("the result does not fit a termination message")
		}
	}
}

// shortened cuts long findings, and reports whether there were any.
func shortened(checks []gpu.Check) (some bool) {
	for i := range checks {
		if c := &checks[i]; len(c.Found) > 200 {
			c.Found, some = c.Found[:197]+"...", true
		}
	}
	return some
}

func firstLine(path string) string {
	b, err := os.ReadFile(path)
	if err != nil {
		return ""
	}
	line, _, _ := strings.Cut(string(b), "\n")
	return strings.TrimSpace(line)
}

// Command is `probe`, for the canary pod and for a person in one.
func Command() *cobra.Command {
	var (
		uuid, limit, output string
		memory              uint64
		count               int
		copies              bool
		timeout             time.Duration
	)
	cmd := &cobra.Command{
		Use:   "probe",
		Short: "Prove with CUDA calls that the visible GPUs run work",
		Long: "probe runs a kernel, a memory pattern and, with --copies, timed copies on each visible GPU or MIG device, " +
			"and writes the verdict as JSON to standard output and to the container's termination message. Exit code 0 is pass.",
		Args:          cobra.NoArgs,
		SilenceUsage:  true,
		SilenceErrors: true,
		RunE: func(cmd *cobra.Command, _ []string) error {
			j, err := FromEnvironment(os.Getenv)
			if err != nil {
				return err
			}
			j.Probe = Options{UUID: uuid, MemoryMiB: memory, Copies: copies, Timeout: timeout}
			if cmd.Flags().Changed("output") {
				j.Output = output
			}
			if cmd.Flags().Changed("count") {
				j.Count = count
			}
			if cmd.Flags().Changed("limit") {
				if j.LimitBytes, err = quantity(limit); err != nil {
					return fmt.Errorf("--limit: %w", err)
				}
			}
			if code := Main(cmd.Context(), j, cmd.OutOrStdout(), cmd.ErrOrStderr()); code != 0 {
				return ErrNotPassed
			}
			return nil
		},
	}
	f := cmd.Flags()
	f.StringVar(&uuid, "uuid", "", "one GPU or MIG device (default: every visible one)")
	f.Uint64Var(&memory, "memory", 64, "MiB of device memory to test with patterns")
	f.BoolVar(&copies, "copies", false, "time copies")
	f.IntVar(&count, "count", 0, "devices that must be visible (default: $"+countVariable+")")
	f.StringVar(&limit, "limit", "", "memory above which an allocation must be refused, e.g. 2Gi (default: $"+limitVariable+")")
	f.DurationVar(&timeout, "timeout", defaultTimeout, "limit of each run")
	f.StringVar(&output, "output", terminationLog, "file for the verdict; empty writes none")
	return cmd
}

// ErrNotPassed: the verdict has been written; the caller ends with status 1.
var ErrNotPassed = errors.New("the probe did not pass")
