#define _GNU_SOURCE
#include "api.h"
#include "state.h"

#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static int link_count(int gpu) { return (int)state_number(gpu, "nvlink.count", model_of(gpu)->nvlinks); }

static const char *link_key(char *out, size_t size, unsigned link, const char *what) {
	snprintf(out, size, "nvlink.%u.%s", link, what);
	return out;
}

#define ENTER_LINK(d, link) \
	ENTER_BOARD(d); \
	if (!link_count((d)->gpu)) return NVML_ERROR_NOT_SUPPORTED; \
	if ((int)(link) >= link_count((d)->gpu)) return NVML_ERROR_INVALID_ARGUMENT

API nvmlDeviceGetNvLinkState(nvmlDevice_t d, unsigned link, int *out) {
	ENTER_LINK(d, link);
	char key[48];
	*out = (int)state_number(d->gpu, link_key(key, sizeof key, link, "up"), 1);
	return NVML_SUCCESS;
}

API nvmlDeviceGetNvLinkVersion(nvmlDevice_t d, unsigned link, unsigned *out) {
	ENTER_LINK(d, link);
	*out = model_of(d->gpu)->major == 9 ? 6 : 5;
	return NVML_SUCCESS;
}

API nvmlDeviceGetNvLinkRemoteDeviceType(nvmlDevice_t d, unsigned link, int *out) {
	ENTER_LINK(d, link);
	char key[48];
	*out = (int)state_number(d->gpu, link_key(key, sizeof key, link, "remote"), 2); // a switch
	return NVML_SUCCESS;
}

static const char *const counters[] = {"replay", "recovery", "crc.flit", "crc.data", "ecc.data"};

API nvmlDeviceGetNvLinkErrorCounter(nvmlDevice_t d, unsigned link, int counter, unsigned long long *out) {
	ENTER_LINK(d, link);
	char key[48];
	if (counter < 0 || counter > 4)
		return NVML_ERROR_INVALID_ARGUMENT;
	if (state_number(d->gpu, "nvlink.generation", 4) >= 5)
		return NVML_ERROR_NOT_SUPPORTED;
	link_key(key, sizeof key, link, counters[counter]);
	if (is_unsupported(d->gpu, key))
		return NVML_ERROR_NOT_SUPPORTED;
	*out = (unsigned long long)state_number(d->gpu, key, 0);
	return NVML_SUCCESS;
}

// The fabric exists behind NVSwitch; a board without links has none.
struct fabric { nvmlReturn_t status; unsigned clique, mask; unsigned char state, summary; };
static int fabric_of(int gpu, struct fabric *f) {
	if (model_of(gpu)->major < 9 || !link_count(gpu) || is_unsupported(gpu, "fabric.state"))
		return 0;
	f->state = (unsigned char)state_number(gpu, "fabric.state", 3);
	f->status = (nvmlReturn_t)state_number(gpu, "fabric.status", 0);
	f->mask = (unsigned)state_number(gpu, "fabric.mask", 0x1aa); // nothing degraded, configuration right
	f->summary = (unsigned char)state_number(gpu, "fabric.summary", 1);
	f->clique = (unsigned)state_number(gpu, "fabric.clique", 0);
	return 1;
}

API nvmlDeviceGetGpuFabricInfo(nvmlDevice_t d, nvmlGpuFabricInfo_t *out) {
	ENTER_BOARD(d);
	struct fabric f;
	if (!fabric_of(d->gpu, &f))
		return NVML_ERROR_NOT_SUPPORTED;
	memset(out, 0, sizeof *out);
	out->status = f.status;
	out->state = f.state;
	out->cliqueId = f.clique;
	return NVML_SUCCESS;
}

API nvmlDeviceGetGpuFabricInfoV(nvmlDevice_t d, void *info) {
	ENTER_BOARD(d);
	struct fabric f;
	unsigned version = *(unsigned *)info;
	if (!fabric_of(d->gpu, &f))
		return NVML_ERROR_NOT_SUPPORTED;
	if (version == STRUCT_VERSION(nvmlGpuFabricInfo_v3_t, 3))
		*(nvmlGpuFabricInfo_v3_t *)info = (nvmlGpuFabricInfo_v3_t){version, {0}, f.status, f.clique, f.state, f.mask, f.summary};
	else if (version == STRUCT_VERSION(nvmlGpuFabricInfo_v2_t, 2))
		*(nvmlGpuFabricInfo_v2_t *)info = (nvmlGpuFabricInfo_v2_t){version, {0}, f.status, f.clique, f.state, f.mask};
	else
		return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
	return NVML_SUCCESS;
}

