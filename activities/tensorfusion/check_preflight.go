package tensorfusion

import (
	"fmt"
	"slices"
	"strings"

	"github.com/Masterminds/semver/v3"

	"github.com/refit-run/refit/activities/finding"
)

func plural(n int, what string) string { return fmt.Sprintf("%d %s", n, what) }

const providerConfigCRD = "providerconfigs.tensor-fusion.ai"

// line is 1 or 2, 0 when it cannot be told: never from the chart's version,
// which is not monotonic (facts, section 1).
func line(v *semver.Version) uint64 {
	if v == nil {
		return 0
	}
	return v.Major()
}

func checkLine(o *Observation) []finding.Finding {
	source, target := line(o.Source.Controller), line(o.Target.Controller)
	if source >= 2 && o.CRDs[providerConfigCRD] == nil {
		return []finding.Finding{{
			Object: "CustomResourceDefinition/" + providerConfigCRD, Expected: "installed under a 2.x controller", Found: "absent",
			Why:  "the cluster's CRDs are of the 1.x line: new fields would be pruned",
			Next: "finish the v1 to v2 upgrade by its own guide first",
		}}
	}
	switch {
	case source == 0:
		return []finding.Finding{{
			Object: "running controller image " + o.Source.ControllerImage, Expected: "a tag that names its version",
			Found: "a tag that does not", Why: "what the controller does by itself depends on its version",
			Next: "pin the running controller to a version tag first",
		}}
	case target == 0:
		return []finding.Finding{{
			Object: "target controller image " + o.Target.ControllerImage, Expected: "a tag that names its version",
			Found: "a tag that does not", Next: "set controller.image.tag in the plan's values",
		}}
	case source != target:
		return []finding.Finding{{
			Object: "upgrade path", Expected: fmt.Sprintf("a target of the %d.x line", source),
			Found: fmt.Sprintf("%s -> %s", o.Source.Controller, o.Target.Controller),
			Why:   "crossing the major line follows another, stricter procedure",
			Next:  "follow the v1 to v2 upgrade guide of TensorFusion",
		}}
	}
	return nil
}

func checkHypervisorImage(o *Observation) []finding.Finding {
	image := o.Intent.HypervisorImage
	if image == "" {
		return []finding.Finding{{
			Object: "plan, hypervisorImage", Expected: "the image that every host shall run", Found: "empty",
			Why: "the chart pins it apart from the controller", Next: "set hypervisorImage in the plan",
		}}
	}
	var out []finding.Finding
	if h, c := imageVersion(image), o.Target.Controller; h != nil && c != nil && h.GreaterThan(c) {
		out = append(out, finding.Finding{
			Object: "plan, hypervisorImage " + image, Expected: "not newer than the target controller " + c.String(), Found: h.String(),
			Next: "choose a hypervisor of the controller's version or older",
		})
	}
	entries := entriesOf(o.Target.Clusters)
	for _, pool := range sortedKeys(entries) {
		h := entries[pool].Spec.Components.Hypervisor
		if h != nil && h.Image != image {
			out = append(out, finding.Finding{
				Object: "rendered TensorFusionCluster, GPUPool/" + pool, Expected: image, Found: orNone(h.Image),
				Next: "let cluster.hypervisorImage of the values and hypervisorImage of the plan agree",
			})
		}
	}
	return out
}

// doubtHypervisorImage: charts ship the hypervisor apart from the controller.
// Pairs from the one that the target chart ships up to the controller's own
// version are known; a rollback's pair has run here.
func doubtHypervisorImage(o *Observation) []finding.Finding {
	if o.Intent.Chart.Revision != 0 {
		return nil
	}
	image, shipped := o.Intent.HypervisorImage, imageVersion(o.Target.ShippedHypervisor)
	f := finding.Finding{
		Object: "plan, hypervisorImage " + image, Expected: "a version from the chart's own (" + orNone(versionString(shipped)) + ") up to the controller's (" + orNone(versionString(o.Target.Controller)) + ")",
		Why:  "nobody is known to have run this pair of hypervisor and controller",
		Next: "choose a hypervisor between the two, or acknowledge T02 once the pair has been tried",
	}
	switch v := imageVersion(image); {
	case v == nil:
		f.Found = "an image whose tag does not say its version"
	case shipped != nil && v.LessThan(shipped):
		f.Found = v.String()
	default:
		return nil
	}
	return []finding.Finding{f}
}

func checkAccess(o *Observation) []finding.Finding {
	var out []finding.Finding
	for _, d := range o.Denied {
		out = append(out, finding.Finding{
			Object: "rights of the worker", Expected: "may " + d, Found: "denied",
			Next: "grant it (the guide asks for cluster-admin), then retry",
		})
	}
	return out
}

func checkReleaseNotes(o *Observation) []finding.Finding {
	return []finding.Finding{{
		Object: "release notes of chart " + o.Target.Chart + ", controller " + versionString(o.Target.Controller),
		Found:  "nobody has said that they were read",
		Next:   "read them, then acknowledge T04 in the plan",
	}}
}

