#define _GNU_SOURCE
// Device and pinned host memory. Both are address space only until something is
// written, and a whole-block pattern is kept as its seed: a probe of many GiB
// costs no memory here. Asynchronous copies accept pinned host memory only,
// which is stricter than the driver.
#include "cuda.h"

#include <string.h>
#include <sys/mman.h>

#define MAX_BLOCKS 256

static struct block blocks[MAX_BLOCKS];
static size_t allocated;

static CUresult new_block(void **out, size_t size, int pinned) {
	for (int i = 0; i < MAX_BLOCKS; i++) {
		if (blocks[i].at)
			continue;
		void *at = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
		if (at == MAP_FAILED)
			return CUDA_ERROR_OUT_OF_MEMORY;
		madvise(at, size, MADV_HUGEPAGE);
		blocks[i] = (struct block){.at = at, .size = size, .pinned = pinned};
		*out = at;
		return CUDA_SUCCESS;
	}
	return CUDA_ERROR_OUT_OF_MEMORY;
}

struct block *block_of(const void *at, size_t size, int pinned) {
	for (int i = 0; i < MAX_BLOCKS; i++)
		if (blocks[i].at && blocks[i].pinned == pinned && (const char *)at >= blocks[i].at &&
		    (const char *)at + size <= blocks[i].at + blocks[i].size)
			return &blocks[i];
	return NULL;
}

uint32_t pattern_word(uint64_t i, uint32_t seed) {
	uint32_t v = (uint32_t)i * 0x9E3779B1u ^ (uint32_t)(i >> 32);
	return v ^ v >> 15 ^ seed;
}

uint32_t block_word(const struct block *b, uint64_t i) {
	if (!b->filled || i >= b->words)
		return ((const uint32_t *)b->at)[i];
	return pattern_word(i, b->seed) ^ b->flaw ^ (b->bad == (long long)i ? 4u : 0u);
}

// Writes a kept pattern out, before anything else touches the block.
void block_touch(struct block *b) {
	if (!b || !b->filled)
		return;
	for (uint64_t i = 0; i < b->words; i++)
		((uint32_t *)b->at)[i] = block_word(b, i);
	b->filled = 0;
}

void move(void *to, const void *from, size_t size) {
	struct block *source = block_of(from, size, 0), *target = block_of(to, size, 0);
	block_touch(target);
	if (source && source->filled && size == 4 && ((const char *)from - source->at) % 4 == 0) {
		uint32_t word = block_word(source, (uint64_t)((const char *)from - source->at) / 4);
		memcpy(to, &word, sizeof word);
		return;
	}
	block_touch(source);
	memmove(to, from, size);
}

// What is free: of the board or the MIG device unless cuda.free.mib says.
static size_t free_bytes(void) {
	size_t total = 0;
	cuDeviceTotalMem_v2(&total, current);
	long long used = device_number("memory.used.mib", 4) + 512;
	long long mib = device_number("cuda.free.mib", (long long)(total >> 20) - used);
	return mib > 0 ? (size_t)mib << 20 : 0;
}

API cuMemGetInfo_v2(size_t *left, size_t *total) {
	ENTER();
	*left = free_bytes() - allocated;
	return cuDeviceTotalMem_v2(total, current);
}

API cuMemAlloc_v2(CUdeviceptr *out, size_t size) {
	ENTER();
	void *at = NULL;
	if (!size)
		return CUDA_ERROR_INVALID_VALUE;
	// cuda.alloc.mib: less than is shown as free; cuda.piece.mib: the largest block.
	size_t most = (size_t)device_number("cuda.alloc.mib", (long long)(free_bytes() >> 20)) << 20;
	long long piece = device_number("cuda.piece.mib", 0);
	if (allocated + size > most || (piece > 0 && size > (size_t)piece << 20))
		return CUDA_ERROR_OUT_OF_MEMORY;
	CUresult code = new_block(&at, size, 0);
	if (!code)
		allocated += size;
	*out = (CUdeviceptr)(uintptr_t)at;
	return code;
}

static CUresult release(void *at, int pinned) {
	struct block *b = block_of(at, 1, pinned);
	if (!b || b->at != at)
		return CUDA_ERROR_INVALID_VALUE;
	if (!pinned)
		allocated -= b->size;
	munmap(b->at, b->size);
	b->at = NULL;
	return CUDA_SUCCESS;
}
API cuMemFree_v2(CUdeviceptr at) { return release((void *)(uintptr_t)at, 0); }
API cuMemFreeHost(void *at) { return release(at, 1); }
API cuMemHostAlloc(void **out, size_t size, unsigned flags) {
	(void)flags;
	ENTER();
	return new_block(out, size, 1);
}
