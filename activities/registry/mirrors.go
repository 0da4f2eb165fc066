// Package registry asks OCI registries and chart repositories for images and
// charts, through mirrors where the worker's configuration names them. It must
// not decide which version is wanted, nor change a cluster.
package registry

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"regexp"
	"strings"

	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/remote/transport"

	"github.com/refit-run/refit/activities/finding"
)

// Mirrors maps a registry's host to where it is really asked. The zero value
// asks every registry itself.
type Mirrors struct {
	endpoints map[string]*url.URL
}

// ParseMirrors reads "registry.example=http://127.0.0.1:5000,other=https://h/prefix".
func ParseMirrors(spec string) (Mirrors, error) {
	m := Mirrors{endpoints: map[string]*url.URL{}}
	for _, item := range strings.Split(spec, ",") {
		item = strings.TrimSpace(item)
		if item == "" {
			continue
		}
		host, address, ok := strings.Cut(item, "=")
		endpoint, err := url.Parse(address)
		if !ok || host == "" || err != nil || endpoint.Host == "" || (endpoint.Scheme != "http" && endpoint.Scheme != "https") {
			return Mirrors{}, fmt.Errorf("registry mirror %q: expected HOST=http(s)://MIRROR[/PREFIX]", item)
		}
		m.endpoints[canonicalHost(host)] = endpoint
	}
	return m, nil
}

// canonicalHost: references to the default registry leave its host out or
// shorten it.
func canonicalHost(host string) string {
	if host == "docker.io" {
		return name.DefaultRegistry
	}
	return host
}

// reference parses an image reference and redirects it to its mirror.
func (m Mirrors) reference(image string) (name.Reference, error) {
	ref, err := name.ParseReference(image)
	if err != nil {
		return nil, err
	}
	endpoint, ok := m.endpoints[ref.Context().RegistryStr()]
	if !ok {
		return ref, nil
	}
	var options []name.Option
	if endpoint.Scheme == "http" {
		options = append(options, name.Insecure)
	}
	repository := strings.Trim(endpoint.Path+"/"+ref.Context().RepositoryStr(), "/")
	separator := ":"
	if _, ok := ref.(name.Digest); ok {
		separator = "@"
	}
	return name.ParseReference(endpoint.Host+"/"+repository+separator+ref.Identifier(), options...)
}

// HasImage returns the digest under which a registry serves an image now; an
// image that isn't there is a finding of class stop.
func (m Mirrors) HasImage(ctx context.Context, image string) (digest string, err error) {
	ref, err := m.reference(image)
	if err != nil {
		return "", finding.Finding{Object: fmt.Sprintf("image %q", image), Expected: "a valid reference", Found: err.Error(),
			Next: "correct the image in the plan or its values"}.Error(finding.Stop)
	}
	head, err := remote.Head(ref, m.options(ctx)...)
	if err != nil {
		return "", wrap(err, "image "+image, ref.String())
	}
	return head.Digest.String(), nil
}

func (m Mirrors) options(ctx context.Context) []remote.Option {
	return []remote.Option{remote.WithContext(ctx), remote.WithAuthFromKeychain(authn.DefaultKeychain), remote.WithUserAgent("refit-worker")}
}

// wrap classes an error of a registry: what it refuses or lacks needs a
// person, the way to it may heal.
func wrap(err error, object, asked string) error {
	if errors.Is(err, context.Canceled) {
		return err
	}
	f := finding.Finding{Object: object, Found: err.Error()}
	var answer *transport.Error
	if errors.As(err, &answer) && answer.StatusCode < http.StatusInternalServerError && answer.StatusCode != http.StatusTooManyRequests {
		f.Expected = "to be served by " + asked
		f.Next = "check the reference, push the image or give the worker credentials (or a mirror in REFIT_REGISTRY_MIRRORS)"
		return f.Error(finding.Stop)
	}
	return f.Error(finding.Retry)
}

var (
	// A tag part that registries move by convention.
	movingWord = regexp.MustCompile(`(?i)(^|[-_.])(latest|main|master|dev|devel|develop|nightly|edge|stable|head|rolling|canary|snapshot|lts)($|[-_.])`)
	majorOnly  = regexp.MustCompile(`^[vV]?\d{1,4}$`)
)

// Floating reports whether a tag may mean another image tomorrow: no tag, a
// tag with a moving word, a bare major version. Major.minor is not counted:
// for many projects that is the full version.
func Floating(tag string) bool {
	return tag == "" || movingWord.MatchString(tag) || majorOnly.MatchString(tag)
}

// Tag is the tag of an image reference; pinned is true when it carries a
// digest, which no tag can move.
func Tag(image string) (tag string, pinned bool) {
	image, _, pinned = strings.Cut(image, "@")
	if at := strings.LastIndex(image, ":"); at > strings.LastIndex(image, "/") {
		tag = image[at+1:]
	}
	return tag, pinned
}
