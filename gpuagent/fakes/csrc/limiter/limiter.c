#define _GNU_SOURCE
// A preloaded library in the manner of a software vGPU limiter: it stands before
// the driver's allocation calls and refuses what is above REFIT_FAKE_LIMIT_MIB.
// Without the variable it counts and refuses nothing, like a limiter that is
// loaded but not in force.
#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#define EXPORT __attribute__((visibility("default")))

static size_t used;

static size_t limit(void) {
	const char *mib = getenv("REFIT_FAKE_LIMIT_MIB");
	return mib && *mib ? (size_t)strtoull(mib, NULL, 10) << 20 : SIZE_MAX;
}

EXPORT int cuMemAlloc_v2(uint64_t *out, size_t size) {
	int (*next)(uint64_t *, size_t) = dlsym(RTLD_NEXT, "cuMemAlloc_v2");
	if (!next)
		return 3; // CUDA_ERROR_NOT_INITIALIZED
	if (size > limit() - used)
		return 2; // CUDA_ERROR_OUT_OF_MEMORY
	int code = next(out, size);
	if (!code)
		used += size;
	return code;
}

EXPORT int cuMemGetInfo_v2(size_t *left, size_t *total) {
	int (*next)(size_t *, size_t *) = dlsym(RTLD_NEXT, "cuMemGetInfo_v2");
	int code = next ? next(left, total) : 3;
	if (!code && limit() != SIZE_MAX) {
		*total = limit();
		if (*left > limit() - used)
			*left = limit() - used;
	}
	return code;
}
