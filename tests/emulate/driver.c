/*
 * A CUDA driver whose GPU is this CPU: ATTN_CUDA_DRIVER=.../libemulated-cuda.so makes the cuda backend, and with it attn check
 * --backend cuda, run the kernels of src/cuda where there is no GPU. One device, one context; every launch is done when
 * the call returns. It has compute capability 8.0, or with EMULATE_ARCH=90 that of Hopper, and EMULATE_SMS multiprocessors.
 *
 * Device memory is followed by a page that must not be touched; with EMULATE_GUARD=before, preceded by one.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include "cuda/args.h"
#include "cuda/driver.h"
#include "hopper.h"

#define EXPORT __attribute__((visibility("default")))

/* ---- kernels ---- */

/* What each is given: attn_cuda_args, but for two. */
typedef attn_cuda_args args_append, args_rotate_q, args_ranges, args_fold, args_fill, args_probs, args_fwd_any,
    args_fold_latent;
typedef attn_cuda_args args_bwd_delta, args_bwd_fit, args_bwd_sink, args_bwd_cast, args_bwd_fill, args_bwd_any,
    args_bwd_any_q, args_bwd_bias;
typedef attn_cuda_merge args_merge;
typedef attn_cuda_rotary args_rotary;

/* EMULATE_ONLY of check.sh leaves some out: they are weak. */
#ifdef __aarch64__ /* a large argument is a pointer to it; the compiler's copy would not be aligned as tensor maps must be */
#define ENTRY(entry, type)                                                                                                 \
    void entry(const type *a) __attribute__((weak));                                                                       \
    static void run_##entry(const void *args) { entry(args); }
#else
#define ENTRY(entry, type)                                                                                                 \
    void entry(const type a) __attribute__((weak));                                                                        \
    static void run_##entry(const void *args) { entry(*(const type *)args); }
#endif
#define FWD(entry, ...) ENTRY(entry, attn_cuda_args)
#define FWD90(entry, ...) ENTRY(entry, attn_cuda_args90)
#define BWD(entry, ...) ENTRY(entry, attn_cuda_args)
#define BWD90(entry, ...) ENTRY(entry, attn_cuda_args90)
#define DECODE(entry, ...) ENTRY(entry, attn_cuda_decode)
#define DECODE90(entry, ...) ENTRY(entry, attn_cuda_args)
#define PIECE(entry, file) ENTRY(entry, args_##entry)
#include "cuda/tune.def"
#include "cuda/variants.def"
#undef FWD
#undef FWD90
#undef BWD
#undef BWD90
#undef PIECE

static const struct {
    const char *name;
    void (*run)(const void *args);
    const void *is_there;
    unsigned cluster; /* blocks */
} kernels[] = {
#define CLUSTERS(entry, blocks) {#entry, run_##entry, (const void *)(uintptr_t)entry, blocks},
#define ROW(entry) CLUSTERS(entry, 1)
#define FWD(entry, ...) ROW(entry)
#define FWD90(entry, ...) ROW(entry)
#define BWD(entry, ...) ROW(entry)
#define BWD90(entry, type, dim, rows, keys, blocks, buffers) CLUSTERS(entry, blocks ? blocks : 1)
#define DECODE(entry, ...) ROW(entry)
#define DECODE90(entry, ...) ROW(entry)
#define PIECE(entry, file) ROW(entry)
#include "cuda/tune.def"
#include "cuda/variants.def"
#undef PIECE
#undef FWD90
#undef BWD
#undef BWD90
#undef FWD
};
enum { KERNELS = sizeof kernels / sizeof kernels[0] };

static pthread_mutex_t launching = PTHREAD_MUTEX_INITIALIZER;

EXPORT int cuLibraryLoadData(attn_cu_library *library, const void *image, int *jit_options, void **jit_values,
                             unsigned jit_count, int *options, void **values, unsigned count) {
    (void)image, (void)jit_options, (void)jit_values, (void)jit_count, (void)options, (void)values, (void)count;
    *library = (attn_cu_library)(uintptr_t)1;
    return 0;
}
EXPORT int cuLibraryUnload(attn_cu_library library) { return (void)library, 0; }

EXPORT int cuLibraryGetKernel(attn_cu_kernel *kernel, attn_cu_library library, const char *name) {
    (void)library;
    for (uintptr_t n = 0; n < KERNELS; n++) {
        *kernel = (attn_cu_kernel)(n + 1);
        if (strcmp(kernels[n].name, name) == 0) return kernels[n].is_there ? 0 : 500;
    }
    return 500; /* CUDA_ERROR_NOT_FOUND */
}
EXPORT int cuKernelSetAttribute(int attribute, int value, attn_cu_kernel kernel, int device) {
    return (void)attribute, (void)value, (void)kernel, (void)device, 0;
}
EXPORT int cuKernelGetAttribute(int *value, int attribute, attn_cu_kernel kernel, int device) {
    const char *arch = getenv("EMULATE_ARCH");
    (void)kernel, (void)device;
    *value = attribute != ATTN_CU_FUNCTION_PTX ? 0 : arch ? atoi(arch) : 80;
    return 0;
}
EXPORT int cuKernelGetFunction(attn_cu_function *function, attn_cu_kernel kernel) {
    *function = (attn_cu_function)(void *)kernel;
    return 0;
}

