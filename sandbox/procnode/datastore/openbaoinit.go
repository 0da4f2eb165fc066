package datastore

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/kubernetes"
)

// initialiseOpenBao does what the chart's job does after the installation: it
// initialises the first member, keeps key and token in their Secrets, and waits
// until the sidecars have unsealed all and one is active. Where the key is
// there already it only waits.
func initialiseOpenBao(ctx context.Context, kube kubernetes.Interface) error {
	secrets := kube.CoreV1().Secrets(OpenBaoNamespace)
	secret, err := secrets.Get(ctx, OpenBaoUnseal, metav1.GetOptions{})
	if err != nil {
		return err
	}
	if len(secret.Data[UnsealKey]) == 0 {
		var made struct {
			Keys  []string `json:"keys_base64"`
			Token string   `json:"root_token"`
		}
		shares := map[string]int{"secret_shares": 1, "secret_threshold": 1}
		if err := openbaoCall(ctx, kube, 0, http.MethodPut, "/v1/sys/init", shares, &made); err != nil {
			return fmt.Errorf("initialise OpenBao: %w", err)
		}
		// The token first: a cluster with a key counts as done.
		token := &corev1.Secret{
			ObjectMeta: metav1.ObjectMeta{Name: OpenBaoToken, Namespace: OpenBaoNamespace}, StringData: map[string]string{TokenKey: made.Token},
		}
		if _, err := secrets.Create(ctx, token, metav1.CreateOptions{}); err != nil && !apierrors.IsAlreadyExists(err) {
			return err
		}
		secret.Data = map[string][]byte{UnsealKey: []byte(made.Keys[0])}
		if _, err := secrets.Update(ctx, secret, metav1.UpdateOptions{}); err != nil {
			return err
		}
		if err := openbaoCall(ctx, kube, 0, http.MethodPut, "/v1/sys/unseal", map[string]string{"key": made.Keys[0]}, nil); err != nil {
			return fmt.Errorf("unseal the first member of OpenBao: %w", err)
		}
	}
	var last error
	err = wait.PollUntilContextCancel(ctx, 200*time.Millisecond, true, func(ctx context.Context) (bool, error) {
		last = openbaoWhole(ctx, kube)
		return last == nil, nil
	})
	return errors.Join(err, last)
}

// openbaoWhole says whether three members are unsealed and name one active one.
func openbaoWhole(ctx context.Context, kube kubernetes.Interface) error {
	address := ""
	for i := range 3 {
		var l struct {
			Address string `json:"leader_address"`
		}
		if err := openbaoCall(ctx, kube, i, http.MethodGet, "/v1/sys/leader", nil, &l); err != nil {
			return err
		}
		if l.Address == "" || address != "" && l.Address != address {
			return fmt.Errorf("member %d of OpenBao: expected it to name the same active member as the others, found %q", i, l.Address)
		}
		address = l.Address
	}
	return nil
}

const openbaoCallLimit = 10 * time.Second

// openbaoCall asks a member at its pod's address, which only this machine can
// reach.
func openbaoCall(ctx context.Context, kube kubernetes.Interface, member int, method, path string, body, into any) error {
	ctx, cancel := context.WithTimeout(ctx, openbaoCallLimit)
	defer cancel()
	name := OpenBaoServer + "-" + strconv.Itoa(member)
	pod, err := kube.CoreV1().Pods(OpenBaoNamespace).Get(ctx, name, metav1.GetOptions{})
	if err != nil {
		return err
	}
	if pod.Status.PodIP == "" {
		return fmt.Errorf("pod %s: expected an address, found none yet", name)
	}
	data, err := json.Marshal(body)
	if err != nil {
		return err
	}
	url := fmt.Sprintf("http://%s:%d%s", pod.Status.PodIP, openbaoAPI, path)
	request, err := http.NewRequestWithContext(ctx, method, url, bytes.NewReader(data))
	if err != nil {
		return err
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	if err != nil {
		return err
	}
	if response.StatusCode != http.StatusOK {
		return fmt.Errorf("%s of %s: expected 200, found %d: %s", path, name, response.StatusCode, bytes.TrimSpace(text))
	}
	if into == nil {
		return nil
	}
	return json.Unmarshal(text, into)
}
