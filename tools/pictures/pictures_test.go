package main

import (
	"encoding/xml"
	"io"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func plain(lines [][]cell) []string {
	var out []string
	for _, l := range lines {
		var b strings.Builder
		for _, c := range l {
			b.WriteRune(c.r)
		}
		out = append(out, b.String())
	}
	return out
}

func TestARedrawnBlockIsShownOnce(t *testing.T) {
	lines, err := screen("\x1b[Jone\r\ntwo\r\nthree\r\n\x1b[3A\x1b[JOne\r\nTwo\r\n")
	require.NoError(t, err)
	assert.Equal(t, []string{"One", "Two"}, plain(lines))
}

func TestColoursEndAtTheirReset(t *testing.T) {
	lines, err := screen("\x1b[1m\x1b[32mdone\x1b[0m █ rest")
	require.NoError(t, err)
	require.Equal(t, []string{"done █ rest"}, plain(lines))
	assert.Equal(t, style{colour: 32, bold: true}, lines[0][3].style)
	assert.Equal(t, style{}, lines[0][4].style)
}

func TestAnUnknownSequenceIsAnError(t *testing.T) {
	for _, text := range []string{"\x1b[5;5H", "\x1b]0;title\a", "\x1b[48m", "\x1b[12"} {
		_, err := screen(text)
		assert.Error(t, err, "%q", text)
	}
}

func TestThePictureIsWellFormed(t *testing.T) {
	lines, err := screen("a < b & \x1b[36m'c'\x1b[0m\r\n\r\n  \"d\"")
	require.NoError(t, err)
	d := xml.NewDecoder(strings.NewReader(svg(lines, "refit <watch>")))
	texts := 0
	for {
		token, err := d.Token()
		if err == io.EOF {
			break
		}
		require.NoError(t, err)
		if e, ok := token.(xml.StartElement); ok && e.Name.Local == "text" {
			texts++
		}
	}
	assert.Equal(t, 4, texts, "the title and three runs of text")
}
