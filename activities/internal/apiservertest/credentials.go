//go:build linux

package apiservertest

import (
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"time"

	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
)

// token is the administrator's; it opens a server on loopback for one test run.
const token = "fake-administrator-token-for-tests"

// writeCredentials writes a self-signed serving certificate, the token file
// and the kubeconfig.
func writeCredentials(folder string, port int, kubeconfig string) error {
	key, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		return err
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "refit-test"},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(24 * time.Hour),
		KeyUsage: x509.KeyUsageDigitalSignature | x509.KeyUsageKeyEncipherment | x509.KeyUsageCertSign, IsCA: true, BasicConstraintsValid: true,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1), net.IPv4(10, 96, 0, 1)}, DNSNames: []string{"localhost"},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		return err
	}
	certificate := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
	for name, data := range map[string][]byte{
		"server.crt": certificate,
		"server.key": pem.EncodeToMemory(&pem.Block{Type: "RSA PRIVATE KEY", Bytes: x509.MarshalPKCS1PrivateKey(key)}),
		"tokens.csv": []byte(token + `,admin,admin,"system:masters"` + "\n" + token + "-nobody,nobody,nobody\n"),
	} {
		if err := os.WriteFile(filepath.Join(folder, name), data, 0o600); err != nil {
			return err
		}
	}
	config := clientcmdapi.NewConfig()
	config.Clusters[Context] = &clientcmdapi.Cluster{Server: fmt.Sprintf("https://127.0.0.1:%d", port), CertificateAuthorityData: certificate}
	config.AuthInfos["admin"] = &clientcmdapi.AuthInfo{Token: token}
	config.AuthInfos["nobody"] = &clientcmdapi.AuthInfo{Token: token + "-nobody"}
	config.Contexts[Context] = &clientcmdapi.Context{Cluster: Context, AuthInfo: "admin"}
	config.Contexts[NobodyContext] = &clientcmdapi.Context{Cluster: Context, AuthInfo: "nobody"}
	return clientcmd.WriteToFile(*config, kubeconfig)
}

// NobodyContext is a context of a user without any permission, of servers that
// this package started.
const NobodyContext = "nobody"
