#define _GNU_SOURCE
#include "api.h"
#include "state.h"

#include <stdio.h>
#include <string.h>

nvmlComputeInstance_t mig_ci_handle(int gpu, int gi, int ci);
nvmlGpuInstance_t mig_gi_handle(int gpu, int gi);

// Slices of a compute instance profile, whose id equals its constant; 0 where
// the GPU instance is too small for it.
static const int sizes[] = {1, 2, 3, 4, 7};
static int slices_of(unsigned profile, int instance) {
	return profile < 5 && sizes[profile] <= instance ? sizes[profile] : 0;
}

static int instance_slices(nvmlGpuInstance_t h) {
	struct gpu_instance have;
	if (!read_gpu_instance(h->gpu, h->gi, &have))
		return 0;
	const struct mig_profile *p = profile_by_id(have.profile);
	return p ? p->slices : 0;
}

API nvmlGpuInstanceGetComputeInstanceProfileInfo(nvmlGpuInstance_t h, unsigned profile, unsigned engine, nvmlComputeInstanceProfileInfo_t *out) {
	ENTER_INSTANCE(h);
	int whole = instance_slices(h), slices = slices_of(profile, whole);
	if (!whole)
		return NVML_ERROR_NOT_FOUND;
	if (!slices || engine)
		return NVML_ERROR_NOT_SUPPORTED;
	*out = (nvmlComputeInstanceProfileInfo_t){profile, (unsigned)slices, (unsigned)(whole / slices),
		(unsigned)(model_of(h->gpu)->multiprocessors * slices / 8), (unsigned)whole, (unsigned)whole, 0, (unsigned)whole, whole == 7};
	return NVML_SUCCESS;
}

API nvmlGpuInstanceGetComputeInstanceProfileInfoV(nvmlGpuInstance_t h, unsigned profile, unsigned engine, nvmlComputeInstanceProfileInfo_v2_t *out) {
	ENTER_INSTANCE(h);
	int whole = instance_slices(h), slices = slices_of(profile, whole);
	if (!whole)
		return NVML_ERROR_NOT_FOUND;
	if (!slices || engine)
		return NVML_ERROR_NOT_SUPPORTED;
	if (out->version != STRUCT_VERSION(nvmlComputeInstanceProfileInfo_v2_t, 2))
		return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
	*out = (nvmlComputeInstanceProfileInfo_v2_t){out->version, profile, (unsigned)slices, (unsigned)(whole / slices),
		(unsigned)(model_of(h->gpu)->multiprocessors * slices / 8), (unsigned)whole, (unsigned)whole, 0, (unsigned)whole, whole == 7, ""};
	snprintf(out->name, sizeof out->name, "MIG %dc.%dg", slices, whole);
	return NVML_SUCCESS;
}

static int is_free(nvmlGpuInstance_t h, int start, int size) {
	struct compute_instance have;
	for (int ci = 0; ci < MAX_CI; ci++)
		if (read_compute_instance(h->gpu, h->gi, ci, &have) && start < have.start + have.size && have.start < start + size)
			return 0;
	return 1;
}

API nvmlGpuInstanceGetComputeInstancePossiblePlacements(nvmlGpuInstance_t h, unsigned profile, nvmlComputeInstancePlacement_t *out, unsigned *count) {
	ENTER_INSTANCE(h);
	int whole = instance_slices(h), slices = slices_of(profile, whole);
	if (!slices)
		return NVML_ERROR_INVALID_ARGUMENT;
	unsigned room = *count;
	*count = (unsigned)(whole / slices);
	for (unsigned i = 0; out && i < *count && i < room; i++)
		out[i] = (nvmlComputeInstancePlacement_t){i * (unsigned)slices, (unsigned)slices};
	return NVML_SUCCESS;
}

