package procnode_test

import (
	"context"
	"fmt"
	"net/netip"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/refit-run/refit/sandbox/procnode"
	"github.com/refit-run/refit/sandbox/procnode/environ"
	"github.com/refit-run/refit/sandbox/procnode/pod"
	"github.com/refit-run/refit/sandbox/procnode/proc"
)

// An orderly end takes the processes with it; the pods stay, and the node
// starts them again when it is back.
func TestNodeThatEndsLeavesNoProcessAndStartsItsPodsAgain(t *testing.T) {
	s := newSpace(t)
	s.statefulSet(2, nil)
	before := s.ready(2)
	s.node.Stop()
	require.Empty(t, proc.Marked(pod.NodeMark, s.dir))
	require.NoError(t, s.node.Start())
	s.eventually("both pods run again", func(ctx context.Context) error {
		pods, err := s.pods(ctx)
		if err != nil {
			return err
		}
		for name, p := range pods {
			if p.Status.ContainerStatuses[0].RestartCount != 1 || !isReady(p) {
				return fmt.Errorf("%s: restarts %d", name, p.Status.ContainerStatuses[0].RestartCount)
			}
		}
		return nil
	})
	for name, p := range s.ready(2) {
		require.Equal(t, before[name].UID, p.UID)
		require.Equal(t, before[name].Status.PodIP, p.Status.PodIP)
	}
}

func TestSweepEndsWhatAKilledNodeLeft(t *testing.T) {
	s := newSpace(t)
	s.create("left", member(image1).Spec)
	s.ready(1)
	s.node.Suspend()
	require.NotEmpty(t, proc.Marked(pod.NodeMark, s.dir), "a killed node leaves its pods running")
	require.NoError(t, procnode.Sweep(s.dir))
	require.Empty(t, proc.Marked(pod.NodeMark, s.dir))
	require.NoError(t, s.node.Start())
	s.ready(1)
}

func TestConfigurationsThatCannotWorkAreRefused(t *testing.T) {
	good := procnode.Config{Name: "n", Dir: "/d", First: netip.MustParseAddr("127.64.0.1"), Addresses: 1}
	path := filepath.Join(t.TempDir(), "config.json")
	require.NoError(t, good.Save(path))
	again, err := procnode.Load(path)
	require.NoError(t, err)
	require.Equal(t, good, again)
	for want, change := range map[string]func(*procnode.Config){
		"a name":      func(c *procnode.Config) { c.Name = "" },
		"folder":      func(c *procnode.Config) { c.Dir = "relative" },
		"127.0.0.0/8": func(c *procnode.Config) { c.First = netip.MustParseAddr("10.0.0.1") },
		"addresses":   func(c *procnode.Config) { c.Addresses = 0 },
		"image x:1":   func(c *procnode.Config) { c.Images = map[string]environ.Image{"x:1": {}} },
	} {
		c := good
		change(&c)
		require.ErrorContains(t, c.Save(path), want)
	}
}
