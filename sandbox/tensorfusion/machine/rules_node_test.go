package machine

import (
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
)

func TestRule18_HypervisorsGoThroughPendingAndGPUsLeaveScheduling(t *testing.T) {
	w := newWorld(t, "2.17.0", 1)
	w.setImage("hypervisor:2")
	w.run(50 * time.Millisecond)
	if w.gpuNodes["n0"].Phase != Pending {
		t.Errorf("phase %s", w.gpuNodes["n0"].Phase)
	}
	w.run(200 * time.Millisecond)
	if w.gpus["n0"][0].Phase != Pending {
		t.Errorf("GPU phase %s while the new pod is not Ready", w.gpus["n0"][0].Phase)
	}
	w.run(5 * time.Second)
	if w.gpuNodes["n0"].Phase != Running || w.gpus["n0"][0].Phase != Running {
		t.Errorf("node %s, GPU %s", w.gpuNodes["n0"].Phase, w.gpus["n0"][0].Phase)
	}
}

func TestRule19_DriverUpgradeLeavesADeletedHypervisorAway(t *testing.T) {
	w := newWorld(t, "2.17.0", 1)
	w.nodes["n0"].Labels[driverUpgradeLabel] = "pod-restart-required"
	w.deleteHypervisor("n0", "test")
	w.run(time.Minute)
	if w.pods["n0"] != nil {
		t.Error("the hypervisor must not come back during a driver upgrade")
	}
	w.nodes["n0"].Labels[driverUpgradeLabel] = "upgrade-done"
	w.beats = false
	w.until(7*time.Second, func() bool { return w.updated() == 1 })
}

func TestRule19_GoneNodeTakesItsGPUNode(t *testing.T) {
	w := newWorld(t, "2.17.0", 2)
	delete(w.nodes, "n0")
	w.after(0, "node", "n0")
	w.run(time.Second)
	if w.gpuNodes["n0"] != nil || w.gpuNodes["n1"] == nil {
		t.Errorf("found %s", w.phases())
	}
}

func TestRule19_EmptyPhaseBecomesPending(t *testing.T) {
	p, pool := process(t, "2.17.0"), testPool(nil)
	r := p.ReconcileNode(NodeView{GPUNode: GPUNode{Name: "n"}, Node: &Node{Name: "n"}, Pool: pool})
	if r.Phase != Pending || r.Create != nil {
		t.Errorf("found %+v", r)
	}
}

func TestRule20_NotReadyNode(t *testing.T) {
	for version, gated := range map[string]bool{"2.12.0": false, "2.12.1": true, "2.17.0": true} {
		w := newWorld(t, version, 1)
		w.nodes["n0"].Ready = false
		w.deleteHypervisor("n0", "test")
		w.run(time.Minute)
		if got := w.pods["n0"] == nil; got != gated {
			t.Errorf("%s: gated %v", version, got)
		}
		if gated && w.gpuNodes["n0"].Phase != Running {
			t.Errorf("%s: the phase must not be touched, found %s", version, w.gpuNodes["n0"].Phase)
		}
	}
	p, pool := process(t, "2.17.0"), testPool(nil)
	view := NodeView{GPUNode: GPUNode{Name: "n", Phase: Running}, Node: &Node{Name: "n"}, Pool: pool, Pod: &Pod{UID: "u", Phase: corev1.PodPending}}
	if r := p.ReconcileNode(view); r.DeletePod != "u" || r.Requeue != 3*time.Second {
		t.Errorf("a pod that is not Running is deleted, found %+v", r)
	}
	view.Pod.Phase = corev1.PodRunning
	if r := p.ReconcileNode(view); r.DeletePod != "" || r.Phase != "" {
		t.Errorf("a Running pod stays, found %+v", r)
	}
}

func TestRule21_CrashLoopRecreatesAlsoWithAutoOff(t *testing.T) {
	w := newWorld(t, "2.17.0", 1, policy(func(p *UpdatePolicy) { p.AutoUpdateHypervisor = false }))
	w.pods["n0"].Restarts = 5
	w.after(0, "node", "n0")
	w.run(20 * time.Second)
	if len(w.deleted) != 0 {
		t.Errorf("5 restarts are allowed, found %v", w.deleted)
	}
	w.pods["n0"].Restarts = 6
	w.after(0, "node", "n0")
	w.run(time.Second)
	if len(w.deleted) != 1 || w.deleted[0].reason != CrashLoop {
		t.Errorf("found %v", w.deleted)
	}
	w.process.MaxCrash = 0
	w.pods["n0"].Restarts = 100
	w.run(time.Minute)
	if len(w.deleted) != 1 {
		t.Error("0 turns it off")
	}
}

