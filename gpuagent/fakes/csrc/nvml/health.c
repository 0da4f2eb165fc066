#define _GNU_SOURCE
#include "api.h"
#include "state.h"

#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// A getter of one number: the state's key, else a healthy value.
#define NUMBER_GETTER(function, type, key, otherwise) \
	API function(nvmlDevice_t d, type *out) { \
		ENTER_BOARD(d); \
		if (is_unsupported(d->gpu, key)) return NVML_ERROR_NOT_SUPPORTED; \
		*out = (type)state_number(d->gpu, key, otherwise); \
		return NVML_SUCCESS; \
	}
NUMBER_GETTER(nvmlDeviceGetCurrPcieLinkWidth, unsigned, "pcie.width", 16)
NUMBER_GETTER(nvmlDeviceGetMaxPcieLinkWidth, unsigned, "pcie.width.max", 16)
NUMBER_GETTER(nvmlDeviceGetCurrPcieLinkGeneration, unsigned, "pcie.gen", model_of(d->gpu)->pcie_generation)
NUMBER_GETTER(nvmlDeviceGetMaxPcieLinkGeneration, unsigned, "pcie.gen.max", model_of(d->gpu)->pcie_generation)
NUMBER_GETTER(nvmlDeviceGetGpuMaxPcieLinkGeneration, unsigned, "pcie.gen.gpu", model_of(d->gpu)->pcie_generation)
NUMBER_GETTER(nvmlDeviceGetPcieReplayCounter, unsigned, "pcie.replay", 0)
NUMBER_GETTER(nvmlDeviceGetCurrentClocksEventReasons, unsigned long long, "throttle", 1)
NUMBER_GETTER(nvmlDeviceGetCurrentClocksThrottleReasons, unsigned long long, "throttle", 1)
NUMBER_GETTER(nvmlDeviceGetSupportedClocksEventReasons, unsigned long long, "throttle.supported", 0x1ff)
NUMBER_GETTER(nvmlDeviceGetPowerUsage, unsigned, "power.usage", 72000)
NUMBER_GETTER(nvmlDeviceGetPowerManagementLimit, unsigned, "power.limit", model_of(d->gpu)->power_mw)
NUMBER_GETTER(nvmlDeviceGetEnforcedPowerLimit, unsigned, "power.enforced", state_number(d->gpu, "power.limit", model_of(d->gpu)->power_mw))
NUMBER_GETTER(nvmlDeviceGetPowerManagementDefaultLimit, unsigned, "power.default", model_of(d->gpu)->power_mw)
NUMBER_GETTER(nvmlDeviceGetPersistenceMode, int, "persistence", 1)
NUMBER_GETTER(nvmlDeviceGetComputeMode, int, "compute.mode", 0)
NUMBER_GETTER(nvmlDeviceGetRetiredPagesPendingStatus, int, "retired.pending", 0)
NUMBER_GETTER(nvmlDeviceGetPowerState, int, "pstate", 0)

API nvmlDeviceGetPowerManagementLimitConstraints(nvmlDevice_t d, unsigned *low, unsigned *high) {
	ENTER_BOARD(d);
	if (is_unsupported(d->gpu, "power.limit"))
		return NVML_ERROR_NOT_SUPPORTED;
	*low = (unsigned)state_number(d->gpu, "power.min", 200000);
	*high = (unsigned)state_number(d->gpu, "power.max", model_of(d->gpu)->power_mw);
	return NVML_SUCCESS;
}

static nvmlReturn_t put_setting(int gpu, const char *key, long long value) {
	char text[32];
	if (!is_root())
		return NVML_ERROR_NO_PERMISSION;
	if (is_unsupported(gpu, key))
		return NVML_ERROR_NOT_SUPPORTED;
	snprintf(text, sizeof text, "%lld", value);
	state_put(gpu, key, text);
	return NVML_SUCCESS;
}

API nvmlDeviceSetPowerManagementLimit(nvmlDevice_t d, unsigned limit) {
	ENTER_BOARD(d);
	if (limit < state_number(d->gpu, "power.min", 200000) || limit > state_number(d->gpu, "power.max", model_of(d->gpu)->power_mw))
		return NVML_ERROR_INVALID_ARGUMENT;
	return put_setting(d->gpu, "power.limit", limit);
}

