package stage

import (
	"encoding/json"
	"fmt"
	"net/url"
	"strings"

	"github.com/refit-run/refit/workflows/protocol"
)

// Target is what a person answers: a stage of a run.
type Target struct {
	Namespace, WorkflowID, Verb, Stage string
}

// Commands lists the ways to approve a stage of a run in the namespace
// "default": the refit command, the page in the Temporal UI (a path, to be
// put behind the UI's address), temporal and tctl. They can be pasted into a
// shell as they are.
func Commands(workflowID, stage string) []string {
	return Target{Namespace: "default", WorkflowID: workflowID, Verb: protocol.Approve, Stage: stage}.Commands()
}

// Commands is the general form: any verb, any namespace.
func (t Target) Commands() []string {
	input := t.input()
	id := quote(t.WorkflowID)
	refit, temporal, tctl := "refit "+t.Verb+" "+id, "temporal ", "tctl "
	if t.Stage != "" && !protocol.AddressesRun(t.Verb) {
		refit += " --stage " + quote(t.Stage)
	}
	if t.Namespace != "" && t.Namespace != "default" {
		refit += " --namespace " + quote(t.Namespace)
		tctl += "--namespace " + quote(t.Namespace) + " "
	}
	temporal += "workflow update execute -w " + id
	if t.Namespace != "" && t.Namespace != "default" {
		temporal += " --namespace " + quote(t.Namespace)
	}
	return []string{
		refit,
		t.UIPath(),
		fmt.Sprintf("%s --name %s --input %s", temporal, t.Verb, input),
		fmt.Sprintf("%sworkflow signal -w %s -n %s -i %s", tctl, id, t.Verb, input),
	}
}

// UIPath is the run's page in the Temporal UI, without the UI's address.
func (t Target) UIPath() string {
	ns := t.Namespace
	if ns == "" {
		ns = "default"
	}
	return fmt.Sprintf("/namespaces/%s/workflows/%s", url.PathEscape(ns), url.PathEscape(t.WorkflowID))
}

// input is the answer as one shell word; the shell fills in who answers.
func (t Target) input() string {
	if t.Stage == "" || protocol.AddressesRun(t.Verb) {
		return `'{"by":"'"$USER"'"}'`
	}
	name, _ := json.Marshal(t.Stage) // a string always encodes
	return `'{"stage":` + strings.ReplaceAll(string(name), "'", `'\''`) + `,"by":"'"$USER"'"}'`
}

// quote makes one POSIX shell word.
func quote(s string) string {
	plain := func(r rune) bool {
		return r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || strings.ContainsRune("._-/:@", r)
	}
	if s != "" && strings.IndexFunc(s, func(r rune) bool { return !plain(r) }) < 0 {
		return s
	}
	return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'"
}
