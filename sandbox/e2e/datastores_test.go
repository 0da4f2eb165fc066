package e2e

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// The datastores' servers outlive a killed sandbox: the next one takes them
// over as they are, and `down` ends them whether or not one runs.
func TestDatastoresOutliveAKilledSandboxButNotItsEnd(t *testing.T) {
	b := newBox(t)
	b.run("up", "--pools", "shared=1", "--no-tensorfusion", "--datastores=nats")
	before := natsMembers(t, b)
	require.Len(t, before, 3)
	kill := func() {
		daemon, err := os.FindProcess(b.status().PID)
		require.NoError(t, err)
		require.NoError(t, daemon.Kill())
		b.eventually(func(context.Context) error {
			if left := b.processes(); len(left) != 3 {
				return errors.New("expected the three servers, found " + strings.Join(left, "; "))
			}
			return nil
		})
	}
	kill()
	b.run("up")
	require.Equal(t, before, natsMembers(t, b))
	kill()
	b.run("down")
	require.Empty(t, b.processes())

	b.run("up", "--pools", "shared=1", "--no-tensorfusion", "--datastores=nats")
	require.Len(t, natsMembers(t, b), 3)
	b.run("down")
	require.Empty(t, b.processes())
}

// Who was killed can't take the sandbox down that it has started.
func TestASandboxEndsWithTheProcessThatItIsFor(t *testing.T) {
	b := newBox(t)
	owner := exec.Command("sleep", "600")
	require.NoError(t, owner.Start())
	t.Cleanup(func() { _ = owner.Process.Kill() })
	pid := strconv.Itoa(owner.Process.Pid)
	b.run("up", "--pools", "shared=1", "--no-tensorfusion", "--datastores=nats", "--until-exit", pid)
	require.Len(t, natsMembers(t, b), 3)
	require.NoError(t, owner.Process.Kill())
	_ = owner.Wait() // says that it was killed
	b.eventually(func(context.Context) error {
		if left := b.processes(); len(left) > 0 {
			return errors.New(strings.Join(left, "; "))
		}
		_, err := os.Stat(b.folder)
		if !errors.Is(err, os.ErrNotExist) {
			return fmt.Errorf("%s is there: %v", b.folder, err)
		}
		return nil
	})
	_, err := b.try("up", "--until-exit", pid)
	require.ErrorContains(t, err, "expected the id of a process that runs")
}

// natsMembers are the Ready ones that never restarted.
func natsMembers(t *testing.T, b *box) map[string]types.UID {
	t.Helper()
	kube := kubernetesOf(t, b.environment()["KUBECONFIG"])
	members := map[string]types.UID{}
	b.eventually(func(ctx context.Context) error {
		pods, err := kube.CoreV1().Pods("nats-system").List(ctx, metav1.ListOptions{LabelSelector: "app.kubernetes.io/name=nats"})
		if err != nil {
			return err
		}
		for _, p := range pods.Items {
			for _, c := range p.Status.ContainerStatuses {
				if !c.Ready || c.RestartCount > 0 {
					return fmt.Errorf("%s/%s: ready %t, restarts %d", p.Name, c.Name, c.Ready, c.RestartCount)
				}
			}
			members[p.Name] = p.UID
		}
		return nil
	})
	return members
}
