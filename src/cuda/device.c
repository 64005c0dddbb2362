/*
 * CUDA contexts, kernels and the status word: what a context of the library holds on the devices.
 *
 * Libraries and kernels belong to no CUDA context (cuLibraryLoadData), so one handle serves every device; the driver brings the
 * code into a CUDA context when it is first wanted there. That must not happen while a stream is being captured, so a plan asks
 * for it in the context that is current when the plan is made.
 */
#include "cuda.h"
#include "flaw.h"

#include <string.h>

/* ---- CUDA contexts ---- */

static int32_t gpu_of(const attn_cuda *cuda, int device) {
    for (int32_t n = 0; n < cuda->state->gpus; n++) {
        if (cuda->state->gpu[n].device == device) return n;
    }
    return -1;
}

/* The primary context of a GPU, retained until the library's context is destroyed. The mutex is held. */
static attn_status primary(attn_cuda *cuda, int32_t gpu, attn_cu_context *context) {
    if (!cuda->primary[gpu])
        RETURN_IF_DRIVER(cuda->state->driver, cuDevicePrimaryCtxRetain,
                         (&cuda->primary[gpu], cuda->state->gpu[gpu].device));
    *context = cuda->primary[gpu];
    return ATTN_OK;
}

static attn_status push_primary(attn_cuda *cuda, int device, attn_cuda_place *place) {
    const attn_driver *d = cuda->state->driver;
    attn_cu_context context = NULL;
    place->gpu = gpu_of(cuda, device);
    RETURN_IF(place->gpu < 0, ATTN_UNSUPPORTED, "device=%d: this library serves the first %d devices only", device,
              ATTN_MOST_GPUS);
    pthread_mutex_lock(&cuda->mutex);
    attn_status status = primary(cuda, place->gpu, &context);
    pthread_mutex_unlock(&cuda->mutex);
    if (status != ATTN_OK) return status;
    RETURN_IF_DRIVER(d, cuCtxPushCurrent, (context));
    place->pushed = true;
    return ATTN_OK;
}

/* A stream that is a handle knows its context. */
static attn_status enter_stream(attn_cuda *cuda, const attn_cuda_home *home, attn_cu_stream stream,
                                attn_cuda_place *place) {
    const attn_driver *d = cuda->state->driver;
    attn_cu_context context = NULL;
    int device = -1;
    RETURN_IF_DRIVER(d, cuStreamGetCtx, (stream, &context));
    RETURN_IF_DRIVER(d, cuCtxPushCurrent, (context));
    place->pushed = true;
    int error = d->cuCtxGetDevice(&device);
    if (!error && (home->device < 0 || home->device == device) && gpu_of(cuda, device) >= 0) {
        place->gpu = gpu_of(cuda, device);
        return ATTN_OK;
    }
    attn__cuda_leave(place);
    if (error) return attn__driver_fail(d, error, "cuCtxGetDevice");
    RETURN_IF(home->device >= 0 && home->device != device, ATTN_INVALID,
              "stream=%p: is of device %d, and %s is on device %d", (void *)stream, device, home->name, home->device);
    return attn__fail(ATTN_UNSUPPORTED, "stream=%p: is of device %d, and this library serves the first %d only",
                      (void *)stream, device, ATTN_MOST_GPUS);
}

attn_status attn__cuda_enter(attn_cuda *cuda, const attn_cuda_home *home, void *stream, attn_cuda_place *place) {
    const attn_driver *d = cuda->state->driver;
    *place = (attn_cuda_place){.driver = d};
    if ((uintptr_t)stream > ATTN_CU_STREAM_PER_THREAD) return enter_stream(cuda, home, stream, place);
    attn_cu_context current = NULL;
    int device = home->device;
    RETURN_IF_DRIVER(d, cuCtxGetCurrent, (&current));
    if (current) {
        RETURN_IF_DRIVER(d, cuCtxGetDevice, (&device));
        place->gpu = gpu_of(cuda, device);
        if (place->gpu >= 0 && (home->device < 0 || home->device == device)) return ATTN_OK;
        device = home->device;
    }
    if (device < 0) device = home->hint >= 0 ? home->hint : cuda->state->gpu[0].device;
    return push_primary(cuda, device, place);
}

void attn__cuda_leave(const attn_cuda_place *place) {
    attn_cu_context popped;
    if (place->pushed) place->driver->cuCtxPopCurrent(&popped); /* can only fail when there is nothing to pop */
}

/* ---- kernels ---- */

static attn_status library_of(attn_cuda *cuda, const char *file, attn_cu_library *library) {
    for (int32_t n = 0; n < cuda->libraries; n++) {
        *library = cuda->loaded[n].library;
        if (strcmp(cuda->loaded[n].file, file) == 0) return ATTN_OK;
    }
    const void *image = attn__cuda_image(file);
    RETURN_IF(!image, ATTN_UNSUPPORTED, "backend=cuda: this library was built without %s; use cpu", file);
    RETURN_IF_DRIVER(cuda->state->driver, cuLibraryLoadData, (library, image, NULL, NULL, 0, NULL, NULL, 0));
    cuda->loaded[cuda->libraries].file = file;
    cuda->loaded[cuda->libraries++].library = *library;
    return ATTN_OK;
}

