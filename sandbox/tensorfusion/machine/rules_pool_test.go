package machine

import (
	"errors"
	"strings"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/utils/ptr"
)

func TestRule05_ClusterOverwritesPoolsAndDeletesWhatLeft(t *testing.T) {
	spec := baseSpec()
	v := ClusterView{Name: "tf", Entries: []Entry{{Name: "a", SpecTemplate: spec}, {Name: "b", SpecTemplate: spec}}}
	other := baseSpec()
	other.ComponentConfig.Hypervisor.Image = "edited"
	v.Pools = []Pool{{Name: "tf-a", Spec: other}, {Name: "tf-gone", Spec: spec}}
	r, err := ReconcileCluster(v)
	if err != nil {
		t.Fatal(err)
	}
	if len(r.Create) != 1 || r.Create[0].Name != "tf-b" || len(r.Update) != 1 || r.Update[0].Name != "tf-a" || len(r.Delete) != 1 || r.Delete[0] != "tf-gone" {
		t.Errorf("found %+v", r)
	}
	if r.Status.Phase != Updating || r.Requeue != 3*time.Second {
		t.Errorf("phase %s, requeue %s", r.Status.Phase, r.Requeue)
	}
	v.Pools = []Pool{{Name: "tf-a", Spec: spec, Status: PoolStatus{Phase: Running}}, {Name: "tf-b", Spec: spec, Status: PoolStatus{Phase: Updating}}}
	if r, err = ReconcileCluster(v); err != nil || r.Status.Phase != Updating || r.Requeue != 0 {
		t.Errorf("one pool updating: %+v, %v", r, err)
	}
	v.Pools[1].Status.Phase = Running
	if r, err = ReconcileCluster(v); err != nil || r.Status.Phase != Running {
		t.Errorf("all running: %+v, %v", r, err)
	}
}

func TestRule06_EmptyPoolWithMinResourcesStaysUpdating(t *testing.T) {
	w := newWorld(t, "2.17.0", 0)
	if w.pool.Status.Phase != Running {
		t.Errorf("without minResources: %s", w.pool.Status.Phase)
	}
	w = newWorld(t, "2.17.0", 0, func(w *world) {
		w.entry.CapacityConfig = &CapacityConfig{MinResources: &Resources{TFlops: ptr.To(resource.MustParse("20"))}}
	})
	if w.pool.Status.Phase != Updating || w.clusterPhase != Updating {
		t.Errorf("with minResources: pool %s, cluster %s", w.pool.Status.Phase, w.clusterPhase)
	}
}

func TestRule06_ReadinessAndCapacity(t *testing.T) {
	w := newWorld(t, "2.17.0", 2, func(w *world) {
		w.entry.CapacityConfig = &CapacityConfig{Oversubscription: &Oversubscription{TFlopsOversellRatio: 500, VRAMExpandToHostMem: 50, VRAMExpandToHostDisk: 70}}
	})
	s := w.pool.Status
	if s.Phase != Running || s.ReadyNodes != 2 || s.TotalGPUs != 4 || s.TotalTFlops.Value() != 400 || s.VirtualTFlops.Value() != 2000 || s.VirtualVRAM.String() != "704Gi" {
		t.Errorf("found %+v", s)
	}
	w.nodes["n0"].Ready = false
	w.deleteHypervisor("n0", "test")
	w.run(time.Second)
	if s := w.pool.Status; s.Phase != Running {
		t.Errorf("a gated node keeps its phase, so the pool does: %s", s.Phase)
	}
}

func TestRule06_MissingComponentConfigIsAnErrorAndStopsNothingElse(t *testing.T) {
	p := process(t, "2.17.0")
	pool := *testPool(nil)
	pool.Spec.ComponentConfig = nil
	r := p.ReconcilePool(PoolView{Pool: pool}, time.Time{})
	if r.Err == nil || r.Status.Phase != Running {
		t.Errorf("found %v, phase %s", r.Err, r.Status.Phase)
	}
	pool = *testPool(nil)
	pool.Spec.ComponentConfig.Hypervisor = nil
	r = p.ReconcilePool(PoolView{Pool: pool}, time.Time{})
	if r.Err == nil || r.Status.Components.Worker == "" {
		t.Errorf("an error of the hypervisor must not stop the worker: %v, %+v", r.Err, r.Status.Components)
	}
}

