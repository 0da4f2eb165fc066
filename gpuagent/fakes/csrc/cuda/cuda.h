// What the files of the fake libcuda share. Types and codes follow the published
// driver API.
#ifndef REFIT_FAKE_CUDA_H
#define REFIT_FAKE_CUDA_H

#include "state.h"

#include <stddef.h>
#include <stdint.h>

typedef int CUresult;
typedef uint64_t CUdeviceptr;
enum {
	CUDA_SUCCESS = 0,
	CUDA_ERROR_INVALID_VALUE = 1,
	CUDA_ERROR_OUT_OF_MEMORY = 2,
	CUDA_ERROR_NOT_INITIALIZED = 3,
	CUDA_ERROR_DEVICE_UNAVAILABLE = 46,
	CUDA_ERROR_NO_DEVICE = 100,
	CUDA_ERROR_INVALID_DEVICE = 101,
	CUDA_ERROR_INVALID_CONTEXT = 201,
	CUDA_ERROR_INVALID_PTX = 218,
	CUDA_ERROR_UNSUPPORTED_PTX_VERSION = 222,
	CUDA_ERROR_INVALID_HANDLE = 400,
	CUDA_ERROR_NOT_FOUND = 500,
	CUDA_ERROR_LAUNCH_FAILED = 719,
	CUDA_ERROR_SYSTEM_NOT_READY = 802,
	CUDA_ERROR_SYSTEM_DRIVER_MISMATCH = 803,
};

#define API EXPORT CUresult
enum kernel { FMA = 1, FILL, CHECK };

extern struct visible { int gpu, gi, ci; } visible[MAX_GPUS];
extern int visible_count, current; // current device, -1 without a context

// A planned fault of the current device for this function.
CUresult fault(const char *function);
#define ENTER() \
	do { \
		if (current < 0) return CUDA_ERROR_INVALID_CONTEXT; \
		CUresult planned_ = fault(__func__); \
		if (planned_) return planned_; \
	} while (0)

long long device_number(const char *key, long long otherwise);

// A stretch of memory; filled means that its words are the pattern of a seed,
// but for what a planned fault changed.
struct block {
	char *at;
	size_t size;
	int pinned, filled;
	uint32_t seed, flaw;
	uint64_t words;
	long long bad;
};
struct block *block_of(const void *at, size_t size, int pinned);
uint32_t pattern_word(uint64_t i, uint32_t seed);
uint32_t block_word(const struct block *b, uint64_t i);
void block_touch(struct block *b);
void move(void *to, const void *from, size_t size);
CUresult cuDeviceTotalMem_v2(size_t *out, int device);

#endif
