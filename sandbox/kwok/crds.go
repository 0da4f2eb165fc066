package kwok

import (
	"context"
	"fmt"
	"strings"

	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	apiextensions "k8s.io/apiextensions-apiserver/pkg/client/clientset/clientset"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
	toolswatch "k8s.io/client-go/tools/watch"
	"sigs.k8s.io/kwok/kustomize/crd"
	"sigs.k8s.io/yaml"
)

// ApplyCRDs installs the two custom resources that map port-forwards of fake
// pods to local addresses, and waits until they are served.
func ApplyCRDs(ctx context.Context, cfg *rest.Config) error {
	client, err := apiextensions.NewForConfig(cfg)
	if err != nil {
		return err
	}
	pending := map[string]bool{}
	for _, manifest := range [][]byte{crd.PortForward, crd.ClusterPortForward} {
		var object apiextensionsv1.CustomResourceDefinition
		if err := yaml.Unmarshal(manifest, &object); err != nil {
			return fmt.Errorf("kwok CRD: %w", err)
		}
		_, err := client.ApiextensionsV1().CustomResourceDefinitions().Create(ctx, &object, metav1.CreateOptions{})
		if err != nil && !apierrors.IsAlreadyExists(err) {
			return fmt.Errorf("CRD %s: %w", object.Name, err)
		}
		pending[object.Name] = true
	}
	lw := cache.NewListWatchFromClient(client.ApiextensionsV1().RESTClient(), "customresourcedefinitions", metav1.NamespaceAll, fields.Everything())
	_, err = toolswatch.UntilWithSync(ctx, lw, &apiextensionsv1.CustomResourceDefinition{}, nil, func(e watch.Event) (bool, error) {
		object, ok := e.Object.(*apiextensionsv1.CustomResourceDefinition)
		if !ok {
			return false, nil
		}
		for _, c := range object.Status.Conditions {
			if c.Type == apiextensionsv1.Established && c.Status == apiextensionsv1.ConditionTrue {
				delete(pending, object.Name)
			}
		}
		return len(pending) == 0, nil
	})
	if err != nil {
		names := make([]string, 0, len(pending))
		for name := range pending {
			names = append(names, name)
		}
		return fmt.Errorf("CRDs %s: expected Established: %w", strings.Join(names, ", "), err)
	}
	return nil
}
