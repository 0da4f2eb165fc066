#define _GNU_SOURCE
#include "api.h"
#include "state.h"

#include <stdio.h>
#include <string.h>
#include <strings.h>

static nvmlReturn_t count(unsigned *out, const char *function) {
	struct call call __attribute__((cleanup(call_end))) = {0};
	nvmlReturn_t begun = call_begin(&call, function, -1);
	if (begun == NVML_SUCCESS)
		*out = (unsigned)gpu_count();
	return begun;
}
API nvmlDeviceGetCount(unsigned *out) { return count(out, __func__); }
API nvmlDeviceGetCount_v2(unsigned *out) { return count(out, __func__); }

static nvmlReturn_t by_index(unsigned index, nvmlDevice_t *out, const char *function) {
	struct call call __attribute__((cleanup(call_end))) = {0};
	if (index >= MAX_GPUS)
		return NVML_ERROR_INVALID_ARGUMENT;
	nvmlReturn_t begun = call_begin(&call, function, (int)index);
	if (begun == NVML_SUCCESS)
		*out = device_handle((int)index, 0, 0);
	return begun;
}
API nvmlDeviceGetHandleByIndex(unsigned i, nvmlDevice_t *out) { return by_index(i, out, __func__); }
API nvmlDeviceGetHandleByIndex_v2(unsigned i, nvmlDevice_t *out) { return by_index(i, out, __func__); }

API nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *out) {
	ENTER(-1);
	char have[64];
	for (int gpu = 0; gpu < gpu_count(); gpu++) {
		const char *lost = state_text(gpu, "lost", "");
		if (!strcasecmp(gpu_uuid(gpu, have, sizeof have), uuid)) {
			*out = device_handle(gpu, 0, 0);
			return strcmp(lost, "handle") ? NVML_SUCCESS : NVML_ERROR_GPU_IS_LOST;
		}
		for (int gi = 1; gi < MAX_GI; gi++)
			for (int ci = 0; ci < MAX_CI; ci++)
				if (read_compute_instance(gpu, gi, ci, NULL) &&
				    !strcasecmp(mig_uuid(gpu, gi, ci, have, sizeof have), uuid)) {
					*out = device_handle(gpu, gi, ci);
					return NVML_SUCCESS;
				}
	}
	return NVML_ERROR_NOT_FOUND;
}

// "0000:10:00.0" and "00000000:10:00.0" name the same board.
static const char *short_bus(const char *bus) {
	const char *colon = strchr(bus, ':');
	return colon && colon - bus > 4 ? colon - 4 : bus;
}

API nvmlDeviceGetHandleByPciBusId_v2(const char *bus, nvmlDevice_t *out) {
	ENTER(-1);
	char have[32];
	for (int gpu = 0; gpu < gpu_count(); gpu++)
		if (!strcasecmp(short_bus(gpu_bus_id(gpu, have, sizeof have)), short_bus(bus))) {
			*out = device_handle(gpu, 0, 0);
			return NVML_SUCCESS;
		}
	return NVML_ERROR_NOT_FOUND;
}
API nvmlDeviceGetHandleByPciBusId(const char *bus, nvmlDevice_t *out) {
	return nvmlDeviceGetHandleByPciBusId_v2(bus, out);
}

static nvmlReturn_t put_text(char *out, unsigned size, const char *value) {
	return (unsigned)snprintf(out, size, "%s", value) < size ? NVML_SUCCESS : NVML_ERROR_INSUFFICIENT_SIZE;
}

API nvmlDeviceGetName(nvmlDevice_t d, char *out, unsigned size) {
	ENTER_DEVICE(d);
	struct gpu_instance gi = {0};
	char name[96];
	const char *board = state_text(d->gpu, "name", model_of(d->gpu)->name);
	if (!d->gi || !read_gpu_instance(d->gpu, d->gi, &gi))
		return put_text(out, size, board);
	const struct mig_profile *p = profile_by_id(gi.profile);
	snprintf(name, sizeof name, "%s MIG %dg", board, p ? p->slices : 0);
	return put_text(out, size, name);
}

API nvmlDeviceGetUUID(nvmlDevice_t d, char *out, unsigned size) {
	ENTER_DEVICE(d);
	char uuid[64];
	return put_text(out, size, d->gi ? mig_uuid(d->gpu, d->gi, d->ci, uuid, sizeof uuid) : gpu_uuid(d->gpu, uuid, sizeof uuid));
}

#define TEXT_GETTER(function, key, otherwise) \
	API function(nvmlDevice_t d, char *out, unsigned size) { \
		ENTER_BOARD(d); \
		if (is_unsupported(d->gpu, key)) return NVML_ERROR_NOT_SUPPORTED; \
		return put_text(out, size, state_text(d->gpu, key, otherwise)); \
	}
TEXT_GETTER(nvmlDeviceGetVbiosVersion, "vbios", "96.00.89.00.01")
TEXT_GETTER(nvmlDeviceGetInforomImageVersion, "inforom.image", "G520.0200.00.05")
TEXT_GETTER(nvmlDeviceGetBoardPartNumber, "board.part", "692-2G520-0200-000")

API nvmlDeviceGetSerial(nvmlDevice_t d, char *out, unsigned size) {
	ENTER_BOARD(d);
	char serial[32];
	snprintf(serial, sizeof serial, "16500230000%02d", d->gpu);
	if (is_unsupported(d->gpu, "serial"))
		return NVML_ERROR_NOT_SUPPORTED;
	return put_text(out, size, state_text(d->gpu, "serial", serial));
}

