package nats

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"time"
)

const (
	// pageSize is how many accounts one answer holds: the server's own default.
	pageSize = 1024
	// maxPage bounds what is read of one answer.
	maxPage = 256 << 20
	// maxRaw bounds what is kept of a page that is not as it should be.
	maxRaw = 64 << 10
)

// errShape marks an answer that came whole and is not what it should be.
var errShape = errors.New("the answer has another shape than expected")

// monitor asks one server by its monitoring port, one page after the other.
type monitor struct {
	client *http.Client
	page   []byte // the last one
}

func newMonitor(dial func(ctx context.Context) (net.Conn, error)) *monitor {
	return &monitor{client: &http.Client{Transport: &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			ctx, cancel := context.WithTimeout(ctx, dialLimit)
			defer cancel()
			return dial(ctx)
		},
		MaxIdleConns: 1,
	}}}
}

func (m *monitor) close() { m.client.CloseIdleConnections() }

// ask reads everything about one server. The page size is a parameter so that
// a test can make many pages out of few accounts.
func (m *monitor) ask(ctx context.Context, page int) Answer {
	var a Answer
	var vars struct {
		Server  string `json:"server_name"`
		Version string `json:"version"`
	}
	err := m.get(ctx, "/varz", &vars)
	if err == nil && vars.Server == "" {
		err = fmt.Errorf("%w: /varz has no server_name", errShape)
	}
	if err == nil {
		a.Server, a.Version = vars.Server, vars.Version
		a.Unhealthy, err = m.health(ctx)
	}
	if err == nil {
		err = m.streams(ctx, page, &a)
	}
	if err != nil {
		a = Answer{Trouble: err.Error(), Malformed: errors.Is(err, errShape)}
		if a.Malformed {
			a.Raw = strings.ToValidUTF8(string(m.page[:min(len(m.page), maxRaw)]), "?")
		}
	}
	m.page = nil
	return a
}

// health asks the full /healthz: with js-server-only, as the chart's probes
// ask, it says nothing about streams that are still recovered.
func (m *monitor) health(ctx context.Context) (string, error) {
	status, body, err := m.fetch(ctx, "/healthz")
	if err != nil {
		return "", err
	}
	if status == http.StatusOK {
		return "", nil
	}
	var said struct {
		Status, Error string
	}
	if json.Unmarshal(body, &said) != nil || said.Error == "" {
		return fmt.Sprintf("/healthz answers %d", status), nil
	}
	return fmt.Sprintf("/healthz answers %d: %s", status, said.Error), nil
}

// streams reads all pages of /jsz. The server's own count of its streams
// proves that none was lost between two pages.
func (m *monitor) streams(ctx context.Context, page int, a *Answer) error {
	for offset := 0; ; offset += page {
		var p jsz
		path := fmt.Sprintf("/jsz?accounts=true&streams=true&consumers=true&config=true&limit=%d&offset=%d", page, offset)
		if err := m.get(ctx, path, &p); err != nil {
			return err
		}
		if p.Disabled {
			return errors.New("JetStream is not enabled, or not yet")
		}
		a.Meta = p.Meta
		var accounts []jszAccounts
		switch {
		case p.Accounts != nil:
			accounts = *p.Accounts
		case offset == 0 && p.Streams > 0:
			return fmt.Errorf("%w: /jsz counts %d streams and has no account_details", errShape, p.Streams)
		}
		for _, account := range accounts {
			for _, s := range account.Streams {
				h, err := hosted(account, s)
				if err != nil {
					return err
				}
				a.Streams = append(a.Streams, h)
			}
		}
		if len(accounts) < page {
			if len(a.Streams) != p.Streams {
				return fmt.Errorf("/jsz counts %d streams and lists %d: they changed while they were read", p.Streams, len(a.Streams))
			}
			return nil
		}
	}
}

// hosted checks the shape that the guide checks (N126).
func hosted(account jszAccounts, s jszStream) (Hosted, error) {
	h := Hosted{
		Account: account.Name, AccountID: account.ID, Name: s.Name, Created: s.Created, Config: s.Config, Group: s.Group,
		State: State{FirstSeq: s.State.FirstSeq, LastSeq: s.State.LastSeq, FirstTime: s.State.FirstTime}, Consumers: s.Consumers,
	}
	what := "stream " + account.Name + "/" + s.Name
	if s.State.Messages == nil {
		return h, fmt.Errorf("%w: %s has no number state.messages", errShape, what)
	}
	h.State.Messages = *s.State.Messages
	if err := h.read(); err != nil {
		return h, fmt.Errorf("%w: %s: %w", errShape, what, err)
	}
	return h, nil
}

// read takes the settings out of the configuration.
func (h *Hosted) read() error {
	if len(h.Config) == 0 {
		return errors.New("it has no config")
	}
	if err := json.Unmarshal(h.Config, &h.config); err != nil {
		return err
	}
	if h.config.Storage == "" {
		return errors.New("it has no text config.storage")
	}
	if h.config.Replicas == 0 {
		h.config.Replicas = 1
	}
	return nil
}

func (m *monitor) get(ctx context.Context, path string, into any) error {
	status, body, err := m.fetch(ctx, path)
	if err != nil {
		return err
	}
	if status != http.StatusOK {
		return fmt.Errorf("%s answers %d", path, status)
	}
	if err := json.Unmarshal(body, into); err != nil {
		return fmt.Errorf("%w: %s: %w", errShape, path, err)
	}
	return nil
}

func (m *monitor) fetch(ctx context.Context, path string) (int, []byte, error) {
	ctx, cancel := context.WithTimeout(ctx, readLimit)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://monitor"+path, nil)
	if err != nil {
		return 0, nil, err
	}
	began := time.Now()
	reply, err := m.client.Do(req)
	if err != nil {
		return 0, nil, fmt.Errorf("%s: no answer after %s: %w", path, time.Since(began).Round(time.Millisecond), errors.Unwrap(err))
	}
	defer reply.Body.Close()
	body, err := io.ReadAll(io.LimitReader(reply.Body, maxPage))
	if err != nil {
		return 0, nil, fmt.Errorf("%s: the answer broke off: %w", path, err)
	}
	m.page = body
	return reply.StatusCode, body, nil
}
