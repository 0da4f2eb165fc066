package cassandrad

import (
	"context"
	"fmt"
	"time"

	"github.com/gocql/gocql"
)

// What the prepared data says of the cluster: the chart's names.
const (
	Cluster    = "nvcf"
	DataCenter = "ncp"
	// Password is the administrator's and every service's. It guards nothing.
	Password = "sandbox-not-a-secret"
	// Rows are in table records of keyspace nvcf_api, numbered from 0.
	Rows = 1000
	// Services have one role each, named by Service.
	Services = 20
)

// administrator's password at a server's first start is its name.
const administrator, firstPassword = "cassandra", "cassandra"

// Keyspaces are those of the services, each with its ledger of migrations.
var Keyspaces = []string{"nvcf_api", "nvct_api", "ess_api", "api_keys_api", "sis_api", "event_ledger", "nvcf_autoscaler"}

// ledger is the keyspace of the ledgers.
const ledger = "schema_migrations"

// Service names the role of a service, from 0.
func Service(n int) string { return fmt.Sprintf("service_%02d", n) }

// seed is what the chart's hooks and the services have said to the cluster.
func seed() []string {
	one := "{'class': 'NetworkTopologyStrategy', '" + DataCenter + "': 1}"
	var all []string
	for _, keyspace := range []string{"system_auth", "system_distributed", "system_traces"} {
		all = append(all, "ALTER KEYSPACE "+keyspace+" WITH replication = "+one)
	}
	for _, keyspace := range append([]string{ledger}, Keyspaces...) {
		all = append(all, "CREATE KEYSPACE "+keyspace+" WITH replication = "+one)
	}
	for _, keyspace := range Keyspaces {
		all = append(all,
			"CREATE TABLE "+keyspace+".records (id int PRIMARY KEY, body text)",
			"CREATE TABLE "+ledger+"."+keyspace+" (version bigint PRIMARY KEY, dirty boolean)",
			"INSERT INTO "+ledger+"."+keyspace+" (version, dirty) VALUES (12, false)")
	}
	for i := range Rows {
		all = append(all, fmt.Sprintf("INSERT INTO nvcf_api.records (id, body) VALUES (%d, 'row %d')", i, i))
	}
	for i := range Services {
		all = append(all, "CREATE ROLE "+Service(i)+" WITH LOGIN = true AND PASSWORD = '"+Password+"'",
			"GRANT SELECT ON KEYSPACE nvcf_api TO "+Service(i))
	}
	// The last one: the session goes on, the next login needs it.
	return append(all, "ALTER ROLE "+administrator+" WITH PASSWORD = '"+Password+"'")
}

func sow(ctx context.Context, db *gocql.Session) error {
	for _, statement := range seed() {
		if err := db.Query(statement).WithContext(ctx).Exec(); err != nil {
			return fmt.Errorf("%s: %w", statement, err)
		}
	}
	return nil
}

// login opens a session with the one server at the address.
func login(address, role, password string) (*gocql.Session, error) {
	c := gocql.NewCluster(address)
	c.ProtoVersion, c.NumConns, c.DisableInitialHostLookup = 4, 1, true
	c.Authenticator = gocql.PasswordAuthenticator{Username: role, Password: password}
	c.Timeout, c.ConnectTimeout = 30*time.Second, 10*time.Second
	c.Logger = quiet{}
	return c.CreateSession()
}

// quiet keeps gocql from printing that a starting server does not answer yet.
type quiet struct{}

func (quiet) Print(...any)          {}
func (quiet) Printf(string, ...any) {}
func (quiet) Println(...any)        {}
