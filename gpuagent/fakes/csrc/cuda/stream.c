#define _GNU_SOURCE
// One stream and the probe's three kernels. Work on the stream waits until
// somebody synchronises, as on a device: a caller that reads a buffer too early
// sees old data. Time on the device is computed from the bytes moved and the
// speed of the model, so that a loaded machine does not make a slow GPU.
#include "cuda.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define STREAM ((void *)0x57)
#define MODULE ((void *)0x4d)

struct operation {
	enum { COPY, SET, LAUNCH, RECORD } kind;
	void *to, *event;
	const void *from;
	size_t size;
	uint32_t value;
	enum kernel kernel;
	uint64_t arguments[4];
	unsigned threads;
};
static struct operation queue[1024];
static int queued;
static CUresult sticky; // a context that failed once answers with that for ever

static void run_kernel(const struct operation *op) {
	const uint64_t *a = op->arguments;
	struct block *memory = block_of((void *)(uintptr_t)a[0], 1, 0);
	// A device that is wrong in the same way when it writes and when it checks.
	uint32_t flaw = device_number("cuda.consistent.flaw", 0) ? 0x40 : 0, seed = (uint32_t)a[2];
	if (!memory)
		return;
	switch (op->kernel) {
	case FMA: {
		const float *x = (void *)(uintptr_t)a[0];
		float *y = (void *)(uintptr_t)a[1], factor;
		memcpy(&factor, &a[2], sizeof factor);
		for (uint64_t i = 0; i < (uint32_t)a[3] && i < op->threads; i++)
			y[i] = x[i] * factor + y[i];
		if (device_number("cuda.bad.result", 0))
			y[12345] += 1;
		break;
	}
	case FILL:
		memory->filled = 1;
		memory->seed = seed;
		memory->flaw = flaw;
		memory->words = a[1];
		memory->bad = device_number("cuda.bad.word", -1);
		break;
	case CHECK: {
		uint32_t *bad = (void *)(uintptr_t)a[3];
		uint64_t from = 0, to = a[1];
		if (memory->filled && memory->seed == seed && memory->flaw == flaw && memory->words == to) {
			// Only the planned bad word can differ.
			from = memory->bad >= 0 && (uint64_t)memory->bad < to ? (uint64_t)memory->bad : to;
			to = from < to ? from + 1 : to;
		}
		for (uint64_t i = from; i < to; i++)
			if (block_word(memory, i) != (pattern_word(i, seed) ^ flaw)) {
				bad[0]++;
				memcpy(bad + 2, &i, sizeof i);
			}
		break;
	}
	}
}

// GB/s of a copy. Over PCIe it follows the link as the state gives it.
static double speed(const struct operation *op) {
	int up = block_of(op->from, op->size, 1) != NULL, down = block_of(op->to, op->size, 1) != NULL;
	if (!up && !down)
		return (double)device_number("cuda.gbps.dtod", 1300);
	state_open();
	long long generation = state_number(visible[current].gpu, "pcie.gen", model_of(visible[current].gpu)->pcie_generation);
	state_close();
	long long whole = generation >= 5 ? 52 : generation == 4 ? 25 : generation == 3 ? 12 : 6;
	long long usual = whole * device_number("pcie.width", 16) / 16;
	return (double)device_number(up ? "cuda.gbps.htod" : "cuda.gbps.dtoh", usual > 0 ? usual : 1);
}

static double clock_ms; // the device's own

static void run_copy(const struct operation *op, const struct operation *before) {
	clock_ms += (double)op->size / speed(op) / 1e6;
	// The same copy again changes nothing.
	if (before && before->kind == COPY && before->to == op->to && before->from == op->from && before->size == op->size)
		return;
	move(op->to, op->from, op->size);
}

static CUresult drain(void) {
	if (sticky)
		return sticky;
	for (int i = 0; i < queued; i++) {
		struct operation *op = &queue[i];
		switch (op->kind) {
		case COPY: run_copy(op, i ? op - 1 : NULL); break;
		case SET:
			block_touch(block_of(op->to, op->size * 4, 0));
			for (size_t k = 0; k < op->size; k++)
				((uint32_t *)op->to)[k] = op->value;
			break;
		case RECORD: *(double *)op->event = clock_ms; break;
		case LAUNCH:
			if (device_number("cuda.hang.kernel", 0) == op->kernel)
				for (;;)
					pause(); // the kernel never ends
			if (device_number("cuda.fault.kernel", 0) == op->kernel) {
				queued = 0;
				return sticky = CUDA_ERROR_LAUNCH_FAILED;
			}
			run_kernel(op);
		}
	}
	queued = 0;
	return CUDA_SUCCESS;
}

static CUresult append(struct operation op, void *stream) {
	if (sticky)
		return sticky;
	if (stream != STREAM)
		return CUDA_ERROR_INVALID_HANDLE;
	if (queued == 1024)
		drain();
	queue[queued++] = op;
	return CUDA_SUCCESS;
}