API nvmlDeviceSetPersistenceMode(nvmlDevice_t d, int mode) {
	ENTER_BOARD(d);
	return put_setting(d->gpu, "persistence", mode);
}

API nvmlDeviceSetComputeMode(nvmlDevice_t d, int mode) {
	ENTER_BOARD(d);
	return put_setting(d->gpu, "compute.mode", mode);
}

API nvmlDeviceGetEccMode(nvmlDevice_t d, int *current, int *pending) {
	ENTER_BOARD(d);
	if (is_unsupported(d->gpu, "ecc.current"))
		return NVML_ERROR_NOT_SUPPORTED;
	*current = (int)state_number(d->gpu, "ecc.current", 1);
	*pending = (int)state_number(d->gpu, "ecc.pending", *current);
	return NVML_SUCCESS;
}

// Without ECC there are no counters either.
static int no_ecc(int gpu) { return is_unsupported(gpu, "ecc.current") || !state_number(gpu, "ecc.current", 1); }

API nvmlDeviceGetTotalEccErrors(nvmlDevice_t d, int kind, int counter, unsigned long long *out) {
	ENTER_BOARD(d);
	char key[48];
	if (no_ecc(d->gpu))
		return NVML_ERROR_NOT_SUPPORTED;
	snprintf(key, sizeof key, "ecc.%s.%s", counter == 0 ? "volatile" : "aggregate", kind == 0 ? "corrected" : "uncorrected");
	if (is_unsupported(d->gpu, key))
		return NVML_ERROR_NOT_SUPPORTED;
	*out = (unsigned long long)state_number(d->gpu, key, 0);
	return NVML_SUCCESS;
}

API nvmlDeviceGetSramEccErrorStatus(nvmlDevice_t d, nvmlEccSramErrorStatus_v1_t *out) {
	ENTER_BOARD(d);
	if (out->version != STRUCT_VERSION(nvmlEccSramErrorStatus_v1_t, 1))
		return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
	if (no_ecc(d->gpu) || is_unsupported(d->gpu, "sram.threshold") || model_of(d->gpu)->major < 8)
		return NVML_ERROR_NOT_SUPPORTED;
	unsigned version = out->version;
	memset(out, 0, sizeof *out);
	out->version = version;
	out->volatileUncParity = (unsigned long long)state_number(d->gpu, "sram.volatile.uncorrected", 0);
	out->aggregateUncParity = (unsigned long long)state_number(d->gpu, "sram.aggregate.uncorrected", 0);
	out->bThresholdExceeded = (unsigned)state_number(d->gpu, "sram.threshold", 0);
	return NVML_SUCCESS;
}

// Row remapping begins with Ampere and is not answered while GPU instances
// exist.
static int no_remap(int gpu) {
	if (model_of(gpu)->major < 8 || is_unsupported(gpu, "remap"))
		return 1;
	for (int gi = 1; gi < MAX_GI; gi++)
		if (read_gpu_instance(gpu, gi, NULL))
			return 1;
	return 0;
}

API nvmlDeviceGetRemappedRows(nvmlDevice_t d, unsigned *corrected, unsigned *uncorrected, unsigned *pending, unsigned *failed) {
	ENTER_BOARD(d);
	if (no_remap(d->gpu))
		return NVML_ERROR_NOT_SUPPORTED;
	*corrected = (unsigned)state_number(d->gpu, "remap.corrected", 0);
	*uncorrected = (unsigned)state_number(d->gpu, "remap.uncorrected", 0);
	*pending = (unsigned)state_number(d->gpu, "remap.pending", 0);
	*failed = (unsigned)state_number(d->gpu, "remap.failed", 0);
	return NVML_SUCCESS;
}

