package datastores

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

const (
	openbaoSystem  = "vault-system"
	openbaoMembers = 3
	// The releases' images: the sandbox begins with the older one.
	openbaoOld = "registry.refit.local/nvcf/nvcf-openbao:2.5.5-nv-1.2.1"
	openbaoNew = "registry.refit.local/nvcf/nvcf-openbao:2.6.3-nv-1.3.7"
	// What a member's volume may hold: the sidecar's orders, and the server's.
	holdUnseal   = "hold-unseal"
	openbaoFault = "faults.json"
)

func openbaoPod(i int) string { return fmt.Sprintf("openbao-server-%d", i) }

// volume is the folder that a member keeps over its pods.
func (w *world) volume(member string) string {
	w.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	v, err := w.Kube.CoreV1().PersistentVolumes().Get(ctx, openbaoSystem+"-data-"+member, metav1.GetOptions{})
	require.NoError(w.t, err)
	return v.Spec.HostPath.Path
}

// hold keeps the members' sidecars from unsealing; release lets them.
func (w *world) hold(members ...string) (release func()) {
	w.t.Helper()
	var files []string
	for _, m := range members {
		files = append(files, filepath.Join(w.volume(m), holdUnseal))
		require.NoError(w.t, os.WriteFile(files[len(files)-1], nil, 0o600))
	}
	return func() {
		for _, f := range files {
			_ = os.Remove(f)
		}
	}
}

// real tells whether the members run real binaries.
func real() bool { return os.Getenv("REFIT_TEST_BAO") != "" }

// spoil makes a member do something wrong until mend is called. A real server
// cannot be told to.
func (w *world) spoil(member, what, how string) (mend func()) {
	w.t.Helper()
	if real() {
		w.t.Skip("a real server has no faults to switch on")
	}
	path := filepath.Join(w.volume(member), openbaoFault)
	require.NoError(w.t, os.WriteFile(path, fmt.Appendf(nil, `{%q:%q}`, what, how), 0o600))
	return func() { require.NoError(w.t, os.Remove(path)) }
}

// said is what a member says of itself.
type said struct {
	Sealed    bool   `json:"sealed"`
	Version   string `json:"version"`
	ClusterID string `json:"cluster_id"`
	Self      bool   `json:"is_self"`
	Leader    string `json:"leader_address"`
	Code      int    `json:"-"`
}

// bao asks a member directly, as no product does; the reply may be of any code.
func (w *world) bao(ctx context.Context, method, member, path, token, body string) (said, error) {
	var s said
	client := http.Client{Transport: &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return w.dial(ctx, openbaoSystem, member, 8200)
	}}}
	r, err := http.NewRequestWithContext(ctx, method, "http://"+member+path, strings.NewReader(body))
	if err != nil {
		return s, err
	}
	r.Header.Set("X-Vault-Token", token)
	r.Header.Set("X-Vault-No-Request-Forwarding", "true")
	response, err := client.Do(r)
	if err != nil {
		return s, err
	}
	defer response.Body.Close()
	s.Code = response.StatusCode
	text, err := io.ReadAll(response.Body)
	if err != nil || len(text) == 0 {
		return s, err
	}
	return s, json.Unmarshal(text, &s)
}

// activeBao is the one member that says so of itself.
func (w *world) activeBao(ctx context.Context) (string, error) {
	var found []string
	for i := range openbaoMembers {
		if s, err := w.bao(ctx, http.MethodGet, openbaoPod(i), "/v1/sys/leader", "", ""); err == nil && s.Self {
			found = append(found, openbaoPod(i))
		}
	}
	if len(found) != 1 {
		return "", fmt.Errorf("expected one active member of OpenBao, found %v", found)
	}
	return found[0], nil
}

// openbaoWhole waits until all members are unsealed and follow one active.
func (w *world) openbaoWhole() (active string) {
	w.t.Helper()
	w.eventually("OpenBao is whole", func(ctx context.Context) (err error) {
		leaders := map[string]bool{}
		for i := range openbaoMembers {
			s, err := w.bao(ctx, http.MethodGet, openbaoPod(i), "/v1/sys/leader", "", "")
			if err != nil || s.Leader == "" {
				return fmt.Errorf("%s follows nobody (%v)", openbaoPod(i), err)
			}
			leaders[s.Leader] = true
		}
		if len(leaders) != 1 {
			return fmt.Errorf("expected one leader, found %v", slices.Collect(maps.Keys(leaders)))
		}
		active, err = w.activeBao(ctx)
		return err
	})
	return active
}

// rootToken and unsealKey are those of the chart's job.
func (w *world) rootToken() string { return w.secretValue("openbao-server-root-token", "root_token") }
func (w *world) unsealKey() string { return w.secretValue("openbao-server-unseal", "unseal_key") }

func (w *world) secretValue(name, key string) string {
	w.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	s, err := w.Kube.CoreV1().Secrets(openbaoSystem).Get(ctx, name, metav1.GetOptions{})
	require.NoError(w.t, err)
	require.NotEmpty(w.t, s.Data[key], "%s of Secret %s", key, name)
	return string(s.Data[key])
}

// standbys are the members but the active one, by name.
func standbys(active string) (names []string) {
	for i := range openbaoMembers {
		if openbaoPod(i) != active {
			names = append(names, openbaoPod(i))
		}
	}
	return names
}

