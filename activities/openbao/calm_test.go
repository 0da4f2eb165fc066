package openbao

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/refit-run/refit/activities/finding"
)

func TestAMemberIsSteadyAfterThreeLooksOverFiveSecondsWithOneLeader(t *testing.T) {
	start := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	type seen struct {
		at     time.Duration
		leader string
		right  bool
		steady bool
	}
	for name, looks := range map[string][]seen{
		"three over five seconds":  {{0, "a", true, false}, {2 * time.Second, "a", true, false}, {5 * time.Second, "a", true, true}},
		"two are too few":          {{0, "a", true, false}, {6 * time.Second, "a", true, false}, {7 * time.Second, "a", true, true}},
		"many are not long enough": {{0, "a", true, false}, {time.Second, "a", true, false}, {2 * time.Second, "a", true, false}, {3 * time.Second, "a", true, false}},
		"another leader begins anew": {{0, "a", true, false}, {3 * time.Second, "a", true, false}, {6 * time.Second, "b", true, false},
			{9 * time.Second, "b", true, false}, {11 * time.Second, "b", true, true}},
		"one that was wrong begins anew": {{0, "a", true, false}, {3 * time.Second, "a", false, false}, {6 * time.Second, "a", true, false},
			{8 * time.Second, "a", true, false}, {11 * time.Second, "a", true, true}},
	} {
		var c calm
		for _, s := range looks {
			require.Equal(t, s.steady, c.look(start.Add(s.at), s.leader, s.right, StableFor), "%s, after %s", name, s.at)
		}
	}
}

func TestAStepBeginsOnFreshLooksThatHaveBeenRightForLongEnough(t *testing.T) {
	start := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	v := whole()
	look := func(q *ready, at, age time.Duration, found ...finding.Finding) []finding.Finding {
		v.At = start.Add(at - age)
		return q.look(start.Add(at), v, found, "replacement of bao-1", StableFor)
	}
	q := ready{caught: 40}
	require.Contains(t, look(&q, 0, 0)[0].Found, "not for so long yet", "one look proves nothing")
	require.EqualValues(t, 50, q.caught, "the others must have what the first right look found committed")
	v.Members[0].Committed = 60
	require.NotEmpty(t, look(&q, 2*time.Second, 0))
	require.EqualValues(t, 50, q.caught, "a mark that moved would never be reached")
	require.Contains(t, look(&q, 6*time.Second, 4*time.Second)[0].String(), "expected a look at all members within 3s, found 4s", "the answers are too old to delete on")
	require.NotEmpty(t, look(&q, 7*time.Second, 0), "it begins anew")
	require.NotEmpty(t, look(&q, 10*time.Second, 0))
	require.Equal(t, "sealed", look(&q, 11*time.Second, 0, finding.Finding{Found: "sealed"})[0].Found)
	require.NotEmpty(t, look(&q, 12*time.Second, 0), "and again")
	v.lead(2)
	require.NotEmpty(t, look(&q, 14*time.Second, 0))
	require.NotEmpty(t, look(&q, 17*time.Second, 0), "another leader begins anew")
	require.Empty(t, look(&q, 19*time.Second, 2*time.Second))
}