EXPORT int cuTensorMapEncodeTiled(void *map, int type, unsigned rank, void *address, const uint64_t *dims,
                                  const uint64_t *strides, const unsigned *box, const unsigned *steps, int interleave,
                                  int swizzle, int l2_promotion, int fill) {
    return emulate_map_encode(map, type, rank, address, dims, strides, box, steps, interleave, swizzle, l2_promotion, fill);
}

/* One that is launched early, while the kernel before it may still write, has to wait for that: all of its threads. */
EXPORT int cuLaunchKernelEx(const attn_cu_launch *launch, attn_cu_function function, void **parameters, void **extra) {
    const unsigned *grid = launch->grid, *block = launch->block;
    (void)extra;
    if (block[1] != 1 || block[2] != 1 || !parameters) return 1; /* CUDA_ERROR_INVALID_VALUE */
    pthread_mutex_lock(&launching);
    emulate_grid_waits = 0;
    emulate_launch(kernels[(uintptr_t)function - 1].run, parameters[0], grid[0], grid[1], grid[2], block[0],
                   launch->shared_bytes, kernels[(uintptr_t)function - 1].cluster);
    if (launch->count && emulate_grid_waits < (uint64_t)grid[0] * grid[1] * grid[2] * block[0])
        emulate_fail("%s is launched early and does not wait", kernels[(uintptr_t)function - 1].name);
    pthread_mutex_unlock(&launching);
    return 0;
}

/* ---- memory ---- */

typedef struct block {
    struct block *next;
    char *mapped, *start;
    size_t mapped_bytes, bytes;
    unsigned type;
} block;

static pthread_mutex_t listing = PTHREAD_MUTEX_INITIALIZER;
static block *blocks;

