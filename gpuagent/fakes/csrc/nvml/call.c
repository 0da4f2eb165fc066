#define _GNU_SOURCE
#include "api.h"
#include "state.h"

#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

static pthread_mutex_t count_mutex = PTHREAD_MUTEX_INITIALIZER;
static int initialised;
static struct device devices[MAX_GPUS][MAX_GI][MAX_CI];

nvmlDevice_t device_handle(int gpu, int gi, int ci) {
	struct device *d = &devices[gpu][gi][ci];
	*d = (struct device){gpu, gi, ci};
	return d;
}

int device_valid(nvmlDevice_t d) {
	return d >= &devices[0][0][0] && d <= &devices[MAX_GPUS - 1][MAX_GI - 1][MAX_CI - 1];
}

static int changes(const char *function) {
	return strstr(function, "nvmlDeviceSet") || strstr(function, "nvmlDeviceCreate") ||
		strstr(function, "nvmlGpuInstanceCreate") || strstr(function, "Destroy");
}

// Kills who calls, and the process that started it: an agent with its child.
static void die(struct call *call) {
	call_end(&(struct call){call->open, 0});
	if (getppid() > 1)
		kill(getppid(), SIGKILL);
	kill(getpid(), SIGKILL);
}

// A lost GPU ("lost=getter" or, from the handle on, "lost=handle") answers
// nothing more; so does one that waits for a reset.
nvmlReturn_t call_begin(struct call *call, const char *function, int gpu) {
	if (!initialised)
		return NVML_ERROR_UNINITIALIZED;
	state_open();
	call->open = 1;
	if (changes(function)) {
		if (planned_fault(-1, "before.change"))
			die(call);
		call->dies = planned_fault(-1, "after.change");
	}
	int fault = planned_fault(gpu, function);
	if (fault)
		return fault;
	if (gpu < 0)
		return NVML_SUCCESS;
	if (gpu >= gpu_count())
		return NVML_ERROR_INVALID_ARGUMENT;
	const char *lost = state_text(gpu, "lost", NULL);
	int handle = !strncmp(function, "nvmlDeviceGetHandleBy", 21);
	if (lost && (!handle || !strcmp(lost, "handle")))
		return NVML_ERROR_GPU_IS_LOST;
	if (!handle && state_number(gpu, "reset.required", 0))
		return NVML_ERROR_RESET_REQUIRED;
	return NVML_SUCCESS;
}

void call_end(struct call *call) {
	if (call->dies)
		die(call);
	if (call->open)
		state_close();
}

static nvmlReturn_t init(void) {
	state_open();
	int fault = planned_fault(-1, "nvmlInit");
	if (!fault)
		fault = driver_state();
	state_close();
	if (fault)
		return fault;
	pthread_mutex_lock(&count_mutex);
	initialised++;
	pthread_mutex_unlock(&count_mutex);
	return NVML_SUCCESS;
}

API nvmlInit(void) { return init(); }
API nvmlInit_v2(void) { return init(); }
API nvmlInitWithFlags(unsigned flags) {
	(void)flags;
	return init();
}

API nvmlShutdown(void) {
	pthread_mutex_lock(&count_mutex);
	nvmlReturn_t result = initialised ? NVML_SUCCESS : NVML_ERROR_UNINITIALIZED;
	if (initialised)
		initialised--;
	pthread_mutex_unlock(&count_mutex);
	return result;
}

EXPORT const char *nvmlErrorString(nvmlReturn_t code) {
	static const char *const words[] = {
		"Success", "Uninitialized", "Invalid Argument", "Not Supported", "Insufficient Permissions",
		"Already Initialized", "Not Found", "Insufficient Size", "Insufficient External Power",
		"Driver Not Loaded", "Timeout", "Interrupt Request Issue", "NVML Shared Library Not Found",
		"Function Not Found", "Corrupted infoROM", "GPU is lost", "GPU requires reset",
		"GPU access blocked by the operating system", "Driver/library version mismatch",
		"In use by another client", "Insufficient Memory", "No data", "vGPU ECC Not Supported",
		"Insufficient Resources", "Frequency Not Supported", "Argument Version Mismatch",
		"Deprecated", "Not Ready", "GPU Not Found", "Invalid State"};
	if (code >= 0 && code < (int)(sizeof words / sizeof *words))
		return words[code];
	return "Unknown Error";
}

API nvmlSystemGetDriverVersion(char *out, unsigned size) {
	ENTER(-1);
	return snprintf(out, size, "%s", library_driver()) < (int)size ? NVML_SUCCESS : NVML_ERROR_INSUFFICIENT_SIZE;
}

API nvmlSystemGetNVMLVersion(char *out, unsigned size) {
	ENTER(-1);
	return snprintf(out, size, "13.%s", library_driver()) < (int)size ? NVML_SUCCESS : NVML_ERROR_INSUFFICIENT_SIZE;
}

static nvmlReturn_t cuda_version(const char *function, int *out) {
	struct call call __attribute__((cleanup(call_end))) = {0};
	nvmlReturn_t begun = call_begin(&call, function, -1);
	if (begun == NVML_SUCCESS)
		*out = (int)state_number(-1, "cuda.version", 13000);
	return begun;
}
API nvmlSystemGetCudaDriverVersion(int *out) { return cuda_version(__func__, out); }
API nvmlSystemGetCudaDriverVersion_v2(int *out) { return cuda_version(__func__, out); }

API nvmlSystemGetProcessName(unsigned pid, char *out, unsigned size) {
	ENTER(-1);
	snprintf(out, size, "process-%u", pid);
	return NVML_SUCCESS;
}

API nvmlSystemGetConfComputeState(nvmlConfComputeSystemState_t *out) {
	ENTER(-1);
	if (is_unsupported(-1, "cc.feature"))
		return NVML_ERROR_NOT_SUPPORTED;
	*out = (nvmlConfComputeSystemState_t){0, (unsigned)state_number(-1, "cc.feature", 0), 0};
	return NVML_SUCCESS;
}

API nvmlSystemGetConfComputeGpusReadyState(unsigned *out) {
	ENTER(-1);
	if (is_unsupported(-1, "cc.ready"))
		return NVML_ERROR_NOT_SUPPORTED;
	*out = (unsigned)state_number(-1, "cc.ready", state_number(-1, "cc.feature", 0) ? 1 : 0);
	return NVML_SUCCESS;
}
