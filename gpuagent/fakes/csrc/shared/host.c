#define _GNU_SOURCE
#include "state.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// The driver version that this library is of. The builder rewrites the part
// after the mark, instead of compiling once for each version.
static const volatile char driver_mark[64] = "REFIT-FAKE-DRIVER:580.95.05";

// Figures of the boards as published; GPU instances as in the tables of the
// vendor's MIG guide.
static const struct model models[] = {
	{"h100", "NVIDIA H100 80GB HBM3", 81559, 9, 0, 132, 18, 26562, 5, 0, 700000, 131072, 0x233010de},
	{"h200", "NVIDIA H200", 143771, 9, 0, 132, 18, 26562, 5, 0, 700000, 262144, 0x233510de},
	{"a100", "NVIDIA A100-SXM4-80GB", 81920, 8, 0, 108, 12, 25000, 4, 1, 400000, 131072, 0x20b210de},
	{"t4", "Tesla T4", 15360, 7, 5, 40, 0, 0, 3, 0, 70000, 256, 0x1eb810de},
};

const struct model *model_of(int gpu) {
	const char *key = state_text(gpu, "model", "h100");
	for (size_t i = 0; i < sizeof models / sizeof *models; i++)
		if (!strcmp(models[i].key, key))
			return &models[i];
	return models;
}

int gpu_count(void) {
	long long n = state_number(-1, "gpus", 8);
	return n < 0 ? 0 : n > MAX_GPUS ? MAX_GPUS : (int)n;
}

const char *library_driver(void) { return state_text(-1, "library.driver", strchr((const char *)driver_mark, ':') + 1); }

int driver_state(void) {
	const char *module = state_text(-1, "module.driver", NULL);
	if (!module || !strcmp(module, library_driver()))
		return 0;
	return !strcmp(module, "none") ? 9 : 18;
}

const char *gpu_uuid(int gpu, char *out, size_t size) {
	char made[48];
	snprintf(made, sizeof made, "GPU-00000000-0000-4000-8000-%012x", gpu);
	snprintf(out, size, "%s", state_text(gpu, "uuid", made));
	return out;
}

const char *gpu_bus_id(int gpu, char *out, size_t size) {
	char made[32];
	snprintf(made, sizeof made, "00000000:%02X:00.0", 0x10 + gpu);
	snprintf(out, size, "%s", state_text(gpu, "pci", made));
	return out;
}

// constant, driver's id, compute slices, memory slices, number of starts, step
static const struct mig_profile profiles[] = {
	{0, 19, 1, 1, 7, 1}, {1, 14, 2, 2, 3, 2}, {2, 9, 3, 4, 2, 4},
	{3, 5, 4, 4, 1, 1}, {4, 0, 7, 8, 1, 1}, {7, 20, 1, 1, 7, 1},
	{9, 15, 1, 2, 4, 2},
};

const struct mig_profile *profile_by_constant(int constant) {
	for (size_t i = 0; i < sizeof profiles / sizeof *profiles; i++)
		if (profiles[i].constant == constant)
			return &profiles[i];
	return NULL;
}

const struct mig_profile *profile_by_id(int id) {
	for (size_t i = 0; i < sizeof profiles / sizeof *profiles; i++)
		if (profiles[i].id == id)
			return &profiles[i];
	return NULL;
}

// The driver keeps a little of each slice for itself.
long long profile_mib(int gpu, const struct mig_profile *p) {
	return model_of(gpu)->mib * p->memory / MEMORY_SLICES * 98 / 100;
}

int mig_enabled(int gpu) { return state_number(gpu, "mig.current", 0) == 1; }

static int read_instance(int gpu, const char *key, struct gpu_instance *out) {
	struct gpu_instance got = {0};
	const char *value = state_text(gpu, key, NULL);
	if (!value || sscanf(value, "%d:%d:%d", &got.profile, &got.start, &got.size) != 3)
		return 0;
	got.used = 1;
	if (out)
		*out = got;
	return 1;
}

static void write_instance(int gpu, const char *key, const struct gpu_instance *value) {
	char line[64];
	if (!value) {
		state_remove(gpu, key);
		return;
	}
	snprintf(line, sizeof line, "%d:%d:%d", value->profile, value->start, value->size);
	state_put(gpu, key, line);
}

int read_gpu_instance(int gpu, int gi, struct gpu_instance *out) {
	char key[32];
	snprintf(key, sizeof key, "gi.%d", gi);
	return mig_enabled(gpu) && read_instance(gpu, key, out);
}

int read_compute_instance(int gpu, int gi, int ci, struct compute_instance *out) {
	char key[32];
	snprintf(key, sizeof key, "ci.%d.%d", gi, ci);
	return mig_enabled(gpu) && read_instance(gpu, key, (struct gpu_instance *)out);
}

void write_gpu_instance(int gpu, int gi, const struct gpu_instance *value) {
	char key[32];
	snprintf(key, sizeof key, "gi.%d", gi);
	write_instance(gpu, key, value);
}

void write_compute_instance(int gpu, int gi, int ci, const struct compute_instance *value) {
	char key[32];
	snprintf(key, sizeof key, "ci.%d.%d", gi, ci);
	write_instance(gpu, key, (const struct gpu_instance *)value);
}

// A function of the GPU and the instance's ids, as the tests need stable names;
// a key "mig.uuid.<gi>.<ci>" gives another one.
const char *mig_uuid(int gpu, int gi, int ci, char *out, size_t size) {
	char key[48], made[48];
	snprintf(key, sizeof key, "mig.uuid.%d.%d", gi, ci);
	snprintf(made, sizeof made, "MIG-00000000-0000-5000-8000-%04x%04x%04x", gpu, gi, ci);
	snprintf(out, size, "%s", state_text(gpu, key, made));
	return out;
}
