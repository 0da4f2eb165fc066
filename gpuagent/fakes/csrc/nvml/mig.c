#define _GNU_SOURCE
#include "api.h"
#include "state.h"

#include <stdio.h>
#include <string.h>

static struct gi_handle gi_handles[MAX_GPUS][MAX_GI];
static struct ci_handle ci_handles[MAX_GPUS][MAX_GI][MAX_CI];

static int capable(int gpu) { return model_of(gpu)->major >= 8 && !is_unsupported(gpu, "mig"); }

static nvmlGpuInstance_t gi_handle(int gpu, int gi) {
	gi_handles[gpu][gi] = (struct gi_handle){gpu, gi};
	return &gi_handles[gpu][gi];
}
static nvmlComputeInstance_t ci_handle(int gpu, int gi, int ci) {
	ci_handles[gpu][gi][ci] = (struct ci_handle){gpu, gi, ci};
	return &ci_handles[gpu][gi][ci];
}

API nvmlDeviceGetMigMode(nvmlDevice_t d, unsigned *current, unsigned *pending) {
	ENTER_BOARD(d);
	if (!capable(d->gpu))
		return NVML_ERROR_NOT_SUPPORTED;
	*current = (unsigned)state_number(d->gpu, "mig.current", 0);
	*pending = (unsigned)state_number(d->gpu, "mig.pending", *current);
	return NVML_SUCCESS;
}

static void clear_instances(int gpu) {
	for (int gi = 1; gi < MAX_GI; gi++) {
		write_gpu_instance(gpu, gi, NULL);
		for (int ci = 0; ci < MAX_CI; ci++)
			write_compute_instance(gpu, gi, ci, NULL);
	}
}

// The mode is pending at once and becomes current unless the GPU has clients
// (IN_USE) or its reset is out of reach ("mig.needs.reset"): the planned fault
// of "mig.activation" gives the activation status of the next calls.
API nvmlDeviceSetMigMode(nvmlDevice_t d, unsigned mode, nvmlReturn_t *activation) {
	ENTER_BOARD(d);
	*activation = NVML_SUCCESS;
	if (!capable(d->gpu))
		return NVML_ERROR_NOT_SUPPORTED;
	if (!is_root())
		return NVML_ERROR_NO_PERMISSION;
	if (mode > 1)
		return NVML_ERROR_INVALID_ARGUMENT;
	state_put(d->gpu, "mig.pending", mode ? "1" : "0");
	if (state_number(d->gpu, "mig.current", 0) == (long long)mode)
		return NVML_SUCCESS;
	*activation = planned_fault(d->gpu, "mig.activation");
	if (*activation == NVML_SUCCESS && *state_text(d->gpu, "processes.compute", ""))
		*activation = NVML_ERROR_IN_USE;
	if (*activation == NVML_SUCCESS && state_number(d->gpu, "mig.needs.reset", 0))
		*activation = NVML_ERROR_RESET_REQUIRED;
	if (*activation == NVML_SUCCESS) {
		clear_instances(d->gpu);
		state_put(d->gpu, "mig.current", mode ? "1" : "0");
	}
	return NVML_SUCCESS;
}

API nvmlDeviceGetMaxMigDeviceCount(nvmlDevice_t d, unsigned *out) {
	ENTER_BOARD(d);
	*out = capable(d->gpu) ? COMPUTE_SLICES : 0;
	return NVML_SUCCESS;
}

static unsigned most_of(const struct mig_profile *p) { return p->constant == 7 ? 1 : (unsigned)p->starts; }

static void profile_name(int gpu, const struct mig_profile *p, char *out, size_t size) {
	long long gib = (model_of(gpu)->mib + 1023) / 1024;
	snprintf(out, size, "MIG %dg.%lldgb%s", p->slices, (2 * gib * p->memory + MEMORY_SLICES) / (2 * MEMORY_SLICES), p->constant == 7 ? "+me" : "");
}

static int multiprocessors(int gpu, int slices) { return model_of(gpu)->multiprocessors * slices / 8; }

API nvmlDeviceGetGpuInstanceProfileInfo(nvmlDevice_t d, unsigned constant, nvmlGpuInstanceProfileInfo_t *out) {
	ENTER_BOARD(d);
	const struct mig_profile *p = profile_by_constant((int)constant);
	if (!capable(d->gpu) || !p)
		return NVML_ERROR_NOT_SUPPORTED;
	*out = (nvmlGpuInstanceProfileInfo_t){(unsigned)p->id, 0, (unsigned)p->slices, most_of(p),
		(unsigned)multiprocessors(d->gpu, p->slices), (unsigned)p->slices, (unsigned)p->slices, 0,
		(unsigned)p->slices, p->slices == 7 || p->constant == 7, (unsigned long long)profile_mib(d->gpu, p)};
	return NVML_SUCCESS;
}

