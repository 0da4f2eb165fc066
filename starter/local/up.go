package local

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"filippo.io/age"
)

// Options of `refit up`.
type Options struct {
	Getenv func(string) string
	// Environ is the environment the processes inherit.
	Environ []string
	// Beside is the folder of our own binary: its neighbours come first.
	Beside       string
	Port, UIPort int
	// Clusters are NAME=KUBECONFIG#CONTEXT. None keeps what a running worker
	// has.
	Clusters []string
	// Recipients are age public keys for secret artifacts.
	Recipients []string
	// Ready prepares a server that answers at the address: search
	// attributes, retention. It is called again until it succeeds.
	Ready func(ctx context.Context, address string) error
	// Polls tells whether the worker with that pid polls for workflows.
	Polls func(ctx context.Context, address string, pid int) (bool, error)
	// Say tells what is done.
	Say func(format string, args ...any)
}

const (
	// serverLimit is generous: the server answers in about a second, but a
	// first start on a slow disk creates its database.
	serverLimit = 60 * time.Second
	// workerLimit is how long a worker may take from its start to its first
	// poll.
	workerLimit = 30 * time.Second
	// stopLimit lets the worker end its activities and the server its writes.
	stopLimit = 30 * time.Second
)

// Up starts what does not run yet and returns how it stands. Doing it again
// is harmless; other clusters restart the worker, whose runs go on.
func Up(ctx context.Context, o Options) (State, error) {
	s, err := Read(o.Getenv)
	if err != nil {
		return s, err
	}
	release, err := s.lock()
	if err != nil {
		return s, err
	}
	defer release()
	// What was recorded may have changed before the lock was ours.
	if s, err = Read(o.Getenv); err != nil {
		return s, err
	}
	temporal, err := find("temporal", o.Beside, "`make build` makes it, or install the Temporal CLI")
	if err != nil {
		return s, err
	}
	worker, err := find("refit-worker", o.Beside, "`make build` makes it")
	if err != nil {
		return s, err
	}
	clusters, err := clusterMap(o.Clusters)
	if err != nil {
		return s, err
	}
	if err := s.serve(ctx, o, temporal); err != nil {
		return s, err
	}
	if err := s.work(ctx, o, worker, clusters); err != nil {
		return s, err
	}
	return s, nil
}

