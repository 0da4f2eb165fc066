package openbao_test

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/refit-run/refit/sandbox/openbao"
)

var one = map[age]string{newer: "2.6.3"}

// archive lists a snapshot's files after their checksums were right.
func (c *cluster) archive(data []byte) []string {
	c.Helper()
	files, err := unpack(data)
	require.NoError(c, err)
	return files
}

func unpack(data []byte) (found []string, err error) {
	zip, err := gzip.NewReader(bytes.NewReader(data))
	if err != nil {
		return nil, err
	}
	sums, want := map[string]string{}, ""
	for t := tar.NewReader(zip); ; {
		h, err := t.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return found, err
		}
		text, err := io.ReadAll(t)
		if err != nil {
			return found, err
		}
		found, sums[h.Name] = append(found, h.Name), fmt.Sprintf("%x", sha256.Sum256(text))
		if h.Name == "SHA256SUMS" {
			want = string(text)
		}
	}
	for line := range strings.Lines(want) {
		sum, name, _ := strings.Cut(strings.TrimSpace(line), "  ")
		if sums[name] != sum {
			return found, fmt.Errorf("%s: expected checksum %s, found %s", name, sum, sums[name])
		}
	}
	return found, nil
}

// A step-down is carried out long after it was answered: the member goes on as
// the active one, then nobody is active, then another is.
func TestStepDownIsCarriedOutLater(t *testing.T) {
	t.Parallel()
	c := newCluster(t, one, false)
	c.begin(newer)
	active := c.members[0]
	answered := time.Now()
	require.Equal(t, http.StatusNoContent, c.send(active, http.MethodPut, "/v1/sys/step-down", nil).code)
	l, err := c.ask(active, "/v1/sys/leader", nil)
	require.NoError(t, err)
	require.Equal(t, true, l["is_self"], "right after the answer")
	var left, taken time.Duration
	c.eventually("another member is active", func() error {
		l, err := c.ask(active, "/v1/sys/leader", nil)
		if err == nil && l["is_self"] == nil && left == 0 {
			left = time.Since(answered)
		}
		for _, s := range c.members[1:] {
			if l, err := c.ask(s, "/v1/sys/leader", nil); err == nil && l["is_self"] == true {
				taken = time.Since(answered)
				return nil
			}
		}
		return errors.New("nobody else is")
	})
	t.Logf("the former active member left after %s, the next was active after %s", left, taken)
	require.Greater(t, left, 300*time.Millisecond)
	require.Greater(t, taken, left)
}

// A member that stepped down may not be active for ten seconds, also where
// nobody else can be.
func TestAMemberThatSteppedDownHoldsOff(t *testing.T) {
	t.Parallel()
	c := newCluster(t, one, false)
	alone := c.members[0]
	c.run(alone, newer)
	c.init()
	c.unseal(alone)
	c.eventually("it is active", func() error { _, err := c.active(); return err })
	require.Equal(t, http.StatusNoContent, c.send(alone, http.MethodPut, "/v1/sys/step-down", nil).code)
	c.eventually("nobody is active", func() error {
		if _, err := c.active(); err == nil {
			return errors.New("it is")
		}
		return nil
	})
	left := time.Now()
	c.eventually("it is active again", func() error { _, err := c.active(); return err })
	require.Greater(t, time.Since(left), 8*time.Second)
}

// A step-down that is sent to a standby deposes the active member; the header
// that forbids the forwarding prevents it.
func TestStepDownOfAStandbyDeposesTheActiveMember(t *testing.T) {
	t.Parallel()
	c := newCluster(t, one, false)
	c.begin(newer)
	active, standby := c.members[0], c.members[1]
	r, err := c.try(standby, http.MethodPut, "/v1/sys/step-down", c.token, map[string]string{"X-Vault-No-Request-Forwarding": "true"}, nil)
	require.NoError(t, err)
	require.Equal(t, http.StatusTemporaryRedirect, r.code)
	now, err := c.active()
	require.NoError(t, err)
	require.Equal(t, active.name, now.name)

	require.Equal(t, http.StatusNoContent, c.send(standby, http.MethodPut, "/v1/sys/step-down", nil).code)
	c.eventually("another member is active", func() error {
		now, err := c.active()
		if err == nil && now == active {
			err = errors.New("the former one is active")
		}
		return err
	})
}

