package nats

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/nats-io/jwt/v2"
	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/nats-io/nkeys"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/refit-run/refit/activities/artifact"
	"github.com/refit-run/refit/activities/finding"
	"github.com/refit-run/refit/activities/internal/apiservertest"
	"github.com/refit-run/refit/activities/secret"
	"github.com/refit-run/refit/tests/freeport"
)

type identity struct {
	pair   nkeys.KeyPair
	public string
}

func newIdentity(t *testing.T, create func() (nkeys.KeyPair, error)) identity {
	t.Helper()
	pair, err := create()
	require.NoError(t, err)
	public, err := pair.PublicKey()
	require.NoError(t, err)
	return identity{pair, public}
}

// operated runs one server that knows its users by signed tokens alone, with
// an account whose ID is not its name, and returns the credentials of a user.
func operated(t *testing.T) (*cluster, []byte) {
	t.Helper()
	operator, system := newIdentity(t, nkeys.CreateOperator), newIdentity(t, nkeys.CreateAccount)
	account, user := newIdentity(t, nkeys.CreateAccount), newIdentity(t, nkeys.CreateUser)
	sign := func(claims interface {
		Encode(nkeys.KeyPair) (string, error)
	}, by identity) string {
		token, err := claims.Encode(by.pair)
		require.NoError(t, err)
		return token
	}
	oc := jwt.NewOperatorClaims(operator.public)
	oc.SystemAccount = system.public
	ac := jwt.NewAccountClaims(account.public)
	ac.Name = "NVCF"
	ac.Limits.JetStreamLimits = jwt.JetStreamLimits{MemoryStorage: -1, DiskStorage: -1, Streams: -1, Consumer: -1}
	uc := jwt.NewUserClaims(user.public)
	seed, err := user.pair.Seed()
	require.NoError(t, err)
	creds, err := jwt.FormatUserConfig(sign(uc, account), seed)
	require.NoError(t, err)

	api := apiservertest.Shared(t)
	store, err := artifact.Open(t.TempDir(), nil)
	require.NoError(t, err)
	c := &cluster{t: t, client: api.Client(t), servers: make([]*server.Server, 1), cut: map[string]bool{}}
	c.place = Place{Target: api.Target(t, "prod"), Namespace: api.Namespace(t)}
	c.acts = &Activities{Clusters: api.Clusters(t, "prod"), Artifacts: store, Dial: c.dial, Pace: 100 * time.Millisecond}
	ports, err := freeport.Get(2)
	require.NoError(t, err)
	c.clients, c.monitor = ports[:1], ports[1:]
	file := filepath.Join(t.TempDir(), "nats.conf")
	require.NoError(t, os.WriteFile(file, fmt.Appendf(nil, `server_name: nats-0
listen: 127.0.0.1:%d
http: 127.0.0.1:%d
jetstream { store_dir: %q, max_mem: 64MB, max_file: 64MB }
operator: %s
system_account: %s
resolver: MEMORY
resolver_preload: { %s: %s, %s: %s }
`, ports[0], ports[1], t.TempDir(), sign(oc, operator), system.public,
		account.public, sign(ac, operator), system.public, sign(jwt.NewAccountClaims(system.public), operator)), 0o600))
	c.configs = []string{file}
	c.pod(0, nil, corev1.PodSpec{Containers: []corev1.Container{{Name: "nats", Image: "nats"}}})
	c.up(0)
	t.Cleanup(func() { c.down(0) })
	return c, creds
}

func TestACredentialsFileLogsIntoTheAccountOfTheStream(t *testing.T) {
	c, creds := operated(t)
	file := filepath.Join(t.TempDir(), "user.creds")
	require.NoError(t, os.WriteFile(file, creds, 0o600))
	require.True(t, c.servers[0].ReadyForConnections(20*time.Second))
	conn, err := nats.Connect(fmt.Sprintf("nats://127.0.0.1:%d", c.clients[0]), nats.UserCredentials(file))
	require.NoError(t, err)
	t.Cleanup(conn.Close)
	js, err := jetstream.New(conn)
	require.NoError(t, err)
	c.stream(js, requests())

	l, err := c.acts.looker(t.Context(), c.place)
	require.NoError(t, err)
	defer l.close()
	answers, err := l.look(t.Context())
	require.NoError(t, err)
	v := Judge(answers)
	require.Empty(t, v.Troubles)
	s := v.Streams[0]
	require.Equal(t, "NVCF", s.Account)
	require.NotEqual(t, "NVCF", s.AccountID)
	require.Equal(t, "nats-0", s.Leader, "a server without a cluster leads what it has")
	few := toRaise(v, nil)
	require.Equal(t, "N190", few.Findings[0].Row, "one server can't hold three copies")

	_, err = c.client.Typed.CoreV1().Secrets(c.place.Namespace).Create(t.Context(), &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: "nats-creds"},
		Data: map[string][]byte{"user.creds": creds}}, metav1.CreateOptions{})
	require.NoError(t, err)
	t.Setenv("FAKE_NATS_CREDS", string(creds))
	for _, from := range []secret.Reference{{File: file}, {Secret: "nats-creds", Key: "user.creds"}, {Variable: "FAKE_NATS_CREDS"}} {
		for _, account := range []string{s.Account, s.AccountID} {
			info, err := l.info(t.Context(), []Login{{Account: account, Creds: &from}}, s, answers)
			require.NoError(t, err, from)
			require.Equal(t, 1, info.replicas())
		}
	}

	// A login of an account that has no stream of that name.
	absent := s
	absent.Name = "absent"
	_, err = l.info(t.Context(), []Login{{Account: "NVCF", Creds: &secret.Reference{File: file}}}, absent, answers)
	missing, class, ok := finding.Of(err)
	require.True(t, ok, err)
	require.Equal(t, finding.Stop, class)
	require.Equal(t, "N190", missing.Row)
	require.Contains(t, missing.Next, "the login leads into another account")

	// A stream that its service makes anew after it was looked at.
	require.NoError(t, js.DeleteStream(t.Context(), s.Name))
	c.stream(js, requests())
	_, err = l.info(t.Context(), []Login{{Account: "NVCF", Creds: &secret.Reference{File: file}}}, s, answers)
	anew, class, ok := finding.Of(err)
	require.True(t, ok, err)
	require.Equal(t, finding.Retry, class, "the login is right")
	require.Contains(t, anew.Found, "made anew since it was looked at")

	// A user that the server does not know, and a reference to nothing.
	stranger, err := newIdentity(t, nkeys.CreateUser).pair.Seed()
	require.NoError(t, err)
	t.Setenv("FAKE_NATS_SEED", string(stranger))
	_, err = l.info(t.Context(), []Login{{Account: "NVCF", NKey: &secret.Reference{Variable: "FAKE_NATS_SEED"}}}, s, answers)
	f, class, ok := finding.Of(err)
	require.True(t, ok, err)
	require.Equal(t, finding.Stop, class, "a refused login does not get better by itself")
	require.NotContains(t, f.String(), string(stranger))
	for _, from := range []secret.Reference{{File: file + ".absent"}, {Secret: "nats-creds", Key: "absent"}, {Variable: "FAKE_NATS_ABSENT"}} {
		_, err = l.info(t.Context(), []Login{{Account: "NVCF", Creds: &from}}, s, answers)
		require.ErrorContains(t, err, "expected a value in "+from.String())
	}
}