func TestRule07_MissingPolicyBlock(t *testing.T) {
	missing := func(w *world) { w.entry.NodeManagerConfig.Policy = nil }
	for version, panics := range map[string]bool{"2.0.0": true, "2.9.0": true, "2.10.0": false, "2.13.0": false, "2.17.0": false} {
		w := newWorld(t, version, 2, missing)
		if got := errors.Is(w.err, ErrPanic); got != panics {
			t.Errorf("%s: panic %v (%v)", version, got, w.err)
			continue
		}
		before := w.pool.Status.Components.Hypervisor
		if panics != (before == "") {
			t.Errorf("%s: recorded hash %q", version, before)
		}
		uids := w.uidsNow()
		w.setImage("hypervisor:2")
		w.run(time.Minute)
		if n := changed(uids, w.uidsNow()); n != 0 {
			t.Errorf("%s: a missing block is auto=false, but %d pods were replaced", version, n)
		}
		if moved := w.pool.Status.Components.Hypervisor != before; moved == panics {
			t.Errorf("%s: hash recorded %v", version, moved)
		}
	}
}

func TestRule07_UnreadableSettingsHaveDefaults(t *testing.T) {
	p := &UpdatePolicy{BatchPercentage: 101, BatchInterval: "soon"}
	if p.percentage() != 100 || p.interval() != time.Second {
		t.Errorf("found %d, %s", p.percentage(), p.interval())
	}
}

func TestRule08_AutoOffRecordsTheHashAndStops(t *testing.T) {
	w := newWorld(t, "2.17.0", 3)
	uids, before := w.uidsNow(), w.pool.Status.Components.Hypervisor
	w.setAuto(false)
	w.setImage("hypervisor:2")
	w.run(time.Minute)
	s := w.pool.Status.Components
	if s.Hypervisor == before || s.HypervisorSynced || s.HypervisorProgress != 0 || changed(uids, w.uidsNow()) != 0 {
		t.Errorf("found %+v, %d pods replaced", s, changed(uids, w.uidsNow()))
	}
	if a := w.pool.Annotations[InProgress(Hypervisor)]; a != "" {
		t.Errorf("in-progress %q", a)
	}
}

func TestRule09_EqualHashWithAutoOffChangesNothingEver(t *testing.T) {
	w := newWorld(t, "2.17.0", 3)
	w.setAuto(false)
	w.run(time.Minute)
	before, uids := w.pool.Status.Components, w.uidsNow()
	w.after(0, "pool", "")
	w.run(time.Hour)
	if w.pool.Status.Components != before || changed(uids, w.uidsNow()) != 0 {
		t.Error("something changed")
	}
}

func TestRule10_SwitchingOnStartsAPendingChangeOnlyFrom215(t *testing.T) {
	for version, starts := range map[string]bool{"2.13.0": false, "2.14.0": false, "2.15.0": true, "2.16.3": true, "2.17.0": true} {
		w := newWorld(t, version, 2, policy(func(p *UpdatePolicy) { p.AutoUpdateHypervisor = false }))
		w.setImage("hypervisor:2")
		w.run(time.Minute)
		w.setAuto(true)
		w.run(2 * time.Minute)
		if got := w.updated() == 2; got != starts {
			t.Errorf("%s: rolled %v, expected %v", version, got, starts)
		}
	}
}

func TestRule11_RecheckKeepsTheOldHashWhileTheAnnotationHasTheNew(t *testing.T) {
	w := newWorld(t, "2.17.0", 2)
	old := w.pool.Status.Components.Hypervisor
	w.neverReady["n0"] = true
	w.deleteHypervisor("n0", "test")
	w.run(5 * time.Second)
	w.setImage("hypervisor:2")
	w.run(time.Minute)
	if w.pool.Status.Components.Hypervisor != old {
		t.Error("the stored hash must stay while a node is Pending")
	}
	if a := w.pool.Annotations[InProgress(Hypervisor)]; a == "" || a == old {
		t.Errorf("in-progress %q", a)
	}
}

func TestRule11_EmptyPoolKeepsItsHashAndProgress(t *testing.T) {
	w := newWorld(t, "2.17.0", 0)
	before := w.pool.Status.Components
	if before.Hypervisor == "" || before.HypervisorProgress != 0 || before.HypervisorSynced {
		t.Errorf("found %+v", before)
	}
	w.setImage("hypervisor:2")
	w.run(time.Minute)
	if w.pool.Status.Components != before {
		t.Errorf("found %+v", w.pool.Status.Components)
	}
}

func TestRule12_AnUnrelatedPendingNodeHoldsTheRolloutAndOrderIsByAge(t *testing.T) {
	w := newWorld(t, "2.17.0", 3)
	w.gpuNodes["n2"].Created = w.start.Add(-time.Hour)
	w.nodes["n1"].Labels = map[string]string{driverUpgradeLabel: "upgrade-required"}
	w.deleteHypervisor("n1", "driver upgrade")
	w.gpuNodes["n1"].Phase = Pending
	w.run(time.Second)
	w.deleted = nil
	w.setImage("hypervisor:2")
	w.run(time.Minute)
	if len(w.deleted) != 0 {
		t.Errorf("deleted %v while n1 was Pending", w.deleted)
	}
	w.nodes["n1"].Labels[driverUpgradeLabel] = "upgrade-done"
	w.until(2*time.Minute, func() bool { return w.updated() == 3 && w.synced() })
	var order []string
	for _, d := range w.deleted {
		order = append(order, d.what)
	}
	if strings.Join(order, " ") != "n2 n0" {
		t.Errorf("order %v, expected the oldest first and n1 already new", order)
	}
}

