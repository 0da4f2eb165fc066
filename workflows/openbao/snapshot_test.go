package openbao

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.temporal.io/sdk/temporal"

	acts "github.com/refit-run/refit/activities/openbao"

	"github.com/refit-run/refit/activities/finding"
	"github.com/refit-run/refit/activities/secret"
	"github.com/refit-run/refit/workflows/protocol"
	"github.com/refit-run/refit/workflows/rollout/plan"
	"github.com/refit-run/refit/workflows/window"
)

func TestASnapshotAndWhatOpensItAreStored(t *testing.T) {
	s := newSystem()
	s.snapshot = []finding.Finding{{Row: "N97", Object: "OpenBao in openbao-server", Expected: "one active member that a majority follows", Found: "no member is active"}}
	h := newHarness(t, s)
	h.At(time.Hour, func() {
		require.Contains(t, h.Waits("snapshot").Found, "N97: OpenBao in openbao-server")
		s.do(func() { s.snapshot = nil })
		h.Answer(protocol.Retry)
	})
	var out SnapshotResult
	h.Run(protocol.OpenBaoSnapshot, SnapshotInput{Site: site()}, &out)
	require.Equal(t, protocol.OutcomeDone, out.Outcome)
	require.Equal(t, []string{"lock", "snapshot", "snapshot", "unlock"}, s.log)
	var names []string
	for _, a := range out.Artifacts {
		names = append(names, a.Name)
	}
	require.Subset(t, names, []string{"openbao.snap", "openbao-server-unseal.yaml", "openbao-server-root-token.yaml"})
	require.Len(t, out.Secrets, 2)
}

func TestBadInputIsRefusedWithThePathOfEachFault(t *testing.T) {
	child := site()
	child.Holder, child.Parent = "me", &protocol.Parent{WorkflowID: "p"}
	unfenced := site()
	unfenced.Target.UID, unfenced.Parent = "uid-prod", &protocol.Parent{WorkflowID: "p"}
	with := func(change func(*ReplaceInput)) ReplaceInput {
		in := replacement()
		change(&in)
		return in
	}
	for want, in := range map[string]interface {
		Validate() []plan.Problem
	}{
		"target.cluster is missing": ReplaceInput{Image: "a:1.2.3"},
		"target.uid is missing":     ReplaceInput{Site: child, Image: "a:1.2.3"},
		"holder is missing":         ReplaceInput{Site: Site{Site: unfenced.Site}, Image: "a:1.2.3"},
		"image is missing":          ReplaceInput{Site: site()},
		`image is "openbao:latest"`: ReplaceInput{Site: site(), Image: "openbao:latest"},
		"members is 1":              with(func(in *ReplaceInput) { in.Members = 1 }),
		"members is 4":              with(func(in *ReplaceInput) { in.Members = 4 }),
		"members is -3":             with(func(in *ReplaceInput) { in.Members = -3 }),
		"limit is -1m0s":            with(func(in *ReplaceInput) { in.Limit = window.Duration(-time.Minute) }),
		"deleteLimit is -1m0s":      with(func(in *ReplaceInput) { in.DeleteLimit = window.Duration(-time.Minute) }),
		"readyLimit is -1m0s":       with(func(in *ReplaceInput) { in.ReadyLimit = window.Duration(-time.Minute) }),
		"transferLimit is -1m0s":    with(func(in *ReplaceInput) { in.TransferLimit = window.Duration(-time.Minute) }),
		"windows[0]":                with(func(in *ReplaceInput) { in.Windows = []window.Spec{{Opens: "never"}} }),
		"acknowledge[0] is \"N1\"":  with(func(in *ReplaceInput) { in.Acknowledge = []string{"N1"} }),
		"servers.port is 70000":     with(func(in *ReplaceInput) { in.Servers.Port = 70000 }),
		"token names 2 places":      with(func(in *ReplaceInput) { in.Token = &secret.Reference{File: "f", Variable: "V"} }),
		"secrets[0] is incomplete":  SnapshotInput{Site: site(), Secrets: []acts.Held{{Secret: "s"}}},
		"token.key is missing":      SnapshotInput{Site: Site{Site: site().Site, Token: &secret.Reference{Secret: "s"}}},
		"transferLimit is -1s":      SnapshotInput{Site: site(), TransferLimit: window.Duration(-time.Second)},
	} {
		ps := in.Validate()
		require.Len(t, ps, 1, want)
		require.Contains(t, ps[0].String(), want)
	}
	require.Empty(t, replacement().Validate())
	require.Empty(t, ReplaceInput{Site: site(), Image: "openbao:latest", Version: "2.6.3"}.Validate())

	h := newHarness(t, newSystem())
	h.ExecuteWorkflow(protocol.OpenBaoReplace, ReplaceInput{})
	var app *temporal.ApplicationError
	require.ErrorAs(t, h.GetWorkflowError(), &app)
	require.Equal(t, protocol.BadInput, app.Type())
}
