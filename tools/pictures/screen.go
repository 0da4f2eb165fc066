package main

import (
	"fmt"
	"strconv"
	"strings"
)

// style is how a cell looks: a colour number of SGR (30..37, 0 for none).
type style struct {
	colour      int
	bold, faint bool
}

type cell struct {
	r rune
	style
}

// screen plays the terminal's text and returns its lines as they stood at the
// end. It knows what `refit` writes: colours, cursor up, erase below. Anything
// else is an error, so that a picture is never wrong in silence.
func screen(text string) ([][]cell, error) {
	var lines [][]cell
	var now style
	row, col := 0, 0
	for i := 0; i < len(text); {
		switch c := text[i]; {
		case c == '\x1b':
			seq, n, err := sequence(text[i:])
			if err != nil {
				return nil, err
			}
			i += n
			switch args := seq[:len(seq)-1]; seq[len(seq)-1] {
			case 'm':
				if now, err = now.apply(args); err != nil {
					return nil, err
				}
			case 'A':
				n, err := strconv.Atoi(args)
				if err != nil {
					return nil, fmt.Errorf("cursor up by %q: want a number", args)
				}
				row = max(0, row-n)
			case 'J':
				if row < len(lines) {
					lines[row] = lines[row][:min(col, len(lines[row]))]
					lines = lines[:row+1]
				}
			default:
				return nil, fmt.Errorf("terminal sequence ESC[%s is not known here: teach it to tools/pictures", seq)
			}
		case c == '\r':
			col = 0
			i++
		case c == '\n':
			row++
			i++
		default:
			r := []rune(text[i:min(len(text), i+4)])[0]
			i += len(string(r))
			for len(lines) <= row {
				lines = append(lines, nil)
			}
			for len(lines[row]) <= col {
				lines[row] = append(lines[row], cell{r: ' '})
			}
			lines[row][col] = cell{r, now}
			col++
		}
	}
	for len(lines) > 0 && len(lines[len(lines)-1]) == 0 {
		lines = lines[:len(lines)-1]
	}
	return lines, nil
}

// sequence cuts ESC [ digits letter off the front: its text after the bracket
// and its whole length.
func sequence(text string) (string, int, error) {
	if !strings.HasPrefix(text, "\x1b[") {
		return "", 0, fmt.Errorf("terminal sequence %q is not known here: teach it to tools/pictures", text[:min(len(text), 6)])
	}
	end := strings.IndexFunc(text[2:], func(r rune) bool { return r >= '@' && r <= '~' })
	if end < 0 {
		return "", 0, fmt.Errorf("the terminal's text ends inside %q", text)
	}
	return text[2 : 3+end], 3 + end, nil
}

func (s style) apply(args string) (style, error) {
	for arg := range strings.SplitSeq(args, ";") {
		n, err := strconv.Atoi(arg)
		switch {
		case arg == "" || n == 0 && err == nil:
			s = style{}
		case n == 1:
			s.bold = true
		case n == 2:
			s.faint = true
		case n >= 30 && n <= 37:
			s.colour = n
		default:
			return s, fmt.Errorf("colour %q is not known here: teach it to tools/pictures", arg)
		}
	}
	return s, nil
}
