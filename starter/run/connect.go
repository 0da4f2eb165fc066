// Package run reaches refit runs through Temporal: connects, starts, finds,
// observes and answers them. It must print nothing and decide nothing about
// a run: workflows do.
package run

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"time"

	"go.temporal.io/api/serviceerror"
	"go.temporal.io/sdk/client"
	"go.temporal.io/sdk/contrib/envconfig"
	"go.temporal.io/sdk/log"

	"github.com/refit-run/refit/activities/codec"
)

// Connection is an open client with what it was made from.
type Connection struct {
	client.Client
	Address   string
	Namespace string
}

// Settings say which server is meant. Address and Namespace override the
// environment and the profile; Fallback, a plain server on this host, is used
// when nothing names a server.
type Settings struct {
	Address   string
	Namespace string
	Profile   string
	Fallback  string
}

// dialLimit is long enough for a TLS handshake over a slow line and short
// enough for a person to see that nobody answers.
const dialLimit = 5 * time.Second

// Connect dials the server named by flags, environment (TEMPORAL_ADDRESS,
// TEMPORAL_NAMESPACE, TEMPORAL_TLS_*) or profile file, in this order.
func Connect(ctx context.Context, s Settings) (*Connection, error) {
	profile, err := envconfig.LoadClientConfigProfile(envconfig.LoadClientConfigProfileOptions{ConfigFileProfile: s.Profile})
	if err != nil {
		return nil, fmt.Errorf("Temporal profile: %w", err)
	}
	for _, o := range []struct {
		into  *string
		value string
	}{{&profile.Address, s.Address}, {&profile.Namespace, s.Namespace}} {
		if o.value != "" {
			*o.into = o.value
		}
	}
	if profile.Address == "" && s.Fallback != "" {
		return ConnectPlain(ctx, s.Fallback, s.Namespace)
	}
	options, err := profile.ToClientOptions(envconfig.ToClientOptionsRequest{IncludeRemoteCodec: true})
	if err != nil {
		return nil, fmt.Errorf("Temporal profile: %w", err)
	}
	return dial(ctx, options)
}

// ConnectPlain dials a server on this host, without the TLS, keys and headers
// that the environment may hold for another one.
func ConnectPlain(ctx context.Context, address, namespace string) (*Connection, error) {
	return dial(ctx, client.Options{HostPort: address, Namespace: namespace})
}

func dial(ctx context.Context, options client.Options) (*Connection, error) {
	if options.HostPort == "" {
		options.HostPort = client.DefaultHostPort
	}
	if options.Namespace == "" {
		options.Namespace = client.DefaultNamespace
	}
	keys, err := codec.FromEnv(os.Getenv)
	if err != nil {
		return nil, err
	}
	keys.Apply(&options)
	options.Logger = log.NewStructuredLogger(slog.New(slog.DiscardHandler))
	limited, cancel := context.WithTimeout(ctx, dialLimit)
	defer cancel()
	c, err := client.DialContext(limited, options)
	if err != nil {
		return nil, fmt.Errorf("no Temporal server answers at %s: %w; start one with `refit up`, or set TEMPORAL_ADDRESS", options.HostPort, err)
	}
	return &Connection{Client: c, Address: options.HostPort, Namespace: options.Namespace}, nil
}

// Refused is a request that a run or the server turned down as locked or
// unsafe; nothing was changed.
type Refused struct{ Reason string }

// Error is the reason.
func (r *Refused) Error() string { return r.Reason }

// Unknown is a request for something that does not exist.
type Unknown struct{ Reason string }

// Error is the reason.
func (u *Unknown) Error() string { return u.Reason }

func notFound(err error) bool {
	var nf *serviceerror.NotFound
	return errors.As(err, &nf)
}
