package openbao

import (
	"fmt"
	"strconv"
	"strings"
	"unicode"
)

// block is one level of a configuration file in HCL: attributes, and blocks by
// their type in the order of the file. It knows as much of the language as the
// charts use.
type block struct {
	label  string
	values map[string]string
	blocks map[string][]*block
}

// parseHCL reads a whole file.
func parseHCL(text string) (*block, error) {
	p := &parser{line: 1, rest: text}
	b, err := p.body(false)
	if err != nil {
		return nil, fmt.Errorf("line %d: %w", p.line, err)
	}
	return b, nil
}

type parser struct {
	rest string
	line int
}

// space skips blanks and comments.
func (p *parser) space() {
	for p.rest != "" {
		switch {
		case p.rest[0] == '\n':
			p.line++
			p.rest = p.rest[1:]
		case unicode.IsSpace(rune(p.rest[0])) || p.rest[0] == ',':
			p.rest = p.rest[1:]
		case p.rest[0] == '#' || strings.HasPrefix(p.rest, "//"):
			_, after, _ := strings.Cut(p.rest, "\n")
			p.rest = "\n" + after
			if after == "" {
				p.rest = ""
			}
		default:
			return
		}
	}
}

func (p *parser) take(c byte) bool {
	p.space()
	if p.rest == "" || p.rest[0] != c {
		return false
	}
	p.rest = p.rest[1:]
	return true
}

// word is a name, a number or a boolean.
func (p *parser) word() string {
	p.space()
	end := strings.IndexFunc(p.rest, func(r rune) bool {
		return !unicode.IsLetter(r) && !unicode.IsDigit(r) && r != '_' && r != '-' && r != '.'
	})
	if end < 0 {
		end = len(p.rest)
	}
	w := p.rest[:end]
	p.rest = p.rest[end:]
	return w
}

// text is a quoted string; ok is false where none begins.
func (p *parser) text() (value string, ok bool, err error) {
	p.space()
	if p.rest == "" || p.rest[0] != '"' {
		return "", false, nil
	}
	quoted, err := strconv.QuotedPrefix(p.rest)
	if err != nil {
		return "", true, fmt.Errorf("expected a string that ends on its line, found %.20q", p.rest)
	}
	p.rest = p.rest[len(quoted):]
	value, err = strconv.Unquote(quoted)
	return value, true, err
}

func (p *parser) body(inner bool) (*block, error) {
	b := &block{values: map[string]string{}, blocks: map[string][]*block{}}
	for {
		if inner && p.take('}') {
			return b, nil
		}
		if p.space(); p.rest == "" {
			if inner {
				return nil, fmt.Errorf("expected } before the end of the file")
			}
			return b, nil
		}
		if err := p.entry(b); err != nil {
			return nil, err
		}
	}
}

func (p *parser) entry(b *block) error {
	name, quoted, err := p.text()
	if err != nil {
		return err
	}
	if !quoted {
		name = p.word()
	}
	if name == "" {
		return fmt.Errorf("expected a name, found %.20q", p.rest)
	}
	if p.take('=') {
		value, ok, err := p.text()
		if err != nil {
			return err
		}
		if !ok {
			if value = p.word(); value == "" {
				return fmt.Errorf("%s: expected a string, a number or a boolean, found %.20q", name, p.rest)
			}
		}
		b.values[name] = value
		return nil
	}
	label, _, err := p.text()
	if err != nil {
		return err
	}
	if !p.take('{') {
		return fmt.Errorf("%s: expected = or a block, found %.20q", name, p.rest)
	}
	inner, err := p.body(true)
	if err != nil {
		return err
	}
	inner.label = label
	b.blocks[name] = append(b.blocks[name], inner)
	return nil
}
