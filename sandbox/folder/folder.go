// Package folder lays out the one folder in which a sandbox keeps everything
// it writes: its options, ports, lock, certificates, databases and logs. It
// knows where things are and must not know what runs there.
package folder

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"time"

	"golang.org/x/sys/unix"
)

// HomeVariable names the folder that holds sandboxes when --dir is not given.
const HomeVariable = "REFIT_SANDBOX_HOME"

// DefaultHome holds the sandboxes of a working folder.
const DefaultHome = ".sandbox"

var validName = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]{0,38}[a-z0-9])?$`)

// Folder is the root of one sandbox.
type Folder struct {
	Root string
}

// Locate resolves the folder of the sandbox called name: dir itself when
// given, else <home>/<name>, where home is $REFIT_SANDBOX_HOME or ./.sandbox.
func Locate(name, dir string) (Folder, error) {
	if !validName.MatchString(name) {
		return Folder{}, fmt.Errorf("sandbox name %q: expected lower-case letters, digits and dashes, at most 40 characters", name)
	}
	if dir == "" {
		home := os.Getenv(HomeVariable)
		if home == "" {
			home = DefaultHome
		}
		dir = filepath.Join(home, name)
	}
	root, err := filepath.Abs(dir)
	if err != nil {
		return Folder{}, fmt.Errorf("sandbox folder %q: %w", dir, err)
	}
	return Folder{Root: root}, nil
}

// Path joins elements below the root.
func (f Folder) Path(elem ...string) string {
	return filepath.Join(append([]string{f.Root}, elem...)...)
}

// Exists reports whether a sandbox was ever created here.
func (f Folder) Exists() bool {
	_, err := os.Stat(f.Path("state.json"))
	return err == nil
}

// Options are what the person asked for with `up`; a restarted daemon reads
// them back.
type Options struct {
	Name          string        `json:"name"`
	Cluster       string        `json:"cluster"`
	Pools         []Pool        `json:"pools"`
	Chart         string        `json:"chart"`
	TensorFusion  bool          `json:"tensorFusion"`
	GPUs          int           `json:"gpus"`
	ReadyAfter    time.Duration `json:"readyAfter"`
	ValidateTakes time.Duration `json:"validateTakes"`
	// Lease is how long the double's leader lease lasts; 0 is the controller's.
	Lease time.Duration `json:"lease,omitempty"`
	// Agents is the kind of the node agents, empty for simulated ones.
	Agents string `json:"agents,omitempty"`
	// Controller is the program of a real TensorFusion controller; empty for
	// the double.
	Controller string `json:"controller,omitempty"`
	// Datastores names the datastores to bring; they run on a node whose pods
	// are processes, which is there when there is one of them.
	Datastores []string `json:"datastores,omitempty"`
	// CassandraMembers is how many members Cassandra begins with.
	CassandraMembers int `json:"cassandraMembers,omitempty"`
}

// Kinds of node agents.
const (
	SimulatedAgents = "simulated"
	RealAgents      = "real"
)

// RealAgents says whether the nodes have the product's own agent.
func (o Options) RealAgents() bool { return o.Agents == RealAgents }

// AgentKind names the kind of the node agents.
func (o Options) AgentKind() string {
	if o.RealAgents() {
		return RealAgents
	}
	return SimulatedAgents
}

// Nodes is the number of GPU nodes over all pools.
func (o Options) Nodes() int {
	n := 0
	for _, p := range o.Pools {
		n += p.Nodes
	}
	return n
}

// Pool is a set of GPU nodes with the same pool label.
type Pool struct {
	Name  string `json:"name"`
	Nodes int    `json:"nodes"`
}

// State is what the folder remembers between starts.
type State struct {
	Options Options `json:"options"`
	Ports   Ports   `json:"ports"`
	// Socket is the control API's; it lies outside the folder when the
	// folder's path is too long for a unix socket.
	Socket string `json:"socket"`
	// Complete is set once everything was installed, so that a restarted
	// daemon does not install the release again.
	Complete bool `json:"complete"`
}

// Load reads the state; a folder without one gives os.ErrNotExist.
func (f Folder) Load() (State, error) {
	var s State
	data, err := os.ReadFile(f.Path("state.json"))
	if err != nil {
		return s, err
	}
	if err := json.Unmarshal(data, &s); err != nil {
		return s, fmt.Errorf("sandbox state %s: %w; run `refit-sandbox down` and start again", f.Path("state.json"), err)
	}
	return s, nil
}

// Save replaces the state atomically.
func (f Folder) Save(s State) error {
	data, err := json.MarshalIndent(s, "", "  ")
	if err != nil {
		return err
	}
	return WriteFile(f.Path("state.json"), append(data, '\n'), 0o600)
}

// WriteFile replaces path atomically: a reader sees the old or the new file.
func WriteFile(path string, data []byte, mode os.FileMode) error {
	next := path + ".next"
	if err := os.WriteFile(next, data, mode); err != nil {
		return err
	}
	return os.Rename(next, path)
}

// ErrRunning says that a live daemon holds the folder.
var ErrRunning = errors.New("the sandbox is running")

// Lock is held by the daemon for its whole life. The kernel releases it when
// the process dies, however it dies.
type Lock struct {
	file *os.File
}

// TryLock takes the lock or returns ErrRunning.
func (f Folder) TryLock() (*Lock, error) {
	return f.lock(unix.LOCK_EX | unix.LOCK_NB)
}

// WaitLock blocks until the daemon is gone.
func (f Folder) WaitLock() (*Lock, error) {
	return f.lock(unix.LOCK_EX)
}

func (f Folder) lock(how int) (*Lock, error) {
	file, err := os.OpenFile(f.Path("lock"), os.O_CREATE|os.O_RDWR|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return nil, fmt.Errorf("sandbox lock: %w", err)
	}
	for {
		err = unix.Flock(int(file.Fd()), how)
		if !errors.Is(err, unix.EINTR) {
			break
		}
	}
	if err != nil {
		_ = file.Close()
		if errors.Is(err, unix.EWOULDBLOCK) {
			return nil, ErrRunning
		}
		return nil, fmt.Errorf("sandbox lock %s: %w", f.Path("lock"), err)
	}
	return &Lock{file: file}, nil
}

// RecordPID writes the holder's process id into the lock file for `down`.
func (l *Lock) RecordPID() error {
	if err := l.file.Truncate(0); err != nil {
		return err
	}
	_, err := l.file.WriteAt(fmt.Appendf(nil, "%d\n", os.Getpid()), 0)
	return err
}

// Release gives the lock up.
func (l *Lock) Release() { _ = l.file.Close() }

// HolderPID reads the process id of the lock's last holder; 0 when none.
func (f Folder) HolderPID() int {
	data, err := os.ReadFile(f.Path("lock"))
	if err != nil {
		return 0
	}
	var pid int
	if _, err := fmt.Sscanf(string(data), "%d", &pid); err != nil {
		return 0
	}
	return pid
}
