package procnode

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"fmt"
	"maps"
	"math/big"
	"net"
	"os"
	"runtime"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// kubeletVersion is what the node claims to run.
const kubeletVersion = "v1.37.2"

// object is the node as it registers itself. It is Ready from the start: were
// it not, even for a moment, a controller would mark the pods of a node that
// starts again as not Ready.
func (c Config) object() *corev1.Node {
	size := corev1.ResourceList{
		corev1.ResourceCPU: resource.MustParse("64"), corev1.ResourceMemory: resource.MustParse("256Gi"),
		corev1.ResourcePods:             *resource.NewQuantity(int64(c.Addresses), resource.DecimalSI),
		corev1.ResourceEphemeralStorage: resource.MustParse("1Ti"),
	}
	n := &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: c.Name, Labels: map[string]string{
			corev1.LabelHostname: c.Name, corev1.LabelOSStable: "linux", corev1.LabelArchStable: runtime.GOARCH, Label: "true",
		}},
		Spec: corev1.NodeSpec{Taints: []corev1.Taint{{Key: Taint, Value: "true", Effect: corev1.TaintEffectNoSchedule}}},
		Status: corev1.NodeStatus{
			Capacity: size, Allocatable: size,
			NodeInfo: corev1.NodeSystemInfo{
				KubeletVersion: kubeletVersion, OperatingSystem: "linux", Architecture: runtime.GOARCH,
				OSImage: "Refit sandbox", ContainerRuntimeVersion: "process://1.0",
			},
			Addresses: []corev1.NodeAddress{
				{Type: corev1.NodeInternalIP, Address: c.First.String()}, {Type: corev1.NodeExternalIP, Address: c.First.String()},
				{Type: corev1.NodeHostName, Address: c.Name},
			},
			DaemonEndpoints: corev1.NodeDaemonEndpoints{KubeletEndpoint: corev1.DaemonEndpoint{Port: kubeletPort}},
		},
	}
	maps.Copy(n.Labels, c.Labels)
	condition := func(kind corev1.NodeConditionType, status corev1.ConditionStatus, reason string) {
		n.Status.Conditions = append(n.Status.Conditions, corev1.NodeCondition{
			Type: kind, Status: status, Reason: reason, LastHeartbeatTime: metav1.Now(), LastTransitionTime: metav1.Now(),
		})
	}
	condition(corev1.NodeReady, corev1.ConditionTrue, "KubeletReady")
	condition(corev1.NodeMemoryPressure, corev1.ConditionFalse, "KubeletHasSufficientMemory")
	condition(corev1.NodeDiskPressure, corev1.ConditionFalse, "KubeletHasNoDiskPressure")
	condition(corev1.NodePIDPressure, corev1.ConditionFalse, "KubeletHasSufficientPID")
	return n
}

// tls is a certificate made for this run, which the API server does not check,
// and the demand for one that the sandbox signed: exec is not for everybody on
// this machine.
func (c Config) tls() (*tls.Config, error) {
	ca, err := os.ReadFile(c.ClientCA)
	if err != nil {
		return nil, fmt.Errorf("process node: client CA: %w", err)
	}
	clients := x509.NewCertPool()
	if !clients.AppendCertsFromPEM(ca) {
		return nil, fmt.Errorf("process node: client CA %s: expected PEM certificates, found none", c.ClientCA)
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: c.Name}, IPAddresses: []net.IP{c.First.AsSlice()},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().AddDate(1, 0, 0),
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		return nil, err
	}
	return &tls.Config{
		Certificates: []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: key}}, MinVersion: tls.VersionTLS12,
		ClientCAs: clients, ClientAuth: tls.RequireAndVerifyClientCert,
	}, nil
}
