package nats

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nkeys"

	"github.com/refit-run/refit/activities/finding"
	"github.com/refit-run/refit/activities/kube"
	"github.com/refit-run/refit/activities/secret"
)

// Login is how to log in to one account: by NKey or by a credentials file. It
// holds references only; the values never leave an activity.
type Login struct {
	// Account is the one that its streams are listed under, name or ID.
	Account string            `json:"account"`
	NKey    *secret.Reference `json:"nkey,omitempty"`
	Creds   *secret.Reference `json:"creds,omitempty"`
}

// credentials turns the references into the option of the client.
func (l Login) credentials(ctx context.Context, c *kube.Client, namespace string) (nats.Option, error) {
	if l.Creds != nil {
		creds, err := l.Creds.Read(ctx, c, namespace, "login to NATS")
		if err != nil {
			return nil, err
		}
		return nats.UserCredentialBytes(creds), nil
	}
	seed, err := l.NKey.Read(ctx, c, namespace, "login to NATS")
	if err != nil {
		return nil, err
	}
	pair, err := nkeys.ParseDecoratedNKey(seed)
	if err != nil {
		// The error may hold a part of the seed.
		return nil, finding.Finding{Object: "login to NATS", Expected: "an NKey seed (SU...) in " + l.NKey.String(), Found: "something else",
			Next: "name the key that holds the seed, not the public key"}.Error(finding.Stop)
	}
	public, err := pair.PublicKey()
	if err != nil {
		return nil, err
	}
	return nats.Nkey(public, pair.Sign), nil
}

// podDialer is the client's dialer: every address is the one pod's port.
type podDialer struct {
	ctx  context.Context
	dial func(ctx context.Context) (net.Conn, error)
}

func (d podDialer) Dial(string, string) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(d.ctx, dialLimit)
	defer cancel()
	return d.dial(ctx)
}

// connect logs in at the first of the pods that lets it.
func (l *looker) connect(ctx context.Context, login Login, answers []Answer) (*nats.Conn, error) {
	credentials, err := login.credentials(ctx, l.client, l.place.Namespace)
	if err != nil {
		return nil, err
	}
	var last error
	for _, a := range answers {
		if a.Trouble != "" {
			continue
		}
		conn, err := nats.Connect("nats://"+a.Pod, credentials, nats.Name(kube.UserAgent), nats.NoReconnect(), nats.Timeout(dialLimit),
			nats.SkipHostLookup(), nats.IgnoreDiscoveredServers(), nats.SetCustomDialer(podDialer{ctx: ctx, dial: func(ctx context.Context) (net.Conn, error) {
				return l.a.Dial.Pod(ctx, l.client, l.place.Namespace, a.Pod, l.place.Servers.ClientPort)
			}}))
		if err == nil {
			return conn, nil
		}
		last = fmt.Errorf("%s: %w", a.Pod, err)
		if errors.Is(err, nats.ErrAuthorization) {
			break // the others know the same users
		}
	}
	if last == nil {
		last = errors.New("no server answers")
	}
	f := finding.Finding{Object: fmt.Sprintf("login to NATS account %s in %s", login.Account, l.place.Namespace),
		Expected: "a connection as a user of this account", Found: last.Error()}
	if errors.Is(last, nats.ErrAuthorization) {
		f.Next = "give the login of a user of this account; with auth callout its service must run"
		return nil, f.Error(finding.Stop)
	}
	f.Next = fmt.Sprintf("see that the servers take clients on port %d (servers.clientPort), then retry", l.place.Servers.ClientPort)
	return nil, f.Error(finding.Retry)
}

// apiLimit bounds one call of the JetStream API.
const apiLimit = 10 * time.Second

// call is one call of the JetStream API. The client's own types are not used
// for it: what they do not know of a configuration they would drop.
func call(ctx context.Context, conn *nats.Conn, subject string, request, into any) error {
	ctx, cancel := context.WithTimeout(ctx, apiLimit)
	defer cancel()
	ctx, refuse := context.WithCancelCause(ctx)
	defer refuse(nil)
	// What a user may not publish is told beside the request, which would
	// otherwise wait for a reply in vain.
	conn.SetErrorHandler(func(_ *nats.Conn, _ *nats.Subscription, err error) {
		if errors.Is(err, nats.ErrPermissionViolation) {
			refuse(err)
		}
	})
	body := []byte(nil)
	if request != nil {
		var err error
		if body, err = json.Marshal(request); err != nil {
			return err
		}
	}
	f := finding.Finding{Object: "JetStream API " + subject, Expected: fmt.Sprintf("an answer within %s", apiLimit)}
	reply, err := conn.RequestWithContext(ctx, "$JS.API."+subject, body)
	if why := context.Cause(ctx); err != nil && errors.Is(why, nats.ErrPermissionViolation) {
		f.Found, f.Next = why.Error(), "give a login that may publish to $JS.API.STREAM.INFO.* and $JS.API.STREAM.UPDATE.*"
		return f.Error(finding.Stop)
	}
	const without = "the login leads into an account without JetStream: correct logins in the plan"
	if errors.Is(err, nats.ErrNoResponders) { // so it is for a while after a server's start, too
		f.Found, f.Next = "nobody answers for this account", "see that JetStream runs on the servers, then retry; or "+without
		return f.Error(finding.Retry)
	}
	if err != nil {
		f.Found, f.Next = err.Error(), "see that the servers have a leader of their cluster and are not short of CPU, then retry"
		return f.Error(finding.Retry)
	}
	var failed struct {
		Error *struct {
			Code        int            `json:"code"`
			Reason      nats.ErrorCode `json:"err_code"`
			Description string         `json:"description"`
		} `json:"error"`
	}
	if err := json.Unmarshal(reply.Data, &failed); err != nil {
		return malformed(f, err)
	}
	if e := failed.Error; e != nil {
		class := finding.Stop
		f.Expected, f.Found = "the server to do it", fmt.Sprintf("refused with %d: %s", e.Code, e.Description)
		f.Next = "mend what the server complains about, then retry"
		switch {
		case e.Reason == nats.JSErrCodeJetStreamNotEnabledForAccount:
			f.Next = without
		case e.Code == http.StatusServiceUnavailable: // no leader just now
			class = finding.Retry
		case e.Code == http.StatusNotFound:
			f.Next = "the login leads into another account, which has no such stream (correct logins in the plan), or the stream was deleted just now (retry)"
		}
		return f.Error(class)
	}
	if err := json.Unmarshal(reply.Data, into); err != nil {
		return malformed(f, err)
	}
	return nil
}

func malformed(f finding.Finding, err error) error {
	f.Expected, f.Found = "an answer in the JSON of its API", err.Error()
	f.Next = "this version of NATS may not be known here: look at its log"
	return f.Error(finding.Stop)
}
