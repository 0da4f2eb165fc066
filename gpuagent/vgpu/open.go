package vgpu

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// scan lists the files of /dev/vfio that processes of the host have open, and
// reports whether some of them could not be looked at.
func (t *tree) scan() (blind bool) {
	t.open = map[string]bool{}
	list, err := os.ReadDir(t.path("proc"))
	if err != nil {
		return true
	}
	for _, p := range list {
		if _, err := strconv.Atoi(p.Name()); err != nil {
			continue
		}
		dir := t.path("proc", p.Name(), "fd")
		files, err := os.ReadDir(dir)
		if err != nil {
			blind = blind || !os.IsNotExist(err) // it has ended meanwhile
			continue
		}
		for _, f := range files {
			if target, err := os.Readlink(filepath.Join(dir, f.Name())); err == nil && strings.HasPrefix(target, "/dev/vfio/") {
				t.open[target] = true
			}
		}
	}
	return blind
}

// inUse reports whether the device at the sysfs directory is open: by its
// IOMMU group, or by its own character device.
func (t *tree) inUse(dir string) bool {
	if group, err := os.Readlink(filepath.Join(dir, "iommu_group")); err == nil && t.open["/dev/vfio/"+filepath.Base(group)] {
		return true
	}
	own, _ := os.ReadDir(filepath.Join(dir, "vfio-dev"))
	for _, d := range own {
		if t.open["/dev/vfio/devices/"+d.Name()] {
			return true
		}
	}
	return false
}
