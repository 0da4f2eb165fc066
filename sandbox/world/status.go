package world

import (
	"context"
	"os"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/refit-run/refit/sandbox/control"
	"github.com/refit-run/refit/sandbox/kwok"
)

// statusTimeout keeps `status` fast when the API server is down.
const statusTimeout = 3 * time.Second

// Status looks at everything now.
func (w *World) Status(ctx context.Context) control.Status {
	w.mu.Lock()
	ready := w.ready
	w.mu.Unlock()
	options := w.state.Options
	s := control.Status{
		Name: options.Name, Folder: w.folder.Root, Ready: ready, PID: os.Getpid(),
		Nodes: options.Nodes(), Chart: options.Chart, AgentKind: options.AgentKind(), Controller: options.Controller,
	}
	if !options.TensorFusion {
		s.Chart, s.Controller = "", ""
	}
	for _, k := range w.components() {
		s.Components = append(s.Components, k.Status())
	}
	if !ready {
		return s
	}
	s.Agents = w.fleet.Running()
	ctx, cancel := context.WithTimeout(ctx, statusTimeout)
	defer cancel()
	nodes, err := w.kube.CoreV1().Nodes().List(ctx, metav1.ListOptions{ResourceVersion: "0", LabelSelector: kwok.GPULabel})
	if err != nil {
		s.Notes = append(s.Notes, "nodes: "+err.Error())
		return s
	}
	for i := range nodes.Items {
		if kwok.IsReady(&nodes.Items[i]) {
			s.NodesReady++
		}
	}
	return s
}
