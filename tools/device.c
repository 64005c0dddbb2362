/*
 * Memory, streams and time of the host and of the first GPU; see device.h. The GPU is reached through the library's own table of
 * driver functions, so that the command line too needs no CUDA to be built, and none to run.
 *
 * Streams are made so that they wait for the null stream and it for them: copies and fills, which go there, are in order with
 * the runs before and after them, and two runs on two streams are not in order with each other.
 */
#define _POSIX_C_SOURCE 200809L
#include "device.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "cuda/driver.h"
#include "tool.h"

enum { CACHE_SIZE = 38 /* CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE */ };

struct device {
    bool direct;               /* host memory as it is */
    const attn_driver *driver; /* NULL: the host */
    const attn_gpu *gpu;
    attn_cu_context context;
    attn_cu_stream stream[DEVICE_STREAMS];
    attn_cu_event event[DEVICE_MARKS];
    double time[DEVICE_MARKS]; /* the host's marks, in seconds */
};

/* A call of the driver: did it succeed? */
static bool done(const device *d, int error, const char *call) {
    if (!error) return true;
    tool_status("device", attn__driver_fail(d->driver, error, call));
    return false;
}
#define DONE(d, call, arguments) done((d), (d)->driver->call arguments, #call)

/* ---- opening ---- */

static bool open_gpu(device *d) {
    const attn_driver_state *state;
    attn_status status = attn__driver_open(&state);
    if (status != ATTN_OK) {
        tool_status("device", status);
        return false;
    }
    d->driver = state->driver;
    d->gpu = &state->gpu[0];
    attn_cu_context context;
    if (!DONE(d, cuDevicePrimaryCtxRetain, (&context, d->gpu->device))) return false;
    bool opened = DONE(d, cuCtxPushCurrent, (context));
    if (opened)
        d->context = context;
    else
        d->driver->cuDevicePrimaryCtxRelease(d->gpu->device);
    for (int n = 0; n < DEVICE_STREAMS && opened; n++) opened = DONE(d, cuStreamCreate, (&d->stream[n], 0));
    for (int n = 0; n < DEVICE_MARKS && opened; n++) opened = DONE(d, cuEventCreate, (&d->event[n], 0));
    return opened;
}

device *device_open(const attn_context *context, bool copies) {
    bool gpu = strcmp(attn_context_backend(context), "cuda") == 0;
    device *d = tool_alloc(1, sizeof *d);
    if (!d) return NULL;
    memset(d, 0, sizeof *d);
    d->direct = !gpu && !copies;
    if (!gpu || open_gpu(d)) return d;
    device_close(d);
    return NULL;
}

void device_close(device *d) {
    if (d && d->context) {
        attn_cu_context popped;
        for (int n = 0; n < DEVICE_MARKS; n++)
            if (d->event[n]) d->driver->cuEventDestroy(d->event[n]);
        for (int n = 0; n < DEVICE_STREAMS; n++)
            if (d->stream[n]) d->driver->cuStreamDestroy(d->stream[n]);
        d->driver->cuCtxPopCurrent(&popped);
        d->driver->cuDevicePrimaryCtxRelease(d->gpu->device);
    }
    free(d);
}

/* ---- what it is ---- */

bool device_is_direct(const device *d) { return d->direct; }
bool device_is_gpu(const device *d) { return d->driver != NULL; }
const char *device_name(const device *d) { return d->driver ? d->gpu->name : ""; }

size_t device_cache_bytes(const device *d) {
    int bytes = 0;
    if (d->driver && d->driver->cuDeviceGetAttribute(&bytes, CACHE_SIZE, d->gpu->device)) bytes = 0;
    return bytes > 0 ? (size_t)bytes : 0;
}

double device_peak_tflops(const device *d, attn_dtype tile) {
    /* One card of each architecture as its data sheet has it, dense, f16 or bf16 with sums in float. */
    static const struct {
        int32_t arch, sms;
        double tflops;
    } cards[] = {
        {80, 108, 312},   /* A100 */
        {86, 72, 125},    /* A10 */
        {89, 142, 362},   /* L40S */
        {90, 132, 989},   /* H100, H200 */
        {100, 148, 2250}, /* B200 */
    };
    if (!d->driver || tile == ATTN_F64) return 0;
    for (size_t n = 0; n < sizeof cards / sizeof *cards; n++) {
        if (cards[n].arch != d->gpu->arch) continue;
        double tflops = cards[n].tflops * d->gpu->sms / cards[n].sms;
        return tile == ATTN_F32 ? tflops / 6 : tflops; /* TF32 has half of the rate, and three products make one */
    }
    return 0;
}

/* ---- memory ---- */

static attn_cu_pointer address(const void *memory) { return (attn_cu_pointer)(uintptr_t)memory; }

void *device_alloc(device *d, size_t bytes) {
    attn_cu_pointer memory;
    if (!d->driver) { /* aligned like a GPU's, and no byte larger than asked for */
        void *copy = NULL;
        if (posix_memalign(&copy, 256, bytes ? bytes : 1) == 0) return copy;
        tool_error(TOOL_RUNTIME, "not enough memory for %zu bytes", bytes);
        return NULL;
    }
    return DONE(d, cuMemAlloc, (&memory, bytes ? bytes : 1)) ? (void *)(uintptr_t)memory : NULL;
}

void device_free(device *d, void *memory) {
    if (!d->driver)
        free(memory);
    else if (memory)
        d->driver->cuMemFree(address(memory));
}

bool device_fill(device *d, void *to, unsigned char byte, size_t bytes) {
    if (d->driver && bytes) return DONE(d, cuMemsetD8, (address(to), byte, bytes));
    if (bytes) memset(to, byte, bytes);
    return true;
}

bool device_upload(device *d, void *to, const void *from, size_t bytes) {
    if (d->driver && bytes) return DONE(d, cuMemcpyHtoD, (address(to), from, bytes));
    if (bytes) memcpy(to, from, bytes);
    return true;
}

bool device_download(device *d, void *to, const void *from, size_t bytes) {
    if (d->driver && bytes) return DONE(d, cuMemcpyDtoH, (to, address(from), bytes));
    if (bytes) memcpy(to, from, bytes);
    return true;
}

/* ---- order and time ---- */

void *device_stream(const device *d, int which) { return d->stream[which]; }

bool device_wait(device *d) { return !d->driver || DONE(d, cuCtxSynchronize, ()); }

bool device_mark(device *d, int index) {
    if (d->driver) return DONE(d, cuEventRecord, (d->event[index], d->stream[0]));
    d->time[index] = tool_seconds();
    return true;
}

bool device_between(device *d, int from, int to, double *ms) {
    float elapsed = 0;
    bool known = !d->driver || DONE(d, cuEventElapsedTime, (&elapsed, d->event[from], d->event[to]));
    *ms = d->driver ? elapsed : 1e3 * (d->time[to] - d->time[from]);
    return known;
}
