package host

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Places of TensorFusion on a host.
const (
	runDir       = "run/tensor-fusion"
	shmDir       = runDir + "/shm"
	toolkitReady = "run/nvidia/validations/toolkit-ready"
	transport    = "dev/shm/tf_shm"
	acceleratorL = "libaccelerator_nvidia.so"
)

// hypervisorPatience: the hypervisor answers from memory.
const hypervisorPatience = 5 * time.Second

// TensorFusionOptions say where the hypervisor listens and which provider
// library it loads.
type TensorFusionOptions struct {
	Port        int
	Accelerator string
}

// TensorFusion is the state of a host that runs its hypervisor.
type TensorFusion struct {
	// Toolkit is when the toolkit-ready file was written, zero without one.
	Toolkit time.Time `json:"toolkit,omitzero"`
	Run     bool      `json:"run"`
	// Accelerator is the path of the provider library that was found.
	Accelerator string `json:"accelerator,omitempty"`
	Shm         Mount  `json:"shm"`
	// Pods are the shared-memory directories, as namespace/pod, with the layout
	// of the state in them: 1 or 2, or 0 for one that is not known.
	Pods       []PodState `json:"pods,omitempty"`
	Hypervisor Hypervisor `json:"hypervisor"`
	// Process is the hypervisor's, nil where none is seen.
	Process *Process `json:"process,omitempty"`
	// Transport is the segment by which workers and clients of one host talk.
	Transport Segment `json:"transport"`
	// Kubelet tells which of its socket directories are reachable.
	Kubelet map[string]bool `json:"kubelet"`
}

// Segment is a file of shared memory.
type Segment struct {
	Exists bool `json:"exists"`
	// Regular: it is a plain file, which a process can map.
	Regular bool `json:"regular,omitempty"`
}

// Mount is a mounted file system.
type Mount struct {
	Mounted bool   `json:"mounted"`
	Type    string `json:"type,omitempty"`
	// Options are those of the mount and of the file system together.
	Options []string `json:"options,omitempty"`
	// SizeKiB is the declared size, Mode the permission bits of the root.
	SizeKiB uint64 `json:"sizeKiB,omitempty"`
	Mode    uint32 `json:"mode,omitempty"`
	FreeKiB uint64 `json:"freeKiB,omitempty"`
}

// PodState is the shared memory of one client pod.
type PodState struct {
	Pod    string `json:"pod"`
	Layout int    `json:"layout,omitempty"`
}

// Hypervisor is its own answer; UUIDs are lower case.
type Hypervisor struct {
	Error string   `json:"error,omitempty"`
	UUIDs []string `json:"uuids,omitempty"`
}

func (h Host) tensorFusion(o TensorFusionOptions) *TensorFusion {
	t := &TensorFusion{Shm: h.mount("/" + shmDir), Kubelet: map[string]bool{}, Hypervisor: hypervisor(o.Port)}
	if info, err := os.Stat(h.path(toolkitReady)); err == nil {
		t.Toolkit = info.ModTime()
	}
	_, err := os.Stat(h.path(runDir))
	t.Run = err == nil
	t.Process, t.Transport = h.hypervisorProcess(), h.segment(transport)
	t.Accelerator = h.accelerator(o.Accelerator)
	t.Pods = h.podStates()
	for _, dir := range []string{"device-plugins", "pod-resources"} {
		_, err := os.Stat(h.path("var/lib/kubelet", dir))
		t.Kubelet[dir] = err == nil
	}
	return t
}

func (h Host) segment(at string) Segment {
	info, err := os.Lstat(h.path(at))
	return Segment{Exists: err == nil, Regular: err == nil && info.Mode().IsRegular()}
}

func (h Host) accelerator(declared string) string {
	if declared != "" {
		if _, err := os.Stat(h.path(declared)); err == nil {
			return declared
		}
		return ""
	}
	found := ""
	_ = filepath.WalkDir(h.path(runDir), func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return nil //nolint:nilerr // an unreadable directory holds no library for us
		}
		if d.IsDir() && path == h.path(shmDir) {
			return filepath.SkipDir
		}
		if d.Name() == acceleratorL {
			found = strings.TrimPrefix(path, strings.TrimSuffix(h.Root, "/"))
			return filepath.SkipAll
		}
		return nil
	})
	return found
}

