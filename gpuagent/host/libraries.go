package host

import (
	"bytes"
	"encoding/binary"
	"os"
	"path/filepath"
	"strings"
)

// Library is a user-space driver library as the files of the host have it for
// their loader. In a container that is not what a child of the agent loads.
type Library struct {
	Name string `json:"name"`
	Path string `json:"path,omitempty"` // empty: not found
	// Version is from the file that the name links to; empty when that file
	// carries none.
	Version string `json:"version,omitempty"`
}

var driverLibraries = []string{"libcuda.so.1", "libnvidia-ml.so.1"}

// standardDirs is where the loader looks last.
var standardDirs = []string{"/lib64", "/usr/lib64", "/lib/x86_64-linux-gnu", "/usr/lib/x86_64-linux-gnu",
	"/lib/aarch64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/lib", "/usr/lib"}

// libraries finds each by the loader's order: LD_LIBRARY_PATH, the loader's
// cache, the standard directories. The variable is this process's, so it speaks
// for the host only where this process sees the host's own root.
func (h Host) libraries() []Library {
	cache := h.loaderCache()
	var found []Library
	for _, name := range driverLibraries {
		l := Library{Name: name}
		var candidates []string
		for dir := range strings.SplitSeq(os.Getenv("LD_LIBRARY_PATH"), ":") {
			if filepath.IsAbs(dir) && h.Root == "/" {
				candidates = append(candidates, filepath.Join(dir, name))
			}
		}
		if path, ok := cache[name]; ok {
			candidates = append(candidates, h.path(path))
		}
		for _, dir := range standardDirs {
			candidates = append(candidates, h.path(dir, name))
		}
		for _, path := range candidates {
			if real, err := filepath.EvalSymlinks(path); err == nil {
				l.Path, l.Version = path, LibraryVersion(real)
				break
			}
		}
		found = append(found, l)
	}
	return found
}

// LibraryVersion is the driver's version in the name of a library's file, like
// libcuda.so.580.95.05; empty where it carries none.
func LibraryVersion(file string) string {
	// The kernel marks a mapped file that has been replaced.
	name, _, _ := strings.Cut(filepath.Base(file), " ")
	if _, version, ok := strings.Cut(name, ".so."); ok && strings.Contains(version, ".") {
		return version
	}
	return ""
}

// The layout of /etc/ld.so.cache in its present format: a header of 48 bytes
// with the number of entries at 20, then entries of 24 bytes with the offsets
// of name and path at 4 and 8.
const (
	cacheMagic    = "glibc-ld.so.cache1.1"
	cacheHeader   = 48
	cacheEntry    = 24
	cacheCountAt  = 20
	cacheNameAt   = 4
	cachePathAt   = 8
	cacheMostSane = 1 << 20
)

// loaderCache maps library name to path; the first entry of a name is the one
// that the loader prefers. Without a readable cache it is empty.
func (h Host) loaderCache() map[string]string {
	b, err := os.ReadFile(h.path("etc/ld.so.cache"))
	if err != nil {
		return nil
	}
	// Older files carry the present format behind another one.
	at := bytes.Index(b, []byte(cacheMagic))
	if at < 0 || len(b) < at+cacheHeader {
		return nil
	}
	b = b[at:]
	count := int(binary.LittleEndian.Uint32(b[cacheCountAt:]))
	if count > cacheMostSane || len(b) < cacheHeader+count*cacheEntry {
		return nil
	}
	text := func(offset uint32) string {
		if int(offset) >= len(b) {
			return ""
		}
		s, _, _ := bytes.Cut(b[offset:], []byte{0})
		return string(s)
	}
	found := map[string]string{}
	for i := range count {
		e := b[cacheHeader+i*cacheEntry:]
		name := text(binary.LittleEndian.Uint32(e[cacheNameAt:]))
		if _, ok := found[name]; !ok {
			found[name] = text(binary.LittleEndian.Uint32(e[cachePathAt:]))
		}
	}
	return found
}