// openbaoTemplate is what the dependency stage does: it changes the template
// and leaves the pods.
func (w *world) openbaoTemplate(image, chart string) {
	w.t.Helper()
	patch := fmt.Appendf(nil, `{"spec":{"template":{"metadata":{"labels":{"helm.sh/chart":%q}},
		"spec":{"containers":[{"name":"openbao","image":%q},{"name":"auto-unseal-sidecar","image":%q}]}}}}`, chart, image, image)
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	_, err := w.Kube.AppsV1().StatefulSets(openbaoSystem).Patch(ctx, "openbao-server", types.StrategicMergePatchType, patch, metav1.PatchOptions{})
	require.NoError(w.t, err)
}

// openbaoUIDs are the members' pods.
func (w *world) openbaoUIDs() map[string]types.UID {
	w.t.Helper()
	uids := map[string]types.UID{}
	for i := range openbaoMembers {
		p, err := w.pod(openbaoSystem, openbaoPod(i))
		require.NoError(w.t, err)
		uids[p.Name] = p.UID
	}
	return uids
}

// witness looks at the members from outside, all the time.
type witness struct {
	mu sync.Mutex
	// worst is the largest number of members that were away at a time, who says
	// which; away are all that ever were; actives are the active members in
	// their order, with their versions; uids are the pods that each name has had.
	worst   int
	who     []string
	away    map[string]bool
	actives []string
	uids    map[string][]types.UID
	looks   int
	// order is what happened, as it was seen: "active NAME" and "new NAME".
	order []string
	// claims are the volume claims of the beginning.
	claims map[string]types.UID

	stop chan struct{}
	done sync.WaitGroup
}

// watchBao begins to look; the test ends it.
func (w *world) watchBao() *witness {
	w.t.Helper()
	o := &witness{away: map[string]bool{}, uids: map[string][]types.UID{}, claims: w.claims(openbaoSystem), stop: make(chan struct{})}
	o.done.Go(func() {
		every := time.NewTicker(100 * time.Millisecond)
		defer every.Stop()
		for {
			select {
			case <-o.stop:
				return
			case <-every.C:
				o.look(w)
			}
		}
	})
	w.t.Cleanup(o.end)
	return o
}

func (o *witness) end() {
	o.mu.Lock()
	select {
	case <-o.stop:
	default:
		close(o.stop)
	}
	o.mu.Unlock()
	o.done.Wait()
}

// look asks all members at the same time. One that is away is certainly so: it
// has no pod, refuses the connection twice or says that it is sealed; a slow
// machine and one connection that broke are no absence.
func (o *witness) look(w *world) {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	type seen struct {
		uid    types.UID
		away   bool
		active string
	}
	all := make([]seen, openbaoMembers)
	var asked sync.WaitGroup
	for i := range all {
		asked.Go(func() {
			s, name := &all[i], openbaoPod(i)
			if p, err := w.pod(openbaoSystem, name); err == nil {
				s.uid = p.UID
			}
			status, err := w.bao(ctx, http.MethodGet, name, "/v1/sys/seal-status", "", "")
			if err != nil {
				status, err = w.bao(ctx, http.MethodGet, name, "/v1/sys/seal-status", "", "")
			}
			var network net.Error
			switch {
			case err == nil:
				s.away = status.Sealed
			case errors.Is(err, syscall.ECONNREFUSED), errors.Is(err, syscall.ECONNRESET):
				s.away = true
			case errors.As(err, &network) && network.Timeout():
			default:
				s.away = true // it has no pod, or none with an address
			}
			if l, err := w.bao(ctx, http.MethodGet, name, "/v1/sys/leader", "", ""); err == nil && l.Self && status.Version != "" {
				s.active = name + " " + status.Version
			}
		})
	}
	asked.Wait()
	o.mu.Lock()
	defer o.mu.Unlock()
	o.looks++
	var away, actives []string
	for i, s := range all {
		name := openbaoPod(i)
		if s.away {
			away = append(away, name)
			o.away[name] = true
		}
		if s.active != "" {
			actives = append(actives, s.active)
		}
		if known := o.uids[name]; s.uid != "" && (len(known) == 0 || known[len(known)-1] != s.uid) {
			if len(known) > 0 {
				o.order = append(o.order, "new "+name)
			}
			o.uids[name] = append(known, s.uid)
		}
	}
	if len(away) > o.worst {
		o.worst, o.who = len(away), away
	}
	if n := len(o.actives); len(actives) == 1 && (n == 0 || o.actives[n-1] != actives[0]) {
		o.actives = append(o.actives, actives[0])
		name, _, _ := strings.Cut(actives[0], " ")
		o.order = append(o.order, "active "+name)
	}
}

// seenAway are the members that were away since the beginning, by name.
func (o *witness) seenAway() []string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return slices.Sorted(maps.Keys(o.away))
}

// replacements is how often a member's pod has been replaced since the
// beginning.
func (o *witness) replacements() map[string]int {
	o.mu.Lock()
	defer o.mu.Unlock()
	n := map[string]int{}
	for name, uids := range o.uids {
		n[name] = len(uids) - 1
	}
	return n
}

// judged ends the look and requires that never two members were away, that
// every member was replaced so often, and that each has its volume still.
func (o *witness) judged(w *world, each int) {
	t := w.t
	t.Helper()
	o.end()
	t.Logf("%d looks, at most %d away at a time (%v), active were %v", o.looks, o.worst, o.who, o.actives)
	require.Greater(t, o.looks, 20, "too few looks to have seen anything")
	require.LessOrEqual(t, o.worst, 1, "members away at a time: %v", o.who)
	replaced := o.replacements()
	require.Len(t, replaced, openbaoMembers)
	for name, n := range replaced {
		require.Equal(t, each, n, "replacements of %s", name)
	}
	require.Len(t, o.claims, openbaoMembers)
	require.Equal(t, o.claims, w.claims(openbaoSystem), "volume claims are never touched")
}