// podStates reads the discriminant of each pod's shared state: 0 is the first
// layout, 1 the second.
func (h Host) podStates() []PodState {
	files, _ := filepath.Glob(h.path(shmDir, "*", "*", "shm"))
	var pods []PodState
	for _, file := range files {
		pod := filepath.Dir(file)
		s := PodState{Pod: filepath.Base(filepath.Dir(pod)) + "/" + filepath.Base(pod)}
		head := make([]byte, 4)
		if f, err := os.Open(file); err == nil {
			if _, err := io.ReadFull(f, head); err == nil {
				if d := binary.LittleEndian.Uint32(head); d <= 1 {
					s.Layout = int(d) + 1
				}
			}
			f.Close()
		}
		pods = append(pods, s)
	}
	return pods
}

// mount reads what is mounted at a path of the host, from the view of its
// first process where that may be read.
func (h Host) mount(at string) Mount {
	b, err := os.ReadFile(h.path("proc/1/mountinfo"))
	if err != nil {
		b, _ = os.ReadFile(h.path("proc/self/mountinfo"))
	}
	var m Mount
	for line := range strings.Lines(string(b)) {
		// 36 35 98:0 /root /at opts shared:1 - type source superoptions
		mount, super, ok := strings.Cut(strings.TrimSpace(line), " - ")
		fields, rest := strings.Fields(mount), strings.Fields(super)
		if !ok || len(fields) < 6 || len(rest) < 3 || fields[4] != at {
			continue
		}
		m = Mount{Mounted: true, Type: rest[0]}
		for o := range strings.SplitSeq(fields[5]+","+rest[2], ",") {
			if !slices.Contains(m.Options, o) {
				m.Options = append(m.Options, o)
			}
			if size, ok := strings.CutPrefix(o, "size="); ok {
				m.SizeKiB = kibibytes(size)
			}
		}
	}
	if info, err := os.Stat(h.path(at)); err == nil && m.Mounted {
		m.Mode = uint32(info.Mode().Perm())
		var st unix.Statfs_t
		if unix.Statfs(h.path(at), &st) == nil {
			m.FreeKiB = st.Bavail * uint64(st.Bsize) >> 10
		}
	}
	return m
}

func kibibytes(s string) uint64 {
	unit := uint64(1)
	switch {
	case strings.HasSuffix(s, "k"):
		s = strings.TrimSuffix(s, "k")
	case strings.HasSuffix(s, "m"):
		s, unit = strings.TrimSuffix(s, "m"), 1<<10
	case strings.HasSuffix(s, "g"):
		s, unit = strings.TrimSuffix(s, "g"), 1<<20
	}
	n, err := strconv.ParseUint(s, 10, 64)
	if err != nil {
		return 0
	}
	return n * unit
}

// hypervisor asks for readiness and devices. Its readiness says only that its
// controllers are set; the list is what counts.
func hypervisor(port int) Hypervisor {
	base := "http://" + net.JoinHostPort("127.0.0.1", strconv.Itoa(port))
	client := &http.Client{Timeout: hypervisorPatience, Transport: &http.Transport{DisableKeepAlives: true}}
	if _, err := get(client, base+"/readyz"); err != nil {
		return Hypervisor{Error: err.Error()}
	}
	body, err := get(client, base+"/api/v1/devices")
	if err != nil {
		return Hypervisor{Error: err.Error()}
	}
	type device struct{ UUID string }
	var list []device
	if json.Unmarshal(body, &list) != nil {
		var wrapped struct{ Devices, Data []device }
		if err := json.Unmarshal(body, &wrapped); err != nil {
			return Hypervisor{Error: "its device list is no JSON that is known: " + err.Error()}
		}
		list = append(wrapped.Devices, wrapped.Data...)
	}
	var out Hypervisor
	for _, d := range list {
		out.UUIDs = append(out.UUIDs, strings.ToLower(d.UUID))
	}
	slices.Sort(out.UUIDs)
	return out
}

// answerLimit bounds a device list: a host has at most some hundred devices.
const answerLimit = 1 << 20

func get(client *http.Client, url string) ([]byte, error) {
	res, err := client.Get(url)
	if err != nil {
		return nil, err
	}
	defer res.Body.Close()
	body, err := io.ReadAll(io.LimitReader(res.Body, answerLimit))
	if err != nil {
		return nil, fmt.Errorf("GET %s: %w", url, err)
	}
	if res.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("GET %s: expected status 200, found %d", url, res.StatusCode)
	}
	return body, nil
}
