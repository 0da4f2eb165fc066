package charts

import "fmt"

// Registry is the host that every image of the charts names; the sandbox maps
// it to its own registry.
const Registry = "registry.refit.local"

const repository = Registry + "/tensorfusion"

// HypervisorImage is the hypervisor of one release, for cluster.hypervisorImage.
func HypervisorImage(tag string) string {
	return repository + "/tensor-fusion-hypervisor:" + tag
}

// appVersions is the controller that each chart version installs.
var appVersions = map[string]string{"1.8.6": "2.16.3", "1.8.7": "2.17.0"}

// Images lists what one chart version names, with its own values as well as
// with those of Values. An unknown version names nothing.
func Images(version string) []string {
	controller, ok := appVersions[version]
	if !ok {
		return nil
	}
	return []string{
		repository + "/tensor-fusion-operator:" + controller,
		HypervisorImage("2.15.0"),
		repository + "/vgpu-provider-nvidia:1.3.9",
		repository + "/tensor-fusion-client:v2.15.0",
		repository + "/tensor-fusion-worker:v2.15.0",
		repository + "/vector:latest-alpine",
		repository + "/certgen:v1.5.0",
		repository + "/cluster-agent:1.0.0",
		repository + "/alertmanager:v0.28.1",
		repository + "/greptimedb:latest",
	}
}

// Upgrades lists images that no chart names by itself but an upgrade may ask
// for: newer hypervisors, workers, clients, middleware, and the controllers
// that a change of only controller.image.tag uses.
func Upgrades() []string {
	images := []string{
		repository + "/vgpu-provider-nvidia:1.4.0",
		repository + "/cuda-probe:1.0.0",
	}
	for _, tag := range []string{"2.13.0", "2.14.0", "2.15.0", "2.16.0", "2.17.1"} {
		images = append(images, repository+"/tensor-fusion-operator:"+tag)
	}
	for _, tag := range []string{"2.16.3", "2.17.0", "2.17.1"} {
		images = append(images, HypervisorImage(tag),
			fmt.Sprintf("%s/tensor-fusion-client:v%s", repository, tag),
			fmt.Sprintf("%s/tensor-fusion-worker:v%s", repository, tag))
	}
	return images
}
