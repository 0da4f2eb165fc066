package main

import (
	"fmt"
	"io"
	"log/slog"
	"os"
	"syscall"

	"github.com/spf13/cobra"

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
