package procnode_test

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/dynamic"

	"github.com/refit-run/refit/activities/kube"
	"github.com/refit-run/refit/sandbox/procnode/datastore"
)

// monitor reads from a server's monitoring port through the API server.
func monitor(ctx context.Context, client *kube.Client, pod, path string) (int, string, error) {
	h := http.Client{Transport: &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return client.DialPod(ctx, datastore.NATSNamespace, pod, 8222)
	}}}
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://nats"+path, nil)
	if err != nil {
		return 0, "", err
	}
	response, err := h.Do(request)
	if err != nil {
		return 0, "", err
	}
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	return response.StatusCode, string(body), err
}

// A member whose last one was deleted is back when its full health says so:
// its streams are current. The chart's own probe says so earlier.
func (s *space) natsHealthy(client *kube.Client) {
	s.Helper()
	for i := range 3 {
		name := fmt.Sprintf("nats-%d", i)
		s.eventually(name+" is healthy", func(ctx context.Context) error {
			code, body, err := monitor(ctx, client, name, "/healthz")
			if err == nil && code != http.StatusOK {
				err = fmt.Errorf("/healthz: %d %s", code, body)
			}
			return err
		})
	}
}

func TestNATSKeepsReplicatedStreamsOverAGatedReplacement(t *testing.T) {
	s := newSpace(t)
	s.name = datastore.NATSNamespace
	ctx := until(t)
	api, err := dynamic.NewForConfig(s.config)
	require.NoError(t, err)
	began := time.Now()
	require.NoError(t, s.nats.Install(ctx, api, filepath.Join(s.root, "volumes")))
	require.NoError(t, s.nats.Ready(ctx, api))
	t.Logf("3 NATS servers were Ready in %s", time.Since(began))
	products, err := kube.NewClient(s.config)
	require.NoError(t, err)
	s.natsHealthy(products)
	t.Logf("and healthy in %s", time.Since(began))

	require.NoError(t, s.nats.Install(ctx, api, filepath.Join(s.root, "volumes")), "installing again changes nothing")
	secret, err := s.kube.CoreV1().Secrets(datastore.NATSNamespace).Get(ctx, datastore.NATSKeys, metav1.GetOptions{})
	require.NoError(t, err)
	seed := string(secret.Data["user.key"])
	dial := func(pod string) *client {
		conn, err := products.DialPod(ctx, datastore.NATSNamespace, pod, 4222)
		require.NoError(t, err)
		return login(t, conn, seed)
	}
	c := dial("nats-0")
	for name, storage := range map[string]string{"InMemory": "memory", "OnDisk": "file"} {
		answer := c.request("$JS.API.STREAM.CREATE."+name, map[string]any{
			"name": name, "subjects": []string{name + ".>"}, "retention": "limits", "storage": storage, "num_replicas": 3,
			"max_consumers": -1, "max_msgs": -1, "max_bytes": -1, "discard": "old",
		})
		require.Nil(t, answer["error"])
		for range 20 {
			require.Nil(t, c.request(name+".x", "a message")["error"])
		}
	}
	// The streams are the named account's.
	_, body, err := monitor(ctx, products, "nats-1", "/jsz?accounts=true&streams=true")
	require.NoError(t, err)
	require.Contains(t, body, `"name": "`+datastore.NATSAccount+`"`)

	for i := range 3 {
		name := fmt.Sprintf("nats-%d", i)
		before := s.pod(name)
		began := time.Now()
		require.NoError(t, s.kube.CoreV1().Pods(s.name).Delete(ctx, name, metav1.DeleteOptions{}))
		s.eventually("the next "+name+" is Ready", func(ctx context.Context) error {
			p, err := s.kube.CoreV1().Pods(s.name).Get(ctx, name, metav1.GetOptions{})
			if err == nil && (p.UID == before.UID || !isReady(*p)) {
				err = fmt.Errorf("the former one, or not Ready")
			}
			return err
		})
		s.natsHealthy(products)
		t.Logf("%s was replaced and healthy in %s", name, time.Since(began))
	}
	c = dial("nats-1")
	for _, name := range []string{"InMemory", "OnDisk"} {
		answer := c.request("$JS.API.STREAM.INFO."+name, nil)
		require.Nil(t, answer["error"])
		require.Equal(t, 20, number(answer, "state", "messages"), name)
		require.Equal(t, 3, number(answer, "config", "num_replicas"))
		require.Nil(t, c.request("$JS.API.STREAM.DELETE."+name, nil)["error"])
	}
}

// Nobody gets in without the key.
func TestNATSRefusesStrangers(t *testing.T) {
	s := newSpace(t)
	ctx := until(t)
	api, err := dynamic.NewForConfig(s.config)
	require.NoError(t, err)
	require.NoError(t, s.nats.Install(ctx, api, filepath.Join(s.root, "volumes")))
	require.NoError(t, s.nats.Ready(ctx, api))
	products, err := kube.NewClient(s.config)
	require.NoError(t, err)
	conn, err := products.DialPod(ctx, datastore.NATSNamespace, "nats-0", 4222)
	require.NoError(t, err)
	defer conn.Close()
	_, err = conn.Write([]byte("CONNECT {\"verbose\":true}\r\nPING\r\n"))
	require.NoError(t, err)
	require.NoError(t, conn.SetReadDeadline(time.Now().Add(answerLimit)))
	all, err := io.ReadAll(conn)
	require.NoError(t, err)
	require.True(t, strings.Contains(string(all), "Authorization Violation"), string(all))
}
