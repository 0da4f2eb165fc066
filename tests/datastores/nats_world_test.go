package datastores

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/nats-io/nkeys"
	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

const (
	natsSystem  = "nats-system"
	natsServers = 3
)

// service is what the services of the control plane do with NATS, in the
// account of their login.
type service struct {
	w *world
	jetstream.JetStream
}

// byKey logs in as the services do: with the seed in Secret nats-nkeys.
func (w *world) byKey() nats.Option {
	w.t.Helper()
	pair, err := nkeys.FromSeed([]byte(w.natsSeed()))
	require.NoError(w.t, err)
	return nats.Nkey(publicKey(w, pair), pair.Sign)
}

// natsSeed is the private part of the services' nkey.
func (w *world) natsSeed() string {
	w.t.Helper()
	s, err := w.Kube.CoreV1().Secrets(natsSystem).Get(context.Background(), "nats-nkeys", metav1.GetOptions{})
	require.NoError(w.t, err)
	return strings.TrimSpace(string(s.Data["user.key"]))
}

// toPod finds the pod that has the name now, each time a connection is made.
type toPod struct{ w *world }

func (d toPod) Dial(_, address string) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	name, _, _ := strings.Cut(address, ":")
	return d.w.dial(ctx, natsSystem, name, 4222)
}

// service connects; it finds the servers again after each of their restarts.
func (w *world) service(login nats.Option) *service {
	w.t.Helper()
	var servers []string
	for i := range natsServers {
		servers = append(servers, fmt.Sprintf("nats://nats-%d:4222", i))
	}
	conn, err := nats.Connect(strings.Join(servers, ","), login, nats.SetCustomDialer(toPod{w}), nats.SkipHostLookup(), nats.IgnoreDiscoveredServers(),
		nats.MaxReconnects(-1), nats.ReconnectWait(200*time.Millisecond), nats.RetryOnFailedConnect(true), nats.Timeout(10*time.Second))
	require.NoError(w.t, err)
	w.t.Cleanup(conn.Close)
	js, err := jetstream.New(conn)
	require.NoError(w.t, err)
	return &service{w: w, JetStream: js}
}

// stream makes a stream that takes every subject below its name.
func (s *service) stream(config jetstream.StreamConfig) jetstream.Stream {
	s.w.t.Helper()
	config.Subjects = []string{config.Name + ".>"}
	var made jetstream.Stream
	s.w.eventually("stream "+config.Name+" is made", func(ctx context.Context) (err error) {
		made, err = s.CreateStream(ctx, config)
		return err
	})
	return made
}

// publish puts messages into a stream, each confirmed by the server.
func (s *service) publish(stream string, n int) {
	s.w.t.Helper()
	for i := range n {
		id := fmt.Sprintf("%s-%d-%d", stream, time.Now().UnixNano(), i) // sent twice, it counts once
		s.w.eventually("a message in "+stream, func(ctx context.Context) error {
			_, err := s.Publish(ctx, stream+".x", []byte("a request"), jetstream.WithMsgID(id))
			return err
		})
	}
}

// consume takes messages out of a work queue, as its workers do.
func (s *service) consume(stream string, n int) {
	s.w.t.Helper()
	taken := 0
	s.w.eventually(fmt.Sprintf("%d messages of %s are worked off", n, stream), func(ctx context.Context) error {
		c, err := s.CreateOrUpdateConsumer(ctx, stream, jetstream.ConsumerConfig{Durable: "workers", AckPolicy: jetstream.AckExplicitPolicy})
		if err != nil {
			return err
		}
		batch, err := c.Fetch(n-taken, jetstream.FetchMaxWait(5*time.Second))
		if err != nil {
			return err
		}
		for m := range batch.Messages() {
			if err := m.DoubleAck(ctx); err != nil {
				return err
			}
			taken++
		}
		if taken < n {
			return errors.Join(fmt.Errorf("%d of them", taken), batch.Error())
		}
		return nil
	})
}

// info is a stream as a client sees it.
func (s *service) info(stream string) *jetstream.StreamInfo {
	s.w.t.Helper()
	var info *jetstream.StreamInfo
	s.w.eventually("an answer about "+stream, func(ctx context.Context) error {
		made, err := s.Stream(ctx, stream)
		if err != nil {
			return err
		}
		info = made.CachedInfo()
		if info.Cluster == nil || info.Cluster.Leader == "" {
			return errors.New("no leader")
		}
		return nil
	})
	return info
}

// drop deletes streams, so that a subtest leaves none to the next.
func (s *service) drop(streams ...string) {
	s.w.t.Helper()
	for _, name := range streams {
		s.w.eventually(name+" is deleted", func(ctx context.Context) error {
			err := s.DeleteStream(ctx, name)
			if errors.Is(err, jetstream.ErrStreamNotFound) {
				return nil
			}
			return err
		})
	}
}

// busy publishes into a stream until done is called, which returns how many
// messages the server has confirmed.
func (s *service) busy(stream string) (done func() uint64) {
	stop := make(chan struct{})
	var confirmed atomic.Uint64
	var publishing sync.WaitGroup
	publishing.Go(func() {
		tick := time.NewTicker(50 * time.Millisecond)
		defer tick.Stop()
		for {
			select {
			case <-stop:
				return
			case <-tick.C:
			}
			ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
			if _, err := s.Publish(ctx, stream+".x", []byte("while it is raised")); err == nil {
				confirmed.Add(1)
			}
			cancel()
		}
	})
	var once sync.Once
	done = func() uint64 {
		once.Do(func() { close(stop) })
		publishing.Wait()
		return confirmed.Load()
	}
	s.w.t.Cleanup(func() { done() })
	return done
}

// natsHealthy waits until the server says that all its streams are current:
// the chart's probe, which makes the pod Ready, says less.
func (w *world) natsHealthy(pods ...string) {
	w.t.Helper()
	for _, pod := range pods {
		client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return w.dial(ctx, natsSystem, pod, 8222)
		}}}
		w.eventually(pod+" is healthy", func(ctx context.Context) error {
			request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://nats/healthz", nil)
			if err != nil {
				return err
			}
			reply, err := client.Do(request)
			if err != nil {
				return err
			}
			defer reply.Body.Close()
			if reply.StatusCode != http.StatusOK {
				return fmt.Errorf("/healthz answers %d", reply.StatusCode)
			}
			return nil
		})
	}
}

// natsRollByHelm gives the servers another image, one after the other, each
// when the one before is healthy.
func (w *world) natsRollByHelm(image string) {
	w.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	sets := w.Kube.AppsV1().StatefulSets(natsSystem)
	for i := natsServers - 1; i >= 0; i-- {
		patch := fmt.Appendf(nil, `{"spec":{"updateStrategy":{"type":"RollingUpdate","rollingUpdate":{"partition":%d}},
			"template":{"spec":{"containers":[{"name":"nats","image":%q}]}}}}`, i, image)
		name := fmt.Sprintf("nats-%d", i)
		before, err := w.pod(natsSystem, name)
		require.NoError(w.t, err)
		_, err = sets.Patch(ctx, "nats", types.StrategicMergePatchType, patch, metav1.PatchOptions{})
		require.NoError(w.t, err)
		w.replaced(natsSystem, name, before.UID)
		w.natsHealthy("nats-0", "nats-1", "nats-2")
	}
	p, err := w.pod(natsSystem, "nats-0")
	require.NoError(w.t, err)
	require.Equal(w.t, image, p.Spec.Containers[0].Image)
}
