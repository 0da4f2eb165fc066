package openbao

import (
	"encoding/json"
	"net/http"
	"net/http/httputil"
	"slices"
	"strings"
)

// Paths of the API and of the cluster port.
const (
	bootstrapPath = "/v1/sys/storage/raft/bootstrap/"
	snapshotPath  = "/v1/sys/storage/raft/snapshot"
	secretsPath   = "/v1/cubbyhole/"
	echoPath      = "/echo"
)

// noForwarding is the header with which a client keeps its request where it
// sent it.
const noForwarding = "X-Vault-No-Request-Forwarding"

const bodyLimit = 1 << 20

// local is a route that every member answers itself, sealed or not.
type local struct {
	methods []string
	handle  http.HandlerFunc
}

// forActive is a route that the active member answers.
type forActive struct {
	methods []string
	handle  func(*member, http.ResponseWriter, *http.Request)
	// open lets a caller without a token in.
	open bool
}

var (
	reads  = []string{http.MethodGet}
	writes = []string{http.MethodPut, http.MethodPost}
)

func (s *Server) locals() map[string]local {
	return map[string]local{
		"/v1/sys/health":            {[]string{http.MethodGet, http.MethodHead}, s.health},
		"/v1/sys/seal-status":       {reads, s.sealStatus},
		"/v1/sys/init":              {append(reads, writes...), s.init},
		"/v1/sys/unseal":            {writes, s.unseal},
		"/v1/sys/leader":            {reads, s.leader},
		"/v1/sys/storage/raft/join": {writes, s.join},
	}
}

func (s *Server) actives() map[string]forActive {
	return map[string]forActive{
		"/v1/sys/step-down":                            {methods: writes, handle: s.stepDown},
		"/v1/sys/ha-status":                            {methods: reads, handle: s.haStatus},
		"/v1/sys/storage/raft/configuration":           {methods: reads, handle: s.raftConfiguration},
		"/v1/sys/storage/raft/autopilot/state":         {methods: reads, handle: s.autopilotState},
		"/v1/sys/storage/raft/autopilot/configuration": {methods: reads, handle: s.autopilotConfiguration},
		bootstrapPath + "challenge": {methods: writes, open: true, handle: func(_ *member, w http.ResponseWriter, r *http.Request) {
			s.bootstrapChallenge(w, r)
		}},
		bootstrapPath + "answer": {methods: writes, open: true, handle: func(_ *member, w http.ResponseWriter, r *http.Request) {
			s.bootstrapAnswer(w, r)
		}},
	}
}

// handler serves the API port.
func (s *Server) handler() http.Handler {
	locals := s.locals()
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		headers(w)
		if route, ok := locals[r.URL.Path]; ok {
			if !slices.Contains(route.methods, r.Method) {
				fail(w, http.StatusMethodNotAllowed)
				return
			}
			route.handle(w, r)
			return
		}
		_, m := s.status()
		switch {
		case m == nil:
			fail(w, http.StatusServiceUnavailable, "Vault is sealed")
		case r.URL.Path == "/v1/sys/seal":
			if m.permitted(r) {
				s.seal(w, r)
			} else {
				fail(w, http.StatusForbidden, "permission denied")
			}
		case r.URL.Path == snapshotPath:
			s.snapshot(m, w, r)
		case m.isActive():
			s.dispatch(m, w, r)
		default:
			m.bring(w, r)
		}
	})
}

// passedOn serves what other members pass on.
func (s *Server) passedOn() http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		headers(w)
		_, m := s.status()
		switch {
		case m == nil:
			fail(w, http.StatusServiceUnavailable, "Vault is sealed")
		case r.URL.Path == echoPath:
			m.listen(w, r)
		case !m.isActive():
			fail(w, http.StatusInternalServerError, "error during forwarding RPC request")
		default:
			s.dispatch(m, w, r)
		}
	})
}

// dispatch answers as the active member.
func (s *Server) dispatch(m *member, w http.ResponseWriter, r *http.Request) {
	route, ok := s.actives()[r.URL.Path]
	if strings.HasPrefix(r.URL.Path, secretsPath) {
		route, ok = forActive{methods: append(append([]string{}, reads...), append(writes, http.MethodDelete)...), handle: s.secrets}, true
	}
	switch {
	case !route.open && !m.permitted(r):
		fail(w, http.StatusForbidden, "permission denied")
	case !ok:
		fail(w, http.StatusNotFound, `no handler for route "`+strings.TrimPrefix(r.URL.Path, "/v1/")+`". route entry not found.`)
	case !slices.Contains(route.methods, r.Method):
		fail(w, http.StatusMethodNotAllowed, "1 error occurred:\n\t* unsupported operation\n\n")
	default:
		route.handle(m, w, r)
	}
}

// bring takes a standby's request to the active member, or sends the client
// there: when it asked for that, and when the active member is of another line.
func (m *member) bring(w http.ResponseWriter, r *http.Request) {
	l, ok := m.active()
	if !ok {
		fail(w, http.StatusInternalServerError, nobody)
		return
	}
	if r.Header.Get(noForwarding) != "" || l.Version.line() != m.version.line() {
		redirect(w, r, l)
		return
	}
	proxy := httputil.ReverseProxy{
		Transport: m.passOn,
		Rewrite:   func(p *httputil.ProxyRequest) { p.Out.URL.Scheme, p.Out.URL.Host = "http", hostOf(l.Cluster) },
		ModifyResponse: func(answer *http.Response) error {
			for name := range w.Header() {
				answer.Header.Del(name)
			}
			return nil
		},
		ErrorHandler: func(w http.ResponseWriter, _ *http.Request, _ error) {
			fail(w, http.StatusInternalServerError, "error during forwarding RPC request")
		},
	}
	proxy.ServeHTTP(w, r)
}

const nobody = "local node not active but active cluster node not found"

func redirect(w http.ResponseWriter, r *http.Request, l leader) {
	w.Header().Del("Content-Type")
	w.Header().Set("Location", strings.TrimSuffix(l.API, "/")+r.URL.RequestURI())
	w.WriteHeader(http.StatusTemporaryRedirect)
}

// permitted says whether the request has the root token, by what this member
// has of the state.
func (m *member) permitted(r *http.Request) bool {
	token := r.Header.Get("X-Vault-Token")
	if token == "" {
		token, _ = strings.CutPrefix(r.Header.Get("Authorization"), "Bearer ")
	}
	var known digest
	record := m.state.get(nameToken)
	return token != "" && record != nil && json.Unmarshal(record, &known) == nil && known.is([]byte(token))
}

func headers(w http.ResponseWriter) {
	w.Header().Set("Cache-Control", "no-store")
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Strict-Transport-Security", "max-age=31536000; includeSubDomains")
}

func respond(w http.ResponseWriter, code int, body any) {
	w.WriteHeader(code)
	// A client that went away needs no answer.
	_ = json.NewEncoder(w).Encode(body)
}

func fail(w http.ResponseWriter, code int, messages ...string) {
	respond(w, code, map[string][]string{"errors": append([]string{}, messages...)})
}

// logical wraps data as the real server does; extra fields stand beside it.
func logical(w http.ResponseWriter, data any, extra map[string]any) {
	body := map[string]any{
		"request_id": uuid(), "lease_id": "", "renewable": false, "lease_duration": 0, "data": data,
		"wrap_info": nil, "warnings": nil, "auth": nil,
	}
	for name, value := range extra {
		body[name] = value
	}
	respond(w, http.StatusOK, body)
}
