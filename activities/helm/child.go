package helm

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"sync"
	"time"

	"helm.sh/helm/v3/pkg/action"
	helmkube "helm.sh/helm/v3/pkg/kube"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/refit-run/refit/activities/finding"
	"github.com/refit-run/refit/activities/kube"
	"github.com/refit-run/refit/activities/lease"
)

// childArgument makes the worker's binary the engine of one upgrade.
const childArgument = "helm-child"

// engineLabel is on every revision made here: "<engine>-r<revision>". Helm
// copies labels to later revisions, also of others; the number tells them.
const engineLabel = "refit.run/engine"

// recordGrace is what Helm may take beyond its own timeout to record the
// failure; the parent kills after killGrace, which is longer.
const recordGrace = killGrace / 2

func engineLabelFor(engine string, revision int) string {
	return fmt.Sprintf("%s-r%d", engine, revision)
}

func madeHere(r *Release) bool {
	return strings.HasSuffix(r.Labels[engineLabel], fmt.Sprintf("-r%d", r.Version))
}

// order is the request on the child's stdin. Nothing of it is ever a file or
// an argument: it holds credentials and secret values.
type order struct {
	Kubeconfig  []byte         `json:"kubeconfig,omitempty"` // none: in-cluster
	Target      kube.Target    `json:"target"`
	Namespace   string         `json:"namespace"`
	Release     string         `json:"release"`
	Chart       wireChart      `json:"chart"`
	Values      map[string]any `json:"values"`
	Pins        []Pin          `json:"pins,omitempty"`
	Holder      string         `json:"holder"`
	Engine      string         `json:"engine"`
	Description string         `json:"description"`
	Limit       time.Duration  `json:"limit"`
}

// report is one line on the child's stdout: a note of progress, or the end.
type report struct {
	Note     string           `json:"note,omitempty"`
	Done     bool             `json:"done,omitempty"`
	Revision int              `json:"revision,omitempty"`
	Failure  *finding.Finding `json:"failure,omitempty"`
	Class    string           `json:"class,omitempty"`
}

// IsChild reports whether a process was started as the engine of an upgrade;
// os.Args is its argument. A main (and a TestMain) asks it before all else.
func IsChild(args []string) bool { return len(args) == 2 && args[1] == childArgument }

// RunChild reads one order, carries it out and returns the exit status.
func RunChild(stdin io.Reader, stdout io.Writer) int {
	out := &reporter{encoder: json.NewEncoder(stdout)}
	revision, err := carryOut(stdin, out)
	end := report{Done: true, Revision: revision}
	if err != nil {
		end.Class, end.Failure = failure(err)
	}
	out.write(end)
	if err != nil {
		return 1
	}
	return 0
}

// failure is an error as it crosses the pipe: its class (lease.Locked among
// them) and its finding.
func failure(err error) (string, *finding.Finding) {
	if f, ok := lease.LockedFinding(err); ok {
		return lease.Locked, &f
	}
	if f, class, ok := finding.Of(err); ok {
		return string(class), &f
	}
	return string(classOf(err)), &finding.Finding{Object: "helm upgrade", Found: err.Error()}
}

type reporter struct {
	mu      sync.Mutex
	encoder *json.Encoder
}

func (r *reporter) write(line report) {
	r.mu.Lock()
	defer r.mu.Unlock()
	// A parent that is gone has killed us already, or will.
	_ = r.encoder.Encode(line)
}

func (r *reporter) note(format string, args ...any) {
	r.write(report{Note: strings.TrimSpace(fmt.Sprintf(format, args...))})
}

func carryOut(stdin io.Reader, out *reporter) (int, error) {
	var o order
	if err := json.NewDecoder(stdin).Decode(&o); err != nil {
		return 0, fmt.Errorf("order on stdin: %w", err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), o.Limit+recordGrace)
	defer cancel()
	config, err := o.config()
	if err != nil {
		return 0, err
	}
	plain, err := kube.NewClient(config)
	if err != nil {
		return 0, err
	}
	if err := plain.Verify(ctx, o.Target); err != nil {
		return 0, err
	}
	guard := newFence(plain.Typed, o.Namespace, o.Release, o.Holder, o.Engine)
	if err := guard.check(ctx); err != nil {
		return 0, err
	}
	config.Wrap(guard.wrap)
	fenced, err := kube.NewClient(config)
	if err != nil {
		return 0, err
	}
	return o.upgrade(ctx, fenced, guard, out)
}

func (o order) config() (*rest.Config, error) {
	if len(o.Kubeconfig) == 0 {
		return rest.InClusterConfig()
	}
	return clientcmd.RESTConfigFromKubeConfig(o.Kubeconfig)
}

func (o order) upgrade(ctx context.Context, c *kube.Client, guard *fence, out *reporter) (int, error) {
	helmkube.ManagedFieldsManager = FieldManager
	config := new(action.Configuration)
	if err := config.Init(getter{client: c, namespace: o.Namespace}, o.Namespace, "secret", out.note); err != nil {
		return 0, err
	}
	last, err := config.Releases.Last(o.Release)
	if err != nil {
		return 0, kube.Wrap(err, fmt.Sprintf("release %s/%s", o.Namespace, o.Release))
	}
	u := action.NewUpgrade(config)
	u.Namespace, u.ResetValues, u.SkipCRDs = o.Namespace, true, true
	u.Description = o.Description
	u.Labels = map[string]string{engineLabel: engineLabelFor(o.Engine, last.Version+1)}
	u.PostRenderer = PostRenderer{Pins: o.Pins}
	// Helm's timeout is for each phase; the context bounds them all, a little
	// later, because Helm's error says what was waited for.
	u.Timeout = o.Limit
	done, err := u.RunWithContext(ctx, o.Release, o.Chart.unpack(), o.Values)
	if fenced := guard.refusal(); fenced != nil {
		return 0, fenced
	}
	if err != nil {
		return 0, finding.Finding{
			Object: fmt.Sprintf("helm upgrade of release %s/%s to chart %s", o.Namespace, o.Release, o.Chart.Chart.Metadata.Version),
			Found:  err.Error(),
			Next:   fmt.Sprintf("mend the cause and retry; `helm -n %s history %s` shows the failed revision", o.Namespace, o.Release),
		}.Error(classOf(err))
	}
	return done.Version, nil
}
