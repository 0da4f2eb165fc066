package world

import (
	"fmt"
	"net/url"
	"os"
	"strings"

	"github.com/refit-run/refit/sandbox/controlplane"
	"github.com/refit-run/refit/sandbox/folder"
	"github.com/refit-run/refit/sandbox/registry"
	"github.com/refit-run/refit/sandbox/temporal"
)

const (
	identityFile  = "age-identity.txt"
	recipientFile = "age-recipients.txt"
)

// Variable is one line of the environment.
type Variable struct{ Name, Value string }

// Environment is what a person, a worker or a test needs to reach the
// sandbox. Clusters are written as NAME=KUBECONFIG#CONTEXT.
func Environment(f folder.Folder, s folder.State) ([]Variable, error) {
	recipient, err := os.ReadFile(f.Path(recipientFile))
	if err != nil {
		return nil, fmt.Errorf("age recipient of the sandbox: %w; run `refit-sandbox up`", err)
	}
	kubeconfig := func(u controlplane.User) string { return f.Path("kube", u.Kubeconfig()) }
	cluster := s.Options.Cluster
	artifacts := url.URL{Scheme: "file", Path: f.Path("artifacts")}
	return []Variable{
		{"KUBECONFIG", kubeconfig(controlplane.Admin)},
		{"TEMPORAL_ADDRESS", folder.Address(s.Ports.TemporalGRPC)},
		{"TEMPORAL_NAMESPACE", temporal.Namespace},
		{"REFIT_CLUSTERS", fmt.Sprintf("%s=%s#%s", cluster, kubeconfig(controlplane.Worker), cluster)},
		{"REFIT_REGISTRY", registry.Host},
		{"REFIT_REGISTRY_MIRRORS", registry.Mirror(folder.Address(s.Ports.Registry))},
		{"REFIT_UI", "http://" + folder.Address(s.Ports.TemporalUI)},
		{"REFIT_ARTIFACTS", artifacts.String()},
		{"REFIT_AGE_RECIPIENTS", strings.TrimSpace(string(recipient))},
		{"REFIT_AGE_IDENTITY", f.Path(identityFile)},
		{"REFIT_SANDBOX", f.Root},
		{"REFIT_SANDBOX_OBSERVER", kubeconfig(controlplane.Observer)},
		{"REFIT_SANDBOX_AUDIT_LOG", f.Path("kube", controlplane.AuditFile)},
	}, nil
}
