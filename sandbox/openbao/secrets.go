package openbao

import (
	"encoding/json"
	"net/http"
)

// secrets is the cubbyhole of the root token: what a client can write without
// setting anything up.
func (s *Server) secrets(m *member, w http.ResponseWriter, r *http.Request) {
	name := "data/" + r.URL.Path[len(secretsPath):]
	switch r.Method {
	case http.MethodGet:
		value := m.state.get(name)
		if value == nil {
			fail(w, http.StatusNotFound)
			return
		}
		logical(w, json.RawMessage(value), nil)
		return
	case http.MethodDelete:
		m.answerPut(w, m.put(name, nil))
		return
	}
	var fields map[string]any
	if !decode(w, r, &fields) {
		return
	}
	value, err := json.Marshal(fields)
	if err == nil {
		err = m.put(name, value)
	}
	m.answerPut(w, err)
}

func (m *member) answerPut(w http.ResponseWriter, err error) {
	if err != nil {
		fail(w, http.StatusInternalServerError, err.Error())
		return
	}
	w.WriteHeader(http.StatusNoContent)
}

// stepDown is answered before anything happens.
func (s *Server) stepDown(m *member, w http.ResponseWriter, _ *http.Request) {
	switch s.faults().StepDown {
	case StepDownIgnored:
	case StepDownLost:
		m.ask()
		panic(http.ErrAbortHandler)
	default:
		m.ask()
	}
	w.WriteHeader(http.StatusNoContent)
}
