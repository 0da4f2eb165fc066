package machine

import (
	"fmt"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/labels"
)

func sprint(args []string) string { return fmt.Sprint(args) }

func changeWorker(w *world) {
	w.edit(func(s *PoolSpec) {
		s.ComponentConfig.Worker.PodTemplate = []byte(`{"template":{"spec":{"containers":[{"name":"w","env":[{"name":"TF_ENABLE_LOG","value":"1"}]}]}}}`)
	})
}

func TestRule13_WorkersRollByWorkloadOldestFirst(t *testing.T) {
	w := newWorld(t, "2.17.0", 1)
	for _, name := range []string{"c", "a", "b", "d"} {
		w.addWorkload(name, 2)
	}
	w.edit(func(s *PoolSpec) { s.NodeManagerConfig.Policy.AutoUpdateWorker = true })
	w.run(time.Minute)
	w.deleted = nil
	changeWorker(w)
	w.until(2*time.Minute, func() bool { return w.pool.Status.Components.WorkerSynced })
	if len(w.deleted) != 8 {
		t.Fatalf("found %v", w.deleted)
	}
	for i, want := range []string{"c", "c", "a", "a", "b", "b", "d", "d"} {
		if got := workloadOf(w.deleted[i].what); got != want {
			t.Errorf("deletion %d is of %s, expected %s", i, got, want)
		}
	}
	if w.deleted[7].at-w.deleted[0].at < 6*time.Second {
		t.Error("four batches need their intervals")
	}
}

func TestRule13_AWorkloadWithoutHashIsRechecked(t *testing.T) {
	w := newWorld(t, "2.17.0", 1)
	w.addWorkload("a", 1)
	w.workloads["apps/a"].Status.Hash = ""
	if _, recheck, err := workloadUnits(w.poolView()); err != nil || !recheck {
		t.Errorf("recheck %v, %v", recheck, err)
	}
}

func TestRule14_ClientsAreDeletedOutrightLocalGPUPodsIncluded(t *testing.T) {
	w := newWorld(t, "2.17.0", 1, policy(func(p *UpdatePolicy) { p.AutoUpdateClient = true }))
	hash := must(t)(ClientHash(&w.pool.Spec))
	w.addClients(4, hash)
	w.run(time.Minute)
	w.deleted = nil
	w.edit(func(s *PoolSpec) { s.ComponentConfig.Client.RemoteModeImage = "client:2" })
	w.run(50 * time.Millisecond)
	if len(w.deleted) != 1 || w.deleted[0].what != "client0" {
		t.Errorf("a quarter of 4, oldest first: found %v", w.deleted)
	}
	c := *w.clients["apps/client1"]
	c.Terminating = true
	w.clients["apps/client1"] = &c
	w.run(time.Minute)
	if len(w.deleted) != 1 {
		t.Errorf("a terminating client holds the rest, found %v", w.deleted)
	}
}

func TestRule18_ClearedWorkloadHashRecreatesItsWorkers(t *testing.T) {
	w := newWorld(t, "2.17.0", 1)
	w.addWorkload("a", 2)
	if len(w.workersOf("apps/a")) != 2 {
		t.Fatalf("found %v", w.workersOf("apps/a"))
	}
	w.edit(func(s *PoolSpec) { s.NodeManagerConfig.Policy.AutoUpdateWorker = true })
	w.run(time.Minute)
	changeWorker(w)
	w.until(time.Minute, func() bool { return w.pool.Status.Components.WorkerProgress == 100 })
	for _, p := range w.workersOf("apps/a") {
		if p.Hash != w.workloads["apps/a"].Status.Hash {
			t.Errorf("%s has label %s", p.Name, p.Hash)
		}
	}
}

func TestRule25_AnyEventRecreatesAllWorkersWhateverAutoSays(t *testing.T) {
	w := newWorld(t, "2.17.0", 1)
	w.addWorkload("a", 3)
	w.run(time.Minute)
	w.deleted = nil
	changeWorker(w)
	w.run(time.Hour)
	if len(w.deleted) != 0 {
		t.Fatalf("without an event nothing happens, found %v", w.deleted)
	}
	w.restart("2.17.0", 1) // a controller start is an event of every workload
	w.run(time.Second)
	if len(w.deleted) != 3 || w.deleted[2].at != w.deleted[0].at {
		t.Errorf("all 3 at once, found %v", w.deleted)
	}
	w.run(5 * time.Second)
	s := w.workloads["apps/a"].Status
	if s.WorkerCount != 3 || s.ReadyWorkers != 3 || s.Phase != Running {
		t.Errorf("found %+v", s)
	}
}

