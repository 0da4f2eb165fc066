package fakes

import (
	"bytes"
	"crypto/sha256"
	"debug/elf"
	"embed"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
)

//go:embed csrc
var sources embed.FS

// The names by which the loader asks for the libraries.
const (
	NVML    = "libnvidia-ml.so.1"
	CUDA    = "libcuda.so.1"
	Limiter = "librefit-fake-limiter.so"
)

// DefaultDriver is the driver version that the libraries carry.
const DefaultDriver = "580.95.05"

// ErrNoCompiler says that this machine cannot build the libraries.
var ErrNoCompiler = errors.New("no C compiler (cc or gcc) in PATH: install one, the fake driver libraries are built from C")

// Option changes what is built.
type Option func(*options)

type options struct {
	driver  string
	without []string
}

// Driver gives the libraries another driver version, as an upgrade does.
func Driver(version string) Option { return func(o *options) { o.driver = version } }

// Without leaves functions out, as an older driver does.
func Without(symbols ...string) Option {
	return func(o *options) { o.without = append(o.without, symbols...) }
}

// compiler finds the C compiler.
func compiler() (string, error) {
	for _, name := range []string{"cc", "gcc"} {
		if path, err := exec.LookPath(name); err == nil {
			return path, nil
		}
	}
	return "", ErrNoCompiler
}

// Build puts the three libraries into dir, replacing those there by rename: a
// process that has one mapped keeps the old copy, as with a driver upgrade.
func Build(dir string, opts ...Option) error {
	o := options{driver: DefaultDriver}
	for _, opt := range opts {
		opt(&o)
	}
	kept, err := compiled()
	if err != nil {
		return err
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	left := map[string]bool{}
	for _, symbol := range o.without {
		left[symbol] = true
	}
	for _, lib := range []string{NVML, CUDA, Limiter} {
		image, err := os.ReadFile(filepath.Join(kept, lib))
		if err != nil {
			return err
		}
		if err := o.patch(lib, image, left); err != nil {
			return err
		}
		if err := replace(image, filepath.Join(dir, lib)); err != nil {
			return err
		}
	}
	if len(left) > 0 {
		return fmt.Errorf("the fake libraries have no functions %q to leave out", slices.Sorted(maps.Keys(left)))
	}
	return nil
}

// The mark of the driver version in a library, and the room after it.
const (
	driverMark = "REFIT-FAKE-DRIVER:"
	driverRoom = 64 - len(driverMark)
)

// Is reports whether a library is one of these, so that no proof on them is
// taken for one on hardware.
func Is(path string) (bool, error) {
	image, err := os.ReadFile(path)
	return bytes.Contains(image, []byte(driverMark)), err
}

// patch writes the driver's version into a library and takes functions out of
// its symbol table: with another name the loader's look-up misses them.
func (o options) patch(lib string, image []byte, left map[string]bool) error {
	if lib != Limiter {
		at := bytes.Index(image, []byte(driverMark))
		if at < 0 || len(o.driver) >= driverRoom {
			return fmt.Errorf("driver version %q does not fit the fake %s", o.driver, lib)
		}
		version := image[at+len(driverMark):][:driverRoom]
		clear(version)
		copy(version, o.driver)
	}
	file, err := elf.NewFile(bytes.NewReader(image))
	if err != nil {
		return fmt.Errorf("read the fake %s: %w", lib, err)
	}
	defer file.Close()
	names := file.Section(".dynstr")
	if names == nil {
		return fmt.Errorf("the fake %s has no dynamic symbols", lib)
	}
	table := image[names.Offset:][:names.Size]
	for _, symbol := range o.without {
		if at := bytes.Index(table, []byte("\x00"+symbol+"\x00")); at >= 0 {
			table[at+1] = '-'
			delete(left, symbol)
		}
	}
	return nil
}

// compiled is the folder of the libraries as compiled, named by their sources
// and compiler, so that the tests of several packages compile them once.
func compiled() (string, error) {
	cc, err := compiler()
	if err != nil {
		return "", err
	}
	h := sha256.New()
	fmt.Fprint(h, cc)
	err = fs.WalkDir(sources, ".", func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		b, err := sources.ReadFile(path)
		fmt.Fprintf(h, "%s %d ", path, len(b))
		h.Write(b)
		return err
	})
	if err != nil {
		return "", err
	}
	root, err := os.UserCacheDir()
	if err != nil {
		root = os.TempDir()
	}
	dir := filepath.Join(root, "refit", "fakes", hex.EncodeToString(h.Sum(nil))[:24])
	if _, err := os.Stat(dir); err == nil {
		return dir, nil
	}
	if err := os.MkdirAll(filepath.Dir(dir), 0o755); err != nil {
		return "", err
	}
	tmp, err := os.MkdirTemp(filepath.Dir(dir), "build")
	if err != nil {
		return "", err
	}
	defer os.RemoveAll(tmp)
	if err := compile(cc, tmp); err != nil {
		return "", err
	}
	// Another process may have been faster; its libraries are the same.
	if err := os.Rename(tmp, dir); err != nil {
		if _, stat := os.Stat(dir); stat != nil {
			return "", err
		}
	}
	return dir, nil
}

// compile builds the libraries into dir.
func compile(cc, dir string) error {
	if err := os.CopyFS(dir, sources); err != nil {
		return err
	}
	src := filepath.Join(dir, "csrc")
	for lib, folders := range map[string][]string{NVML: {"nvml", "shared"}, CUDA: {"cuda", "shared"}, Limiter: {"limiter"}} {
		args := []string{"-O1", "-fPIC", "-shared", "-Wall", "-Wextra", "-fvisibility=hidden",
			"-I" + filepath.Join(src, "shared"), "-Wl,-soname," + lib, "-o", filepath.Join(dir, lib)}
		for _, folder := range folders {
			files, err := filepath.Glob(filepath.Join(src, folder, "*.c"))
			if err != nil {
				return err
			}
			args = append(args, files...)
		}
		if text, err := exec.Command(cc, append(args, "-lpthread", "-ldl")...).CombinedOutput(); err != nil {
			return fmt.Errorf("build the fake %s: %w: %s", lib, err, text)
		}
	}
	return nil
}

func replace(image []byte, to string) error {
	draft, err := os.CreateTemp(filepath.Dir(to), ".lib")
	if err != nil {
		return err
	}
	defer os.Remove(draft.Name())
	if _, err := draft.Write(image); err != nil {
		draft.Close()
		return err
	}
	if err := errors.Join(draft.Chmod(0o755), draft.Close()); err != nil {
		return err
	}
	return os.Rename(draft.Name(), to)
}
