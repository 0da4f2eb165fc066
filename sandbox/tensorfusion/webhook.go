package tensorfusion

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"net"
	"net/http"
	"strings"
	"time"

	admissionv1 "k8s.io/api/admission/v1"
	admissionregistrationv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/refit-run/refit/sandbox/tensorfusion/machine"
)

const (
	webhookPath   = "/mutate-v1-pod"
	webhookSuffix = "-mutating-webhook"
	webhookSecret = "tensor-fusion-webhook-secret"
)

// authority signs the webhook's certificate; it lives as long as the double.
type authority struct {
	bundle      []byte
	certificate tls.Certificate
	pem, key    []byte
}

// createAuthority makes a new CA: the bundle is patched into the webhook
// configuration whenever it differs, so none needs to be kept.
func (d *Double) createAuthority() error {
	now := d.clock.Now()
	caKey, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return err
	}
	template := x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "tensor-fusion-sandbox-ca"},
		NotBefore: now.Add(-time.Hour), NotAfter: now.AddDate(10, 0, 0),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}
	caDER, err := x509.CreateCertificate(rand.Reader, &template, &template, caKey.Public(), caKey)
	if err != nil {
		return err
	}
	host, _, err := net.SplitHostPort(d.webhookAddr)
	if err != nil {
		return err
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return err
	}
	leaf := x509.Certificate{
		SerialNumber: big.NewInt(2), Subject: pkix.Name{CommonName: host},
		NotBefore: template.NotBefore, NotAfter: template.NotAfter,
		IPAddresses: []net.IP{net.ParseIP(host)}, KeyUsage: x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	}
	leafDER, err := x509.CreateCertificate(rand.Reader, &leaf, &template, key.Public(), caKey)
	if err != nil {
		return err
	}
	d.ca.bundle = pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: caDER})
	keyDER, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return err
	}
	d.ca.pem = pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: leafDER})
	d.ca.key = pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: keyDER})
	d.ca.certificate = tls.Certificate{Certificate: [][]byte{leafDER}, PrivateKey: key}
	return nil
}

// createWebhookSecret does what the chart's first hook Job does: it makes the
// Secret when there is none and never renews it.
func (d *Double) createWebhookSecret(ctx context.Context) error {
	_, err := d.client.CoreV1().Secrets(d.options.Namespace).Create(ctx, &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{Name: webhookSecret},
		Data:       map[string][]byte{"ca": d.ca.bundle, "cert": d.ca.pem, "key": d.ca.key},
	}, metav1.CreateOptions{})
	if apierrors.IsAlreadyExists(err) {
		return nil
	}
	return err
}

// reconcileWebhook does what the chart's hook Jobs do: it writes the CA into a
// configuration that points at this double.
func (d *Double) reconcileWebhook(ctx context.Context, key string) (time.Duration, error) {
	o, ok, err := d.caches.webhooks.GetStore().GetByKey(key)
	if err != nil || !ok || !strings.HasSuffix(key, webhookSuffix) {
		return 0, err
	}
	var patch []map[string]any
	for i, w := range o.(*admissionregistrationv1.MutatingWebhookConfiguration).Webhooks {
		if w.ClientConfig.URL == nil || *w.ClientConfig.URL != d.WebhookURL() || bytes.Equal(w.ClientConfig.CABundle, d.ca.bundle) {
			continue
		}
		patch = append(patch, map[string]any{
			"op": "add", "path": fmt.Sprintf("/webhooks/%d/clientConfig/caBundle", i), "value": d.ca.bundle,
		})
	}
	if patch == nil {
		return 0, nil
	}
	data, err := json.Marshal(patch)
	if err != nil {
		return 0, err
	}
	if err := d.createWebhookSecret(ctx); err != nil {
		return 0, err
	}
	_, err = d.client.AdmissionregistrationV1().MutatingWebhookConfigurations().Patch(ctx, key, types.JSONPatchType, data, metav1.PatchOptions{})
	return 0, err
}

