package machine

import (
	"strings"
	"testing"
	"time"
)

func TestRule28_SwitchedOffMidwayPendingNodesFinish(t *testing.T) {
	for _, version := range []string{"2.13.0", "2.17.0"} {
		w := newWorld(t, version, 4)
		w.setImage("hypervisor:2")
		w.until(time.Minute, func() bool { return w.progress() == 25 })
		w.until(time.Minute, func() bool { return strings.Contains(w.phases(), Pending) })
		w.setAuto(false)
		w.run(2 * time.Minute)
		if n := w.updated(); n != 2 {
			t.Errorf("%s: %d updated, expected the first and the one under way", version, n)
		}
		w.setAuto(true)
		w.until(2*time.Minute, w.synced)
		if w.updated() != 4 || w.progress() != 100 {
			t.Errorf("%s: true again must continue: %d updated", version, w.updated())
		}
	}
}

func TestRule28_Before215AChangeWhileOffIsNotContinued(t *testing.T) {
	for version, continues := range map[string]bool{"2.14.0": false, "2.16.3": true} {
		w := newWorld(t, version, 4)
		w.setImage("hypervisor:2")
		w.until(time.Minute, func() bool { return w.progress() == 25 })
		w.setAuto(false)
		w.run(time.Minute)
		w.setImage("hypervisor:3")
		w.run(time.Minute)
		w.setAuto(true)
		w.run(2 * time.Minute)
		if got := w.updated() == 4; got != continues {
			t.Errorf("%s: continued %v", version, got)
		}
	}
}

func TestRule29_SealingWalksTo100WithoutTouchingAPod(t *testing.T) {
	for version, seals := range map[string]bool{"2.13.0": false, "2.14.0": false, "2.15.0": true, "2.17.0": true} {
		w := newWorld(t, version, 4, policy(func(p *UpdatePolicy) { p.AutoUpdateHypervisor = false }))
		w.setImage("hypervisor:2")
		w.run(5 * time.Second)
		for _, n := range sorted(w.nodes) {
			w.deleteHypervisor(n, "engine")
			w.run(5 * time.Second)
		}
		if w.updated() != 4 || w.progress() != 0 || w.synced() {
			t.Errorf("%s: %d new, progress %d, synced %v", version, w.updated(), w.progress(), w.synced())
		}
		uids := w.uidsNow()
		w.setAuto(true)
		w.run(2 * time.Minute)
		if got := w.synced() && w.progress() == 100; got != seals || changed(uids, w.uidsNow()) != 0 {
			t.Errorf("%s: sealed %v, %d pods touched", version, got, changed(uids, w.uidsNow()))
		}
	}
}

func TestRule29_FreshPools(t *testing.T) {
	for version, reaches := range map[string]bool{"2.13.0": false, "2.14.0": false, "2.15.0": true, "2.17.0": true} {
		w := newWorld(t, version, 4)
		if got := w.synced() && w.progress() == 100; got != reaches {
			t.Errorf("%s: progress %d, synced %v", version, w.progress(), w.synced())
		}
	}
}

func TestRule30_OneBrokenNodeBlocksTheRolloutAndEveryonesRollback(t *testing.T) {
	w := newWorld(t, "2.17.0", 4)
	w.setImage("hypervisor:2")
	w.until(time.Minute, func() bool { return w.progress() == 25 })
	w.neverReady["n1"] = true
	w.run(2 * time.Hour)
	if w.updated() != 1 || w.progress() != 25 || w.gpuNodes["n1"].Phase != Pending {
		t.Fatalf("the rollout must stall for ever: %d updated, %s", w.updated(), w.phases())
	}
	before := w.hashes()
	w.deleted = nil
	w.setImage("hypervisor:1")
	w.run(time.Hour)
	if len(w.deleted) != 1 || w.deleted[0].what != "n1" {
		t.Errorf("the revert must recreate the stuck node only, found %v", w.deleted)
	}
	if w.pods["n0"].Hash != before["n0"] {
		t.Error("n0 must wait until no node is Pending")
	}
	w.neverReady["n1"] = false
	w.after(0, "ready", "n1 "+w.pods["n1"].UID)
	w.until(5*time.Minute, w.synced)
	if w.updated() != 4 {
		t.Errorf("%d on the old config after the repair", w.updated())
	}
}

func TestRule31_RaisedPercentageEndsTheBatchThenTakesTheRest(t *testing.T) {
	w := newWorld(t, "2.17.0", 8)
	w.setImage("hypervisor:2")
	w.until(time.Minute, func() bool { return len(w.deleted) == 2 })
	w.edit(func(s *PoolSpec) { s.NodeManagerConfig.Policy.BatchPercentage = 100 })
	w.until(time.Minute, w.synced)
	last := w.deleted[len(w.deleted)-1].at
	rest := 0
	for _, d := range w.deleted {
		if last-d.at < 100*time.Millisecond {
			rest++
		}
	}
	if rest != 6 || len(w.deleted) != 8 {
		t.Errorf("expected 2 and then 6 at once, found %v", w.deleted)
	}
}

func TestRule31_PercentageZeroIsOneBatchAndAnEndlessUpdateLoop(t *testing.T) {
	w := newWorld(t, "2.17.0", 4)
	w.edit(func(s *PoolSpec) {
		s.NodeManagerConfig.Policy.BatchPercentage = 0
		s.ComponentConfig.Hypervisor.Image = "hypervisor:2"
	})
	w.run(time.Minute)
	if len(w.deleted) != 4 || w.deleted[3].at-w.deleted[0].at > time.Second {
		t.Errorf("expected one batch of all, found %v", w.deleted)
	}
	writes := w.clusterWrites
	w.run(time.Minute)
	if w.clusterWrites-writes < 10 || w.clusterPhase != Updating {
		t.Errorf("expected an endless loop, found %d writes in a minute, cluster %s", w.clusterWrites-writes, w.clusterPhase)
	}
}
