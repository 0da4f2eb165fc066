package mask_test

import (
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"go.temporal.io/sdk/temporal"

	"github.com/refit-run/refit/activities/finding"
	"github.com/refit-run/refit/activities/mask"
)

const planted = "fake-p@ss/word+1"

func TestEveryFormOfAValueIsReplaced(t *testing.T) {
	m := mask.New(planted + "\n")
	quoted, err := json.Marshal(planted)
	require.NoError(t, err)
	for name, text := range map[string]string{
		"plain":          "login: " + planted,
		"twice":          planted + " and " + planted,
		"base64":         "data: " + base64.StdEncoding.EncodeToString([]byte(planted)),
		"base64 of line": "data: " + base64.StdEncoding.EncodeToString([]byte(planted+"\n")),
		"base64url":      base64.RawURLEncoding.EncodeToString([]byte(planted)),
		"json":           string(quoted),
		"url":            "mysql://root:fake-p%40ss%2Fword+1@db, mysql://root:fake-p%40ss%2Fword%2B1@db",
	} {
		got := m.String(text)
		require.Contains(t, got, mask.Replacement, name)
		require.NotContains(t, got, "word", name)
		require.NotContains(t, got, base64.StdEncoding.EncodeToString([]byte(planted))[:12], name)
	}
}

func TestALongerSecretIsNotLeftHalfShown(t *testing.T) {
	m := mask.New("fake-secret", "fake-secret-and-more")
	require.Equal(t, mask.Replacement+" "+mask.Replacement, m.String("fake-secret-and-more fake-secret"))
}

func TestLinesOfAKeyAreReplacedOneByOne(t *testing.T) {
	m := mask.New("-----BEGIN FAKE KEY-----\nZmFrZWZha2VmYWtl\nMTIzNDU2Nzg5MA==\n-----END FAKE KEY-----\n")
	got := m.String("+  key: |\n+    -----BEGIN FAKE KEY-----\n+    ZmFrZWZha2VmYWtl\n+    MTIzNDU2Nzg5MA==\n")
	require.Equal(t, "+  key: |\n+    -----BEGIN FAKE KEY-----\n+    "+mask.Replacement+"\n+    "+mask.Replacement+"\n", got)
}

func TestShortValuesAreNoSecrets(t *testing.T) {
	m := mask.New("", "1", "yes", "  a ")
	require.Equal(t, "1 yes a", m.String("1 yes a"))
}

func TestNilAndEmptyMaskersMaskNothing(t *testing.T) {
	var none *mask.Masker
	require.Equal(t, planted, none.String(planted))
	err := errors.New(planted)
	require.Equal(t, err, none.Error(err))
	require.Equal(t, planted, (&mask.Masker{}).String(planted))
}

func TestErrorsAreMaskedAndKeepTheirClass(t *testing.T) {
	m := mask.New(planted)
	require.NoError(t, m.Error(nil))
	plain := m.Error(fmt.Errorf("login with %s: %w", planted, errors.New("denied")))
	require.NotContains(t, plain.Error(), planted)

	f := finding.Finding{Row: "T01", Object: "Secret/db", Found: "value " + planted, Next: "rotate"}
	masked := m.Error(f.Error(finding.Stop))
	require.NotContains(t, masked.Error(), planted)
	got, class, ok := finding.Of(masked)
	require.True(t, ok)
	require.Equal(t, finding.Stop, class)
	require.Equal(t, finding.Finding{Row: "T01", Object: "Secret/db", Found: "value " + mask.Replacement, Next: "rotate"}, got)
	var app *temporal.ApplicationError
	require.ErrorAs(t, masked, &app)
	require.True(t, app.NonRetryable())
}