API nvmlDeviceGetGpuInstanceProfileInfoV(nvmlDevice_t d, unsigned constant, nvmlGpuInstanceProfileInfo_v2_t *info) {
	ENTER_BOARD(d);
	const struct mig_profile *p = profile_by_constant((int)constant);
	if (!capable(d->gpu) || !p)
		return NVML_ERROR_NOT_SUPPORTED;
	unsigned version = info->version, ofa = p->slices == 7 || p->constant == 7;
	unsigned id = (unsigned)p->id, slices = (unsigned)p->slices, sm = (unsigned)multiprocessors(d->gpu, p->slices);
	unsigned long long mib = (unsigned long long)profile_mib(d->gpu, p);
	if (version == STRUCT_VERSION(nvmlGpuInstanceProfileInfo_v2_t, 2)) {
		*info = (nvmlGpuInstanceProfileInfo_v2_t){version, id, 0, slices, most_of(p), sm, slices, slices, 0, slices, ofa, mib, ""};
		profile_name(d->gpu, p, info->name, sizeof info->name);
	} else if (version == STRUCT_VERSION(nvmlGpuInstanceProfileInfo_v3_t, 3)) {
		nvmlGpuInstanceProfileInfo_v3_t *v3 = (void *)info;
		*v3 = (nvmlGpuInstanceProfileInfo_v3_t){version, id, slices, most_of(p), sm, slices, slices, 0, slices, ofa, mib, "", 0};
		profile_name(d->gpu, p, v3->name, sizeof v3->name);
	} else {
		return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
	}
	return NVML_SUCCESS;
}

static nvmlReturn_t placements(nvmlDevice_t d, unsigned id, nvmlGpuInstancePlacement_t *out, unsigned *count, const char *function) {
	struct call call __attribute__((cleanup(call_end))) = {0};
	if (!device_valid(d))
		return NVML_ERROR_INVALID_ARGUMENT;
	nvmlReturn_t begun = call_begin(&call, function, d->gpu);
	if (begun != NVML_SUCCESS)
		return begun;
	const struct mig_profile *p = profile_by_id((int)id);
	if (!mig_enabled(d->gpu))
		return NVML_ERROR_NOT_SUPPORTED;
	if (!p)
		return NVML_ERROR_INVALID_ARGUMENT;
	unsigned room = *count;
	*count = (unsigned)p->starts;
	for (unsigned i = 0; out && i < *count && i < room; i++)
		out[i] = (nvmlGpuInstancePlacement_t){i * (unsigned)p->step, (unsigned)p->memory};
	return NVML_SUCCESS;
}
API nvmlDeviceGetGpuInstancePossiblePlacements(nvmlDevice_t d, unsigned id, nvmlGpuInstancePlacement_t *out, unsigned *n) { return placements(d, id, out, n, __func__); }
API nvmlDeviceGetGpuInstancePossiblePlacements_v2(nvmlDevice_t d, unsigned id, nvmlGpuInstancePlacement_t *out, unsigned *n) { return placements(d, id, out, n, __func__); }

// What is left on the board: compute slices, and whether a stretch of memory
// slices is free.
static int slices_left(int gpu) {
	struct gpu_instance have;
	int left = COMPUTE_SLICES;
	for (int gi = 1; gi < MAX_GI; gi++)
		if (read_gpu_instance(gpu, gi, &have) && profile_by_id(have.profile))
			left -= profile_by_id(have.profile)->slices;
	return left;
}

static int is_free(int gpu, int start, int size) {
	struct gpu_instance have;
	for (int gi = 1; gi < MAX_GI; gi++)
		if (read_gpu_instance(gpu, gi, &have) && start < have.start + have.size && have.start < start + size)
			return 0;
	return 1;
}

static int used_of(int gpu, int profile) {
	struct gpu_instance have;
	int n = 0;
	for (int gi = 1; gi < MAX_GI; gi++)
		n += read_gpu_instance(gpu, gi, &have) && have.profile == profile;
	return n;
}

API nvmlDeviceGetGpuInstanceRemainingCapacity(nvmlDevice_t d, unsigned id, unsigned *out) {
	ENTER_BOARD(d);
	const struct mig_profile *p = profile_by_id((int)id);
	if (!mig_enabled(d->gpu))
		return NVML_ERROR_NOT_SUPPORTED;
	if (!p)
		return NVML_ERROR_INVALID_ARGUMENT;
	int places = 0, room = slices_left(d->gpu) / p->slices, most = (int)most_of(p) - used_of(d->gpu, p->id);
	for (int i = 0; i < p->starts; i++)
		places += is_free(d->gpu, i * p->step, p->memory);
	if (room < places)
		places = room;
	*out = (unsigned)(most < places ? most : places);
	return NVML_SUCCESS;
}

