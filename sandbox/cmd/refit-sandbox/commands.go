package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/refit-run/refit/sandbox/control"
	"github.com/refit-run/refit/sandbox/fault"
	"github.com/refit-run/refit/sandbox/folder"
	"github.com/refit-run/refit/sandbox/world"
)

// downDeadline is how long an orderly stop may take before it is forced; the
// children then die with the daemon.
const downDeadline = 60 * time.Second

func downCommand(w *where) *cobra.Command {
	return &cobra.Command{
		Use:   "down",
		Short: "Stop everything and remove the folder",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			f, err := w.folder()
			if err != nil {
				return err
			}
			return down(cmd.Context(), f)
		},
	}
}

func down(ctx context.Context, f folder.Folder) error {
	if _, err := os.Stat(f.Root); errors.Is(err, os.ErrNotExist) {
		fmt.Fprintf(os.Stderr, "no sandbox in %s\n", f.Root)
		return nil
	}
	if !f.Exists() {
		if entries, err := os.ReadDir(f.Root); err != nil || !ours(entries) {
			return fmt.Errorf("%s: expected a sandbox's folder, found other files; it is left alone", f.Root)
		}
	}
	lock, err := f.TryLock()
	if errors.Is(err, folder.ErrRunning) {
		lock, err = stop(ctx, f)
	}
	if err != nil {
		return err
	}
	defer lock.Release()
	if state, err := f.Load(); err == nil {
		_ = os.Remove(state.Socket)
	}
	if err := world.SweepDatastores(f); err != nil {
		return err
	}
	if err := os.RemoveAll(f.Root); err != nil {
		return fmt.Errorf("sandbox folder: %w", err)
	}
	if home := filepath.Dir(f.Root); filepath.Base(home) == folder.DefaultHome {
		// Removed with its last sandbox; a folder in use stays.
		_ = os.Remove(home)
	}
	fmt.Fprintf(os.Stderr, "sandbox %s is down\n", f.Root)
	return nil
}

// ours recognises the folder of a start that died before it wrote its state.
func ours(entries []os.DirEntry) bool {
	for _, e := range entries {
		if e.Name() != "lock" && e.Name() != daemonLog {
			return false
		}
	}
	return true
}

// stop asks the daemon to end and waits until the kernel says it is gone.
func stop(ctx context.Context, f folder.Folder) (*folder.Lock, error) {
	pid := f.HolderPID()
	if pid == 0 {
		return nil, fmt.Errorf("sandbox %s: expected the daemon's process id in its lock, found none", f.Root)
	}
	if err := syscall.Kill(pid, syscall.SIGTERM); err != nil && !errors.Is(err, syscall.ESRCH) {
		return nil, fmt.Errorf("sandbox daemon %d: %w", pid, err)
	}
	force := time.AfterFunc(downDeadline, func() {
		fmt.Fprintf(os.Stderr, "the daemon %d did not end within %s: it is killed\n", pid, downDeadline)
		_ = syscall.Kill(pid, syscall.SIGKILL)
	})
	defer force.Stop()
	type result struct {
		lock *folder.Lock
		err  error
	}
	released := make(chan result, 1)
	go func() {
		lock, err := f.WaitLock()
		released <- result{lock, err}
	}()
	select {
	case r := <-released:
		return r.lock, r.err
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

func statusCommand(w *where) *cobra.Command {
	var output string
	c := &cobra.Command{
		Use:   "status",
		Short: "Show what runs (exit code 1 when the sandbox is not ready)",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			_, client, err := connect(w)
			if err != nil {
				return err
			}
			s, err := client.Status(cmd.Context())
			if err != nil {
				return fmt.Errorf("the sandbox does not answer: %w", err)
			}
			if output == "json" {
				err = json.NewEncoder(cmd.OutOrStdout()).Encode(s)
			} else {
				err = printStatus(cmd.OutOrStdout(), s)
			}
			if err == nil && !s.Ready {
				err = errors.New("the sandbox is starting")
			}
			return err
		},
	}
	c.Flags().StringVarP(&output, "output", "o", "table", "table or json")
	return c
}

func printStatus(out io.Writer, s control.Status) error {
	t := tabwriter.NewWriter(out, 0, 4, 2, ' ', 0)
	fmt.Fprintf(t, "sandbox\t%s\nfolder\t%s\nready\t%t\nnodes\t%d of %d Ready\nagents\t%d %s\n", s.Name, s.Folder, s.Ready, s.NodesReady, s.Nodes, s.Agents, s.AgentKind)
	if s.Chart != "" {
		fmt.Fprintf(t, "chart\ttensor-fusion %s\n", s.Chart)
	}
	if s.Controller != "" {
		fmt.Fprintf(t, "controller\t%s\n", s.Controller)
	}
	for _, c := range s.Components {
		state := "down"
		if c.Running {
			state = fmt.Sprintf("pid %d", c.PID)
		}
		fmt.Fprintf(t, "%s\t%s, restarts %d\n", c.Name, state, c.Restarts)
	}
	for _, n := range s.Notes {
		fmt.Fprintf(t, "note\t%s\n", n)
	}
	return t.Flush()
}

func envCommand(w *where) *cobra.Command {
	return &cobra.Command{
		Use:   "env",
		Short: "Print export lines for a shell",
		Args:  cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			f, err := w.folder()
			if err != nil {
				return err
			}
			return printEnvironment(f)
		},
	}
}

func printEnvironment(f folder.Folder) error {
	state, err := f.Load()
	if err != nil {
		return notThere(f, err)
	}
	variables, err := world.Environment(f, state)
	if err != nil {
		return err
	}
	for _, v := range variables {
		fmt.Printf("export %s='%s'\n", v.Name, strings.ReplaceAll(v.Value, "'", `'\''`))
	}
	return nil
}

func faultCommand(w *where) *cobra.Command {
	var list bool
	c := &cobra.Command{
		Use:   "fault NAME [ARGUMENT...]",
		Short: "Break something; it returns when the fault is in force",
		Args: func(_ *cobra.Command, args []string) error {
			if !list && len(args) == 0 {
				return errors.New("expected the name of a fault; --list shows them")
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			if list {
				t := tabwriter.NewWriter(cmd.OutOrStdout(), 0, 4, 2, ' ', 0)
				for _, row := range fault.Table() {
					fmt.Fprintf(t, "%s\t%s\t%s\n", row.Name, row.Args, row.Does)
				}
				return t.Flush()
			}
			_, client, err := connect(w)
			if err != nil {
				return err
			}
			return client.Fault(cmd.Context(), args[0], args[1:])
		},
	}
	c.Flags().BoolVar(&list, "list", false, "print every fault with its arguments")
	return c
}

func connect(w *where) (folder.Folder, *control.Client, error) {
	f, err := w.folder()
	if err != nil {
		return f, nil, err
	}
	state, err := f.Load()
	if err != nil {
		return f, nil, notThere(f, err)
	}
	return f, control.Dial(state.Socket), nil
}

func notThere(f folder.Folder, err error) error {
	if errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("no sandbox in %s: start one with `refit-sandbox up`", f.Root)
	}
	return err
}