API nvmlDeviceGetRemappedRows_v2(nvmlDevice_t d, nvmlRemappedRowsInfo_v2_t *out) {
	ENTER_BOARD(d);
	if (no_remap(d->gpu))
		return NVML_ERROR_NOT_SUPPORTED;
	*out = (nvmlRemappedRowsInfo_v2_t){
		(unsigned)state_number(d->gpu, "remap.corrected", 0), 0,
		(unsigned)state_number(d->gpu, "remap.uncorrected", 0), 0,
		(unsigned)state_number(d->gpu, "remap.pending", 0), (unsigned)state_number(d->gpu, "remap.failed", 0)};
	return NVML_SUCCESS;
}

API nvmlDeviceGetRowRemapperHistogram(nvmlDevice_t d, nvmlRowRemapperHistogramValues_t *out) {
	ENTER_BOARD(d);
	if (no_remap(d->gpu))
		return NVML_ERROR_NOT_SUPPORTED;
	unsigned none = (unsigned)state_number(d->gpu, "remap.banks.none", 0);
	*out = (nvmlRowRemapperHistogramValues_t){2560 - none, 0, 0, 0, none};
	return NVML_SUCCESS;
}

API nvmlDeviceGetUnrepairableMemoryFlag_v1(nvmlDevice_t d, nvmlUnrepairableMemoryStatus_v1_t *out) {
	ENTER_BOARD(d);
	if (is_unsupported(d->gpu, "unrepairable") || model_of(d->gpu)->major < 9)
		return NVML_ERROR_NOT_SUPPORTED;
	out->bUnrepairableMemory = (unsigned)state_number(d->gpu, "unrepairable", 0);
	return NVML_SUCCESS;
}

API nvmlDeviceGetRepairStatus(nvmlDevice_t d, nvmlRepairStatus_v1_t *out) {
	ENTER_BOARD(d);
	if (out->version != STRUCT_VERSION(nvmlRepairStatus_v1_t, 1))
		return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
	if (is_unsupported(d->gpu, "repair.channel") || model_of(d->gpu)->major < 8)
		return NVML_ERROR_NOT_SUPPORTED;
	out->bChannelRepairPending = (unsigned)state_number(d->gpu, "repair.channel", 0);
	out->bTpcRepairPending = (unsigned)state_number(d->gpu, "repair.tpc", 0);
	return NVML_SUCCESS;
}

// Ampere and newer remap rows instead of retiring pages.
API nvmlDeviceGetRetiredPages_v2(nvmlDevice_t d, int cause, unsigned *count, unsigned long long *addresses, unsigned long long *times) {
	ENTER_BOARD(d);
	if (model_of(d->gpu)->major >= 8)
		return NVML_ERROR_NOT_SUPPORTED;
	unsigned have = (unsigned)state_number(d->gpu, cause == 1 ? "retired.dbe" : "retired.sbe", 0), room = *count;
	*count = have;
	if (room < have)
		return NVML_ERROR_INSUFFICIENT_SIZE;
	for (unsigned i = 0; i < have && addresses; i++) {
		addresses[i] = 0x1000ull * i;
		if (times)
			times[i] = 0;
	}
	return NVML_SUCCESS;
}
API nvmlDeviceGetRetiredPages(nvmlDevice_t d, int cause, unsigned *count, unsigned long long *addresses) {
	return nvmlDeviceGetRetiredPages_v2(d, cause, count, addresses, NULL);
}

API nvmlDeviceValidateInforom(nvmlDevice_t d) {
	ENTER_BOARD(d);
	if (is_unsupported(d->gpu, "inforom"))
		return NVML_ERROR_NOT_SUPPORTED;
	return (nvmlReturn_t)state_number(d->gpu, "inforom", NVML_SUCCESS);
}

API nvmlDeviceGetTemperature(nvmlDevice_t d, int sensor, unsigned *out) {
	ENTER_BOARD(d);
	if (sensor != 0)
		return NVML_ERROR_INVALID_ARGUMENT;
	if (is_unsupported(d->gpu, "temperature"))
		return NVML_ERROR_NOT_SUPPORTED;
	*out = (unsigned)state_number(d->gpu, "temperature", 41);
	return NVML_SUCCESS;
}

