/*
 * Memory and time of a backend, so that the commands need not know whose memory they hand to the library.
 *
 * On a host backend memory is memory: nothing is copied, a stream is NULL, time is the clock's. On cuda a device has
 * allocations of its own, two streams, and events. In between stands the mirror: a list of host arrays, for each of which it
 * holds a copy where the backend can read it, and the buffers with every pointer replaced.
 *
 * Failures print a message; what has failed once is of no use any more, so that callers only pass the failure on.
 */
#ifndef ATTN_DEVICE_H
#define ATTN_DEVICE_H

#include <stdbool.h>
#include <stddef.h>

#include "attn.h"

typedef struct device device;

/*
 * The memory that this context's backend works on. `copies`: a host backend too gets copies, in allocations of exactly the
 * size asked for, which is what AddressSanitizer and its like want to see. NULL: it cannot be had.
 */
device *device_open(const attn_context *context, bool copies);
void device_close(device *d); /* NULL is ignored */

bool device_is_direct(const device *d); /* host memory goes to the library as it is: nothing is copied */
bool device_is_gpu(const device *d);
const char *device_name(const device *d);   /* "NVIDIA H200"; "" on the host */
size_t device_cache_bytes(const device *d); /* of the last cache that all of it shares; 0: not known */

/* Dense TFLOP/s of its tensor cores for tiles of this dtype (f32: three TF32 products for one); 0: not known. */
double device_peak_tflops(const device *d, attn_dtype tile);

void *device_alloc(device *d, size_t bytes); /* not initialised */
void device_free(device *d, void *memory);   /* NULL is ignored */
bool device_fill(device *d, void *to, unsigned char byte, size_t bytes);
bool device_upload(device *d, void *to, const void *from, size_t bytes);
bool device_download(device *d, void *to, const void *from, size_t bytes);

enum { DEVICE_STREAMS = 2, DEVICE_MARKS = 64 };

void *device_stream(const device *d, int which); /* for attn_run */
bool device_wait(device *d);                     /* until both streams have come to rest */

/* Notes the time at which stream 0 gets here; after device_wait the milliseconds between two marks are known. */
bool device_mark(device *d, int index);
bool device_between(device *d, int from, int to, double *ms);

/* ---- mirrors ---- */

enum { MIRROR_BLOCKS = 64 };

typedef struct mirror_block {
    const char *name;
    unsigned char *host;
    size_t bytes, before, after; /* before and after it: bytes of 0xff that must stay so */
    bool input;                  /* is not copied back: the host's array may be constant */
    unsigned char *memory;       /* the copy with what is around it; NULL: the host memory itself */
} mirror_block;

typedef struct mirror {
    device *d;
    int count;
    mirror_block block[MIRROR_BLOCKS];
} mirror;

/* Adds `bytes` bytes at host, which may be none, to a mirror that begins as {.d = device}. False: no memory. */
bool mirror_add(mirror *m, const char *name, const void *host, size_t bytes, size_t before, size_t after);
void mirror_free(mirror *m);

/* Copies everything there; everything back. */
bool mirror_upload(mirror *m);
bool mirror_download(mirror *m);

/* NULL, or the name of a block around which memory has changed; after mirror_download. */
const char *mirror_damage(const mirror *m);

/* Where the library finds what is at this host address, which is in a block; NULL stays NULL. */
void *mirror_at(const mirror *m, const void *host);

/* The buffers as the library gets them: every pointer replaced. */
attn_buffers mirror_buffers(const mirror *m, const attn_buffers *buffers);

#endif