func TestRule21_RunningNodeKeepsAStalePodEvenWhileItTerminates(t *testing.T) {
	w := newWorld(t, "2.17.0", 1, func(w *world) { w.goneAfter = 5 * time.Second })
	w.pods["n0"].Hash = "stale"
	w.after(0, "node", "n0")
	w.run(time.Minute)
	if len(w.deleted) != 0 {
		t.Errorf("neither hash nor termination is checked on a Running node, found %v", w.deleted)
	}
	w.deleteHypervisor("n0", "external")
	w.run(4 * time.Second)
	if w.gpuNodes["n0"].Phase != Running {
		t.Errorf("it stays Running until the pod is gone, found %s", w.gpuNodes["n0"].Phase)
	}
	w.until(10*time.Second, func() bool { return w.updated() == 1 })
}

func TestRule21_StoppedPodOfAPendingNodeIsReplaced(t *testing.T) {
	w := newWorld(t, "2.17.0", 1)
	w.pods["n0"].Phase, w.pods["n0"].Ready = corev1.PodFailed, false
	w.after(0, "node", "n0")
	w.run(time.Second)
	if w.gpuNodes["n0"].Phase == Running && len(w.deleted) == 0 {
		t.Fatalf("found %s, %v", w.phases(), w.deleted)
	}
	w.until(10*time.Second, func() bool { return w.updated() == 1 && w.gpuNodes["n0"].Phase == Running })
}

func TestRule22_MissingPodComesFromTheCurrentSpecWhateverAutoSays(t *testing.T) {
	w := newWorld(t, "2.17.0", 2, policy(func(p *UpdatePolicy) { p.AutoUpdateHypervisor = false }))
	w.setImage("hypervisor:2")
	w.run(time.Second)
	w.deleteHypervisor("n0", "external")
	w.run(5 * time.Second)
	if w.pods["n0"].Hash != w.wanted() || w.pods["n1"].Hash == w.wanted() {
		t.Errorf("found %v, wanted %s on n0 only", w.hashes(), w.wanted())
	}
}

func TestRule22_WithoutGPUObjectsThePhaseIsUnchanged(t *testing.T) {
	p, pool := process(t, "2.17.0"), testPool(nil)
	pod := &Pod{UID: "u", Phase: corev1.PodRunning, Ready: true, Args: p.isolationArguments("soft")}
	pod.Hash = must(t)(p.NodeHash(pool, "soft"))
	view := NodeView{GPUNode: GPUNode{Name: "n", Phase: Pending}, Node: &Node{Name: "n", Ready: true}, Pool: pool, Pod: pod}
	if r := p.ReconcileNode(view); r.Phase != "" {
		t.Errorf("found %s", r.Phase)
	}
	view.GPUs = []GPU{{Name: "g", Phase: Pending, Missing: true, TFlops: decimal(1), VRAM: decimal(1)}}
	if r := p.ReconcileNode(view); r.Phase != "" {
		t.Errorf("only a missing GPU: found %s", r.Phase)
	}
	view.GPUs[0].Missing = false
	if r := p.ReconcileNode(view); r.Phase != Running || r.GPUPhase != Running {
		t.Errorf("found %+v", r)
	}
	p.ForcedNodes = map[string]string{"n": Pending}
	view.GPUNode.Phase = Running
	if r := p.ReconcileNode(view); r.Phase != Pending {
		t.Errorf("forced: found %+v", r)
	}
}

func TestRule23_IsolationArgumentsByVersion(t *testing.T) {
	for version, want := range map[string]string{
		"2.14.0": "[]", "2.15.0": "[--isolation-mode=soft]", "2.16.3": "[--isolation-mode=soft]",
		"2.17.0": "[--isolation-mode=soft --isolation-policy=static]",
	} {
		w := newWorld(t, version, 1)
		if got := sprint(w.pods["n0"].Args); got != want {
			t.Errorf("%s: %s, expected %s", version, got, want)
		}
	}
}

func TestRule23_Before215ALabelChangeDeletesThePodAtOnce(t *testing.T) {
	w := newWorld(t, "2.14.0", 1, policy(func(p *UpdatePolicy) { p.AutoUpdateHypervisor = false }))
	w.gpuNodes["n0"].Labels = map[string]string{IsolationLabel: "hard"}
	w.after(0, "node", "n0")
	w.run(5 * time.Second)
	if len(w.deleted) != 1 || sprint(w.pods["n0"].Args) != "[--isolation-mode=hard]" {
		t.Errorf("found %v, %v", w.deleted, w.pods["n0"].Args)
	}
}

