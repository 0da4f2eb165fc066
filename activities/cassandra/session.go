package cassandra

import (
	"context"
	"fmt"
	"net"
	"regexp"
	"strings"
	"time"

	"github.com/gocql/gocql"
	corev1 "k8s.io/api/core/v1"

	"github.com/refit-run/refit/activities/finding"
	"github.com/refit-run/refit/activities/kube"
)

const (
	dialLimit  = 30 * time.Second
	queryLimit = 30 * time.Second
	// agreeLimit is how long a changed schema may take to reach all members.
	agreeLimit = time.Minute
)

// session is a login on one member, and on that one only.
type session struct {
	*gocql.Session
	pod string
}

// password reads the administrator's, for one session.
func (c *cluster) password(ctx context.Context, l Login) ([]byte, error) {
	return l.Password.Read(ctx, c.client, c.place.Namespace, "login to Cassandra")
}

// login opens a session on a member.
func (c *cluster) login(ctx context.Context, pod *corev1.Pod, l Login) (*session, error) {
	l = l.WithDefaults()
	password, err := c.password(ctx, l)
	if err != nil {
		return nil, err
	}
	// The address is never dialled, but gocql looks up what is none.
	address := "127.0.0.1"
	if pod.Status.PodIP != "" {
		address = pod.Status.PodIP
	}
	config := gocql.NewCluster(address)
	config.Port = c.place.Members.Port
	config.ProtoVersion = 4 // the server refuses 5
	config.Consistency, config.SerialConsistency = gocql.One, gocql.LocalSerial
	config.Authenticator = gocql.PasswordAuthenticator{Username: l.User, Password: strings.TrimRight(string(password), "\r\n")}
	config.HostDialer = podDialer{ctx: ctx, dial: func(ctx context.Context) (net.Conn, error) {
		return c.dial(ctx, pod.Name)
	}}
	config.ConnectTimeout, config.Timeout, config.WriteTimeout = dialLimit, queryLimit, queryLimit
	config.MaxWaitSchemaAgreement = agreeLimit
	// Without these a session wanders to members it hears of.
	config.DisableInitialHostLookup, config.NumConns = true, 1
	config.Events.DisableTopologyEvents, config.Events.DisableNodeStatusEvents, config.Events.DisableSchemaEvents = true, true, true
	config.ReconnectInterval = 0
	config.ReconnectionPolicy = &gocql.ConstantReconnectionPolicy{MaxRetries: 1, Interval: time.Second}
	config.Logger = silent{}
	s, err := config.CreateSession()
	if err != nil {
		return nil, refusal(pod.Name, l.User, err).Error(class(err))
	}
	return &session{s, pod.Name}, nil
}

func (c *cluster) dial(ctx context.Context, pod string) (net.Conn, error) {
	return c.a.Dial.Pod(ctx, c.client, c.place.Namespace, pod, c.place.Members.Port)
}

// podDialer leads every connection of a session to one pod. gocql gives the
// dialer a context of its own, which must not outlive the activity's.
type podDialer struct {
	ctx  context.Context
	dial func(ctx context.Context) (net.Conn, error)
}

// DialHost implements gocql.HostDialer.
func (d podDialer) DialHost(ctx context.Context, _ *gocql.HostInfo) (*gocql.DialedHost, error) {
	ctx, cancel := context.WithTimeout(ctx, dialLimit)
	defer cancel()
	defer context.AfterFunc(d.ctx, cancel)()
	conn, err := d.dial(ctx)
	if err != nil {
		return nil, err
	}
	return &gocql.DialedHost{Conn: conn}, nil
}

// silent keeps gocql's own log away: activities report by their results.
type silent struct{}

func (silent) Print(...any)          {}
func (silent) Printf(string, ...any) {}
func (silent) Println(...any)        {}

// The two texts that tell a refused login from a missing quorum. gocql wraps
// the server's errors as text when a session can't be made.
const (
	refused  = "and/or password are incorrect"
	noQuorum = "Cannot achieve consistency level"
	// refusedLogin is how a finding tells a refused login without the name.
	refusedLogin = "refused: username or password is incorrect"
)

