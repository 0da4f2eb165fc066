package openbao

import (
	"bytes"
	"context"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"

	"github.com/hashicorp/raft"
)

const (
	// joinEvery is how often a member without a cluster asks the others for
	// theirs; joinLimit bounds one question.
	joinEvery = time.Second
	joinLimit = 10 * time.Second
	addLimit  = 5 * time.Second
)

// retryJoin looks for a cluster to join until the member has one.
func (s *Server) retryJoin(ctx context.Context) {
	members := s.leaders()
	if len(members) == 0 {
		return
	}
	every := time.NewTicker(joinEvery)
	defer every.Stop()
	for {
		if k, _ := s.status(); k != nil {
			return
		}
		for _, leader := range members {
			// The others are not up, or not initialised: that is why it is
			// asked again.
			if err := s.challenge(ctx, leader); err == nil {
				s.log.Info("found a cluster to join; it takes part when it is unsealed", "member", leader)
				return
			}
		}
		select {
		case <-ctx.Done():
			return
		case <-every.C:
		}
	}
}

func (s *Server) leaders() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.config.Join
}

// challenge learns of a cluster what a sealed member of it knows.
func (s *Server) challenge(ctx context.Context, leader string) error {
	var found keep
	if err := s.ask(ctx, leader, "challenge", answerRequest{NodeID: s.config.NodeID}, &found); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.keep != nil {
		return nil
	}
	found.Joined = false
	return s.save(found)
}

// answer asks the active member to let this one into Raft; the key is the
// proof. It is called under the lock.
func (s *Server) answer(secret []byte) error {
	errs := []error{errors.New("no retry_join member answered")}
	request := answerRequest{NodeID: s.config.NodeID, Address: s.config.raftAddress(), Key: hex.EncodeToString(secret)}
	for _, leader := range s.config.Join {
		err := s.ask(context.Background(), leader, "answer", request, nil)
		if err == nil {
			k := *s.keep
			k.Joined = true
			return s.save(k)
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

type answerRequest struct {
	NodeID  string `json:"node_id"`
	Address string `json:"address,omitempty"`
	Key     string `json:"key,omitempty"`
}

func (s *Server) ask(ctx context.Context, leader, what string, body, into any) error {
	data, err := json.Marshal(body)
	if err != nil {
		return err
	}
	url := strings.TrimSuffix(leader, "/") + bootstrapPath + what
	request, err := http.NewRequestWithContext(ctx, http.MethodPut, url, bytes.NewReader(data))
	if err != nil {
		return err
	}
	response, err := s.client.Do(request)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	text, err := io.ReadAll(io.LimitReader(response.Body, bodyLimit))
	if err != nil {
		return err
	}
	if response.StatusCode != http.StatusOK {
		return fmt.Errorf("%s: expected 200, found %d: %s", url, response.StatusCode, bytes.TrimSpace(text))
	}
	if into == nil {
		return nil
	}
	return json.Unmarshal(text, into)
}

// bootstrapChallenge and bootstrapAnswer are the active member's side.
func (s *Server) bootstrapChallenge(w http.ResponseWriter, _ *http.Request) {
	k, _ := s.status()
	respond(w, http.StatusOK, k)
}

func (s *Server) bootstrapAnswer(w http.ResponseWriter, r *http.Request) {
	var asked answerRequest
	if !decode(w, r, &asked) {
		return
	}
	k, m := s.status()
	secret, err := hex.DecodeString(asked.Key)
	if err != nil || k == nil || m == nil || !k.Key.is(secret) || asked.NodeID == "" || asked.Address == "" {
		fail(w, http.StatusBadRequest, "could not verify the challenge's answer")
		return
	}
	if err := m.raft.AddVoter(raft.ServerID(asked.NodeID), raft.ServerAddress(asked.Address), 0, addLimit).Error(); err != nil {
		fail(w, http.StatusInternalServerError, err.Error())
		return
	}
	respond(w, http.StatusOK, map[string]bool{"joined": true})
}

// join is the same by hand.
func (s *Server) join(w http.ResponseWriter, r *http.Request) {
	var asked struct {
		Leader string `json:"leader_api_addr"`
	}
	if !decode(w, r, &asked) {
		return
	}
	if k, _ := s.status(); k != nil {
		fail(w, http.StatusBadRequest, "raft storage is already initialized")
		return
	}
	if err := s.challenge(r.Context(), asked.Leader); err != nil {
		fail(w, http.StatusInternalServerError, "failed to join raft cluster: "+err.Error())
		return
	}
	s.mu.Lock()
	s.config.Join = append([]string{asked.Leader}, s.config.Join...)
	s.mu.Unlock()
	respond(w, http.StatusOK, map[string]bool{"joined": true})
}