func (d *Double) serveWebhook(ctx context.Context) error {
	mux := http.NewServeMux()
	mux.HandleFunc("POST "+webhookPath, d.admit)
	listener := tls.NewListener(d.webhook, &tls.Config{Certificates: []tls.Certificate{d.ca.certificate}, MinVersion: tls.VersionTLS12})
	return serve(ctx, listener, mux)
}

// serve answers until ctx ends.
func serve(ctx context.Context, listener net.Listener, handler http.Handler) error {
	server := &http.Server{Handler: handler, ReadHeaderTimeout: 10 * time.Second}
	stop := context.AfterFunc(ctx, func() { _ = server.Close() })
	defer stop()
	if err := server.Serve(listener); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}

// admit is the Pod webhook. Without a controller replica nobody answers.
func (d *Double) admit(w http.ResponseWriter, r *http.Request) {
	if d.election.alive() == 0 {
		http.Error(w, "no controller replica is ready", http.StatusServiceUnavailable)
		return
	}
	var review admissionv1.AdmissionReview
	if err := json.NewDecoder(r.Body).Decode(&review); err != nil || review.Request == nil {
		http.Error(w, "expected an AdmissionReview", http.StatusBadRequest)
		return
	}
	response := &admissionv1.AdmissionResponse{UID: review.Request.UID, Allowed: true}
	patch, err := d.inject(review.Request)
	if err != nil {
		response.Allowed = false
		response.Result = &metav1.Status{Message: err.Error(), Code: http.StatusForbidden}
	} else if patch != nil {
		kind := admissionv1.PatchTypeJSONPatch
		response.Patch, response.PatchType = patch, &kind
	}
	review.Request, review.Response = nil, response
	w.Header().Set("Content-Type", "application/json")
	if err := json.NewEncoder(w).Encode(review); err != nil {
		d.log.Info("webhook answer not sent", "error", err.Error())
	}
}

const (
	poolAnnotation     = group + "/gpupool"
	localGPUAnnotation = group + "/is-local-gpu"
)

// inject marks an application pod as a client of its pool and adds the library.
func (d *Double) inject(request *admissionv1.AdmissionRequest) ([]byte, error) {
	var pod corev1.Pod
	if err := json.Unmarshal(request.Object.Raw, &pod); err != nil {
		return nil, fmt.Errorf("pod: %w", err)
	}
	if pod.Labels[machine.EnabledLabel] != "true" {
		return nil, nil
	}
	pool, err := d.clientPool(pod.Annotations[poolAnnotation])
	if err != nil {
		return nil, err
	}
	hash, err := machine.ClientHash(&pool.Spec)
	if err != nil {
		return nil, err
	}
	component := "client"
	if pod.Annotations[localGPUAnnotation] == "true" {
		component = "worker"
	}
	image := ""
	if c := pool.Spec.ComponentConfig; c != nil && c.Client != nil {
		image = c.Client.RemoteModeImage
	}
	labels := map[string]string{}
	for key, value := range pod.Labels {
		labels[key] = value
	}
	labels[machine.PoolLabel], labels[machine.ComponentLabel], labels[machine.HashLabel] = pool.Name, component, hash
	containers := append(pod.Spec.InitContainers, corev1.Container{Name: "inject-lib", Image: image})
	return json.Marshal([]map[string]any{
		{"op": "add", "path": "/metadata/labels", "value": labels},
		{"op": "add", "path": "/spec/initContainers", "value": containers},
	})
}

// clientPool is the named pool or the default one.
func (d *Double) clientPool(name string) (*machine.Pool, error) {
	if name != "" {
		pool, err := d.pool(name)
		if err == nil && pool == nil {
			err = fmt.Errorf("GPUPool %q does not exist", name)
		}
		return pool, err
	}
	for _, u := range d.caches.list(poolResource) {
		if u.GetAnnotations()[defaultPoolAnnotation] == "true" {
			return d.pool(u.GetName())
		}
	}
	return nil, errors.New("no GPUPool is the default one: name it in the annotation " + poolAnnotation)
}
