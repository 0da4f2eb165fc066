package tensorfusion

import (
	"slices"

	"github.com/refit-run/refit/activities/finding"
)

// Operator is the class of a row that a person decides: the plan acknowledges
// it by row id, or a gate does.
const Operator finding.Class = "operator"

// Stages at which a row is checked.
const (
	StagePreflight  = "preflight"
	StageDiff       = "diff"
	StageController = "controller"
	StageVerify     = "verify"
	StageDrift      = "drift"
)

// CheckSpec is one row of the registry: a pure function of the observation.
// No finding means that the row holds.
type CheckSpec struct {
	Row    string
	Title  string
	Class  finding.Class
	Stages []string
	Func   func(*Observation) []finding.Finding
}

// Checks are every row that is checked from observations, in the order in
// which they are reported. Rows that are acts (T07, T11, T12, P07, P10 ...) are
// proven where they act.
var Checks = []CheckSpec{
	{"T01", "the upgrade stays within one major line", finding.Stop, []string{StagePreflight}, checkLine},
	{"T02", "the hypervisor image is explicit and fits the controller", finding.Stop, []string{StagePreflight}, checkHypervisorImage},
	{"T03", "every right that the run needs is granted", finding.Stop, []string{StagePreflight}, checkAccess},
	{"T04", "the target's release notes have been read", Operator, []string{StagePreflight}, checkReleaseNotes},
	{"T05", "at least two controller replicas", Operator, []string{StagePreflight}, checkReplicas},
	{"T06", "the backup can be encrypted", finding.Stop, []string{StagePreflight}, checkVault},
	{"T08", "every user-set value survives, none is unknown", finding.Stop, []string{StagePreflight, StageController}, checkValues},
	{"T09", "the controller's rollout is complete", finding.Wait, []string{StageController}, checkRollout},
	{"T10", "the neighbours of the Helm step are ready and as the plan says", finding.Wait, []string{StageController}, checkNeighbours},
	{"T14", "every hypervisor is proven", finding.Wait, []string{StageVerify}, checkHosts},
	{"T15", "workers are complete and of their template", finding.Wait, []string{StageVerify}, checkWorkers},
	{"T16", "no client pod is stale", finding.Wait, []string{StageVerify}, checkClients},
	{"T17", "pools without GPU nodes are known", Operator, []string{StagePreflight}, checkEmptyPools},
	{"T18", "cluster, non-empty pools and GPU nodes are Running", finding.Wait, []string{StageVerify}, checkPhases},
	{"T19", "exactly one hypervisor pod per GPU node", finding.Stop, []string{StageVerify}, checkOnePod},
	{"T22", "target CRDs are a superset of the installed ones", finding.Stop, []string{StagePreflight}, checkCRDs},
	{"T23", "the hypervisor port stays", finding.Stop, []string{StagePreflight, StageController}, checkPorts},
	{"T24", "maxDuration and maintenanceWindow have no effect", Operator, []string{StagePreflight}, checkDeadFields},
	{"T26", "the Console agent's settings survive", finding.Stop, []string{StagePreflight, StageDiff}, checkAgent},
	{"P01", "no rollout and no driver upgrade in progress", finding.Wait, []string{StagePreflight}, checkInProgress},
	{"P02", "GreptimeDB answers", finding.Stop, []string{StagePreflight}, checkDatabase},
	{"P03", "batchPercentage 1..100 and a policy block in every pool", finding.Stop, []string{StagePreflight}, checkPolicies},
	{"P04", "nothing that holds data is deleted", finding.Stop, []string{StageDiff}, checkDeletions},
	{"P05", "the controller has the rights that it needs", finding.Stop, []string{StagePreflight, StageDiff, StageController}, checkRoles},
	{"P06", "one leader, and the webhook answers", finding.Wait, []string{StagePreflight, StageController}, checkLeader},
	{"P08", "no floating image tag", Operator, []string{StagePreflight}, checkFloating},
	{"P09", "every image of the target exists", finding.Stop, []string{StagePreflight}, checkImages},
	{"P10", "the isolation policy is pinned", finding.Stop, []string{StagePreflight}, checkIsolationPolicy},
	{"P12", "no hypervisor or worker changed unplanned", finding.Stop, []string{StageDrift}, checkUnplanned},
	{"P13", "no allocation was lost", finding.Stop, []string{StagePreflight, StageController}, checkAllocations},
	{"P14", "every Node Ready, every GPUNode Running, inventory equal", finding.Stop, []string{StagePreflight, StageVerify}, checkInventory},
}

// doubts are what can't be told from where the worker is, or from a version, by
// row. They are asked where the row's own check finds nothing, and are of class
// Operator whatever the row's.
var doubts = map[string]func(*Observation) []finding.Finding{
	"T02": doubtHypervisorImage,
	"P02": doubtDatabase,
}

// disabled holds the rows that a test switched off to prove that its row's
// test notices (design, contract 17). The product never writes it.
var disabled = map[string]bool{}

// judge runs one check, and its doubt where it finds nothing.
func (c CheckSpec) judge(o *Observation) ([]finding.Finding, finding.Class) {
	if disabled[c.Row] {
		return nil, c.Class
	}
	out, class := c.Func(o), c.Class
	if doubt := doubts[c.Row]; len(out) == 0 && doubt != nil {
		out, class = doubt(o), Operator
	}
	for i := range out {
		out[i].Row = c.Row
	}
	return out, class
}

// maxFindings bounds what one check puts into history.
const maxFindings = 20

// notBeforeRollback are preflight rows that a rollback does not ask for: it is
// the way out of a world in which they may not hold, and goes to a version
// that ran here before.
var notBeforeRollback = []string{"T04", "P01", "P06", "P10", "P13", "P14"}

// runChecks runs a stage's checks. Acknowledged rows of class Operator are not
// OK but accepted.
func runChecks(o *Observation, stage string, acknowledged []string) []Check {
	var out []Check
	for _, spec := range Checks {
		if !slices.Contains(spec.Stages, stage) {
			continue
		}
		if stage == StagePreflight && o.Intent.Chart.Revision != 0 && slices.Contains(notBeforeRollback, spec.Row) {
			continue
		}
		found, class := spec.judge(o)
		c := Check{Row: spec.Row, OK: len(found) == 0}
		if !c.OK {
			c.Class = class
			c.Acknowledged = class == Operator && slices.Contains(acknowledged, spec.Row)
			c.Findings = cutFindings(found)
		}
		out = append(out, c)
	}
	return out
}

// cutFindings keeps the first of too many findings and counts the rest.
func cutFindings(found []finding.Finding) []finding.Finding {
	if len(found) <= maxFindings {
		return found
	}
	rest := len(found) - maxFindings + 1
	return append(found[:maxFindings-1:maxFindings-1], finding.Finding{
		Row: found[0].Row, Object: "further findings", Found: plural(rest, "more of the same kind"),
	})
}
