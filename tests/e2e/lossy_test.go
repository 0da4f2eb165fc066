package e2e

import (
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"path/filepath"
	"strings"
	"sync/atomic"

	"github.com/stretchr/testify/require"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
)

// lossy stands between a worker and the API server: the first delete of a
// hypervisor pod is carried out, but its reply never arrives.
type lossy struct {
	clusters string // REFIT_CLUSTERS of a worker behind it
	lost     atomic.Pointer[string]
}

// pod is whose delete stayed without a reply, "" before that.
func (l *lossy) pod() string {
	if name := l.lost.Load(); name != nil {
		return *name
	}
	return ""
}

// loseReply opens such a way to the worker's cluster, with the worker's rights.
func (w *world) loseReply() *lossy {
	w.t.Helper()
	name, place, ok := strings.Cut(w.vars["REFIT_CLUSTERS"], "=")
	require.True(w.t, ok, w.vars["REFIT_CLUSTERS"])
	file, kubeContext, ok := strings.Cut(place, "#")
	require.True(w.t, ok, w.vars["REFIT_CLUSTERS"])
	cfg, err := clientcmd.NewNonInteractiveDeferredLoadingClientConfig(&clientcmd.ClientConfigLoadingRules{ExplicitPath: file},
		&clientcmd.ConfigOverrides{CurrentContext: kubeContext}).ClientConfig()
	require.NoError(w.t, err)
	cfg.NextProtos = []string{"http/1.1"} // port forwards upgrade their connection
	transport, err := rest.TransportFor(cfg)
	require.NoError(w.t, err)
	target, err := url.Parse(cfg.Host)
	require.NoError(w.t, err)

	l := &lossy{}
	proxy := &httputil.ReverseProxy{
		Rewrite: func(r *httputil.ProxyRequest) { r.SetURL(target) }, Transport: transport, FlushInterval: -1,
	}
	server := httptest.NewServer(http.HandlerFunc(func(out http.ResponseWriter, r *http.Request) {
		pod, found := strings.CutPrefix(r.URL.Path, "/api/v1/namespaces/tensor-fusion-sys/pods/")
		if r.Method == http.MethodDelete && found && !r.URL.Query().Has("dryRun") && l.lost.CompareAndSwap(nil, &pod) {
			proxy.ServeHTTP(httptest.NewRecorder(), r)
			panic(http.ErrAbortHandler) // closes the connection
		}
		proxy.ServeHTTP(out, r)
	}))
	w.t.Cleanup(func() {
		server.CloseClientConnections() // watches never end by themselves
		server.Close()
	})

	behind := clientcmdapi.NewConfig()
	behind.Clusters["lossy"] = &clientcmdapi.Cluster{Server: server.URL}
	behind.AuthInfos["worker"] = &clientcmdapi.AuthInfo{}
	behind.Contexts["lossy"] = &clientcmdapi.Context{Cluster: "lossy", AuthInfo: "worker"}
	kubeconfig := filepath.Join(w.home, "lossy.kubeconfig")
	require.NoError(w.t, clientcmd.WriteToFile(*behind, kubeconfig))
	l.clusters = name + "=" + kubeconfig + "#lossy"
	return l
}
