// Package gpuagent checks the manifest of the node agent: each level has the
// privilege that the manifest's head states, and no more.
package gpuagent

import (
	"bytes"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/yaml"
)

const file = "daemonset.yaml"

// load reads every document strictly: a misspelt field would be a privilege
// that is not dropped.
func load(t *testing.T) (sets map[string]*appsv1.DaemonSet, config *corev1.ConfigMap) {
	t.Helper()
	text, err := os.ReadFile(file)
	require.NoError(t, err)
	sets = map[string]*appsv1.DaemonSet{}
	for _, doc := range bytes.Split(text, []byte("\n---\n")) {
		var kind struct{ Kind string }
		require.NoError(t, yaml.Unmarshal(doc, &kind))
		switch kind.Kind {
		case "DaemonSet":
			d := &appsv1.DaemonSet{}
			require.NoError(t, yaml.UnmarshalStrict(doc, d))
			sets[d.Labels["refit.run/level"]] = d
		case "ConfigMap":
			config = &corev1.ConfigMap{}
			require.NoError(t, yaml.UnmarshalStrict(doc, config))
		case "Namespace":
			require.NoError(t, yaml.UnmarshalStrict(doc, &corev1.Namespace{}))
		default:
			t.Fatalf("document of kind %q: say here what it may contain", kind.Kind)
		}
	}
	require.Len(t, sets, 2)
	return sets, config
}

func agent(d *appsv1.DaemonSet) corev1.Container { return d.Spec.Template.Spec.Containers[0] }

func env(c corev1.Container) map[string]string {
	out := map[string]string{}
	for _, e := range c.Env {
		out[e.Name] = e.Value
		if e.ValueFrom != nil {
			out[e.Name] = e.ValueFrom.FieldRef.FieldPath
		}
	}
	return out
}

func TestTheLevelThatLooksCanChangeNothing(t *testing.T) {
	sets, _ := load(t)
	pod, c := sets["check"].Spec.Template.Spec, agent(sets["check"])
	s := c.SecurityContext
	require.False(t, *s.Privileged)
	require.False(t, *s.AllowPrivilegeEscalation)
	require.True(t, *s.ReadOnlyRootFilesystem)
	require.Equal(t, []corev1.Capability{"ALL"}, s.Capabilities.Drop)
	require.Equal(t, []corev1.Capability{"SYSLOG"}, s.Capabilities.Add)
	require.Equal(t, corev1.SeccompProfileTypeRuntimeDefault, s.SeccompProfile.Type)
	require.False(t, pod.HostPID)
	require.False(t, pod.HostIPC)
	hostPaths := map[string]bool{}
	for _, v := range pod.Volumes {
		if v.HostPath != nil {
			hostPaths[v.Name] = true
			require.NotEqual(t, "/", v.HostPath.Path)
		}
	}
	for _, m := range c.VolumeMounts {
		require.Equal(t, hostPaths[m.Name], m.ReadOnly, "mount %s", m.Name)
		// A file has nothing mounted below it; of /run later mounts must be seen,
		// which excludes the other.
		if path := m.MountPath; hostPaths[m.Name] && path != "/host/run" && filepath.Ext(path) == "" {
			require.NotNil(t, m.RecursiveReadOnly, "mount %s", m.Name)
			require.Equal(t, corev1.RecursiveReadOnlyIfPossible, *m.RecursiveReadOnly)
			require.Nil(t, m.MountPropagation, "the API server takes one of both")
		}
	}
	for name := range env(c) {
		require.NotContains(t, name, "NVIDIA_MIG", "the driver's configuration capability is for the other level")
	}
}

func TestTheLevelThatSetsUpHasWhatSetUpNeeds(t *testing.T) {
	sets, _ := load(t)
	pod, c := sets["setup"].Spec.Template.Spec, agent(sets["setup"])
	require.True(t, *c.SecurityContext.Privileged)
	require.True(t, *c.SecurityContext.ReadOnlyRootFilesystem)
	require.True(t, pod.HostPID, "who holds /dev/vfio")
	require.Equal(t, "all", env(c)["NVIDIA_MIG_CONFIG_DEVICES"])
	require.Equal(t, "all", env(c)["NVIDIA_MIG_MONITOR_DEVICES"])
}

func TestEveryGPUHostGetsExactlyOneAgent(t *testing.T) {
	sets, _ := load(t)
	op := func(level string) corev1.NodeSelectorRequirement {
		terms := sets[level].Spec.Template.Spec.Affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution.NodeSelectorTerms
		require.Len(t, terms, 1)
		require.Equal(t, "nvidia.com/gpu.present", terms[0].MatchExpressions[0].Key)
		return terms[0].MatchExpressions[1]
	}
	check, setup := op("check"), op("setup")
	require.Equal(t, corev1.NodeSelectorOpNotIn, check.Operator)
	require.Equal(t, corev1.NodeSelectorOpIn, setup.Operator)
	require.Equal(t, check.Key, setup.Key)
	require.Equal(t, check.Values, setup.Values)
}