API nvmlDeviceGetTemperatureV(nvmlDevice_t d, nvmlTemperature_v1_t *out) {
	ENTER_BOARD(d);
	if (out->version != STRUCT_VERSION(nvmlTemperature_v1_t, 1))
		return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
	if (is_unsupported(d->gpu, "temperature"))
		return NVML_ERROR_NOT_SUPPORTED;
	out->temperature = (int)state_number(d->gpu, "temperature", 41);
	return NVML_SUCCESS;
}

API nvmlDeviceGetTemperatureThreshold(nvmlDevice_t d, int kind, unsigned *out) {
	ENTER_BOARD(d);
	static const struct { const char *key; int otherwise; } kinds[] = {
		{"temperature.shutdown", 92}, {"temperature.slowdown", 89}, {"temperature.memory.max", 95}, {"temperature.gpu.max", 87}};
	if (kind < 0 || kind > 3 || is_unsupported(d->gpu, kinds[kind].key))
		return NVML_ERROR_NOT_SUPPORTED;
	*out = (unsigned)state_number(d->gpu, kinds[kind].key, kinds[kind].otherwise);
	return NVML_SUCCESS;
}

API nvmlDeviceGetMarginTemperature(nvmlDevice_t d, nvmlMarginTemperature_v1_t *out) {
	ENTER_BOARD(d);
	if (out->version != STRUCT_VERSION(nvmlMarginTemperature_v1_t, 1))
		return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
	if (is_unsupported(d->gpu, "temperature.margin"))
		return NVML_ERROR_NOT_SUPPORTED;
	out->marginTemperature = (int)state_number(d->gpu, "temperature.margin", 46);
	return NVML_SUCCESS;
}

// "processes.compute=4711:512,4712:1024:2:0": process id, MiB and, on a MIG
// device, the GPU and compute instance. A MIG device's handle sees its own only.
static nvmlReturn_t processes(nvmlDevice_t d, unsigned *count, void *out, size_t size, const char *key, const char *function) {
	struct call call __attribute__((cleanup(call_end))) = {0};
	if (!device_valid(d))
		return NVML_ERROR_INVALID_ARGUMENT;
	nvmlReturn_t begun = call_begin(&call, function, d->gpu);
	if (begun != NVML_SUCCESS)
		return begun;
	if (is_unsupported(d->gpu, key))
		return NVML_ERROR_NOT_SUPPORTED;
	unsigned room = *count, have = 0;
	for (const char *at = state_text(d->gpu, key, ""); at && *at; at = strchr(at, ',') ? strchr(at, ',') + 1 : NULL) {
		unsigned pid = 0, gi = 0xffffffffu, ci = 0xffffffffu;
		unsigned long long mib = 0;
		sscanf(at, "%u:%llu:%u:%u", &pid, &mib, &gi, &ci);
		if (d->gi && ((int)gi != d->gi || (int)ci != d->ci))
			continue;
		nvmlProcessInfo_t found = {pid, mib << 20, gi, ci};
		if (have < room && out)
			memcpy((char *)out + have * size, &found, size);
		have++;
	}
	*count = have;
	return have > room ? NVML_ERROR_INSUFFICIENT_SIZE : NVML_SUCCESS;
}
// The first version of the struct ends before the instance ids.
#define OLD_PROCESS offsetof(nvmlProcessInfo_t, gpuInstanceId)
#define PROCESSES(function, key) \
	API function(nvmlDevice_t d, unsigned *n, void *out) { return processes(d, n, out, OLD_PROCESS, key, __func__); } \
	API function##_v2(nvmlDevice_t d, unsigned *n, void *out) { return processes(d, n, out, sizeof(nvmlProcessInfo_t), key, __func__); } \
	API function##_v3(nvmlDevice_t d, unsigned *n, void *out) { return processes(d, n, out, sizeof(nvmlProcessInfo_t), key, __func__); }
PROCESSES(nvmlDeviceGetComputeRunningProcesses, "processes.compute")
PROCESSES(nvmlDeviceGetGraphicsRunningProcesses, "processes.graphics")
PROCESSES(nvmlDeviceGetMPSComputeRunningProcesses, "processes.mps")
