package machine

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"sort"
	"testing"
	"time"
)

const poolName = "tensor-fusion-shared"

// world plays an API server and kubelets around the machine on a fake clock.
// Events reach the reconcilers that the real controller wakes for them.
type world struct {
	t       *testing.T
	start   time.Time
	now     time.Time
	process Process
	memory  Memory

	entry     PoolSpec // the cluster's only entry
	pool      *Pool
	provider  *Provider
	nodes     map[string]*Node
	gpuNodes  map[string]*GPUNode
	pods      map[string]*Pod // hypervisors by node
	gpus      map[string][]GPU
	workloads map[string]*Workload
	workers   map[string]*Pod
	clients   map[string]*Pod

	readyAfter, goneAfter time.Duration
	neverReady            map[string]bool
	dead                  bool // no controller process
	beats                 bool
	due                   []event
	seq                   int
	uids                  int

	deleted       []deletion
	err           error
	clusterPhase  string
	clusterWrites int
}

type event struct {
	at   time.Time
	seq  int
	kind string
	key  string
}

type deletion struct {
	at     time.Duration
	what   string
	reason string
}

// newWorld has n Running nodes with two GPUs each, settled under the version.
func newWorld(t *testing.T, version string, n int, change ...func(*world)) *world {
	t.Helper()
	v, err := ParseVersion(version)
	if err != nil {
		t.Fatal(err)
	}
	w := &world{
		t: t, process: Process{Version: v, MaxCrash: 5},
		start: time.Date(2026, 1, 5, 8, 0, 0, 0, time.UTC),
		nodes: map[string]*Node{}, gpuNodes: map[string]*GPUNode{}, pods: map[string]*Pod{}, gpus: map[string][]GPU{},
		workloads: map[string]*Workload{}, workers: map[string]*Pod{}, clients: map[string]*Pod{}, neverReady: map[string]bool{},
		readyAfter: 200 * time.Millisecond, goneAfter: 100 * time.Millisecond, beats: true,
		entry: baseSpec(),
	}
	w.now = w.start
	for i := range n {
		name := fmt.Sprintf("n%d", i)
		w.nodes[name] = &Node{Name: name, Ready: true, Labels: map[string]string{"nvidia.com/gpu.present": "true"}}
		w.gpuNodes[name] = &GPUNode{Name: name, Created: w.start.Add(time.Duration(i) * time.Second)}
	}
	for _, c := range change {
		c(w)
	}
	w.wakeAll()
	w.after(10*time.Second, "heartbeat", "")
	w.run(time.Minute)
	w.start, w.deleted = w.now, nil
	return w
}

func baseSpec() PoolSpec {
	port := int32(8000)
	return PoolSpec{
		NodeManagerConfig: &NodeManagerConfig{
			DefaultIsolationMode: "soft",
			Policy:               &UpdatePolicy{AutoUpdateHypervisor: true, BatchPercentage: 25, BatchInterval: "1s"},
		},
		ComponentConfig: &ComponentConfig{
			Hypervisor: &HypervisorConfig{Image: "hypervisor:1", PortNumber: &port},
			Worker:     &WorkerConfig{Image: "worker:1"},
			Client:     &ClientConfig{RemoteModeImage: "client:1"},
		},
	}
}

func policy(change func(*UpdatePolicy)) func(*world) {
	return func(w *world) { change(w.entry.NodeManagerConfig.Policy) }
}

func withProvider(w *world) {
	w.provider = &Provider{Name: "nvidia", Spec: ProviderSpec{
		Vendor: "NVIDIA", Images: ProviderImages{Middleware: "middleware:1", RemoteWorker: "provider-worker:1"},
	}}
}

// edit changes the cluster's entry, as a person edits a TensorFusionCluster.
func (w *world) edit(change func(*PoolSpec)) {
	data, err := json.Marshal(w.entry)
	if err != nil {
		w.t.Fatal(err)
	}
	var copied PoolSpec
	if err := json.Unmarshal(data, &copied); err != nil {
		w.t.Fatal(err)
	}
	change(&copied)
	w.entry = copied
	w.after(0, "cluster", "")
}

func (w *world) setImage(image string) {
	w.edit(func(s *PoolSpec) { s.ComponentConfig.Hypervisor.Image = image })
}

func (w *world) setAuto(auto bool) {
	w.edit(func(s *PoolSpec) { s.NodeManagerConfig.Policy.AutoUpdateHypervisor = auto })
}

func (w *world) after(d time.Duration, kind, key string) {
	w.seq++
	e := event{w.now.Add(d), w.seq, kind, key}
	for _, other := range w.due {
		if other.at.Equal(e.at) && other.kind == kind && other.key == key {
			return
		}
	}
	w.due = append(w.due, e)
}

func (w *world) wakeAll() {
	w.after(0, "provider", "")
	w.after(0, "cluster", "")
	for _, n := range sorted(w.gpuNodes) {
		w.after(0, "node", n)
	}
	w.after(0, "pool", "")
	for _, k := range sorted(w.workloads) {
		w.after(0, "workload", k)
	}
}

// restart is a new controller process: everything wakes, nodes first unless
// the pool wins the race.
func (w *world) restart(version string, poolFirst int) {
	v, err := ParseVersion(version)
	if err != nil {
		w.t.Fatal(err)
	}
	w.process.Version, w.memory = v, Memory{}
	w.dispatch(event{kind: "provider"})
	names := sorted(w.gpuNodes)
	for i, n := range names {
		if i == poolFirst {
			w.dispatch(event{kind: "pool"})
		}
		w.dispatch(event{kind: "node", key: n})
	}
	w.wakeAll()
}

func sorted[V any](m map[string]V) []string { return slices.Sorted(maps.Keys(m)) }

// run advances the clock by d, event by event.
func (w *world) run(d time.Duration) {
	end := w.now.Add(d)
	for steps := 0; ; steps++ {
		if steps > 200000 {
			w.t.Fatal("the world does not come to rest")
		}
		sort.SliceStable(w.due, func(i, j int) bool {
			if !w.due[i].at.Equal(w.due[j].at) {
				return w.due[i].at.Before(w.due[j].at)
			}
			return w.due[i].seq < w.due[j].seq
		})
		if len(w.due) == 0 || w.due[0].at.After(end) {
			break
		}
		e := w.due[0]
		w.due = w.due[1:]
		w.now = e.at
		w.dispatch(e)
	}
	w.now = end
}

// until runs in small steps until ok, and says how long that took.
func (w *world) until(limit time.Duration, ok func() bool) time.Duration {
	w.t.Helper()
	begin := w.now
	for w.now.Sub(begin) < limit {
		w.run(100 * time.Millisecond)
		if ok() {
			return w.now.Sub(begin)
		}
	}
	w.t.Fatalf("not reached within %s: progress %d, synced %v, phases %s", limit, w.progress(), w.synced(), w.phases())
	return 0
}

func (w *world) dispatch(e event) {
	switch e.kind {
	case "ready":
		w.becomeReady(e.key)
		return
	case "gone":
		w.podGone(e.key)
		return
	case "heartbeat":
		if w.beats {
			for _, n := range sorted(w.nodes) {
				w.after(0, "node", n)
			}
		}
		w.after(10*time.Second, "heartbeat", "")
		return
	}
	if w.dead {
		return
	}
	switch e.kind {
	case "cluster":
		w.reconcileCluster()
	case "provider":
		w.reconcileProvider()
	case "pool":
		w.reconcilePool()
	case "node":
		w.reconcileNode(e.key)
	case "workload":
		w.reconcileWorkload(e.key)
	}
}
