// Package greptime stands in for GreptimeDB: it answers a login and a query
// over the MySQL protocol, and health and SQL over HTTP. It stores nothing.
// A well-kept server library would bring a SQL engine with it; the two
// packets needed here are written by hand.
package greptime

import (
	"bufio"
	"crypto/rand"
	"crypto/sha1"
	"crypto/subtle"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync/atomic"
	"time"
)

// Server is the running stand-in.
type Server struct {
	user     string
	password atomic.Pointer[string]
	mysql    net.Listener
	http     *http.Server
	// down makes every connection fail at once, as a database that is gone.
	down atomic.Bool
}

// Serve listens on both addresses. Logins must match user and password.
func Serve(mysqlAddress, httpAddress, user, password string) (*Server, error) {
	s := &Server{user: user}
	s.SetPassword(password)
	var err error
	if s.mysql, err = net.Listen("tcp", mysqlAddress); err != nil {
		return nil, fmt.Errorf("greptime: %w", err)
	}
	web, err := net.Listen("tcp", httpAddress)
	if err != nil {
		_ = s.mysql.Close()
		return nil, fmt.Errorf("greptime: %w", err)
	}
	mux := http.NewServeMux()
	mux.HandleFunc("/health", s.answer(map[string]any{}))
	mux.HandleFunc("/v1/sql", s.answer(map[string]any{
		"output": []any{map[string]any{"records": map[string]any{
			"schema": map[string]any{"column_schemas": []any{map[string]any{"name": "1", "data_type": "Int64"}}},
			"rows":   []any{[]any{1}},
		}}},
		"execution_time_ms": 1,
	}))
	mux.HandleFunc("/v1/", s.answer(map[string]any{}))
	s.http = &http.Server{Handler: mux, ReadHeaderTimeout: 10 * time.Second}
	go func() { _ = s.http.Serve(web) }()
	go s.accept()
	return s, nil
}

// SetDown turns the stand-in off and on.
func (s *Server) SetDown(down bool) { s.down.Store(down) }

// SetPassword rotates the password: logins with the former one fail.
func (s *Server) SetPassword(password string) { s.password.Store(&password) }

// Close ends both servers.
func (s *Server) Close() {
	_ = s.mysql.Close()
	_ = s.http.Close()
}

func (s *Server) answer(body map[string]any) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		if s.down.Load() {
			http.Error(w, "unavailable", http.StatusServiceUnavailable)
			return
		}
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(body)
	}
}

func (s *Server) accept() {
	for {
		conn, err := s.mysql.Accept()
		if err != nil {
			return
		}
		go func() {
			defer conn.Close()
			if s.down.Load() {
				return
			}
			c := &session{conn: conn, in: bufio.NewReader(conn)}
			_ = c.serve(s.user, *s.password.Load())
		}()
	}
}

// Capabilities and constants of the MySQL client/server protocol, version 10.
const (
	longPassword     = 1 << 0
	connectWithDB    = 1 << 3
	protocol41       = 1 << 9
	transactions     = 1 << 13
	secureConnection = 1 << 15
	pluginAuth       = 1 << 19
	capabilities     = longPassword | connectWithDB | protocol41 | transactions | secureConnection | pluginAuth

	utf8mb4      = 45
	statusAuto   = 2
	comQuit      = 1
	comInitDB    = 2
	comQuery     = 3
	comPing      = 14
	typeVarchar  = 253
	scrambleSize = 20
	nativeAuth   = "mysql_native_password"
	idleTimeout  = 10 * time.Minute
	maxPacket    = 1 << 20
)

type session struct {
	conn net.Conn
	in   *bufio.Reader
	seq  byte
}

func (c *session) serve(user, password string) error {
	scramble := make([]byte, scrambleSize)
	if _, err := rand.Read(scramble); err != nil {
		return err
	}
	for i := range scramble {
		// The scramble is sent as a C string: no zero byte.
		scramble[i] = scramble[i]%94 + 33
	}
	if err := c.write(greeting(scramble)); err != nil {
		return err
	}
	login, err := c.read()
	if err != nil {
		return err
	}
	name, proof, err := parseLogin(login)
	if err != nil {
		return err
	}
	if name != user || subtle.ConstantTimeCompare(proof, response(scramble, password)) != 1 {
		return c.write(failure(1045, "28000", fmt.Sprintf("Access denied for user '%s'", name)))
	}
	if err := c.write(success()); err != nil {
		return err
	}
	for {
		c.seq = 0
		packet, err := c.read()
		if err != nil {
			return err
		}
		if err := c.command(packet); err != nil {
			return err
		}
	}
}