// Autopilot goes by a member's last word: it counts one that came back sealed
// as healthy, and the loss of one more as bearable, for as long as ten seconds.
func TestAutopilotTrustsASealedMemberForAWhile(t *testing.T) {
	t.Parallel()
	c := newCluster(t, one, false)
	c.begin(newer)
	c.lately(c.members[0], c.members[2])
	c.replace(c.members[2], newer)
	back := time.Now()
	state, err := c.ask(c.members[0], "/v1/sys/storage/raft/autopilot/state", nil)
	require.NoError(t, err)
	data := state["data"].(map[string]any)
	require.Equal(t, true, data["healthy"])
	require.Equal(t, 1.0, data["failure_tolerance"])
	c.eventually("autopilot misses the sealed member", c.unhealthy(c.members[0], 1))
	require.Less(t, time.Since(back), 10*time.Second+limit/4)
	c.unseal(c.members[2])
	c.eventually("it counts as healthy again", c.unhealthy(c.members[0], 0))
}

// A write through any member is on all of them, and outlives their processes.
func TestWritesOutliveEveryMember(t *testing.T) {
	t.Parallel()
	c := newCluster(t, one, false)
	c.begin(newer)
	require.Equal(t, http.StatusNoContent, c.send(c.members[1], http.MethodPut, "/v1/cubbyhole/kept", map[string]string{"a": "b"}).code)
	for _, s := range c.members {
		c.kill(s)
	}
	for _, s := range c.members {
		c.run(s, newer)
		c.unseal(s)
	}
	c.settled()
	for _, s := range c.members {
		kept, err := c.ask(s, "/v1/cubbyhole/kept", nil)
		require.NoError(t, err)
		require.Equal(t, map[string]any{"a": "b"}, kept["data"])
	}
	require.Equal(t, http.StatusNotFound, c.send(c.members[2], http.MethodGet, "/v1/cubbyhole/never", nil).code)
}

// A member that is asked to end hands the leadership over; one that is killed
// is missed only when its followers have waited for it.
func TestTheActiveMemberIsReplacedWhenItEnds(t *testing.T) {
	t.Parallel()
	c := newCluster(t, one, false)
	c.begin(newer)
	asked := time.Now()
	c.stop(c.members[0])
	c.eventually("another member is active", func() error { _, err := c.active(); return err })
	t.Logf("after SIGTERM: %s", time.Since(asked))
	now, err := c.active()
	require.NoError(t, err)
	c.run(c.members[0], newer)
	c.unseal(c.members[0])
	c.settled()
	killed := time.Now()
	c.kill(now)
	c.eventually("another member is active", func() error { _, err := c.active(); return err })
	t.Logf("after SIGKILL: %s", time.Since(killed))
	require.Greater(t, time.Since(killed), 2*time.Second)
}

func TestAWrongKeyAndRequestsOutOfPlaceAreRefused(t *testing.T) {
	t.Parallel()
	c := newCluster(t, one, false)
	c.run(c.members[0], newer)
	c.init()
	for body, want := range map[string]int{`{"key":""}`: 400, `{"key":"00ff"}`: 400, `{"key":"?"}`: 400} {
		r, err := c.try(c.members[0], http.MethodPut, "/v1/sys/unseal", "", nil, raw(body))
		require.NoError(t, err)
		require.Equal(t, want, r.code, body)
	}
	require.Equal(t, 400, c.send(c.members[0], http.MethodPut, "/v1/sys/init", map[string]int{"secret_shares": 1, "secret_threshold": 1}).code)
	require.Equal(t, 405, c.send(c.members[0], http.MethodDelete, "/v1/sys/seal-status", nil).code)
	require.Equal(t, 400, c.send(c.members[0], http.MethodGet, "/v1/sys/health?sealedcode=many", nil).code)
	c.unseal(c.members[0])
	c.eventually("it is active", func() error { _, err := c.active(); return err })
	require.Equal(t, 404, c.send(c.members[0], http.MethodGet, "/v1/nothing/here", nil).code)
	require.Equal(t, 204, c.send(c.members[0], http.MethodPut, "/v1/sys/seal", nil).code)
	require.Equal(t, 503, c.send(c.members[0], http.MethodGet, "/v1/sys/leader", nil).code)
}

