package openbao

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"crypto/aes"
	"crypto/cipher"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"

	"github.com/hashicorp/raft"
)

// snapshot is the one route that is never forwarded. Where standbys may read,
// 2.6 gives out a standby's own state.
func (s *Server) snapshot(m *member, w http.ResponseWriter, r *http.Request) {
	fault := s.faults().Snapshot
	own := m.isActive() || fault == SnapshotLocal || s.config.StandbyReads && !s.version.old() && m.permitted(r)
	switch {
	case !own:
		l, ok := m.active()
		if !ok {
			fail(w, http.StatusInternalServerError, nobody)
			return
		}
		redirect(w, r, l)
		return
	case !m.permitted(r):
		fail(w, http.StatusForbidden, "permission denied")
		return
	case r.Method != http.MethodGet:
		fail(w, http.StatusMethodNotAllowed, "1 error occurred:\n\t* unsupported operation\n\n")
		return
	}
	archive, err := m.archive(fault)
	if err != nil {
		fail(w, http.StatusInternalServerError, err.Error())
		return
	}
	w.Header().Set("Content-Type", "application/gzip")
	w.Header().Set("Content-Disposition", "attachment")
	w.WriteHeader(http.StatusOK)
	// Flushing makes the reply chunked, as the real one.
	_ = http.NewResponseController(w).Flush()
	_, _ = w.Write(archive)
}

// archive is a gzipped tar: the state with what describes it, their checksums,
// and the checksums sealed.
func (m *member) archive(fault SnapshotFault) ([]byte, error) {
	c, err := m.state.copy()
	if err != nil {
		return nil, err
	}
	state, err := json.Marshal(c)
	if err != nil {
		return nil, err
	}
	f := m.raft.GetConfiguration()
	if err := f.Error(); err != nil {
		return nil, err
	}
	term := m.raft.CurrentTerm()
	meta, err := json.Marshal(raft.SnapshotMeta{
		Version: raft.SnapshotVersionMax, ID: fmt.Sprintf("bolt-snapshot-%d-%d", term, c.Applied), Index: c.Applied, Term: term,
		Configuration: f.Configuration(), ConfigurationIndex: f.Index(), Size: int64(len(state)),
	})
	if err != nil {
		return nil, err
	}
	sums := fmt.Appendf(nil, "%x  meta.json\n%x  state.bin\n", sha256.Sum256(meta), sha256.Sum256(state))
	if fault == SnapshotCorrupt {
		state[len(state)/2]++
	}
	sealed, err := m.sealed(sums)
	if err != nil {
		return nil, err
	}
	packed, err := pack([]file{{"meta.json", meta}, {"state.bin", state}, {"SHA256SUMS", sums}, {"SHA256SUMS.sealed", sealed}})
	if err == nil && fault == SnapshotTruncated {
		packed = packed[:len(packed)/2]
	}
	return packed, err
}

type file struct {
	name string
	data []byte
}

func pack(files []file) ([]byte, error) {
	var b bytes.Buffer
	zip := gzip.NewWriter(&b)
	t := tar.NewWriter(zip)
	for _, f := range files {
		if err := t.WriteHeader(&tar.Header{Name: f.name, Mode: 0o600, Size: int64(len(f.data))}); err != nil {
			return nil, err
		}
		if _, err := t.Write(f.data); err != nil {
			return nil, err
		}
	}
	err := errors.Join(t.Close(), zip.Close())
	return b.Bytes(), err
}

// sealed encrypts as the seal would; the key is of no use to anybody.
func (m *member) sealed(data []byte) ([]byte, error) {
	b, err := aes.NewCipher(m.token.Salt)
	if err != nil {
		return nil, err
	}
	gcm, err := cipher.NewGCM(b)
	if err != nil {
		return nil, err
	}
	nonce := random(gcm.NonceSize())
	return gcm.Seal(nonce, nonce, data, nil), nil
}
