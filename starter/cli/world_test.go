package cli_test

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.temporal.io/sdk/client"
	"go.temporal.io/sdk/worker"
	"go.temporal.io/sdk/workflow"

	"github.com/refit-run/refit/starter/cli"
	"github.com/refit-run/refit/starter/planfile"
	"github.com/refit-run/refit/tests/freeport"
	"github.com/refit-run/refit/tests/temporaltest"
	"github.com/refit-run/refit/workflows/protocol"
)

// world is one dev server with a worker that runs the stand-in, shared by the
// tests of this package.
var world struct {
	temporal string // the CLI
	address  string
	client   client.Client
	missing  string // why there is none
}

// actAsRefit makes the test binary the refit binary, for shells.
const actAsRefit = "REFIT_TEST_ACT_AS_REFIT"

func TestMain(m *testing.M) {
	if os.Getenv(actAsRefit) != "" {
		os.Exit(cli.Main(context.Background(), app(os.Getenv, func() (int, int) { return 0, 0 }, os.Stdout, os.Stderr), os.Args[1:]))
	}
	if filepath.Base(os.Args[0]) == "refit-worker" {
		os.Exit(actAsWorker())
	}
	stop := func() {}
	if world.temporal = temporaltest.Binary(); world.temporal == "" {
		world.missing = temporaltest.Missing
		fmt.Println("skipped: tests against a server:", world.missing)
	} else {
		stop = startWorld()
	}
	code := m.Run()
	stop()
	os.Exit(code)
}

func startWorld() (stop func()) {
	server, err := temporaltest.Serve(world.temporal)
	if err != nil {
		panic(err)
	}
	world.address, world.client = server.Address, server.Client
	w := toyWorker(world.client)
	if err := w.Start(); err != nil {
		panic(err)
	}
	return func() {
		w.Stop()
		server.Stop()
	}
}

func toyWorker(c client.Client) worker.Worker {
	w := worker.New(c, protocol.TaskQueue, worker.Options{})
	for _, name := range []string{protocol.TensorFusionUpgrade, protocol.TensorFusionRollback, protocol.Rollout} {
		w.RegisterWorkflowWithOptions(standIn, workflow.RegisterOptions{Name: name})
	}
	return w
}

// actAsWorker makes the test binary the worker that `refit up` starts.
func actAsWorker() int {
	if strings.Contains(os.Getenv("REFIT_CLUSTERS"), "broken=") {
		fmt.Fprintln(os.Stderr, "cluster broken: no such context")
		return 1
	}
	c, err := client.Dial(client.Options{HostPort: os.Getenv("TEMPORAL_ADDRESS")})
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer c.Close()
	if err := toyWorker(c).Run(worker.InterruptCh()); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

// freePorts are n ports as flags take them.
func freePorts(n int) []string {
	ports, err := freeport.Get(n)
	if err != nil {
		panic(err)
	}
	var out []string
	for _, p := range ports {
		out = append(out, strconv.Itoa(p))
	}
	return out
}

func needWorld(t *testing.T) {
	t.Helper()
	if world.missing != "" {
		t.Skip(world.missing)
	}
}

// outcome is what a person sees of one command line.
type outcome struct {
	code     int
	out, err string
}

// environment is what commands see; tests add to it.
func environment(t *testing.T, extra ...string) func(string) string {
	env := map[string]string{"TEMPORAL_ADDRESS": world.address, "USER": "ann", "XDG_STATE_HOME": t.TempDir()}
	for _, e := range extra {
		k, v, _ := strings.Cut(e, "=")
		env[k] = v
	}
	return func(k string) string { return env[k] }
}

func refit(t *testing.T, args ...string) outcome {
	t.Helper()
	return refitWith(t, environment(t), nil, args...)
}

func refitWith(t *testing.T, getenv func(string) string, size func() (int, int), args ...string) outcome {
	t.Helper()
	// The profile library reads the process environment itself.
	t.Setenv("TEMPORAL_ADDRESS", getenv("TEMPORAL_ADDRESS"))
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	if size == nil {
		size = func() (int, int) { return 0, 0 }
	}
	var out, errs bytes.Buffer
	code := cli.Main(ctx, app(getenv, size, &out, &errs), args)
	return outcome{code, out.String(), errs.String()}
}

func app(getenv func(string) string, size func() (int, int), out, errs io.Writer) cli.App {
	return cli.App{
		Kinds:  []planfile.Kind{toyKind(protocol.TensorFusionUpgrade), toyKind(protocol.TensorFusionRollback)},
		In:     strings.NewReader(""),
		Out:    out,
		Err:    errs,
		Getenv: getenv,
		Size:   size,
	}
}

// planFile writes a plan of the stand-in; its object is the test's own, so
// that runs of other tests don't meet it.
func planFile(t *testing.T, course string, more ...string) (file, id string) {
	t.Helper()
	object := strings.ToLower(strings.NewReplacer("/", "-", "_", "-").Replace(t.Name()))
	content := fmt.Sprintf("kind: TensorFusionUpgrade\ncluster: prod\nobject: %s\ncourse: %s\n%s", object, course, strings.Join(more, "\n"))
	file = filepath.Join(t.TempDir(), "plan.yaml")
	require.NoError(t, os.WriteFile(file, []byte(content), 0o600))
	id = "TensorFusionUpgrade.prod." + object
	t.Cleanup(func() {
		_ = world.client.TerminateWorkflow(context.Background(), id, "", "end of test")
		_ = world.client.TerminateWorkflow(context.Background(), id+".plan", "", "end of test")
	})
	return file, id
}

// How long and how often tests look at what happens by itself.
const (
	waitLimit = 20 * time.Second
	waitStep  = 50 * time.Millisecond
)
