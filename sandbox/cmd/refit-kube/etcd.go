package main

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"os/signal"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"go.etcd.io/etcd/server/v3/embed"
)

// etcdStart bounds the start of a single member on a local disk.
const etcdStart = time.Minute

func etcdCommand() *cobra.Command {
	var dir, client, peer string
	var fsync bool
	c := &cobra.Command{
		Use:   "etcd",
		Short: "A single etcd member",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return runEtcd(cmd.Context(), dir, client, peer, fsync)
		},
	}
	c.Flags().StringVar(&dir, "data-dir", "etcd", "folder of the database")
	c.Flags().StringVar(&client, "client-url", "http://127.0.0.1:2379", "where clients connect")
	c.Flags().StringVar(&peer, "peer-url", "http://127.0.0.1:2380", "where members connect")
	c.Flags().BoolVar(&fsync, "fsync", false, "survive a power failure, not only the death of the process")
	return c
}

func runEtcd(ctx context.Context, dir, client, peer string, fsync bool) error {
	cfg := embed.NewConfig()
	cfg.Dir, cfg.LogLevel, cfg.UnsafeNoFsync = dir, "warn", !fsync
	clientURL, err := url.Parse(client)
	if err != nil {
		return fmt.Errorf("client URL: %w", err)
	}
	peerURL, err := url.Parse(peer)
	if err != nil {
		return fmt.Errorf("peer URL: %w", err)
	}
	cfg.ListenClientUrls, cfg.AdvertiseClientUrls = []url.URL{*clientURL}, []url.URL{*clientURL}
	cfg.ListenPeerUrls, cfg.AdvertisePeerUrls = []url.URL{*peerURL}, []url.URL{*peerURL}
	cfg.InitialCluster = cfg.InitialClusterFromName(cfg.Name)
	// Kubernetes compacts by itself; events are the bulk of a test's writes.
	cfg.QuotaBackendBytes = 4 << 30
	etcd, err := embed.StartEtcd(cfg)
	if err != nil {
		return fmt.Errorf("etcd in %s: %w", dir, err)
	}
	defer etcd.Close()
	ctx, stop := signal.NotifyContext(ctx, syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	started := time.NewTimer(etcdStart)
	defer started.Stop()
	select {
	case <-etcd.Server.ReadyNotify():
	case <-started.C:
		return fmt.Errorf("etcd in %s: not ready after %s", dir, etcdStart)
	case <-ctx.Done():
		return nil
	}
	select {
	case <-ctx.Done():
		return nil
	case err := <-etcd.Err():
		return err
	case <-etcd.Server.StopNotify():
		return errors.New("etcd stopped by itself")
	}
}