API nvmlDeviceGetC2cModeInfoV(nvmlDevice_t d, nvmlC2cModeInfo_v1_t *out) {
	ENTER_BOARD(d);
	long long enabled = state_number(d->gpu, "c2c", -1);
	if (enabled < 0)
		return NVML_ERROR_NOT_SUPPORTED;
	out->isC2cEnabled = (unsigned)enabled;
	return NVML_SUCCESS;
}

API nvmlDeviceGetP2PStatus(nvmlDevice_t a, nvmlDevice_t b, int kind, int *out) {
	if (!device_valid(b))
		return NVML_ERROR_INVALID_ARGUMENT;
	ENTER_BOARD(a);
	char key[32];
	snprintf(key, sizeof key, "p2p.%d.%d", b->gpu, kind);
	// 5 is NVML_P2P_STATUS_NOT_SUPPORTED: no NVLink without links
	*out = (int)state_number(a->gpu, key, kind == 2 && !link_count(a->gpu) ? 5 : 0);
	return NVML_SUCCESS;
}

API nvmlDeviceGetTopologyCommonAncestor(nvmlDevice_t a, nvmlDevice_t b, int *out) {
	if (!device_valid(b))
		return NVML_ERROR_INVALID_ARGUMENT;
	ENTER_BOARD(a);
	char key[32];
	snprintf(key, sizeof key, "topology.%d", b->gpu);
	*out = (int)state_number(a->gpu, key, a->gpu / 4 == b->gpu / 4 ? 40 : 50); // NODE, SYSTEM
	return NVML_SUCCESS;
}

// A field that the driver is older than: "field.<id>=unknown".
static int is_unknown(int gpu, unsigned id) {
	char key[48];
	snprintf(key, sizeof key, "field.%u", id);
	return !strcmp(state_text(gpu, key, ""), "unknown");
}

// Fields: "field.<id>" or "field.<id>.<scope>" sets any of them; the rest have
// a healthy value where the board of the model answers, and NOT_SUPPORTED
// where it does not.
static int field(int gpu, unsigned id, unsigned scope, long long *out) {
	char key[48];
	snprintf(key, sizeof key, "field.%u.%u", id, scope);
	if (!state_text(gpu, key, NULL))
		snprintf(key, sizeof key, "field.%u", id);
	if (is_unsupported(gpu, key))
		return 0;
	if (state_text(gpu, key, NULL)) {
		*out = state_number(gpu, key, 0);
		return 1;
	}
	int links = link_count(gpu);
	char link[48];
	switch (id) {
	case 82: *out = state_number(gpu, "temperature.memory", 44); return !is_unsupported(gpu, "temperature.memory");
	case 91: *out = links; return links > 0;
	case 94: *out = state_number(gpu, "pcie.replay", 0); return 1;
	case 164:
		*out = state_number(gpu, "nvlink.speed", model_of(gpu)->nvlink_mbps);
		*out = state_number(gpu, link_key(link, sizeof link, scope, "speed"), *out);
		return (int)scope < links;
	case 161: case 162: case 163:
		// NVLink 5 counts 206 to 215 and 219 to 222 in their place.
		if (state_number(gpu, "nvlink.generation", 4) >= 5)
			return 0;
		*out = state_number(gpu, link_key(link, sizeof link, scope, counters[id - 161]), 0);
		return (int)scope < links;
	case 193: *out = -8; return 1;
	case 194: *out = -2; return 1;
	case 195: *out = 0; return 1;
	case 196: *out = 0; return 1;
	case 230: *out = state_number(gpu, "recovery", 0); return !is_unsupported(gpu, "recovery");
	}
	*out = 0;
	if ((id >= 206 && id <= 215) || (id >= 219 && id <= 222))
		return state_number(gpu, "nvlink.generation", 4) >= 5 && (int)scope < links;
	return (id >= 173 && id <= 183) || id == 169;
}