/* Ends at a page that must not be touched, up to the alignment of 16 bytes; or begins after one. */
static int allocate(void **memory, size_t bytes, unsigned type) {
    const size_t page = 65536; /* a multiple of any machine's */
    const char *guard = getenv("EMULATE_GUARD");
    bool before = guard && strcmp(guard, "before") == 0;
    size_t rounded = (bytes + 15) / 16 * 16, room = (rounded + page - 1) / page * page;
    block *b = malloc(sizeof *b);
    if (!b || bytes == 0) return free(b), 1;
    b->mapped_bytes = room + page;
    b->mapped = mmap(NULL, b->mapped_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (b->mapped == MAP_FAILED || mprotect(b->mapped + (before ? 0 : room), page, PROT_NONE))
        return free(b), ATTN_CU_OUT_OF_MEMORY;
    b->start = b->mapped + (before ? page : room - rounded);
    b->bytes = bytes;
    b->type = type;
    memset(b->start, 0xa5, rounded);
    *memory = b->start;
    pthread_mutex_lock(&listing);
    b->next = blocks;
    blocks = b;
    pthread_mutex_unlock(&listing);
    return 0;
}

static int release(const void *memory) {
    pthread_mutex_lock(&listing);
    block **at = &blocks, *b;
    while (*at && (*at)->start != memory) at = &(*at)->next;
    b = *at;
    if (b) *at = b->next;
    pthread_mutex_unlock(&listing);
    if (!b) return 1;
    munmap(b->mapped, b->mapped_bytes);
    free(b);
    return 0;
}

static unsigned type_of(uintptr_t pointer) {
    unsigned type = 0;
    pthread_mutex_lock(&listing);
    for (const block *b = blocks; b; b = b->next)
        if (pointer >= (uintptr_t)b->start && pointer < (uintptr_t)b->start + b->bytes) type = b->type;
    pthread_mutex_unlock(&listing);
    return type;
}

static int allocate_device(attn_cu_pointer *memory, size_t bytes) {
    void *start = NULL;
    int error = allocate(&start, bytes, ATTN_CU_MEMORY_DEVICE);
    *memory = (attn_cu_pointer)(uintptr_t)start;
    return error;
}
static void *host(attn_cu_pointer pointer) { return (void *)(uintptr_t)pointer; }

EXPORT int cuMemAlloc_v2(attn_cu_pointer *memory, size_t bytes) { return allocate_device(memory, bytes); }
EXPORT int cuMemFree_v2(attn_cu_pointer memory) { return release(host(memory)); }
EXPORT int cuMemAllocAsync(attn_cu_pointer *memory, size_t bytes, attn_cu_stream stream) {
    return (void)stream, allocate_device(memory, bytes);
}
EXPORT int cuMemFreeAsync(attn_cu_pointer memory, attn_cu_stream stream) { return (void)stream, release(host(memory)); }
EXPORT int cuMemHostAlloc(void **memory, size_t bytes, unsigned flags) {
    return (void)flags, allocate(memory, bytes, ATTN_CU_MEMORY_HOST);
}
EXPORT int cuMemFreeHost(void *memory) { return release(memory); }
EXPORT int cuMemsetD32Async(attn_cu_pointer to, unsigned value, size_t count, attn_cu_stream stream) {
    (void)stream;
    for (size_t n = 0; n < count; n++) ((unsigned *)host(to))[n] = value;
    return 0;
}
EXPORT int cuMemcpyHtoD_v2(attn_cu_pointer to, const void *from, size_t bytes) { return memcpy(host(to), from, bytes), 0; }
EXPORT int cuMemcpyDtoH_v2(void *to, attn_cu_pointer from, size_t bytes) { return memcpy(to, host(from), bytes), 0; }
EXPORT int cuMemsetD8_v2(attn_cu_pointer to, unsigned char value, size_t bytes) {
    return memset(host(to), value, bytes), 0;
}

EXPORT int cuPointerGetAttributes(unsigned count, int *attributes, void **data, attn_cu_pointer pointer) {
    for (unsigned n = 0; n < count; n++) {
        if (attributes[n] == ATTN_CU_POINTER_TYPE) *(unsigned *)data[n] = type_of((uintptr_t)pointer);
        if (attributes[n] == ATTN_CU_POINTER_MANAGED) *(unsigned *)data[n] = 0;
        if (attributes[n] == ATTN_CU_POINTER_DEVICE) *(int *)data[n] = 0;
    }
    return 0;
}

/* ---- the device and its context ---- */

static _Thread_local int pushed; /* contexts on this thread's stack: all of them the same one */

EXPORT int cuDriverGetVersion(int *version) { return *version = 13000, 0; }
EXPORT int cuInit(unsigned flags) { return (void)flags, 0; }
EXPORT int cuGetErrorName(int error, const char **name) { return (void)error, *name = "CUDA_ERROR_EMULATED", 0; }
EXPORT int cuGetErrorString(int error, const char **text) { return (void)error, *text = "of the emulated GPU", 0; }
EXPORT int cuDeviceGetCount(int *count) { return *count = 1, 0; }
EXPORT int cuDeviceGet(int *device, int ordinal) { return *device = ordinal, ordinal != 0; }
EXPORT int cuDeviceGetName(char *name, int bytes, int device) {
    return (void)device, snprintf(name, (size_t)bytes, "emulated GPU"), 0;
}

/* Two multiprocessors share the work of a persistent kernel, or EMULATE_SMS: each has more than one piece of it in most runs. */
EXPORT int cuDeviceGetAttribute(int *value, int attribute, int device) {
    const char *arch = getenv("EMULATE_ARCH"), *sms = getenv("EMULATE_SMS");
    (void)device;
    switch (attribute) {
    case ATTN_CU_DEVICE_SMS: *value = sms ? atoi(sms) : 2; break;
    case ATTN_CU_DEVICE_MAJOR: *value = arch ? atoi(arch) / 10 : 8; break;
    case ATTN_CU_DEVICE_MINOR: *value = arch ? atoi(arch) % 10 : 0; break;
    case ATTN_CU_DEVICE_SHARED: *value = EMULATE_SHARED_BYTES; break;
    default: *value = 1 << 20; break;
    }
    return 0;
}

static attn_cu_context the_context(void) { return (attn_cu_context)(uintptr_t)1; }
EXPORT int cuDevicePrimaryCtxRetain(attn_cu_context *context, int device) {
    return (void)device, *context = the_context(), 0;
}
EXPORT int cuDevicePrimaryCtxRelease_v2(int device) { return (void)device, 0; }
EXPORT int cuCtxGetCurrent(attn_cu_context *context) { return *context = pushed ? the_context() : NULL, 0; }
EXPORT int cuCtxGetDevice(int *device) { return *device = 0, !pushed; }
EXPORT int cuCtxPushCurrent_v2(attn_cu_context context) { return pushed++, context != the_context(); }
EXPORT int cuCtxPopCurrent_v2(attn_cu_context *context) {
    if (!pushed) return 1;
    pushed--;
    *context = the_context();
    return 0;
}
EXPORT int cuCtxSynchronize(void) { return 0; }

EXPORT int cuStreamGetCtx(attn_cu_stream stream, attn_cu_context *context) {
    return (void)stream, *context = the_context(), 0;
}
EXPORT int cuStreamCreate(attn_cu_stream *stream, unsigned flags) {
    return (void)flags, *stream = (attn_cu_stream)(uintptr_t)16, 0;
}
EXPORT int cuStreamDestroy_v2(attn_cu_stream stream) { return (void)stream, 0; }

/* ---- events: seconds of the host's clock ---- */

EXPORT int cuEventCreate(attn_cu_event *event, unsigned flags) {
    *event = calloc(1, sizeof(double));
    return (void)flags, *event ? 0 : ATTN_CU_OUT_OF_MEMORY;
}
EXPORT int cuEventDestroy_v2(attn_cu_event event) { return free(event), 0; }
EXPORT int cuEventRecord(attn_cu_event event, attn_cu_stream stream) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    *(double *)(void *)event = (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
    return (void)stream, 0;
}
EXPORT int cuEventElapsedTime(float *milliseconds, attn_cu_event start, attn_cu_event end) {
    *milliseconds = (float)(1e3 * (*(double *)(void *)end - *(double *)(void *)start));
    return 0;
}
