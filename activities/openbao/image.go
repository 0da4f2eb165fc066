package openbao

import (
	"regexp"
	"strings"
)

// tagCore is the version that an image's tag begins with; what follows is the
// build's own (2.6.3-nv-1.3.7).
var tagCore = regexp.MustCompile(`^v?(\d+\.\d+\.\d+)(?:$|[-+._])`)

// VersionOf is the version that a member of an image reports, taken from the
// image's tag; "" when the tag does not begin with one.
func VersionOf(image string) string {
	image, _, _ = strings.Cut(image, "@")
	name := image[strings.LastIndex(image, "/")+1:]
	_, tag, _ := strings.Cut(name, ":")
	if m := tagCore.FindStringSubmatch(tag); m != nil {
		return m[1]
	}
	return ""
}

// sameVersion compares what a member reports with a version. Build metadata is
// no part of it, a pre-release is.
func sameVersion(reported, want string) bool {
	reported, _, _ = strings.Cut(strings.TrimPrefix(reported, "v"), "+")
	return want != "" && reported == strings.TrimPrefix(want, "v")
}

// sameImage tells whether an image is the wanted one, wherever it is pulled
// from. A digest counts only where the plan names one.
func sameImage(image, want string) bool {
	if !strings.Contains(want, "@") {
		image, _, _ = strings.Cut(image, "@")
	}
	return want != "" && (image == want || strings.HasSuffix(image, "/"+want))
}
