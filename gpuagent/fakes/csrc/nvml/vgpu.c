#define _GNU_SOURCE
#include "api.h"
#include "state.h"

#include <stdio.h>
#include <string.h>

// vGPU types of a host whose "vgpu.virtualization" is 3 (HOST_VGPU). The ids are
// ours; the names and sizes follow the vendor's scheme. The last column is the
// GPU instance profile of a MIG-backed type.
static const struct vgpu_type {
	unsigned id;
	const char *name;
	unsigned long long mib;
	unsigned most, profile;
} types[] = {
	{1001, "NVIDIA H100-10C", 10240, 8, 0xffffffffu},
	{1002, "NVIDIA H100-20C", 20480, 4, 0xffffffffu},
	{1003, "NVIDIA H100-40C", 40960, 2, 0xffffffffu},
	{1004, "NVIDIA H100-80C", 81920, 1, 0xffffffffu},
	{1101, "NVIDIA H100-1-10C", 10240, 7, 19},
	{1102, "NVIDIA H100-2-20C", 20480, 3, 14},
	{1103, "NVIDIA H100-3-40C", 40960, 2, 9},
};
#define TYPES ((int)(sizeof types / sizeof *types))

static const struct vgpu_type *type_of(unsigned id) {
	for (int i = 0; i < TYPES; i++)
		if (types[i].id == id)
			return &types[i];
	return NULL;
}

static int is_host(int gpu) { return state_number(gpu, "vgpu.virtualization", 0) == 3; }

#define ENTER_HOST(d) \
	ENTER_BOARD(d); \
	if (!is_host((d)->gpu)) return NVML_ERROR_NOT_SUPPORTED

API nvmlDeviceGetVirtualizationMode(nvmlDevice_t d, int *out) {
	ENTER_BOARD(d);
	*out = (int)state_number(d->gpu, "vgpu.virtualization", 0);
	return NVML_SUCCESS;
}

API nvmlDeviceGetHostVgpuMode(nvmlDevice_t d, int *out) {
	ENTER_HOST(d);
	*out = (int)state_number(d->gpu, "vgpu.sriov", 1);
	return NVML_SUCCESS;
}

// MIG-backed types on a GPU in MIG mode, time-sliced ones otherwise.
static nvmlReturn_t list(nvmlDevice_t d, unsigned *count, unsigned *out) {
	unsigned room = *count, have = 0, ids[TYPES];
	for (int i = 0; i < TYPES; i++)
		if ((types[i].profile != 0xffffffffu) == mig_enabled(d->gpu))
			ids[have++] = types[i].id;
	*count = have;
	if (!out || room < have)
		return NVML_ERROR_INSUFFICIENT_SIZE;
	memcpy(out, ids, have * sizeof *ids);
	return NVML_SUCCESS;
}

API nvmlDeviceGetSupportedVgpus(nvmlDevice_t d, unsigned *count, unsigned *out) {
	ENTER_HOST(d);
	return list(d, count, out);
}

API nvmlDeviceGetCreatableVgpus(nvmlDevice_t d, unsigned *count, unsigned *out) {
	ENTER_HOST(d);
	return list(d, count, out);
}

static nvmlReturn_t put_text(char *out, unsigned *size, const char *value) {
	unsigned need = (unsigned)strlen(value) + 1, room = *size;
	*size = need;
	if (!out || room < need)
		return NVML_ERROR_INSUFFICIENT_SIZE;
	memcpy(out, value, need);
	return NVML_SUCCESS;
}

#define ENTER_TYPE(id) \
	ENTER(-1); \
	const struct vgpu_type *type = type_of(id); \
	if (!type) return NVML_ERROR_INVALID_ARGUMENT

API nvmlVgpuTypeGetName(unsigned id, char *out, unsigned *size) {
	ENTER_TYPE(id);
	return put_text(out, size, type->name);
}