var errQuit = errors.New("client quit")

func (c *session) command(packet []byte) error {
	if len(packet) == 0 {
		return c.write(failure(1047, "08S01", "empty command"))
	}
	switch packet[0] {
	case comQuit:
		return errQuit
	case comPing, comInitDB:
		return c.write(success())
	case comQuery:
		query := strings.ToLower(strings.TrimSpace(string(packet[1:])))
		if strings.HasPrefix(query, "select") || strings.HasPrefix(query, "show") {
			return c.row("1", "1")
		}
		return c.write(success())
	default:
		return c.write(failure(1047, "08S01", "unknown command"))
	}
}

// row sends a result of one column and one row.
func (c *session) row(column, value string) error {
	// Catalogue, schema, table, original table, column, original column.
	var definition []byte
	for _, s := range []string{"def", "", "", "", column, column} {
		definition = lenenc(definition, s)
	}
	definition = append(definition, 0x0c, utf8mb4, 0)
	definition = binary.LittleEndian.AppendUint32(definition, 255)
	definition = append(definition, typeVarchar, 0, 0, 0, 0, 0)
	eof := []byte{0xfe, 0, 0, statusAuto, 0}
	for _, p := range [][]byte{{1}, definition, eof, lenenc(nil, value), eof} {
		if err := c.write(p); err != nil {
			return err
		}
	}
	return nil
}

func (c *session) read() ([]byte, error) {
	if err := c.conn.SetReadDeadline(time.Now().Add(idleTimeout)); err != nil {
		return nil, err
	}
	var head [4]byte
	if _, err := io.ReadFull(c.in, head[:]); err != nil {
		return nil, err
	}
	n := int(head[0]) | int(head[1])<<8 | int(head[2])<<16
	if n > maxPacket {
		return nil, fmt.Errorf("packet of %d bytes: expected at most %d", n, maxPacket)
	}
	c.seq = head[3] + 1
	body := make([]byte, n)
	_, err := io.ReadFull(c.in, body)
	return body, err
}

func (c *session) write(body []byte) error {
	n := len(body)
	packet := append([]byte{byte(n), byte(n >> 8), byte(n >> 16), c.seq}, body...)
	c.seq++
	_, err := c.conn.Write(packet)
	return err
}

func greeting(scramble []byte) []byte {
	p := append([]byte{10}, "8.4.2-greptimedb\x00"...)
	p = binary.LittleEndian.AppendUint32(p, 1)
	p = append(append(p, scramble[:8]...), 0)
	p = append(p, byte(capabilities&0xff), byte(capabilities>>8&0xff), utf8mb4, statusAuto, 0)
	p = append(p, byte(capabilities>>16&0xff), byte(capabilities>>24&0xff), scrambleSize+1)
	p = append(p, make([]byte, 10)...)
	p = append(append(p, scramble[8:]...), 0)
	return append(append(p, nativeAuth...), 0)
}

func parseLogin(p []byte) (user string, proof []byte, err error) {
	// Capabilities, packet size, character set and 23 reserved bytes.
	const fixed = 32
	if len(p) < fixed {
		return "", nil, fmt.Errorf("login packet: expected at least %d bytes, found %d", fixed, len(p))
	}
	name, rest, ok := strings.Cut(string(p[fixed:]), "\x00")
	if !ok || rest == "" {
		return "", nil, errors.New("login packet: expected a user and a proof, found neither")
	}
	n := int(rest[0])
	if len(rest) < 1+n {
		return "", nil, fmt.Errorf("login packet: expected a proof of %d bytes, found %d", n, len(rest)-1)
	}
	return name, []byte(rest[1 : 1+n]), nil
}

// response is mysql_native_password's proof:
// SHA1(password) XOR SHA1(scramble + SHA1(SHA1(password))).
func response(scramble []byte, password string) []byte {
	if password == "" {
		return []byte{}
	}
	first := sha1.Sum([]byte(password))
	second := sha1.Sum(first[:])
	third := sha1.Sum(append(append([]byte{}, scramble...), second[:]...))
	out := make([]byte, len(first))
	for i := range out {
		out[i] = first[i] ^ third[i]
	}
	return out
}

func success() []byte { return []byte{0, 0, 0, statusAuto, 0, 0, 0} }

func failure(code uint16, state, message string) []byte {
	p := binary.LittleEndian.AppendUint16([]byte{0xff}, code)
	return append(append(append(p, '#'), state...), message...)
}

func lenenc(p []byte, s string) []byte { return append(append(p, byte(len(s))), s...) }
