package openbao

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"sync"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/refit-run/refit/activities/evidence"
	"github.com/refit-run/refit/activities/finding"
	"github.com/refit-run/refit/activities/kube"
	"github.com/refit-run/refit/activities/lease"
)

// looker looks at all members again and again within one activity; a member's
// tunnel is kept open as long as its pod lives.
type looker struct {
	a       *Activities
	client  *kube.Client
	place   Place
	token   string
	servers map[string]*server // by pod UID
	record  *evidence.Record
	// mark has the Temporal server keep what the next try must know.
	mark func(string) error
}

// looker connects to the cluster and reads the token, and beats from here on
// until it is closed.
func (a *Activities) looker(ctx context.Context, p Place) (*looker, error) {
	if p.Namespace == "" {
		return nil, finding.Finding{Object: "request", Expected: "the namespace of the OpenBao members", Found: "none"}.Error(finding.Stop)
	}
	p.Servers = p.Servers.WithDefaults()
	l := &looker{a: a, place: p, servers: map[string]*server{}, record: evidence.Begin(ctx, a.Artifacts)}
	l.mark = l.record.Mark
	if err := l.connect(ctx); err != nil {
		l.close()
		return nil, err
	}
	return l, nil
}

func (l *looker) connect(ctx context.Context) error {
	var err error
	if l.client, err = l.a.Clusters.Connect(ctx, l.place.Target); err != nil {
		return err
	}
	if err := l.fence(ctx); err != nil {
		return err
	}
	token, err := l.place.Token.Read(ctx, l.client, l.place.Namespace, "token of OpenBao")
	if f, class, ok := finding.Of(err); ok && class == finding.Stop && f.Next == "" {
		f.Expected, f.Next = "the token of OpenBao", "correct token in the plan: abort, and start again; or put the Secret there, then retry"
		return f.Error(class)
	}
	l.token = strings.TrimSpace(string(token))
	return err
}

func (l *looker) close() {
	l.record.End()
	for _, s := range l.servers {
		s.close()
	}
}

// mayChange is the fence right before something is changed: nothing is on
// behalf of a run that has no name in the Lease.
func (l *looker) mayChange(ctx context.Context) error {
	if l.place.Holder == "" {
		return finding.Finding{
			Object: "request", Expected: "the run's name in the Lease of release " + l.place.Release, Found: "none",
			Why:  "nothing would notice that another run works on the members",
			Next: "a run that starts this one as its child hands its name down in holder: abort, and start it again so",
		}.Error(finding.Stop)
	}
	return l.fence(ctx)
}

// fence stops a run that has lost its Lease. What only reads may have none.
func (l *looker) fence(ctx context.Context) error {
	return lease.Held{Namespace: l.place.Namespace, Release: l.place.Release, Holder: l.place.Holder}.Check(ctx, l.client.Typed)
}

// look asks every member at the same time. A member that does not answer is
// part of the view; an error means that Kubernetes could not be asked, or that
// the token is not taken.
func (l *looker) look(ctx context.Context) (View, error) {
	began := time.Now()
	ctx, cancel := context.WithTimeout(ctx, LookLimit)
	defer cancel()
	v, err := l.objects(ctx)
	if err != nil {
		return View{}, err
	}
	v.At, v.Run = began, Owner{Release: l.place.Release, Namespace: l.place.Namespace}
	var asked sync.WaitGroup
	for i := range v.Members {
		m := &v.Members[i]
		s, err := l.server(*m)
		if err != nil {
			m.Trouble = err.Error()
			continue
		}
		asked.Go(func() { m.Status = s.status(ctx) })
	}
	asked.Wait()
	active, none := v.Active()
	if none != "" {
		return v, nil
	}
	v.Peers, err = l.servers[active.UID].peers(ctx)
	if errors.Is(err, errDenied) {
		return v, l.denied(active.Pod, err)
	}
	if err != nil {
		v.NoPeers = inShort(err)
	}
	return v, nil
}

// denied is the finding of a token that is not good enough.
func (l *looker) denied(pod string, err error) error {
	return finding.Finding{
		Row: "N165", Object: "OpenBao member " + pod, Expected: "that it takes the token in " + l.place.Token.String(), Found: err.Error(),
		Next: "name a token in the plan that may read sys/storage/raft/configuration and sys/storage/raft/snapshot and update sys/step-down (sudo)",
	}.Error(finding.Stop)
}

