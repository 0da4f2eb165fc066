// The part of the NVML API (major version 13) that the agent calls, written
// from its published documentation. Struct versions carry the struct's size,
// so a layout that differs from the caller's is refused at run time.
#ifndef REFIT_FAKE_NVML_API_H
#define REFIT_FAKE_NVML_API_H

typedef int nvmlReturn_t;
enum {
	NVML_SUCCESS = 0,
	NVML_ERROR_UNINITIALIZED = 1,
	NVML_ERROR_INVALID_ARGUMENT = 2,
	NVML_ERROR_NOT_SUPPORTED = 3,
	NVML_ERROR_NO_PERMISSION = 4,
	NVML_ERROR_NOT_FOUND = 6,
	NVML_ERROR_INSUFFICIENT_SIZE = 7,
	NVML_ERROR_DRIVER_NOT_LOADED = 9,
	NVML_ERROR_TIMEOUT = 10,
	NVML_ERROR_GPU_IS_LOST = 15,
	NVML_ERROR_RESET_REQUIRED = 16,
	NVML_ERROR_LIB_RM_VERSION_MISMATCH = 18,
	NVML_ERROR_IN_USE = 19,
	NVML_ERROR_INSUFFICIENT_RESOURCES = 23,
	NVML_ERROR_ARGUMENT_VERSION_MISMATCH = 25,
	NVML_ERROR_UNKNOWN = 999,
};
#define STRUCT_VERSION(type, n) ((unsigned)(sizeof(type) | (n) << 24))

typedef struct device *nvmlDevice_t;
typedef struct gi_handle *nvmlGpuInstance_t;
typedef struct ci_handle *nvmlComputeInstance_t;
typedef struct event_set *nvmlEventSet_t;

struct device { int gpu, gi, ci; }; // gi is 0 for a whole GPU
struct gi_handle { int gpu, gi; };
struct ci_handle { int gpu, gi, ci; };

typedef struct {
	char busIdLegacy[16];
	unsigned domain, bus, device, pciDeviceId, pciSubSystemId;
	char busId[32];
} nvmlPciInfo_t;
typedef struct { unsigned long long total, free, used; } nvmlMemory_t;
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } nvmlMemory_v2_t;
typedef struct { unsigned long long bar1Total, bar1Free, bar1Used; } nvmlBAR1Memory_t;
typedef struct { unsigned gpu, memory; } nvmlUtilization_t;
typedef union {
	double dVal; int siVal; unsigned uiVal; unsigned long ulVal;
	unsigned long long ullVal; long long sllVal; unsigned short usVal;
} nvmlValue_t;
typedef struct {
	unsigned fieldId, scopeId;
	long long timestamp, latencyUsec;
	int valueType;
	nvmlReturn_t nvmlReturn;
	nvmlValue_t value;
} nvmlFieldValue_t;
typedef struct {
	unsigned pid;
	unsigned long long usedGpuMemory;
	unsigned gpuInstanceId, computeInstanceId;
} nvmlProcessInfo_t;
typedef struct {
	unsigned version;
	unsigned long long aggregateUncParity, aggregateUncSecDed, aggregateCor, volatileUncParity,
		volatileUncSecDed, volatileCor, bucketL2, bucketSm, bucketPcie, bucketMcu, bucketOther;
	unsigned bThresholdExceeded;
} nvmlEccSramErrorStatus_v1_t;
typedef struct { unsigned max, high, partial, low, none; } nvmlRowRemapperHistogramValues_t;
typedef struct {
	unsigned corrActiveRemaps, corrInactiveRemaps, uncActiveRemaps, uncInactiveRemaps, bPending, bFailureOccurred;
} nvmlRemappedRowsInfo_v2_t;
typedef struct { unsigned version, bChannelRepairPending, bTpcRepairPending; } nvmlRepairStatus_v1_t;
typedef struct { unsigned bUnrepairableMemory; } nvmlUnrepairableMemoryStatus_v1_t;
typedef struct { unsigned version; int sensorType; int temperature; } nvmlTemperature_v1_t;
typedef struct { unsigned version; int marginTemperature; } nvmlMarginTemperature_v1_t;
typedef struct {
	unsigned char clusterUuid[16];
	nvmlReturn_t status;
	unsigned cliqueId;
	unsigned char state;
} nvmlGpuFabricInfo_t;
typedef struct {
	unsigned version;
	unsigned char clusterUuid[16];
	nvmlReturn_t status;
	unsigned cliqueId;
	unsigned char state;
	unsigned healthMask;
} nvmlGpuFabricInfo_v2_t;
typedef struct {
	unsigned version;
	unsigned char clusterUuid[16];
	nvmlReturn_t status;
	unsigned cliqueId;
	unsigned char state;
	unsigned healthMask;
	unsigned char healthSummary;
} nvmlGpuFabricInfo_v3_t;
typedef struct {
	nvmlDevice_t device;
	unsigned long long eventType, eventData;
	unsigned gpuInstanceId, computeInstanceId;
} nvmlEventData_t;
typedef struct { unsigned environment, ccFeature, devToolsMode; } nvmlConfComputeSystemState_t;
typedef struct { unsigned isC2cEnabled; } nvmlC2cModeInfo_v1_t;

