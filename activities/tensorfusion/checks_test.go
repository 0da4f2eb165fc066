package tensorfusion

import (
	"slices"
	"strings"
	"testing"

	"github.com/Masterminds/semver/v3"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/refit-run/refit/activities/finding"
)

func specOf(t *testing.T, row string) CheckSpec {
	t.Helper()
	i := slices.IndexFunc(Checks, func(c CheckSpec) bool { return c.Row == row })
	require.GreaterOrEqual(t, i, 0, "row %s is not in the registry", row)
	return Checks[i]
}

func claimSet(size string) *unstructured.Unstructured {
	return &unstructured.Unstructured{Object: map[string]any{
		"kind": "StatefulSet", "metadata": map[string]any{"name": "alert-manager"},
		"spec": map[string]any{"volumeClaimTemplates": []any{map[string]any{
			"metadata": map[string]any{"name": "data"},
			"spec":     map[string]any{"resources": map[string]any{"requests": map[string]any{"storage": size}}},
		}}},
	}}
}

type checkCase struct {
	row   string
	world string
	spoil func(*Observation)
	says  string
}

// checkCases spoil the sound world in one way each; the row must say so.
var checkCases = []checkCase{
	{"T01", "source is 1.x, target 2.x", func(o *Observation) { o.Source.Controller = semver.MustParse("1.58.5") }, "v1 to v2"},
	{"T01", "the controller runs :latest", func(o *Observation) { o.Source.Controller = nil }, "pin the running controller"},
	{"T01", "the target is :latest", func(o *Observation) { o.Target.Controller = nil }, "controller.image.tag"},
	{"T01", "a 2.x controller on 1.x CRDs", func(o *Observation) { delete(o.CRDs, providerConfigCRD) }, "absent"},
	{"T02", "the plan names no hypervisor image", func(o *Observation) { o.Intent.HypervisorImage = "" }, "set hypervisorImage"},
	{"T02", "the hypervisor is newer than the controller", func(o *Observation) { o.Intent.HypervisorImage = "registry.test/hypervisor:2.18.0" }, "2.18.0"},
	{"T02", "the hypervisor is older than the one that the chart ships", func(o *Observation) { o.Intent.HypervisorImage = retag(o, "2.14.0") }, "2.15.0"},
	{"T02", "the hypervisor's tag says no version", func(o *Observation) { o.Intent.HypervisorImage = retag(o, "nightly") }, "does not say"},
	{"T02", "the render has another image", func(o *Observation) { o.Target.Clusters = []FusionCluster{testCluster(oldHypervisor)} }, oldHypervisor},
	{"T03", "a right is missing", func(o *Observation) { o.Denied = []string{"delete pods in group core"} }, "delete pods"},
	{"T04", "nobody has read the release notes", func(*Observation) {}, "acknowledge T04"},
	{"T05", "one replica runs", func(o *Observation) { o.Source.Replicas = 1 }, "running controller"},
	{"T05", "one replica is rendered", func(o *Observation) { o.Target.Replicas = 1 }, "target controller"},
	{"T06", "the store has no recipients", func(o *Observation) { o.Vault = "none" }, "age recipient"},
	{"T08", "a user's value is lost", func(o *Observation) { o.Values.Lost = []string{"alert.replicaCount"} }, "alert.replicaCount"},
	{"T08", "a value is misspelt", func(o *Observation) { o.Values.Unknown = []string{"agnet.agentId (did you mean agent?)"} }, "did you mean"},
	{"T08", "the release has other values", func(o *Observation) { o.Values.Live = []string{"a.b"} }, "a.b"},
	{"T09", "the rollout is not complete", func(o *Observation) { o.Controller.RolledOut = "1 of 2 replicas updated" }, "1 of 2"},
	{"T09", "a replica is not ready", func(o *Observation) { o.Controller.Ready = 1 }, "2 replicas ready"},
	{"T09", "the image is another", func(o *Observation) { o.Controller.Image = "registry.test/operator:2.16.3" }, "2.16.3"},
	{"T10", "the Alertmanager is not ready", func(o *Observation) {
		o.Neighbours = []Neighbour{{Object: "StatefulSet/x/alert-manager", Trouble: "0 of 1 replicas ready"}}
	}, "alert-manager"},
	{"T14", "a rolled host runs the old image", func(o *Observation) { o.Hosts[0].pods[0].Spec.Containers[0].Image = oldHypervisor }, "node-1"},
	{"T15", "a worker is not ready", func(o *Observation) { o.Workloads[0].Status.ReadyWorkers = 0 }, "0 ready"},
	{"T15", "a worker has the old template", func(o *Observation) { o.Workers[0].Labels[labelTemplateHash] = "old" }, "template hash old"},
	{"T15", "a worker has the old image", func(o *Observation) { o.Workers[0].Spec.Containers[0].Image = "old" }, "image old"},
	{"T16", "a client has an old injection", func(o *Observation) { o.Clients[0].Labels[labelTemplateHash] = "old" }, "ml/app"},
	{"T17", "a pool has no nodes", func(o *Observation) { o.Hosts = nil }, "acknowledge T17"},
	{"T18", "the cluster is Updating", func(o *Observation) { o.Clusters[0].Status.Phase = "Updating" }, "TensorFusionCluster"},
	{"T18", "a pool is Updating", func(o *Observation) { o.Pools[0].Status.Phase = "Updating" }, "GPUPool"},
	{"T18", "a GPU node is Pending", func(o *Observation) { o.Hosts[1].gpuNode.Status.Phase = "Pending" }, "node-2"},
	{"T19", "a node has two hypervisor pods", func(o *Observation) {
		p := provenPod("node-1")
		p.Name = podPrefixOld + "node-1"
		o.Hosts[0].pods = append(o.Hosts[0].pods, p)
	}, "exactly one"},
	{"T19", "a node has none", func(o *Observation) { o.Hosts[0].pods = nil }, "found 0"},
	{"T19", "the pod is not Ready", func(o *Observation) { o.Hosts[0].pods[0].Status.Conditions = nil }, "Ready"},
	{"T19", "the pod has the old image", func(o *Observation) { o.Hosts[0].pods[0].Spec.Containers[0].Image = oldHypervisor }, oldHypervisor},
	{"T22", "a field is missing in the target's CRD", func(o *Observation) {
		o.CRDs["gpus."+apiGroup] = testCRD("gpus", "vendor", "nvLink")
	}, "nvLink"},
	{"T22", "the target serves another version only", func(o *Observation) { o.Target.CRDs[0].Spec.Versions[0].Name = "v2" }, "version v1"},
	{"T23", "the port changes", func(o *Observation) {
		o.Target.Clusters[0].Spec.GPUPools[0].Spec.Components.Hypervisor.PortNumber = pointer(int32(8001))
	}, "8001"},
	{"T23", "the port has changed since", func(o *Observation) { o.Before.Ports["tensor-fusion-shared"] = 8001 }, "port 8001 as before"},
	{"T24", "maxDuration is set", func(o *Observation) { o.Clusters[0].Spec.GPUPools[0].Spec.Policy().MaxDuration = "2h" }, "maxDuration=2h"},
	{"T26", "the agent's token changes", func(o *Observation) { o.Values.Agent = []string{"agent.enrollToken"} }, "agent.enrollToken"},
	{"P01", "a rollout is in progress", func(o *Observation) {
		o.Pools[0].Annotations = map[string]string{progressAnnotations[0]: "4dc514a352b33a66"}
	}, "4dc514a352b33a66"},
	{"P01", "a driver upgrade is in progress", func(o *Observation) {
		n := readyNode("node-1")
		n.Labels = map[string]string{labelDriverUpgrade: "pod-restart-required"}
		o.Nodes["node-1"] = n
	}, "pod-restart-required"},
	{"P02", "the database refuses the login", func(o *Observation) {
		o.Database = Database{Address: "db:4002", Side: fromCluster, Trouble: "login: refused with 1045"}
	}, "1045"},
	{"P02", "a database outside refuses the worker's login", func(o *Observation) {
		o.Database = Database{Address: "db.test:4002", Side: fromWorker, Trouble: "login: refused with 1045"}
	}, "1045"},
	{"P02", "the worker does not reach a database outside", func(o *Observation) {
		o.Database = Database{Address: "db.test:4002", Side: fromWorker, Trouble: "i/o timeout", Unseen: true}
	}, "asked from the worker"},
	{"P03", "the policy block is missing", func(o *Observation) { o.Clusters[0].Spec.GPUPools[0].Spec.NodeManager.Policy = nil }, "panic"},
	{"P03", "the policy can't be sealed by the target", func(o *Observation) {
		o.Policy, o.Target.Controller = PolicySeal, semver.MustParse("2.14.0")
	}, "never say synced"},
	{"P03", "batchPercentage is 0", func(o *Observation) { o.Clusters[0].Spec.GPUPools[0].Spec.Policy().BatchPercentage = pointer(int32(0)) }, "1..100"},
	{"P04", "the diff deletes a Namespace", func(o *Observation) {
		o.Changes = []Change{{Action: "delete", Kind: "Namespace", Object: "Namespace/greptimedb"}}
	}, "Namespace/greptimedb"},
	{"P04", "a volume claim changes", func(o *Observation) {
		o.Changes = []Change{{Action: "change", Kind: "StatefulSet", Object: "StatefulSet/x/alert-manager", Old: claimSet("5Gi"), New: claimSet("10Gi")}}
	}, "volumeClaimTemplates"},
	{"P04", "a pool's entry disappears", func(o *Observation) { o.Target.Clusters[0].Spec.GPUPools[0].Name = "renamed" }, "tensor-fusion-shared"},
	{"P05", "the target drops a right", func(o *Observation) {
		o.Target.Objects = []*unstructured.Unstructured{testRole("tf-role", "get", "list")}
	}, "watch gpus"},
	{"P05", "a new kind is not granted", func(o *Observation) {
		o.Target.CRDs = append(o.Target.CRDs, testCRD("gpuresourcequotas"))
	}, "gpuresourcequotas"},
	{"P05", "the live controller lacks a right", func(o *Observation) { o.Lacking = []string{"update gpunodes/status in group " + apiGroup} }, "gpunodes/status"},
	{"P06", "nobody leads", func(o *Observation) { o.Controller.LeaderTrouble = "nobody holds the lease" }, "nobody"},
	{"P06", "the webhook does not answer", func(o *Observation) { o.Controller.WebhookTrouble = "connection refused" }, "connection refused"},
	{"P08", "a tag floats", func(o *Observation) { o.Images.Floating = []string{"vector:latest-alpine"} }, "vector:latest-alpine"},
	{"P09", "an image is missing", func(o *Observation) { o.Images.Missing = map[string]string{"operator:2.99.0": "404"} }, "asked from the worker"},
	{"P10", "the isolation policy is not pinned", func(o *Observation) { o.Intent.IsolationPolicy = "" }, "set isolationPolicy"},
	{"P10", "the isolation policy is misspelt", func(o *Observation) { o.Intent.IsolationPolicy = "Static" }, "static or dynamic"},
	{"P12", "a hypervisor was replaced", func(o *Observation) { o.Hosts[0].pods[0].UID = "another" }, "node-1"},
	{"P12", "a worker was replaced", func(o *Observation) { o.Workers[0].UID = "another" }, "llm-tf-worker-a"},
	{"P12", "a worker was replaced under another name", func(o *Observation) {
		o.Workers[0].Name, o.Workers[0].UID = "llm-tf-worker-b", "another"
	}, "another worker made"},
	{"P12", "a worker is gone and missing", func(o *Observation) { o.Workers = nil }, "0 of 1 workers left"},
	{"P13", "an allocation is lost", func(o *Observation) { delete(o.Allocated, "ml/llm-tf-worker-a") }, "Pod/ml/llm-tf-worker-a"},
	{"P13", "one is lost and another one new", func(o *Observation) {
		o.Allocated = map[string]bool{"ml/app": true, "ml/new": true}
	}, "Pod/ml/llm-tf-worker-a"},
	{"P13", "that of an application with a local GPU is lost", func(o *Observation) { delete(o.Allocated, "ml/app") }, "Pod/ml/app"},
	{"P13", "the leader does not answer", func(o *Observation) { o.Allocated = nil }, "no answer"},
	{"P13", "those before are unknown, but not the workers", func(o *Observation) {
		o.Before.Allocations, o.Before.Allocated, o.Allocated = -1, nil, map[string]bool{}
		o.Workers[0].Status = provenPod("x").Status
	}, "Pod/ml/llm-tf-worker-a"},
	{"P14", "a Node is not Ready", func(o *Observation) { o.Nodes["node-2"] = corev1.Node{} }, "not Ready"},
	{"P14", "a GPUNode is Pending", func(o *Observation) { o.Hosts[0].gpuNode.Status.Phase = "Pending" }, "node-1"},
	{"P14", "a GPU is gone", func(o *Observation) { o.Hosts[0].gpus = o.Hosts[0].gpus[:1] }, "3 GPUs"},
}