API nvmlGpuInstanceGetComputeInstanceRemainingCapacity(nvmlGpuInstance_t h, unsigned profile, unsigned *out) {
	ENTER_INSTANCE(h);
	int whole = instance_slices(h), slices = slices_of(profile, whole);
	if (!slices)
		return NVML_ERROR_INVALID_ARGUMENT;
	*out = 0;
	for (int start = 0; start + slices <= whole; start += slices)
		*out += (unsigned)is_free(h, start, slices);
	return NVML_SUCCESS;
}

static nvmlReturn_t create(nvmlGpuInstance_t h, unsigned profile, int wanted, nvmlComputeInstance_t *out) {
	int whole = instance_slices(h), slices = slices_of(profile, whole), ci = 0;
	if (!is_root())
		return NVML_ERROR_NO_PERMISSION;
	if (!whole)
		return NVML_ERROR_NOT_FOUND;
	if (!slices)
		return NVML_ERROR_INVALID_ARGUMENT;
	while (ci < MAX_CI && read_compute_instance(h->gpu, h->gi, ci, NULL))
		ci++;
	for (int start = 0; ci < MAX_CI && start + slices <= whole; start++) {
		if ((wanted >= 0 && start != wanted) || !is_free(h, start, slices))
			continue;
		write_compute_instance(h->gpu, h->gi, ci, &(struct compute_instance){1, (int)profile, start, slices});
		*out = mig_ci_handle(h->gpu, h->gi, ci);
		return NVML_SUCCESS;
	}
	return NVML_ERROR_INSUFFICIENT_RESOURCES;
}

API nvmlGpuInstanceCreateComputeInstance(nvmlGpuInstance_t h, unsigned profile, nvmlComputeInstance_t *out) {
	ENTER_INSTANCE(h);
	return create(h, profile, -1, out);
}

API nvmlGpuInstanceCreateComputeInstanceWithPlacement(nvmlGpuInstance_t h, unsigned profile, const nvmlComputeInstancePlacement_t *place, nvmlComputeInstance_t *out) {
	ENTER_INSTANCE(h);
	return create(h, profile, (int)place->start, out);
}

API nvmlGpuInstanceGetComputeInstances(nvmlGpuInstance_t h, unsigned profile, nvmlComputeInstance_t *out, unsigned *count) {
	ENTER_INSTANCE(h);
	struct compute_instance have;
	if (!instance_slices(h))
		return NVML_ERROR_NOT_FOUND;
	*count = 0;
	for (int ci = 0; ci < MAX_CI; ci++)
		if (read_compute_instance(h->gpu, h->gi, ci, &have) && have.profile == (int)profile)
			out[(*count)++] = mig_ci_handle(h->gpu, h->gi, ci);
	return NVML_SUCCESS;
}

API nvmlGpuInstanceGetComputeInstanceById(nvmlGpuInstance_t h, unsigned id, nvmlComputeInstance_t *out) {
	ENTER_INSTANCE(h);
	if (id >= MAX_CI || !read_compute_instance(h->gpu, h->gi, (int)id, NULL))
		return NVML_ERROR_NOT_FOUND;
	*out = mig_ci_handle(h->gpu, h->gi, (int)id);
	return NVML_SUCCESS;
}

static nvmlReturn_t info(nvmlComputeInstance_t h, nvmlComputeInstanceInfo_t *out, const char *function) {
	struct call call __attribute__((cleanup(call_end))) = {0};
	struct compute_instance have;
	if (!h)
		return NVML_ERROR_INVALID_ARGUMENT;
	nvmlReturn_t begun = call_begin(&call, function, h->gpu);
	if (begun != NVML_SUCCESS)
		return begun;
	if (!read_compute_instance(h->gpu, h->gi, h->ci, &have))
		return NVML_ERROR_NOT_FOUND;
	*out = (nvmlComputeInstanceInfo_t){device_handle(h->gpu, 0, 0), mig_gi_handle(h->gpu, h->gi), (unsigned)h->ci,
		(unsigned)have.profile, {(unsigned)have.start, (unsigned)have.size}};
	return NVML_SUCCESS;
}
API nvmlComputeInstanceGetInfo_v2(nvmlComputeInstance_t h, nvmlComputeInstanceInfo_t *out) { return info(h, out, __func__); }

