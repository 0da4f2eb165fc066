package openbao

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestAWholeClusterIsNeitherRefusedNorWaitedFor(t *testing.T) {
	v := whole()
	for i := range 3 {
		require.Empty(t, refusals(v, target()))
		require.Empty(t, waiting(v, 50))
		v.renew(i)
	}
	require.Empty(t, refusals(v, target()))
	for i := range 3 {
		v.Peers[i].Address = v.Members[i].IP + ":8201"
	}
	require.Empty(t, refusals(v, target()), "an address may be the pod's IP")
	for _, host := range []string{"bao-1", "bao-1.bao-internal.vault", "bao-1.bao-internal.vault.svc", "bao-1.bao-internal.vault.svc.cluster.local"} {
		v.Peers[1].Address = host + ":8201"
		require.Empty(t, refusals(v, target()), host)
	}
	v.Run, v.Set.Owner = Owner{"openbao", "vault"}, Owner{"openbao", "vault"}
	require.Empty(t, refusals(v, target()))
	v.Set.Owner = Owner{}
	require.Empty(t, refusals(v, target()), "a StatefulSet that Helm has not made says nothing")
}

func TestWhatNoWaitingMendsIsRefused(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*View)
		row    string
		want   string
	}{
		"one member":              {func(v *View) { v.Set.Replicas, v.Members, v.Peers = 1, v.Members[:1], v.Peers[:1] }, "N160", "StatefulSet bao: expected 3 members, found 1"},
		"another number":          {func(v *View) { v.Set.Replicas = 5 }, "N160", "StatefulSet bao: expected 3 members, found 5"},
		"another strategy":        {func(v *View) { v.Set.Strategy = "RollingUpdate" }, "N161", "expected update strategy OnDelete, found RollingUpdate"},
		"another image":           {func(v *View) { v.Set.Image = oldImage }, "N161", "found " + oldImage},
		"no such container":       {func(v *View) { v.Set.Image = "" }, "N161", "StatefulSet bao"},
		"a pod too many":          {func(v *View) { v.Members = append(v.Members, Member{Pod: "bao-9", Status: Status{Sealed: true}}) }, "N160", "found 4: bao-0, bao-1, bao-2, bao-9"},
		"another cluster":         {func(v *View) { v.Members[2].ClusterID = "c2" }, "N90", "OpenBao member bao-2: expected cluster id c1, found c2"},
		"another storage":         {func(v *View) { v.Members[1].Storage = "file" }, "N160", "expected storage raft, found file"},
		"an image that lies":      {func(v *View) { v.renew(1); v.Members[1].Version = "2.6.2" }, "N163", "OpenBao member bao-1: expected version 2.6.3"},
		"a pod that was changed":  {func(v *View) { v.renew(1); v.Members[1].Image = oldImage }, "N163", "expected the template's image " + newImage},
		"a downgrade":             {func(v *View) { v.Members[1].Version = "2.7.0" }, "N240", "expected a version up to 2.6.3, found 2.7.0"},
		"a peer too many":         {func(v *View) { v.Peers = append(v.Peers, Peer{"dead", "bao-3.bao-internal:8201", true}) }, "N160", "expected the address of a pod, found dead at bao-3.bao-internal:8201"},
		"a peer too few":          {func(v *View) { v.Peers = v.Peers[:2] }, "N160", "Raft peers of bao: expected 3, found 2"},
		"an address of nobody":    {func(v *View) { v.Peers[1].Address = "10.9.9.9:8201" }, "N160", "found node-1 at 10.9.9.9:8201"},
		"an address like a pod":   {func(v *View) { v.Peers[1].Address = "bao-11.bao-internal:8201" }, "N160", "found node-1 at bao-11"},
		"another Service":         {func(v *View) { v.Peers[1].Address = "bao-1.other-internal:8201" }, "N160", "found node-1 at bao-1.other-internal"},
		"another namespace":       {func(v *View) { v.Peers[1].Address = "bao-1.bao-internal.other.svc:8201" }, "N160", "found node-1 at bao-1.bao-internal.other.svc"},
		"another release":         {func(v *View) { v.Run, v.Set.Owner = Owner{"mine", "vault"}, Owner{"openbao-server", "vault"} }, "", "expected made by release mine in namespace vault, found made by release openbao-server in namespace vault"},
		"another release's home":  {func(v *View) { v.Run, v.Set.Owner = Owner{"bao", "mine"}, Owner{"bao", "vault"} }, "", "in namespace mine, found made by release bao in namespace vault"},
		"a set on its way away":   {func(v *View) { v.Set.Deleting = true }, "N158", "StatefulSet bao: expected a StatefulSet that stays, found it is being deleted"},
		"a claim on its way away": {func(v *View) { v.Members[1].Leaving = []string{"data-bao-1"} }, "N158", "OpenBao member bao-1: expected volume claims that stay, found data-bao-1 is being deleted"},
		"that of a sealed one":    {func(v *View) { v.Members[1].Leaving, v.Members[1].Sealed = []string{"data-bao-1"}, true }, "N158", "found data-bao-1 is being deleted"},
		"one pod twice":           {func(v *View) { v.Peers[1].Address = "bao-0:8201" }, "N160", "expected one peer for each pod, found node-0 and node-1 are both bao-0"},
	} {
		t.Run(name, func(t *testing.T) {
			v := whole()
			c.change(&v)
			found := refusals(v, target())
			require.NotEmpty(t, found)
			require.Equal(t, c.row, found[0].Row)
			require.Contains(t, found[0].String(), c.want)
			require.NotEmpty(t, found[0].Next)
		})
	}
}