// retag is the new hypervisor image under another tag, rendered as named.
func retag(o *Observation, tag string) string {
	image := strings.Replace(newHypervisor, "2.17.0", tag, 1)
	o.Target.Clusters = []FusionCluster{testCluster(image)}
	return image
}

func TestChecks(t *testing.T) {
	for _, tc := range checkCases {
		t.Run(tc.row+"/"+tc.world, func(t *testing.T) {
			o := soundWorld()
			tc.spoil(o)
			found := specOf(t, tc.row).found(o)
			require.NotEmpty(t, found)
			assert.Equal(t, tc.row, found[0].Row)
			assert.Contains(t, found[0].String()+found[0].Why, tc.says)
		})
	}
}

func TestASoundWorldPassesEveryStage(t *testing.T) {
	for _, stage := range []string{StagePreflight, StageDiff, StageController, StageVerify, StageDrift} {
		checks := runChecks(soundWorld(), stage, []string{"T04"})
		require.NotEmpty(t, checks)
		blocking, _ := blockingOf(checks)
		assert.Empty(t, blocking, stage)
	}
}

func TestOnlyOperatorRowsCanBeAcknowledged(t *testing.T) {
	o := soundWorld()
	o.Source.Replicas = 1
	o.Denied = []string{"delete pods"}
	blocking, class := blockingOf(runChecks(o, StagePreflight, []string{"T03", "T04", "T05"}))
	require.Len(t, blocking, 1)
	assert.Equal(t, "T03", blocking[0].Row)
	assert.Equal(t, finding.Stop, class)
}

