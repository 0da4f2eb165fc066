// Package mask replaces secret values wherever they occur in text that leaves
// an activity: diffs, status, logs and errors (design, contract 8). It works
// by value, so it must be told every secret; it must not know where they are
// kept, nor print any.
package mask

import (
	"encoding/base64"
	"encoding/json"
	"errors"
	"net/url"
	"sort"
	"strings"
	"sync"

	"go.temporal.io/sdk/temporal"

	"github.com/refit-run/refit/activities/finding"
)

// Replacement stands where a secret value was.
const Replacement = "********"

// shortest is the length below which a value is too common to be replaced:
// masking every "yes" would make a diff unreadable and hide nothing.
const shortest = 4

// Masker replaces the values it knows. It may be used by several goroutines.
// The zero value and nil mask nothing.
type Masker struct {
	mu     sync.RWMutex
	values map[string]struct{}
	// replacer is built at the first use after a change.
	replacer *strings.Replacer
}

// New knows the given values, each also in the forms it may appear in.
func New(values ...string) *Masker {
	m := &Masker{}
	m.Add(values...)
	return m
}

// Add teaches the masker more values.
func (m *Masker) Add(values ...string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.values == nil {
		m.values = map[string]struct{}{}
	}
	for _, value := range values {
		for _, form := range forms(value) {
			m.values[form] = struct{}{}
		}
	}
	m.replacer = nil
}

// Merge adds all that another masker knows.
func (m *Masker) Merge(other *Masker) {
	if other == nil || other == m {
		return
	}
	other.mu.RLock()
	known := make([]string, 0, len(other.values))
	for value := range other.values {
		known = append(known, value)
	}
	other.mu.RUnlock()
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.values == nil {
		m.values = map[string]struct{}{}
	}
	for _, value := range known {
		m.values[value] = struct{}{}
	}
	m.replacer = nil
}

// forms are the spellings of one value: plain, without surrounding space, per
// line (a diff prefixes every line), as in JSON, in a URL and in base64.
func forms(value string) []string {
	plain := map[string]struct{}{}
	add := func(v string) {
		if len(v) >= shortest {
			plain[v] = struct{}{}
		}
	}
	add(value)
	add(strings.TrimSpace(value))
	if strings.Contains(value, "\n") {
		for _, line := range strings.Split(value, "\n") {
			// Short lines of a key or a file are structure, not secret.
			if line = strings.TrimSpace(line); len(line) >= 2*shortest && !strings.HasPrefix(line, "-----") {
				add(line)
			}
		}
	}
	all := make([]string, 0, 9*len(plain))
	for v := range plain {
		all = append(all, v, url.QueryEscape(v), url.PathEscape(v), url.User(v).String())
		if quoted, err := json.Marshal(v); err == nil {
			all = append(all, strings.Trim(string(quoted), `"`))
		}
		for _, e := range []*base64.Encoding{base64.StdEncoding, base64.RawStdEncoding, base64.URLEncoding, base64.RawURLEncoding} {
			all = append(all, e.EncodeToString([]byte(v)))
		}
	}
	return all
}

func (m *Masker) current() *strings.Replacer {
	m.mu.RLock()
	r := m.replacer
	m.mu.RUnlock()
	if r != nil {
		return r
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.replacer == nil {
		known := make([]string, 0, len(m.values))
		for value := range m.values {
			known = append(known, value)
		}
		// A secret that begins another one must not leave the other's rest.
		sort.Slice(known, func(i, j int) bool {
			if len(known[i]) != len(known[j]) {
				return len(known[i]) > len(known[j])
			}
			return known[i] < known[j]
		})
		pairs := make([]string, 0, 2*len(known))
		for _, value := range known {
			pairs = append(pairs, value, Replacement)
		}
		m.replacer = strings.NewReplacer(pairs...)
	}
	return m.replacer
}

// String returns the text with every known value replaced.
func (m *Masker) String(text string) string {
	if m == nil {
		return text
	}
	return m.current().Replace(text)
}

// Finding masks every text of a finding.
func (m *Masker) Finding(f finding.Finding) finding.Finding {
	f.Object, f.Expected, f.Found = m.String(f.Object), m.String(f.Expected), m.String(f.Found)
	f.Why, f.Next = m.String(f.Why), m.String(f.Next)
	return f
}

// Error returns an error whose text is masked. An application error keeps its
// type, retry decision and finding; details of another kind are dropped.
// Another error with a secret in its text keeps nothing but the text, because
// its causes would print the value.
func (m *Masker) Error(err error) error {
	if m == nil || err == nil {
		return err
	}
	app, ok := err.(*temporal.ApplicationError)
	if !ok {
		if masked := m.String(err.Error()); masked != err.Error() {
			return errors.New(masked)
		}
		return err
	}
	options := temporal.ApplicationErrorOptions{NonRetryable: app.NonRetryable(), Category: app.Category(), NextRetryDelay: app.NextRetryDelay()}
	if f, ok := finding.Details(app); ok {
		options.Details = []any{m.Finding(f)}
	}
	return temporal.NewApplicationErrorWithOptions(m.String(app.Message()), app.Type(), options)
}