func TestRule25_DedicatedWorkersFollowTheirConnections(t *testing.T) {
	v := WorkloadView{Workload: Workload{Name: "w", Namespace: "apps", Spec: []byte(`{}`)}, Pool: testPool(nil), Connections: []Connection{{Name: "c1"}, {Name: "c2"}}}
	r, err := ReconcileWorkload(v)
	if err != nil || r.Status.Hash == "" || len(r.CreateNamed) != 0 {
		t.Fatalf("the hash is written first, found %+v, %v", r, err)
	}
	v.Workload.Status = r.Status
	v.Workers = []Pod{{Name: "c1", UID: "1", Hash: "stale", Phase: corev1.PodRunning, Ready: true}, {Name: "c9", UID: "9", Hash: r.Hash}}
	if r, err = ReconcileWorkload(v); err != nil {
		t.Fatal(err)
	}
	if r.Status.Phase != Running || len(r.CreateNamed) != 1 || r.CreateNamed[0] != "c2" || len(r.Delete) != 2 {
		t.Errorf("found %+v", r)
	}
}

func TestConnectionsKeepTheirWorkerWhileItRuns(t *testing.T) {
	running := func(name string) Pod { return Pod{Name: name, Phase: corev1.PodRunning, Ready: true} }
	address := func(p Pod) string { return p.Name }
	workers := []Pod{running("b"), running("a")}
	if r := ReconcileConnection(Connection{Name: "c", Worker: "b"}, false, workers, address); r.WorkerName != "b" || r.Phase != Running {
		t.Errorf("found %+v", r)
	}
	if r := ReconcileConnection(Connection{Name: "c", Worker: "gone"}, false, workers, address); r.WorkerName != "a" {
		t.Errorf("found %+v", r)
	}
	if r := ReconcileConnection(Connection{Name: "c"}, true, workers, address); r.Phase != Pending {
		t.Errorf("a dynamic workload's connection waits for its own worker, found %+v", r)
	}
}

func TestElectionWaitsForTheLeaseOfADeadLeader(t *testing.T) {
	now := time.Date(2026, 1, 5, 8, 0, 0, 0, time.UTC)
	l, leads := Elect(Lease{}, []string{"a", "b"}, 15*time.Second, now)
	if !leads || l.Holder != "a" || l.Transitions != 0 {
		t.Fatalf("the first takes a fresh lease at once, found %+v", l)
	}
	l, leads = Elect(l, []string{"a", "b"}, 15*time.Second, now.Add(10*time.Second))
	if !leads || !l.Renewed.Equal(now.Add(10*time.Second)) {
		t.Fatalf("a living holder renews, found %+v", l)
	}
	if _, leads = Elect(l, []string{"b"}, 15*time.Second, now.Add(24*time.Second)); leads {
		t.Error("the lease is not released when its holder dies")
	}
	if next, leads := Elect(l, []string{"b"}, 15*time.Second, now.Add(25*time.Second)); !leads || next.Holder != "b" || next.Transitions != 1 {
		t.Errorf("found %+v", next)
	}
}

func TestInventory(t *testing.T) {
	selector := labels.SelectorFromSet(labels.Set{"nvidia.com/gpu.present": "true"})
	pool := *testPool(nil)
	pool.Spec.NodeManagerConfig.NodeSelector = &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{{
		MatchExpressions: []corev1.NodeSelectorRequirement{{Key: "pool", Operator: corev1.NodeSelectorOpIn, Values: []string{"shared"}}},
	}}}
	match := map[string]string{"nvidia.com/gpu.present": "true", "pool": "shared"}
	other := map[string]string{"nvidia.com/gpu.present": "true", "pool": "elsewhere"}
	have := &GPUNode{Name: "n"}
	for name, c := range map[string]struct {
		node *Node
		have *GPUNode
		want InventoryResult
	}{
		"joins":                        {&Node{Labels: match}, nil, InventoryResult{Create: poolName}},
		"has one":                      {&Node{Labels: match}, have, InventoryResult{}},
		"cordoned, none":               {&Node{Labels: match, Unschedulable: true}, nil, InventoryResult{}},
		"cordoned keeps it":            {&Node{Labels: match, Unschedulable: true}, have, InventoryResult{}},
		"left the pool":                {&Node{Labels: other}, have, InventoryResult{Delete: true}},
		"outside the watch":            {&Node{Labels: map[string]string{"pool": "shared"}}, nil, InventoryResult{}},
		"gone is the GPUNode's matter": {nil, have, InventoryResult{}},
	} {
		if got := ReconcileInventory(InventoryView{Node: c.node, Selector: selector, Pools: []Pool{pool}, GPUNode: c.have}); got != c.want {
			t.Errorf("%s: found %+v, expected %+v", name, got, c.want)
		}
	}
}
