package datastore

import (
	_ "embed"
	"fmt"
	"maps"

	"github.com/nats-io/nkeys"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/utils/ptr"

	"github.com/refit-run/refit/sandbox/procnode/environ"
	"github.com/refit-run/refit/sandbox/registry"
)

// Names of the NATS chart.
const (
	NATSNamespace = "nats-system"
	// NATSAccount holds the streams; a client outside it does not see them.
	NATSAccount = "NVCF"
	// NATSKeys is the Secret with the login: the seed under user.key, the
	// public key under user.pub.
	NATSKeys = "nats-nkeys"
)

// NATSImages are those of the running release and of the next: a chart that
// names the other one rolls the members.
var NATSImages = []string{registry.Host + "/nvcf/nats-server:2.14.6", registry.Host + "/synadia/nats-server:2.14.6-alpine3.22"}

const reloaderImage = registry.Host + "/natsio/nats-server-config-reloader:0.18.0"

//go:embed nats.conf
var natsConf string

// NATS is three servers with JetStream. server is natsd as an image, which
// must bring nats-server in its Path for the chart's hook.
func NATS(server environ.Image) (Store, error) {
	user, err := nkeys.CreateUser()
	if err != nil {
		return Store{}, err
	}
	seed, err := user.Seed()
	if err != nil {
		return Store{}, err
	}
	public, err := user.PublicKey()
	if err != nil {
		return Store{}, err
	}
	s := Store{
		Name: "nats", Namespace: NATSNamespace, Members: 3, Claim: "nats-js", Size: "1Gi", Volumes: 3,
		// The reloader watches for changes that this sandbox never makes.
		Images: map[string]environ.Image{reloaderImage: {Command: []string{"sleep", "infinity"}}},
	}
	for _, image := range NATSImages {
		s.Images[image] = server
	}
	meta := func(name string) metav1.ObjectMeta {
		return metav1.ObjectMeta{Name: name, Namespace: NATSNamespace, Labels: natsLabels()}
	}
	ports := func(names ...string) (all []corev1.ServicePort) {
		for _, name := range names {
			all = append(all, corev1.ServicePort{Name: name, Port: natsPorts[name], TargetPort: intstr.FromString(name)})
		}
		return all
	}
	s.Objects = []runtime.Object{
		&corev1.Secret{ObjectMeta: meta(NATSKeys), StringData: map[string]string{"user.key": string(seed), "user.pub": public}},
		&corev1.ConfigMap{ObjectMeta: meta("nats-config"), Data: map[string]string{"nats.conf": natsConf}},
		&corev1.Service{ObjectMeta: meta("nats"), Spec: corev1.ServiceSpec{Selector: natsSelector(), Ports: ports("nats")}},
		&corev1.Service{ObjectMeta: meta("nats-headless"), Spec: corev1.ServiceSpec{
			ClusterIP: corev1.ClusterIPNone, PublishNotReadyAddresses: true, Selector: natsSelector(), Ports: ports("nats", "cluster", "monitor"),
		}},
		&appsv1.StatefulSet{ObjectMeta: meta("nats"), Spec: s.natsSet()},
	}
	return s, nil
}

var natsPorts = map[string]int32{"nats": 4222, "cluster": 6222, "monitor": 8222}

func natsSelector() map[string]string {
	return map[string]string{"app.kubernetes.io/name": "nats", "app.kubernetes.io/instance": "nats", "app.kubernetes.io/component": "nats"}
}

// natsLabels has the chart's version, in the pods too: a newer chart restarts
// them all.
func natsLabels() map[string]string {
	labels := map[string]string{
		"helm.sh/chart": "helm-nvcf-nats-0.8.4", "app.kubernetes.io/version": "2.14.6", "app.kubernetes.io/managed-by": "Helm",
	}
	maps.Copy(labels, natsSelector())
	return labels
}

func (s Store) natsSet() appsv1.StatefulSetSpec {
	// The chart's probes, with its path for all three: they see that the
	// server runs, not that its streams are current. The chart's delays of ten
	// seconds would only slow a sandbox.
	probe := func(period, failures int32) *corev1.Probe {
		return &corev1.Probe{
			ProbeHandler: corev1.ProbeHandler{HTTPGet: &corev1.HTTPGetAction{
				Path: "/healthz?js-server-only=true", Port: intstr.FromString("monitor"),
			}},
			PeriodSeconds: period, TimeoutSeconds: 5, FailureThreshold: failures, SuccessThreshold: 1,
		}
	}
	var ports []corev1.ContainerPort
	for _, name := range []string{"nats", "cluster", "monitor"} {
		ports = append(ports, corev1.ContainerPort{Name: name, ContainerPort: natsPorts[name]})
	}
	config, pid := "config", "pid"
	mounts := []corev1.VolumeMount{{Name: config, MountPath: "/etc/nats-config"}, {Name: pid, MountPath: "/var/run/nats"}}
	return appsv1.StatefulSetSpec{
		Replicas: &s.Members, ServiceName: "nats-headless", Selector: &metav1.LabelSelector{MatchLabels: natsSelector()},
		PodManagementPolicy: appsv1.ParallelPodManagement,
		UpdateStrategy:      appsv1.StatefulSetUpdateStrategy{Type: appsv1.RollingUpdateStatefulSetStrategyType},
		Template: corev1.PodTemplateSpec{
			ObjectMeta: metav1.ObjectMeta{Labels: natsLabels()},
			Spec: onNode(corev1.PodSpec{
				TerminationGracePeriodSeconds: ptr.To[int64](60), ShareProcessNamespace: ptr.To(true), EnableServiceLinks: ptr.To(false),
				Containers: []corev1.Container{
					{
						Name: "nats", Image: NATSImages[0], Args: []string{"--config", fmt.Sprintf("$(VOLUME_%s)/nats.conf", config)},
						Ports: ports,
						Env: []corev1.EnvVar{
							{Name: "POD_NAME", ValueFrom: field("metadata.name")}, {Name: "SERVER_NAME", Value: "$(POD_NAME)"},
							{Name: "NATS_USER_PUB", ValueFrom: secretKey(NATSKeys, "user.pub")},
							{Name: "NATS_STORE", Value: "$(VOLUME_" + s.Claim + ")"}, {Name: "NATS_PID_FILE", Value: "$(VOLUME_" + pid + ")/nats.pid"},
						},
						StartupProbe: probe(1, 90), ReadinessProbe: probe(1, 3), LivenessProbe: probe(10, 3),
						Lifecycle: &corev1.Lifecycle{PreStop: &corev1.LifecycleHandler{Exec: &corev1.ExecAction{
							Command: []string{"/bin/sh", "-c", `exec nats-server -sl=ldm="$NATS_PID_FILE"`},
						}}},
						VolumeMounts: append(mounts, corev1.VolumeMount{Name: s.Claim, MountPath: "/data"}),
					},
					{Name: "reloader", Image: reloaderImage, VolumeMounts: mounts},
				},
				Volumes: []corev1.Volume{
					{Name: config, VolumeSource: corev1.VolumeSource{ConfigMap: &corev1.ConfigMapVolumeSource{
						LocalObjectReference: corev1.LocalObjectReference{Name: "nats-config"},
					}}},
					{Name: pid, VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}},
				},
			}),
		},
		VolumeClaimTemplates: s.claims(),
	}
}
