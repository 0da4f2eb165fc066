package sandbox

import (
	"context"
	"fmt"
	"net"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// DialPod connects to a port of the pod that has the name now: a pod of the
// process node has a loopback address of its own. The product goes through the
// API server instead.
func (s *Sandbox) DialPod(ctx context.Context, namespace, name string, port int) (net.Conn, error) {
	p, err := s.Kube.CoreV1().Pods(namespace).Get(ctx, name, metav1.GetOptions{})
	if err != nil {
		return nil, err
	}
	if p.Status.PodIP == "" || p.DeletionTimestamp != nil {
		return nil, fmt.Errorf("pod %s/%s: expected an address, found %s", namespace, name, p.Status.Phase)
	}
	return new(net.Dialer).DialContext(ctx, "tcp", net.JoinHostPort(p.Status.PodIP, fmt.Sprint(port)))
}
