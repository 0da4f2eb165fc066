// The state file that both fake libraries share: key=value lines, read anew at
// every call and changed under a lock, so that it outlives the processes that
// load the libraries and can be edited by a test between two calls.
#ifndef REFIT_FAKE_STATE_H
#define REFIT_FAKE_STATE_H

#include <stddef.h>

#define EXPORT __attribute__((visibility("default")))
#define MAX_GPUS 16
#define MAX_GI 15 // GPU instance ids 1..14
#define MAX_CI 8
#define MEMORY_SLICES 8
#define COMPUTE_SLICES 7

// Lock (this process's threads and other processes), then read the file.
void state_open(void);
// Write the file back if anything was set, then unlock. Safe when not open.
void state_close(void);

// All of the following need an open state. gpu < 0 asks for the host's key;
// otherwise "gpu.<n>.<key>" wins over "<key>", which speaks for every GPU.
const char *state_text(int gpu, const char *key, const char *otherwise);
long long state_number(int gpu, const char *key, long long otherwise);
void state_put(int gpu, const char *key, const char *value);
void state_remove(int gpu, const char *key);
int is_unsupported(int gpu, const char *key);
// Whether the caller may change settings, as root on a real host. The process's
// own user is not asked: tests run as anybody.
int is_root(void);

// The planned fault of one call: 0 or the code to return. Hangs, crashes and
// delays happen inside. A version suffix of the function's name is ignored.
int planned_fault(int gpu, const char *function);

struct model {
	const char *key, *name;
	long long mib; // board memory
	int major, minor, multiprocessors;
	int nvlinks, nvlink_mbps, pcie_generation;
	int mig_survives_reboot;
	int power_mw, bars_mib;
	unsigned pci_device;
};
const struct model *model_of(int gpu);

int gpu_count(void);
const char *library_driver(void);
// 0, 9 (module not loaded) or 18 (module of another version), as NVML names them.
int driver_state(void);
const char *gpu_uuid(int gpu, char *out, size_t size);
const char *gpu_bus_id(int gpu, char *out, size_t size);

// Profiles by NVML's constant; -1 where an id is unknown.
struct mig_profile {
	int constant, id, slices, memory, starts, step;
};
const struct mig_profile *profile_by_constant(int constant);
const struct mig_profile *profile_by_id(int id);
long long profile_mib(int gpu, const struct mig_profile *p);

struct gpu_instance {
	int used, profile, start, size;
};
struct compute_instance {
	int used, profile, start, size;
};
int mig_enabled(int gpu);
int read_gpu_instance(int gpu, int gi, struct gpu_instance *out);
int read_compute_instance(int gpu, int gi, int ci, struct compute_instance *out);
void write_gpu_instance(int gpu, int gi, const struct gpu_instance *value);
void write_compute_instance(int gpu, int gi, int ci, const struct compute_instance *value);
const char *mig_uuid(int gpu, int gi, int ci, char *out, size_t size);

#endif