func TestRule12_DeletingNodesAreNotCounted(t *testing.T) {
	w := newWorld(t, "2.17.0", 2)
	v := w.poolView()
	v.Nodes[0].GPUNode.Deleting, v.Nodes[0].GPUNode.Phase = true, Pending
	u, recheck, err := w.process.nodeUnits(v)
	if err != nil || recheck || u.total != 1 {
		t.Errorf("total %d, recheck %v, %v", u.total, recheck, err)
	}
}

func TestRule15_BatchArithmetic(t *testing.T) {
	for _, c := range []struct {
		total, outdated, done, percent int
		act, progress                  int
	}{
		{4, 4, 0, 25, 1, 0}, {4, 3, 0, 25, 0, 25}, {4, 3, 25, 25, 1, 25}, {4, 0, 75, 25, 0, 100},
		{1, 1, 0, 20, 1, 0}, {1, 0, 0, 20, 0, 20}, {10, 10, 0, 15, 2, 0}, {3, 3, 0, 100, 3, 0},
		{4, 0, 0, 25, 0, 100}, {8, 2, 0, 25, 0, 75}, {100, 100, 0, 33, 33, 0}, {100, 1, 99, 33, 1, 99},
	} {
		b, err := nextBatch(c.total, c.outdated, c.done, c.percent)
		if err != nil || b.act != c.act || b.progress != c.progress {
			t.Errorf("%+v: found %+v, %v", c, b, err)
		}
	}
}

func TestRule15_PercentageZeroPanicsAndStaysStuck(t *testing.T) {
	w := newWorld(t, "2.17.0", 2)
	w.pool.Spec.NodeManagerConfig.Policy.BatchPercentage = 0 // past the API server's default
	w.pool.Spec.ComponentConfig.Hypervisor.Image = "hypervisor:2"
	uids := w.uidsNow()
	for range 3 {
		w.dispatch(event{kind: "pool"})
		if !errors.Is(w.err, ErrPanic) {
			t.Fatalf("found %v", w.err)
		}
	}
	w.run(time.Minute)
	if changed(uids, w.uidsNow()) != 0 {
		t.Error("nothing may be replaced")
	}
}

func TestRule16_AnnotationsAreClearedAtTheEnd(t *testing.T) {
	w := newWorld(t, "2.17.0", 2, policy(func(p *UpdatePolicy) { p.BatchPercentage = 50 }))
	w.setImage("hypervisor:2")
	w.until(time.Minute, func() bool { return w.progress() == 50 })
	if w.synced() || w.pool.Annotations[LastTime(Hypervisor)] == "" || w.pool.Annotations[InProgress(Hypervisor)] == "" {
		t.Errorf("half way: synced %v, %v", w.synced(), w.pool.Annotations)
	}
	w.until(time.Minute, w.synced)
	if w.progress() != 100 || w.pool.Annotations[LastTime(Hypervisor)] != "" || w.pool.Annotations[InProgress(Hypervisor)] != "" {
		t.Errorf("at the end: progress %d, %v", w.progress(), w.pool.Annotations)
	}
}

func TestRule17_FourNodesAtAQuarterAndASecondTakeAboutTenSeconds(t *testing.T) {
	w := newWorld(t, "2.17.0", 4)
	w.setImage("hypervisor:2")
	w.run(50 * time.Millisecond)
	if len(w.deleted) != 1 || w.progress() != 0 {
		t.Errorf("the first batch starts at once: deleted %v, progress %d", w.deleted, w.progress())
	}
	took := w.until(time.Minute, w.synced)
	if took < 8*time.Second || took > 12*time.Second || w.updated() != 4 {
		t.Errorf("took %s with %d updated", took, w.updated())
	}
}

func TestRule17_OneNodeAtAFifthAndFiveMinutesTakesAboutTwentyMinutes(t *testing.T) {
	w := newWorld(t, "2.17.0", 1, policy(func(p *UpdatePolicy) { p.BatchPercentage, p.BatchInterval = 20, "5m" }))
	w.run(time.Hour) // a fresh pool walks its empty steps too
	w.setImage("hypervisor:2")
	replaced := w.until(time.Minute, func() bool { return w.updated() == 1 })
	took := w.until(time.Hour, w.synced)
	if replaced > 5*time.Second || took < 19*time.Minute || took > 21*time.Minute {
		t.Errorf("replaced after %s, done after %s: empty steps must wait too", replaced, took)
	}
}
