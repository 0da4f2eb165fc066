// Package controlplane runs etcd, kube-apiserver, kube-controller-manager and
// kube-scheduler as child processes on loopback, with certificates, users and
// an audit log of its own. It must not know what the cluster is used for.
package controlplane

import (
	"context"
	"crypto/tls"
	_ "embed"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"time"

	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/refit-run/refit/sandbox/folder"
	"github.com/refit-run/refit/sandbox/process"
)

//go:embed audit.yaml
var auditPolicy []byte

// AuditFile is the base name of the audit log.
const AuditFile = "audit.log"

const (
	serviceIP   = "10.96.0.1"
	serviceCIDR = "10.96.0.0/16"
	// probeEvery is short because a start waits for several probes in a row.
	probeEvery = 100 * time.Millisecond
	// stopGrace lets the API server close its watches; after it, SIGKILL.
	stopGrace = 10 * time.Second
)

// ControlPlane is the running set.
type ControlPlane struct {
	dir   string
	ports folder.Ports

	Etcd              *process.Keeper
	APIServer         *process.Keeper
	ControllerManager *process.Keeper
	Scheduler         *process.Keeper
}

// New prepares files below the sandbox's folder. Certificates, tokens and
// kubeconfigs are made once and kept.
func New(f folder.Folder, ports folder.Ports, contextName, program string) (*ControlPlane, error) {
	dir := f.Path("kube")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	c := &ControlPlane{dir: dir, ports: ports}
	if _, err := os.Stat(c.path("tokens.csv")); err != nil {
		if err := writeCertificates(dir); err != nil {
			return nil, err
		}
		if err := writeUsers(dir, "https://"+folder.Address(ports.APIServer), contextName); err != nil {
			return nil, err
		}
		if err := os.WriteFile(c.path("audit-policy.yaml"), auditPolicy, 0o600); err != nil {
			return nil, err
		}
	}
	keep := func(name string, args ...string) *process.Keeper {
		return process.Keep(process.Spec{
			Name: name, Path: program, Args: append([]string{name}, args...),
			Dir: dir, Log: c.path(name + ".log"), Grace: stopGrace,
		})
	}
	etcd := "http://" + folder.Address(ports.EtcdClient)
	c.Etcd = keep("etcd", "--data-dir", c.path("etcd"), "--client-url", etcd,
		"--peer-url", "http://"+folder.Address(ports.EtcdPeer))
	c.APIServer = keep("apiserver",
		"--etcd-servers="+etcd, fmt.Sprintf("--secure-port=%d", ports.APIServer),
		"--bind-address=127.0.0.1", "--advertise-address=127.0.0.1", "--endpoint-reconciler-type=none",
		"--service-cluster-ip-range="+serviceCIDR, "--allow-privileged",
		"--tls-cert-file=apiserver.crt", "--tls-private-key-file=apiserver.key",
		"--client-ca-file=ca.crt", "--token-auth-file=tokens.csv",
		"--service-account-issuer=https://kubernetes.default.svc",
		"--service-account-signing-key-file=sa.key", "--service-account-key-file=sa.pub",
		"--authorization-mode=Node,RBAC", "--enable-admission-plugins=NodeRestriction",
		// Fake nodes share one kubelet server, reached by their external
		// address; the internal one belongs to the pods on the host network.
		"--kubelet-client-certificate=kubelet-client.crt", "--kubelet-client-key=kubelet-client.key",
		"--kubelet-preferred-address-types=ExternalIP",
		"--audit-policy-file=audit-policy.yaml", "--audit-log-path="+c.AuditLog(),
		"--event-ttl=1h", "--profiling=false", "--shutdown-delay-duration=0s",
		// A fleet of a thousand nodes is driven by a handful of clients.
		"--max-requests-inflight=1600", "--max-mutating-requests-inflight=800")
	c.ControllerManager = keep("controller-manager",
		"--kubeconfig="+controllerManager.Kubeconfig(), "--authentication-kubeconfig="+controllerManager.Kubeconfig(),
		"--authorization-kubeconfig="+controllerManager.Kubeconfig(), "--bind-address=127.0.0.1",
		fmt.Sprintf("--secure-port=%d", ports.ControllerManager), "--cert-dir=kcm-certs",
		"--leader-elect=false", "--use-service-account-credentials=false",
		"--service-account-private-key-file=sa.key", "--root-ca-file=ca.crt",
		"--cluster-signing-cert-file=ca.crt", "--cluster-signing-key-file=ca.key",
		"--kube-api-qps=500", "--kube-api-burst=1000")
	c.Scheduler = keep("scheduler",
		"--kubeconfig="+scheduler.Kubeconfig(), "--authentication-kubeconfig="+scheduler.Kubeconfig(),
		"--authorization-kubeconfig="+scheduler.Kubeconfig(), "--bind-address=127.0.0.1",
		fmt.Sprintf("--secure-port=%d", ports.Scheduler), "--cert-dir=scheduler-certs",
		"--leader-elect=false", "--kube-api-qps=500", "--kube-api-burst=1000")
	return c, nil
}

