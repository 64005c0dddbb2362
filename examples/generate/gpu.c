/*
 * Memory of the first GPU, through the CUDA driver, which is loaded at run time: the program runs without one, too, and needs no
 * CUDA to be built. A program that uses CUDA anyway has all of this already.
 */
#define _POSIX_C_SOURCE 200809L
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

#include "generate.h"

typedef unsigned long long address;
typedef struct cuda_context *cuda_context;

static struct {
    void *library;
    int device;
    bool retained;
    int (*init)(unsigned flags);
    int (*device_get)(int *device, int ordinal);
    int (*retain)(cuda_context *context, int device);
    int (*release)(int device);
    int (*push)(cuda_context context);
    int (*alloc)(address *memory, size_t bytes);
    int (*free)(address memory);
    int (*put)(address to, const void *from, size_t bytes);
    int (*get)(void *to, address from, size_t bytes);
    int (*wait)(void);
} cuda;

static bool done(int error, const char *what) { return !error || fail("GPU: %s: CUDA error %d", what, error); }

/* A pointer to a function, which ISO C does not let one assign. */
static bool find(const char *symbol, void *function) {
    void *found = dlsym(cuda.library, symbol);
    memcpy(function, &found, sizeof found);
    return found || fail("GPU: the driver has no %s", symbol);
}

bool gpu_open(void) {
    const char *named = getenv("ATTN_CUDA_DRIVER"); /* which libattn, too, takes the driver from */
    cuda.library = dlopen(named && *named ? named : "libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!cuda.library) return fail("GPU: %s", dlerror());
    cuda_context context;
    if (!find("cuInit", &cuda.init) || !find("cuDeviceGet", &cuda.device_get) ||
        !find("cuDevicePrimaryCtxRetain", &cuda.retain) || !find("cuDevicePrimaryCtxRelease_v2", &cuda.release) ||
        !find("cuCtxPushCurrent_v2", &cuda.push) || !find("cuMemAlloc_v2", &cuda.alloc) ||
        !find("cuMemFree_v2", &cuda.free) || !find("cuMemcpyHtoD_v2", &cuda.put) || !find("cuMemcpyDtoH_v2", &cuda.get) ||
        !find("cuCtxSynchronize", &cuda.wait))
        return false;
    if (!done(cuda.init(0), "init") || !done(cuda.device_get(&cuda.device, 0), "device 0")) return false;
    cuda.retained = done(cuda.retain(&context, cuda.device), "context");
    return cuda.retained && done(cuda.push(context), "context");
}

void gpu_close(void) {
    if (cuda.retained) cuda.release(cuda.device);
    cuda.retained = false; /* the driver stays loaded: libattn, too, holds it to the end of the process */
}

void *gpu_alloc(size_t bytes) {
    address memory;
    return done(cuda.alloc(&memory, bytes ? bytes : 1), "memory") ? (void *)(uintptr_t)memory : NULL;
}

void gpu_free(void *memory) {
    if (memory) cuda.free((address)(uintptr_t)memory);
}

bool gpu_put(void *to, const void *from, size_t bytes) {
    return bytes == 0 || done(cuda.put((address)(uintptr_t)to, from, bytes), "copy to the GPU");
}

bool gpu_get(void *to, const void *from, size_t bytes) {
    return bytes == 0 || done(cuda.get(to, (address)(uintptr_t)from, bytes), "copy from the GPU");
}

bool gpu_wait(void) { return done(cuda.wait(), "attention"); }
