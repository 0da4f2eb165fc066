package tensorfusion

import "k8s.io/apimachinery/pkg/runtime/schema"

// Group and version of TensorFusion's API; the same in 1.x and 2.x.
const (
	apiGroup   = "tensor-fusion.ai"
	apiVersion = "v1"
)

// Labels and annotations of TensorFusion 2.x with its default domain.
const (
	labelComponent    = "tensor-fusion.ai/component"
	labelIsolation    = "tensor-fusion.ai/isolationMode"
	labelEnabled      = "tensor-fusion.ai/enabled"
	labelGPUPool      = "tensor-fusion.ai/gpupool"
	labelWorkload     = "tensor-fusion.ai/workload"
	labelManagedBy    = "tensor-fusion.ai/managed-by"
	labelTemplateHash = "tensor-fusion.ai/pod-template-hash"

	annotationRequestTFlops = "tensor-fusion.ai/tflops-request"
	annotationLimitTFlops   = "tensor-fusion.ai/tflops-limit"
	annotationRequestVRAM   = "tensor-fusion.ai/vram-request"
	annotationLimitVRAM     = "tensor-fusion.ai/vram-limit"
	annotationGPUCount      = "tensor-fusion.ai/gpu-count"
	annotationInject        = "tensor-fusion.ai/inject-container"
	annotationGPUPool       = "tensor-fusion.ai/gpupool"
	annotationGPUMissing    = "tensor-fusion.ai/gpu-missing-since"

	componentOperator   = "operator"
	componentHypervisor = "hypervisor"
	componentWorker     = "worker"

	// labelDriverUpgrade is the GPU operator's; while it is set and not done
	// the controller ignores the node (facts, rule 19).
	labelDriverUpgrade = "nvidia.com/gpu-driver-upgrade-state"
	driverUpgradeDone  = "upgrade-done"
)

// progressAnnotations stand on a GPUPool while one of its components rolls.
var progressAnnotations = []string{
	"tensor-fusion.ai/hypervisor-update-in-progress",
	"tensor-fusion.ai/worker-update-in-progress",
	"tensor-fusion.ai/client-update-in-progress",
}

// Names that the chart and the controller fix.
const (
	controllerContainer = "controller"
	runtimeInit         = "init-runtime"
	leaderLease         = "85104305.tensor-fusion.ai"
	controllerPort      = 8080
	defaultPort         = 8000 // hypervisor.portNumber's default in the CRD
	policyEnv           = "TF_ISOLATION_MODE_POLICY"
	nvidiaVendor        = "NVIDIA"
)

// Pods by their labels. Local-GPU application pods carry the worker's component
// too, but no workload makes them: they are judged as clients.
const (
	workerSelector = labelComponent + "=" + componentWorker + "," + labelWorkload
	clientPods     = labelEnabled + "=true," + labelGPUPool
)

// Our own marks.
const (
	fieldManager = "refit"
	// annotationPolicyBefore on the TensorFusionCluster keeps the policy as it
	// was before the hold, so that a lost reply or a dead run loses nothing.
	annotationPolicyBefore = "refit.run/policy-before"
	// annotationRollingWorkers names the GPUPool whose worker flag a run has
	// switched on for the time of its rollout.
	annotationRollingWorkers = "refit.run/rolling-workers"
	// nudgeEnv is the harmless extra variable of the hypervisor template that
	// makes the controller store synced=false (facts, section 5).
	nudgeEnv   = "REFIT_HOLD_NUDGE"
	labelProbe = "refit.run/probe"
	probeCUDA  = "cuda"
)

func tensorFusion(resource string) schema.GroupVersionResource {
	return schema.GroupVersionResource{Group: apiGroup, Version: apiVersion, Resource: resource}
}

var (
	clustersGVR        = tensorFusion("tensorfusionclusters")
	poolsGVR           = tensorFusion("gpupools")
	gpuNodesGVR        = tensorFusion("gpunodes")
	gpusGVR            = tensorFusion("gpus")
	workloadsGVR       = tensorFusion("tensorfusionworkloads")
	connectionsGVR     = tensorFusion("tensorfusionconnections")
	providerConfigsGVR = tensorFusion("providerconfigs")
	templatesGVR       = tensorFusion("schedulingconfigtemplates")

	podsGVR         = schema.GroupVersionResource{Version: "v1", Resource: "pods"}
	nodesGVR        = schema.GroupVersionResource{Version: "v1", Resource: "nodes"}
	deploymentsGVR  = schema.GroupVersionResource{Group: "apps", Version: "v1", Resource: "deployments"}
	statefulSetsGVR = schema.GroupVersionResource{Group: "apps", Version: "v1", Resource: "statefulsets"}
	crdsGVR         = schema.GroupVersionResource{Group: "apiextensions.k8s.io", Version: "v1", Resource: "customresourcedefinitions"}
)

// poolLabel stands on the GPUNodes and hypervisor pods of a GPUPool.
func poolLabel(pool string) string { return "tensor-fusion.ai/pool-" + pool }
