package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/refit-run/refit/sandbox/agents"
	"github.com/refit-run/refit/sandbox/charts"
	"github.com/refit-run/refit/sandbox/controller"
	"github.com/refit-run/refit/sandbox/folder"
	"github.com/refit-run/refit/sandbox/process"
	"github.com/refit-run/refit/sandbox/world"
)

type upFlags struct {
	cluster, line, agents string
	nodes, gpus           int
	pools                 []string
	noTensorFusion        bool
	datastores            []string
	cassandraMembers      int
	readyAfter, validates time.Duration
	lease                 time.Duration
	untilExit             int
}

func upCommand(w *where) *cobra.Command {
	var u upFlags
	c := &cobra.Command{
		Use:   "up",
		Short: "Start the sandbox, or find that it runs",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			f, err := w.folder()
			if err != nil {
				return err
			}
			options, err := u.options(w.name)
			if err != nil {
				return err
			}
			if err := u.checkOwner(); err != nil {
				return err
			}
			return up(cmd.Context(), f, append(arguments(options), "--until-exit", strconv.Itoa(u.untilExit)), options)
		},
	}
	u.bind(c)
	return c
}

func (u *upFlags) bind(c *cobra.Command) {
	flags := c.Flags()
	flags.StringVar(&u.cluster, "cluster", "sandbox", "the cluster's name in plans and task queues")
	flags.IntVar(&u.nodes, "nodes", 8, "number of GPU nodes, spread evenly over the pools shared and training (ignored with --pools)")
	flags.IntVar(&u.gpus, "gpus", 8, "number of GPUs of a node")
	flags.StringSliceVar(&u.pools, "pools", nil, "pools with their sizes, such as shared=4,training=4")
	flags.StringVar(&u.line, "line", charts.Versions()[0], "TensorFusion chart version to install, or the controller line it brings (2.16)")
	flags.BoolVar(&u.noTensorFusion, "no-tensorfusion", false, "leave TensorFusion out")
	flags.DurationVar(&u.readyAfter, "ready-after", 300*time.Millisecond, "how long a hypervisor pod takes to become Ready")
	flags.DurationVar(&u.validates, "validate-takes", validateTakes, "how long a simulated GPU validation takes")
	flags.DurationVar(&u.lease, "lease", 15*time.Second, "how long the lease of a dead TensorFusion controller keeps the next one waiting (the double's; 15s as the real one's)")
	flags.StringSliceVar(&u.datastores, "datastores", nil, "bring datastores of an NVCF stack, servers as pods: all, or --datastores="+strings.Join(world.Datastores(), ","))
	flags.Lookup("datastores").NoOptDefVal = allDatastores
	flags.IntVar(&u.cassandraMembers, "cassandra-members", 1, "how many members Cassandra begins with, 1 or 3, where it is among the datastores")
	flags.IntVar(&u.untilExit, "until-exit", 0, "take the sandbox down once the process of this id has ended: that of a test or script which may be killed")
	flags.StringVar(&u.agents, "agents", folder.SimulatedAgents, "node agents: simulated, or real (refit-gpuagent on fake driver libraries, a process of about 40 MB per node)")
}

// validateTakes is the default length of a simulated validation.
const validateTakes = 200 * time.Millisecond

func (u *upFlags) options(name string) (folder.Options, error) {
	o := folder.Options{
		Name: name, Cluster: u.cluster, TensorFusion: !u.noTensorFusion, GPUs: u.gpus,
		ReadyAfter: u.readyAfter, ValidateTakes: u.validates, Lease: u.lease, Agents: u.agents,
		CassandraMembers: u.cassandraMembers,
	}
	var err error
	if o.Datastores, err = datastoresOf(u.datastores); err != nil {
		return o, err
	}
	if slices.Contains(o.Datastores, "cassandra") && u.cassandraMembers != 1 && u.cassandraMembers != 3 {
		return o, fmt.Errorf("--cassandra-members %d: expected 1 or 3", u.cassandraMembers)
	}
	if o.Chart, err = chartOf(u.line); err != nil {
		return o, err
	}
	if err := u.checkAgents(); err != nil {
		return o, err
	}
	if o.Controller, err = controller.Program(); err != nil {
		return o, err
	}
	if len(u.pools) == 0 {
		half := u.nodes / 2
		u.pools = []string{fmt.Sprintf("shared=%d", u.nodes-half), fmt.Sprintf("training=%d", half)}
	}
	for _, p := range u.pools {
		name, count, _ := strings.Cut(p, "=")
		n, err := strconv.Atoi(count)
		if err != nil || n < 0 || name == "" {
			return o, fmt.Errorf("pool %q: expected NAME=NODES", p)
		}
		o.Pools = append(o.Pools, folder.Pool{Name: name, Nodes: n})
	}
	return o, nil
}

// checkOwner refuses a process that is not there: the sandbox would go at once.
func (u *upFlags) checkOwner() error {
	if u.untilExit < 0 || u.untilExit > 0 && ended(u.untilExit) {
		return fmt.Errorf("--until-exit %d: expected the id of a process that runs", u.untilExit)
	}
	return nil
}

