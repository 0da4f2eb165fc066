package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/refit-run/refit/sandbox/folder"
	"github.com/refit-run/refit/sandbox/process"
	"github.com/refit-run/refit/sandbox/world"
)

const (
	daemonLog = "daemon.log"
	// readyLine ends the progress lines of a start that succeeded.
	readyLine = "\x04ready"
	// progressFD is the pipe that `up` hands over.
	progressFD = 3
)

func runCommand(w *where) *cobra.Command {
	var u upFlags
	c := &cobra.Command{
		Use: "run", Hidden: true, Args: cobra.NoArgs,
		Short: "Run the sandbox in the foreground (what `up` starts)",
		RunE: func(cmd *cobra.Command, _ []string) error {
			f, err := w.folder()
			if err != nil {
				return err
			}
			options, err := u.options(w.name)
			if err != nil {
				return err
			}
			if err := os.MkdirAll(f.Root, 0o700); err != nil {
				return err
			}
			lock, err := f.TryLock()
			if err != nil {
				return fmt.Errorf("sandbox %s: %w", f.Root, err)
			}
			defer lock.Release()
			if err := lock.RecordPID(); err != nil {
				return err
			}
			if u.untilExit > 0 {
				go downAfter(cmd.Context(), u.untilExit, f)
			}
			progress := openProgress()
			report := func(line string) {
				slog.Info(line)
				// Nobody may be listening any more.
				_, _ = fmt.Fprintln(progress, line)
			}
			return world.Run(cmd.Context(), f, options, report, func() {
				report(readyLine)
				_ = progress.Close()
			})
		},
	}
	u.bind(c)
	return c
}

// openProgress takes over the pipe of `up`; started by hand, the daemon has
// none and reports to its log alone.
func openProgress() io.WriteCloser {
	pipe := os.NewFile(progressFD, "progress")
	if info, err := pipe.Stat(); err != nil || info.Mode()&os.ModeNamedPipe == 0 {
		return discard{io.Discard}
	}
	// Components must not hold the pipe open after the daemon's death.
	syscall.CloseOnExec(progressFD)
	return pipe
}

type discard struct{ io.Writer }

func (discard) Close() error { return nil }

// downAfter has the sandbox taken down once the process has ended that it was
// started for: who was killed can't do so any more.
func downAfter(ctx context.Context, pid int, f folder.Folder) {
	err := process.Until(ctx, time.Second, func(context.Context) error {
		if !ended(pid) {
			return fmt.Errorf("process %d runs", pid)
		}
		return nil
	})
	if err != nil {
		return // the sandbox ends before it
	}
	slog.Info("the process that this sandbox was started for has ended: down", "pid", pid)
	self, err := os.Executable()
	if err == nil {
		down := exec.Command(self, "down", "--dir", f.Root)
		down.SysProcAttr = &syscall.SysProcAttr{Setsid: true} // it outlives this daemon
		err = down.Start()
	}
	if err != nil {
		slog.Error("down", "error", err)
	}
}

// ended reports whether there is no process of this id.
func ended(pid int) bool { return errors.Is(syscall.Kill(pid, 0), syscall.ESRCH) }
