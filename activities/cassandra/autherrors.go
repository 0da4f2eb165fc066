package cassandra

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/refit-run/refit/activities/evidence"
	"github.com/refit-run/refit/activities/finding"
	"github.com/refit-run/refit/activities/kube"
)

// Service names the Deployment of a service that logs in to Cassandra.
type Service struct {
	Namespace  string `json:"namespace"`
	Deployment string `json:"deployment"`
	// Container may be left out where the pods have one.
	Container string `json:"container,omitempty"`
}

// AuthErrorsRequest counts refused logins in the logs of services.
type AuthErrorsRequest struct {
	Place
	Services []Service     `json:"services"`
	Within   time.Duration `json:"within"`
	// Limit is how long errors may take to fall out of the time looked at.
	Limit time.Duration `json:"limit"`
}

// AuthErrorsResult is the last look.
type AuthErrorsResult struct {
	OK bool `json:"ok"`
	// Pods is how many were read; Absent are Deployments that nobody has.
	Pods     int               `json:"pods"`
	Absent   []string          `json:"absent,omitempty"`
	Findings []finding.Finding `json:"findings,omitempty"`
	Evidence evidence.Trail    `json:"evidence"`
}

// authError is what the guide greps for, in lower case.
const authError = "authenticationexception"

// AuthErrors is the activity cassandra.AuthErrors (N146): it looks until no
// service has logged a refused login for so long.
func (a *Activities) AuthErrors(ctx context.Context, r AuthErrorsRequest) (out AuthErrorsResult, err error) {
	c, err := a.open(ctx, r.Place)
	if err != nil {
		return out, err
	}
	defer c.close()
	err = c.record.Until(ctx, r.Limit, 5*c.a.pace(), func(ctx context.Context) (evidence.Look, error) {
		trail := out.Evidence
		out = AuthErrorsResult{Evidence: trail}
		for _, s := range r.Services {
			pods, err := c.running(ctx, s)
			if apierrors.IsNotFound(err) {
				out.Absent = append(out.Absent, s.Namespace+"/"+s.Deployment)
				continue
			}
			if err != nil {
				return evidence.Look{}, kube.Wrap(err, "pods of Deployment/"+s.Namespace+"/"+s.Deployment)
			}
			for _, p := range pods {
				out.Pods++
				wrong, err := c.refusals(ctx, &p, s.Container, r.Within)
				if err != nil {
					return evidence.Look{}, err
				}
				out.Findings = append(out.Findings, wrong...)
			}
		}
		out.OK = len(out.Findings) == 0
		return evidence.Look{Done: out.OK, Found: evidence.InWords(out.Findings), Entries: out.Pods, Seen: out}, nil
	})
	out.Findings = evidence.Shown(out.Findings)
	out.Evidence = c.record.Trail
	return out, err
}

// running are the pods of a service that run.
func (c *cluster) running(ctx context.Context, s Service) ([]corev1.Pod, error) {
	deployment, err := c.client.Typed.AppsV1().Deployments(s.Namespace).Get(ctx, s.Deployment, metav1.GetOptions{})
	if err != nil {
		return nil, err
	}
	selector, err := metav1.LabelSelectorAsSelector(deployment.Spec.Selector)
	if err != nil {
		return nil, err
	}
	pods, err := c.client.Typed.CoreV1().Pods(s.Namespace).List(ctx, metav1.ListOptions{LabelSelector: selector.String()})
	if err != nil {
		return nil, err
	}
	return slices.DeleteFunc(pods.Items, func(p corev1.Pod) bool { return p.Status.Phase != corev1.PodRunning }), nil
}

// refusals is what speaks against a pod. One that is gone since it was listed
// has another in its place, which only the next look reads.
func (c *cluster) refusals(ctx context.Context, p *corev1.Pod, container string, within time.Duration) ([]finding.Finding, error) {
	f := finding.Finding{Row: "N146", Object: fmt.Sprintf("log of Pod/%s/%s", p.Namespace, p.Name), Expected: fmt.Sprintf("no AuthenticationException in the last %s", within)}
	n, err := c.count(ctx, p, container, within)
	switch {
	case apierrors.IsNotFound(err):
		f.Found, f.Next = "the pod is gone", "retry when the service's pods stay"
	case err != nil:
		return nil, kube.Wrap(err, f.Object)
	case n > 0:
		f.Found, f.Next = fmt.Sprint(n), "see which role is refused on which member; a service that holds an old password must be restarted"
	default:
		return nil, nil
	}
	return []finding.Finding{f}, nil
}

// count reads a pod's log of the last while. Its lines stay here: they may hold
// anything.
func (c *cluster) count(ctx context.Context, p *corev1.Pod, container string, within time.Duration) (int, error) {
	seconds := int64(within.Seconds())
	stream, err := c.client.Typed.CoreV1().Pods(p.Namespace).GetLogs(p.Name, &corev1.PodLogOptions{Container: container, SinceSeconds: &seconds}).Stream(ctx)
	if err != nil {
		return 0, err
	}
	defer stream.Close()
	return countErrors(stream)
}

// countErrors counts lines, each in pieces: nothing bounds what a service writes
// as one.
func countErrors(log io.Reader) (int, error) {
	pieces := bufio.NewReaderSize(log, 64<<10)
	n, found, before := 0, false, ""
	for {
		piece, part, err := pieces.ReadLine()
		switch {
		case errors.Is(err, io.EOF):
			return n, nil
		case err != nil:
			return n, err
		}
		text := before + strings.ToLower(string(piece))
		found = found || strings.Contains(text, authError)
		if before = text[max(0, len(text)-len(authError)):]; part {
			continue
		}
		if found {
			n++
		}
		found, before = false, ""
	}
}
