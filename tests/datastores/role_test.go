package datastores

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"

	"github.com/stretchr/testify/require"
	authorizationv1 "k8s.io/api/authorization/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/yaml"
)

// shipped is the user that the worker is in the cluster: it has the rights of
// deploy/worker/rbac.yaml and no other, so that every test proves that they are
// enough for the runs on datastores.
const shipped = "fake-refit-worker"

// asShipped makes the user and has the worker use it.
func (w *world) asShipped() {
	w.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	manifest, err := os.ReadFile(filepath.Join(w.Root, "deploy", "worker", "rbac.yaml"))
	require.NoError(w.t, err)
	var role rbacv1.ClusterRole
	for _, doc := range bytes.Split(manifest, []byte("\n---\n")) {
		var kind metav1.TypeMeta
		require.NoError(w.t, yaml.Unmarshal(doc, &kind))
		if kind.Kind == "ClusterRole" {
			require.NoError(w.t, yaml.UnmarshalStrict(doc, &role))
		}
	}
	require.NotEmpty(w.t, role.Rules)
	_, err = w.Kube.RbacV1().ClusterRoles().Create(ctx, &role, metav1.CreateOptions{})
	require.NoError(w.t, err)
	_, err = w.Kube.RbacV1().ClusterRoleBindings().Create(ctx, &rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: role.Name},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: role.Name},
		Subjects:   []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: "User", Name: shipped}},
	}, metav1.CreateOptions{})
	require.NoError(w.t, err)
	w.eventually("the API server knows the worker's rights", func(ctx context.Context) error {
		review, err := w.Kube.AuthorizationV1().SubjectAccessReviews().Create(ctx, &authorizationv1.SubjectAccessReview{
			Spec: authorizationv1.SubjectAccessReviewSpec{User: shipped, ResourceAttributes: &authorizationv1.ResourceAttributes{Verb: "list", Resource: "pods"}},
		}, metav1.CreateOptions{})
		if err == nil && !review.Status.Allowed {
			err = errors.New("may not list pods yet")
		}
		return err
	})

	cluster, rest, ok := strings.Cut(w.Vars["REFIT_CLUSTERS"], "=")
	require.True(w.t, ok)
	path, kubeContext, ok := strings.Cut(rest, "#")
	require.True(w.t, ok)
	config, err := clientcmd.LoadFromFile(path)
	require.NoError(w.t, err)
	config.AuthInfos[config.Contexts[kubeContext].AuthInfo].Impersonate = shipped
	file := filepath.Join(w.Home, "worker.kubeconfig")
	require.NoError(w.t, clientcmd.WriteToFile(*config, file))
	w.Setenv("REFIT_CLUSTERS", cluster+"="+file+"#"+kubeContext)
}
