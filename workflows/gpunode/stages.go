package gpunode

import (
	"cmp"
	"fmt"
	"strings"

	"go.temporal.io/sdk/workflow"

	"github.com/refit-run/refit/activities/finding"
	"github.com/refit-run/refit/activities/gpu"
	"github.com/refit-run/refit/activities/node"
	"github.com/refit-run/refit/activities/tensorfusion"
	"github.com/refit-run/refit/workflows/protocol"
	"github.com/refit-run/refit/workflows/release"
	"github.com/refit-run/refit/workflows/stage"
)

// prepareStage is the stage whose section brings the host to what is declared.
const prepareStage = "prepare"

func (r *run) prepareRequest(boot string, planOnly bool) gpu.PrepareRequest {
	p := r.in.Prepare
	return gpu.PrepareRequest{Node: r.in.Node, NodeBootID: boot, MIG: p.MIG, VGPU: p.VGPU, PlanOnly: planOnly, Deadline: p.Limit.D()}
}

// tenantsChange is the version of the workflow that asks whose the instances are.
const tenantsChange = "tenants"

// spareTenants has the mode alone set where TensorFusion shares the GPUs out as
// MIG instances, whatever the plan says: they belong to its tenants, and an idle
// one would be surplus to any layout.
func (r *run) spareTenants(ctx workflow.Context, s *stage.Scope) error {
	m := r.in.Prepare.MIG
	if m == nil || m.ModeOnly || workflow.GetVersion(ctx, tenantsChange, workflow.DefaultVersion, 1) == workflow.DefaultVersion {
		return nil
	}
	var out tensorfusion.TenantsResult
	err := release.Do(ctx, s, r.in.Target.Cluster, tensorfusion.TenantsActivity, "ask whose the MIG instances are of "+r.in.Node, callLimit,
		tensorfusion.TenantsRequest{Target: r.in.Target, Node: r.in.Node}, &out)
	if err != nil || !out.Partitioned {
		return err
	}
	p, mode := *r.in.Prepare, *m
	mode.ModeOnly = true
	p.MIG = &mode
	r.in.Prepare = &p
	r.Warn(fmt.Sprintf("Node %s: the MIG mode alone is set, because its instances belong to tenants of TensorFusion (%s); declare modeOnly: true to say so in the plan", r.in.Node, out.Why))
	return nil
}

func (r *run) plan(ctx workflow.Context, s *stage.Scope) error {
	if err := r.spareTenants(ctx, s); err != nil {
		return err
	}
	boot, err := r.boot(ctx, s)
	if err != nil {
		return err
	}
	var out gpu.PrepareResult
	err = r.ask(ctx, s, gpu.PrepareActivity, "plan the set-up of", callLimit, r.prepareRequest(boot, true), &out)
	if f, class, ok := finding.Of(err); ok && class == finding.Wait && !r.in.PlanOnly {
		// Busy now, before the node is cordoned, is no reason to stop.
		s.Note("busy now: %s", f.Found)
		return nil
	}
	if err != nil {
		return err
	}
	r.out.Planned = &out
	s.Note("%s", words(out.Actions))
	return nil
}

// planned is the agent's plan as the command line and the receipt show it.
func planned(p *gpu.PrepareResult) *protocol.Plan {
	if p == nil {
		return nil
	}
	out := &protocol.Plan{}
	for _, a := range p.Actions {
		out.Changes = append(out.Changes, protocol.PlannedChange{Action: a.What, Object: "GPU " + a.Device})
	}
	for _, n := range p.Needs {
		out.Changes = append(out.Changes, protocol.PlannedChange{Action: "a " + n.Kind + ": " + n.Why, Object: "GPU " + n.Device})
	}
	return out
}

// words is a list of actions in one line.
func words(actions []gpu.Action) string {
	if len(actions) == 0 {
		return "nothing to do"
	}
	list := make([]string, len(actions))
	for i, a := range actions {
		list[i] = a.Device + " " + a.What
	}
	return fmt.Sprintf("%d actions: %s", len(actions), strings.Join(list, "; "))
}