func TestATemplateThatIsNotTheTargetYetIsTheOnlyFault(t *testing.T) {
	v := whole()
	v.Set.Image, v.Set.Revision = oldImage, "old"
	found := refusals(v, target())
	require.Len(t, found, 1, "members that run what the template says are not to blame")
	require.Equal(t, "N161", found[0].Row)
}

func TestTheFirstClusterIDIsTheOneThatCountsBeforeOneIsKnown(t *testing.T) {
	want := target()
	want.ClusterID = ""
	v := whole()
	require.Empty(t, refusals(v, want))
	v.Members[1].ClusterID = "c2"
	require.Contains(t, refusals(v, want)[0].String(), "expected cluster id c1, found c2")
}

func TestAMemberThatIsAwayIsWaitedForAndNotRefused(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*View)
		want   string
	}{
		"missing":         {func(v *View) { v.Members, v.Missing = v.Members[:2], []string{"bao-2"} }, "N89: OpenBao member bao-2: expected a pod, found none"},
		"being deleted":   {func(v *View) { v.Members[2].Deleting = true }, "it is being deleted"},
		"not answering":   {func(v *View) { v.Members[2].Status = Status{Trouble: "connection refused"} }, "expected an answer, found connection refused"},
		"joining":         {func(v *View) { v.Members[2].Status = Status{Version: "2.6.2", Sealed: true}; v.Peers = v.Peers[:2] }, "it has not joined the cluster yet"},
		"sealed":          {func(v *View) { v.Members[2].Sealed, v.Members[2].ClusterID = true, "" }, "N163: OpenBao member bao-2: expected unsealed, found Ready and sealed"},
		"not Ready":       {func(v *View) { v.Members[2].Unready = "not Ready: probe failed" }, "N162: OpenBao member bao-2: expected Ready, found not Ready"},
		"lagging":         {func(v *View) { v.Members[2].Applied = 49 }, "expected applied up to 50, found applied up to 49"},
		"without an id":   {func(v *View) { v.Members[2].ClusterID = "" }, "expected a cluster id, found none"},
		"a learner":       {func(v *View) { v.Peers[2].Voter = false }, "expected voters only, found node-2 still learns"},
		"no active":       {func(v *View) { v.Members[0].Active = false }, "N91: OpenBao in bao: expected one active member that all follow, found no member is active"},
		"peers unknown":   {func(v *View) { v.Peers, v.NoPeers = nil, "answered with 500" }, "expected a list from bao-0, found answered with 500"},
		"not observed":    {func(v *View) { v.Set.Unobserved, v.Set.Revision = true, "old" }, "its template observed by the controller"},
		"its IP is new":   {func(v *View) { v.Members[2].Status = Status{Trouble: "no route"}; v.Peers[2].Address = "10.9.9.9:8201" }, "bao-2"},
		"not told to all": {func(v *View) { v.renew(2); v.Peers[2].Address = "10.9.9.9:8201" }, "expected the address of a pod, found node-2 at 10.9.9.9:8201"},
		"second is away":  {func(v *View) { v.Members[1].Status = Status{Trouble: "no route"} }, "bao-1"},
	} {
		t.Run(name, func(t *testing.T) {
			v := whole()
			c.change(&v)
			require.Empty(t, refusals(v, target()))
			found := waiting(v, 50)
			require.NotEmpty(t, found)
			require.Contains(t, found[0].String(), c.want)
			require.NotEmpty(t, found[0].Next)
		})
	}
}