func checkReplicas(o *Observation) []finding.Finding {
	var out []finding.Finding
	for _, s := range []struct {
		object   string
		replicas int32
	}{{"running controller", o.Source.Replicas}, {"target controller", o.Target.Replicas}} {
		if s.replicas < 2 {
			out = append(out, finding.Finding{
				Object: s.object, Expected: "at least 2 replicas", Found: fmt.Sprint(s.replicas),
				Why:  "while it restarts, labelled pods can neither be created nor scheduled",
				Next: "set controller.replicaCount: 2, or acknowledge T05",
			})
		}
	}
	return out
}

func checkVault(o *Observation) []finding.Finding {
	if o.Vault == "" {
		return nil
	}
	return []finding.Finding{{
		Object: "artifact store", Expected: "a store that encrypts", Found: o.Vault,
		Why:  "the backup holds Secrets and values",
		Next: "give the worker at least one age recipient",
	}}
}

func checkValues(o *Observation) []finding.Finding {
	var out []finding.Finding
	for _, p := range o.Values.Lost {
		out = append(out, finding.Finding{Object: "value " + p, Expected: "as the user had set it", Found: "lost or changed, and the plan does not say so",
			Why: "Helm would fall back to the chart's default", Next: "name it in the plan's values"})
	}
	for _, p := range o.Values.Unknown {
		out = append(out, finding.Finding{Object: "value " + p, Expected: "a key of the target chart", Found: "unknown",
			Why: "the chart's schema lets typos pass silently", Next: "correct or remove it"})
	}
	for _, p := range o.Values.Live {
		out = append(out, finding.Finding{Object: "value " + p, Expected: "as intended", Found: "another value in the deployed release",
			Next: "look at the release's history for another upgrade, then start a new run"})
	}
	return out
}

func checkEmptyPools(o *Observation) []finding.Finding {
	var out []finding.Finding
	for _, pool := range sortedKeys(o.emptyPools()) {
		out = append(out, finding.Finding{
			Object: "GPUPool/" + pool, Found: "no GPU nodes: it performs no rollout, its progress stays empty and its phase may stay Updating",
			Next: "acknowledge T17: the pool is left out of the criteria for progress and phase",
		})
	}
	return out
}

// checkPorts compares what is live with what is rendered, and after the Helm
// step with what was live before it.
func checkPorts(o *Observation) []finding.Finding {
	var out []finding.Finding
	target := entriesOf(o.Target.Clusters)
	live := entriesOf(o.Clusters)
	for _, pool := range sortedKeys(live) {
		now := live[pool].Spec.Port()
		want, found := now, now
		if t, ok := target[pool]; ok {
			found = t.Spec.Port()
		}
		if before, ok := o.Before.Ports[pool]; ok && before != now {
			want, found = before, now
		}
		if want != found {
			out = append(out, finding.Finding{
				Object: "GPUPool/" + pool, Expected: fmt.Sprintf("hypervisor port %d as before", want), Found: fmt.Sprint(found),
				Why:  "running pods keep the port they were made with and lose their hypervisor",
				Next: "change the port on its own, and recreate the pool's workloads then",
			})
		}
	}
	return out
}

// defaultMaxDuration is what the CRD fills in when nobody set it.
const defaultMaxDuration = "10m"

func checkDeadFields(o *Observation) []finding.Finding {
	var out []finding.Finding
	for _, c := range o.Clusters {
		for _, e := range c.Spec.GPUPools {
			p := policyOf(c.Name, e)
			var set []string
			if p.MaxDuration != "" && p.MaxDuration != defaultMaxDuration {
				set = append(set, "maxDuration="+p.MaxDuration)
			}
			if p.MaintenanceWindow {
				set = append(set, "maintenanceWindow")
			}
			if len(set) > 0 {
				out = append(out, finding.Finding{
					Object: "policy of GPUPool/" + p.Pool, Found: strings.Join(set, ", ") + " set, but no controller reads them",
					Next: "use the plan's windows and maximum duration, and acknowledge T24",
				})
			}
		}
	}
	return out
}

func checkAgent(o *Observation) []finding.Finding {
	var out []finding.Finding
	for _, p := range o.Values.Agent {
		out = append(out, finding.Finding{Object: "value " + p, Expected: "as now", Found: "changed, and the plan does not say so",
			Why: "the cluster would lose its connection to the Console", Next: "keep the value, or rotate it by its own workflow"})
	}
	return out
}