// What can't be told from here is the operator's to decide, whatever the row
// says of what can be told.
func TestDoubtsOfAStopRowCanBeAcknowledged(t *testing.T) {
	verdict := func(row string, spoil func(*Observation)) Check {
		o := soundWorld()
		spoil(o)
		checks := runChecks(o, StagePreflight, []string{row, "T04"})
		return checks[slices.IndexFunc(checks, func(c Check) bool { return c.Row == row })]
	}
	for row, doubt := range map[string]func(*Observation){
		"T02": func(o *Observation) { o.Intent.HypervisorImage = retag(o, "2.14.0") },
		"P02": func(o *Observation) {
			o.Database = Database{Address: "db.test:4002", Side: fromWorker, Trouble: "i/o timeout", Unseen: true}
		},
	} {
		c := verdict(row, doubt)
		assert.False(t, c.OK, row)
		assert.True(t, c.Acknowledged, row)
	}
	for row, known := range map[string]func(*Observation){
		"T02": func(o *Observation) { o.Intent.HypervisorImage = retag(o, "2.18.0") },
		"P02": func(o *Observation) {
			o.Database = Database{Address: "db.test:4002", Side: fromWorker, Trouble: "login: refused with 1045"}
		},
	} {
		c := verdict(row, known)
		assert.False(t, c.Acknowledged, row)
		assert.Equal(t, finding.Stop, c.Class, row)
	}
	assert.True(t, verdict("T02", func(o *Observation) {
		o.Intent.HypervisorImage, o.Intent.Chart = retag(o, "2.14.0"), Chart{Revision: 3}
	}).OK, "a rollback's pair has run here")
}

