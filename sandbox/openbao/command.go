package openbao

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"strings"

	"github.com/refit-run/refit/sandbox/procnode/names"
	"github.com/refit-run/refit/sandbox/procnode/pod"
)

// Codes with which bao ends.
const (
	codeError  = 1
	codeSealed = 2
)

// ExitError is an end with a code.
type ExitError struct {
	Code int
	Err  error
}

func (e *ExitError) Error() string { return e.Err.Error() }
func (e *ExitError) Unwrap() error { return e.Err }

const usage = `expected server -config=FILE, status, version, operator init, operator unseal [KEY], operator step-down
or operator raft snapshot save FILE: this double knows no other command of bao`

// asFlag names the version that the program is to be.
const asFlag = "--as="

// Program is the double as a program: the version in the first argument, then
// bao's own.
func Program(ctx context.Context, args []string, out io.Writer) error {
	if len(args) == 0 || !strings.HasPrefix(args[0], asFlag) {
		return fmt.Errorf("expected %sVERSION as the first argument, found %q", asFlag, args)
	}
	version, err := ParseVersion(strings.TrimPrefix(args[0], asFlag))
	if err != nil {
		return err
	}
	return Run(ctx, version, args[1:], out)
}

// Run is bao with its arguments, in the given version.
func Run(ctx context.Context, version Version, args []string, out io.Writer) error {
	err := run(ctx, version, args, out)
	var exit *ExitError
	if err != nil && !errors.As(err, &exit) {
		err = &ExitError{codeError, fmt.Errorf("bao: %w", err)}
	}
	return err
}

func run(ctx context.Context, version Version, args []string, out io.Writer) error {
	c := newCLI(out)
	for _, known := range []struct {
		words []string
		run   func(context.Context, []string) error
	}{
		{[]string{"server"}, func(ctx context.Context, args []string) error { return serve(ctx, version, args, out) }},
		{[]string{"status"}, c.status},
		{[]string{"version"}, func(context.Context, []string) error {
			_, err := fmt.Fprintf(out, "OpenBao v%s (a double)\n", version)
			return err
		}},
		{[]string{"operator", "init"}, c.init},
		{[]string{"operator", "unseal"}, c.unseal},
		{[]string{"operator", "step-down"}, c.stepDown},
		{[]string{"operator", "raft", "snapshot", "save"}, c.snapshot},
	} {
		if rest, ok := after(args, known.words); ok {
			return known.run(ctx, rest)
		}
	}
	return errors.New(usage)
}

func after(args, words []string) ([]string, bool) {
	if len(args) < len(words) {
		return nil, false
	}
	for i, w := range words {
		if args[i] != w {
			return nil, false
		}
	}
	return args[len(words):], true
}

func serve(ctx context.Context, version Version, args []string, out io.Writer) error {
	flags := flag.NewFlagSet("bao server", flag.ContinueOnError)
	path := flags.String("config", "", "configuration file")
	_ = flags.String("log-level", "info", "accepted and ignored")
	if err := flags.Parse(args); err != nil {
		return err
	}
	config, err := LoadConfig(*path, os.Getenv)
	if err != nil {
		return err
	}
	log := slog.New(slog.NewTextHandler(os.Stderr, nil))
	s, err := New(config, version, dial(os.Getenv), log)
	if err != nil {
		return err
	}
	return s.Serve(ctx, out)
}

// dial asks the process node for names where the server is a pod; short ones
// are those of its own namespace, as in a cluster.
func dial(get func(string) string) Dial {
	var dialer net.Dialer
	dns, namespace := get(pod.DNSVariable), env(get, "K8S_NAMESPACE")
	if dns == "" {
		return dialer.DialContext
	}
	resolver := names.Resolver(dns)
	return func(ctx context.Context, network, address string) (net.Conn, error) {
		host, port, err := net.SplitHostPort(address)
		if err != nil {
			return nil, err
		}
		if net.ParseIP(host) != nil {
			return dialer.DialContext(ctx, network, address)
		}
		// The final dot keeps the machine's own search list out.
		found, err := resolver.LookupHost(ctx, host+"."+namespace+".")
		if err != nil {
			found, err = resolver.LookupHost(ctx, host+".")
		}
		if err != nil {
			return nil, err
		}
		return dialer.DialContext(ctx, network, net.JoinHostPort(found[0], port))
	}
}
