package openbao

import (
	"errors"
	"fmt"
	"net/url"
	"os"
	"strconv"
	"strings"
	"time"
)

// Config is what a server needs to know, out of its file and environment.
type Config struct {
	// NodeID names the member in Raft, Path is its folder.
	NodeID, Path string
	// Listen is where the API is served, ClusterListen where members meet.
	Listen, ClusterListen string
	// APIAddr and ClusterAddr are what the others are told.
	APIAddr, ClusterAddr string
	ClusterName          string
	// Join are the API addresses of members to join at the start.
	Join []string
	// StandbyReads lets a standby answer what 2.6 lets it answer.
	StandbyReads bool
	// Multiplier stretches Raft's timeouts: 5 unless the file says otherwise.
	Multiplier int
}

const (
	defaultClusterName = "vault-cluster-double"

	defaultMultiplier = 5
	maxMultiplier     = 10
)

// LoadConfig reads a configuration file as `bao server` does. get reads the
// environment, which goes before the file where the real server lets it.
func LoadConfig(path string, get func(string) string) (Config, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return Config{}, fmt.Errorf("configuration: %w", err)
	}
	root, err := parseHCL(string(data))
	if err != nil {
		return Config{}, fmt.Errorf("configuration %s: %w", path, err)
	}
	c, err := configOf(root, get)
	if err != nil {
		return Config{}, fmt.Errorf("configuration %s: %w", path, err)
	}
	return c, nil
}

func configOf(root *block, get func(string) string) (Config, error) {
	c := Config{StandbyReads: root.values["disable_standby_reads"] != "true", Multiplier: defaultMultiplier, ClusterName: root.values["cluster_name"]}
	if c.ClusterName == "" {
		c.ClusterName = defaultClusterName
	}
	listener := one(root, "listener", "tcp")
	if listener == nil {
		return c, errors.New(`expected a listener "tcp", found none`)
	}
	if off := listener.values["tls_disable"]; off != "1" && off != "true" {
		return c, errors.New(`listener "tcp": expected tls_disable = true: this double serves plain HTTP alone`)
	}
	if seals := root.blocks["seal"]; len(seals) > 0 && (len(seals) > 1 || seals[0].label != "shamir") {
		return c, fmt.Errorf(`expected seal "shamir" or none, found %q`, seals[0].label)
	}
	raft := one(root, "storage", "raft")
	if raft == nil {
		return c, errors.New(`expected storage "raft", found none`)
	}
	c.Listen = first(listener.values["address"], "127.0.0.1:8200")
	c.ClusterListen = listener.values["cluster_address"]
	c.NodeID = first(env(get, "RAFT_NODE_ID"), raft.values["node_id"])
	c.Path = first(env(get, "RAFT_PATH"), raft.values["path"])
	c.APIAddr = first(env(get, "API_ADDR"), root.values["api_addr"], "http://"+c.Listen)
	c.ClusterAddr = first(env(get, "CLUSTER_ADDR"), root.values["cluster_addr"])
	for _, join := range raft.blocks["retry_join"] {
		if a := join.values["leader_api_addr"]; a != "" {
			c.Join = append(c.Join, a)
		}
	}
	if m := raft.values["performance_multiplier"]; m != "" {
		n, err := strconv.Atoi(m)
		if err != nil || n < 1 || n > maxMultiplier {
			return c, fmt.Errorf("performance_multiplier: expected 1 to %d, found %q", maxMultiplier, m)
		}
		c.Multiplier = n
	}
	return c, c.check()
}

func (c *Config) check() error {
	if c.NodeID == "" || c.Path == "" {
		return fmt.Errorf(`storage "raft": expected node_id and path, found %q and %q`, c.NodeID, c.Path)
	}
	if info, err := os.Stat(c.Path); err != nil || !info.IsDir() {
		return fmt.Errorf(`storage "raft": path: expected a folder, found none at %s`, c.Path)
	}
	u, err := url.Parse(c.ClusterAddr)
	if err != nil || u.Host == "" || u.Port() == "" {
		return fmt.Errorf("cluster_addr: expected https://HOST:PORT, found %q", c.ClusterAddr)
	}
	if c.ClusterListen == "" {
		c.ClusterListen = u.Host
	}
	return nil
}

// raftAddress is the member's in Raft.
func (c *Config) raftAddress() string {
	_, host, _ := strings.Cut(c.ClusterAddr, "://")
	return host
}

// contact is how long a follower waits for its leader, lease how long a leader
// goes on without its followers.
func (c *Config) contact() time.Duration { return time.Duration(c.Multiplier) * time.Second }
func (c *Config) lease() time.Duration   { return c.contact() / 2 }

func one(b *block, kind, label string) *block {
	for _, x := range b.blocks[kind] {
		if x.label == label {
			return x
		}
	}
	return nil
}

// env reads a variable by its new or its old name.
func env(get func(string) string, name string) string {
	return first(get("BAO_"+name), get("VAULT_"+name))
}

func first(values ...string) string {
	for _, v := range values {
		if v != "" {
			return v
		}
	}
	return ""
}
