package cassandra

import (
	"fmt"
	"regexp"
	"strings"
)

// Neighbour is one line of a member's `nodetool status`: how it sees another
// member, or itself.
type Neighbour struct {
	DataCenter string `json:"dataCenter"`
	// State is two letters: Up or Down, then Normal, Leaving, Joining, Moving.
	State   string `json:"state"`
	Address string `json:"address"`
	HostID  string `json:"hostID"`
	Rack    string `json:"rack"`
}

// UpNormal is the one state in which a member serves.
const UpNormal = "UN"

var (
	// Where members have one token each, it stands before the rack.
	statusLine = regexp.MustCompile(`^([UD?][NLJMS?])\s+(\S+)\s.*\s([0-9a-f]{8}-[0-9a-f-]{27})(?:\s+-?\d+)?\s+(\S+)\s*$`)
	// A member that has no host ID yet shows null.
	joiningLine = regexp.MustCompile(`^([UD?][NLJMS?])\s+(\S+)\s.*\s(null)(?:\s+-?\d+)?\s+(\S+)\s*$`)
)

// parseStatus reads `nodetool status`.
func parseStatus(text string) ([]Neighbour, error) {
	var out []Neighbour
	center := ""
	for _, line := range strings.Split(text, "\n") {
		if rest, ok := strings.CutPrefix(line, "Datacenter:"); ok {
			center = strings.TrimSpace(rest)
			continue
		}
		m := statusLine.FindStringSubmatch(line)
		if m == nil {
			m = joiningLine.FindStringSubmatch(line)
		}
		if m != nil {
			out = append(out, Neighbour{DataCenter: center, State: m[1], Address: m[2], HostID: m[3], Rack: m[4]})
		}
	}
	if len(out) == 0 {
		return nil, fmt.Errorf("no member in the output of nodetool status: %q", text[:min(len(text), 200)])
	}
	return out, nil
}

// Description is what a member says in `nodetool describecluster`. None of it
// needs a login.
type Description struct {
	// Versions are the schema versions that the member knows of, with the
	// members that have each; unreachable ones stand under UNREACHABLE.
	Versions  []SchemaVersion `json:"versions"`
	Keyspaces []Keyspace      `json:"keyspaces"`
}

// SchemaVersion is one version of the schema and who has it.
type SchemaVersion struct {
	Version string   `json:"version"`
	Members []string `json:"members"`
}

var (
	versionLine  = regexp.MustCompile(`^([0-9a-f]{8}-[0-9a-f-]{27}|UNREACHABLE|UNKNOWN): \[(.*)\]$`)
	keyspaceLine = regexp.MustCompile(`^(\w+) -> Replication class: (\w+) \{(.*)\}$`)
)

// parseDescription reads `nodetool describecluster`.
func parseDescription(text string) (Description, error) {
	var d Description
	for _, line := range strings.Split(text, "\n") {
		line = strings.TrimSpace(line)
		if m := versionLine.FindStringSubmatch(line); m != nil {
			d.Versions = append(d.Versions, SchemaVersion{Version: m[1], Members: fields(m[2])})
		}
		if m := keyspaceLine.FindStringSubmatch(line); m != nil {
			k := Keyspace{Name: m[1], Class: m[2]}
			for _, option := range fields(m[3]) {
				center, factor, _ := strings.Cut(option, "=")
				k.Factors = append(k.Factors, Factor{DataCenter: center, Factor: factor})
			}
			d.Keyspaces = append(d.Keyspaces, k)
		}
	}
	sortKeyspaces(d.Keyspaces)
	if len(d.Versions) == 0 || len(d.Keyspaces) == 0 {
		return d, fmt.Errorf("no schema version or no keyspace in the output of nodetool describecluster: %q", text[:min(len(text), 200)])
	}
	return d, nil
}

func fields(list string) []string {
	var out []string
	for _, f := range strings.Split(list, ",") {
		if f = strings.TrimSpace(f); f != "" {
			out = append(out, f)
		}
	}
	return out
}