// checkAgents refuses what the chosen agents can't do.
func (u *upFlags) checkAgents() error {
	switch u.agents {
	case folder.SimulatedAgents:
	case folder.RealAgents:
		if u.gpus < 1 || u.gpus > agents.MaxFakeGPUs {
			return fmt.Errorf("--gpus %d: expected 1 to %d with --agents real", u.gpus, agents.MaxFakeGPUs)
		}
		if u.validates != validateTakes {
			return fmt.Errorf("--validate-takes %s: a real agent's validation takes what it takes; leave it out or use --agents simulated", u.validates)
		}
	default:
		return fmt.Errorf("--agents %q: expected simulated or real", u.agents)
	}
	return nil
}

// allDatastores is what --datastores means without a value.
const allDatastores = "all"

// datastoresOf refuses names that no sandbox knows.
func datastoresOf(names []string) ([]string, error) {
	known := world.Datastores()
	if len(names) == 1 && names[0] == allDatastores {
		return known, nil
	}
	var out []string
	for _, name := range names {
		if !slices.Contains(known, name) {
			return nil, fmt.Errorf("--datastores %q: expected %s or some of %s", name, allDatastores, strings.Join(known, ","))
		}
		out = append(out, name)
	}
	return out, nil
}

// chartOf accepts a chart version or the controller line that it installs.
func chartOf(line string) (string, error) {
	versions := charts.Versions()
	if slices.Contains(versions, line) {
		return line, nil
	}
	for _, v := range versions {
		for _, image := range charts.Images(v) {
			_, tag, ok := strings.Cut(image, "/tensor-fusion-operator:")
			if ok && (tag == line || strings.HasPrefix(tag, line+".")) {
				return v, nil
			}
		}
	}
	return "", fmt.Errorf("line %q: expected one of the charts %s or a controller line that one of them installs", line, strings.Join(versions, ", "))
}

// up starts the daemon detached, with these arguments of `run`, and shows its progress until it is ready.
func up(ctx context.Context, f folder.Folder, args []string, options folder.Options) error {
	if err := os.MkdirAll(f.Root, 0o700); err != nil {
		return err
	}
	lock, err := f.TryLock()
	if errors.Is(err, folder.ErrRunning) {
		fmt.Fprintf(os.Stderr, "sandbox %s is up already\n", f.Root)
		return printEnvironment(f)
	}
	if err != nil {
		return err
	}
	lock.Release()
	began := time.Now()
	daemon, lines, err := spawn(f, args, options.Name)
	if err != nil {
		return err
	}
	abandoned := context.AfterFunc(ctx, func() { _ = daemon.Process.Signal(syscall.SIGTERM) })
	defer abandoned()
	ready := false
	for lines.Scan() {
		if ready = lines.Text() == readyLine; ready {
			break
		}
		fmt.Fprintf(os.Stderr, "%5.1fs  %s\n", time.Since(began).Seconds(), lines.Text())
	}
	if !ready {
		_ = daemon.Wait()
		if ctx.Err() != nil {
			return errors.New("interrupted: the sandbox was stopped; `refit-sandbox down` removes its folder")
		}
		return fmt.Errorf("the sandbox ended before it was ready; its log %s ends with:\n%s", f.Path(daemonLog), process.Tail(f.Path(daemonLog)))
	}
	fmt.Fprintf(os.Stderr, "%5.1fs  sandbox %s is ready; for this shell: eval \"$(refit-sandbox env --name %s --dir %s)\"\n",
		time.Since(began).Seconds(), options.Name, options.Name, f.Root)
	if err := daemon.Process.Release(); err != nil {
		return err
	}
	return printEnvironment(f)
}

// spawn starts `run` in a session of its own; its progress comes over a pipe
// whose end tells at once that the daemon died.
func spawn(f folder.Folder, args []string, name string) (*exec.Cmd, *bufio.Scanner, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, nil, err
	}
	log, err := os.OpenFile(f.Path(daemonLog), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, nil, err
	}
	defer log.Close()
	read, write, err := os.Pipe()
	if err != nil {
		return nil, nil, err
	}
	defer write.Close()
	cmd := exec.Command(self, append([]string{"run", "--name", name, "--dir", f.Root}, args...)...)
	cmd.Stdout, cmd.Stderr, cmd.ExtraFiles = log, log, []*os.File{write}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		return nil, nil, fmt.Errorf("sandbox daemon: %w", err)
	}
	return cmd, bufio.NewScanner(read), nil
}

// arguments writes the options as flags of `run`.
func arguments(o folder.Options) []string {
	pools := make([]string, len(o.Pools))
	for i, p := range o.Pools {
		pools[i] = fmt.Sprintf("%s=%d", p.Name, p.Nodes)
	}
	return []string{
		"--cluster", o.Cluster, "--pools", strings.Join(pools, ","), "--line", o.Chart, "--gpus", strconv.Itoa(o.GPUs),
		fmt.Sprintf("--no-tensorfusion=%t", !o.TensorFusion), "--datastores=" + strings.Join(o.Datastores, ","), "--cassandra-members", strconv.Itoa(o.CassandraMembers),
		"--ready-after", o.ReadyAfter.String(), "--validate-takes", o.ValidateTakes.String(), "--lease", o.Lease.String(), "--agents", o.AgentKind(),
	}
}
