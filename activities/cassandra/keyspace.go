package cassandra

import (
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/refit-run/refit/activities/finding"
)

// AuthKeyspace holds the roles: without a quorum of it nobody logs in.
const AuthKeyspace = "system_auth"

// ApplicationKeyspaces are those that the guide names (N144).
func ApplicationKeyspaces() []string {
	return []string{"nvcf_api", "nvct_api", "ess_api", "api_keys_api", "sis_api", "event_ledger", "nvcf_autoscaler"}
}

// Keyspace is how a keyspace is replicated.
type Keyspace struct {
	Name string `json:"name"`
	// Class is the strategy, without its package.
	Class string `json:"class"`
	// Factors are sorted by data centre; SimpleStrategy has one, under
	// replication_factor.
	Factors []Factor `json:"factors,omitempty"`
}

// Factor is the number of copies in a data centre.
type Factor struct {
	DataCenter string `json:"dataCenter"`
	Factor     string `json:"factor"`
}

func (k Keyspace) String() string {
	parts := make([]string, len(k.Factors))
	for i, f := range k.Factors {
		parts[i] = f.DataCenter + "=" + f.Factor
	}
	return fmt.Sprintf("%s %s {%s}", k.Name, k.Class, strings.Join(parts, ", "))
}

// local keyspaces are each member's own; their replication can't be changed.
func (k Keyspace) local() bool { return k.Class == "LocalStrategy" || k.Class == "MetaStrategy" }

// Raised says whether a keyspace has as many copies in the data centre, or
// more, and none elsewhere.
func (k Keyspace) Raised(center string, factor int) bool {
	return k.Class == "NetworkTopologyStrategy" && len(k.Factors) == 1 && k.Factors[0].DataCenter == center && k.Copies() >= factor
}

// Raisable says whether the statement that raises it may be sent, for the data
// centre: it is no member's own, has a plain name and no copies elsewhere.
func (k Keyspace) Raisable(center string) bool {
	return !k.local() && ValidKeyspace(k.Name) && !k.elsewhere(center)
}

// Copies is how many there are in the only data centre, by whatever strategy;
// 0 when there are several.
func (k Keyspace) Copies() int {
	if len(k.Factors) != 1 {
		return 0
	}
	n, err := strconv.Atoi(k.Factors[0].Factor)
	if err != nil {
		return 0
	}
	return n
}

// Alone says whether no other keyspace than these has more than one copy, but
// for those of Cassandra itself, which are small.
func Alone(live []Keyspace, these []string) bool {
	own := []string{AuthKeyspace, onlyByName, "system_traces"}
	return !slices.ContainsFunc(live, func(k Keyspace) bool {
		return !k.local() && k.Copies() != 1 && !slices.Contains(these, k.Name) && !slices.Contains(own, k.Name)
	})
}

// replication reads the map of system_schema.keyspaces.
func replication(name string, options map[string]string) Keyspace {
	k := Keyspace{Name: name}
	for option, value := range options {
		if option == "class" {
			k.Class = value[strings.LastIndex(value, ".")+1:]
			continue
		}
		k.Factors = append(k.Factors, Factor{DataCenter: option, Factor: value})
	}
	slices.SortFunc(k.Factors, func(a, b Factor) int { return strings.Compare(a.DataCenter, b.DataCenter) })
	return k
}

// plainName is what may stand in a statement: a name can't be a parameter.
var plainName = regexp.MustCompile(`^[A-Za-z0-9_-]+$`)

// ValidDataCenter refuses what could be more than a name in a statement.
func ValidDataCenter(name string) error {
	if plainName.MatchString(name) {
		return nil
	}
	return finding.Finding{
		Row: "N139", Object: "data centre of Cassandra", Expected: "a name of letters, digits, underscores and hyphens", Found: fmt.Sprintf("%q", name),
		Why: "the name becomes part of a statement", Next: "look at CASSANDRA_DC of the StatefulSet",
	}.Error(finding.Stop)
}

// plainKeyspace is a name that needs no quotes to stay what it is.
var plainKeyspace = regexp.MustCompile(`^[a-z][a-z0-9_]{0,47}$`)

// ValidKeyspace says whether a keyspace's name can stand in a statement.
func ValidKeyspace(name string) bool { return plainKeyspace.MatchString(name) }

// alter is the statement that raises a keyspace.
func alter(name, center string, factor int) string {
	return fmt.Sprintf("ALTER KEYSPACE %s WITH replication = {'class': 'NetworkTopologyStrategy', '%s': '%d'}", name, center, factor)
}

// Plan is which keyspaces need a raise, and what else there is.
type Plan struct {
	Raise   []Keyspace `json:"raise,omitempty"`
	Already []Keyspace `json:"already,omitempty"`
	// Absent are asked for and not there; Outside are there, are replicated
	// less, and nobody asked for them (schema_migrations is one).
	Absent  []string   `json:"absent,omitempty"`
	Outside []Keyspace `json:"outside,omitempty"`
}

// plan compares what is with what is asked for; all asks for every keyspace
// that is not local. system_auth comes last: with three copies asked for and
// one member there, nobody can log in any more.
func plan(live []Keyspace, asked []string, all bool, center string, factor int) (Plan, []finding.Finding) {
	var p Plan
	var strange []finding.Finding
	wanted := slices.Clone(asked)
	for _, k := range live {
		if all && !k.local() && k.Name != AuthKeyspace && !slices.Contains(wanted, k.Name) {
			wanted = append(wanted, k.Name)
		}
	}
	if all {
		wanted = append(slices.DeleteFunc(wanted, func(n string) bool { return n == AuthKeyspace }), AuthKeyspace)
	}
	for _, name := range wanted {
		at := slices.IndexFunc(live, func(k Keyspace) bool { return k.Name == name })
		switch {
		case at < 0:
			p.Absent = append(p.Absent, name)
		case live[at].Raised(center, factor), factor < TargetMembers && live[at].Copies() >= factor: // a step never takes copies away
			p.Already = append(p.Already, live[at])
		case !ValidKeyspace(name):
			strange = append(strange, finding.Finding{Object: fmt.Sprintf("keyspace %q", name), Expected: "a name of lower-case letters, digits and underscores", Found: "another one",
				Next: "raise it by hand, or leave it out of the plan"})
		case live[at].elsewhere(center):
			strange = append(strange, finding.Finding{Row: "N184", Object: "keyspace " + name, Expected: "copies in data centre " + center + " only", Found: live[at].String(),
				Why: "the statement would drop the copies of the other data centres", Next: "raise it by hand, or leave it out of the plan"})
		default:
			p.Raise = append(p.Raise, live[at])
		}
	}
	for _, k := range live {
		if !k.local() && !slices.Contains(wanted, k.Name) && k.Name != AuthKeyspace && !k.Raised(center, factor) && !k.system() {
			p.Outside = append(p.Outside, k)
		}
	}
	return p, strange
}

// elsewhere says whether a keyspace has copies in another data centre.
func (k Keyspace) elsewhere(center string) bool {
	return k.Class == "NetworkTopologyStrategy" && slices.ContainsFunc(k.Factors, func(f Factor) bool { return f.DataCenter != center && f.Factor != "0" })
}

// system keyspaces are the server's own; the chart's hook looks after them.
func (k Keyspace) system() bool { return k.Name == "system" || strings.HasPrefix(k.Name, "system_") }

func sortKeyspaces(ks []Keyspace) {
	slices.SortFunc(ks, func(a, b Keyspace) int { return strings.Compare(a.Name, b.Name) })
}
