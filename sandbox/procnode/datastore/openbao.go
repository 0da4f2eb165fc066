package datastore

import (
	_ "embed"
	"maps"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/utils/ptr"

	"github.com/refit-run/refit/sandbox/procnode/environ"
	"github.com/refit-run/refit/sandbox/registry"
)

// Names of the OpenBao chart.
const (
	OpenBaoNamespace = "vault-system"
	OpenBaoServer    = "openbao-server"
	// OpenBaoUnseal is the Secret with the unseal key under unseal_key, empty
	// until the cluster is initialised; OpenBaoToken is that with the root
	// token under root_token.
	OpenBaoUnseal, UnsealKey = "openbao-server-unseal", "unseal_key"
	OpenBaoToken, TokenKey   = "openbao-server-root-token", "root_token"
	// OpenBaoHold is the file in a member's volume that keeps its sidecar from
	// unsealing it.
	OpenBaoHold = "hold-unseal"
)

// OpenBaoTags are those of the running release and of the next. Their cores are
// what the servers report as their version.
var OpenBaoTags = []string{"2.5.5-nv-1.2.1", "2.6.3-nv-1.3.7"}

// OpenBaoImage is the image of the servers and of their sidecars.
func OpenBaoImage(tag string) string { return registry.Host + "/nvcf/nvcf-openbao:" + tag }

var (
	//go:embed openbao.hcl
	openbaoConfig string
	//go:embed openbao-unseal.sh
	openbaoUnseal string
)

const (
	openbaoConfigFile = "extraconfig-from-values.hcl"
	openbaoAPI        = 8200
	// openbaoStart is what the chart starts a server with.
	openbaoStart = `cp "$VOLUME_config/` + openbaoConfigFile + `" "$HOME/storageconfig.hcl"
sed -i "s|POD_IP|$POD_IP|g" "$HOME/storageconfig.hcl"
exec bao server -config="$HOME/storageconfig.hcl"`
)

// OpenBao is three members. tools names for each of OpenBaoTags the folder with
// the program bao of that version.
func OpenBao(tools map[string]string) Store {
	s := Store{Name: OpenBaoServer, Namespace: OpenBaoNamespace, Members: 3, Claim: "data", Size: "1Gi", Volumes: 3, Images: map[string]environ.Image{}}
	for tag, path := range tools {
		s.Images[OpenBaoImage(tag)] = environ.Image{Command: []string{"bao"}, Path: path}
	}
	meta := func(name string) metav1.ObjectMeta {
		return metav1.ObjectMeta{Name: name, Namespace: OpenBaoNamespace, Labels: openbaoLabels()}
	}
	service := func(name string, more map[string]string, headless bool) *corev1.Service {
		selector := openbaoSelector()
		maps.Copy(selector, more)
		spec := corev1.ServiceSpec{Selector: selector, PublishNotReadyAddresses: true, Ports: []corev1.ServicePort{
			{Name: "http", Port: openbaoAPI, TargetPort: intstr.FromInt32(openbaoAPI)}, {Name: "https-internal", Port: 8201, TargetPort: intstr.FromInt32(8201)},
		}}
		if headless {
			spec.ClusterIP = corev1.ClusterIPNone
		}
		return &corev1.Service{ObjectMeta: meta(name), Spec: spec}
	}
	s.Objects = []runtime.Object{
		&corev1.Secret{ObjectMeta: meta(OpenBaoUnseal), StringData: map[string]string{UnsealKey: ""}},
		&corev1.ConfigMap{ObjectMeta: meta(OpenBaoServer + "-config"), Data: map[string]string{openbaoConfigFile: openbaoConfig}},
		service(OpenBaoServer, nil, false),
		service(OpenBaoServer+"-active", map[string]string{"openbao-active": "true"}, false),
		service(OpenBaoServer+"-standby", map[string]string{"openbao-active": "false"}, false),
		service(OpenBaoServer+"-internal", nil, true),
		&appsv1.StatefulSet{ObjectMeta: meta(OpenBaoServer), Spec: s.openbaoSet()},
	}
	s.After = initialiseOpenBao
	return s
}

func openbaoSelector() map[string]string {
	return map[string]string{"app.kubernetes.io/name": "openbao", "app.kubernetes.io/instance": OpenBaoServer, "component": "server"}
}

