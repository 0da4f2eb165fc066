package world

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"slices"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/refit-run/refit/sandbox/controlplane"
	"github.com/refit-run/refit/sandbox/folder"
	"github.com/refit-run/refit/sandbox/kwok"
	"github.com/refit-run/refit/sandbox/process"
	"github.com/refit-run/refit/sandbox/procnode"
	"github.com/refit-run/refit/sandbox/procnode/cassandrad"
	"github.com/refit-run/refit/sandbox/procnode/datastore"
	"github.com/refit-run/refit/sandbox/procnode/environ"
	"github.com/refit-run/refit/sandbox/procnode/natsd"
)

const (
	// processNode runs the datastores' pods.
	processNode = "process-000"
	// processAddresses is how many pods it may have at a time; many, so that an
	// address rests long before it is used again.
	processAddresses = 1000
	// processGrace is longer than the node gives its pods when it ends.
	processGrace = 20 * time.Second
)

// Subcommands of the sandbox's own program that datastores are made of.
const (
	ProcessNodeCommand = "procnode"
	NATSCommand        = "natsd"
	CassandraCommand   = "cassandrad"
)

// builders are the datastores that a sandbox can bring, in the order in which
// they come up. A builder is given the sandbox's own program.
var builders = []struct {
	name  string
	build func(w *World, self string) (datastore.Store, error)
}{
	{"nats", (*World).nats},
	{"cassandra", (*World).cassandra},
	{"openbao", (*World).openbao},
}

// Datastores names what a sandbox can bring.
func Datastores() []string {
	names := make([]string, len(builders))
	for i, b := range builders {
		names[i] = b.name
	}
	return names
}

// nats is NATS of the real server.
func (w *World) nats(self string) (datastore.Store, error) {
	tools := w.folder.Path("procnode", "tools", "nats")
	if err := natsd.Tools(tools, self, NATSCommand); err != nil {
		return datastore.Store{}, err
	}
	return datastore.NATS(environ.Image{Command: []string{self, NATSCommand}, Path: tools})
}

// cassandra is Cassandra of the real server; its first member begins with
// prepared data.
func (w *World) cassandra(self string) (datastore.Store, error) {
	home, err := cassandrad.Find()
	if err != nil {
		return datastore.Store{}, err
	}
	tools := w.folder.Path("procnode", "tools", "cassandra")
	if err := home.Tools(tools); err != nil {
		return datastore.Store{}, err
	}
	prepared, err := home.Prepare(w.life, w.report)
	if err != nil {
		return datastore.Store{}, err
	}
	server := environ.Image{Command: []string{self, CassandraCommand}, Path: tools, Env: home.Env(prepared)}
	return datastore.Cassandra(server, int32(w.state.Options.CassandraMembers))
}

// datastores are the process node and what runs on it.
type datastores struct {
	node   *process.Keeper
	stores []datastore.Store
}

func processDir(f folder.Folder) string { return f.Path("procnode") }

// SweepDatastores ends what a killed sandbox left running: the processes of
// its datastores outlive it.
func SweepDatastores(f folder.Folder) error { return procnode.Sweep(processDir(f)) }

// prepareDatastores writes the node's configuration; without the option there
// is none.
func (w *World) prepareDatastores() error {
	if len(w.state.Options.Datastores) == 0 {
		return nil
	}
	self, err := os.Executable()
	if err != nil {
		return err
	}
	dir := processDir(w.folder)
	for _, b := range builders {
		if !slices.Contains(w.state.Options.Datastores, b.name) {
			continue
		}
		s, err := b.build(w, self)
		if err != nil {
			return fmt.Errorf("datastore %s: %w", b.name, err)
		}
		w.datastores.stores = append(w.datastores.stores, s)
	}
	first, err := processAddress(w.state.Ports)
	if err != nil {
		return err
	}
	config := procnode.Config{
		Name: processNode, Dir: dir, Kubeconfig: w.plane.Kubeconfig(controlplane.Sandbox), ClientCA: w.folder.Path("kube", "ca.crt"),
		First: first, Addresses: processAddresses, Images: map[string]environ.Image{},
	}
	for _, s := range w.datastores.stores {
		maps.Copy(config.Images, s.Images)
	}
	path := w.folder.Path("procnode", "config.json")
	if err := config.Save(path); err != nil {
		return err
	}
	w.datastores.node = process.Keep(process.Spec{
		Name: processNode, Path: self, Args: []string{ProcessNodeCommand, path},
		Dir: dir, Log: w.folder.Path("procnode.log"), Grace: processGrace,
	})
	return nil
}

// processAddress begins a range of loopback addresses beside that of the
// sandbox's other nodes.
func processAddress(ports folder.Ports) (netip.Addr, error) {
	const beside = 32
	ip, err := ports.NodeIP(0)
	if err != nil {
		return ip, err
	}
	b := ip.As4()
	b[1] += beside
	return netip.AddrFrom4(b), nil
}

// startDatastores returns when every member of every datastore is Ready.
func (w *World) startDatastores(ctx context.Context) error {
	node := w.datastores.node
	if node == nil {
		return nil
	}
	if err := node.Start(); err != nil {
		return err
	}
	err := node.Ready(ctx, 100*time.Millisecond, func(ctx context.Context) error {
		n, err := w.kube.CoreV1().Nodes().Get(ctx, processNode, metav1.GetOptions{})
		if err == nil && !kwok.IsReady(n) {
			err = errors.New("node " + processNode + ": expected it Ready")
		}
		return err
	})
	if err != nil {
		return err
	}
	for _, s := range w.datastores.stores {
		if err := s.Install(ctx, w.dynamic, w.folder.Path("procnode", "volumes")); err != nil {
			return err
		}
	}
	for _, s := range w.datastores.stores {
		if err := s.Ready(ctx, w.dynamic); err != nil {
			return err
		}
		if s.After != nil {
			if err := s.After(ctx, w.kube); err != nil {
				return fmt.Errorf("datastore %s: %w", s.Name, err)
			}
		}
		w.report(fmt.Sprintf("%d members of %s are Ready in %s", s.Members, s.Name, s.Namespace))
	}
	return nil
}

// stop ends the node, which ends the pods.
func (d datastores) stop() {
	if d.node != nil {
		d.node.Stop()
	}
}

func (d datastores) components() []*process.Keeper {
	if d.node == nil {
		return nil
	}
	return []*process.Keeper{d.node}
}
