package schema

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/refit-run/refit/starter/planfile"
)

// TestALimiterWithoutItsLimitHasItsPlace refuses in every kind of plan what no
// agent could prove, before a server is asked.
func TestALimiterWithoutItsLimitHasItsPlace(t *testing.T) {
	upgrade, err := os.ReadFile("../../../examples/tensorfusion-upgrade-prepare.yaml")
	require.NoError(t, err)
	lines := strings.Split(string(upgrade), "\n")
	at := 0
	for i, line := range lines {
		if strings.HasPrefix(line, "validation:") {
			at = i + 1
		}
	}
	require.NotZero(t, at, "the example says how hosts are proven")
	expect := "  expect:\n    tensorFusion:\n      limiter: /run/tensor-fusion/lib/limiter.so\n"
	for kind, c := range map[string]struct {
		plan, path string
		line       int // of the key tensorFusion, which lacks it
		indent     int
	}{
		"GPUNode": {"kind: GPUNode\ntarget: {cluster: prod}\nnode: gpu-7\nexpect:\n  tensorFusion:\n    limiter: /l.so\n", "expect", 5, 3},
		"Rollout": {strings.Replace(workersPlan, "pool:", "expect:\n  tensorFusion:\n    limiter: /l.so\npool:", 1), "expect", 7, 3},
		"TensorFusionUpgrade": {strings.Join(lines[:at], "\n") + "\n" + expect + strings.Join(lines[at:], "\n"),
			"validation.expect", at + 2, 5},
	} {
		t.Run(kind, func(t *testing.T) {
			_, err := planfile.Load(Kinds(), "plan.yaml", []byte(c.plan), nil)
			require.ErrorContains(t, err, c.path+".tensorFusion.limitMiB is missing beside limiter")
			require.ErrorContains(t, err, fmt.Sprintf("plan.yaml:%d:%d: ", c.line, c.indent))
			_, err = planfile.Load(Kinds(), "plan.yaml", []byte(c.plan), []string{c.path + ".tensorFusion.limitMiB=1024"})
			require.NoError(t, err)
		})
	}
}

func TestWhatAHostCannotBeHasItsPlace(t *testing.T) {
	const plan = "kind: GPUNode\ntarget: {cluster: prod}\nnode: gpu-7\nexpect:\n"
	for text, want := range map[string]string{
		"  cuda: new\n":                      "plan.yaml:5:9: expect.cuda is \"new\": want a version like 12.4",
		"  cuda: \"12\"\n":                   "plan.yaml:5:9: expect.cuda is \"12\"",
		"  tensorFusion: {limitMiB: 1024}\n": "expect.tensorFusion.limiter is missing beside limitMiB",
	} {
		_, err := planfile.Load(Kinds(), "plan.yaml", []byte(plan+text), nil)
		require.ErrorContains(t, err, want)
	}
	_, err := planfile.Load(Kinds(), "plan.yaml", []byte(plan+"  cuda: \"12.4\"\n"), nil)
	require.NoError(t, err)
}
