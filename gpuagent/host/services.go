package host

import (
	"context"
	"os"
	"strings"
	"time"

	"github.com/refit-run/refit/gpuagent/child"
)

// versioned are the services whose version must be the driver's, with the name
// of the program that tells it.
var versioned = map[string]string{"nvidia-fabricmanager": "nv-fabricmanager", "nvidia-imex": "nvidia-imex"}

// Versioned reports whether a service must have the driver's version.
func Versioned(service string) bool { return versioned[unit(service)] != "" }

func unit(service string) string { return strings.TrimSuffix(service, ".service") }

// services looks for processes in the units' control groups: that needs
// neither systemd's bus nor its programs.
func (h Host) services(names []string) []Service {
	slice := ""
	for _, dir := range []string{"sys/fs/cgroup/system.slice", "sys/fs/cgroup/systemd/system.slice"} {
		if _, err := os.Stat(h.path(dir)); err == nil {
			slice = dir
			break
		}
	}
	var services []Service
	for _, name := range names {
		s := Service{Name: name, Visible: slice != ""}
		if s.Visible {
			procs, _ := os.ReadFile(h.path(slice, unit(name)+".service", "cgroup.procs"))
			running := strings.Fields(string(procs))
			s.Active = len(running) > 0
			s.Version = h.running(running, versioned[unit(name)])
		}
		services = append(services, s)
	}
	return services
}

// versionLimit bounds a program that only prints its version.
const versionLimit = 5 * time.Second

// nameLength is how much of a program's name the kernel keeps.
const nameLength = 15

// running asks the program among the processes for its version. It is the
// image that runs, not the file of that name: an upgraded package whose service
// was not restarted has another.
func (h Host) running(pids []string, program string) string {
	for _, pid := range pids {
		if program == "" || h.line("proc", pid, "comm") != program[:min(len(program), nameLength)] {
			continue
		}
		out, err := child.Tool(context.Background(), versionLimit, h.path("proc", pid, "exe"), "--version")
		if err != nil {
			return ""
		}
		return versionIn(out)
	}
	return ""
}
