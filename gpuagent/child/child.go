// Package child runs a function of this binary in a short-lived process of its
// own, with a deadline. Every NVML and CUDA call goes through it: a driver
// library can end its process (a missing symbol is exit 127), crash it or hang
// in the kernel, and a process that once mapped the library never sees a
// replaced one. The child dies with its parent, maps the library that is on
// disk now, and keeps /dev/nvidia* out of the agent, where an open file would
// block a module unload, a reset or a change of MIG mode.
//
// Programs that are not ours (a GPU reset, sriov-manage) run by the same rules.
//
// A package registers its functions in init; main (and a TestMain) calls Main
// before anything else; Run starts one child and waits for its reply.
package child

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime/debug"
	"sync"
	"syscall"
	"time"
)

// argument makes the binary a child: `<binary> child NAME`.
const argument = "child"

// replyFD is where the child writes its reply, stopFD a pipe whose end asks it
// to reply early; request and log are its standard input and error.
const (
	replyFD = 3
	stopFD  = 4
)

// ProcessName is what the kernel calls a child, in its log too: an Xid line
// names the process that raised it. It has the greatest length of such a name.
const ProcessName = "refit-gpu-child"

// Func is what runs in the child. Its context ends at the deadline, or when
// the parent asks for the reply early (Spec.Stop).
type Func func(ctx context.Context, request json.RawMessage) (any, error)

var (
	registryMu sync.Mutex
	registry   = map[string]Func{}
)

// Register makes fn callable by name in a child; it belongs in an init.
func Register(name string, fn Func) {
	registryMu.Lock()
	defer registryMu.Unlock()
	if registry[name] != nil {
		panic("child: " + name + " is registered twice")
	}
	registry[name] = fn
}

// envelope is the request as the child reads it, reply what it answers.
type envelope struct {
	Timeout time.Duration   `json:"timeout"`
	Stop    bool            `json:"stop,omitempty"` // there is a stopFD
	Request json.RawMessage `json:"request"`
}

type reply struct {
	Value json.RawMessage `json:"value,omitempty"`
	Error *string         `json:"error,omitempty"`
}

// Main runs the registered function and reports true when this process was
// started as a child; main returns at once then.
func Main() (handled bool) {
	if len(os.Args) != 3 || os.Args[1] != argument {
		return false
	}
	// The library may crash this process: say so without a core file, which
	// for a GPU process can be as large as the memory it maps.
	_ = syscall.Setrlimit(syscall.RLIMIT_CORE, &syscall.Rlimit{})
	debug.SetTraceback("single")
	nameThreads()
	if err := serve(os.Args[2]); err != nil {
		fmt.Fprintln(os.Stderr, "child:", err)
		os.Exit(1)
	}
	return true
}

// nameThreads names the threads that exist; later ones inherit it. A name that
// cannot be set is only missing in the kernel's log.
func nameThreads() {
	threads, _ := filepath.Glob("/proc/self/task/*/comm")
	for _, t := range threads {
		_ = os.WriteFile(t, []byte(ProcessName), 0)
	}
}

func serve(name string) error {
	registryMu.Lock()
	fn := registry[name]
	registryMu.Unlock()
	if fn == nil {
		return fmt.Errorf("no function %q is registered in this binary: agent and child differ", name)
	}
	var in envelope
	if err := json.NewDecoder(os.Stdin).Decode(&in); err != nil {
		return fmt.Errorf("read the request of %s: %w", name, err)
	}
	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	if in.Stop {
		go func() {
			_, _ = io.Copy(io.Discard, os.NewFile(stopFD, "stop"))
			stop()
		}()
	}
	if in.Timeout > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, in.Timeout)
		defer cancel()
	}
	var out reply
	value, err := fn(ctx, in.Request)
	if err == nil {
		out.Value, err = json.Marshal(value)
	}
	if err != nil {
		text := err.Error()
		out.Error = &text
	}
	file := os.NewFile(replyFD, "reply")
	if err := json.NewEncoder(file).Encode(out); err != nil {
		return fmt.Errorf("write the reply of %s: %w", name, err)
	}
	return file.Close()
}

// Stage announces on the child's log what is about to be called, so that a
// hang is located: the typed errors carry the last one.
func Stage(format string, args ...any) {
	fmt.Fprintf(os.Stderr, stagePrefix+format+"\n", args...)
}

const stagePrefix = "stage "
