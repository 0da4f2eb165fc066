#define _GNU_SOURCE
#include "cuda.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

struct visible visible[MAX_GPUS];
int visible_count, current = -1;
static int initialised;

CUresult fault(const char *function) {
	state_open();
	int code = planned_fault(current < 0 ? -1 : visible[current].gpu, function);
	state_close();
	return code;
}

long long device_number(const char *key, long long otherwise) {
	state_open();
	long long value = state_number(current < 0 ? -1 : visible[current].gpu, key, otherwise);
	state_close();
	return value;
}

// On a GPU in MIG mode only compute instances are devices; the GPU's own name
// stands for the first of them.
static void add(int gpu, int gi, int ci) {
	if (visible_count == MAX_GPUS || state_text(gpu, "lost", NULL))
		return;
	if (mig_enabled(gpu) && !gi) {
		for (gi = 1; gi < MAX_GI; gi++)
			for (ci = 0; ci < MAX_CI; ci++)
				if (read_compute_instance(gpu, gi, ci, NULL)) {
					visible[visible_count++] = (struct visible){gpu, gi, ci};
					return;
				}
		return;
	}
	visible[visible_count++] = (struct visible){gpu, gi, ci};
}

static void add_named(const char *name) {
	char have[64], legacy[96];
	if (*name >= '0' && *name <= '9') {
		if (atoi(name) < gpu_count())
			add(atoi(name), 0, 0);
		return;
	}
	for (int gpu = 0; gpu < gpu_count(); gpu++) {
		gpu_uuid(gpu, have, sizeof have);
		if (!strncasecmp(have, name, strlen(name)) && strlen(name) > 4) {
			add(gpu, 0, 0);
			return;
		}
		for (int gi = 1; gi < MAX_GI; gi++)
			for (int ci = 0; ci < MAX_CI; ci++) {
				if (!read_compute_instance(gpu, gi, ci, NULL))
					continue;
				snprintf(legacy, sizeof legacy, "MIG-%s/%d/%d", gpu_uuid(gpu, have, sizeof have), gi, ci);
				if (!strcasecmp(mig_uuid(gpu, gi, ci, have, sizeof have), name) || !strcasecmp(legacy, name)) {
					add(gpu, gi, ci);
					return;
				}
			}
	}
}

static void enumerate(void) {
	visible_count = 0;
	const char *names = getenv("CUDA_VISIBLE_DEVICES");
	if (!names) {
		for (int gpu = 0; gpu < gpu_count(); gpu++)
			add(gpu, 0, 0);
		return;
	}
	char copy[1024], *rest = copy, *name;
	snprintf(copy, sizeof copy, "%s", names);
	while ((name = strsep(&rest, ",")))
		if (*name)
			add_named(name);
}

API cuInit(unsigned flags) {
	state_open();
	CUresult code = flags ? CUDA_ERROR_INVALID_VALUE : planned_fault(-1, __func__);
	if (!code && driver_state())
		code = driver_state() == 9 ? CUDA_ERROR_NO_DEVICE : CUDA_ERROR_SYSTEM_DRIVER_MISMATCH;
	if (!code) {
		enumerate();
		for (int i = 0; i < visible_count && !code; i++)
			if (state_number(visible[i].gpu, "fabric.state", 3) != 3 && !is_unsupported(visible[i].gpu, "fabric.state"))
				code = CUDA_ERROR_SYSTEM_NOT_READY;
		if (state_number(-1, "cc.feature", 0) && !state_number(-1, "cc.ready", 1))
			code = CUDA_ERROR_SYSTEM_NOT_READY;
		if (!visible_count)
			code = CUDA_ERROR_NO_DEVICE;
	}
	state_close();
	initialised = !code;
	return code;
}

API cuDriverGetVersion(int *out) {
	*out = (int)device_number("cuda.version", 13000);
	return CUDA_SUCCESS;
}