// The driver takes the first place that is free; it looks no further.
static nvmlReturn_t create(int gpu, unsigned id, int wanted, nvmlGpuInstance_t *out) {
	const struct mig_profile *p = profile_by_id((int)id);
	if (!is_root())
		return NVML_ERROR_NO_PERMISSION;
	if (!mig_enabled(gpu))
		return NVML_ERROR_NOT_SUPPORTED;
	if (!p || (wanted >= 0 && (wanted % p->step || wanted / p->step >= p->starts)))
		return NVML_ERROR_INVALID_ARGUMENT;
	if (slices_left(gpu) < p->slices || used_of(gpu, p->id) >= (int)most_of(p))
		return NVML_ERROR_INSUFFICIENT_RESOURCES;
	int gi = 1;
	while (gi < MAX_GI && read_gpu_instance(gpu, gi, NULL))
		gi++;
	for (int i = 0; i < p->starts && gi < MAX_GI; i++) {
		int start = i * p->step;
		if ((wanted >= 0 && start != wanted) || !is_free(gpu, start, p->memory))
			continue;
		write_gpu_instance(gpu, gi, &(struct gpu_instance){1, p->id, start, p->memory});
		*out = gi_handle(gpu, gi);
		return NVML_SUCCESS;
	}
	return NVML_ERROR_INSUFFICIENT_RESOURCES;
}

API nvmlDeviceCreateGpuInstance(nvmlDevice_t d, unsigned id, nvmlGpuInstance_t *out) {
	ENTER_BOARD(d);
	return create(d->gpu, id, -1, out);
}

API nvmlDeviceCreateGpuInstanceWithPlacement(nvmlDevice_t d, unsigned id, const nvmlGpuInstancePlacement_t *place, nvmlGpuInstance_t *out) {
	ENTER_BOARD(d);
	const struct mig_profile *p = profile_by_id((int)id);
	if (p && place->size != (unsigned)p->memory)
		return NVML_ERROR_INVALID_ARGUMENT;
	return create(d->gpu, id, (int)place->start, out);
}

API nvmlDeviceGetGpuInstances(nvmlDevice_t d, unsigned id, nvmlGpuInstance_t *out, unsigned *count) {
	ENTER_BOARD(d);
	struct gpu_instance have;
	if (!mig_enabled(d->gpu))
		return NVML_ERROR_NOT_SUPPORTED;
	*count = 0;
	for (int gi = 1; gi < MAX_GI; gi++)
		if (read_gpu_instance(d->gpu, gi, &have) && have.profile == (int)id)
			out[(*count)++] = gi_handle(d->gpu, gi);
	return NVML_SUCCESS;
}

API nvmlDeviceGetGpuInstanceById(nvmlDevice_t d, unsigned id, nvmlGpuInstance_t *out) {
	ENTER_BOARD(d);
	if (id >= MAX_GI || !read_gpu_instance(d->gpu, (int)id, NULL))
		return NVML_ERROR_NOT_FOUND;
	*out = gi_handle(d->gpu, (int)id);
	return NVML_SUCCESS;
}

API nvmlGpuInstanceGetInfo(nvmlGpuInstance_t h, nvmlGpuInstanceInfo_t *out) {
	ENTER_INSTANCE(h);
	struct gpu_instance have;
	if (!read_gpu_instance(h->gpu, h->gi, &have))
		return NVML_ERROR_NOT_FOUND;
	*out = (nvmlGpuInstanceInfo_t){device_handle(h->gpu, 0, 0), (unsigned)h->gi, (unsigned)have.profile, {(unsigned)have.start, (unsigned)have.size}};
	return NVML_SUCCESS;
}

API nvmlGpuInstanceDestroy(nvmlGpuInstance_t h) {
	ENTER_INSTANCE(h);
	if (!is_root())
		return NVML_ERROR_NO_PERMISSION;
	if (!read_gpu_instance(h->gpu, h->gi, NULL))
		return NVML_ERROR_NOT_FOUND;
	for (int ci = 0; ci < MAX_CI; ci++)
		if (read_compute_instance(h->gpu, h->gi, ci, NULL))
			return NVML_ERROR_IN_USE;
	write_gpu_instance(h->gpu, h->gi, NULL);
	return NVML_SUCCESS;
}

// Compute instances: mig_compute.c needs these two.
nvmlComputeInstance_t mig_ci_handle(int gpu, int gi, int ci) { return ci_handle(gpu, gi, ci); }
nvmlGpuInstance_t mig_gi_handle(int gpu, int gi) { return gi_handle(gpu, gi); }
