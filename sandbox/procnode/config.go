// Package procnode is a Kubernetes node whose pods are local processes: real
// servers run as the pods of real StatefulSets, without root, containers or a
// registry. It wires a virtual kubelet to the packages below it and must not
// know which servers these are.
package procnode

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"github.com/refit-run/refit/sandbox/folder"
	"github.com/refit-run/refit/sandbox/procnode/environ"
	"github.com/refit-run/refit/sandbox/procnode/pod"
	"github.com/refit-run/refit/sandbox/procnode/proc"
)

// Taint keeps away the pods that are not made for this node; Label is what
// those that are select.
const (
	Taint = "refit.sandbox/process"
	Label = "refit.sandbox/process"
)

// Ports on the node's own address, which nothing else has.
const (
	kubeletPort = 12250
	dnsPort     = 12053
)

// defaultBackoff is the kubelet's first delay between restarts.
const defaultBackoff = 10 * time.Second

// Config describes a node.
type Config struct {
	Name string `json:"name"`
	// Dir holds everything the node writes; its path marks the node's
	// processes.
	Dir        string `json:"dir"`
	Kubeconfig string `json:"kubeconfig"`
	// ClientCA signs the certificate with which the API server comes.
	ClientCA string `json:"clientCA"`
	// First is the node's own address on loopback; the Addresses that follow
	// are its pods'.
	First     netip.Addr `json:"first"`
	Addresses int        `json:"addresses"`
	// Images maps names of container images to commands.
	Images map[string]environ.Image `json:"images"`
	// Labels are added to the node.
	Labels map[string]string `json:"labels,omitempty"`
	// Backoff is the delay before the second restart of a container; 0 is the
	// kubelet's.
	Backoff time.Duration `json:"backoff,omitempty"`
}

// Load reads a configuration and refuses one with which no node can run.
func Load(path string) (Config, error) {
	var c Config
	data, err := os.ReadFile(path)
	if err != nil {
		return c, fmt.Errorf("configuration of the process node: %w", err)
	}
	if err := json.Unmarshal(data, &c); err != nil {
		return c, fmt.Errorf("configuration of the process node %s: %w", path, err)
	}
	return c, c.check()
}

// Save writes the configuration for Load.
func (c Config) Save(path string) error {
	if err := c.check(); err != nil {
		return err
	}
	data, err := json.MarshalIndent(c, "", "  ")
	if err != nil {
		return err
	}
	return folder.WriteFile(path, data, 0o600)
}

func (c Config) check() error {
	if err := proc.Supported(); err != nil {
		return err
	}
	switch {
	case c.Name == "":
		return errors.New("process node: expected a name, found none")
	case !filepath.IsAbs(c.Dir):
		return fmt.Errorf("process node %s: expected an absolute folder, found %q", c.Name, c.Dir)
	case !c.First.Is4() || !c.First.IsLoopback():
		return fmt.Errorf("process node %s: expected its address in 127.0.0.0/8, found %s", c.Name, c.First)
	case c.Addresses < 1:
		return fmt.Errorf("process node %s: expected addresses for pods, found %d", c.Name, c.Addresses)
	}
	for name, image := range c.Images {
		if len(image.Command) == 0 {
			return fmt.Errorf("process node %s: image %s: expected a command, found none", c.Name, name)
		}
	}
	return nil
}

func (c Config) kubelet() string {
	return net.JoinHostPort(c.First.String(), strconv.Itoa(kubeletPort))
}
func (c Config) dns() string   { return net.JoinHostPort(c.First.String(), strconv.Itoa(dnsPort)) }
func (c Config) hosts() string { return filepath.Join(c.Dir, "hosts") }
func (c Config) pods() string  { return filepath.Join(c.Dir, "pods") }

// Sweep ends every process that a node of the folder ever started and that
// still runs, whether or not the node is there.
func Sweep(dir string) error { return proc.End(pod.NodeMark, dir) }
