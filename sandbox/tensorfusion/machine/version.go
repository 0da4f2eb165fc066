// Package machine is the rolling-update machine of the TensorFusion controller
// as pure functions: an observation and a time go in, the writes that the
// controller would make and its next wake-up come out. Rule numbers in
// comments are those of the rolling update specification that its tests are
// named after. It must not know an API server, start a goroutine or read a
// clock.
package machine

import (
	"fmt"
	"regexp"
	"strconv"
)

// Version is a controller release of the 2.x line.
type Version struct{ Major, Minor, Patch int }

// Newest is assumed for a tag that names no version, such as latest.
var Newest = Version{2, 17, 1}

var versionTag = regexp.MustCompile(`^v?(\d+)\.(\d+)(?:\.(\d+))?(?:[-+].*)?$`)

// ParseVersion reads an image tag. A tag that names no version is an error, as
// is the 1.x line, which this machine does not play.
func ParseVersion(tag string) (Version, error) {
	m := versionTag.FindStringSubmatch(tag)
	if m == nil {
		return Version{}, fmt.Errorf("controller tag %q names no version", tag)
	}
	var v Version
	for i, field := range []*int{&v.Major, &v.Minor, &v.Patch} {
		if m[i+1] == "" {
			continue
		}
		n, err := strconv.Atoi(m[i+1])
		if err != nil {
			return Version{}, fmt.Errorf("controller tag %q: %w", tag, err)
		}
		*field = n
	}
	if v.Major != 2 {
		return Version{}, fmt.Errorf("controller tag %q: only the 2.x line is played", tag)
	}
	return v, nil
}

func (v Version) String() string { return fmt.Sprintf("%d.%d.%d", v.Major, v.Minor, v.Patch) }

func (v Version) atLeast(minor, patch int) bool {
	return v.Minor > minor || v.Minor == minor && v.Patch >= patch
}

// toleratesMissingPolicy: 2.0-2.9 dereference the missing policy block.
func (v Version) toleratesMissingPolicy() bool { return v.atLeast(10, 0) }

// remembersProvider: the last ProviderConfig is kept in an annotation, so that
// a controller start is no change.
func (v Version) remembersProvider() bool { return v.atLeast(11, 2) }

// gatesNotReadyNodes: nothing is created on a Node that is not Ready.
func (v Version) gatesNotReadyNodes() bool { return v.atLeast(12, 1) }

// batchesProvider: a ProviderConfig revision is part of the hashes and goes
// through the pool's batches.
func (v Version) batchesProvider() bool { return v.atLeast(14, 0) }

// poolIsolation: the isolation mode comes from the pool and is hashed.
func (v Version) poolIsolation() bool { return v.atLeast(15, 0) }

// resumesPending: switching auto update on starts a change recorded before.
func (v Version) resumesPending() bool { return v.atLeast(15, 0) }

// hasIsolationPolicy: hypervisors carry --isolation-policy.
func (v Version) hasIsolationPolicy() bool { return v.atLeast(17, 0) }

// composition stands for the code defaults that are hashed with every spec
// (rule 4). They are alike from 2.16 on, which is why 2.16 to 2.17 keeps H.
func (v Version) composition() string {
	if v.atLeast(16, 0) {
		return "2.16"
	}
	return fmt.Sprintf("2.%d", v.Minor)
}
