// refit-kube is a Kubernetes control plane in one program: etcd, API server,
// controller-manager and scheduler, one per subcommand. It is a binary of its
// own because it links all of Kubernetes; refit-sandbox starts it.
package main

import (
	"fmt"
	"os"

	_ "time/tzdata" // schedules of CronJobs name time zones

	"github.com/spf13/cobra"
	"k8s.io/component-base/cli"
	_ "k8s.io/component-base/metrics/prometheus/clientgo" // metrics of the clients
	_ "k8s.io/component-base/metrics/prometheus/version"  // build_info
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
	controllers "k8s.io/kubernetes/cmd/kube-controller-manager/app"
	scheduler "k8s.io/kubernetes/cmd/kube-scheduler/app"
)

func main() {
	if len(os.Args) < 2 {
		usage()
	}
	var command *cobra.Command
	switch os.Args[1] {
	case "etcd":
		command = etcdCommand()
	case "apiserver":
		command = apiserver.NewAPIServerCommand()
	case "controller-manager":
		command = controllers.NewControllerManagerCommand()
	case "scheduler":
		command = scheduler.NewSchedulerCommand()
	default:
		usage()
	}
	// The commands of Kubernetes read os.Args themselves.
	os.Args = append([]string{"kube-" + os.Args[1]}, os.Args[2:]...)
	os.Exit(cli.Run(command))
}

func usage() {
	fmt.Fprintln(os.Stderr, "usage: refit-kube etcd|apiserver|controller-manager|scheduler [flags]")
	os.Exit(2)
}
