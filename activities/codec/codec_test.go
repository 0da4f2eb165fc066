package codec

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	commonpb "go.temporal.io/api/common/v1"
	"go.temporal.io/sdk/client"
	"go.temporal.io/sdk/converter"
	"go.temporal.io/sdk/temporal"
	"google.golang.org/protobuf/proto"
)

const secret = "fake-password-0000"

func keyFile(t *testing.T, lines ...string) string {
	path := filepath.Join(t.TempDir(), "keys")
	require.NoError(t, os.WriteFile(path, []byte(strings.Join(lines, "\n")), 0o600))
	return path
}

func fresh(t *testing.T, name string) string {
	line, err := New(name)
	require.NoError(t, err)
	return line
}

func read(t *testing.T, lines ...string) *Keys {
	k, err := Read(keyFile(t, lines...))
	require.NoError(t, err)
	return k
}

func plain(t *testing.T) *commonpb.Payload {
	p, err := converter.GetDefaultDataConverter().ToPayload(secret)
	require.NoError(t, err)
	return p
}

func TestAPayloadComesBackAndIsUnreadableMeanwhile(t *testing.T) {
	k := read(t, "# made for the test", "", fresh(t, "november"))
	p := plain(t)
	sealed, err := k.Encode([]*commonpb.Payload{p, p})
	require.NoError(t, err)
	assert.NotContains(t, sealed[0].String(), secret)
	assert.NotEqual(t, sealed[0].Data, sealed[1].Data, "equal payloads must not look equal")
	back, err := k.Decode(sealed)
	require.NoError(t, err)
	assert.True(t, proto.Equal(p, back[0]))
}

func TestAPayloadInTheClearIsAccepted(t *testing.T) {
	p := plain(t)
	back, err := read(t, fresh(t, "november")).Decode([]*commonpb.Payload{p})
	require.NoError(t, err)
	assert.True(t, proto.Equal(p, back[0]))
}

func TestAnOlderKeyStillDecrypts(t *testing.T) {
	older, newer := fresh(t, "october"), fresh(t, "november")
	sealed, err := read(t, older).Encode([]*commonpb.Payload{plain(t)})
	require.NoError(t, err)
	rotated := read(t, newer, older)
	_, err = rotated.Decode(sealed)
	require.NoError(t, err)
	sealed, err = rotated.Encode(sealed)
	require.NoError(t, err)
	assert.Equal(t, "november", string(sealed[0].Metadata[keyField]), "the first key encrypts")
}

func TestWhatCannotBeDecryptedSaysWhichKeyIsMissing(t *testing.T) {
	sealed, err := read(t, fresh(t, "october")).Encode([]*commonpb.Payload{plain(t)})
	require.NoError(t, err)
	_, err = read(t, fresh(t, "november")).Decode(sealed)
	require.ErrorContains(t, err, `key "october"`)
	require.ErrorContains(t, err, Variable)
	_, err = read(t, fresh(t, "october")).Decode(sealed)
	require.ErrorContains(t, err, "another installation")
	sealed[0].Data[0] ^= 1
	_, err = read(t, fresh(t, "october")).Decode(sealed)
	require.Error(t, err)
}

func TestWithoutKeysAPayloadStaysAsItIsAndAnEncryptedOneSaysWhatIsMissing(t *testing.T) {
	var none *Keys
	p := []*commonpb.Payload{plain(t)}
	same, err := none.Encode(p)
	require.NoError(t, err)
	assert.True(t, proto.Equal(p[0], same[0]))
	sealed, err := read(t, fresh(t, "october")).Encode(p)
	require.NoError(t, err)
	_, err = none.Decode(sealed)
	require.ErrorContains(t, err, "name the installation's key file in "+Variable)
}

func TestABadKeyFileIsRefusedWithoutQuotingIt(t *testing.T) {
	key := fresh(t, "november")
	_, text, _ := strings.Cut(key, " ")
	for name, c := range map[string]struct {
		lines []string
		says  string
	}{
		"empty":   {nil, "holds no key"},
		"short":   {[]string{"november c2hvcnQ="}, "line 1"},
		"no name": {[]string{text}, "line 1"},
		"twice":   {[]string{key, key}, "line 2: key november stands twice"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := Read(keyFile(t, c.lines...))
			require.ErrorContains(t, err, c.says)
			assert.NotContains(t, err.Error(), text)
		})
	}
	_, err := New("two words")
	require.Error(t, err)
	k, err := FromEnv(func(string) string { return "" })
	require.NoError(t, err)
	require.Nil(t, k)
	_, err = FromEnv(func(string) string { return "/does/not/exist" })
	require.ErrorContains(t, err, Variable)
}

func TestTheTextOfAFailureIsEncryptedToo(t *testing.T) {
	var o client.Options
	read(t, fresh(t, "november")).Apply(&o)
	f := o.FailureConverter.ErrorToFailure(temporal.NewApplicationError("the password is "+secret, "stop", secret))
	assert.NotContains(t, f.String(), secret)
	assert.Equal(t, "stop", f.GetApplicationFailureInfo().GetType(), "the class stays: retries depend on it")
	assert.ErrorContains(t, o.FailureConverter.FailureToError(f), secret)
}
