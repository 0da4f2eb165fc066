package datastores

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/nats-io/jwt/v2"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/nats-io/nkeys"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/refit-run/refit/workflows/protocol"
)

// natsAccounts puts the servers under an operator, whose users log in with
// credentials alone, and raises streams of the same name in two accounts.
func (w *world) natsAccounts() {
	o := newOperator(w)
	nvcf, other := o.account("NVCF"), o.account("OTHER")
	o.install()
	file := filepath.Join(w.Home, "nvcf.creds")
	require.NoError(w.t, os.WriteFile(file, nvcf, 0o600))
	_, err := w.Kube.CoreV1().Secrets(natsSystem).Create(context.Background(), &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: "other-creds"},
		Data: map[string][]byte{"user.creds": other}}, metav1.CreateOptions{})
	require.NoError(w.t, err)
	for n, creds := range map[int][]byte{3: nvcf, 6: other} {
		s := w.service(nats.UserCredentialBytes(creds))
		s.stream(jetstream.StreamConfig{Name: "requests", Storage: jetstream.MemoryStorage})
		s.publish("requests", n)
	}

	login := fmt.Sprintf("{account: NVCF, creds: {file: %s}}", file)
	run := w.Start(replicasPlan, []string{"logins=[" + login + "]"}, "--id", "replicas-one-login")
	w.parks(run, "a login into account OTHER")
	w.Answer(protocol.Abort, run)
	var out raised
	w.Result(run, &out)
	require.Equal(w.t, protocol.OutcomeAborted, out.Outcome)
	require.Empty(w.t, out.Raised)

	run = w.Start(replicasPlan, []string{"logins=[" + login + ", {account: OTHER, creds: {secret: other-creds, key: user.creds}}]"}, "--id", "replicas-creds")
	w.Result(run, &out)
	require.Equal(w.t, protocol.OutcomeDone, out.Outcome)
	require.Len(w.t, out.Raised, 2)
	for n, creds := range map[uint64][]byte{3: nvcf, 6: other} {
		i := w.service(nats.UserCredentialBytes(creds)).info("requests")
		require.Equal(w.t, 3, i.Config.Replicas)
		require.Equal(w.t, n, i.State.Msgs)
	}
	w.secretly(run, append(secretsOf(w, nvcf), secretsOf(w, other)...)...)
}

// secretsOf are the token and the seed of credentials.
func secretsOf(w *world, creds []byte) []string {
	token, err := jwt.ParseDecoratedJWT(creds)
	require.NoError(w.t, err)
	pair, err := jwt.ParseDecoratedUserNKey(creds)
	require.NoError(w.t, err)
	seed, err := pair.Seed()
	require.NoError(w.t, err)
	return []string{token, string(seed)}
}

// operator signs accounts and users for servers that know nobody else.
type operator struct {
	w       *world
	pair    nkeys.KeyPair
	preload []string
}

func newOperator(w *world) *operator {
	pair, err := nkeys.CreateOperator()
	require.NoError(w.t, err)
	return &operator{w: w, pair: pair}
}

// account makes one with JetStream, and returns the credentials of its user.
func (o *operator) account(name string) []byte {
	user, err := nkeys.CreateUser()
	require.NoError(o.w.t, err)
	account, public := o.sign(name, jwt.JetStreamLimits{MemoryStorage: -1, DiskStorage: -1, Streams: -1, Consumer: -1})
	require.NotEmpty(o.w.t, public)
	claims := jwt.NewUserClaims(publicKey(o.w, user))
	token, err := claims.Encode(account)
	require.NoError(o.w.t, err)
	seed, err := user.Seed()
	require.NoError(o.w.t, err)
	creds, err := jwt.FormatUserConfig(token, seed)
	require.NoError(o.w.t, err)
	return creds
}

// sign makes an account and remembers its token for the servers.
func (o *operator) sign(name string, limits jwt.JetStreamLimits) (nkeys.KeyPair, string) {
	pair, err := nkeys.CreateAccount()
	require.NoError(o.w.t, err)
	public := publicKey(o.w, pair)
	claims := jwt.NewAccountClaims(public)
	claims.Name, claims.Limits.JetStreamLimits = name, limits
	token, err := claims.Encode(o.pair)
	require.NoError(o.w.t, err)
	o.preload = append(o.preload, fmt.Sprintf("%s: %s", public, token))
	return pair, public
}

func publicKey(w *world, pair nkeys.KeyPair) string {
	public, err := pair.PublicKey()
	require.NoError(w.t, err)
	return public
}

// install puts the servers under the operator and restarts them all.
func (o *operator) install() {
	_, system := o.sign("SYS", jwt.JetStreamLimits{})
	claims := jwt.NewOperatorClaims(publicKey(o.w, o.pair))
	claims.SystemAccount = system
	token, err := claims.Encode(o.pair)
	require.NoError(o.w.t, err)
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	maps := o.w.Kube.CoreV1().ConfigMaps(natsSystem)
	config, err := maps.Get(ctx, "nats-config", metav1.GetOptions{})
	require.NoError(o.w.t, err)
	servers, _, ok := strings.Cut(config.Data["nats.conf"], "system_account:")
	require.True(o.w.t, ok, config.Data["nats.conf"])
	patch, err := json.Marshal(map[string]any{"data": map[string]string{"nats.conf": fmt.Sprintf("%s\noperator: %s\nsystem_account: %s\nresolver: MEMORY\nresolver_preload: { %s }\n",
		servers, token, system, strings.Join(o.preload, ", "))}})
	require.NoError(o.w.t, err)
	_, err = maps.Patch(ctx, "nats-config", types.MergePatchType, patch, metav1.PatchOptions{})
	require.NoError(o.w.t, err)
	former := map[string]types.UID{}
	for i := range natsServers {
		name := fmt.Sprintf("nats-%d", i)
		former[name] = o.w.deletePod(natsSystem, name)
	}
	for name, uid := range former {
		o.w.replaced(natsSystem, name, uid)
		o.w.natsHealthy(name)
	}
}
