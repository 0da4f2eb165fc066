package datastore

import (
	"fmt"
	"maps"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/utils/ptr"

	"github.com/refit-run/refit/sandbox/procnode/cassandrad"
	"github.com/refit-run/refit/sandbox/procnode/environ"
	"github.com/refit-run/refit/sandbox/registry"
)

// Names of the Cassandra chart, but for the Secret: the chart takes the
// administrator's password as a value.
const (
	CassandraNamespace = "cassandra-system"
	// CassandraAdmin is the Secret with the administrator's login: the role
	// under username, its password under password.
	CassandraAdmin = "cassandra-admin"
)

// CassandraImages are those of the running release and of the next.
var CassandraImages = []string{registry.Host + "/nvcf/cassandra:5.0.9-nv-2.0.5", registry.Host + "/nvcf/cassandra:5.0.9-nv-2.0.7"}

// cassandraSeeds is how many members the chart makes seeds, whether or not they
// are there: a member that joins as a seed takes ranges over without their
// rows.
const cassandraSeeds = 2

// Cassandra is one member, or three that stand in different zones where there
// are any. server is cassandrad as an image, which must bring nodetool in its
// Path.
func Cassandra(server environ.Image, members int32) (Store, error) {
	if members != 1 && members != 3 {
		return Store{}, fmt.Errorf("cassandra: expected 1 or 3 members, found %d", members)
	}
	s := Store{
		Name: "cassandra", Namespace: CassandraNamespace, Members: members, Claim: cassandrad.DataVolume, Size: "1Gi", Volumes: 3,
		Images: map[string]environ.Image{},
	}
	for _, image := range CassandraImages {
		s.Images[image] = server
	}
	meta := func(name string) metav1.ObjectMeta {
		return metav1.ObjectMeta{Name: name, Namespace: CassandraNamespace, Labels: cassandraLabels()}
	}
	ports := func(names ...string) (all []corev1.ServicePort) {
		for _, name := range names {
			all = append(all, corev1.ServicePort{Name: name, Port: cassandraPorts[name], TargetPort: intstr.FromString(name)})
		}
		return all
	}
	s.Objects = []runtime.Object{
		&corev1.Secret{ObjectMeta: meta(CassandraAdmin), StringData: map[string]string{"username": "cassandra", "password": cassandrad.Password}},
		&corev1.Service{ObjectMeta: meta("cassandra"), Spec: corev1.ServiceSpec{Selector: cassandraSelector(), Ports: ports("cql", "metrics")}},
		&corev1.Service{ObjectMeta: meta("cassandra-headless"), Spec: corev1.ServiceSpec{
			ClusterIP: corev1.ClusterIPNone, PublishNotReadyAddresses: true, Selector: cassandraSelector(), Ports: ports("intra", "cql"),
		}},
		&appsv1.StatefulSet{ObjectMeta: meta("cassandra"), Spec: s.cassandraSet()},
	}
	return s, nil
}

var cassandraPorts = map[string]int32{"intra": 7000, "cql": 9042, "metrics": 9500}

func cassandraSelector() map[string]string {
	return map[string]string{"app.kubernetes.io/name": "cassandra", "app.kubernetes.io/instance": "cassandra"}
}

func cassandraLabels() map[string]string {
	labels := map[string]string{
		"helm.sh/chart": "helm-nvcf-cassandra-0.20.1", "app.kubernetes.io/version": "5.0.9", "app.kubernetes.io/managed-by": "Helm",
	}
	maps.Copy(labels, cassandraSelector())
	return labels
}

// CassandraSeed is the name by which members find member n.
func CassandraSeed(n int) string {
	return fmt.Sprintf("cassandra-%d.cassandra-headless.%s.svc.cluster.local", n, CassandraNamespace)
}

func (s Store) cassandraSet() appsv1.StatefulSetSpec {
	var ports []corev1.ContainerPort
	for _, name := range []string{"intra", "cql", "metrics"} {
		ports = append(ports, corev1.ContainerPort{Name: name, ContainerPort: cassandraPorts[name]})
	}
	seeds := make([]string, cassandraSeeds)
	for i := range seeds {
		seeds[i] = CassandraSeed(i)
	}
	env := []corev1.EnvVar{
		{Name: "POD_IP", ValueFrom: field("status.podIP")}, {Name: cassandrad.ClusterVariable, Value: cassandrad.Cluster},
		{Name: cassandrad.DCVariable, Value: cassandrad.DataCenter}, {Name: cassandrad.SeedsVariable, Value: strings.Join(seeds, ",")},
	}
	mounts := []corev1.VolumeMount{{Name: cassandrad.ConfVolume, MountPath: "/etc/cassandra"}, {Name: s.Claim, MountPath: "/var/lib/cassandra"}}
	var spread []corev1.TopologySpreadConstraint
	if s.Members > 1 {
		spread = []corev1.TopologySpreadConstraint{{
			MaxSkew: 1, TopologyKey: corev1.LabelTopologyZone, WhenUnsatisfiable: corev1.ScheduleAnyway,
			LabelSelector: &metav1.LabelSelector{MatchLabels: map[string]string{"app.kubernetes.io/name": "cassandra"}},
		}}
	}
	return appsv1.StatefulSetSpec{
		Replicas: &s.Members, ServiceName: "cassandra-headless", Selector: &metav1.LabelSelector{MatchLabels: cassandraSelector()},
		PodManagementPolicy: appsv1.OrderedReadyPodManagement,
		UpdateStrategy:      appsv1.StatefulSetUpdateStrategy{Type: appsv1.RollingUpdateStatefulSetStrategyType},
		Template: corev1.PodTemplateSpec{
			ObjectMeta: metav1.ObjectMeta{Labels: cassandraLabels()},
			Spec: onNode(corev1.PodSpec{
				TerminationGracePeriodSeconds: ptr.To[int64](120), EnableServiceLinks: ptr.To(false), TopologySpreadConstraints: spread,
				InitContainers: []corev1.Container{{
					Name: "cassandra-conf-init", Image: CassandraImages[0], Args: []string{cassandrad.InitArgument}, Env: env, VolumeMounts: mounts,
				}},
				Containers: []corev1.Container{{
					Name: "cassandra", Image: CassandraImages[0], Ports: ports, Env: env, VolumeMounts: mounts,
					// The chart's startup probe looks every ten seconds, which would
					// only slow a sandbox; ten minutes in all as there.
					StartupProbe:   nodetoolProbe("nodetool status", 3, 200),
					LivenessProbe:  nodetoolProbe("nodetool status", 30, 6),
					ReadinessProbe: nodetoolProbe(`nodetool status | grep "^UN *$POD_IP "`, 10, 3),
				}},
				Volumes: []corev1.Volume{{Name: cassandrad.ConfVolume, VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}}},
			}),
		},
		VolumeClaimTemplates: s.claims(),
	}
}

// nodetoolProbe asks the member itself, as the chart does: Ready is its own
// view of the ring.
func nodetoolProbe(command string, period, failures int32) *corev1.Probe {
	return &corev1.Probe{
		ProbeHandler:  corev1.ProbeHandler{Exec: &corev1.ExecAction{Command: []string{"/bin/sh", "-c", command}}},
		PeriodSeconds: period, TimeoutSeconds: 15, FailureThreshold: failures, SuccessThreshold: 1,
	}
}
