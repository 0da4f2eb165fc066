package openbao

import (
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"net/http"
)

// digest is a secret that can be recognised and not be read.
type digest struct {
	Salt []byte `json:"salt"`
	Hash []byte `json:"hash"`
}

const secretSize = 32

func random(n int) []byte {
	b := make([]byte, n)
	// The system's source does not fail; crypto/rand ends the process if it does.
	_, _ = rand.Read(b)
	return b
}

func digestOf(secret []byte) digest {
	d := digest{Salt: random(secretSize)}
	d.Hash = d.hash(secret)
	return d
}

func (d digest) hash(secret []byte) []byte {
	sum := sha256.Sum256(append(append([]byte{}, d.Salt...), secret...))
	return sum[:]
}

func (d digest) is(secret []byte) bool {
	return subtle.ConstantTimeCompare(d.hash(secret), d.Hash) == 1
}

// uuid is random; only its form matters.
func uuid() string {
	h := hex.EncodeToString(random(16))
	return fmt.Sprintf("%s-%s-%s-%s-%s", h[:8], h[8:12], h[12:16], h[16:20], h[20:])
}

type initRequest struct {
	Shares    int `json:"secret_shares"`
	Threshold int `json:"secret_threshold"`
}

type initAnswer struct {
	Keys       []string `json:"keys"`
	KeysBase64 []string `json:"keys_base64"`
	RootToken  string   `json:"root_token"`
}

// init makes a cluster of this member alone, which stays sealed.
func (s *Server) init(w http.ResponseWriter, r *http.Request) {
	if r.Method == http.MethodGet {
		k, _ := s.status()
		respond(w, http.StatusOK, map[string]bool{"initialized": k != nil})
		return
	}
	var asked initRequest
	if !decode(w, r, &asked) {
		return
	}
	if asked.Shares != 1 || asked.Threshold != 1 {
		fail(w, http.StatusBadRequest, "invalid seal configuration: this double knows secret_shares 1 and secret_threshold 1 alone")
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.keep != nil {
		fail(w, http.StatusBadRequest, "Vault is already initialized")
		return
	}
	unseal, token := random(secretSize), "s."+base64.RawURLEncoding.EncodeToString(random(18))
	if err := s.bootstrap(); err != nil {
		fail(w, http.StatusInternalServerError, err.Error())
		return
	}
	err := s.save(keep{ClusterID: uuid(), Key: digestOf(unseal), Token: digestOf([]byte(token)), Joined: true})
	if err != nil {
		fail(w, http.StatusInternalServerError, err.Error())
		return
	}
	respond(w, http.StatusOK, initAnswer{
		Keys: []string{hex.EncodeToString(unseal)}, KeysBase64: []string{base64.StdEncoding.EncodeToString(unseal)}, RootToken: token,
	})
}

type unsealRequest struct {
	Key   string `json:"key"`
	Reset bool   `json:"reset"`
}

func (s *Server) unseal(w http.ResponseWriter, r *http.Request) {
	var asked unsealRequest
	if !decode(w, r, &asked) {
		return
	}
	if asked.Key == "" && !asked.Reset {
		fail(w, http.StatusBadRequest, "'key' must be specified in request body as JSON, or 'reset' set to true")
		return
	}
	if !asked.Reset {
		secret, err := hex.DecodeString(asked.Key)
		if err != nil {
			secret, err = base64.StdEncoding.DecodeString(asked.Key)
		}
		if err != nil {
			fail(w, http.StatusBadRequest, "'key' must be a valid hex or base64 string")
			return
		}
		if code, err := s.open(secret); err != nil {
			fail(w, code, err.Error())
			return
		}
	}
	s.sealStatus(w, r)
}

// open lets the member into Raft when the key is right.
func (s *Server) open(secret []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.keep == nil:
		return http.StatusBadRequest, fmt.Errorf("Vault is not initialized")
	case s.member != nil:
		return 0, nil
	case !s.keep.Key.is(secret):
		return http.StatusBadRequest, fmt.Errorf("Unseal failed, invalid key")
	}
	if !s.keep.Joined {
		if err := s.answer(secret); err != nil {
			return http.StatusInternalServerError, fmt.Errorf("failed to join raft cluster: %w", err)
		}
	}
	m, err := s.enterRaft()
	if err != nil {
		return http.StatusInternalServerError, err
	}
	s.member = m
	return 0, nil
}

// seal takes the active member out; a standby refuses, as the real one does.
func (s *Server) seal(w http.ResponseWriter, _ *http.Request) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.member == nil || !s.member.isActive() {
		fail(w, http.StatusInternalServerError, "vault cannot seal when in standby mode; please restart instead")
		return
	}
	s.member.handOver()
	if err := s.leaveRaft(); err != nil {
		fail(w, http.StatusInternalServerError, err.Error())
		return
	}
	w.WriteHeader(http.StatusNoContent)
}

type sealAnswer struct {
	Type         string `json:"type"`
	Initialized  bool   `json:"initialized"`
	Sealed       bool   `json:"sealed"`
	T            int    `json:"t"`
	N            int    `json:"n"`
	Progress     int    `json:"progress"`
	Nonce        string `json:"nonce"`
	RecoverySeal bool   `json:"recovery_seal"`
	Version      string `json:"version"`
	CommitDate   string `json:"commit_date"`
	Migration    bool   `json:"migration"`
	ClusterName  string `json:"cluster_name,omitempty"`
	ClusterID    string `json:"cluster_id,omitempty"`
	StorageType  string `json:"storage_type"`
}

// oldSealAnswer is that of 2.5, which tells the date of the build.
type oldSealAnswer struct {
	sealAnswer
	CommitDate *string `json:"commit_date,omitempty"`
	BuildDate  string  `json:"build_date"`
}

// commitDate is a date as 2.6 tells one; nobody may compare it.
const commitDate = "2026-08-18T10:43:05Z"

func (s *Server) sealAnswer() any {
	k, m := s.status()
	a := sealAnswer{
		Type: "shamir", Initialized: k != nil, Sealed: m == nil, Version: string(s.version), CommitDate: commitDate, StorageType: "raft",
	}
	if k != nil {
		a.T, a.N = 1, 1
	}
	if m != nil {
		a.ClusterName, a.ClusterID = s.config.ClusterName, k.ClusterID
	}
	if s.version.old() {
		return oldSealAnswer{sealAnswer: a}
	}
	return a
}

func (s *Server) sealStatus(w http.ResponseWriter, _ *http.Request) {
	respond(w, http.StatusOK, s.sealAnswer())
}

// decode reads a JSON body; an empty one has nothing to say.
func decode(w http.ResponseWriter, r *http.Request, into any) bool {
	defer r.Body.Close()
	if err := json.NewDecoder(http.MaxBytesReader(w, r.Body, bodyLimit)).Decode(into); err != nil {
		fail(w, http.StatusBadRequest, "failed to parse JSON input: "+err.Error())
		return false
	}
	return true
}