// A process of the instance (see processes in health.c) keeps it.
static int busy(int gpu, int gi, int ci) {
	const char *at = state_text(gpu, "processes.compute", "");
	while (at && *at) {
		int in_gi = -1, in_ci = -1;
		sscanf(at, "%*u:%*u:%d:%d", &in_gi, &in_ci);
		if (in_gi == gi && in_ci == ci)
			return 1;
		at = strchr(at, ',') ? strchr(at, ',') + 1 : NULL;
	}
	return 0;
}

API nvmlComputeInstanceDestroy(nvmlComputeInstance_t h) {
	ENTER_INSTANCE(h);
	if (!is_root())
		return NVML_ERROR_NO_PERMISSION;
	if (!read_compute_instance(h->gpu, h->gi, h->ci, NULL))
		return NVML_ERROR_NOT_FOUND;
	if (busy(h->gpu, h->gi, h->ci))
		return NVML_ERROR_IN_USE;
	write_compute_instance(h->gpu, h->gi, h->ci, NULL);
	return NVML_SUCCESS;
}

// MIG devices: one per compute instance.
API nvmlDeviceIsMigDeviceHandle(nvmlDevice_t d, unsigned *out) {
	ENTER_DEVICE(d);
	*out = d->gi != 0;
	return NVML_SUCCESS;
}

API nvmlDeviceGetMigDeviceHandleByIndex(nvmlDevice_t d, unsigned index, nvmlDevice_t *out) {
	ENTER_BOARD(d);
	if (index >= COMPUTE_SLICES)
		return NVML_ERROR_INVALID_ARGUMENT;
	for (int gi = 1; gi < MAX_GI; gi++)
		for (int ci = 0; ci < MAX_CI; ci++)
			if (read_compute_instance(d->gpu, gi, ci, NULL) && index-- == 0) {
				*out = device_handle(d->gpu, gi, ci);
				return NVML_SUCCESS;
			}
	return NVML_ERROR_NOT_FOUND;
}

API nvmlDeviceGetDeviceHandleFromMigDeviceHandle(nvmlDevice_t d, nvmlDevice_t *out) {
	ENTER_DEVICE(d);
	if (!d->gi)
		return NVML_ERROR_INVALID_ARGUMENT;
	*out = device_handle(d->gpu, 0, 0);
	return NVML_SUCCESS;
}

API nvmlDeviceGetGpuInstanceId(nvmlDevice_t d, unsigned *out) {
	ENTER_DEVICE(d);
	*out = (unsigned)d->gi;
	return d->gi ? NVML_SUCCESS : NVML_ERROR_NOT_SUPPORTED;
}

API nvmlDeviceGetComputeInstanceId(nvmlDevice_t d, unsigned *out) {
	ENTER_DEVICE(d);
	*out = (unsigned)d->ci;
	return d->gi ? NVML_SUCCESS : NVML_ERROR_NOT_SUPPORTED;
}

API nvmlDeviceGetAttributes_v2(nvmlDevice_t d, nvmlDeviceAttributes_t *out) {
	ENTER_DEVICE(d);
	struct gpu_instance gi;
	struct compute_instance ci;
	if (!d->gi)
		return NVML_ERROR_NOT_SUPPORTED;
	if (!read_gpu_instance(d->gpu, d->gi, &gi) || !read_compute_instance(d->gpu, d->gi, d->ci, &ci))
		return NVML_ERROR_NOT_FOUND;
	const struct mig_profile *p = profile_by_id(gi.profile);
	unsigned whole = (unsigned)p->slices;
	*out = (nvmlDeviceAttributes_t){(unsigned)(model_of(d->gpu)->multiprocessors * ci.size / 8), whole, whole, 0, whole,
		whole == 7, whole, (unsigned)ci.size, (unsigned long long)profile_mib(d->gpu, p)};
	return NVML_SUCCESS;
}
