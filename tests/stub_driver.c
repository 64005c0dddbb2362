/* The stub driver: see stub_driver.h. One mutex guards all of it; the stack of contexts belongs to each thread. */
#define _GNU_SOURCE
#include "stub_driver.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "cuda/cuda.h"

enum {
#define ENTRY(name, symbol, arguments) STUB_##name,
#include "cuda/driver.def"
#undef ENTRY
    STUB_ENTRIES
};

static const char *const entry_names[] = {
#define ENTRY(name, symbol, arguments) #name,
#include "cuda/driver.def"
#undef ENTRY
};

struct attn_cu_context_s {
    int device;
};
struct attn_cu_stream_s {
    int device;
};
struct attn_cu_event_s {
    double ms; /* of the stub's own clock, which launches move */
};
struct attn_cu_library_s {
    int unused;
};
struct attn_cu_kernel_s {
    char name[64];
};

typedef struct block {
    char *start;
    size_t bytes;
    stub_kind kind;
    int device;
    bool owned;
    struct block *next;
} block;

enum { STACK = 8, KERNELS = 256, INVALID_VALUE = 1, INVALID_CONTEXT = 201 };

stub_settings stub;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static long fail_after, seen, calls[STUB_ENTRIES];
static int fail_error, live;
static const char *failed;
static block *blocks;
static struct attn_cu_context_s primaries[STUB_GPUS], own[STUB_GPUS];
static struct attn_cu_stream_s streams[STUB_GPUS];
static struct attn_cu_kernel_s kernels[KERNELS];
static int kernel_count, launch_count;
static stub_launch launches[STUB_LAUNCHES];
static double clock_ms;
static _Thread_local attn_cu_context stack[STACK];
static _Thread_local int depth;

/* ---- counting and failing ---- */

/* Counts the call; the error that it is made to return, or 0. */
static int begin(int entry) {
    pthread_mutex_lock(&mutex);
    calls[entry]++;
    bool fails = fail_after >= 0 && seen++ == fail_after;
    if (fails) failed = entry_names[entry];
    pthread_mutex_unlock(&mutex);
    return fails ? fail_error : 0;
}

