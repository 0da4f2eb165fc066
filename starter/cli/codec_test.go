package cli_test

import (
	"bytes"
	"context"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	enumspb "go.temporal.io/api/enums/v1"
	"go.temporal.io/api/workflowservice/v1"
	"go.temporal.io/sdk/client"
	"go.temporal.io/sdk/log"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/refit-run/refit/activities/codec"
	"github.com/refit-run/refit/starter/cli"
	"github.com/refit-run/refit/workflows/protocol"
)

// inNamespace makes a namespace of its own and points the commands at it.
func inNamespace(t *testing.T, name string) log.Logger {
	t.Setenv("TEMPORAL_NAMESPACE", name)
	quiet := log.NewStructuredLogger(slog.New(slog.DiscardHandler))
	namespaces, err := client.NewNamespaceClient(client.Options{HostPort: world.address, Logger: quiet})
	require.NoError(t, err)
	defer namespaces.Close()
	require.NoError(t, namespaces.Register(t.Context(), &workflowservice.RegisterNamespaceRequest{
		Namespace: name, WorkflowExecutionRetentionPeriod: durationpb.New(24 * time.Hour),
	}))
	return quiet
}

// sealed is a namespace whose worker and command line share a key.
func sealed(t *testing.T) client.Client {
	needWorld(t)
	key := refit(t, "codec", "key", "2026-11")
	require.Equal(t, cli.ExitDone, key.code, key.err)
	file := filepath.Join(t.TempDir(), "keys")
	require.NoError(t, os.WriteFile(file, []byte(key.out), 0o600))
	t.Setenv(codec.Variable, file)
	quiet := inNamespace(t, "sealed")
	keys, err := codec.Read(file)
	require.NoError(t, err)
	options := client.Options{HostPort: world.address, Namespace: "sealed", Logger: quiet}
	keys.Apply(&options)
	var c client.Client
	require.Eventually(t, func() bool { // the server learns of a namespace within seconds
		c, err = client.Dial(options)
		if err != nil {
			return false
		}
		w := toyWorker(c)
		if err = w.Start(); err != nil {
			c.Close()
			return false
		}
		t.Cleanup(func() { w.Stop(); c.Close() })
		return true
	}, waitLimit, waitStep)
	return c
}

func TestWithKeysNothingReadableReachesTheServer(t *testing.T) {
	c := sealed(t)
	file, id := planFile(t, "gate", "hosts: 2")
	started := refit(t, "start", file, "--until-gate")
	require.Equal(t, cli.ExitGate, started.code, started.err)
	require.Contains(t, refit(t, "status", id).out, gateName)
	const secret = "fake-comment-0000"
	require.Equal(t, cli.ExitDone, refit(t, "approve", id, "--comment", secret).code)
	require.Equal(t, cli.ExitDone, refit(t, "watch", id).code)
	require.Contains(t, refit(t, "receipt", id).out, secret)

	var raw strings.Builder
	events := c.GetWorkflowHistory(t.Context(), id, "", false, enumspb.HISTORY_EVENT_FILTER_TYPE_ALL_EVENT)
	for events.HasNext() {
		e, err := events.Next()
		require.NoError(t, err)
		raw.WriteString(e.String())
	}
	require.Contains(t, raw.String(), "binary/encrypted")
	require.NotContains(t, raw.String(), secret)
	require.NotContains(t, raw.String(), "stand-in for")

	// What another tool sends comes in the clear, and is taken.
	other, otherID := planFile(t, "gate", "hosts: 3")
	require.Equal(t, cli.ExitGate, refit(t, "start", other, "--until-gate").code)
	plain, err := client.Dial(client.Options{HostPort: world.address, Namespace: "sealed", Logger: log.NewStructuredLogger(slog.New(slog.DiscardHandler))})
	require.NoError(t, err)
	defer plain.Close()
	require.NoError(t, plain.SignalWorkflow(t.Context(), otherID, "", protocol.Approve, protocol.Answer{By: "bob"}))
	require.Equal(t, cli.ExitDone, refit(t, "watch", otherID).code)

	t.Setenv(codec.Variable, "")
	lost := refit(t, "receipt", id)
	require.Equal(t, cli.ExitError, lost.code)
	require.Contains(t, lost.err, codec.Variable)
}

func TestTheCodecServerDecryptsForOneOrigin(t *testing.T) {
	key := refit(t, "codec", "key", "2026-11")
	file := filepath.Join(t.TempDir(), "keys")
	require.NoError(t, os.WriteFile(file, []byte(key.out), 0o600))
	address := "127.0.0.1:" + freePorts(1)[0]
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan int, 1)
	var out bytes.Buffer
	go func() {
		ended <- cli.Main(ctx, app(environment(t, codec.Variable+"="+file), func() (int, int) { return 0, 0 }, &out, &out),
			[]string{"codec", "serve", "--listen", address, "--origin", "http://ui.test"})
	}()
	const body = `{"payloads":[{"metadata":{"encoding":"anNvbi9wbGFpbg=="},"data":"ImEi"}]}`
	ask := func(origin string) (resp *http.Response) {
		require.Eventually(t, func() bool {
			req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+address+"/decode", strings.NewReader(body))
			require.NoError(t, err)
			req.Header.Set("Origin", origin)
			resp, err = http.DefaultClient.Do(req)
			return err == nil
		}, waitLimit, waitStep)
		return resp
	}
	allowed := ask("http://ui.test")
	require.Equal(t, http.StatusOK, allowed.StatusCode)
	require.Equal(t, "http://ui.test", allowed.Header.Get("Access-Control-Allow-Origin"))
	require.NoError(t, allowed.Body.Close())
	other := ask("http://evil.test")
	require.Empty(t, other.Header.Get("Access-Control-Allow-Origin"))
	require.NoError(t, other.Body.Close())
	stop()
	require.Equal(t, cli.ExitDone, <-ended)
	require.Equal(t, cli.ExitInput, refit(t, "codec", "serve").code, "without a key file there is nothing to serve")
}
