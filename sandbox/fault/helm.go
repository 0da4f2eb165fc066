package fault

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"syscall"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
)

// helmLook is how often Helm's process is looked for: its upgrade takes
// seconds.
const helmLook = 50 * time.Millisecond

// helmKill lies in wait for the next Helm process of a worker of this sandbox.
func helmKill(_ context.Context, t *Targets, args []string) error {
	limit, err := positive(args[0])
	if err != nil {
		return err
	}
	const proc = "/proc"
	if _, err := os.Stat(filepath.Join(proc, "self", "environ")); err != nil {
		return fmt.Errorf("find Helm's process: %w; this fault needs Linux", err)
	}
	t.After(time.Millisecond, func(ctx context.Context) error {
		err := wait.PollUntilContextTimeout(ctx, helmLook, limit, true, func(ctx context.Context) (bool, error) {
			pid := helmProcess(proc, "TEMPORAL_ADDRESS="+t.TemporalAddress)
			if pid == 0 {
				return false, nil
			}
			pending, err := t.Kube.CoreV1().Secrets(t.Namespace).List(ctx, metav1.ListOptions{LabelSelector: "owner=helm,status=pending-upgrade"})
			if err != nil || len(pending.Items) == 0 {
				return false, nil
			}
			slog.Info("fault helm-kill", "pid", pid, "pending", pending.Items[0].Name)
			return true, syscall.Kill(pid, syscall.SIGKILL)
		})
		if wait.Interrupted(err) {
			slog.Info("fault helm-kill: no Helm process came", "within", limit)
			return nil
		}
		return err
	})
	return nil
}

// helmProcess is the engine process of a worker that was started with the
// variable; 0 when there is none.
func helmProcess(proc, variable string) int {
	files, _ := filepath.Glob(filepath.Join(proc, "[0-9]*", "cmdline"))
	for _, file := range files {
		line, err := os.ReadFile(file)
		if err != nil || !bytes.HasSuffix(line, []byte("\x00helm-child\x00")) {
			continue
		}
		folder := filepath.Dir(file)
		environ, err := os.ReadFile(filepath.Join(folder, "environ"))
		if err != nil || !bytes.Contains(append([]byte{0}, environ...), []byte("\x00"+variable+"\x00")) {
			continue
		}
		if pid, err := strconv.Atoi(filepath.Base(folder)); err == nil {
			return pid
		}
	}
	return 0
}