func TestRule23_From215APendingModeChangeWaitsForItsBatch(t *testing.T) {
	w := newWorld(t, "2.15.0", 4)
	w.edit(func(s *PoolSpec) { s.NodeManagerConfig.DefaultIsolationMode = "hard" })
	w.run(2 * time.Second)
	if len(w.deleted) != 1 {
		t.Errorf("the other nodes must wait, found %v", w.deleted)
	}
	w.until(time.Minute, func() bool { return w.synced() && w.updated() == 4 })
}

// policyWorld is the setting of rule 24: four nodes, settled under static.
func policyWorld(t *testing.T, auto bool) *world {
	w := newWorld(t, "2.17.1", 4)
	w.setAuto(auto)
	w.run(time.Minute)
	w.deleted = nil
	return w
}

func TestRule24_StaticToDynamicWithAutoOnDeletesAllAtOnce(t *testing.T) {
	w := policyWorld(t, true)
	labels := w.hashes()
	w.process.Policy = DynamicPolicy
	begin := w.now.Sub(w.start)
	w.restart("2.17.1", 4)
	w.until(2*time.Minute, func() bool { return w.synced() && w.updated() == 4 })
	if len(w.deleted) != 4 || w.deleted[3].at-begin > 100*time.Millisecond {
		t.Errorf("expected all 4 within 0.1 s, found %v", w.deleted)
	}
	if changed(labels, w.hashes()) != 0 || w.progress() != 100 {
		t.Errorf("labels changed on %d, progress %d", changed(labels, w.hashes()), w.progress())
	}
}

func TestRule24_StaticToDynamicWithAutoOffIsARace(t *testing.T) {
	for first, want := range map[int]int{0: 0, 1: 1, 2: 2, 4: 4} {
		w := policyWorld(t, false)
		w.process.Policy = DynamicPolicy
		w.restart("2.17.1", first)
		w.run(10 * time.Minute)
		if len(w.deleted) != want {
			t.Errorf("the pool recorded the change after %d nodes: %d deleted", first, len(w.deleted))
		}
	}
}

func TestRule24_DynamicToStaticSealsWithWrongArgumentsThenDeletes(t *testing.T) {
	w := newWorld(t, "2.17.1", 4, func(w *world) { w.process.Policy = DynamicPolicy })
	w.setAuto(false)
	w.run(time.Minute)
	w.deleted, w.beats = nil, false
	w.process.Policy = StaticPolicy
	w.restart("2.17.1", 4)
	w.run(time.Minute)
	if len(w.deleted) != 0 || w.synced() {
		t.Fatalf("all pods are kept and synced is false, found %v, synced %v", w.deleted, w.synced())
	}
	w.setAuto(true)
	w.until(time.Minute, w.synced)
	if w.progress() != 100 || len(w.deleted) != 0 {
		t.Fatalf("100/synced while every pod has the old argument, found progress %d, %v", w.progress(), w.deleted)
	}
	w.beats = true
	w.run(12 * time.Second)
	if len(w.deleted) != 4 {
		t.Errorf("the next Node event deletes each pod, found %v", w.deleted)
	}
}

func TestUpgradeFrom216To217DeletesEveryHypervisorAlsoWithAutoOff(t *testing.T) {
	for _, auto := range []bool{true, false} {
		w := newWorld(t, "2.16.3", 6, withProvider)
		w.setAuto(auto)
		w.run(time.Minute)
		w.deleted = nil
		before := w.pool.Status.Components
		begin := w.now.Sub(w.start)
		w.restart("2.17.0", 6)
		w.run(time.Minute)
		if len(w.deleted) != 6 || w.deleted[5].at-begin > 100*time.Millisecond {
			t.Errorf("auto %v: expected all 6 at once, found %v", auto, w.deleted)
		}
		if w.pool.Status.Components != before {
			t.Errorf("auto %v: H stays equal, so nothing is recorded", auto)
		}
	}
}

func TestUpgradeFrom216To217IsHarmlessAfterHoldAndNudge(t *testing.T) {
	w := newWorld(t, "2.16.3", 6, withProvider)
	w.setAuto(false)
	w.run(time.Minute)
	w.edit(func(s *PoolSpec) {
		s.ComponentConfig.Hypervisor.PodTemplate = []byte(`{"template":{"spec":{"containers":[{"name":"h","env":[{"name":"NUDGE","value":"1"}]}]}}}`)
	})
	w.run(time.Minute)
	if w.synced() {
		t.Fatal("the nudge must store synced=false")
	}
	w.deleted = nil
	w.restart("2.17.0", 6)
	w.run(10 * time.Minute)
	if len(w.deleted) != 0 {
		t.Fatalf("found %v", w.deleted)
	}
	for _, n := range sorted(w.nodes) {
		w.deleteHypervisor(n, "engine")
		w.run(5 * time.Second)
	}
	w.setAuto(true)
	w.until(time.Minute, w.synced)
	w.run(10 * time.Minute)
	if len(w.deleted) != 6 || w.updated() != 6 {
		t.Errorf("after the seal %d deletions and %d updated", len(w.deleted), w.updated())
	}
}

