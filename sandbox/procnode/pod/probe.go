package pod

import (
	"context"
	"fmt"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/kubernetes/pkg/probe"
	httpprobe "k8s.io/kubernetes/pkg/probe/http"
	tcpprobe "k8s.io/kubernetes/pkg/probe/tcp"
)

var (
	httpProber = httpprobe.New(false)
	tcpProber  = tcpprobe.New()
)

// probe starts the container's probes: the others begin when the startup probe
// has succeeded.
func (c *container) probe(ctx context.Context, group *sync.WaitGroup) {
	if c.init {
		return
	}
	p := c.pod
	p.mu.Lock()
	up := c.startedOK
	p.mu.Unlock()
	if c.spec.StartupProbe == nil || up {
		c.probeRunning(ctx, group)
		return
	}
	group.Go(func() {
		c.watch(ctx, c.spec.StartupProbe, "Startup", func(ok bool) bool {
			if !ok {
				c.ask("it failed its startup probe", c.graceOf(c.spec.StartupProbe))
				return false
			}
			p.update(func() { c.startedOK, c.ready = true, c.spec.ReadinessProbe == nil })
			c.probeRunning(ctx, group)
			return false
		})
	})
}

func (c *container) probeRunning(ctx context.Context, group *sync.WaitGroup) {
	if l := c.spec.LivenessProbe; l != nil {
		group.Go(func() {
			c.watch(ctx, l, "Liveness", func(ok bool) bool {
				if !ok {
					c.ask("it failed its liveness probe", c.graceOf(l))
				}
				return ok
			})
		})
	}
	if r := c.spec.ReadinessProbe; r != nil {
		group.Go(func() {
			c.watch(ctx, r, "Readiness", func(ok bool) bool {
				c.pod.update(func() { c.ready = ok })
				return true
			})
		})
	}
}

func (c *container) graceOf(p *corev1.Probe) time.Duration {
	if p.TerminationGracePeriodSeconds != nil {
		return time.Duration(*p.TerminationGracePeriodSeconds) * time.Second
	}
	c.pod.mu.Lock()
	defer c.pod.mu.Unlock()
	return c.pod.ownGrace()
}

// seconds is a probe's setting; the API server fills the defaults in.
func seconds(n int32) time.Duration { return time.Duration(max(n, 1)) * time.Second }

// watch probes until ctx ends or verdict says no more. verdict is told each
// time the probe's thresholds are passed in the other direction.
func (c *container) watch(ctx context.Context, p *corev1.Probe, kind string, verdict func(ok bool) (more bool)) {
	timer := time.NewTimer(time.Duration(p.InitialDelaySeconds) * time.Second)
	defer timer.Stop()
	var inARow int32
	var last, known, decided bool
	for {
		select {
		case <-ctx.Done():
			return
		case <-timer.C:
		}
		timer.Reset(seconds(p.PeriodSeconds))
		ok, message := c.once(ctx, p)
		if ctx.Err() != nil {
			return
		}
		if !ok {
			c.pod.event(corev1.EventTypeWarning, "Unhealthy", fmt.Sprintf("%s probe of container %s failed: %s", kind, c.name, message))
		}
		if ok != last {
			inARow = 0
		}
		last = ok
		inARow++
		threshold := p.FailureThreshold
		if ok {
			threshold = p.SuccessThreshold
		}
		if inARow < max(threshold, 1) || known && decided == ok {
			continue
		}
		known, decided = true, ok
		if !verdict(ok) {
			return
		}
	}
}

func (c *container) once(ctx context.Context, p *corev1.Probe) (bool, string) {
	timeout := seconds(p.TimeoutSeconds)
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	switch {
	case p.Exec != nil:
		return c.tryExec(ctx, p.Exec.Command)
	case p.HTTPGet != nil:
		return c.tryHTTP(ctx, p.HTTPGet)
	case p.TCPSocket != nil:
		host := p.TCPSocket.Host
		if host == "" {
			host = c.pod.ip.String()
		}
		port, err := probe.ResolveContainerPort(p.TCPSocket.Port, &c.spec)
		if err != nil {
			return false, err.Error()
		}
		return judge(tcpProber.Probe(host, port, timeout))
	}
	return false, "expected an exec, httpGet or tcpSocket probe, found another kind"
}

func (c *container) tryHTTP(ctx context.Context, get *corev1.HTTPGetAction) (bool, string) {
	request, err := httpprobe.NewRequestForHTTPGetAction(get, &c.spec, c.pod.ip.String(), "probe")
	if err != nil {
		return false, err.Error()
	}
	var timeout time.Duration
	if deadline, ok := ctx.Deadline(); ok {
		timeout = time.Until(deadline)
	}
	return judge(httpProber.Probe(request.WithContext(ctx), timeout))
}

func judge(result probe.Result, output string, err error) (bool, string) {
	if err != nil {
		return false, err.Error()
	}
	return result == probe.Success || result == probe.Warning, output
}