func (c *ControlPlane) path(name string) string { return filepath.Join(c.dir, name) }

// Kubeconfig is the path of a user's kubeconfig.
func (c *ControlPlane) Kubeconfig(u User) string { return c.path(u.Kubeconfig()) }

// KwokKubeconfig is the path of the fake kubelet's kubeconfig.
func (c *ControlPlane) KwokKubeconfig() string { return c.path(kwok.Kubeconfig()) }

// AuditLog is the path of the audit log, one JSON event per line.
func (c *ControlPlane) AuditLog() string { return c.path(AuditFile) }

// Config returns a user's client configuration without client-side throttling.
func (c *ControlPlane) Config(u User) (*rest.Config, error) {
	cfg, err := clientcmd.BuildConfigFromFlags("", c.Kubeconfig(u))
	if err != nil {
		return nil, fmt.Errorf("kubeconfig of %s: %w", u.Name, err)
	}
	cfg.QPS, cfg.UserAgent = -1, u.Name
	return cfg, nil
}

// Start brings up etcd and the API server, then the two controllers, and
// returns when the API server answers; ReadyControllers waits for the rest.
func (c *ControlPlane) Start(ctx context.Context) error {
	if err := c.Etcd.Start(); err != nil {
		return err
	}
	if err := c.APIServer.Start(); err != nil {
		return err
	}
	if err := c.ReadyAPIServer(ctx); err != nil {
		return err
	}
	if err := c.ControllerManager.Start(); err != nil {
		return err
	}
	return c.Scheduler.Start()
}

// ReadyAPIServer waits until the API server answers /readyz.
func (c *ControlPlane) ReadyAPIServer(ctx context.Context) error {
	return c.ready(ctx, c.APIServer, c.ports.APIServer, "/readyz")
}

// ReadyControllers waits for controller-manager and scheduler.
func (c *ControlPlane) ReadyControllers(ctx context.Context) error {
	if err := c.ready(ctx, c.ControllerManager, c.ports.ControllerManager, "/healthz"); err != nil {
		return err
	}
	return c.ready(ctx, c.Scheduler, c.ports.Scheduler, "/healthz")
}

// probeClient does not verify: the controllers sign their own certificates,
// and a probe carries no secret.
var probeClient = &http.Client{
	Timeout:   2 * time.Second,
	Transport: &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}, DisableKeepAlives: true},
}

func (c *ControlPlane) ready(ctx context.Context, k *process.Keeper, port int, path string) error {
	url := "https://" + folder.Address(port) + path
	return k.Ready(ctx, probeEvery, func(ctx context.Context) error {
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
		if err != nil {
			return err
		}
		resp, err := probeClient.Do(req)
		if err != nil {
			return err
		}
		defer resp.Body.Close()
		if _, err := io.Copy(io.Discard, resp.Body); err != nil {
			return err
		}
		if resp.StatusCode != http.StatusOK {
			return fmt.Errorf("GET %s: expected 200, found %s", url, resp.Status)
		}
		return nil
	})
}

// Stop ends everything, the API server before the etcd it needs to shut down.
func (c *ControlPlane) Stop() {
	for _, k := range []*process.Keeper{c.Scheduler, c.ControllerManager, c.APIServer, c.Etcd} {
		k.Stop()
	}
}

// Components lists the children for status.
func (c *ControlPlane) Components() []*process.Keeper {
	return []*process.Keeper{c.Etcd, c.APIServer, c.ControllerManager, c.Scheduler}
}