func TestWhatIsWaitedForIsAnsweredWithTheRunbook(t *testing.T) {
	for name, change := range map[string]func(*View){
		"sealed":    func(v *View) { v.Members[2].Sealed = true },
		"missing":   func(v *View) { v.Members, v.Missing = v.Members[:2], []string{"bao-2"} },
		"joining":   func(v *View) { v.Members[2].Status = Status{Sealed: true} },
		"lagging":   func(v *View) { v.Members[2].Applied = 49 },
		"a learner": func(v *View) { v.Peers[2].Voter = false },
		"no peer":   func(v *View) { v.Peers = v.Peers[:2] },
		"no active": func(v *View) { v.Members[0].Active = false },
	} {
		v := whole()
		change(&v)
		found := waiting(v, 50)
		require.NotEmpty(t, found, name)
		require.Contains(t, found[0].Next, "recovery guidance of the OpenBao patch upgrade runbook", name)
	}
	v := whole()
	v.Members[2].Sealed = true
	require.Contains(t, waiting(v, 0)[0].Next, "five minutes")
}

func TestNothingIsDeletedButTheStandbyThatWasMeant(t *testing.T) {
	began := time.Date(2026, 1, 1, 1, 0, 0, 0, time.UTC)
	for name, c := range map[string]struct {
		change func(*View)
		gone   bool
		moved  string
		found  string
	}{
		"the standby":             {func(*View) {}, false, "", ""},
		"too late":                {func(v *View) { v.At = began.Add(2 * time.Minute) }, false, "the replacement of bao-1 was to begin by 2026-01-01T01:01:30Z and has not at 2026-01-01T01:02:00Z", ""},
		"late and not whole":      {func(v *View) { v.At, v.Members[2].Sealed = began.Add(2*time.Minute), true }, false, "the replacement of bao-1 was to begin by 2026-01-01T01:01:30Z and has not at 2026-01-01T01:02:00Z", ""},
		"gone, however late":      {func(v *View) { v.At = began.Add(time.Hour); v.renew(1) }, true, "", ""},
		"going, however late":     {func(v *View) { v.At = began.Add(time.Hour); v.Members[1].Deleting = true }, true, "", ""},
		"gone":                    {func(v *View) { v.Members, v.Missing = append(v.Members[:1:1], v.Members[2]), []string{"bao-1"} }, true, "", ""},
		"under another UID":       {func(v *View) { v.renew(1) }, true, "", ""},
		"on its way":              {func(v *View) { v.Members[1].Deleting = true }, true, "", ""},
		"active now":              {func(v *View) { v.lead(1) }, false, "bao-1 has become active", ""},
		"a new template":          {func(v *View) { v.Set.Revision = "old" }, false, "bao-1 is of the present template", ""},
		"another one is sealed":   {func(v *View) { v.Members[2].Sealed = true }, false, "", "bao-2"},
		"another one lags":        {func(v *View) { v.Members[2].Applied = 3 }, false, "", "bao-2"},
		"it is sealed itself":     {func(v *View) { v.Members[1].Sealed = true }, false, "", "bao-1"},
		"the strategy is changed": {func(v *View) { v.Set.Strategy = "RollingUpdate" }, false, "", "StatefulSet"},
	} {
		t.Run(name, func(t *testing.T) {
			v := whole()
			if name == "a new template" { // without refusing it for its version
				v.Set.Image = newImage
				for i := range v.Members {
					v.Members[i].Image, v.Members[i].Version = newImage, "2.6.3"
				}
			}
			v.At = began
			c.change(&v)
			r := ReplaceRequest{Want: target(), Pod: "bao-1", UID: "uid-1", Committed: 50, BeginBy: began.Add(90 * time.Second)}
			gone, moved, found := before(v, r)
			require.Equal(t, c.gone, gone)
			require.Equal(t, c.moved, moved)
			if c.found == "" {
				require.Empty(t, found)
			} else {
				require.Contains(t, found[0].Object, c.found)
			}
			r.BeginBy = time.Time{} // only to finish what was begun
			again, moved, found := before(v, r)
			require.Equal(t, c.gone, again)
			require.Equal(t, !c.gone, moved != "", "nothing is begun")
			require.Empty(t, found)
		})
	}
}