func TestUpgradeFrom215To217RollsInBatches(t *testing.T) {
	w := newWorld(t, "2.15.0", 4)
	w.restart("2.17.0", 4)
	w.run(2 * time.Second)
	if len(w.deleted) != 1 {
		t.Errorf("2.15 composes differently: the pods wait for batches, found %v", w.deleted)
	}
	w.until(time.Minute, func() bool { return w.synced() && w.updated() == 4 })
}

func TestUpgradeFrom213To214MakesPodsOfTheNewName(t *testing.T) {
	w := newWorld(t, "2.13.0", 1)
	old := w.pods["n0"].Name
	w.restart("2.14.0", 1)
	w.run(10 * time.Second)
	if old != "tf-hypervisor-n0" || w.pods["n0"].Name != "hypervisor-n0" || len(w.deleted) != 0 {
		t.Errorf("from %s to %s, deleted %v: the old pod is nobody's", old, w.pods["n0"].Name, w.deleted)
	}
}

func TestProviderConfigChangeByVersion(t *testing.T) {
	for version, want := range map[string]struct{ atStart, atChange int }{
		"2.9.0": {4, 4}, "2.11.0": {4, 4}, "2.11.2": {0, 4}, "2.13.0": {0, 4}, "2.14.0": {0, 0}, "2.17.0": {0, 0},
	} {
		w := newWorld(t, version, 4, withProvider, policy(func(p *UpdatePolicy) { p.AutoUpdateHypervisor = false }))
		w.deleted = nil
		w.restart(version, 4)
		w.run(time.Minute)
		if len(w.deleted) != want.atStart {
			t.Errorf("%s: %d deleted by a controller start, expected %d", version, len(w.deleted), want.atStart)
		}
		w.deleted = nil
		w.provider.Spec.Images.Middleware = "middleware:2"
		w.after(0, "provider", "")
		w.run(time.Minute)
		if len(w.deleted) != want.atChange {
			t.Errorf("%s: %d deleted by a change with auto off, expected %d", version, len(w.deleted), want.atChange)
		}
	}
	w := newWorld(t, "2.14.0", 4, withProvider)
	w.provider.Spec.Images.Middleware = "middleware:2"
	w.after(0, "provider", "")
	w.run(2 * time.Second)
	if len(w.deleted) != 1 {
		t.Errorf("from 2.14 the change is batched, found %v", w.deleted)
	}
	w.until(time.Minute, func() bool { return w.updated() == 4 })
}

func TestRule27_AutoOffIsNoFreeze(t *testing.T) {
	for name, disturb := range map[string]func(*world){
		"deleted by hand": func(w *world) { w.deleteHypervisor("n0", "external") },
		"not Ready once": func(w *world) {
			w.pods["n0"].Ready = false
			w.after(0, "node", "n0")
		},
		"stopped": func(w *world) {
			w.pods["n0"].Phase, w.pods["n0"].Ready = corev1.PodFailed, false
			w.after(0, "node", "n0")
		},
		"crash loop": func(w *world) {
			w.pods["n0"].Restarts = 6
			w.after(0, "node", "n0")
		},
		"node recreated": func(w *world) {
			w.gpuNodes["n0"] = &GPUNode{Name: "n0", Created: w.now}
			w.after(0, "node", "n0")
		},
		"device plugin gap": func(w *world) {
			w.process.Toolkit = true
			w.nodes["n0"].NoDevicePlugin = true
			w.after(0, "node", "n0")
			w.run(time.Second)
			w.nodes["n0"].NoDevicePlugin = false
		},
	} {
		w := newWorld(t, "2.17.0", 2, policy(func(p *UpdatePolicy) { p.AutoUpdateHypervisor = false }))
		w.setImage("hypervisor:2")
		w.run(time.Minute)
		disturb(w)
		w.run(time.Minute)
		if w.pods["n0"] == nil || w.pods["n0"].Hash != w.wanted() {
			t.Errorf("%s: the stale pod must come back new", name)
		}
		if w.pods["n1"].Hash == w.wanted() {
			t.Errorf("%s: the other node must not move", name)
		}
	}
}
