package tensorfusion

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"

	"github.com/refit-run/refit/activities/finding"
	"github.com/refit-run/refit/activities/kube"
)

// SecretReference puts a secret at a dotted values path: a Secret's key, the
// content of a file of the worker without its last line break, or a variable of
// the worker whose name begins with SecretVariable.
type SecretReference struct {
	Path      string `json:"path"`
	Namespace string `json:"namespace,omitempty"`
	Secret    string `json:"secret,omitempty"`
	Key       string `json:"key,omitempty"`
	File      string `json:"file,omitempty"`
	Variable  string `json:"variable,omitempty"`
}

// SecretVariable begins the name of every variable that a plan may refer to, so
// that no plan reads the worker's own.
const SecretVariable = "REFIT_SECRET_"

// Problem says what is wrong with the reference, "" when nothing is.
func (r SecretReference) Problem() string {
	kinds := 0
	for _, given := range []bool{r.Namespace+r.Secret+r.Key != "", r.File != "", r.Variable != ""} {
		if given {
			kinds++
		}
	}
	switch {
	case r.Path == "":
		return "has no path: name the dotted path of the value"
	case kinds != 1:
		return "must name exactly one of: namespace, secret and key; file; variable"
	case r.File == "" && r.Variable == "" && (r.Namespace == "" || r.Secret == "" || r.Key == ""):
		return "needs namespace, secret and key"
	case r.Variable != "" && !strings.HasPrefix(r.Variable, SecretVariable):
		return "names the variable " + r.Variable + ": want one that begins with " + SecretVariable
	}
	return ""
}

// readValues reads a values file of the worker; none when no file is named.
func readValues(file string) (map[string]any, error) {
	if file == "" {
		return nil, nil
	}
	var values map[string]any
	data, err := os.ReadFile(file)
	if err == nil {
		err = yaml.Unmarshal(data, &values)
	}
	if err != nil {
		return nil, finding.Finding{Object: "values file " + file, Expected: "YAML that the worker can read", Found: unquoted(err),
			Next: "put the file on every worker of this cluster, under this path, then retry"}.Error(finding.Stop)
	}
	return values, nil
}

// unquoted is an error about a file that may hold secrets: what a parser quotes
// from it is left out.
func unquoted(err error) string {
	var path *os.PathError
	if errors.As(err, &path) {
		return path.Err.Error()
	}
	return "no valid YAML"
}

// read fetches what the reference names.
func (ref SecretReference) read(ctx context.Context, c *kube.Client) (string, error) {
	missing := func(object, expected, found, next string) error {
		return finding.Finding{Object: object, Expected: expected + " for value " + ref.Path, Found: found, Next: next}.Error(finding.Stop)
	}
	const correct = "correct values.secrets in the plan, or "
	switch {
	case ref.Problem() != "":
		return "", missing("plan, values.secrets", "a reference", ref.Problem(), "correct it and start anew")
	case ref.File != "":
		data, err := os.ReadFile(ref.File)
		if err != nil {
			return "", missing("file "+ref.File+" of the worker", "a file that it can read", unquoted(err), correct+"put the file on every worker of this cluster")
		}
		return strings.TrimSuffix(string(data), "\n"), nil
	case ref.Variable != "":
		value, ok := os.LookupEnv(ref.Variable)
		if !ok {
			return "", missing("variable "+ref.Variable+" of the worker", "a value", "it is not set", correct+"set it for every worker of this cluster")
		}
		return value, nil
	}
	object := fmt.Sprintf("Secret/%s/%s", ref.Namespace, ref.Secret)
	secret, err := c.Typed.CoreV1().Secrets(ref.Namespace).Get(ctx, ref.Secret, metav1.GetOptions{})
	if err != nil {
		return "", kube.Wrap(err, object+" for value "+ref.Path)
	}
	value, ok := secret.Data[ref.Key]
	if !ok {
		return "", missing(object, "key "+ref.Key, "no such key", correct+"add the key to the Secret")
	}
	return string(value), nil
}