func TestAcceptedFloatingImagesAreNotReported(t *testing.T) {
	o := soundWorld()
	o.Images.Floating, o.Accepted = []string{"a:latest", "b:latest"}, []string{"a:latest"}
	found := specOf(t, "P08").found(o)
	require.Len(t, found, 1)
	assert.Contains(t, found[0].Object, "b:latest")
}

func TestAWorkloadThatItsOwnerMakesSmallerIsNoDrift(t *testing.T) {
	o := soundWorld()
	second := o.Workers[0]
	second.Name, second.UID = "llm-tf-worker-b", "uid-b"
	o.Workers = append(o.Workers, second)
	o.Before = o.snapshot()
	o.Workers = o.Workers[:1]
	assert.Empty(t, specOf(t, "P12").found(o), "2 -> 1 replicas")
	o.Workers, o.Workloads = nil, nil
	assert.Empty(t, specOf(t, "P12").found(o), "the workload was deleted")
	o.Allocated = map[string]bool{"ml/app": true}
	assert.Empty(t, specOf(t, "P13").found(o), "their allocations go with them")
}

func TestOnlyPoolsWhoseWorkersAndClientsWereReplacedAreJudged(t *testing.T) {
	o := soundWorld()
	o.Workloads[0].Status.ReadyWorkers = 0
	o.Workers[0].Spec.Containers[0].Image = "old"
	o.Clients[0].Labels[labelTemplateHash] = "old"
	o.Rolled.Left = []string{"ml/app"}
	assert.Empty(t, specOf(t, "T16").found(o), "it was left alone and listed")
	o.Rolled = Rolled{Hypervisors: o.Rolled.Hypervisors}
	assert.Empty(t, specOf(t, "T15").found(o))
	assert.Empty(t, specOf(t, "T16").found(o))
	o.Rolled.Completed = o.Rolled.Hypervisors
	assert.Len(t, specOf(t, "T15").found(o), 1, "made anew by the controller: complete, whatever their image")
}

