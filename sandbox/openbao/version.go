package openbao

import (
	"fmt"
	"regexp"
	"strings"
)

// Version is that of a server, such as 2.6.3.
type Version string

var versionForm = regexp.MustCompile(`^2\.(5|6)\.\d+$`)

// ParseVersion takes a version or an image's tag that begins with one, such as
// 2.6.3-nv-1.3.7.
func ParseVersion(tag string) (Version, error) {
	core, _, _ := strings.Cut(strings.TrimPrefix(tag, "v"), "-")
	if !versionForm.MatchString(core) {
		return "", fmt.Errorf("version %q: expected 2.5.x or 2.6.x, the lines that were recorded", tag)
	}
	return Version(core), nil
}

// line is the part on which the form of the answers depends. Members of
// different lines do not take each other's requests.
func (v Version) line() string { return string(v)[:strings.LastIndex(string(v), ".")] }

func (v Version) old() bool { return v.line() == "2.5" }
