/*
 * A CUDA driver without a GPU, for the tests: every entry of src/cuda/driver.def, on host memory. Nothing is computed; a launch
 * is written down. Any call can be made to fail, everything that is taken must be given back, and calls are counted by name.
 *
 *     stub_start();                      the library uses the stub from here on: one GPU, sm_90
 *     void *q = stub_memory(STUB_DEVICE, 0, bytes);
 *     stub_fail(5, 719);                 the sixth call from now on returns 719
 *     ...
 *     CHECK(stub_failed() == NULL);      or the name of the call that was made to fail
 *     CHECK(stub_live() == 0);           libraries, memory, primary contexts that are still held; memory of stub_memory aside
 *     stub_stop();
 */
#ifndef STUB_DRIVER_H
#define STUB_DRIVER_H

#include <stdbool.h>
#include <stddef.h>

#include "cuda/driver.h"

enum { STUB_GPUS = 4, STUB_LAUNCHES = 64, STUB_ARGS = 4096 };

typedef struct stub_launch stub_launch;

typedef struct stub_settings {
    int version;    /* 13000 */
    int init_error; /* what cuInit returns */
    int gpus;
    int sms; /* multiprocessors of each: 132 */
    int arch[STUB_GPUS], shared_bytes[STUB_GPUS];
    bool has_images;        /* kernels in the library: one that names every file */
    const void *unmappable; /* a tensor that begins here gets no map */
    double (*kernel)(
        const stub_launch *launch); /* what a launch does, and the milliseconds that it takes; NULL: nothing, 1 */
} stub_settings;

/* What one launch asked for. */
struct stub_launch {
    const char *name; /* of the kernel */
    unsigned grid[3], block[3], shared_bytes;
    bool is_early; /* before the one before it has ended */
    attn_cu_stream stream;
    attn_cu_context context; /* that was current */
    size_t args_bytes;
    _Alignas(64) unsigned char args[STUB_ARGS];
};

/* What a tensor map is here: what it was asked for. */
typedef struct stub_map {
    const void *address;
    uint64_t dims[5], strides[4]; /* strides in bytes */
    unsigned box[5];
    int type;
} stub_map;

extern stub_settings stub; /* may be changed between stub_start and the first use */

void stub_start(void);
void stub_stop(void);

/* Lets `after` calls pass and fails the next one; negative: none. */
void stub_fail(long after, int error);
const char *stub_failed(void);

/* Calls of an entry, by name, since stub_start or stub_forget; all calls when the name is NULL. */
long stub_calls(const char *name);
void stub_forget(void); /* calls and launches */

int stub_live(void);
int stub_depth(void); /* contexts on this thread's stack */

/* Launches since stub_forget, at most STUB_LAUNCHES of them. */
int stub_launches(void);
const stub_launch *stub_launch_at(int index);

/* The attn_cuda_args of a launch that has any: those of Hopper's kernels have maps before them. */
const struct attn_cuda_args *stub_args(const stub_launch *launch);

/* Memory as the driver would have made it; freed by stub_stop. Pageable memory is any other. */
typedef enum stub_kind { STUB_DEVICE, STUB_PINNED, STUB_MANAGED } stub_kind;
void *stub_memory(stub_kind kind, int device, size_t bytes);
/* Tells the driver of memory that somebody else owns. */
void stub_adopt(stub_kind kind, int device, void *memory, size_t bytes);

/* A context of the caller's own on a device, made current on this thread (NULL: none is); and a stream in it. */
attn_cu_context stub_context(int device);
void stub_set_current(attn_cu_context context);
attn_cu_stream stub_stream(int device);

#endif