func (s *State) serve(ctx context.Context, o Options, program string) error {
	if s.Running() {
		o.Say("Temporal runs already (pid %d) at %s", s.Server.Pid, s.Address)
		return o.Ready(ctx, s.Address)
	}
	for _, port := range []struct {
		number int
		flag   string
	}{{o.Port, "--port"}, {o.UIPort, "--ui-port"}} {
		if err := free(port.number, port.flag); err != nil {
			return err
		}
	}
	s.Address = net.JoinHostPort("127.0.0.1", strconv.Itoa(o.Port))
	s.UI = "http://" + net.JoinHostPort("127.0.0.1", strconv.Itoa(o.UIPort))
	log := s.file("temporal.log")
	process, cmd, err := launch(program, []string{"server", "start-dev",
		"--ip", "127.0.0.1", "--port", strconv.Itoa(o.Port), "--ui-port", strconv.Itoa(o.UIPort),
		"--db-filename", s.file("temporal.db"), "--namespace", "default", "--log-level", "warn"}, o.Environ, log)
	if err != nil {
		return err
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	s.Server = process
	if err := s.write(); err != nil {
		return err
	}
	limited, cancel := context.WithTimeout(ctx, serverLimit)
	defer cancel()
	tick := time.NewTicker(lookEvery)
	defer tick.Stop()
	for {
		if err = o.Ready(limited, s.Address); err == nil {
			o.Say("Temporal started (pid %d) at %s, its data in %s", process.Pid, s.Address, s.file("temporal.db"))
			return nil
		}
		select {
		case exit := <-ended:
			return fmt.Errorf("Temporal ended at once (%v); the end of %s:\n%s", exit, log, lastLines(log, 10))
		case <-limited.Done():
			return fmt.Errorf("Temporal (pid %d) does not answer at %s: %w; see %s", process.Pid, s.Address, err, log)
		case <-tick.C:
		}
	}
}

func (s *State) work(ctx context.Context, o Options, program, clusters string) error {
	if s.Worker.alive() {
		if clusters == "" || clusters == s.Clusters {
			o.Say("the worker runs already (pid %d) for %s", s.Worker.Pid, names(s.Clusters))
			return nil
		}
		o.Say("restarting the worker for other clusters; its runs go on")
		if err := s.Worker.stop(ctx, "the worker", stopLimit); err != nil {
			return err
		}
	}
	if clusters == "" {
		clusters = s.Clusters
	}
	recipients, err := s.recipients(o)
	if err != nil {
		return err
	}
	artifacts := o.Getenv("REFIT_ARTIFACTS")
	if artifacts == "" {
		artifacts = "file://" + filepath.ToSlash(s.file("artifacts"))
	}
	// TLS, keys and profiles in the environment belong to another server.
	env := slices.DeleteFunc(slices.Clone(o.Environ), func(v string) bool { return strings.HasPrefix(v, "TEMPORAL_") })
	env = append(env, "TEMPORAL_ADDRESS="+s.Address, "TEMPORAL_NAMESPACE=default", "TEMPORAL_CONFIG_FILE="+os.DevNull,
		"REFIT_CLUSTERS="+clusters, "REFIT_ARTIFACTS="+artifacts, "REFIT_AGE_RECIPIENTS="+recipients)
	log := s.file("worker.log")
	process, cmd, err := launch(program, nil, env, log)
	if err != nil {
		return err
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	s.Worker, s.Clusters = process, clusters
	if err := s.write(); err != nil {
		return err
	}
	limited, cancel := context.WithTimeout(ctx, workerLimit)
	defer cancel()
	tick := time.NewTicker(lookEvery)
	defer tick.Stop()
	for {
		polls, err := o.Polls(limited, s.Address, process.Pid)
		if polls {
			break
		}
		select {
		case exit := <-ended:
			return fmt.Errorf("the worker ended at once (%v); the end of %s:\n%s", exit, log, lastLines(log, 10))
		case <-limited.Done():
			return fmt.Errorf("the worker (pid %d) runs but does not poll %s (%v); see %s", process.Pid, s.Address, err, log)
		case <-tick.C:
		}
	}
	o.Say("the worker started (pid %d) for %s", process.Pid, names(clusters))
	return nil
}

// recipients are the age keys given, or one of our own made on first use:
// without any, no run could store its backup.
func (s *State) recipients(o Options) (string, error) {
	if len(o.Recipients) > 0 {
		return strings.Join(o.Recipients, ","), nil
	}
	if given := o.Getenv("REFIT_AGE_RECIPIENTS"); given != "" {
		return given, nil
	}
	file := s.file("identity.txt")
	content, err := os.ReadFile(file)
	if errors.Is(err, os.ErrNotExist) {
		key, err := age.GenerateX25519Identity()
		if err != nil {
			return "", fmt.Errorf("make an age identity: %w", err)
		}
		content = []byte("# public key: " + key.Recipient().String() + "\n" + key.String() + "\n")
		if err := os.WriteFile(file, content, 0o600); err != nil {
			return "", fmt.Errorf("age identity: %w", err)
		}
		o.Say("made an age identity in %s: backups can be read with it alone, keep a copy elsewhere", file)
	} else if err != nil {
		return "", fmt.Errorf("age identity: %w", err)
	}
	identities, err := age.ParseIdentities(strings.NewReader(string(content)))
	if err != nil {
		return "", fmt.Errorf("age identity %s: %w", file, err)
	}
	s.Identity = file
	key, ok := identities[0].(*age.X25519Identity)
	if !ok {
		return "", fmt.Errorf("age identity %s: expected an X25519 key; give --recipient", file)
	}
	return key.Recipient().String(), nil
}

// Down stops the worker, then the server, so that the worker's last words
// are kept. Runs stay in the database and go on at the next Up.
func Down(ctx context.Context, getenv func(string) string, say func(string, ...any)) (State, error) {
	s, err := Read(getenv)
	if err != nil {
		return s, err
	}
	release, err := s.lock()
	if err != nil {
		return s, err
	}
	defer release()
	if s, err = Read(getenv); err != nil {
		return s, err
	}
	for _, p := range []struct {
		name    string
		process *Process
	}{{"the worker", &s.Worker}, {"Temporal", &s.Server}} {
		if !p.process.alive() {
			say("%s does not run", p.name)
			*p.process = Process{}
			continue
		}
		if err := p.process.stop(ctx, p.name, stopLimit); err != nil {
			return s, err
		}
		say("%s stopped (pid %d)", p.name, p.process.Pid)
		*p.process = Process{}
	}
	return s, s.write()
}

// clusterMap checks NAME=KUBECONFIG#CONTEXT and makes paths absolute: the
// worker runs in another folder.
func clusterMap(flags []string) (string, error) {
	out := make([]string, len(flags))
	for i, f := range flags {
		name, from, ok := strings.Cut(f, "=")
		at := strings.LastIndex(from, "#")
		if !ok || name == "" || at <= 0 || at == len(from)-1 || strings.Contains(f, ",") {
			return "", fmt.Errorf("--cluster %q: want NAME=KUBECONFIG#CONTEXT; the current context is never used", f)
		}
		path, err := filepath.Abs(from[:at])
		if err != nil {
			return "", fmt.Errorf("--cluster %q: %w", f, err)
		}
		if _, err := os.Stat(path); err != nil {
			return "", fmt.Errorf("--cluster %q: %w", f, err)
		}
		out[i] = name + "=" + path + from[at:]
	}
	return strings.Join(out, ","), nil
}

func names(clusters string) string {
	if clusters == "" {
		return "no cluster (add one with --cluster NAME=KUBECONFIG#CONTEXT)"
	}
	var out []string
	for _, c := range strings.Split(clusters, ",") {
		name, _, _ := strings.Cut(c, "=")
		out = append(out, name)
	}
	return "clusters " + strings.Join(out, ", ")
}

// free tells whether a port can be bound, so that an error can name the flag.
func free(port int, flag string) error {
	l, err := net.Listen("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(port)))
	if err != nil {
		return fmt.Errorf("port %d is taken by a process that refit did not start: choose another with %s, or use that server with TEMPORAL_ADDRESS", port, flag)
	}
	return l.Close()
}
