package world

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"os"

	"filippo.io/age"
	"go.temporal.io/sdk/log"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/refit-run/refit/sandbox/folder"
	"github.com/refit-run/refit/sandbox/process"
)

// Namespace of the TensorFusion release and of its clients' example.
const (
	Namespace     = "tensor-fusion-sys"
	AppsNamespace = "apps"
)

type programs struct{ kube, kwok, temporal, gpuagent string }

func findPrograms(realAgents bool) (p programs, err error) {
	if realAgents {
		if p.gpuagent, err = process.Find("refit-gpuagent", "REFIT_SANDBOX_GPUAGENT"); err != nil {
			return p, err
		}
	}
	if p.kube, err = process.Find("refit-kube", "REFIT_SANDBOX_KUBE"); err != nil {
		return p, err
	}
	if p.kwok, err = process.Find("kwok", "REFIT_SANDBOX_KWOK"); err != nil {
		return p, err
	}
	p.temporal, err = process.Find("temporal", "REFIT_SANDBOX_TEMPORAL")
	return p, err
}

// bootstrap makes the default ServiceAccounts, which a fresh cluster gets from
// its controllers only after ten seconds.
func bootstrap(ctx context.Context, kube kubernetes.Interface) error {
	for _, ns := range []string{metav1.NamespaceDefault, Namespace, AppsNamespace} {
		object := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: ns}}
		if _, err := kube.CoreV1().Namespaces().Create(ctx, object, metav1.CreateOptions{}); err != nil && !apierrors.IsAlreadyExists(err) {
			return fmt.Errorf("namespace %s: %w", ns, err)
		}
		account := &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: "default"}}
		if _, err := kube.CoreV1().ServiceAccounts(ns).Create(ctx, account, metav1.CreateOptions{}); err != nil && !apierrors.IsAlreadyExists(err) {
			return fmt.Errorf("service account %s/default: %w", ns, err)
		}
	}
	return nil
}

// writeSecrets makes the age identity and the artifact folder once.
func writeSecrets(f folder.Folder) error {
	if err := os.MkdirAll(f.Path("artifacts"), 0o700); err != nil {
		return err
	}
	if _, err := os.Stat(f.Path(identityFile)); err == nil {
		return nil
	}
	identity, err := age.GenerateX25519Identity()
	if err != nil {
		return fmt.Errorf("age identity: %w", err)
	}
	if err := folder.WriteFile(f.Path(recipientFile), []byte(identity.Recipient().String()+"\n"), 0o600); err != nil {
		return err
	}
	return folder.WriteFile(f.Path(identityFile), []byte(identity.String()+"\n"), 0o600)
}

// agentLogger keeps the thousand agents quiet: a server that restarts is part
// of the sandbox's purpose, and every agent would report it.
func agentLogger() log.Logger {
	return log.NewStructuredLogger(slog.New(slog.NewTextHandler(io.Discard, nil)))
}
