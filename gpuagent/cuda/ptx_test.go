package cuda

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"
)

// The vendor's assembler is not part of this repository; where one is installed
// the text must compile for the device it is made for and for later ones.
func TestTheTextCompilesWhereTheVendorsAssemblerIsInstalled(t *testing.T) {
	ptxas, err := exec.LookPath("ptxas")
	if err != nil {
		t.Skip("optional: no ptxas in PATH, NVIDIA's assembler, which is not free to ship")
	}
	for _, c := range []struct {
		major, minor int
		arches       []string
	}{
		{5, 0, []string{"sm_50", "sm_52", "sm_60"}}, {7, 0, []string{"sm_70"}}, {7, 5, []string{"sm_75"}},
		{8, 0, []string{"sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"}},
	} {
		text, name := ptxFor(c.major, c.minor)
		file := filepath.Join(t.TempDir(), "probe.ptx")
		if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
		for _, arch := range c.arches {
			if out, err := exec.Command(ptxas, "--warning-as-error", "-arch="+arch, "-o", os.DevNull, file).CombinedOutput(); err != nil {
				t.Errorf("%s for %s: %v: %s", name, arch, err, out)
			}
		}
	}
}
