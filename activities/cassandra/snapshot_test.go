package cassandra

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/refit-run/refit/activities/finding"
	"github.com/refit-run/refit/activities/kube"
)

// holds answers a snapshot whose tag holds every table at the so many-th look.
func (s *scripted) holds(look int) {
	all := recorded(s.t, "listsnapshots.txt")
	lines := strings.Split(all, "\n")
	half := strings.Join(lines[:len(lines)/2], "\n")
	seen := 0
	s.answer = func(_, command string) (kube.Exit, error) {
		switch {
		case command == "listsnapshots":
			if seen++; seen < look {
				return kube.Exit{Stdout: half}, nil
			}
			return kube.Exit{Stdout: all}, nil
		case strings.HasPrefix(command, "tablestats"):
			return kube.Exit{Stdout: recorded(s.t, "tablestats.json")}, nil
		}
		return kube.Exit{Code: 2, Stderr: "error: Snapshot pre-1-1-5 already exists."}, nil
	}
}

func TestASnapshotThatIsStillBeingTakenIsWaitedFor(t *testing.T) {
	s := newScripted(t, 1)
	s.holds(4)
	request := SnapshotRequest{Place: s.place, Pod: "cassandra-0", Tag: "pre-1-1-5", Limit: time.Second}
	out, err := s.acts.Snapshot(t.Context(), request)
	require.NoError(t, err)
	require.True(t, out.Already)
	require.Equal(t, 48, out.Tables)

	s.holds(1 << 20)
	_, err = s.acts.Snapshot(t.Context(), request)
	require.ErrorContains(t, err, "is missing", "a table that is younger than the tag")
}

func TestToolsOfABackupThatFailNameTheirRow(t *testing.T) {
	s := newScripted(t, 1)
	for fails, want := range map[string]string{"listsnapshots": "expected exit code 0, found 1", "flush": "expected exit code 0, found 1", "tablestats": "expected the tables as JSON, found no JSON"} {
		s.answer = func(_, command string) (kube.Exit, error) {
			if strings.HasPrefix(command, fails) && fails != "tablestats" {
				return kube.Exit{Code: 1}, nil
			}
			return kube.Exit{}, nil
		}
		_, err := s.acts.Snapshot(t.Context(), SnapshotRequest{Place: s.place, Pod: "cassandra-0", Tag: "pre-1-1-5", Limit: time.Second})
		f, _, _ := finding.Of(err)
		require.Equal(t, "N95", f.Row, fails)
		require.ErrorContains(t, err, want)
		require.NotEmpty(t, f.Next, fails)
	}
}
