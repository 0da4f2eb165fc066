package host

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// hypervisorName is what the kernel calls the hypervisor's process.
const hypervisorName = "hypervisor"

// Process is a process as the kernel shows its rights.
type Process struct {
	PID int `json:"pid"`
	// UID is the effective one.
	UID int `json:"uid"`
	// Lacks are the capabilities that the host's first process has and this one
	// does not, as bits: a privileged container lacks none.
	Lacks uint64 `json:"lacks,omitempty"`
}

// hypervisorProcess is the hypervisor that runs here, that with the fewest
// rights of several; nil where none is seen.
func (h Host) hypervisorProcess() *Process {
	_, all, known := h.rights("1")
	if !known {
		return nil
	}
	names, _ := filepath.Glob(h.path("proc/[0-9]*/comm"))
	var found *Process
	for _, name := range names {
		pid := filepath.Base(filepath.Dir(name))
		number, err := strconv.Atoi(pid)
		if err != nil || h.line("proc", pid, "comm") != hypervisorName {
			continue
		}
		uid, has, known := h.rights(pid)
		if !known {
			continue
		}
		p := &Process{PID: number, UID: uid, Lacks: all &^ has}
		if found == nil || p.UID != 0 || p.Lacks != 0 {
			found = p
		}
	}
	return found
}

// rights are the effective user and capabilities of a process.
func (h Host) rights(pid string) (uid int, capabilities uint64, known bool) {
	b, err := os.ReadFile(h.path("proc", pid, "status"))
	if err != nil {
		return 0, 0, false
	}
	fields := 0
	for line := range strings.Lines(string(b)) {
		words := strings.Fields(line)
		switch {
		case len(words) > 2 && words[0] == "Uid:":
			uid, err = strconv.Atoi(words[2])
		case len(words) > 1 && words[0] == "CapEff:":
			capabilities, err = strconv.ParseUint(words[1], 16, 64)
		default:
			continue
		}
		if err != nil {
			return 0, 0, false
		}
		fields++
	}
	return uid, capabilities, fields == 2
}
