package main

import (
	"encoding/xml"
	"fmt"
	"strings"
)

// Sizes in pixels; a character's width is fixed by textLength, whichever font
// the viewer has.
const (
	charWidth  = 8.4
	lineHeight = 19
	fontSize   = 14
	margin     = 16
	bar        = 34
)

// palette is of a dark terminal; 0 is plain text.
var palette = map[int]string{
	0: "#d8dee9", 30: "#4c566a", 31: "#ff7b72", 32: "#7ee787", 33: "#f2cc60",
	34: "#79c0ff", 35: "#d2a8ff", 36: "#76e3ea", 37: "#ffffff",
}

// svg draws the lines in a window.
func svg(lines [][]cell, title string) string {
	columns := len([]rune(title)) + 20
	for _, l := range lines {
		columns = max(columns, len(l))
	}
	width := float64(columns)*charWidth + 2*margin
	height := len(lines)*lineHeight + bar + 2*margin
	var b strings.Builder
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %.0f %d" width="%.0f" height="%d" font-family="ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace" font-size="%d">`+"\n",
		width, height, width, height, fontSize)
	fmt.Fprintf(&b, `<rect width="100%%" height="100%%" rx="8" fill="#0d1117"/><path d="M0 %d h%.0f" stroke="#30363d"/>`+"\n", bar, width)
	for i, fill := range []string{"#ff5f56", "#ffbd2e", "#27c93f"} {
		fmt.Fprintf(&b, `<circle cx="%d" cy="%d" r="6" fill="%s"/>`, 20+i*20, bar/2, fill)
	}
	fmt.Fprintf(&b, "\n"+`<text x="50%%" y="%d" text-anchor="middle" fill="#8b949e">%s</text>`+"\n", bar/2+5, escaped(title))
	for i, l := range lines {
		line(&b, l, bar+margin+i*lineHeight+fontSize)
	}
	b.WriteString("</svg>\n")
	return b.String()
}

// line writes one line as runs of equal style; blanks are not drawn.
func line(b *strings.Builder, cells []cell, y int) {
	for at := 0; at < len(cells); {
		end := at + 1
		for end < len(cells) && cells[end].style == cells[at].style {
			end++
		}
		var text strings.Builder
		for _, c := range cells[at:end] {
			text.WriteRune(c.r)
		}
		start, drawn := at, strings.TrimRight(text.String(), " ")
		at = end
		for strings.HasPrefix(drawn, " ") {
			drawn, start = drawn[1:], start+1
		}
		if drawn == "" {
			continue
		}
		s := cells[start].style
		look := fmt.Sprintf(`fill="%s"`, palette[s.colour])
		if s.bold {
			look += ` font-weight="bold"`
		}
		if s.faint {
			look += ` opacity="0.6"`
		}
		n := len([]rune(drawn))
		fmt.Fprintf(b, `<text x="%.1f" y="%d" textLength="%.1f" lengthAdjust="spacingAndGlyphs" xml:space="preserve" %s>%s</text>`+"\n",
			margin+float64(start)*charWidth, y, float64(n)*charWidth, look, escaped(drawn))
	}
}

func escaped(s string) string {
	var b strings.Builder
	// A strings.Builder never fails.
	_ = xml.EscapeText(&b, []byte(s))
	return b.String()
}