func TestBothLevelsServeTheirOwnNodeAndHoldNoToken(t *testing.T) {
	sets, config := load(t)
	for level, d := range sets {
		pod, c := d.Spec.Template.Spec, agent(d)
		require.Equal(t, d.Spec.Selector.MatchLabels, d.Spec.Template.Labels, level)
		require.False(t, *pod.AutomountServiceAccountToken, level)
		require.Equal(t, []string{"run"}, c.Args, level)
		require.Equal(t, "spec.nodeName", env(c)["NODE_NAME"], level)
		require.Equal(t, "/host", env(c)["REFIT_HOST_ROOT"], level)
		require.Equal(t, config.Name, c.EnvFrom[0].ConfigMapRef.Name, level)
		require.Equal(t, []corev1.Toleration{{Operator: corev1.TolerationOpExists}}, pod.Tolerations, level)
		require.Regexp(t, regexp.MustCompile(`^[a-z./-]+:[0-9]+\.[0-9]+\.[0-9]+$`), c.Image, level)
		require.False(t, c.Resources.Requests.Memory().IsZero(), level)
	}
	for _, key := range []string{"TEMPORAL_ADDRESS", "TEMPORAL_NAMESPACE", "REFIT_CLUSTER"} {
		require.Contains(t, config.Data, key)
	}
}

// statements are the points of the manifest's head, by level.
func statements(t *testing.T) map[string][]string {
	t.Helper()
	text, err := os.ReadFile(file)
	require.NoError(t, err)
	head, _, _ := strings.Cut(string(text), "apiVersion:")
	out, level := map[string][]string{}, ""
	for line := range strings.Lines(head) {
		if m := regexp.MustCompile(`^# (check|setup) \(`).FindStringSubmatch(line); m != nil {
			level = m[1]
		} else if strings.TrimSpace(line) == "#" {
			level = ""
		} else if m := regexp.MustCompile(`^#   (\S.*?)(  |\n)`).FindStringSubmatch(line); m != nil && level != "" {
			out[level] = append(out[level], m[1])
		}
	}
	return out
}

// Each point is what the manifest has, and the manifest has nothing without a
// point.
func TestTheManifestStatesWhatEachLevelNeeds(t *testing.T) {
	sets, _ := load(t)
	check, setup := sets["check"].Spec.Template.Spec, sets["setup"].Spec.Template.Spec
	checkC, setupC := check.Containers[0], setup.Containers[0]
	holds := map[string]bool{
		"check: root":   *checkC.SecurityContext.RunAsUser == 0,
		"check: SYSLOG": slices.Equal(checkC.SecurityContext.Capabilities.Add, []corev1.Capability{"SYSLOG"}),
		"check: no other capability, no privilege escalation, the root file system read-only": slices.Equal(checkC.SecurityContext.Capabilities.Drop, []corev1.Capability{"ALL"}) &&
			!*checkC.SecurityContext.AllowPrivilegeEscalation && *checkC.SecurityContext.ReadOnlyRootFilesystem,
		"check: GPUs":         *check.RuntimeClassName == "nvidia" && env(checkC)["NVIDIA_VISIBLE_DEVICES"] == "all" && env(checkC)["NVIDIA_DRIVER_CAPABILITIES"] == "compute,utility",
		"check: host network": check.HostNetwork,
		"setup: privileged":   *setupC.SecurityContext.Privileged,
		"setup: host PID":     setup.HostPID && !check.HostPID,
		"setup: MIG":          env(setupC)["NVIDIA_MIG_CONFIG_DEVICES"] == "all" && env(setupC)["NVIDIA_MIG_MONITOR_DEVICES"] == "all",
	}
	for level, points := range statements(t) {
		var paths []string
		for _, point := range points {
			if list, is := strings.CutPrefix(point, "host /"); is {
				paths = append(paths, strings.Split("/"+list, ", ")...)
				continue
			}
			held, known := holds[level+": "+point]
			require.True(t, known, "level %s, %q: say here what of the manifest that is", level, point)
			require.True(t, held, "level %s: the head states %q", level, point)
			delete(holds, level+": "+point)
		}
		require.ElementsMatch(t, paths, mounted(sets[level]), "level %s: the host's paths", level)
	}
	require.Empty(t, holds, "what the manifest has and its head does not state")
}

// mounted are the paths of the host that a level has, each at its place below
// the root that the agent is told.
func mounted(d *appsv1.DaemonSet) (out []string) {
	for _, v := range d.Spec.Template.Spec.Volumes {
		if v.HostPath == nil {
			continue
		}
		for _, m := range agent(d).VolumeMounts {
			if m.Name == v.Name && m.MountPath == path.Join(env(agent(d))["REFIT_HOST_ROOT"], v.HostPath.Path) {
				out = append(out, v.HostPath.Path)
			}
		}
	}
	return out
}