API nvmlVgpuTypeGetClass(unsigned id, char *out, unsigned *size) {
	ENTER_TYPE(id);
	return put_text(out, size, "Compute");
}

API nvmlVgpuTypeGetFramebufferSize(unsigned id, unsigned long long *out) {
	ENTER_TYPE(id);
	*out = type->mib << 20;
	return NVML_SUCCESS;
}

API nvmlVgpuTypeGetGpuInstanceProfileId(unsigned id, unsigned *out) {
	ENTER_TYPE(id);
	*out = type->profile;
	return NVML_SUCCESS;
}

API nvmlVgpuTypeGetMaxInstances(nvmlDevice_t d, unsigned id, unsigned *out) {
	ENTER_HOST(d);
	const struct vgpu_type *type = type_of(id);
	if (!type)
		return NVML_ERROR_INVALID_ARGUMENT;
	*out = type->most;
	return NVML_SUCCESS;
}

// "vgpu.active=2" makes two running vGPUs, numbered gpu*100+n.
API nvmlDeviceGetActiveVgpus(nvmlDevice_t d, unsigned *count, unsigned *out) {
	ENTER_HOST(d);
	unsigned room = *count, have = (unsigned)state_number(d->gpu, "vgpu.active", 0);
	*count = have;
	if (room < have)
		return NVML_ERROR_INSUFFICIENT_SIZE;
	for (unsigned i = 0; out && i < have; i++)
		out[i] = (unsigned)d->gpu * 100 + i + 1;
	return NVML_SUCCESS;
}

API nvmlVgpuInstanceGetUUID(unsigned instance, char *out, unsigned size) {
	ENTER(-1);
	return snprintf(out, size, "00000000-0000-4000-9000-%012u", instance) < (int)size ? NVML_SUCCESS : NVML_ERROR_INSUFFICIENT_SIZE;
}

API nvmlVgpuInstanceGetMdevUUID(unsigned instance, char *out, unsigned size) {
	ENTER(-1);
	return snprintf(out, size, "00000000-0000-4000-a000-%012u", instance) < (int)size ? NVML_SUCCESS : NVML_ERROR_INSUFFICIENT_SIZE;
}

API nvmlVgpuInstanceGetVmID(unsigned instance, char *out, unsigned size, int *kind) {
	ENTER(-1);
	*kind = 1;
	return snprintf(out, size, "00000000-0000-4000-b000-%012u", instance) < (int)size ? NVML_SUCCESS : NVML_ERROR_INSUFFICIENT_SIZE;
}

API nvmlVgpuInstanceGetType(unsigned instance, unsigned *out) {
	ENTER((int)instance / 100);
	*out = (unsigned)state_number((int)instance / 100, "vgpu.type", types[0].id);
	return NVML_SUCCESS;
}

API nvmlDeviceGetVgpuCapabilities(nvmlDevice_t d, int capability, unsigned *out) {
	ENTER_HOST(d);
	char key[32];
	snprintf(key, sizeof key, "vgpu.capability.%d", capability);
	*out = (unsigned)state_number(d->gpu, key, 1);
	return NVML_SUCCESS;
}

API nvmlDeviceGetVgpuHeterogeneousMode(nvmlDevice_t d, nvmlVgpuHeterogeneousMode_v1_t *out) {
	ENTER_HOST(d);
	if (out->version != STRUCT_VERSION(nvmlVgpuHeterogeneousMode_v1_t, 1))
		return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
	if (mig_enabled(d->gpu))
		return NVML_ERROR_NOT_SUPPORTED;
	out->mode = (unsigned)state_number(d->gpu, "vgpu.heterogeneous", 0);
	return NVML_SUCCESS;
}

static nvmlReturn_t may_set(int gpu) {
	if (!is_root())
		return NVML_ERROR_NO_PERMISSION;
	return state_number(gpu, "vgpu.active", 0) ? NVML_ERROR_IN_USE : NVML_SUCCESS;
}

