package tensorfusion

import (
	"regexp"
	"strings"

	"github.com/Masterminds/semver/v3"
)

// tagOf is the tag of an image reference, "" when it has none.
func tagOf(image string) string {
	ref, _, _ := strings.Cut(image, "@")
	if i := strings.LastIndex(ref, ":"); i > strings.LastIndex(ref, "/") {
		return ref[i+1:]
	}
	return ""
}

// versionCore is the leading x.y.z of a tag: real tags carry suffixes.
var versionCore = regexp.MustCompile(`^v?(\d+\.\d+\.\d+)`)

// imageVersion reads the version out of an image's tag; nil when the tag says
// nothing (`latest`, a digest only).
func imageVersion(image string) *semver.Version {
	m := versionCore.FindStringSubmatch(tagOf(image))
	if m == nil {
		return nil
	}
	v, err := semver.NewVersion(m[1])
	if err != nil {
		return nil
	}
	return v
}

// atLeast compares; an unknown version is treated as the worst one, so it is
// at least nothing.
func atLeast(v *semver.Version, want string) bool {
	return v != nil && !v.LessThan(semver.MustParse(want))
}

func below(v *semver.Version, want string) bool { return v != nil && !atLeast(v, want) }

func versionString(v *semver.Version) string {
	if v == nil {
		return ""
	}
	return v.String()
}

// Names that the controllers give to hypervisor pods, by line.
const (
	podPrefix    = "hypervisor-"
	podPrefixOld = "tf-hypervisor-"
)

// podPrefixFor is the prefix of hypervisor pod names under a controller:
// tf-hypervisor- from 2.0 to 2.13, hypervisor- before and after.
func podPrefixFor(controller *semver.Version) string {
	if atLeast(controller, "2.0.0") && below(controller, "2.14.0") {
		return podPrefixOld
	}
	return podPrefix
}

// needsNudge says whether the pair of controllers has the trap of 2.17: pods
// made before it lack --isolation-policy and, with synced=true, are deleted at
// once even under auto=false (facts, section 5).
func needsNudge(from, to *semver.Version) bool {
	return !atLeast(from, "2.17.0") && (to == nil || atLeast(to, "2.17.0"))
}