func (r *run) keepOff(ctx workflow.Context, s *stage.Scope) error {
	out, err := r.onNode(ctx, s, node.KeepOffActivity, "keep foreign automation off")
	if err != nil {
		return err
	}
	r.uid = out.UID
	s.Note("label %s=false (before: %s)", node.ManagedLabel, out.Before)
	return nil
}

func (r *run) cordon(ctx workflow.Context, s *stage.Scope) error {
	r.cordoned = true
	out, err := r.onNode(ctx, s, node.CordonActivity, "cordon")
	if err != nil {
		return err
	}
	if out.Foreign {
		r.cordoned = false
		r.Warn(fmt.Sprintf("Node %s was cordoned by somebody else: it stays so after this run", r.in.Node))
	}
	if out.Inherited {
		// That run has not proven the host, whatever it did to it.
		r.begun = true
		s.Note("cordoned by an earlier run, which did not prove the host")
	}
	return nil
}

func (r *run) takeBaseline(ctx workflow.Context, s *stage.Scope) error {
	var b gpu.Baseline
	err := r.patient(ctx, s, busyLimit, func() error {
		boot, err := r.boot(ctx, s)
		if err != nil {
			return err
		}
		return r.ask(ctx, s, gpu.BaselineActivity, "baseline of", baselineLimit, gpu.BaselineRequest{Node: r.in.Node, NodeBootID: boot}, &b)
	})
	if err != nil {
		return err
	}
	r.baseline = &b
	s.Note("%d GPUs, driver %s", len(b.Devices), b.Driver)
	return nil
}

// prepare is one unbreakable section, a new one each time that a GPU was in use.
// One that was refused has ended with nothing half done.
func (r *run) prepare(ctx workflow.Context, s *stage.Scope) error {
	limit := r.in.Prepare.Limit.D()
	return r.patient(ctx, s, limit, func() error {
		var refused error
		err := s.Section(ctx, prepareStage, limit, func(ctx workflow.Context) error {
			err := r.setUp(ctx, s)
			if gpu.Untouched(err) {
				refused, err = err, nil
			}
			return err
		})
		return cmp.Or(err, refused)
	})
}

func (r *run) setUp(ctx workflow.Context, s *stage.Scope) error {
	// Again: the plan may have waited for days, and a retry for a repair.
	if err := r.spareTenants(ctx, s); err != nil {
		return err
	}
	boot, err := r.boot(ctx, s)
	if err != nil {
		return err
	}
	var out gpu.PrepareResult
	err = r.ask(ctx, s, gpu.PrepareActivity, "prepare", r.in.Prepare.Limit.D(), r.prepareRequest(boot, false), &out)
	if gpu.Untouched(err) {
		return err
	}
	if err != nil {
		// What was done before is not told: take it that modes have changed.
		r.begun, r.changedMIG = true, r.changedMIG || r.in.Prepare.MIG != nil
		return err
	}
	r.begun = r.begun || out.Begun()
	r.changedMIG = r.changedMIG || r.in.Prepare.MIG != nil && out.ChangedMIG()
	for _, note := range out.Notes {
		r.Warn(fmt.Sprintf("Node %s: %s", r.in.Node, note))
	}
	if before := r.out.Prepared; before != nil {
		out.Actions = append(before.Actions, out.Actions...)
	}
	r.out.Prepared = &out
	s.Note("%s", words(out.Actions))
	if len(out.Needs) == 0 {
		return nil
	}
	var found []finding.Finding
	kinds := map[string]bool{}
	for _, n := range out.Needs {
		found = append(found, finding.Finding{Object: "GPU " + n.Device, Expected: "no " + n.Kind + " needed", Found: n.Why})
		kinds[n.Kind] = true
	}
	helps := "reset the GPU (nvidia-smi --gpu-reset, with no client on it) or reboot the host, then answer retry: the set-up goes on from there"
	if kinds[gpu.NeedsReboot] {
		helps = "reboot the host, then answer retry: the set-up goes on from there"
	}
	return stage.Parking(fmt.Sprintf("node %s: %s", r.in.Node, out.Needs[0].Why),
		"the host is not as declared before that; the plan does not allow it, or it did not help", helps, nil, found...)
}

