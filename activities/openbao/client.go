package openbao

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"

	"github.com/openbao/openbao/api/v2"
)

// errDenied marks the answer of a server that does not take the token.
var errDenied = errors.New("permission denied")

// server is the API of one member, reached by its pod. Nothing it is asked
// ever reaches another member: requests are not forwarded, redirects are not
// followed, and nothing is sent twice.
type server struct {
	// open asks what needs no token, signed what does.
	open, signed *api.Client
	transport    *http.Transport
}

func newServer(pod, token string, dial func(ctx context.Context) (net.Conn, error)) (*server, error) {
	s := &server{transport: &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			ctx, cancel := context.WithTimeout(ctx, dialLimit)
			defer cancel()
			return dial(ctx)
		},
		MaxIdleConns: 1,
	}}
	var err error
	if s.open, err = newClient(pod, s.transport); err == nil {
		s.signed, err = newClient(pod, s.transport)
	}
	if err != nil {
		return nil, err
	}
	s.signed.SetToken(token)
	return s, nil
}

// newClient must not be replaced by a clone of another client: a clone follows
// redirects again, and reads the worker's variables.
func newClient(pod string, transport *http.Transport) (*api.Client, error) {
	config := api.NewConfig() // unlike DefaultConfig it reads no variables
	if config.Error != nil {
		return nil, config.Error
	}
	config.Address = "http://" + pod
	config.HttpClient.Transport = transport
	config.DisableRedirects, config.MaxRetries, config.Timeout = true, 0, dialLimit+callLimit
	client, err := api.NewClient(config)
	if err != nil {
		return nil, err
	}
	client.AddHeader(api.NoRequestForwardingHeaderName, "true")
	return client, nil
}

func (s *server) close() { s.transport.CloseIdleConnections() }

// status asks what needs no token. A sealed server does not answer for its
// leader, so that is not asked.
func (s *server) status(ctx context.Context) Status {
	var out Status
	seal, err := s.open.Sys().SealStatusWithContext(ctx)
	if err != nil {
		return Status{Trouble: inShort(err)}
	}
	out.Initialized, out.Sealed, out.Version = seal.Initialized, seal.Sealed, seal.Version
	out.Storage, out.ClusterID = seal.StorageType, seal.ClusterID
	if !out.serving() {
		return out
	}
	leader, err := s.open.Sys().LeaderWithContext(ctx)
	if err != nil {
		return Status{Trouble: inShort(err)}
	}
	out.Active, out.Leader = leader.IsSelf, leader.LeaderAddress
	out.Committed, out.Applied = leader.RaftCommittedIndex, leader.RaftAppliedIndex
	return out
}

// peers is Raft's configuration as this member has it.
func (s *server) peers(ctx context.Context) ([]Peer, error) {
	ctx, cancel := context.WithTimeout(ctx, callLimit)
	defer cancel()
	reply, err := s.signed.Logical().ReadRawWithContext(ctx, "sys/storage/raft/configuration")
	if err != nil {
		return nil, plainly(err)
	}
	defer reply.Body.Close()
	var body struct {
		Data struct {
			Config struct {
				Servers []struct {
					ID      string `json:"node_id"`
					Address string `json:"address"`
					Voter   bool   `json:"voter"`
				} `json:"servers"`
			} `json:"config"`
		} `json:"data"`
	}
	if reply.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("the list of peers is answered with %d", reply.StatusCode)
	}
	if err := json.NewDecoder(reply.Body).Decode(&body); err != nil {
		return nil, fmt.Errorf("the list of peers: %w", err)
	}
	var out []Peer
	for _, p := range body.Data.Config.Servers {
		out = append(out, Peer{ID: p.ID, Address: p.Address, Voter: p.Voter})
	}
	if len(out) == 0 {
		return nil, errors.New("the list of peers is empty")
	}
	return out, nil
}

// stepDown asks this member, and no other, to give leadership up. A nil error
// proves nothing: a standby answers with a redirect, which is none.
func (s *server) stepDown(ctx context.Context) error {
	return plainly(s.signed.Sys().StepDownWithContext(ctx))
}

// snapshot streams the archive as the member sends it.
func (s *server) snapshot(ctx context.Context, w io.Writer) error {
	return plainly(s.signed.Sys().RaftSnapshotWithContext(ctx, w))
}

// plainly marks what a person must mend.
func plainly(err error) error {
	var refused *api.ResponseError
	if errors.As(err, &refused) && refused.StatusCode == http.StatusForbidden {
		return fmt.Errorf("%w: %s", errDenied, inShort(err))
	}
	return err
}

// inShort is an error of the client in one line: its own text spans several,
// and names an address that is nobody's.
func inShort(err error) string {
	var refused *api.ResponseError
	if errors.As(err, &refused) {
		return fmt.Sprintf("answered with %d: %s", refused.StatusCode, inLine(strings.Join(refused.Errors, "; ")))
	}
	var wire *url.Error
	if errors.As(err, &wire) {
		err = wire.Err
	}
	return inLine(err.Error())
}

func inLine(text string) string { return strings.Join(strings.Fields(text), " ") }
