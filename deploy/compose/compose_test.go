// Package compose checks docker-compose.yaml at the top of the repository: by
// the compose library, since a daemon is not to be expected where tests run.
package compose

import (
	"context"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/compose-spec/compose-go/v2/cli"
	"github.com/compose-spec/compose-go/v2/types"
	"github.com/stretchr/testify/require"
)

const top = "../.."

var given = []string{
	"POSTGRES_PASSWORD=fake-password",
	"REFIT_CLUSTERS=lab=/etc/refit/kubeconfigs/lab#lab",
	"REFIT_AGE_RECIPIENTS=age1fake",
}

func load(t *testing.T, env ...string) (*types.Project, error) {
	t.Helper()
	options, err := cli.NewProjectOptions([]string{filepath.Join(top, "docker-compose.yaml")}, cli.WithEnv(env))
	require.NoError(t, err)
	return options.LoadProject(context.Background())
}

func project(t *testing.T) *types.Project {
	t.Helper()
	p, err := load(t, given...)
	require.NoError(t, err)
	return p
}

func TestWhatMustBeGivenIsAskedFor(t *testing.T) {
	for i := range given {
		env := append(append([]string{}, given[:i]...), given[i+1:]...)
		_, err := load(t, env...)
		name, _, _ := strings.Cut(given[i], "=")
		require.ErrorContains(t, err, name)
	}
}

func TestEveryImageIsPinnedOrBuiltHere(t *testing.T) {
	pinned := regexp.MustCompile(`^[a-z/-]+:[0-9]+\.[0-9]+(\.[0-9]+)?$`)
	for name, s := range project(t).Services {
		if s.Build != nil {
			require.FileExists(t, filepath.Join(s.Build.Context, s.Build.Dockerfile), name)
			continue
		}
		require.Regexp(t, pinned, s.Image, name)
	}
}

func TestEveryPortIsOfThisHostAlone(t *testing.T) {
	for name, s := range project(t).Services {
		for _, p := range s.Ports {
			require.Equal(t, "127.0.0.1", p.HostIP, name)
		}
	}
}

func TestServicesWaitForWhatTellsItsHealth(t *testing.T) {
	p := project(t)
	for name, s := range p.Services {
		for on, how := range s.DependsOn {
			if how.Condition == types.ServiceConditionHealthy {
				require.NotNil(t, p.Services[on].HealthCheck, "%s waits for the health of %s", name, on)
			}
		}
	}
}

func TestTheServerIsTheOneTheToolsPin(t *testing.T) {
	mod, err := os.ReadFile(filepath.Join(top, "tools", "temporal", "go.mod"))
	require.NoError(t, err)
	for module, image := range map[string]string{"go.temporal.io/server": "temporalio/auto-setup", "github.com/temporalio/ui-server/v2": "temporalio/ui"} {
		version := regexp.MustCompile(regexp.QuoteMeta(module) + ` v([0-9.]+)`).FindStringSubmatch(string(mod))
		require.NotNil(t, version, module)
		found := false
		for _, s := range project(t).Services {
			found = found || s.Image == image+":"+version[1]
		}
		require.True(t, found, "no service runs %s:%s", image, version[1])
	}
}

func TestTheWorkerGetsWhatItReads(t *testing.T) {
	source, err := os.ReadFile(filepath.Join(top, "worker", "worker.go"))
	require.NoError(t, err)
	worker := project(t).Services["worker"]
	for _, m := range regexp.MustCompile(`os\.Getenv\("(REFIT_[A-Z_]+)"\)`).FindAllStringSubmatch(string(source), -1) {
		require.Contains(t, worker.Environment, m[1])
	}
	require.Equal(t, "temporal:7233", *worker.Environment["TEMPORAL_ADDRESS"])
	for _, v := range worker.Volumes {
		if v.Type == types.VolumeTypeVolume {
			require.True(t, strings.HasPrefix(strings.TrimPrefix(*worker.Environment["REFIT_ARTIFACTS"], "file://"), v.Target), "artifacts outlive the container")
		}
	}
}
