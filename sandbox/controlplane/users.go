package controlplane

import (
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/client-go/tools/clientcmd/api"
)

// User is one identity of the sandbox. Everyone who talks to the API server
// has its own, so that the audit log tells them apart.
type User struct {
	Name   string
	Groups []string
}

// masters may do everything. All of the sandbox's users are in it: rights by
// binding would be refused for a moment after every restart of the API server,
// while it still loads the bindings.
var masters = []string{"system:masters"}

// The sandbox's identities; each has a kubeconfig named after it. Admin is a
// person at a terminal, Worker is Refit's worker, TensorFusion the double (or
// a real controller), Observer a test that only looks, Sandbox the daemon.
var (
	Admin             = User{Name: "admin", Groups: masters}
	Worker            = User{Name: "refit-worker", Groups: masters}
	TensorFusion      = User{Name: "tensorfusion", Groups: masters}
	Observer          = User{Name: "observer", Groups: masters}
	Sandbox           = User{Name: "sandbox", Groups: masters}
	kwok              = User{Name: "kwok", Groups: masters}
	controllerManager = User{Name: "system:kube-controller-manager", Groups: masters}
	scheduler         = User{Name: "system:kube-scheduler"}
)

var users = []User{Admin, Worker, TensorFusion, Observer, Sandbox, kwok, controllerManager, scheduler}

// Kubeconfig is the base name of the user's kubeconfig, without the colon
// that system users have in their names.
func (u User) Kubeconfig() string {
	return strings.TrimPrefix(u.Name, "system:") + ".kubeconfig"
}

// writeUsers writes the API server's token file and a kubeconfig per user,
// whose only context is called contextName.
func writeUsers(dir, server, contextName string) error {
	var tokens strings.Builder
	for i, u := range users {
		raw := make([]byte, 16)
		if _, err := rand.Read(raw); err != nil {
			return err
		}
		token := hex.EncodeToString(raw)
		fmt.Fprintf(&tokens, "%s,%s,%d", token, u.Name, i+1)
		if len(u.Groups) > 0 {
			fmt.Fprintf(&tokens, ",%q", strings.Join(u.Groups, ","))
		}
		tokens.WriteByte('\n')
		ca, err := os.ReadFile(filepath.Join(dir, "ca.crt"))
		if err != nil {
			return err
		}
		cfg := api.NewConfig()
		cfg.Clusters[contextName] = &api.Cluster{Server: server, CertificateAuthorityData: ca}
		cfg.AuthInfos[u.Name] = &api.AuthInfo{Token: token}
		cfg.Contexts[contextName] = &api.Context{Cluster: contextName, AuthInfo: u.Name}
		cfg.CurrentContext = contextName
		if err := clientcmd.WriteToFile(*cfg, filepath.Join(dir, u.Kubeconfig())); err != nil {
			return fmt.Errorf("kubeconfig of %s: %w", u.Name, err)
		}
	}
	return os.WriteFile(filepath.Join(dir, "tokens.csv"), []byte(tokens.String()), 0o600)
}
