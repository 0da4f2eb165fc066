package cassandrad

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/gocql/gocql"
	"golang.org/x/sys/unix"

	"github.com/refit-run/refit/sandbox/process"
	"github.com/refit-run/refit/sandbox/procnode/pod"
)

const (
	// preparing bounds the making of the data on a busy machine.
	preparing = 8 * time.Minute
	// look is how often a starting member is asked.
	look = 500 * time.Millisecond
	// scratch is where a member stands while its data is made; only one does at
	// a time.
	scratch = "127.191.255.77"
	// grace is what a member that was drained needs to end.
	grace = 30 * time.Second
)

// Prepared is where the data of a first member lies, made or not. Its name
// changes with what goes into it.
func (h Home) Prepared() string {
	sum := sha256.Sum256([]byte(yamlText + tokens(0) + strings.Join(seed(), "\n")))
	return filepath.Join(h.dir, "prepared-"+hex.EncodeToString(sum[:6]))
}

// Prepare makes, once, the data of a first member as an NVCF stack leaves it:
// the administrator with Password, service roles, keyspaces, ledgers and rows,
// everything with one copy. Others that call it meanwhile wait. report is told
// when it takes a while.
func (h Home) Prepare(ctx context.Context, report func(string)) (string, error) {
	target := h.Prepared()
	lock, err := os.OpenFile(filepath.Join(h.dir, "prepare.lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return "", fmt.Errorf("cassandra: prepared data: %w", err)
	}
	defer lock.Close()
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX); err != nil {
		return "", fmt.Errorf("cassandra: prepared data: %w", err)
	}
	if _, err := os.Stat(target); err == nil {
		return target, nil
	}
	report("preparing the data of a Cassandra member, once: about a minute")
	ctx, cancel := context.WithTimeoutCause(ctx, preparing, fmt.Errorf("the first member was not done after %s", preparing))
	defer cancel()
	next := filepath.Join(h.dir, "prepared.next")
	if err := os.RemoveAll(next); err != nil {
		return "", err
	}
	if err := h.fill(ctx, next); err != nil {
		return "", fmt.Errorf("cassandra: prepared data: %w", err)
	}
	return target, os.Rename(next, target)
}

// fill runs one member in dir, says to it what the seed says and ends it.
func (h Home) fill(ctx context.Context, dir string) error {
	m := member{
		ip: scratch, data: dir, conf: filepath.Join(dir, "conf"),
		seeds: scratch, dc: DataCenter, cluster: Cluster,
	}
	if err := os.MkdirAll(m.conf, 0o755); err != nil {
		return err
	}
	if err := errors.Join(m.initialise(), m.configure()); err != nil {
		return err
	}
	line := h.server(m)
	server := process.Keep(process.Spec{
		Name: "cassandra", Path: line[0], Args: line[1:], Dir: dir, Log: filepath.Join(dir, "server.log"), Grace: grace,
	})
	if err := server.Start(); err != nil {
		return err
	}
	defer server.Stop()
	var db *gocql.Session
	err := server.Ready(ctx, look, func(context.Context) (err error) {
		db, err = login(scratch, administrator, firstPassword)
		return err
	})
	if err != nil {
		return err
	}
	err = sow(ctx, db)
	db.Close()
	if err == nil {
		err = h.drain(ctx, m)
	}
	if err != nil {
		return fmt.Errorf("%w; the member's log ends with:\n%s", err, server.Tail())
	}
	server.Stop()
	// All is in the tables now.
	return errors.Join(os.RemoveAll(filepath.Join(dir, "commitlog")), os.RemoveAll(m.conf))
}

// drain has everything written to the tables.
func (h Home) drain(ctx context.Context, m member) error {
	tools := filepath.Join(m.conf, "tools")
	if err := h.Tools(tools); err != nil {
		return err
	}
	drain := exec.CommandContext(ctx, filepath.Join(tools, "nodetool"), "drain")
	drain.Env = append(os.Environ(), pod.IPVariable+"="+m.ip, pod.HostsVariable+"=", "VOLUME_"+ConfVolume+"="+m.conf, "VOLUME_"+DataVolume+"="+m.data)
	if out, err := drain.CombinedOutput(); err != nil {
		return fmt.Errorf("nodetool drain: %w: %s", err, out)
	}
	return nil
}