API nvmlDeviceGetFieldValues(nvmlDevice_t d, int count, nvmlFieldValue_t *values) {
	ENTER_BOARD(d);
	struct timespec now;
	clock_gettime(CLOCK_REALTIME, &now);
	for (int i = 0; i < count; i++) {
		nvmlFieldValue_t *v = &values[i];
		long long value = 0;
		v->nvmlReturn = field(d->gpu, v->fieldId, v->scopeId, &value) ? NVML_SUCCESS : NVML_ERROR_NOT_SUPPORTED;
		if (is_unknown(d->gpu, v->fieldId))
			v->nvmlReturn = NVML_ERROR_INVALID_ARGUMENT;
		v->timestamp = now.tv_sec * 1000000ll + now.tv_nsec / 1000;
		memset(&v->value, 0, sizeof v->value);
		int wide = (v->fieldId >= 161 && v->fieldId <= 163) || (v->fieldId >= 206 && v->fieldId <= 222);
		int is_signed = v->fieldId >= 193 && v->fieldId <= 196;
		v->valueType = wide ? 3 : is_signed ? 5 : 1;
		if (wide)
			v->value.ullVal = (unsigned long long)value;
		else if (is_signed)
			v->value.siVal = (int)value;
		else
			v->value.uiVal = (unsigned)value;
	}
	return NVML_SUCCESS;
}

struct event_set { unsigned long long mask[MAX_GPUS]; int used; };
static struct event_set sets[64];

API nvmlEventSetCreate(nvmlEventSet_t *out) {
	ENTER(-1);
	for (int i = 0; i < 64; i++)
		if (!sets[i].used) {
			sets[i] = (struct event_set){.used = 1};
			*out = &sets[i];
			return NVML_SUCCESS;
		}
	return NVML_ERROR_INSUFFICIENT_RESOURCES;
}

API nvmlEventSetFree(nvmlEventSet_t set) {
	set->used = 0;
	return NVML_SUCCESS;
}

API nvmlDeviceGetSupportedEventTypes(nvmlDevice_t d, unsigned long long *out) {
	ENTER_BOARD(d);
	if (is_unsupported(d->gpu, "events"))
		return NVML_ERROR_NOT_SUPPORTED;
	*out = (unsigned long long)state_number(d->gpu, "events", 0x801f);
	return NVML_SUCCESS;
}

API nvmlDeviceRegisterEvents(nvmlDevice_t d, unsigned long long types, nvmlEventSet_t set) {
	ENTER_BOARD(d);
	if (is_unsupported(d->gpu, "events") || (types & ~(unsigned long long)state_number(d->gpu, "events", 0x801f)))
		return NVML_ERROR_NOT_SUPPORTED;
	set->mask[d->gpu] |= types;
	return NVML_SUCCESS;
}

// "gpu.0.event=8:79" is one waiting event, type and data; it is delivered once.
static nvmlReturn_t wait_event(nvmlEventSet_t set, nvmlEventData_t *out, unsigned ms, const char *function) {
	for (unsigned waited = 0;; waited += 5) {
		struct call call = {0};
		nvmlReturn_t result = call_begin(&call, function, -1);
		for (int gpu = 0; result == NVML_SUCCESS && gpu < gpu_count(); gpu++) {
			unsigned long long type, data = 0;
			char own[32];
			snprintf(own, sizeof own, "gpu.%d.event", gpu);
			const char *planned = state_text(-1, own, NULL);
			if (!planned || sscanf(planned, "%llu:%llu", &type, &data) < 1 || !(type & set->mask[gpu]))
				continue;
			*out = (nvmlEventData_t){device_handle(gpu, 0, 0), type, data, 0xffffffffu, 0xffffffffu};
			state_remove(gpu, "event");
			call_end(&call);
			return NVML_SUCCESS;
		}
		call_end(&call);
		if (result != NVML_SUCCESS)
			return result;
		if (waited >= ms)
			return NVML_ERROR_TIMEOUT;
		usleep(5000);
	}
}
API nvmlEventSetWait(nvmlEventSet_t s, nvmlEventData_t *out, unsigned ms) { return wait_event(s, out, ms, __func__); }
API nvmlEventSetWait_v2(nvmlEventSet_t s, nvmlEventData_t *out, unsigned ms) { return wait_event(s, out, ms, __func__); }
