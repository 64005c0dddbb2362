/*
 * What the parts of the library know of each other: context, plan, backend, kernel row, errors, allocation.
 *
 *   attn_run (api.c) -> attn__buffers_check (buffers.c) -> plan->backend->run -> kernel
 */
#ifndef ATTN_INTERNAL_H
#define ATTN_INTERNAL_H

#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>

#include "attn.h"
#include "fault.h"

/* ---- errors (status.c) ---- */

/* Sets the thread's detail text and returns status. */
attn_status attn__fail(attn_status status, const char *format, ...) __attribute__((format(printf, 2, 3)));

#define RETURN_IF(condition, status, ...)                                                                                  \
    do {                                                                                                                   \
        if (condition) return attn__fail((status), __VA_ARGS__);                                                           \
    } while (0)
#define INVALID_IF(condition, ...) RETURN_IF(condition, ATTN_INVALID, __VA_ARGS__)
#define RETURN_IF_ERROR(expression)                                                                                        \
    do {                                                                                                                   \
        attn_status status_ = (expression);                                                                                \
        if (status_ != ATTN_OK) return status_;                                                                            \
    } while (0)

static inline int64_t attn__ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

/* ---- kernel rows ---- */

/* One row of the table of kernels. A backend's rows are sorted worst first: the last available one that fits is chosen. */
typedef struct attn_kernel {
    const char *name;  /* op_arch_dtype */
    const char *needs; /* for people: "AVX2, FMA" */
    attn_op op;
    attn_dtype dtype;   /* cpu: for q, k, v and o of this alone; default: of any */
    bool wide;          /* computes in double: for F64 problems; ref computes everything so */
    uint32_t cpu;       /* CPU feature bits that it needs (cpu/features.h) */
    const void *impl;   /* the backend's own; cpu: the ISA's table of micro-kernels */
    const void *wider;  /* cpu: the ISA's table in double, for sequences that are worked so (attn__in_double) */
    int32_t rows, cols; /* tile of the score matrix */
} attn_kernel;

/* ---- backends ---- */

typedef struct attn_backend {
    const char *name;
    attn_backend_id id;
    bool host;                                  /* buffers are host memory, so their values can be checked before the run */
    attn_status (*open)(attn_context *context); /* what a context of this backend needs besides; or NULL */
    void (*close)(attn_context *context);       /* undoes it; or NULL */
    const attn_kernel *(*kernel)(int32_t index, bool *available); /* NULL past the end; available may be NULL */
    attn_status (*plan)(attn_plan *plan); /* problem is resolved; sets kernel, workspace and splits, appends to the text */
    attn_status (*run)(const attn_plan *plan, const attn_buffers *buffers, void *stream);
    /* Workspace of a one-shot call, where the host's memory will not do; both, or neither. */
    attn_status (*take)(const attn_plan *plan, const attn_buffers *buffers, void *stream, void **workspace);
    attn_status (*put)(const attn_plan *plan, const attn_buffers *buffers, void *stream, void *workspace);
    attn_status (*tiles)(const attn_plan *plan, const attn_buffers *buffers, int32_t batch, int32_t head,
                         int (*visit)(void *user, const attn_tile *tile), void *user); /* or NULL */
    attn_status (*merge)(attn_context *context, const attn_merge_args *args, void *stream);
    attn_status (*rotary)(attn_context *context, const attn_rotary_args *args, void *stream);
} attn_backend;

extern const attn_backend attn__backend_ref;
extern const attn_backend attn__backend_cpu;
extern const attn_backend attn__backend_cuda;

/* ---- plan (plan.c) ---- */

enum {
    ATTN_PLAN_TEXT = 1024,
    ATTN_MOST_GPUS = 32 /* that one process can use: a bit of 32 each; later ones are not looked at */
};

struct attn_plan {
    attn_context *context;
    attn_problem problem; /* resolved: every default filled in */
    const attn_backend *backend;
    const attn_kernel *kernel;
    size_t workspace;                /* bytes */
    int32_t slots;                   /* how many threads work at once at the most */
    size_t part[8];                  /* offsets into the workspace; the backend says what is where */
    int64_t scratch;                 /* cpu: bytes of one slot's */
    int32_t strip;                   /* cpu: query tiles, of neighbouring rows or heads, that share each load of keys */
    int32_t strip_heads, strip_rows; /* cpu: of a long sequence: so many heads of a group, and so many rows of each */
    int32_t strip_keys;              /* cpu, backward: of a unit */
    int64_t partials;                /* cpu: partial results of a run that splits keys over threads; 0: it does not */
    int32_t chunks;                  /* cuda: chunks of keys of a sequence that is split; 0: none is */
    int16_t gpu_kernel[ATTN_MOST_GPUS]
                      [2]; /* cuda: forward kernel on each device, and for rows that are not aligned; -1: none */
    int16_t gpu_decode[ATTN_MOST_GPUS]; /* cuda: kernel for sequences of few rows; -1: the forward kernel's are they too */
    _Atomic int32_t references;         /* the cache's and its users' */
    char text[ATTN_PLAN_TEXT];
};