// Refused says whether an error is that of a refused login.
func Refused(err error) bool { return err != nil && strings.Contains(err.Error(), refused) }

// letsNobodyIn says whether a finding is a member's answer that it lets nobody
// in for want of rows or of members, and not that it could not be asked.
func letsNobodyIn(err error) bool {
	f, class, told := finding.Of(err)
	return told && (class == finding.Stop && f.Found == refusedLogin || class == finding.Wait && strings.Contains(f.Found, noQuorum))
}

// class says what an error of CQL means for a run: a refused login and a
// statement that the server does not take are for a person, a missing quorum
// passes when members come back, and what is left is the way to the member.
func class(err error) finding.Class {
	text := err.Error()
	switch {
	case strings.Contains(text, refused):
		return finding.Stop
	case strings.Contains(text, noQuorum), strings.Contains(text, "Operation timed out"), strings.Contains(text, "received only"),
		strings.Contains(text, "bootstrapping"), strings.Contains(text, "Unable to perform authentication"):
		return finding.Wait
	}
	if syntaxError.MatchString(text) {
		return finding.Stop
	}
	for _, of := range []string{"Invalid", "invalid", "unconfigured", "does not exist", "doesn't exist", "Unrecognized", "has no", "Unauthorized", "permission", "forbidden"} {
		if strings.Contains(text, of) {
			return finding.Stop
		}
	}
	if c := kube.Class(err); c == finding.Stop {
		return c
	}
	return finding.Wait
}

// syntaxError is how the server tells where a statement is wrong.
var syntaxError = regexp.MustCompile(`line \d+:\d+ `)

func refusal(pod, user string, err error) finding.Finding {
	f := finding.Finding{Object: fmt.Sprintf("login of %s on %s", user, pod), Expected: "to be let in", Found: err.Error(),
		Next: "see that the member runs and answers on its CQL port, then retry"}
	switch {
	case Refused(err):
		f.Found = refusedLogin
		f.Why = "rows of system_auth may be missing on this member, or the reference leads to another password"
		f.Next = "stop, do not upgrade; see that the reference names the administrator's password and not the service role's; otherwise restore from the backups by the reviewed procedure, and contact NVIDIA support with this output"
	case strings.Contains(err.Error(), noQuorum):
		f.Next = "a quorum of the members that hold the roles is away: bring them back"
	}
	return f
}

// statement runs a statement and tells its error as a finding. The text holds
// no secret.
func (s *session) statement(ctx context.Context, text string) error {
	ctx, cancel := context.WithTimeout(ctx, agreeLimit+queryLimit)
	defer cancel()
	if err := s.Query(text).WithContext(ctx).Exec(); err != nil {
		return s.wrong(text, err)
	}
	return nil
}

// wrong is the error of a statement or query.
func (s *session) wrong(text string, err error) error {
	f := finding.Finding{Object: "CQL on " + s.pod, Expected: text, Found: err.Error(), Next: "see that all members are up (nodetool status), then retry"}
	c := class(err)
	if c == finding.Stop {
		f.Next = "see that the role may do this and that what it names is there, then retry"
	}
	return f.Error(c)
}

// rows reads all rows of a query of what the member itself holds, or of what it
// may be behind with.
func (s *session) rows(ctx context.Context, text string, values ...any) ([]map[string]any, error) {
	return s.read(ctx, gocql.One, text, values...)
}

// read reads all rows as so many members have them.
func (s *session) read(ctx context.Context, from gocql.Consistency, text string, values ...any) ([]map[string]any, error) {
	ctx, cancel := context.WithTimeout(ctx, queryLimit)
	defer cancel()
	rows, err := s.Query(text, values...).Consistency(from).WithContext(ctx).Iter().SliceMap()
	if err != nil {
		return nil, s.wrong(text, err)
	}
	return rows, nil
}
