package agents

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/refit-run/refit/gpuagent/fakes"
	"github.com/refit-run/refit/gpuagent/host/hosttest"
	"github.com/refit-run/refit/sandbox/kwok"
	"github.com/refit-run/refit/sandbox/tensorfusion"
)

// MaxFakeGPUs is how many GPUs the fake driver libraries can show of one host.
const MaxFakeGPUs = 16

// Hosts are GPU hosts that are not there, by node: fake driver libraries with
// a state file of their own, and the file tree of the host.
type Hosts map[string]*fakeHost

type fakeHost struct {
	dir  string
	gpus *fakes.Host
	root string
}

// MakeHosts makes a healthy host for every node below dir, whatever was there.
// Their GPUs are the double's: as many, and under the same UUIDs.
func MakeHosts(dir string, nodes []string, gpus int) (Hosts, error) {
	if gpus < 1 || gpus > MaxFakeGPUs {
		return nil, fmt.Errorf("GPUs of a node: expected 1 to %d with real agents, found %d", MaxFakeGPUs, gpus)
	}
	if err := os.RemoveAll(dir); err != nil {
		return nil, err
	}
	hosts := Hosts{}
	for _, node := range nodes {
		h, err := makeHost(filepath.Join(dir, node), node, gpus)
		if err != nil {
			return nil, fmt.Errorf("fake GPU host of node %s: %w", node, err)
		}
		hosts[node] = h
	}
	return hosts, nil
}

func makeHost(dir, node string, gpus int) (*fakeHost, error) {
	h := &fakeHost{dir: dir, root: filepath.Join(dir, "host")}
	var err error
	if h.gpus, err = fakes.Create(dir); err != nil {
		return nil, err
	}
	if err := version(h.gpus.Lib()); err != nil {
		return nil, err
	}
	state := []string{"gpus", strconv.Itoa(gpus)}
	for i := range gpus {
		state = append(state, fmt.Sprintf("gpu.%d.uuid", i), driverUUID(node, i))
	}
	if err := h.gpus.Set(state...); err != nil {
		return nil, err
	}
	tree, err := hosttest.Create(h.root, fakes.DefaultDriver, gpus)
	if err != nil {
		return nil, err
	}
	return h, tree.Reboot(kwok.BootID(node))
}

// version makes the libraries what a driver's installer leaves: the names that
// the loader asks for are links to files with the driver's version.
func version(lib string) error {
	for _, name := range []string{fakes.NVML, fakes.CUDA} {
		file := strings.TrimSuffix(name, "1") + fakes.DefaultDriver
		if err := os.Rename(filepath.Join(lib, name), filepath.Join(lib, file)); err != nil {
			return err
		}
		if err := os.Symlink(file, filepath.Join(lib, name)); err != nil {
			return err
		}
	}
	return nil
}

// driverUUID is the double's UUID as a driver writes it: Kubernetes names are
// lower case, the driver's prefix is not.
func driverUUID(node string, index int) string {
	return "GPU-" + strings.TrimPrefix(tensorfusion.DeviceUUID(node, index), "gpu-")
}

// rootVariable tells the agent where the host's tree is mounted. It is written
// out because the agent's packages need cgo and this module must not.
const rootVariable = "REFIT_HOST_ROOT"

// env leads an agent to the host.
func (h *fakeHost) env() []string {
	return append(h.gpus.Env(), rootVariable+"="+h.root)
}

// lostGPU is the GPU that a broken host loses; the driver says so in every
// call for it.
const lostGPU = "gpu.0.lost"

func (h *fakeHost) setBroken(broken bool) error {
	value := ""
	if broken {
		value = "getter"
	}
	return h.gpus.Set(lostGPU, value)
}