func checkInProgress(o *Observation) []finding.Finding {
	var out []finding.Finding
	for _, p := range o.Pools {
		for _, key := range progressAnnotations {
			if v := p.Annotations[key]; v != "" {
				out = append(out, finding.Finding{Object: "GPUPool/" + p.Name, Expected: "no rollout in progress", Found: key + "=" + v,
					Next: "let the rollout end, or find the node that holds it up"})
			}
		}
	}
	for _, h := range o.Hosts {
		n, ok := o.Nodes[h.name]
		if ok && driverUpgrade(&n) != "" {
			out = append(out, finding.Finding{Object: "Node/" + h.name, Expected: "no driver upgrade in progress",
				Found: labelDriverUpgrade + "=" + driverUpgrade(&n), Why: "the controller leaves the node alone meanwhile",
				Next: "let the driver upgrade finish"})
		}
	}
	return out
}

// answered is the verdict of a database that is there and well.
func (d Database) answered() string {
	if d.Address == "" || d.Trouble != "" {
		return ""
	}
	return "GreptimeDB " + d.Address + " answered a login and a query, asked from " + d.Side
}

func checkDatabase(o *Observation) []finding.Finding {
	if o.Database.Trouble == "" || o.Database.Unseen {
		return nil
	}
	return []finding.Finding{o.Database.finding("bring the database back before the controller restarts")}
}

// doubtDatabase: that the worker can't reach a database outside of the cluster
// need not mean that the controller's pods can't. What it answers, counts.
func doubtDatabase(o *Observation) []finding.Finding {
	if !o.Database.Unseen {
		return nil
	}
	return []finding.Finding{o.Database.finding("let the worker reach it, or acknowledge P02 once it has answered a pod of the cluster")}
}

func (d Database) finding(next string) finding.Finding {
	return finding.Finding{
		Object: "GreptimeDB " + d.Address, Expected: "login and one query answered, asked from " + d.Side, Found: d.Trouble,
		Why:  "with -enable-auto-scale the controller exits at its start when the database does not answer",
		Next: next,
	}
}

func checkPolicies(o *Observation) []finding.Finding {
	var out []finding.Finding
	if v := o.Target.Controller; o.Policy == PolicySeal && v != nil && !atLeast(v, "2.15.0") {
		out = append(out, finding.Finding{Object: "plan, policy", Expected: "restore or keepOff with controller " + v.String(), Found: PolicySeal,
			Why:  "a controller below 2.15 does not take a pending change up when the flag goes on: the pools would never say synced",
			Next: "choose restore or keepOff"})
	}
	for _, c := range o.Clusters {
		for _, e := range c.Spec.GPUPools {
			p := policyOf(c.Name, e)
			object := "TensorFusionCluster/" + c.Name + ", pool entry " + e.Name
			if p.Missing {
				out = append(out, finding.Finding{Object: object, Expected: "a nodePoolRollingUpdatePolicy block", Found: "none",
					Why: "controllers below 2.10 panic without one, also after a rollback", Next: "add the block with the three flags false"})
				continue
			}
			if b := e.Spec.Policy().BatchPercentage; b != nil && (*b < 1 || *b > 100) {
				out = append(out, finding.Finding{Object: object, Expected: "batchPercentage 1..100", Found: fmt.Sprint(*b),
					Why: "0 is dropped and becomes one batch of 100 %", Next: "set 1..100; to stop a rollout set its flag to false"})
			}
		}
	}
	return out
}

func checkFloating(o *Observation) []finding.Finding {
	var out []finding.Finding
	for _, image := range o.Images.Floating {
		if !slices.Contains(o.Accepted, image) {
			out = append(out, finding.Finding{Object: "image " + image, Expected: "a tag that does not move", Found: "a floating tag",
				Why: "the same manifest gives other code tomorrow", Next: "pin it in the values, or list it under acceptedFloating"})
		}
	}
	return out
}

func checkImages(o *Observation) []finding.Finding {
	var out []finding.Finding
	for _, image := range sortedKeys(o.Images.Missing) {
		out = append(out, finding.Finding{Object: "image " + image, Expected: "in its registry, asked from the worker", Found: o.Images.Missing[image],
			Next: "check the tag and the worker's credentials; where the nodes pull from a mirror, name it in REFIT_REGISTRY_MIRRORS"})
	}
	return out
}

// checkIsolationPolicy: charts from 1.8.7 default to dynamic, and a change of
// the policy can delete every hypervisor at once (rule 24).
func checkIsolationPolicy(o *Observation) []finding.Finding {
	switch policy := o.Intent.IsolationPolicy; {
	case policy == "" && o.Target.KnowsIsolation:
		return []finding.Finding{{
			Object: "plan, isolationPolicy", Expected: "static or dynamic, explicitly", Found: "empty",
			Why:  "the chart's default may differ from what runs now (" + orNone(o.Source.IsolationPolicy) + "), and a change deletes hypervisors outside any batch",
			Next: "set isolationPolicy in the plan; static is what charts before 1.8.7 had",
		}}
	case policy != "" && policy != "static" && policy != "dynamic":
		return []finding.Finding{{
			Object: "plan, isolationPolicy", Expected: "static or dynamic", Found: policy, Why: "the controller exits at its start with any other value",
			Next: "correct isolationPolicy in the plan",
		}}
	}
	return nil
}
