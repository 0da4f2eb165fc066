// Package secret reads values that plans only refer to, from where they lie
// when they are needed. A value must never leave the activity that asked for
// it: not by its result, an error, a log or a file.
package secret

import (
	"context"
	"fmt"
	"os"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/refit-run/refit/activities/finding"
	"github.com/refit-run/refit/activities/kube"
)

// Reference names where a value is: a key of a Secret in the system's
// namespace, or a file or an environment variable of the worker.
type Reference struct {
	Secret   string `json:"secret,omitempty"`
	Key      string `json:"key,omitempty"`
	File     string `json:"file,omitempty"`
	Variable string `json:"variable,omitempty"`
}

func (r Reference) String() string {
	switch {
	case r.Secret != "":
		return fmt.Sprintf("key %s of Secret %s", r.Key, r.Secret)
	case r.File != "":
		return "file " + r.File
	}
	return "variable " + r.Variable
}

// Read returns the value; purpose names in errors what it is for.
func (r Reference) Read(ctx context.Context, c *kube.Client, namespace, purpose string) ([]byte, error) {
	missing := func(found string) error {
		return finding.Finding{Object: purpose, Expected: "a value in " + r.String(), Found: found,
			Next: "correct the reference in the plan, or put the value there"}.Error(finding.Stop)
	}
	switch {
	case r.Secret != "":
		secret, err := c.Typed.CoreV1().Secrets(namespace).Get(ctx, r.Secret, metav1.GetOptions{})
		if err != nil {
			return nil, kube.Wrap(err, fmt.Sprintf("Secret/%s/%s", namespace, r.Secret))
		}
		if len(secret.Data[r.Key]) == 0 {
			return nil, missing("no such key, or an empty one")
		}
		return secret.Data[r.Key], nil
	case r.File != "":
		data, err := os.ReadFile(r.File)
		if err != nil {
			return nil, missing(err.Error())
		}
		return data, nil
	}
	if value := os.Getenv(r.Variable); value != "" {
		return []byte(value), nil
	}
	return nil, missing("none")
}
