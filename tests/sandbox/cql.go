package sandbox

import (
	"time"

	"github.com/gocql/gocql"
)

// CQL logs in to the one member of Cassandra that the dialer leads to, and
// stays there.
func CQL(to gocql.Dialer, role, password string) (*gocql.Session, error) {
	c := gocql.NewCluster("127.0.0.1")
	c.ProtoVersion, c.NumConns, c.DisableInitialHostLookup, c.ReconnectInterval = 4, 1, true, 0
	c.Events.DisableTopologyEvents, c.Events.DisableNodeStatusEvents, c.Events.DisableSchemaEvents = true, true, true
	c.Authenticator = gocql.PasswordAuthenticator{Username: role, Password: password}
	c.Timeout, c.ConnectTimeout, c.Consistency = 30*time.Second, 30*time.Second, gocql.LocalOne
	c.Dialer, c.Logger = to, noLog{}
	return c.CreateSession()
}

// noLog drops what gocql prints of connections that end.
type noLog struct{}

func (noLog) Print(...any)          {}
func (noLog) Printf(string, ...any) {}
func (noLog) Println(...any)        {}