static CUresult copy(void *to, const void *from, size_t size, void *stream, int to_host, int from_host) {
	if (!block_of(to, size, to_host) || !block_of(from, size, from_host))
		return CUDA_ERROR_INVALID_VALUE;
	return append((struct operation){.kind = COPY, .to = to, .from = from, .size = size}, stream);
}
API cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void *from, size_t size, void *stream) {
	ENTER();
	return copy((void *)(uintptr_t)to, from, size, stream, 0, 1);
}
API cuMemcpyDtoHAsync_v2(void *to, CUdeviceptr from, size_t size, void *stream) {
	ENTER();
	return copy(to, (void *)(uintptr_t)from, size, stream, 1, 0);
}
API cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t size, void *stream) {
	ENTER();
	return copy((void *)(uintptr_t)to, (void *)(uintptr_t)from, size, stream, 0, 0);
}
API cuMemsetD32Async(CUdeviceptr to, unsigned value, size_t count, void *stream) {
	ENTER();
	if (!block_of((void *)(uintptr_t)to, count * 4, 0))
		return CUDA_ERROR_INVALID_VALUE;
	return append((struct operation){.kind = SET, .to = (void *)(uintptr_t)to, .size = count, .value = value}, stream);
}

API cuStreamCreate(void **out, unsigned flags) {
	(void)flags;
	ENTER();
	*out = STREAM;
	return CUDA_SUCCESS;
}
API cuStreamDestroy_v2(void *stream) { return stream == STREAM ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE; }
API cuStreamSynchronize(void *stream) {
	ENTER();
	return stream == STREAM ? drain() : CUDA_ERROR_INVALID_HANDLE;
}
API cuCtxSynchronize(void) {
	ENTER();
	return drain();
}

API cuEventCreate(void **out, unsigned flags) {
	(void)flags;
	ENTER();
	*out = calloc(1, sizeof(double));
	return CUDA_SUCCESS;
}
API cuEventDestroy_v2(void *event) {
	free(event);
	return CUDA_SUCCESS;
}
API cuEventRecord(void *event, void *stream) {
	ENTER();
	return append((struct operation){.kind = RECORD, .event = event}, stream);
}
API cuEventSynchronize(void *event) {
	(void)event;
	ENTER();
	return drain();
}
API cuEventElapsedTime(float *ms, void *from, void *to) {
	*ms = (float)(*(double *)to - *(double *)from);
	return CUDA_SUCCESS;
}

// A JIT that reads the head of the text only: the version must be one that the
// driver's CUDA release knows, the target at most the device's capability.
API cuModuleLoadDataEx(void **out, const char *image, unsigned count, const int *options, void **values) {
	ENTER();
	int major = 0, minor = 0, target = 0, have = 0;
	const char *version = strstr(image, ".version "), *arch = strstr(image, ".target sm_");
	CUresult code = CUDA_SUCCESS;
	if (!version || !arch || sscanf(version, ".version %d.%d", &major, &minor) != 2 || sscanf(arch, ".target sm_%d", &target) != 1)
		code = CUDA_ERROR_INVALID_PTX;
	int release = major >= 7 ? 11000 + minor * 10 : minor >= 3 ? 10000 : 9000;
	state_open();
	have = model_of(visible[current].gpu)->major * 10 + model_of(visible[current].gpu)->minor;
	if (!code && release > state_number(-1, "cuda.version", 13000))
		code = CUDA_ERROR_UNSUPPORTED_PTX_VERSION;
	if (!code && (target > have || state_number(visible[current].gpu, "cuda.jit.fault", 0)))
		code = CUDA_ERROR_INVALID_PTX;
	state_close();
	for (unsigned i = 0; code && i + 1 < count; i++)
		if (options[i] == 5 && options[i + 1] == 6) // error log buffer, its size
			snprintf(values[i], (size_t)(uintptr_t)values[i + 1], "ptxas application ptx input, line 2; fatal : target sm_%d, device sm_%d", target, have);
	*out = MODULE;
	return code;
}
API cuModuleUnload(void *module) { return module == MODULE ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE; }

API cuModuleGetFunction(void **out, void *module, const char *name) {
	ENTER();
	static const char *const names[] = {"", "probe_fma", "probe_fill", "probe_check"};
	if (module != MODULE)
		return CUDA_ERROR_INVALID_HANDLE;
	for (intptr_t i = FMA; i <= CHECK; i++)
		if (!strcmp(names[i], name)) {
			*out = (void *)i;
			return CUDA_SUCCESS;
		}
	return CUDA_ERROR_NOT_FOUND;
}

// Parameters are copied at launch, as the driver does: the caller may reuse
// them at once.
API cuLaunchKernel(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                   unsigned shared, void *stream, void **parameters, void **extra) {
	ENTER();
	static const int widths[][4] = {{0}, {8, 8, 4, 4}, {8, 8, 4, 0}, {8, 8, 4, 8}};
	struct operation op = {.kind = LAUNCH, .kernel = (enum kernel)(intptr_t)function, .threads = gx * bx};
	if (gy != 1 || gz != 1 || by != 1 || bz != 1 || !gx || !bx || bx > 1024 || shared || extra)
		return CUDA_ERROR_INVALID_VALUE;
	if (op.kernel < FMA || op.kernel > CHECK)
		return CUDA_ERROR_INVALID_HANDLE;
	for (int i = 0; i < 4 && widths[op.kernel][i]; i++)
		memcpy(&op.arguments[i], parameters[i], (size_t)widths[op.kernel][i]);
	return append(op, stream);
}
