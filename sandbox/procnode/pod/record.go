package pod

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/refit-run/refit/sandbox/folder"
	"github.com/refit-run/refit/sandbox/procnode/proc"
)

// recordFile lies in the pod's folder: what a new node process must know to
// find the processes of the old one.
const recordFile = "record.json"

type podRecord struct {
	Pod        *corev1.Pod                                     `json:"pod"`
	IP         netip.Addr                                      `json:"ip"`
	Started    metav1.Time                                     `json:"started"`
	Volumes    map[string]string                               `json:"volumes,omitempty"`
	Conditions map[corev1.PodConditionType]corev1.PodCondition `json:"conditions,omitempty"`
	Containers map[string]containerRecord                      `json:"containers"`
}

type containerRecord struct {
	Process   proc.ID               `json:"process"`
	Restarts  int32                 `json:"restarts"`
	State     corev1.ContainerState `json:"state"`
	Last      corev1.ContainerState `json:"last"`
	Ready     bool                  `json:"ready,omitempty"`
	StartedOK bool                  `json:"startedOK,omitempty"`
	Finished  bool                  `json:"finished,omitempty"`
}

// save replaces the record; callers hold the lock.
func (p *Pod) save() error {
	if p.frozen {
		return nil
	}
	r := podRecord{
		Pod: p.object, IP: p.ip, Started: p.started, Volumes: p.volumes, Conditions: p.conditions, Containers: map[string]containerRecord{},
	}
	for _, c := range p.containers {
		r.Containers[c.name] = containerRecord{
			Process: c.id, Restarts: c.restarts, State: c.state, Last: c.last, Ready: c.ready, StartedOK: c.startedOK, Finished: c.finished,
		}
	}
	data, err := json.Marshal(r)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(p.dir, 0o700); err != nil {
		return err
	}
	return folder.WriteFile(filepath.Join(p.dir, recordFile), data, 0o600)
}

// Load finds the pod that an earlier node process left in the folder, with the
// processes of its that still run. Those that died meanwhile count as
// restarted, as after a reboot, or have ended where the policy is Never.
func Load(host *Host, dir string) (*Pod, error) {
	data, err := os.ReadFile(filepath.Join(dir, recordFile))
	if err != nil {
		return nil, fmt.Errorf("record of a pod: %w", err)
	}
	var r podRecord
	if err := json.Unmarshal(data, &r); err != nil || r.Pod == nil {
		return nil, fmt.Errorf("record %s: expected a pod, found none: %w", filepath.Join(dir, recordFile), err)
	}
	p := New(host, r.Pod, dir, r.IP)
	p.started, p.volumes = r.Started, r.Volumes
	if r.Conditions != nil {
		p.conditions = r.Conditions
	}
	for _, c := range p.containers {
		known, ok := r.Containers[c.name]
		if !ok {
			continue
		}
		c.restarts, c.state, c.last, c.finished = known.Restarts, known.State, known.Last, known.Finished
		switch {
		case c.finished:
		case known.Process.Alive():
			c.id, c.ready, c.startedOK = known.Process, known.Ready, known.StartedOK
		case c.state.Running != nil:
			c.died()
		default:
			// It was between two lives.
			c.again = c.state.Terminated != nil || c.last.Terminated != nil
		}
	}
	p.transition()
	return p, nil
}

// died notes a process whose end nobody saw.
func (c *container) died() {
	over := corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{
		ExitCode: unknownExit, Reason: "ContainerStatusUnknown", Message: "the process ended while the node was away",
		StartedAt: c.state.Running.StartedAt, FinishedAt: metav1.Now(),
	}}
	if c.pod.object.Spec.RestartPolicy == corev1.RestartPolicyNever {
		c.state, c.finished = over, true
		if err := c.sweep(); err != nil { // what starts again does it then
			c.pod.log.Error("a container left processes behind", "container", c.name, "error", err)
		}
		return
	}
	c.last = over
	c.state = corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: "ContainerCreating"}}
	c.restarts++
}

// Discard ends what a folder without a readable record may have running and
// removes it. The folder is named for the pod's UID.
func Discard(dir string) error {
	if err := proc.End(podMark, filepath.Base(dir)); err != nil {
		return err
	}
	return os.RemoveAll(dir)
}