func TestValuesUnderKnownKeysAreLearnt(t *testing.T) {
	m := mask.FromValues(map[string]any{
		"greptime": map[string]any{"password": "fake-greptime", "host": "db.example"},
		"agent":    map[string]any{"enrollToken": "fake-enroll", "agentId": "agent-7"},
		"cloudVendorCredentials": map[string]any{
			"accessKey": "fake-ak", "secretKey": "fake-sk", "enabled": true, "pin": 123456,
		},
		"receivers": []any{map[string]any{"webhook_url": "https://hooks.example/fake"}},
	})
	for _, secret := range []string{"fake-greptime", "fake-enroll", "fake-ak", "fake-sk", "123456", "https://hooks.example/fake"} {
		require.Equal(t, mask.Replacement, m.String(secret), secret)
	}
	for _, open := range []string{"db.example", "agent-7", "true"} {
		require.Equal(t, open, m.String(open))
	}
	require.Equal(t, mask.Replacement, mask.FromValues(map[string]any{"custom": "fake-custom"}, "custom").String("fake-custom"))
	require.Equal(t, mask.Replacement, mask.FromAll(map[string]any{"a": []any{"fake-in-a-list"}}).String("fake-in-a-list"))
	require.Equal(t, mask.Replacement, mask.FromSecret(map[string][]byte{"k": []byte("fake-data")}).String("fake-data"))
}

// A person adds a variable or a key to an object of the release: its value is in
// no Secret and in no values, and a diff shows it as context.
func TestObjectsTellTheirSecretsByTheirKeys(t *testing.T) {
	m := mask.FromObjects(map[string]any{
		"kind":     "ConfigMap",
		"metadata": map[string]any{"annotations": map[string]any{"example.com/api-token": "fake-annotation"}},
		"data": map[string]any{
			"db-password": "fake-key", "log": "level=debug", "app.yaml": "db:\n  password: fake-nested\n  host: db.example\n",
			"dsn": "postgres://app:fake-in-url@db.example/app", "app.json": `{"clientSecret": "fake-in-json"}`,
		},
	}, map[string]any{"kind": "Deployment", "spec": map[string]any{
		"volumes": []any{map[string]any{"serviceAccountToken": map[string]any{"path": "token"}}},
		"containers": []any{map[string]any{
			"args": []any{"--api-token=fake-argument", "--level=info"},
			"env": []any{
				map[string]any{"name": "DB_PASSWORD", "value": "fake-variable"}, map[string]any{"name": "REGION", "value": "north"},
				map[string]any{"name": "USE_TOKEN", "value": "true"},
				map[string]any{"name": "OTHER_PASSWORD", "valueFrom": map[string]any{"secretKeyRef": map[string]any{"key": "password"}}},
			},
		}},
	}}, map[string]any{"kind": "CustomResourceDefinition", "spec": map[string]any{"properties": map[string]any{"token": "string"}}})
	for _, secret := range []string{"fake-annotation", "fake-key", "fake-nested", "fake-in-url", "fake-in-json", "fake-argument", "fake-variable"} {
		require.Equal(t, mask.Replacement, m.String(secret), secret)
	}
	for _, open := range []string{"debug", "db.example", "token", "info", "north", "true", "password", "string"} {
		require.Equal(t, open, m.String(open))
	}
}

// A chart's list of extra variables is values, too.
func TestAVariableInValuesIsToldByItsName(t *testing.T) {
	values := map[string]any{"extraEnv": []any{
		map[string]any{"name": "DB_PASSWORD", "value": "fake-extra"}, map[string]any{"name": "REGION", "value": "north"},
	}}
	m := mask.FromValues(values)
	require.Equal(t, mask.Replacement+" north", m.String("fake-extra north"))
	require.Equal(t, []string{"extraEnv[0].value"}, mask.RefuseInline(values))
}

func TestRefuseInlineNamesThePaths(t *testing.T) {
	require.Equal(t, []string{"agent.enrollToken", "alert.receivers[1].password", "db_password"}, mask.RefuseInline(map[string]any{
		"agent":       map[string]any{"enrollToken": "fake", "agentId": "x"},
		"db_password": "fake",
		"alert":       map[string]any{"receivers": []any{map[string]any{"name": "a"}, map[string]any{"password": "fake"}}},
		"empty":       map[string]any{"password": "", "token": nil},
		"controller":  map[string]any{"replicaCount": 2, "tokenTTL": "5m"},
	}))
}

func TestMergeLearnsFromAnother(t *testing.T) {
	m := mask.New("fake-one")
	m.Merge(mask.New("fake-two"))
	m.Merge(nil)
	m.Merge(m)
	require.Equal(t, strings.Repeat(mask.Replacement, 2), m.String("fake-onefake-two"))
}