API nvmlDeviceGetGspFirmwareVersion(nvmlDevice_t d, char *out) {
	ENTER_BOARD(d);
	if (is_unsupported(d->gpu, "gsp.version") || !state_number(d->gpu, "gsp.mode", 1))
		return NVML_ERROR_NOT_SUPPORTED;
	return put_text(out, 64, state_text(d->gpu, "gsp.version", library_driver()));
}

API nvmlDeviceGetGspFirmwareMode(nvmlDevice_t d, unsigned *enabled, unsigned *usual) {
	ENTER_BOARD(d);
	if (is_unsupported(d->gpu, "gsp.mode"))
		return NVML_ERROR_NOT_SUPPORTED;
	*enabled = (unsigned)state_number(d->gpu, "gsp.mode", 1);
	*usual = 1;
	return NVML_SUCCESS;
}

API nvmlDeviceGetIndex(nvmlDevice_t d, unsigned *out) {
	ENTER_DEVICE(d);
	*out = (unsigned)d->gpu;
	return NVML_SUCCESS;
}

API nvmlDeviceGetMinorNumber(nvmlDevice_t d, unsigned *out) {
	ENTER_BOARD(d);
	*out = (unsigned)state_number(d->gpu, "minor", d->gpu);
	return NVML_SUCCESS;
}

static nvmlReturn_t pci(nvmlDevice_t d, nvmlPciInfo_t *out, const char *function) {
	struct call call __attribute__((cleanup(call_end))) = {0};
	if (!device_valid(d))
		return NVML_ERROR_INVALID_ARGUMENT;
	nvmlReturn_t begun = call_begin(&call, function, d->gpu);
	if (begun != NVML_SUCCESS)
		return begun;
	memset(out, 0, sizeof *out);
	char bus[32];
	gpu_bus_id(d->gpu, bus, sizeof bus);
	snprintf(out->busId, sizeof out->busId, "%s", bus);
	snprintf(out->busIdLegacy, sizeof out->busIdLegacy, "%.15s", short_bus(bus));
	sscanf(bus, "%x:%x:%x", &out->domain, &out->bus, &out->device);
	out->pciDeviceId = model_of(d->gpu)->pci_device;
	out->pciSubSystemId = 0x16c110de;
	return NVML_SUCCESS;
}
API nvmlDeviceGetPciInfo(nvmlDevice_t d, nvmlPciInfo_t *out) { return pci(d, out, __func__); }
API nvmlDeviceGetPciInfo_v2(nvmlDevice_t d, nvmlPciInfo_t *out) { return pci(d, out, __func__); }
API nvmlDeviceGetPciInfo_v3(nvmlDevice_t d, nvmlPciInfo_t *out) { return pci(d, out, __func__); }

API nvmlDeviceGetBrand(nvmlDevice_t d, int *out) {
	ENTER_BOARD(d);
	*out = 15; // NVML_BRAND_NVIDIA
	return NVML_SUCCESS;
}

API nvmlDeviceGetArchitecture(nvmlDevice_t d, unsigned *out) {
	ENTER_BOARD(d);
	const struct model *m = model_of(d->gpu);
	*out = m->major == 9 ? 9 : m->major == 8 ? 7 : 6; // Hopper, Ampere, Turing
	return NVML_SUCCESS;
}

API nvmlDeviceGetCudaComputeCapability(nvmlDevice_t d, int *major, int *minor) {
	ENTER_DEVICE(d);
	*major = model_of(d->gpu)->major;
	*minor = model_of(d->gpu)->minor;
	return NVML_SUCCESS;
}

static long long memory_mib(nvmlDevice_t d) {
	struct gpu_instance gi = {0};
	const struct mig_profile *p;
	if (d->gi && read_gpu_instance(d->gpu, d->gi, &gi) && (p = profile_by_id(gi.profile)))
		return profile_mib(d->gpu, p);
	return state_number(d->gpu, "memory.total.mib", model_of(d->gpu)->mib);
}

API nvmlDeviceGetMemoryInfo(nvmlDevice_t d, nvmlMemory_t *out) {
	ENTER_DEVICE(d);
	out->total = (unsigned long long)memory_mib(d) << 20;
	out->used = (unsigned long long)state_number(d->gpu, "memory.used.mib", 4) << 20;
	out->free = out->total - out->used;
	return NVML_SUCCESS;
}

API nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t d, nvmlMemory_v2_t *out) {
	ENTER_DEVICE(d);
	if (out->version != STRUCT_VERSION(nvmlMemory_v2_t, 2))
		return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
	out->total = (unsigned long long)memory_mib(d) << 20;
	out->used = (unsigned long long)state_number(d->gpu, "memory.used.mib", 4) << 20;
	out->reserved = 512ull << 20;
	out->free = out->total - out->used - out->reserved;
	return NVML_SUCCESS;
}

API nvmlDeviceGetBAR1MemoryInfo(nvmlDevice_t d, nvmlBAR1Memory_t *out) {
	ENTER_DEVICE(d);
	out->bar1Total = out->bar1Free = (unsigned long long)model_of(d->gpu)->bars_mib << 20;
	out->bar1Used = 0;
	return NVML_SUCCESS;
}