func TestAReplacedMemberIsProvenByItselfAndAllOthers(t *testing.T) {
	r := ReplaceRequest{Want: target(), Pod: "bao-1", UID: "uid-1"}
	for name, c := range map[string]struct {
		change func(*View)
		final  bool
		want   string
	}{
		"good":                {func(*View) {}, false, ""},
		"Ready and sealed":    {func(v *View) { v.Members[1].Sealed = true }, false, "Ready and sealed"},
		"behind":              {func(v *View) { v.Members[1].Applied = 50 }, false, "expected applied up to 51"},
		"wrong version":       {func(v *View) { v.Members[1].Version = "2.6.2" }, true, "expected version 2.6.3"},
		"another cluster":     {func(v *View) { v.Members[1].ClusterID = "c2" }, true, "expected cluster id c1, found c2"},
		"another one is away": {func(v *View) { v.Members[2].Status = Status{Trouble: "gone"} }, false, "bao-2"},
		"nobody leads":        {func(v *View) { v.Members[0].Active = false }, false, "no member is active"},
	} {
		t.Run(name, func(t *testing.T) {
			v := whole()
			v.renew(1)
			for i := range v.Members {
				v.Members[i].Applied = 51
			}
			c.change(&v)
			var out ReplaceResult
			require.Equal(t, c.final, judge(v, r, 51, &out))
			if c.want == "" {
				require.Empty(t, out.Findings)
				require.Equal(t, "2.6.3", out.Version)
			} else {
				require.Contains(t, out.Findings[0].String(), c.want)
			}
		})
	}
}

func TestAMemberOfATemplateThatChangedMeanwhileEndsItsStepAndIsNoFault(t *testing.T) {
	v := whole()
	v.renew(1)
	v.Set.Revision = "newer" // and the same image
	var out ReplaceResult
	require.True(t, judge(v, ReplaceRequest{Want: target(), Pod: "bao-1", UID: "uid-1"}, 50, &out))
	require.Empty(t, out.Findings, "a retry of the step could never mend it")
	require.Contains(t, out.Anew, "it is of revision new, and the present one is newer")

	out = ReplaceResult{}
	v.Members[1].Sealed = true
	require.False(t, judge(v, ReplaceRequest{Want: target(), Pod: "bao-1", UID: "uid-1"}, 50, &out))
	require.Empty(t, out.Anew, "it is brought back first")
	require.Contains(t, out.Findings[0].Found, "sealed")
}