// openbaoLabels has the chart's version, in the pods too: a newer chart makes
// them all stale.
func openbaoLabels() map[string]string {
	labels := map[string]string{"helm.sh/chart": "openbao-0.28.3", "app.kubernetes.io/managed-by": "Helm"}
	maps.Copy(labels, openbaoSelector())
	return labels
}

func (s Store) openbaoSet() appsv1.StatefulSetSpec {
	image := OpenBaoImage(OpenBaoTags[0])
	// The server listens on the pod's address alone: a container's own loopback
	// is everybody's here.
	api := corev1.EnvVar{Name: "BAO_ADDR", Value: "http://$(POD_IP):8200"}
	ip := corev1.EnvVar{Name: "POD_IP", ValueFrom: field("status.podIP")}
	data := corev1.VolumeMount{Name: s.Claim, MountPath: "/openbao/data"}
	return appsv1.StatefulSetSpec{
		Replicas: &s.Members, ServiceName: OpenBaoServer + "-internal", Selector: &metav1.LabelSelector{MatchLabels: openbaoSelector()},
		PodManagementPolicy: appsv1.ParallelPodManagement,
		UpdateStrategy:      appsv1.StatefulSetUpdateStrategy{Type: appsv1.OnDeleteStatefulSetStrategyType},
		Template: corev1.PodTemplateSpec{
			ObjectMeta: metav1.ObjectMeta{Labels: openbaoLabels()},
			Spec: onNode(corev1.PodSpec{
				TerminationGracePeriodSeconds: ptr.To[int64](10), EnableServiceLinks: ptr.To(false),
				Containers: []corev1.Container{
					{
						Name: "openbao", Image: image, Command: []string{"/bin/sh", "-ec"}, Args: []string{openbaoStart},
						Ports: []corev1.ContainerPort{
							{Name: "http", ContainerPort: openbaoAPI}, {Name: "https-internal", ContainerPort: 8201}, {Name: "http-rep", ContainerPort: 8202},
						},
						Env: []corev1.EnvVar{
							ip, api,
							{Name: "HOSTNAME", ValueFrom: field("metadata.name")},
							{Name: "BAO_K8S_POD_NAME", ValueFrom: field("metadata.name")},
							{Name: "BAO_K8S_NAMESPACE", ValueFrom: field("metadata.namespace")},
							{Name: "BAO_API_ADDR", Value: "http://$(POD_IP):8200"},
							{Name: "BAO_CLUSTER_ADDR", Value: "https://$(HOSTNAME)." + OpenBaoServer + "-internal:8201"},
							{Name: "BAO_RAFT_NODE_ID", Value: "$(HOSTNAME)"},
							{Name: "BAO_RAFT_PATH", Value: "$(VOLUME_" + s.Claim + ")"},
						},
						// The chart's: it accepts a sealed member and one that was
						// never initialised.
						ReadinessProbe: &corev1.Probe{
							ProbeHandler: corev1.ProbeHandler{HTTPGet: &corev1.HTTPGetAction{
								Path: "/v1/sys/health?standbyok=true&sealedcode=204&uninitcode=204", Port: intstr.FromInt32(openbaoAPI),
							}},
							PeriodSeconds: 1, TimeoutSeconds: 5, FailureThreshold: 2, SuccessThreshold: 1,
						},
						// The chart's hook reads a token that is not there.
						Lifecycle: &corev1.Lifecycle{PreStop: &corev1.LifecycleHandler{Exec: &corev1.ExecAction{
							Command: []string{"/bin/sh", "-c", "bao operator step-down 2>/dev/null || true"},
						}}},
						VolumeMounts: []corev1.VolumeMount{{Name: "config", MountPath: "/openbao/config"}, data},
					},
					{
						Name: "auto-unseal-sidecar", Image: image, Command: []string{"/bin/sh", "-c"}, Args: []string{openbaoUnseal},
						Env: []corev1.EnvVar{
							ip, api, {Name: "UNSEAL_PAUSE", Value: "4"},
							{Name: "UNSEAL_KEY", ValueFrom: secretKey(OpenBaoUnseal, UnsealKey)},
						},
						VolumeMounts: []corev1.VolumeMount{data},
					},
				},
				Volumes: []corev1.Volume{{Name: "config", VolumeSource: corev1.VolumeSource{ConfigMap: &corev1.ConfigMapVolumeSource{
					LocalObjectReference: corev1.LocalObjectReference{Name: OpenBaoServer + "-config"},
				}}}},
			}),
		},
		VolumeClaimTemplates: s.claims(),
	}
}