/* One entry, on the GPUs whose bit is set. The mutex is held. */
static attn_status load_entry(attn_cuda *cuda, int entry, uint32_t gpus) {
    const attn_driver *d = cuda->state->driver;
    const attn_cuda_entry *e = &attn__cuda_entries[entry];
    if (!cuda->kernel[entry]) {
        attn_cu_library library;
        RETURN_IF_ERROR(library_of(cuda, e->file, &library));
        RETURN_IF_DRIVER(d, cuLibraryGetKernel, (&cuda->kernel[entry], library, e->name));
    }
    for (int32_t n = 0; n < cuda->state->gpus; n++) {
        uint32_t bit = UINT32_C(1) << n;
        if (!(gpus & bit) || (cuda->ready[entry] & bit)) continue;
        if (e->shared_bytes)
            RETURN_IF_DRIVER(
                d, cuKernelSetAttribute,
                (ATTN_CU_FUNCTION_SHARED, (int)e->shared_bytes, cuda->kernel[entry], cuda->state->gpu[n].device));
        int arch = 0; /* of the code; where the driver does not say it, the kernel is launched like any other */
        if (e->waits && cuda->early &&
            d->cuKernelGetAttribute(&arch, ATTN_CU_FUNCTION_PTX, cuda->kernel[entry], cuda->state->gpu[n].device))
            arch = 0;
        cuda->waits[entry][n] = arch >= 90;
        cuda->ready[entry] |= bit;
    }
    return ATTN_OK;
}

/* The status word lies in memory of a primary context that we hold, so that it lives as long as it is asked for. */
static attn_status make_status(attn_cuda *cuda, int32_t gpu) {
    const attn_driver *d = cuda->state->driver;
    attn_cu_context context = NULL, popped;
    void *memory = NULL;
    RETURN_IF_ERROR(primary(cuda, gpu, &context));
    RETURN_IF_DRIVER(d, cuCtxPushCurrent, (context));
    int error = d->cuMemHostAlloc(&memory, sizeof *cuda->status, ATTN_CU_HOST_PORTABLE | ATTN_CU_HOST_MAPPED);
    d->cuCtxPopCurrent(&popped);
    if (error) return attn__driver_fail(d, error, "cuMemHostAlloc");
    cuda->status = memory;
    *cuda->status = 0;
    return ATTN_OK;
}

/* Brings the kernels into the current context of a GPU, those that run there. */
static attn_status preload(attn_cuda *cuda, const int *entries, int count, int32_t gpu) {
    for (int n = 0; n < count; n++) {
        attn_cu_function function;
        if (cuda->ready[entries[n]] & UINT32_C(1) << gpu)
            RETURN_IF_DRIVER(cuda->state->driver, cuKernelGetFunction, (&function, cuda->kernel[entries[n]]));
    }
    return ATTN_OK;
}

/* The same where no context is current: into the primary one, if we hold it. */
static attn_status preload_primary(attn_cuda *cuda, const int *entries, int count, int32_t gpu) {
    const attn_driver *d = cuda->state->driver;
    attn_cu_context popped;
    if (!cuda->primary[gpu]) return ATTN_OK;
    RETURN_IF_DRIVER(d, cuCtxPushCurrent, (cuda->primary[gpu]));
    attn_status status = preload(cuda, entries, count, gpu);
    d->cuCtxPopCurrent(&popped);
    return status;
}

attn_status attn__cuda_load(attn_cuda *cuda, const int *entries, int count, uint32_t gpus) {
    const attn_driver *d = cuda->state->driver;
    attn_cu_context current = NULL;
    int device = cuda->state->gpu[0].device;
    RETURN_IF_DRIVER(d, cuCtxGetCurrent, (&current));
    if (current) RETURN_IF_DRIVER(d, cuCtxGetDevice, (&device));
    int32_t gpu = gpu_of(cuda, device) < 0 ? 0 : gpu_of(cuda, device);
    pthread_mutex_lock(&cuda->mutex);
    attn_status status = ATTN_OK;
    for (int n = 0; n < count && status == ATTN_OK; n++) status = load_entry(cuda, entries[n], gpus);
    if (status == ATTN_OK && !cuda->status) status = make_status(cuda, gpu);
    if (status == ATTN_OK)
        status = current ? preload(cuda, entries, count, gpu) : preload_primary(cuda, entries, count, gpu);
    pthread_mutex_unlock(&cuda->mutex);
    return status;
}

/* What fails here has nobody to tell; at the end of a process the driver may be gone already. */
void attn__cuda_unload(attn_cuda *cuda) {
    const attn_driver *d = cuda->state->driver;
    for (int32_t n = 0; n < cuda->libraries; n++) d->cuLibraryUnload(cuda->loaded[n].library);
    for (int32_t n = 0; n < cuda->state->gpus; n++) {
        attn_cu_context popped;
        if (!cuda->primary[n]) continue;
        if (cuda->status) {
            bool pushed = d->cuCtxPushCurrent(cuda->primary[n]) == ATTN_CU_SUCCESS;
            d->cuMemFreeHost(cuda->status); /* tried in any case */
            if (pushed) d->cuCtxPopCurrent(&popped);
            cuda->status = NULL;
        }
        d->cuDevicePrimaryCtxRelease(cuda->state->gpu[n].device);
    }
}

/* ---- the status word ---- */

attn_status attn_device_status(attn_context *context) {
    static const char *const names[] = {"nothing",
#define NAME(flaw, text) text,
                                        ATTN_FLAWS(NAME)
#undef NAME
    };
    RETURN_IF(!context, ATTN_INVALID, "context=NULL: make one with attn_context_create");
    attn_cuda *cuda = context->cuda;
    if (!cuda) return ATTN_OK;
    pthread_mutex_lock(&cuda->mutex);
    uint64_t word = cuda->status ? __atomic_exchange_n(cuda->status, 0, __ATOMIC_SEQ_CST) : 0;
    pthread_mutex_unlock(&cuda->mutex);
    if (!word) return ATTN_OK;
    uint64_t flaw = word >> 32;
    return attn__fail(ATTN_INVALID, "%s[%d]: out of range on the device; it was brought into range",
                      flaw < sizeof names / sizeof names[0] ? names[flaw] : "an array", (int)(uint32_t)word);
}