func TestOnlyTheLastStaleMemberThatLeadsIsAskedToStepDown(t *testing.T) {
	began := time.Date(2026, 1, 1, 1, 0, 0, 0, time.UTC)
	for name, c := range map[string]struct {
		change func(*View)
		led    bool
		moved  string
		found  string
	}{
		"it leads":                     {func(*View) {}, false, "", ""},
		"too late":                     {func(v *View) { v.At = began.Add(2 * time.Minute) }, false, "the step-down of bao-0 was to begin by 2026-01-01T01:01:30Z", ""},
		"another leads, however late":  {func(v *View) { v.At = began.Add(time.Hour); v.lead(2) }, true, "", ""},
		"another leads already":        {func(v *View) { v.lead(2) }, true, "", ""},
		"another stale one leads":      {func(v *View) { v.Members[2].Revision = "old"; v.lead(2) }, false, "bao-2 is active, not bao-0", ""},
		"under another UID":            {func(v *View) { v.Members[0].UID = "other" }, false, "bao-0 is active, not bao-0", ""},
		"a stale standby is left":      {func(v *View) { v.Members[2].Revision = "old" }, false, "a stale standby is left", ""},
		"nobody leads":                 {func(v *View) { v.Members[0].Active = false }, false, "", "no member is active"},
		"both lead":                    {func(v *View) { v.Members[1].Active = true }, false, "", "bao-0 and bao-1 are both active"},
		"a standby is sealed":          {func(v *View) { v.Members[1].Sealed = true }, false, "", "sealed"},
		"a standby has not caught up":  {func(v *View) { v.Members[1].Applied = 49 }, false, "", "applied up to 49"},
		"a standby is on its way away": {func(v *View) { v.Members[1].Deleting = true }, false, "", "being deleted"},
	} {
		t.Run(name, func(t *testing.T) {
			v := whole()
			v.renew(1)
			v.renew(2)
			v.At = began
			c.change(&v)
			r := StepDownRequest{Want: target(), Pod: "bao-0", UID: "uid-0", Committed: 50, BeginBy: began.Add(90 * time.Second)}
			led, moved, found := mayStepDown(v, r)
			require.Equal(t, c.led, led)
			require.Contains(t, moved, c.moved)
			require.Equal(t, c.moved == "", moved == "")
			if c.found == "" {
				require.Empty(t, found)
			} else {
				require.Contains(t, found[0].String(), c.found)
			}
			r.BeginBy = time.Time{} // only to finish what was begun
			again, moved, found := mayStepDown(v, r)
			require.Equal(t, c.led, again)
			require.True(t, again || moved != "" || len(found) > 0, "nothing is begun")
		})
	}
}

func TestLeadershipHasMovedOnlyWhenOneNewMemberLeadsAndTheFormerFollows(t *testing.T) {
	r := StepDownRequest{Want: target(), Pod: "bao-0", UID: "uid-0"}
	v := whole()
	v.renew(1)
	v.renew(2)
	require.Contains(t, transferred(v, r)[0].String(), "expected a member of version 2.6.3 active, found bao-0 (2.6.2) is", "an accepted request moves nothing")
	v.Members[2].Active = true
	require.NotEmpty(t, transferred(v, r), "for half a second both say so")
	v.Members[2].Active, v.Members[0].Active = false, false
	require.NotEmpty(t, transferred(v, r), "then nobody does")
	v.lead(2)
	v.Members[0].Leader = ""
	require.NotEmpty(t, transferred(v, r), "the former active member does not follow yet")
	v.lead(2)
	require.Empty(t, transferred(v, r))
}