// objects is what Kubernetes says of the StatefulSet, its pods and their claims.
func (l *looker) objects(ctx context.Context) (View, error) {
	ns, servers := l.place.Namespace, l.place.Servers
	set, err := l.client.Typed.AppsV1().StatefulSets(ns).Get(ctx, servers.StatefulSet, metav1.GetOptions{})
	if err != nil {
		return View{}, absent(err, fmt.Sprintf("StatefulSet/%s/%s", ns, servers.StatefulSet), "the StatefulSet of the OpenBao members", "namespace and servers.statefulSet")
	}
	pods, err := l.client.Typed.CoreV1().Pods(ns).List(ctx, metav1.ListOptions{LabelSelector: servers.Selector})
	if err != nil {
		return View{}, kube.Wrap(err, fmt.Sprintf("pods of %s with labels %s", ns, servers.Selector))
	}
	v := viewOf(set, pods.Items, servers.Container)
	claims, err := l.client.Typed.CoreV1().PersistentVolumeClaims(ns).List(ctx, metav1.ListOptions{})
	if err != nil {
		return View{}, kube.Wrap(err, "volume claims in "+ns)
	}
	for i := range v.Members {
		m := &v.Members[i]
		for _, c := range claims.Items {
			if c.DeletionTimestamp != nil && slices.Contains(m.Claims, c.Name) {
				m.Leaving = append(m.Leaving, c.Name)
			}
		}
	}
	return v, nil
}

// absent is the error of an object that the plan names: one that is not there is
// named wrongly, or was never made.
func absent(err error, what, expected, field string) error {
	if !apierrors.IsNotFound(err) {
		return kube.Wrap(err, what)
	}
	return finding.Finding{Object: what, Expected: expected, Found: "none of that name",
		Next: "correct " + field + " in the plan: abort, and start again; or make the object, then retry"}.Error(finding.Stop)
}

// viewOf is what Kubernetes says.
func viewOf(set *appsv1.StatefulSet, pods []corev1.Pod, container string) View {
	v := View{Set: Set{
		Name: set.Name, Replicas: 1, Strategy: string(set.Spec.UpdateStrategy.Type), Revision: set.Status.UpdateRevision,
		Image: imageOf(set.Spec.Template.Spec, container), Unobserved: set.Status.ObservedGeneration < set.Generation || set.Status.UpdateRevision == "",
		Deleting: set.DeletionTimestamp != nil,
	}}
	v.Set.Owner = Owner{Release: set.Annotations["meta.helm.sh/release-name"], Namespace: set.Annotations["meta.helm.sh/release-namespace"]}
	if v.Set.Owner.Release == "" {
		v.Set.Owner.Release = set.Labels["app.kubernetes.io/instance"]
	}
	v.Set.Service, v.Set.Namespace = set.Spec.ServiceName, set.Namespace
	if set.Spec.Replicas != nil {
		v.Set.Replicas = int(*set.Spec.Replicas)
	}
	for i := range pods {
		p := &pods[i]
		image := imageOf(p.Spec, container)
		if image == "" {
			continue // another pod of the release
		}
		m := Member{Pod: p.Name, UID: string(p.UID), Revision: p.Labels[appsv1.ControllerRevisionHashLabelKey], IP: p.Status.PodIP,
			Image: image, Deleting: p.DeletionTimestamp != nil, Unready: kube.Unready(p)}
		for _, c := range p.Spec.Containers {
			m.Images = append(m.Images, c.Name+"="+c.Image)
		}
		for _, volume := range p.Spec.Volumes {
			if claim := volume.PersistentVolumeClaim; claim != nil {
				m.Claims = append(m.Claims, claim.ClaimName)
			}
		}
		v.Members = append(v.Members, m)
	}
	slices.SortFunc(v.Members, func(a, b Member) int { return strings.Compare(a.Pod, b.Pod) })
	for i := range v.Set.Replicas {
		name := fmt.Sprintf("%s-%d", set.Name, i)
		if _, there := v.member(name); !there {
			v.Missing = append(v.Missing, name)
		}
	}
	return v
}

func imageOf(spec corev1.PodSpec, container string) string {
	at := slices.IndexFunc(spec.Containers, func(c corev1.Container) bool { return c.Name == container })
	if at < 0 {
		return ""
	}
	return spec.Containers[at].Image
}

func (l *looker) server(m Member) (*server, error) {
	if s, ok := l.servers[m.UID]; ok {
		return s, nil
	}
	s, err := newServer(m.Pod, l.token, func(ctx context.Context) (net.Conn, error) {
		return l.a.Dial.Pod(ctx, l.client, l.place.Namespace, m.Pod, l.place.Servers.Port)
	})
	if err == nil {
		l.servers[m.UID] = s
	}
	return s, err
}

// verdict is what a look came to: whether the wait is over, and in a few words
// what was found. Value is kept with the view.
type verdict struct {
	done  bool
	found string
	value any
}

// until looks until judge says that the wait is over, or the limit has passed.
func (l *looker) until(ctx context.Context, limit time.Duration, judge func(View) verdict) error {
	return l.record.Until(ctx, limit, l.a.pace(), func(ctx context.Context) (evidence.Look, error) {
		view, err := l.look(ctx)
		if err != nil {
			return evidence.Look{}, err
		}
		v := judge(view)
		return evidence.Look{Done: v.done, Found: v.found, Entries: len(view.Members), Seen: seen{At: time.Now().UTC(), Verdict: v.value, View: view}}, nil
	})
}

// seen is what is kept of one look.
type seen struct {
	At      time.Time `json:"at"`
	Verdict any       `json:"verdict"`
	View    View      `json:"view"`
}
