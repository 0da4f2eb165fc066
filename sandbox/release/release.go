// Package release installs a Helm chart the way an operator does, with the
// plain SDK. It must not know which chart it is.
package release

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"helm.sh/helm/v3/pkg/action"
	"helm.sh/helm/v3/pkg/chart/loader"
	"helm.sh/helm/v3/pkg/storage/driver"
	"k8s.io/cli-runtime/pkg/genericclioptions"
)

// Release names what is installed where.
type Release struct {
	Name       string
	Namespace  string
	Kubeconfig string
	Archive    []byte
	Values     map[string]any
	Timeout    time.Duration
}

// Install installs the release and waits for its hooks; one that exists
// already, from an earlier start of the sandbox, is left alone.
func Install(ctx context.Context, r Release) error {
	flags := genericclioptions.NewConfigFlags(true)
	flags.KubeConfig, flags.Namespace = &r.Kubeconfig, &r.Namespace
	cfg := new(action.Configuration)
	log := func(format string, args ...any) { slog.Debug(fmt.Sprintf(format, args...), "release", r.Name) }
	if err := cfg.Init(flags, r.Namespace, "secret", log); err != nil {
		return fmt.Errorf("release %s/%s: %w", r.Namespace, r.Name, err)
	}
	if _, err := cfg.Releases.Last(r.Name); !errors.Is(err, driver.ErrReleaseNotFound) {
		return err
	}
	chart, err := loader.LoadArchive(bytes.NewReader(r.Archive))
	if err != nil {
		return fmt.Errorf("release %s/%s: chart: %w", r.Namespace, r.Name, err)
	}
	install := action.NewInstall(cfg)
	install.ReleaseName, install.Namespace, install.CreateNamespace = r.Name, r.Namespace, true
	install.Timeout = r.Timeout
	if _, err := install.RunWithContext(ctx, chart, r.Values); err != nil {
		return fmt.Errorf("release %s/%s: install of chart %s: %w", r.Namespace, r.Name, chart.Metadata.Version, err)
	}
	return nil
}
