// Package registry serves an OCI registry in this process: the sandbox's
// charts and stand-ins for the images that they name. Faults make an image
// missing or slow. It must not know what is in a chart.
package registry

import (
	"context"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	helmregistry "helm.sh/helm/v3/pkg/registry"
)

// Host is the registry's name inside the sandbox's charts; clients reach it
// through a mirror entry.
const Host = "registry.refit.local"

// Charts is the repository under which charts are pushed.
const Charts = Host + "/charts"

// Registry is the running server.
type Registry struct {
	address string
	store   http.Handler
	server  *http.Server

	mu      sync.Mutex
	missing map[string]bool
	delay   time.Duration
}

// Serve starts the registry on an open listener.
func Serve(l net.Listener) *Registry {
	r := &Registry{
		address: l.Addr().String(), missing: map[string]bool{},
		store: registry.New(registry.Logger(log.New(io.Discard, "", 0))),
	}
	r.server = &http.Server{Handler: r, ReadHeaderTimeout: 10 * time.Second}
	go func() { _ = r.server.Serve(l) }()
	return r
}

// Close ends the server.
func (r *Registry) Close() { _ = r.server.Close() }

// Address is the host:port where the registry listens.
func (r *Registry) Address() string { return r.address }

// Mirror is the worker's mirror entry for a registry at the address.
func Mirror(address string) string { return Host + "=http://" + address }

// ServeHTTP applies the faults to manifests and passes on everything else.
func (r *Registry) ServeHTTP(w http.ResponseWriter, req *http.Request) {
	repository, reference, ok := manifestOf(req.URL.Path)
	if ok && req.Method != http.MethodPut {
		r.mu.Lock()
		gone, delay := r.missing[repository+":"+reference], r.delay
		r.mu.Unlock()
		if delay > 0 {
			timer := time.NewTimer(delay)
			defer timer.Stop()
			select {
			case <-timer.C:
			case <-req.Context().Done():
				return
			}
		}
		if gone {
			w.Header().Set("Content-Type", "application/json")
			w.WriteHeader(http.StatusNotFound)
			_, _ = io.WriteString(w, `{"errors":[{"code":"MANIFEST_UNKNOWN","message":"Unknown manifest"}]}`)
			return
		}
	}
	r.store.ServeHTTP(w, req)
}

func manifestOf(path string) (repository, reference string, ok bool) {
	rest, found := strings.CutPrefix(path, "/v2/")
	if !found {
		return "", "", false
	}
	return strings.Cut(rest, "/manifests/")
}

// SetMissing makes the image as if it were never pushed, or brings it back.
func (r *Registry) SetMissing(image string, missing bool) error {
	ref, err := name.ParseReference(image)
	if err != nil {
		return fmt.Errorf("image %q: %w", image, err)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	key := ref.Context().RepositoryStr() + ":" + ref.Identifier()
	if missing {
		r.missing[key] = true
	} else {
		delete(r.missing, key)
	}
	return nil
}

// SetDelay makes every manifest request take that long.
func (r *Registry) SetDelay(d time.Duration) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.delay = d
}

// Heal takes every fault back.
func (r *Registry) Heal() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.delay = 0
	clear(r.missing)
}

// PushChart stores a packaged chart as Helm's OCI artifact.
func (r *Registry) PushChart(archive []byte, chart, version string) error {
	client, err := helmregistry.NewClient(helmregistry.ClientOptPlainHTTP(), helmregistry.ClientOptWriter(io.Discard))
	if err != nil {
		return fmt.Errorf("chart %s %s: %w", chart, version, err)
	}
	ref := fmt.Sprintf("%s/charts/%s:%s", r.address, chart, version)
	if _, err := client.Push(archive, ref, helmregistry.PushOptStrictMode(true)); err != nil {
		return fmt.Errorf("chart %s: push: %w", ref, err)
	}
	return nil
}

// PushImage stores an empty image that differs from every other by its label,
// so that each reference has a digest of its own. Images of other registries
// are stored too, under their path.
func (r *Registry) PushImage(ctx context.Context, image string) error {
	ref, err := name.ParseReference(image)
	if err != nil {
		return fmt.Errorf("image %q: %w", image, err)
	}
	if _, pinned := ref.(name.Digest); pinned {
		return fmt.Errorf("image %s: expected a tag, found a digest", image)
	}
	here, err := name.ParseReference(fmt.Sprintf("%s/%s:%s", r.address, ref.Context().RepositoryStr(), ref.Identifier()), name.Insecure)
	if err != nil {
		return fmt.Errorf("image %q: %w", image, err)
	}
	content, err := mutate.Config(empty.Image, v1.Config{Labels: map[string]string{"org.opencontainers.image.ref.name": image}})
	if err != nil {
		return fmt.Errorf("image %s: %w", image, err)
	}
	if err := remote.Write(here, content, remote.WithContext(ctx)); err != nil {
		return fmt.Errorf("image %s: push: %w", image, err)
	}
	return nil
}