typedef struct {
	unsigned id, isP2pSupported, sliceCount, instanceCount, multiprocessorCount, copyEngineCount,
		decoderCount, encoderCount, jpegCount, ofaCount;
	unsigned long long memorySizeMB;
} nvmlGpuInstanceProfileInfo_t;
typedef struct {
	unsigned version, id, isP2pSupported, sliceCount, instanceCount, multiprocessorCount,
		copyEngineCount, decoderCount, encoderCount, jpegCount, ofaCount;
	unsigned long long memorySizeMB;
	char name[96];
} nvmlGpuInstanceProfileInfo_v2_t;
typedef struct {
	unsigned version, id, sliceCount, instanceCount, multiprocessorCount, copyEngineCount,
		decoderCount, encoderCount, jpegCount, ofaCount;
	unsigned long long memorySizeMB;
	char name[96];
	unsigned capabilities;
} nvmlGpuInstanceProfileInfo_v3_t;
typedef struct { unsigned start, size; } nvmlGpuInstancePlacement_t;
typedef nvmlGpuInstancePlacement_t nvmlComputeInstancePlacement_t;
typedef struct {
	nvmlDevice_t device;
	unsigned id, profileId;
	nvmlGpuInstancePlacement_t placement;
} nvmlGpuInstanceInfo_t;
typedef struct {
	unsigned id, sliceCount, instanceCount, multiprocessorCount, sharedCopyEngineCount,
		sharedDecoderCount, sharedEncoderCount, sharedJpegCount, sharedOfaCount;
} nvmlComputeInstanceProfileInfo_t;
typedef struct {
	unsigned version, id, sliceCount, instanceCount, multiprocessorCount, sharedCopyEngineCount,
		sharedDecoderCount, sharedEncoderCount, sharedJpegCount, sharedOfaCount;
	char name[96];
} nvmlComputeInstanceProfileInfo_v2_t;
typedef struct {
	nvmlDevice_t device;
	nvmlGpuInstance_t gpuInstance;
	unsigned id, profileId;
	nvmlComputeInstancePlacement_t placement;
} nvmlComputeInstanceInfo_t;
typedef struct {
	unsigned multiprocessorCount, sharedCopyEngineCount, sharedDecoderCount, sharedEncoderCount,
		sharedJpegCount, sharedOfaCount, gpuInstanceSliceCount, computeInstanceSliceCount;
	unsigned long long memorySizeMB;
} nvmlDeviceAttributes_t;

typedef struct { unsigned version, mode; } nvmlVgpuHeterogeneousMode_v1_t;
typedef struct { unsigned engineId, schedulerPolicy, avgFactor, timeslice; } nvmlVgpuSchedulerStateInfo_v2_t;
typedef struct { unsigned engineId, schedulerPolicy, avgFactor, frequency; } nvmlVgpuSchedulerState_v2_t;
typedef struct { unsigned schedulerPolicy, arrMode, first, second; } nvmlVgpuSchedulerGetState_t;
typedef nvmlVgpuSchedulerGetState_t nvmlVgpuSchedulerSetState_t;
typedef struct {
	unsigned supportedSchedulers[3], maxTimeslice, minTimeslice, isArrModeSupported,
		maxFrequencyForARR, minFrequencyForARR, maxAvgFactorForARR, minAvgFactorForARR;
} nvmlVgpuSchedulerCapabilities_t;

// One call of the API: state open, faults applied. Declared in call.c.
struct call { int open, dies; };
nvmlReturn_t call_begin(struct call *call, const char *function, int gpu);
void call_end(struct call *call);
int device_valid(nvmlDevice_t device);
nvmlDevice_t device_handle(int gpu, int gi, int ci);

#define API EXPORT nvmlReturn_t
#define ENTER(gpu) \
	struct call call_ __attribute__((cleanup(call_end))) = {0}; \
	nvmlReturn_t begun_ = call_begin(&call_, __func__, gpu); \
	if (begun_ != NVML_SUCCESS) return begun_
#define ENTER_DEVICE(device) \
	if (!device_valid(device)) return NVML_ERROR_INVALID_ARGUMENT; \
	ENTER((device)->gpu)
#define ENTER_INSTANCE(handle) \
	if (!(handle)) return NVML_ERROR_INVALID_ARGUMENT; \
	ENTER((handle)->gpu)
// Most getters speak for the whole board and refuse a MIG device.
#define ENTER_BOARD(device) \
	ENTER_DEVICE(device); \
	if ((device)->gi) return NVML_ERROR_NOT_SUPPORTED

#endif