func TestAnEmptyPoolIsLeftOutOfThePhases(t *testing.T) {
	o := soundWorld()
	empty := testPool()
	empty.Name, empty.Status.Phase = "tensor-fusion-spare", "Updating"
	o.Pools = append(o.Pools, empty)
	o.Clusters[0].Spec.GPUPools = append(o.Clusters[0].Spec.GPUPools, testEntry("spare", oldHypervisor))
	o.Clusters[0].Status.Phase = "Updating"
	assert.Empty(t, specOf(t, "T18").found(o))
	assert.NotEmpty(t, specOf(t, "T17").found(o))
}

func TestARollbackKeepsTheNewerCRDs(t *testing.T) {
	o := soundWorld()
	o.CRDs["gpus."+apiGroup] = testCRD("gpus", "vendor", "newer")
	o.Intent.Chart = Chart{Revision: 3}
	assert.Empty(t, specOf(t, "T22").found(o))
}

// A rollback is the way out of a world in which nodes are broken and the new
// controller leads nothing.
func TestARollbackStartsFromABrokenWorld(t *testing.T) {
	o := soundWorld()
	o.Intent = Intent{Chart: Chart{Revision: 3}, HypervisorImage: newHypervisor}
	o.Hosts[0].gpuNode.Status.Phase = "Pending"
	o.Controller.LeaderTrouble = "nobody holds the lease"
	o.Pools[0].Annotations = map[string]string{progressAnnotations[0]: "hash"}
	blocking, _ := blockingOf(runChecks(o, StagePreflight, nil))
	assert.Empty(t, blocking)
}

func TestManyFindingsOfOneRowAreCut(t *testing.T) {
	o := soundWorld()
	for range 50 {
		o.Denied = append(o.Denied, "x")
	}
	for _, c := range runChecks(o, StagePreflight, nil) {
		if c.Row == "T03" {
			require.Len(t, c.Findings, maxFindings)
			assert.Contains(t, c.Findings[maxFindings-1].Found, "31")
		}
	}
}

func TestEveryRowHasATest(t *testing.T) {
	rows := map[string]bool{}
	for _, c := range Checks {
		assert.False(t, rows[c.Row], "row %s stands twice", c.Row)
		rows[c.Row] = true
		assert.NotEmpty(t, c.Title)
		assert.True(t, slices.ContainsFunc(checkCases, func(tc checkCase) bool { return tc.row == c.Row }), "row %s has no case", c.Row)
	}
}

// blockingOf lists the findings that keep a stage from going on: not OK and not
// acknowledged.
func blockingOf(checks []Check) (out []finding.Finding, class finding.Class) {
	for _, c := range checks {
		if c.OK || c.Acknowledged {
			continue
		}
		out = append(out, c.Findings...)
		// Waiting helps only when nothing else is wrong.
		if class == "" || class == finding.Wait {
			class = c.Class
		}
	}
	return out, class
}

// found is what a row says, whatever its class.
func (c CheckSpec) found(o *Observation) []finding.Finding {
	out, _ := c.judge(o)
	return out
}