void attn__plan_say(attn_plan *plan, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Reserves bytes in the workspace, 64-byte aligned; part `index` is its offset. False when the sum overflows. */
bool attn__plan_reserve(attn_plan *plan, int index, int64_t count, int64_t bytes_each);

/* Where part `index` begins in the workspace of a run. */
static inline void *attn__part(const attn_plan *plan, const attn_buffers *f, int index) {
    return (char *)f->workspace + plan->part[index];
}

/* ---- context (context.c) ---- */

typedef struct attn_pool attn_pool;
typedef struct attn_cache attn_cache;
typedef struct attn_cuda attn_cuda;

struct attn_context {
    attn_config config; /* resolved: allocator, threads, parallel_for */
    const attn_backend *backend;
    attn_pool *pool;    /* NULL with one thread or the caller's own parallel_for */
    uint32_t cpu;       /* cpu backend: CPU features that kernels may use */
    attn_cuda *cuda;    /* cuda backend: driver, loaded kernels */
    attn_cache *cache;  /* plans and workspaces of the one-shot calls */
    attn_context *next; /* list of all contexts, for fork */
};

void *attn__alloc(const attn_context *context, size_t bytes); /* sets the detail text on failure */
void attn__free(const attn_context *context, void *memory);   /* NULL is ignored */

/*
 * Calls task(arg, index, slot) for each index in [0, count), claimed in ascending order by up to `slots` threads. slot < slots
 * names the thread: no two running calls share one.
 */
attn_status attn__parallel(const attn_context *context, int32_t slots, int64_t count,
                           void (*task)(void *arg, int64_t index, int32_t slot), void *arg);

/* ---- thread pool (pool.c) ---- */

attn_status attn__pool_create(attn_pool **pool, attn_context *context, int32_t threads);
void attn__pool_destroy(attn_pool *pool);
/* Around fork: nobody falls asleep or is woken from `before` to `after`. */
void attn__pool_before_fork(attn_pool *pool);
void attn__pool_after_fork(attn_pool *pool, bool in_child);

/* A parallel_for, as attn_config's; sets the detail text when it fails. */
int attn__pool_for(void *pool, void (*body)(void *body_arg, int32_t index), void *body_arg, int32_t count);
int32_t attn__cpu_count(void);

/* ---- validation (problem.c, buffers.c) ---- */

/*
 * Sizes of the structs in their first version: what a caller built against the oldest header passes. When a struct grows,
 * its line here becomes the offset of the first new field.
 */
enum {
    ATTN_CONFIG_FIRST_SIZE = sizeof(attn_config),
    ATTN_PROBLEM_FIRST_SIZE = sizeof(attn_problem),
    ATTN_BUFFERS_FIRST_SIZE = sizeof(attn_buffers),
    ATTN_MERGE_FIRST_SIZE = sizeof(attn_merge_args),
    ATTN_ROTARY_FIRST_SIZE = sizeof(attn_rotary_args)
};

/* Copies a struct that begins with its size into one of `known` bytes: a shorter one is completed with zeros, a longer one
   (from a newer header) is taken if what we do not know of is zero. */
attn_status attn__struct_load(void *to, const void *from, size_t known, size_t first, const char *name);

/* f32, f16, bf16, f64: the dtypes that outputs and tables may have. */
static inline bool attn__is_float(attn_dtype d) {
    return d == ATTN_F32 || d == ATTN_F16 || d == ATTN_BF16 || d == ATTN_F64;
}

/* Copies *problem into *resolved with every default filled in, or says what is wrong with it. */
attn_status attn__problem_resolve(attn_problem *resolved, const attn_problem *problem);

/* Copies *buffers into *loaded, no more. */
attn_status attn__buffers_load(attn_buffers *loaded, const attn_buffers *buffers);

/* Copies *buffers into *loaded and checks everything that can be checked; the second checks lengths and FlashMask only. */
attn_status attn__buffers_check(attn_buffers *loaded, const attn_plan *plan, const attn_buffers *buffers);
attn_status attn__lengths_check(attn_buffers *loaded, const attn_plan *plan, const attn_buffers *buffers);

/* One tensor: there, aligned, within the address space, and, if it is written, not overlapping itself. */
attn_status attn__tensor_check(const char *name, const attn_tensor *t, int64_t batch, int64_t rows, int64_t heads,
                               int64_t dim, attn_dtype dtype, bool is_output);

/* Arguments of the pieces (pieces.c): copy and check. */
attn_status attn__merge_check(attn_merge_args *loaded, const attn_merge_args *args);
attn_status attn__rotary_check(attn_rotary_args *loaded, const attn_rotary_args *args, bool host);

#endif