static void put_number(int gpu, const char *key, unsigned value) {
	char text[16];
	snprintf(text, sizeof text, "%u", value);
	state_put(gpu, key, text);
}

API nvmlDeviceSetVgpuHeterogeneousMode(nvmlDevice_t d, const nvmlVgpuHeterogeneousMode_v1_t *in) {
	ENTER_HOST(d);
	if (in->version != STRUCT_VERSION(nvmlVgpuHeterogeneousMode_v1_t, 1))
		return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
	if (mig_enabled(d->gpu))
		return NVML_ERROR_NOT_SUPPORTED;
	nvmlReturn_t may = may_set(d->gpu);
	if (may == NVML_SUCCESS)
		put_number(d->gpu, "vgpu.heterogeneous", in->mode);
	return may;
}

API nvmlDeviceGetVgpuSchedulerCapabilities(nvmlDevice_t d, nvmlVgpuSchedulerCapabilities_t *out) {
	ENTER_HOST(d);
	*out = (nvmlVgpuSchedulerCapabilities_t){{1, 2, 3}, 30000000, 1000000, 1, 960, 63, 60, 1};
	return NVML_SUCCESS;
}

API nvmlDeviceGetVgpuSchedulerState(nvmlDevice_t d, nvmlVgpuSchedulerGetState_t *out) {
	ENTER_HOST(d);
	*out = (nvmlVgpuSchedulerGetState_t){(unsigned)state_number(d->gpu, "vgpu.scheduler.policy", 1),
		(unsigned)state_number(d->gpu, "vgpu.scheduler.arr", 1), (unsigned)state_number(d->gpu, "vgpu.scheduler.first", 0),
		(unsigned)state_number(d->gpu, "vgpu.scheduler.second", 0)};
	return NVML_SUCCESS;
}

API nvmlDeviceSetVgpuSchedulerState(nvmlDevice_t d, nvmlVgpuSchedulerSetState_t *in) {
	ENTER_HOST(d);
	nvmlReturn_t may = may_set(d->gpu);
	if (may != NVML_SUCCESS)
		return may;
	if (in->schedulerPolicy < 1 || in->schedulerPolicy > 3)
		return NVML_ERROR_INVALID_ARGUMENT;
	put_number(d->gpu, "vgpu.scheduler.policy", in->schedulerPolicy);
	put_number(d->gpu, "vgpu.scheduler.arr", in->arrMode);
	put_number(d->gpu, "vgpu.scheduler.first", in->first);
	put_number(d->gpu, "vgpu.scheduler.second", in->second);
	return NVML_SUCCESS;
}

API nvmlDeviceGetVgpuSchedulerState_v2(nvmlDevice_t d, nvmlVgpuSchedulerStateInfo_v2_t *out) {
	ENTER_HOST(d);
	*out = (nvmlVgpuSchedulerStateInfo_v2_t){out->engineId, (unsigned)state_number(d->gpu, "vgpu.scheduler.policy", 1),
		(unsigned)state_number(d->gpu, "vgpu.scheduler.first", 0), (unsigned)state_number(d->gpu, "vgpu.scheduler.second", 0)};
	return NVML_SUCCESS;
}

API nvmlDeviceSetVgpuSchedulerState_v2(nvmlDevice_t d, nvmlVgpuSchedulerState_v2_t *in) {
	ENTER_HOST(d);
	nvmlReturn_t may = may_set(d->gpu);
	if (may != NVML_SUCCESS)
		return may;
	if (in->schedulerPolicy < 1 || in->schedulerPolicy > 3)
		return NVML_ERROR_INVALID_ARGUMENT;
	put_number(d->gpu, "vgpu.scheduler.policy", in->schedulerPolicy);
	put_number(d->gpu, "vgpu.scheduler.first", in->avgFactor);
	put_number(d->gpu, "vgpu.scheduler.second", in->frequency);
	return NVML_SUCCESS;
}
