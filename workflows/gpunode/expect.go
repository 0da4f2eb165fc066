package gpunode

import (
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/refit-run/refit/activities/gpu"
	"github.com/refit-run/refit/activities/tensorfusion"
	"github.com/refit-run/refit/workflows/rollout/plan"
)

// ExpectProblems returns what is wrong with what a plan at path declares its
// hosts to be; nil declares nothing.
func ExpectProblems(path string, e *gpu.Expect) []plan.Problem {
	if e == nil {
		return nil
	}
	var ps []plan.Problem
	add := func(at, format string, args ...any) {
		ps = append(ps, plan.Problem{Path: path + at, Message: fmt.Sprintf(format, args...)})
	}
	if e.CUDA != "" && !isVersion(e.CUDA) {
		add(".cuda", "is %q: want a version like 12.4", e.CUDA)
	}
	if e.StressFor != 0 && e.StressFor.D() < time.Minute {
		add(".stressFor", "is %s: give at least a minute, like 10m", e.StressFor)
	}
	if t := e.TensorFusion; t != nil {
		switch {
		case t.Limiter != "" && t.LimitMiB == 0:
			add(".tensorFusion.limitMiB", "is missing beside limiter: give the memory in MiB above which an allocation must be refused, or leave the limiter out")
		case t.Limiter == "" && t.LimitMiB > 0:
			add(".tensorFusion.limiter", "is missing beside limitMiB: give the path of the limiter on the host, or leave the limit out")
		}
	}
	return ps
}

// Incomplete reports whether a declaration leaves out what of TensorFusion only
// the cluster knows: the hypervisor's port and the live client pods.
func Incomplete(e *gpu.Expect) bool {
	return e != nil && e.TensorFusion != nil && (e.TensorFusion.Port == 0 || e.TensorFusion.Pods == nil)
}

// Complete fills in what an incomplete declaration leaves out.
func Complete(e *gpu.Expect, known tensorfusion.GPUHost) *gpu.Expect {
	out, host := *e, *e.TensorFusion
	if host.Port == 0 {
		host.Port = known.Port
	}
	if host.Pods == nil {
		host.Pods = known.Pods
	}
	out.TensorFusion = &host
	return &out
}

// isVersion: 12.4 is one.
func isVersion(s string) bool {
	major, minor, _ := strings.Cut(s, ".")
	for _, n := range []string{major, minor} {
		if _, err := strconv.ParseUint(n, 10, 16); err != nil {
			return false
		}
	}
	return true
}
