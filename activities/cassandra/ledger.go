package cassandra

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/gocql/gocql"

	"github.com/refit-run/refit/activities/evidence"
	"github.com/refit-run/refit/activities/finding"
)

// LedgerKeyspace holds one table for each application keyspace.
const LedgerKeyspace = "schema_migrations"

// LedgerRequest reads the ledgers of the migrations.
type LedgerRequest struct {
	Place
	Login Login `json:"login"`
	// Keyspaces are those whose ledger is asked for.
	Keyspaces []string `json:"keyspaces"`
	// Expect is the version that some of them must have.
	Expect []Expected    `json:"expect,omitempty"`
	Limit  time.Duration `json:"limit"`
}

// Expected is the version that a keyspace's ledger must show.
type Expected struct {
	Keyspace string `json:"keyspace"`
	Version  int64  `json:"version"`
}

// LedgerResult is what the ledgers say.
type LedgerResult struct {
	OK      bool    `json:"ok"`
	Entries []Entry `json:"entries,omitempty"`
	// Absent are keyspaces without a ledger.
	Absent   []string          `json:"absent,omitempty"`
	Findings []finding.Finding `json:"findings,omitempty"`
	Evidence evidence.Trail    `json:"evidence"`
}

// Entry is one row of a keyspace's ledger.
type Entry struct {
	Keyspace string `json:"keyspace"`
	Version  int64  `json:"version"`
	Dirty    bool   `json:"dirty,omitempty"`
}

// Ledger is the activity cassandra.Ledger. It only reads: what a migration has
// left half done is for a person.
func (a *Activities) Ledger(ctx context.Context, r LedgerRequest) (out LedgerResult, err error) {
	c, err := a.open(ctx, r.Place)
	if err != nil {
		return out, err
	}
	defer c.close()
	err = c.patient(ctx, r.Limit, func(ctx context.Context) error {
		s, err := c.loginFirst(ctx, r.Login)
		if err != nil {
			return err
		}
		defer s.Close()
		tables, err := s.tables(ctx, LedgerKeyspace)
		if err != nil {
			return err
		}
		var entries []Entry
		for _, keyspace := range ledgers(r.Keyspaces, r.Expect) {
			if !slices.Contains(tables, keyspace) {
				continue
			}
			if !ValidKeyspace(keyspace) {
				return finding.Finding{Object: fmt.Sprintf("keyspace %q", keyspace), Expected: "a plain name", Found: "another one"}.Error(finding.Stop)
			}
			// One member alone may have missed the row that says dirty.
			found, err := s.read(ctx, gocql.LocalQuorum, "SELECT version, dirty FROM "+LedgerKeyspace+"."+keyspace)
			if err != nil {
				return err
			}
			for _, row := range found {
				e, err := entry(keyspace, row)
				if err != nil {
					return err
				}
				entries = append(entries, e)
			}
		}
		out = judgeLedger(tables, entries, r.Keyspaces, r.Expect)
		return nil
	})
	if err != nil {
		return out, err
	}
	out.Evidence.Looks = 1
	out.Evidence.Last, err = evidence.Store(ctx, a.Artifacts, "ledger.json", len(out.Entries), out)
	return out, err
}

// entry reads one row. What is neither dirty nor clean is for a person.
func entry(keyspace string, row map[string]any) (Entry, error) {
	e := Entry{Keyspace: keyspace}
	var ok bool
	if e.Dirty, ok = row["dirty"].(bool); !ok {
		return e, finding.Finding{Object: "ledger of " + keyspace, Expected: "true or false as dirty", Found: fmt.Sprint(row["dirty"])}.Error(finding.Stop)
	}
	switch v := row["version"].(type) {
	case int64:
		e.Version = v
	case int:
		e.Version = int64(v)
	default:
		return e, finding.Finding{Object: "ledger of " + keyspace, Expected: "a number as version", Found: fmt.Sprint(v)}.Error(finding.Stop)
	}
	return e, nil
}

// ledgers are the keyspaces whose ledger is read: those that are asked for, and
// those that must have a version.
func ledgers(keyspaces []string, expect []Expected) []string {
	wanted := slices.Clone(keyspaces)
	for _, e := range expect {
		if !slices.Contains(wanted, e.Keyspace) {
			wanted = append(wanted, e.Keyspace)
		}
	}
	return wanted
}

// judgeLedger is the pure part: a dirty ledger blocks every later migration,
// and one that is there and empty was left between two statements of one.
func judgeLedger(tables []string, entries []Entry, keyspaces []string, expect []Expected) LedgerResult {
	out := LedgerResult{Entries: entries}
	for _, keyspace := range ledgers(keyspaces, expect) {
		var versions []string
		var newest int64
		for _, e := range entries {
			if e.Keyspace != keyspace {
				continue
			}
			versions = append(versions, fmt.Sprint(e.Version))
			newest = max(newest, e.Version)
			if e.Dirty {
				out.Findings = append(out.Findings, finding.Finding{Object: "ledger of " + keyspace, Expected: "not dirty", Found: fmt.Sprintf("dirty at version %d", e.Version),
					Why: "a migration ended half way; every later one refuses to begin", Next: "a person reconciles the schema, forces the version before or this one, and runs the same release again"})
			}
		}
		at := slices.IndexFunc(expect, func(e Expected) bool { return e.Keyspace == keyspace })
		switch {
		case len(versions) == 0 && slices.Contains(tables, keyspace):
			out.Findings = append(out.Findings, finding.Finding{Object: "ledger of " + keyspace, Expected: "a row with its version", Found: "the table without a row",
				Why: "a migration replaces its row by two statements and ended between them", Next: "a person finds out how far the schema has come, forces that version, and runs the same release again"})
		case len(versions) == 0 && at < 0:
			out.Absent = append(out.Absent, keyspace)
		case at >= 0 && newest != expect[at].Version:
			found := "none"
			if len(versions) > 0 {
				found = strings.Join(versions, ", ")
			}
			out.Findings = append(out.Findings, finding.Finding{Object: "ledger of " + keyspace, Expected: fmt.Sprintf("version %d", expect[at].Version), Found: found,
				Why: "the migrations of the image have not all run, or another image's have", Next: "look at the migration Job's log"})
		}
	}
	out.OK = len(out.Findings) == 0
	return out
}