// A member whose configuration names nobody joins whom it is told to.
func TestAMemberJoinsByHand(t *testing.T) {
	t.Parallel()
	c := newCluster(t, one, false)
	first, second := c.members[0], c.members[1]
	text, err := os.ReadFile(second.config)
	require.NoError(t, err)
	alone := regexp.MustCompile(`(?s)  retry_join \{.*?\}\n`).ReplaceAll(text, nil)
	require.NotContains(t, string(alone), "retry_join")
	require.NoError(t, os.WriteFile(second.config, alone, 0o600))
	c.run(first, newer)
	c.run(second, newer)
	c.init()
	c.unseal(first)
	c.eventually("it is active", func() error { _, err := c.active(); return err })
	require.Equal(t, 400, c.send(second, http.MethodPut, "/v1/sys/unseal", map[string]string{"key": c.key}).code, "it knows no cluster")
	require.Equal(t, 200, c.send(second, http.MethodPut, "/v1/sys/storage/raft/join", map[string]string{"leader_api_addr": first.api}).code)
	c.unseal(second)
	c.settled()
	answer, err := c.ask(first, "/v1/sys/storage/raft/configuration", nil)
	require.NoError(t, err)
	require.Len(t, answer["data"].(map[string]any)["config"].(map[string]any)["servers"], 2)
}

type raw string

func (r raw) MarshalJSON() ([]byte, error) { return []byte(r), nil }

// What a real server cannot be told to do, a member of the double can.
func TestFaultsSpoilSnapshotsAndStepDowns(t *testing.T) {
	t.Parallel()
	if newer.real() != "" {
		t.Skip("a real server has no faults to switch on")
	}
	c := newCluster(t, one, false)
	c.begin(newer)
	active, standby := c.members[0], c.members[1]
	snapshot := func(s *server) reply { return c.send(s, http.MethodGet, "/v1/sys/storage/raft/snapshot", nil) }
	c.archive(snapshot(active).body)
	for fault, says := range map[openbao.SnapshotFault]string{openbao.SnapshotTruncated: "EOF", openbao.SnapshotCorrupt: "checksum"} {
		require.NoError(t, openbao.Faults{Snapshot: fault}.Set(active.dir))
		r := snapshot(active)
		require.Equal(t, http.StatusOK, r.code)
		_, err := unpack(r.body)
		require.ErrorContains(t, err, says)
	}
	require.Equal(t, http.StatusTemporaryRedirect, snapshot(standby).code)
	require.NoError(t, openbao.Faults{Snapshot: openbao.SnapshotLocal}.Set(standby.dir))
	require.Equal(t, http.StatusOK, snapshot(standby).code)

	require.NoError(t, openbao.Faults{StepDown: openbao.StepDownIgnored}.Set(active.dir))
	require.Equal(t, http.StatusNoContent, c.send(active, http.MethodPut, "/v1/sys/step-down", nil).code)
	require.Never(t, func() bool { now, err := c.active(); return err != nil || now != active }, 2*time.Second, 50*time.Millisecond)
	require.NoError(t, openbao.Faults{StepDown: openbao.StepDownLost}.Set(active.dir))
	_, err := c.try(active, http.MethodPut, "/v1/sys/step-down", c.token, nil, nil)
	require.Error(t, err, "the answer is lost")
	c.eventually("it was carried out", func() error {
		now, err := c.active()
		if err == nil && now == active {
			err = errors.New("the former one is active")
		}
		return err
	})
	require.NoError(t, openbao.Faults{}.Set(active.dir))
}
