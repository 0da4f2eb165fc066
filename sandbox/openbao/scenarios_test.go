package openbao_test

import (
	"errors"
	"fmt"
	"net/http"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// sameLine was recorded on 2.6.2 and then on a later build of it, with standby
// reads.
func sameLine(t *testing.T, done compared) {
	c := newCluster(t, map[age]string{newer: "2.6.9", older: "2.6.2"}, true)
	what := map[string]age{"2.6.9": newer, "2.6.2": older}
	for _, s := range c.members {
		c.run(s, older)
	}
	c.matches(done, c.members[1], what, names(t, ".", "uninit-")...)
	c.init()
	for _, s := range c.members {
		c.unseal(s)
	}
	c.settled()
	active, standbys := c.members[0], c.members[1:]
	c.matches(done, standbys[0], what, names(t, ".", "standby-")...)
	for _, name := range names(t, ".", "active-") {
		if name != "active-step-down" {
			c.matches(done, active, what, name)
		}
	}
	for _, s := range standbys {
		c.replace(s, newer)
		c.unseal(s)
	}
	c.settled()
	c.eventually("the active member hears of the new versions", c.versionsHeard(active, 2))
	c.matches(done, active, what, names(t, ".", "mixed-")...)
	c.matches(done, active, what, "active-step-down")
	c.eventually("another member is active", func() error {
		now, err := c.active()
		if err == nil && now == active {
			err = errors.New("the former one is active")
		}
		return err
	})
	c.replace(active, newer)
	c.unseal(active)
	c.settled()
	now, err := c.active()
	require.NoError(t, err)
	c.eventually("the active member hears of the new versions", c.versionsHeard(now, 3))
	c.matches(done, now, what, names(t, ".", "final-")...)

	rest := c.standbys()
	c.kill(rest[0])
	c.eventually("autopilot misses a member", c.unhealthy(now, 1))
	c.matches(done, now, what, names(t, ".", "one-down-")...)
	c.kill(now)
	c.eventually("no member is left that could be active", func() error {
		l, err := c.ask(rest[1], "/v1/sys/leader", nil)
		if err == nil && l["leader_address"] != nil {
			err = errors.New("it still names one")
		}
		return err
	})
	c.matches(done, rest[1], what, names(t, ".", "noquorum-")...)
	c.replace(rest[1], newer)
	c.matches(done, rest[1], what, names(t, ".", "sealed-")...)
}

// versionsHeard waits until autopilot knows n members of the newer version.
func (c *cluster) versionsHeard(active *server, n int) func() error {
	return func() error {
		state, err := c.ask(active, "/v1/sys/ha-status", nil)
		if err != nil {
			return err
		}
		seen := 0
		nodes, _ := state["nodes"].([]any)
		for _, x := range nodes {
			if x.(map[string]any)["version"] == c.versions[newer] {
				seen++
			}
		}
		if seen != n || len(nodes) != 3 {
			return errors.New("it knows others")
		}
		return nil
	}
}

// unhealthy waits until autopilot counts n members as unhealthy.
func (c *cluster) unhealthy(active *server, n int) func() error {
	return func() error {
		state, err := c.ask(active, "/v1/sys/storage/raft/autopilot/state", nil)
		if err != nil {
			return err
		}
		seen := 0
		for _, x := range state["data"].(map[string]any)["servers"].(map[string]any) {
			if x.(map[string]any)["healthy"] == false {
				seen++
			}
		}
		if seen != n {
			return errors.New("it counts others")
		}
		return nil
	}
}

// named waits until every member names the active one.
func (c *cluster) named(active *server) func() error {
	return func() error {
		for _, s := range c.members {
			if l, err := c.ask(s, "/v1/sys/leader", nil); err != nil || l["leader_address"] != active.api {
				return fmt.Errorf("%s names %v (%v)", s.name, l["leader_address"], err)
			}
		}
		return nil
	}
}

// lately waits until the active member has just heard of another one, so that
// what comes next falls into the time for which it believes in it.
func (c *cluster) lately(active, other *server) {
	c.Helper()
	c.eventually(other.name+" has just spoken", func() error {
		state, err := c.ask(active, "/v1/sys/storage/raft/autopilot/state", nil)
		if err != nil {
			return err
		}
		member := state["data"].(map[string]any)["servers"].(map[string]any)[other.name].(map[string]any)
		ago, err := time.ParseDuration(member["last_contact"].(string))
		if err == nil && ago > time.Second {
			err = fmt.Errorf("%s ago", ago)
		}
		return err
	})
}

// acrossLines was recorded while standbys went from 2.5.5 to 2.6.2.
func acrossLines(t *testing.T, done compared) {
	c := newCluster(t, map[age]string{newer: "2.6.2", older: "2.5.5"}, false)
	replaced(c, done, "nvcf-like-2.5.5-to-2.6.2", map[string]age{"2.6.2": newer, "2.5.5": older}, func(active *server) {
		c.eventually("autopilot misses the new members", c.unhealthy(active, 2))
		c.eventually("ha-status forgets them", func() error {
			state, err := c.ask(active, "/v1/sys/ha-status", nil)
			if nodes, _ := state["nodes"].([]any); err == nil && len(nodes) != 1 {
				err = errors.New("it lists them")
			}
			return err
		})
		r := c.send(c.members[1], http.MethodPut, "/v1/cubbyhole/refused", map[string]string{"a": "b"})
		require.Equal(t, http.StatusTemporaryRedirect, r.code, "a new standby does not pass on to an old active member")
	})
}

// withoutStandbyReads was recorded while standbys went from 2.6.1 to 2.6.2.
func withoutStandbyReads(t *testing.T, done compared) {
	c := newCluster(t, map[age]string{newer: "2.6.2", older: "2.6.1"}, false)
	replaced(c, done, "standbyreads-off-2.6.1-to-2.6.2", map[string]age{"2.6.2": newer, "2.6.1": older}, func(active *server) {
		c.eventually("the active member hears of the new versions", c.versionsHeard(active, 2))
	})
}

func replaced(c *cluster, done compared, dir string, what map[string]age, mixed func(active *server)) {
	c.begin(older)
	active, standbys := c.members[0], c.members[1:]
	c.matches(done, active, what, names(c.T, dir, "active-")...)
	c.matches(done, standbys[0], what, names(c.T, dir, "standby-")...)
	for _, s := range standbys {
		c.replace(s, newer)
		c.unseal(s)
	}
	c.eventually("the new standbys find the active member", c.named(active))
	mixed(active)
	c.matches(done, active, what, names(c.T, dir, "mixed-")...)
	require.Equal(c, http.StatusNoContent, c.send(active, http.MethodPut, "/v1/sys/step-down", nil).code)
	c.eventually("a new member is active", func() error {
		now, err := c.active()
		if err == nil && now == active {
			err = errors.New("the former one is active")
		}
		return err
	})
	now, err := c.active()
	require.NoError(c, err)
	c.eventually("the others find it", c.named(now))
	for _, s := range c.standbys() {
		if s != active {
			c.matches(done, s, what, names(c.T, dir, "new-standby-")...)
		}
	}
}

// sealedByShamir was recorded on members that wait for their key.
func sealedByShamir(t *testing.T, done compared) {
	const dir = "shamir"
	c := newCluster(t, map[age]string{newer: "2.6.2"}, false)
	what := map[string]age{"2.6.2": newer}
	for _, s := range c.members {
		c.run(s, newer)
	}
	c.matches(done, c.members[0], what, names(t, dir, "uninit-")...)
	c.init()
	c.matches(done, c.members[0], what, names(t, dir, "init-but-sealed-")...)
	for _, s := range c.members {
		c.unseal(s)
	}
	c.settled()
	c.lately(c.members[0], c.members[2])
	c.replace(c.members[2], newer)
	for _, name := range names(t, dir, "restarted-sealed-") {
		asked := c.members[2]
		if name == dir+"/restarted-sealed-autopilot-from-active" {
			asked = c.members[0]
		}
		c.matches(done, asked, what, name)
	}
}