static const struct { CUresult code; const char *name, *text; } errors[] = {
	{CUDA_ERROR_INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
	{CUDA_ERROR_OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
	{CUDA_ERROR_NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
	{CUDA_ERROR_DEVICE_UNAVAILABLE, "CUDA_ERROR_DEVICE_UNAVAILABLE", "CUDA-capable device(s) is/are busy or unavailable"},
	{CUDA_ERROR_NO_DEVICE, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
	{CUDA_ERROR_INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
	{CUDA_ERROR_INVALID_PTX, "CUDA_ERROR_INVALID_PTX", "a PTX JIT compilation failed"},
	{CUDA_ERROR_UNSUPPORTED_PTX_VERSION, "CUDA_ERROR_UNSUPPORTED_PTX_VERSION", "the provided PTX was compiled with an unsupported toolchain"},
	{CUDA_ERROR_LAUNCH_FAILED, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
	{CUDA_ERROR_SYSTEM_NOT_READY, "CUDA_ERROR_SYSTEM_NOT_READY", "system not yet initialized"},
	{CUDA_ERROR_SYSTEM_DRIVER_MISMATCH, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", "system has unsupported display driver / cuda driver combination"},
};

static CUresult describe(CUresult code, const char **name, const char **text) {
	for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
		if (errors[i].code == code) {
			*name = errors[i].name;
			*text = errors[i].text;
			return CUDA_SUCCESS;
		}
	*name = *text = NULL;
	return CUDA_ERROR_INVALID_VALUE;
}
API cuGetErrorName(CUresult code, const char **out) {
	const char *text;
	return describe(code, out, &text);
}
API cuGetErrorString(CUresult code, const char **out) {
	const char *name;
	return describe(code, &name, out);
}

API cuDeviceGetCount(int *out) {
	if (!initialised)
		return CUDA_ERROR_NOT_INITIALIZED;
	*out = visible_count;
	return fault(__func__);
}

API cuDeviceGet(int *out, int ordinal) {
	if (!initialised)
		return CUDA_ERROR_NOT_INITIALIZED;
	*out = ordinal;
	return ordinal >= 0 && ordinal < visible_count ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

#define DEVICE(d) if ((d) < 0 || (d) >= visible_count) return CUDA_ERROR_INVALID_DEVICE

API cuDeviceGetName(char *out, int size, int d) {
	DEVICE(d);
	struct gpu_instance gi;
	struct visible v = visible[d];
	state_open();
	const struct model *m = model_of(v.gpu);
	const struct mig_profile *p = v.gi && read_gpu_instance(v.gpu, v.gi, &gi) ? profile_by_id(gi.profile) : NULL;
	int n = snprintf(out, (size_t)size, "%s", state_text(v.gpu, "name", m->name));
	if (p && n < size) // "NVIDIA H100 80GB HBM3 MIG 3g.40gb": the share of the board's whole GiB
		snprintf(out + n, (size_t)(size - n), " MIG %dg.%lldgb", p->slices,
		         ((m->mib + 512) / 1024 * p->memory + MEMORY_SLICES / 2) / MEMORY_SLICES);
	state_close();
	return CUDA_SUCCESS;
}

static CUresult uuid(unsigned char *out, int d, int whole) {
	DEVICE(d);
	char text[64];
	struct visible v = visible[d];
	state_open();
	if (v.gi && !whole)
		mig_uuid(v.gpu, v.gi, v.ci, text, sizeof text);
	else
		gpu_uuid(v.gpu, text, sizeof text);
	state_close();
	int n = 0;
	for (const char *at = text + 4; *at && n < 16;) {
		unsigned byte;
		if (*at == '-') {
			at++;
			continue;
		}
		if (sscanf(at, "%2x", &byte) != 1)
			break;
		out[n++] = (unsigned char)byte;
		at += 2;
	}
	return CUDA_SUCCESS;
}
API cuDeviceGetUuid_v2(unsigned char *out, int d) { return uuid(out, d, 0); }
API cuDeviceGetUuid(unsigned char *out, int d) { return uuid(out, d, 1); } // the GPU's, also of a MIG device

API cuDeviceGetPCIBusId(char *out, int size, int d) {
	DEVICE(d);
	char bus[32];
	state_open();
	gpu_bus_id(visible[d].gpu, bus, sizeof bus);
	state_close();
	snprintf(out, (size_t)size, "%s", strlen(bus) > 12 ? bus + strlen(bus) - 12 : bus);
	return CUDA_SUCCESS;
}

API cuDeviceTotalMem_v2(size_t *out, int d) {
	DEVICE(d);
	struct gpu_instance gi;
	struct visible v = visible[d];
	state_open();
	long long mib = state_number(v.gpu, "memory.total.mib", model_of(v.gpu)->mib);
	if (v.gi && read_gpu_instance(v.gpu, v.gi, &gi) && profile_by_id(gi.profile))
		mib = profile_mib(v.gpu, profile_by_id(gi.profile));
	state_close();
	*out = (size_t)mib << 20;
	return CUDA_SUCCESS;
}

API cuDeviceGetAttribute(int *out, int attribute, int d) {
	DEVICE(d);
	struct compute_instance ci;
	struct visible v = visible[d];
	state_open();
	const struct model *m = model_of(v.gpu);
	switch (attribute) {
	case 16:
		*out = m->multiprocessors;
		if (v.gi && read_compute_instance(v.gpu, v.gi, v.ci, &ci))
			*out = m->multiprocessors * ci.size / 8;
		break;
	case 20: *out = (int)state_number(v.gpu, "compute.mode", 0); break;
	case 32: *out = !is_unsupported(v.gpu, "ecc.current") && state_number(v.gpu, "ecc.current", 1); break;
	case 75: *out = m->major; break;
	case 76: *out = m->minor; break;
	default: *out = 0;
	}
	state_close();
	return CUDA_SUCCESS;
}

API cuDevicePrimaryCtxRetain(void **out, int d) {
	DEVICE(d);
	state_open();
	CUresult code = planned_fault(visible[d].gpu, __func__);
	int prohibited = state_number(visible[d].gpu, "compute.mode", 0) == 2;
	if (!code && (prohibited || state_number(visible[d].gpu, "reset.required", 0)))
		code = CUDA_ERROR_DEVICE_UNAVAILABLE;
	state_close();
	*out = &visible[d];
	return code;
}

API cuDevicePrimaryCtxRelease_v2(int d) {
	DEVICE(d);
	current = -1;
	return CUDA_SUCCESS;
}

API cuCtxSetCurrent(void *context) {
	current = context ? (int)((struct visible *)context - visible) : -1;
	return fault(__func__);
}