#define BEGIN(name)                                                                                                        \
    do {                                                                                                                   \
        int error_ = begin(STUB_##name);                                                                                   \
        if (error_) return error_;                                                                                         \
    } while (0)

static void add_live(int difference) {
    pthread_mutex_lock(&mutex);
    live += difference;
    pthread_mutex_unlock(&mutex);
}

void stub_fail(long after, int error) {
    pthread_mutex_lock(&mutex);
    fail_after = after;
    fail_error = error;
    seen = 0;
    failed = NULL;
    pthread_mutex_unlock(&mutex);
}

const char *stub_failed(void) { return failed; }
int stub_live(void) { return live; }
int stub_depth(void) { return depth; }
int stub_launches(void) { return launch_count; }
const stub_launch *stub_launch_at(int index) { return &launches[index]; }

const attn_cuda_args *stub_args(const stub_launch *launch) {
    if (launch->args_bytes == sizeof(attn_cuda_args90)) return &((const attn_cuda_args90 *)(const void *)launch->args)->a;
    return (const attn_cuda_args *)(const void *)launch->args;
}

long stub_calls(const char *name) {
    long sum = 0;
    for (int n = 0; n < STUB_ENTRIES; n++) {
        if (!name || strcmp(name, entry_names[n]) == 0) sum += calls[n];
    }
    return sum;
}

void stub_forget(void) {
    pthread_mutex_lock(&mutex);
    memset(calls, 0, sizeof calls);
    launch_count = 0;
    pthread_mutex_unlock(&mutex);
}

/* ---- the driver ---- */

static int stub_cuDriverGetVersion(int *version) {
    BEGIN(cuDriverGetVersion);
    *version = stub.version;
    return 0;
}

static int stub_cuInit(unsigned flags) {
    (void)flags;
    BEGIN(cuInit);
    return stub.init_error;
}

/* These two serve the report of a failure, and do not fail themselves. */
static int stub_cuGetErrorName(int error, const char **name) {
    *name = error == 719 ? "CUDA_ERROR_LAUNCH_FAILED" : "CUDA_ERROR_STUB";
    return 0;
}
static int stub_cuGetErrorString(int error, const char **text) {
    (void)error;
    *text = "made to fail";
    return 0;
}

static int stub_cuDeviceGetCount(int *count) {
    BEGIN(cuDeviceGetCount);
    *count = stub.gpus;
    return 0;
}

static int stub_cuDeviceGet(int *device, int ordinal) {
    BEGIN(cuDeviceGet);
    *device = ordinal;
    return 0;
}

static int stub_cuDeviceGetName(char *name, int bytes, int device) {
    BEGIN(cuDeviceGetName);
    strncpy(name, "Stub", (size_t)bytes);
    (void)device;
    return 0;
}

static int stub_cuDeviceGetAttribute(int *value, int attribute, int device) {
    BEGIN(cuDeviceGetAttribute);
    switch (attribute) {
    case ATTN_CU_DEVICE_MAJOR: *value = stub.arch[device] / 10; return 0;
    case ATTN_CU_DEVICE_MINOR: *value = stub.arch[device] % 10; return 0;
    case ATTN_CU_DEVICE_SHARED: *value = stub.shared_bytes[device]; return 0;
    case ATTN_CU_DEVICE_SMS: *value = stub.sms; return 0;
    }
    return INVALID_VALUE;
}

static int stub_cuDevicePrimaryCtxRetain(attn_cu_context *context, int device) {
    BEGIN(cuDevicePrimaryCtxRetain);
    *context = &primaries[device];
    add_live(1);
    return 0;
}

/* What gives something back does so even when it is made to fail: the driver then speaks of an earlier error. */
static int stub_cuDevicePrimaryCtxRelease(int device) {
    (void)device;
    add_live(-1);
    return begin(STUB_cuDevicePrimaryCtxRelease);
}

static int stub_cuCtxGetCurrent(attn_cu_context *context) {
    BEGIN(cuCtxGetCurrent);
    *context = depth ? stack[depth - 1] : NULL;
    return 0;
}

static int stub_cuCtxGetDevice(int *device) {
    BEGIN(cuCtxGetDevice);
    if (!depth) return INVALID_CONTEXT;
    *device = stack[depth - 1]->device;
    return 0;
}

static int stub_cuCtxPushCurrent(attn_cu_context context) {
    BEGIN(cuCtxPushCurrent);
    if (!context || depth == STACK) return INVALID_VALUE;
    stack[depth++] = context;
    return 0;
}

static int stub_cuCtxPopCurrent(attn_cu_context *context) {
    if (depth) *context = stack[--depth];
    return begin(STUB_cuCtxPopCurrent);
}

static int stub_cuStreamGetCtx(attn_cu_stream stream, attn_cu_context *context) {
    BEGIN(cuStreamGetCtx);
    *context = &own[stream->device];
    return 0;
}

static const block *block_of(uintptr_t address) {
    for (const block *b = blocks; b; b = b->next) {
        if (address >= (uintptr_t)b->start && address < (uintptr_t)b->start + b->bytes) return b;
    }
    return NULL;
}

static int stub_cuPointerGetAttributes(unsigned count, int *attributes, void **data, attn_cu_pointer pointer) {
    BEGIN(cuPointerGetAttributes);
    pthread_mutex_lock(&mutex);
    const block *b = block_of((uintptr_t)pointer);
    unsigned type = !b ? 0 : b->kind == STUB_PINNED ? ATTN_CU_MEMORY_HOST : ATTN_CU_MEMORY_DEVICE;
    for (unsigned n = 0; n < count; n++) {
        if (attributes[n] == ATTN_CU_POINTER_TYPE) *(unsigned *)data[n] = type;
        if (attributes[n] == ATTN_CU_POINTER_MANAGED) *(unsigned *)data[n] = b && b->kind == STUB_MANAGED;
        if (attributes[n] == ATTN_CU_POINTER_DEVICE) *(int *)data[n] = b ? b->device : -2;
    }
    pthread_mutex_unlock(&mutex);
    return 0;
}

/* ---- memory ---- */

static void add_block(stub_kind kind, int device, void *memory, size_t bytes, bool owned) {
    block *b = malloc(sizeof *b);
    *b = (block){.start = memory, .bytes = bytes, .kind = kind, .device = device, .owned = owned};
    pthread_mutex_lock(&mutex);
    b->next = blocks;
    blocks = b;
    pthread_mutex_unlock(&mutex);
}

static void remove_block(void *memory) {
    pthread_mutex_lock(&mutex);
    block **at = &blocks;
    while (*at && (*at)->start != memory) at = &(*at)->next;
    block *b = *at;
    if (b) *at = b->next;
    pthread_mutex_unlock(&mutex);
    if (b && b->owned) free(b->start);
    free(b);
}

void *stub_memory(stub_kind kind, int device, size_t bytes) {
    void *memory = NULL;
    if (posix_memalign(&memory, 256, bytes ? bytes : 1)) abort();
    add_block(kind, device, memory, bytes, true);
    return memory;
}

void stub_adopt(stub_kind kind, int device, void *memory, size_t bytes) { add_block(kind, device, memory, bytes, false); }

static int stub_cuMemHostAlloc(void **memory, size_t bytes, unsigned flags) {
    BEGIN(cuMemHostAlloc);
    if (!depth) return INVALID_CONTEXT;
    if (flags != (ATTN_CU_HOST_PORTABLE | ATTN_CU_HOST_MAPPED)) return INVALID_VALUE;
    *memory = stub_memory(STUB_PINNED, stack[depth - 1]->device, bytes);
    add_live(1);
    return 0;
}

static int stub_cuMemFreeHost(void *memory) {
    remove_block(memory);
    add_live(-1);
    return begin(STUB_cuMemFreeHost);
}

static int stub_cuMemAllocAsync(attn_cu_pointer *memory, size_t bytes, attn_cu_stream stream) {
    BEGIN(cuMemAllocAsync);
    if (!depth && (uintptr_t)stream <= ATTN_CU_STREAM_PER_THREAD) return INVALID_CONTEXT;
    *memory = (uintptr_t)stub_memory(STUB_DEVICE, stack[depth - 1]->device, bytes);
    add_live(1);
    return 0;
}

static int stub_cuMemFreeAsync(attn_cu_pointer memory, attn_cu_stream stream) {
    (void)stream;
    remove_block((void *)(uintptr_t)memory);
    add_live(-1);
    return begin(STUB_cuMemFreeAsync);
}

static int stub_cuMemsetD32Async(attn_cu_pointer to, unsigned value, size_t count, attn_cu_stream stream) {
    BEGIN(cuMemsetD32Async);
    if (!depth && (uintptr_t)stream <= ATTN_CU_STREAM_PER_THREAD) return INVALID_CONTEXT;
    if (to % 4) return INVALID_VALUE;
    for (size_t n = 0; n < count; n++) ((unsigned *)(uintptr_t)to)[n] = value;
    return 0;
}

static int stub_cuMemAlloc(attn_cu_pointer *memory, size_t bytes) {
    BEGIN(cuMemAlloc);
    if (!depth) return INVALID_CONTEXT;
    *memory = (uintptr_t)stub_memory(STUB_DEVICE, stack[depth - 1]->device, bytes);
    add_live(1);
    return 0;
}

static int stub_cuMemFree(attn_cu_pointer memory) {
    remove_block((void *)(uintptr_t)memory);
    add_live(-1);
    return begin(STUB_cuMemFree);
}

static int stub_cuMemcpyHtoD(attn_cu_pointer to, const void *from, size_t bytes) {
    BEGIN(cuMemcpyHtoD);
    memcpy((void *)(uintptr_t)to, from, bytes);
    return 0;
}

static int stub_cuMemcpyDtoH(void *to, attn_cu_pointer from, size_t bytes) {
    BEGIN(cuMemcpyDtoH);
    memcpy(to, (const void *)(uintptr_t)from, bytes);
    return 0;
}

static int stub_cuMemsetD8(attn_cu_pointer to, unsigned char value, size_t bytes) {
    BEGIN(cuMemsetD8);
    memset((void *)(uintptr_t)to, value, bytes);
    return 0;
}

/* ---- kernels ---- */

static int stub_cuLibraryLoadData(attn_cu_library *library, const void *image, int *jit_options, void **jit_values,
                                  unsigned jit_count, int *options, void **values, unsigned count) {
    BEGIN(cuLibraryLoadData);
    if (!image || jit_options || jit_values || jit_count || options || values || count) return INVALID_VALUE;
    *library = malloc(sizeof **library);
    add_live(1);
    return 0;
}

static int stub_cuLibraryUnload(attn_cu_library library) {
    free(library);
    add_live(-1);
    return begin(STUB_cuLibraryUnload);
}

static int stub_cuLibraryGetKernel(attn_cu_kernel *kernel, attn_cu_library library, const char *name) {
    BEGIN(cuLibraryGetKernel);
    if (!library || kernel_count == KERNELS || strlen(name) >= sizeof kernels[0].name) return INVALID_VALUE;
    pthread_mutex_lock(&mutex);
    int n = 0;
    while (n < kernel_count && strcmp(kernels[n].name, name) != 0) n++;
    if (n == kernel_count) strcpy(kernels[kernel_count++].name, name);
    *kernel = &kernels[n];
    pthread_mutex_unlock(&mutex);
    return 0;
}

static int stub_cuKernelSetAttribute(int attribute, int value, attn_cu_kernel kernel, int device) {
    BEGIN(cuKernelSetAttribute);
    return !kernel || attribute != ATTN_CU_FUNCTION_SHARED || value > stub.shared_bytes[device] ? INVALID_VALUE : 0;
}

static int stub_cuKernelGetAttribute(int *value, int attribute, attn_cu_kernel kernel, int device) {
    BEGIN(cuKernelGetAttribute);
    if (!kernel) return INVALID_VALUE;
    *value = attribute == ATTN_CU_FUNCTION_REGISTERS ? 168 : attribute == ATTN_CU_FUNCTION_PTX ? stub.arch[device] : 0;
    return 0;
}

static int stub_cuKernelGetFunction(attn_cu_function *function, attn_cu_kernel kernel) {
    BEGIN(cuKernelGetFunction);
    if (!depth) return INVALID_CONTEXT;
    *function = (attn_cu_function)(void *)kernel;
    return 0;
}

/* Refuses what the driver refuses. */
static int stub_cuTensorMapEncodeTiled(void *map, int type, unsigned rank, void *address, const uint64_t *dims,
                                       const uint64_t *strides, const unsigned *box, const unsigned *steps, int interleave,
                                       int swizzle, int l2_promotion, int fill) {
    BEGIN(cuTensorMapEncodeTiled);
    if ((uintptr_t)map % 64 || (uintptr_t)address % 16 || !address || address == stub.unmappable) return INVALID_VALUE;
    if (rank != 5 || (type != ATTN_CU_MAP_F16 && type != ATTN_CU_MAP_BF16) || box[0] * 2 > 128) return INVALID_VALUE;
    if (interleave || swizzle != ATTN_CU_MAP_SWIZZLE_128 || l2_promotion != ATTN_CU_MAP_L2_128 || fill)
        return INVALID_VALUE;
    stub_map made = {.address = address, .type = type};
    for (int n = 0; n < 5; n++) {
        if (!dims[n] || dims[n] > UINT64_C(1) << 32 || !box[n] || box[n] > 256 || steps[n] != 1) return INVALID_VALUE;
        if (n < 4 && (strides[n] % 16 || strides[n] >= UINT64_C(1) << 40)) return INVALID_VALUE;
        made.dims[n] = dims[n];
        made.box[n] = box[n];
        if (n < 4) made.strides[n] = strides[n];
    }
    _Static_assert(sizeof made <= sizeof(attn_tensor_map), "it has to have room");
    memcpy(map, &made, sizeof made);
    return 0;
}

/* The size of a kernel's one parameter, which a driver finds in its image. */
static size_t args_of(const char *kernel) {
    if (strcmp(kernel, "merge") == 0) return sizeof(attn_cuda_merge);
    if (strcmp(kernel, "rotary") == 0) return sizeof(attn_cuda_rotary);
    return strncmp(kernel + 1, "wd_sm90", 7) == 0 ? sizeof(attn_cuda_args90) : sizeof(attn_cuda_args);
}

static int stub_cuLaunchKernelEx(const attn_cu_launch *asked, attn_cu_function function, void **parameters, void **extra) {
    const unsigned *grid = asked->grid, *threads = asked->block;
    BEGIN(cuLaunchKernelEx);
    if (!function || !depth || !parameters || extra) return INVALID_VALUE;
    if (!grid[0] || grid[0] > INT32_MAX || !grid[1] || grid[1] > 65535 || grid[2] != 1 || !threads[0] || threads[0] > 1024)
        return INVALID_VALUE;
    if (asked->count > 1 || (asked->count && asked->attributes[0].id != ATTN_CU_LAUNCH_EARLY)) return INVALID_VALUE;
    size_t bytes = args_of(((attn_cu_kernel)(void *)function)->name);
    if (bytes > STUB_ARGS || asked->shared_bytes > (unsigned)stub.shared_bytes[stack[depth - 1]->device])
        return INVALID_VALUE;
    stub_launch launch = {.name = ((attn_cu_kernel)(void *)function)->name,
                          .grid = {grid[0], grid[1], grid[2]},
                          .block = {threads[0], threads[1], threads[2]},
                          .shared_bytes = asked->shared_bytes,
                          .is_early = asked->count && asked->attributes[0].value,
                          .stream = asked->stream,
                          .context = stack[depth - 1],
                          .args_bytes = bytes};
    memcpy(launch.args, parameters[0], bytes);
    double ms = stub.kernel ? stub.kernel(&launch) : 1;
    pthread_mutex_lock(&mutex);
    if (launch_count < STUB_LAUNCHES) launches[launch_count++] = launch;
    clock_ms += ms;
    pthread_mutex_unlock(&mutex);
    return 0;
}

/* ---- streams, events: as much as the command line needs ---- */

static int stub_cuCtxSynchronize(void) { return begin(STUB_cuCtxSynchronize); }

static int stub_cuStreamCreate(attn_cu_stream *stream, unsigned flags) {
    (void)flags;
    BEGIN(cuStreamCreate);
    if (!depth) return INVALID_CONTEXT;
    *stream = &streams[stack[depth - 1]->device];
    return 0;
}

static int stub_cuStreamDestroy(attn_cu_stream stream) {
    (void)stream;
    return begin(STUB_cuStreamDestroy);
}

static int stub_cuEventCreate(attn_cu_event *event, unsigned flags) {
    (void)flags;
    BEGIN(cuEventCreate);
    *event = calloc(1, sizeof **event);
    return 0;
}

static int stub_cuEventDestroy(attn_cu_event event) {
    free(event);
    return begin(STUB_cuEventDestroy);
}

static int stub_cuEventRecord(attn_cu_event event, attn_cu_stream stream) {
    (void)stream;
    event->ms = clock_ms;
    return begin(STUB_cuEventRecord);
}

static int stub_cuEventElapsedTime(float *milliseconds, attn_cu_event start, attn_cu_event end) {
    BEGIN(cuEventElapsedTime);
    *milliseconds = (float)(end->ms - start->ms);
    return 0;
}

/* ---- the stage ---- */

static const attn_driver stub_driver = {
#define ENTRY(name, symbol, arguments) .name = stub_##name,
#include "cuda/driver.def"
#undef ENTRY
};

static const void *stub_image(const char *file) { return stub.has_images ? (file ? file : "any") : NULL; }

void stub_start(void) {
    stub = (stub_settings){.version = 13000, .gpus = 1, .sms = 132, .has_images = true};
    for (int n = 0; n < STUB_GPUS; n++) {
        stub.arch[n] = 90;
        stub.shared_bytes[n] = 232448;
        primaries[n].device = own[n].device = streams[n].device = n;
    }
    stub_fail(-1, 0);
    stub_forget();
    live = kernel_count = depth = 0;
    attn__driver_replace(&stub_driver);
    attn__cuda_image_replace(stub_image);
}

void stub_stop(void) {
    while (blocks) remove_block(blocks->start);
    depth = 0;
    attn__driver_replace(NULL);
    attn__cuda_image_replace(NULL);
}

attn_cu_context stub_context(int device) { return &own[device]; }
attn_cu_stream stub_stream(int device) { return &streams[device]; }

void stub_set_current(attn_cu_context context) {
    depth = context ? 1 : 0;
    stack[0] = context;
}
