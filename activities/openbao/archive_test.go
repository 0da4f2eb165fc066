package openbao

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"fmt"
	"io"
	"testing"

	"github.com/stretchr/testify/require"
)

type file struct{ name, text string }

// files are those of a whole snapshot.
func files() []file {
	meta, state := `{"Index":57}`, "fake state of a fake cluster"
	sums := fmt.Sprintf("%x  meta.json\n%x  state.bin\n", sha256.Sum256([]byte(meta)), sha256.Sum256([]byte(state)))
	return []file{{"meta.json", meta}, {"state.bin", state}, {sumsFile, sums}, {sealedFile, "fake seal"}}
}

func packed(t *testing.T, files []file) []byte {
	t.Helper()
	var out bytes.Buffer
	zip := gzip.NewWriter(&out)
	pack := tar.NewWriter(zip)
	for _, f := range files {
		require.NoError(t, pack.WriteHeader(&tar.Header{Name: f.name, Mode: 0o600, Size: int64(len(f.text))}))
		_, err := pack.Write([]byte(f.text))
		require.NoError(t, err)
	}
	require.NoError(t, pack.Close())
	require.NoError(t, zip.Close())
	return out.Bytes()
}

func TestAWholeSnapshotPasses(t *testing.T) {
	require.NoError(t, checkArchive(bytes.NewReader(packed(t, files()))))
}

func TestASnapshotCutAnywhereIsNoticed(t *testing.T) {
	whole := packed(t, files())
	for n := range whole {
		require.ErrorIs(t, checkArchive(bytes.NewReader(whole[:n])), errArchive, "after %d of %d bytes", n, len(whole))
	}
}

func TestASnapshotWithAFlippedBitIsNoticed(t *testing.T) {
	whole := packed(t, files())
	unpacked := func(data []byte) string {
		zip, err := gzip.NewReader(bytes.NewReader(data))
		if err != nil {
			return err.Error()
		}
		text, err := io.ReadAll(zip)
		return fmt.Sprint(string(text), err)
	}
	noticed := 0
	for n := range whole {
		broken := bytes.Clone(whole)
		broken[n] ^= 1
		if unpacked(broken) == unpacked(whole) {
			continue // bits that mean nothing: the time in the header, padding
		}
		require.ErrorIs(t, checkArchive(bytes.NewReader(broken)), errArchive, "byte %d", n)
		noticed++
	}
	require.Greater(t, noticed, len(whole)/2)
}

func TestWhatIsNotRightInASnapshotIsNamed(t *testing.T) {
	for want, change := range map[string]func([]file) []file{
		"file SHA256SUMS.sealed is missing":         func(f []file) []file { return f[:3] },
		"file SHA256SUMS is missing":                func(f []file) []file { return append(f[:2:2], f[3]) },
		"file state.bin is missing":                 func(f []file) []file { return append(f[:1:1], f[2:]...) },
		"it ends in state.bin":                      func(f []file) []file { return []file{f[0], f[2], f[3], f[1]} },
		"file SHA256SUMS.sealed is empty":           func(f []file) []file { f[3].text = ""; return f },
		"file state.bin has the checksum":           func(f []file) []file { f[1].text = "other"; return f },
		"file state.bin twice":                      func(f []file) []file { return append(f[:2:2], f[1:]...) },
		`an unknown file "keys.txt"`:                func(f []file) []file { return append(f, file{"keys.txt", "x"}) },
		"SHA256SUMS does not list state.bin":        func(f []file) []file { f[2].text = f[2].text[:76]; return f },
		"SHA256SUMS has a line that is no checksum": func(f []file) []file { f[2].text = "nothing"; return f },
		"which is not there": func(f []file) []file {
			f[2].text += fmt.Sprintf("%x  more.bin\n", sha256.Sum256(nil))
			return f
		},
	} {
		require.ErrorContains(t, checkArchive(bytes.NewReader(packed(t, change(files())))), want)
	}
	require.ErrorContains(t, checkArchive(bytes.NewReader(nil)), "no gzip stream", "a redirect has no body")
}
