package artifact_test

import (
	"bytes"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"filippo.io/age"
	"github.com/stretchr/testify/require"

	"github.com/refit-run/refit/activities/artifact"
	"github.com/refit-run/refit/activities/finding"
)

const plaintext = "kind: Secret\ndata: fake-planted-secret\n"

func text(s string) func(io.Writer) error {
	return func(w io.Writer) error { _, err := io.WriteString(w, s); return err }
}

func newStore(t *testing.T) (*artifact.Store, string, *age.X25519Identity) {
	identity, err := age.GenerateX25519Identity()
	require.NoError(t, err)
	folder := filepath.Join(t.TempDir(), "store")
	store, err := artifact.Open(folder, []string{identity.Recipient().String()})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, store.Close()) })
	return store, folder, identity
}

func TestSecretIsEncryptedAndComesBack(t *testing.T) {
	store, folder, identity := newStore(t)
	ref, err := store.Put(t.Context(), "run-1/values.yaml", artifact.Secret, 3, text(plaintext))
	require.NoError(t, err)
	require.Equal(t, "file://"+folder+"/run-1/values.yaml.age", ref.URL)
	require.Equal(t, 3, ref.Entries)
	require.NotEqual(t, ref.PlainSHA256, ref.StoredSHA256)
	err = filepath.WalkDir(folder, func(path string, d os.DirEntry, err error) error {
		require.NoError(t, err)
		if d.IsDir() {
			info, err := d.Info()
			require.NoError(t, err)
			require.Zero(t, info.Mode().Perm()&0o077, "%s is for its owner alone", path)
			return nil
		}
		data, err := os.ReadFile(path)
		require.NoError(t, err)
		require.NotContains(t, string(data), "fake-planted", path)
		return nil
	})
	require.NoError(t, err)

	var out bytes.Buffer
	got, err := store.Get(t.Context(), ref.URL, strings.NewReader(identity.String()), &out)
	require.NoError(t, err)
	require.Equal(t, ref, got)
	require.Equal(t, plaintext, out.String())

	_, err = store.Get(t.Context(), ref.URL, nil, io.Discard)
	require.ErrorContains(t, err, "identity")
	stranger, err := age.GenerateX25519Identity()
	require.NoError(t, err)
	_, err = store.Get(t.Context(), ref.URL, strings.NewReader(stranger.String()), io.Discard)
	require.Error(t, err)
}

func TestPutTwiceAnswersTheSameRef(t *testing.T) {
	store, _, _ := newStore(t)
	one, err := store.Put(t.Context(), "k", artifact.Secret, 1, text(plaintext))
	require.NoError(t, err)
	two, err := store.Put(t.Context(), "k", artifact.Secret, 1, text(plaintext))
	require.NoError(t, err)
	require.Equal(t, one, two, "encryption is random, but the stored object stays")
	other, err := store.Put(t.Context(), "k", artifact.Secret, 1, text("other"))
	require.NoError(t, err)
	require.NotEqual(t, one.PlainSHA256, other.PlainSHA256)
	refs, err := store.List(t.Context(), "")
	require.NoError(t, err)
	require.Equal(t, []artifact.Ref{other}, refs)
}

func TestWithoutRecipientsSecretsStopAndEvidencePasses(t *testing.T) {
	store, err := artifact.Open(t.TempDir(), nil)
	require.NoError(t, err)
	_, err = store.Put(t.Context(), "k", artifact.Secret, 1, func(io.Writer) error { t.Fatal("nothing may be read"); return nil })
	for _, err := range []error{err, store.CheckRecipients()} {
		f, class, ok := finding.Of(err)
		require.True(t, ok, err)
		require.Equal(t, finding.Stop, class)
		require.Contains(t, f.Next, "age-keygen")
	}
	ref, err := store.Put(t.Context(), "receipt.json", artifact.Evidence, 1, text("{}"))
	require.NoError(t, err)
	require.Equal(t, ref.PlainSHA256, ref.StoredSHA256)
	var out bytes.Buffer
	_, err = store.Get(t.Context(), ref.URL, nil, &out)
	require.NoError(t, err)
	require.Equal(t, "{}", out.String())
}

func TestFailedWriterLeavesNothing(t *testing.T) {
	store, _, _ := newStore(t)
	broken := errors.New("list failed")
	_, err := store.Put(t.Context(), "k", artifact.Secret, 1, func(w io.Writer) error { _, _ = io.WriteString(w, "half"); return broken })
	require.ErrorContains(t, err, "list failed")
	refs, err := store.List(t.Context(), "")
	require.NoError(t, err)
	require.Empty(t, refs)
}

func TestChangedObjectIsNoticed(t *testing.T) {
	store, folder, _ := newStore(t)
	ref, err := store.Put(t.Context(), "receipt.json", artifact.Evidence, 1, text("{\"ok\":true}"))
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(filepath.Join(folder, "receipt.json"), []byte("{\"ok\":false}"), 0o600))
	_, err = store.Get(t.Context(), ref.URL, nil, io.Discard)
	require.ErrorContains(t, err, "changed in the store")
	// The next put of the same content repairs it.
	again, err := store.Put(t.Context(), "receipt.json", artifact.Evidence, 1, text("{\"ok\":true}"))
	require.NoError(t, err)
	require.Equal(t, ref, again)
	_, err = store.Get(t.Context(), ref.URL, nil, io.Discard)
	require.NoError(t, err)
}

func TestListByPrefix(t *testing.T) {
	store, _, _ := newStore(t)
	for _, key := range []string{"run-2/b", "run-1/b", "run-1/a"} {
		_, err := store.Put(t.Context(), key, artifact.Evidence, 1, text(key))
		require.NoError(t, err)
	}
	refs, err := store.List(t.Context(), "run-1/")
	require.NoError(t, err)
	require.Len(t, refs, 2)
	require.Equal(t, "run-1/a", refs[0].Name)
	_, err = store.Get(t.Context(), "file:///elsewhere/x", nil, io.Discard)
	require.ErrorContains(t, err, "expected a URL under")
	_, err = store.Get(t.Context(), "run-1/none", nil, io.Discard)
	_, class, _ := finding.Of(err)
	require.Equal(t, finding.Stop, class)
}

func TestOpenRefusesNonsense(t *testing.T) {
	for _, address := range []string{"", "unknown://bucket"} {
		_, err := artifact.Open(address, nil)
		require.Error(t, err, address)
	}
	_, err := artifact.Open(t.TempDir(), []string{"no-key"})
	require.ErrorContains(t, err, "recipients")
}