func (r *run) validate(ctx workflow.Context, s *stage.Scope) error {
	// A person who repairs the host most likely reboots it, which takes MIG
	// instances and vGPUs away: bring them back before it is judged again.
	if r.out.Validation != nil && r.in.Prepare != nil {
		if err := r.prepare(ctx, s); err != nil {
			return err
		}
	}
	limit := ValidationLimit(r.in.Level, r.in.Expect)
	baseline := r.baseline
	if baseline != nil && r.changedMIG {
		b := baseline.WithoutMIG()
		baseline = &b
	}
	expect, err := r.expect(ctx, s)
	if err != nil {
		return err
	}
	var out gpu.Result
	err = r.patient(ctx, s, busyLimit, func() error {
		boot, err := r.boot(ctx, s)
		if err != nil {
			return err
		}
		return r.ask(ctx, s, gpu.ValidateActivity, "validate", limit, gpu.ValidateRequest{
			Node: r.in.Node, NodeBootID: boot, Level: r.in.Level, Baseline: baseline, Deadline: limit, Expect: expect,
		}, &out)
	})
	if err != nil {
		return err
	}
	r.out.Validation = &out
	s.Note("verdict %s, %d rows passed", out.Verdict, out.Passed)
	switch {
	case out.Verdict == gpu.Pass:
		r.proven = true
		return nil
	case out.Verdict == gpu.Degraded && !r.in.Strict:
		r.proven = true
		r.Warn(fmt.Sprintf("Node %s is degraded: %s", r.in.Node, failed(out)[0]))
		return nil
	}
	helps := "repair the host, then answer retry: it is validated again"
	if out.Verdict == gpu.ResetNeeded {
		helps = "reset the GPU or reboot the host, then answer retry"
	}
	found := failed(out)
	return stage.Parking(fmt.Sprintf("node %s: verdict %s: %s", r.in.Node, out.Verdict, found[0]),
		"a host that is not proven must take no workload: it stays as it is now", helps, nil, found...)
}

// expect is what is declared, completed by what only the cluster knows.
func (r *run) expect(ctx workflow.Context, s *stage.Scope) (*gpu.Expect, error) {
	if !Incomplete(r.in.Expect) {
		return r.in.Expect, nil
	}
	var known tensorfusion.GPUHostsResult
	err := release.Do(ctx, s, r.in.Target.Cluster, tensorfusion.GPUHostsActivity, "ask for the hypervisor's port and the client pods of "+r.in.Node, callLimit,
		tensorfusion.GPUHostsRequest{Target: r.in.Target, Nodes: []string{r.in.Node}}, &known)
	if err != nil {
		return nil, err
	}
	return Complete(r.in.Expect, known.Hosts[r.in.Node]), nil
}

// failed are the rows that did not pass, at least one.
func failed(r gpu.Result) []finding.Finding {
	var out []finding.Finding
	for _, c := range r.Checks {
		if c.OK || c.Severity == gpu.Info {
			continue
		}
		f := finding.Finding{Object: strings.TrimSpace(c.Name + " " + c.Device), Expected: c.Expected, Found: c.Found, Next: c.Hint}
		if c.Skipped != "" {
			f.Found = "not answered: " + c.Skipped
		}
		out = append(out, f)
	}
	if len(out) == 0 {
		out = append(out, finding.Finding{Object: "verdict", Found: string(r.Verdict) + " without a row that says why", Next: "look at the agent's log on the host"})
	}
	return out
}

func (r *run) uncordon(ctx workflow.Context, s *stage.Scope) error {
	if !r.cordoned {
		s.Note("the cordon is somebody else's: left")
		return nil
	}
	if _, err := r.onNode(ctx, s, node.UncordonActivity, "uncordon"); err != nil {
		return err
	}
	r.cordoned = false
	return nil
}
