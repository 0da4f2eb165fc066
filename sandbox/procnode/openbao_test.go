package procnode_test

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	appsv1 "k8s.io/api/apps/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/dynamic"

	"github.com/refit-run/refit/activities/kube"
	"github.com/refit-run/refit/sandbox/openbao"
	"github.com/refit-run/refit/sandbox/procnode/datastore"
	"github.com/refit-run/refit/sandbox/procnode/environ"
)

func (w *world) addOpenBao(self string, images map[string]environ.Image) error {
	// The program that the pods run is this test's.
	tools, err := openbao.Tools(filepath.Join(w.root, "tools-openbao"), datastore.OpenBaoTags, "env", role+"=openbao", self)
	if err != nil {
		return err
	}
	w.openbao = datastore.OpenBao(tools)
	for name, image := range w.openbao.Images {
		images[name] = image
	}
	return nil
}

// bao is what a member says of itself.
type bao struct {
	Sealed    bool   `json:"sealed"`
	Version   string `json:"version"`
	ClusterID string `json:"cluster_id"`
	Leader    string `json:"leader_address"`
}

// baoAsk reads from a member through the API server.
func baoAsk(ctx context.Context, client *kube.Client, member int, path string) (b bao, err error) {
	h := http.Client{Transport: &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return client.DialPod(ctx, datastore.OpenBaoNamespace, fmt.Sprintf("%s-%d", datastore.OpenBaoServer, member), 8200)
	}}}
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://openbao"+path, nil)
	if err != nil {
		return b, err
	}
	response, err := h.Do(request)
	if err != nil {
		return b, err
	}
	defer response.Body.Close()
	return b, json.NewDecoder(response.Body).Decode(&b)
}

// A member takes its template's version when its pod is replaced, and no
// earlier; it is Ready while it is sealed, and keeps its data.
func TestOpenBaoMembersChangeWhenTheirPodsAreDeleted(t *testing.T) {
	s := newSpace(t)
	s.name = datastore.OpenBaoNamespace
	ctx := until(t)
	api, err := dynamic.NewForConfig(s.config)
	require.NoError(t, err)
	volumes := filepath.Join(s.root, "volumes")
	require.NoError(t, s.openbao.Install(ctx, api, volumes))
	require.NoError(t, s.openbao.Ready(ctx, api))
	require.NoError(t, s.openbao.After(ctx, s.kube))
	require.NoError(t, s.openbao.After(ctx, s.kube), "a second time changes nothing")
	products, err := kube.NewClient(s.config)
	require.NoError(t, err)
	first, err := baoAsk(ctx, products, 0, "/v1/sys/seal-status")
	require.NoError(t, err)
	old, err := openbao.ParseVersion(datastore.OpenBaoTags[0])
	require.NoError(t, err)
	next, err := openbao.ParseVersion(datastore.OpenBaoTags[1])
	require.NoError(t, err)
	require.NotEmpty(t, first.ClusterID)

	sets := s.kube.AppsV1().StatefulSets(s.name)
	set, err := sets.Get(ctx, datastore.OpenBaoServer, metav1.GetOptions{})
	require.NoError(t, err)
	require.Equal(t, appsv1.OnDeleteStatefulSetStrategyType, set.Spec.UpdateStrategy.Type)
	for i := range set.Spec.Template.Spec.Containers {
		set.Spec.Template.Spec.Containers[i].Image = datastore.OpenBaoImage(datastore.OpenBaoTags[1])
	}
	_, err = sets.Update(ctx, set, metav1.UpdateOptions{})
	require.NoError(t, err)

	hold := filepath.Join(volumes, "data-"+datastore.OpenBaoServer+"-2", datastore.OpenBaoHold)
	require.NoError(t, os.WriteFile(hold, nil, 0o600))
	name := datastore.OpenBaoServer + "-2"
	before := s.pod(name)
	require.NoError(t, s.kube.CoreV1().Pods(s.name).Delete(ctx, name, metav1.DeleteOptions{}))
	s.eventually("the next member is Ready", func(ctx context.Context) error {
		p, err := s.kube.CoreV1().Pods(s.name).Get(ctx, name, metav1.GetOptions{})
		if err == nil && (p.UID == before.UID || !isReady(*p)) {
			err = fmt.Errorf("the former one, or not Ready")
		}
		return err
	})
	for member, want := range map[int]openbao.Version{0: old, 1: old, 2: next} {
		b, err := baoAsk(ctx, products, member, "/v1/sys/seal-status")
		require.NoError(t, err)
		require.Equal(t, string(want), b.Version)
		require.Equal(t, member == 2, b.Sealed, "member %d: Ready does not mean unsealed", member)
	}
	require.NoError(t, os.Remove(hold))
	s.eventually("the sidecar has unsealed it", func(ctx context.Context) error {
		b, err := baoAsk(ctx, products, 2, "/v1/sys/seal-status")
		if err == nil && b.ClusterID != first.ClusterID {
			err = fmt.Errorf("found %+v", b)
		}
		return err
	})
	s.eventually("it follows the active member", func(ctx context.Context) error {
		active, err := baoAsk(ctx, products, 0, "/v1/sys/leader")
		if err != nil {
			return err
		}
		b, err := baoAsk(ctx, products, 2, "/v1/sys/leader")
		if err == nil && (b.Leader == "" || b.Leader != active.Leader) {
			err = fmt.Errorf("expected %s as the leader, found %q", active.Leader, b.Leader)
		}
		return err
	})
}
