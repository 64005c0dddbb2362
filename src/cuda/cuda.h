/*
 * The cuda backend: what its host files know of each other.
 *
 *   cuda.c     the backend: open, plan, run; which kernel is taken, what the workspace holds
 *   device.c   CUDA contexts, loading of kernels, the status word
 *   pointers.c of which device the memory of a call is
 *   images.c   the kernels' code, embedded in the library
 *   driver.c   the driver as a table of functions
 *   launch.c   a run as a row of launches (args.h has the list)
 *   maps.c     how the tensors of a run lie: alignment, tensor maps
 *   tuning.c   the file of ATTN_TUNING: kernels that were measured to be the fastest
 *
 * A run is attn_run -> run_cuda (cuda.c) -> attn__cuda_forward or _backward (launch.c) -> attn__cuda_launch -> kernel.
 */
#ifndef ATTN_CUDA_H
#define ATTN_CUDA_H

#include <pthread.h>

#include "args.h"
#include "driver.h"
#include "numeric.h"
#include "schedule.h"

/* ---- kernels ---- */

enum { ATTN_LEAST_ARCH = 80 }; /* compute capability, times ten, that is served: all images but Hopper's have code for it */

/* Entry points, by number: the pieces in the order of variants.def, then its other lines. ATTN_ENTRY_append, ... */
enum {
#define FWD(...)
#define FWD90(...)
#define BWD(...)
#define BWD90(...)
#define PIECE(name, file) ATTN_ENTRY_##name,
#include "variants.def"
#undef FWD
#undef FWD90
#undef BWD
#undef BWD90
#undef PIECE
#define FWD(name, ...) ATTN_ENTRY_##name,
#define FWD90(name, ...) ATTN_ENTRY_##name,
#define BWD(name, ...) ATTN_ENTRY_##name,
#define BWD90(name, ...) ATTN_ENTRY_##name,
#define DECODE(name, ...) ATTN_ENTRY_##name,
#define DECODE90(name, ...) ATTN_ENTRY_##name,
#define PIECE(...)
#include "variants.def"
#undef FWD
#undef FWD90
#undef BWD
#undef BWD90
#undef PIECE
    ATTN_ENTRIES
};

/* The kernel for d_k and d_v is followed by that for d_q. */
_Static_assert(ATTN_ENTRY_bwd_any_q == ATTN_ENTRY_bwd_any + 1, "see variants.def");

/* What the table says of an entry point. */
typedef struct attn_cuda_entry {
    const char *name; /* its symbol */
    const char *file; /* the image is named like it, without ".cu" */
    attn_op op;       /* forward, of pieces too; or backward: then dims as below, and it takes everything */
    bool one;         /* backward: d_q, d_k and d_v in one kernel, with turns; otherwise the next entry makes d_q */
    bool by_keys;     /* backward: keeps keys and makes d_k and d_v; otherwise d_q, and bm is of the rows that it keeps */
    bool split;       /* backward: blocks make either d_k or d_v */
    bool decode;      /* of decode.cu: given attn_cuda_decode; or of decode_sm90.cu */
    bool pages;       /* decode: for factors of pages, and for nothing else */
    bool latent;      /* of decode_sm90.cu: V is the first columns of K; given attn_cuda_args */
    bool
        waits; /* may begin before the kernel before it has ended, and waits for that itself, if its code is for sm_90 or newer */
    bool hopper;    /* for its arch alone; of fwd_sm90.cu or bwd_sm90.cu: given attn_cuda_args90 */
    int32_t blocks; /* backward: that share bn keys, and are a cluster if there are two */
    int32_t arch;   /* least compute capability, times ten */
    attn_dtype
        dtype; /* of tiles; ATTN_DTYPE_DEFAULT: every one (fwd_any), or no forward kernel at all; decode, ATTN_I8: any 8 bits */
    int32_t dim_qk; /* largest one */
    int32_t most_v; /* largest dim_v */
    int32_t dim;    /* the larger of the two; 0: no forward kernel */
    int32_t dim_v;  /* dims of V that a block computes; fwd_any: all of them */
    int32_t bm, bn; /* tile; fwd_any: ATTN_ANY_ROWS, ATTN_ANY_COLS */
    int32_t warps;
    attn_cuda_takes takes;
    int32_t ctas;        /* decode: blocks on a multiprocessor that has room for them */
    size_t shared_bytes; /* dynamic shared memory */
} attn_cuda_entry;

extern const attn_cuda_entry attn__cuda_entries[ATTN_ENTRIES];

/* Shared memory of a FWD line: a tile of Q, and one of K and V each; two of these where they are fetched a tile ahead. */
#define ATTN_TILE_BYTES(dtype, bm, bn, dim, dimv, eager)                                                                   \
    (((size_t)(bm) * (dim) + ((eager) == 2 ? 2 : 1) * (size_t)(bn) * ((dim) + (dimv))) * ((dtype) == ATTN_F32 ? 4 : 2))

/* Of a BWD line: the two tensors that are kept, tiles of the two others, lse and delta of rows where these are the others; P, d_s. */
#define ATTN_BWD_BYTES(is_keys, is_one, dim, own, others, stages)                                                          \
    (2 * ((size_t)(own) + (size_t)(stages) * (others)) * (dim)*2 +                                                         \
     ((is_keys) ? (size_t)((is_one) ? 2 : (stages)) * (others)*8 : 0) + ((is_one) ? (size_t)4 * (own) * (others) : 0) +    \
     ATTN_BWD_NOTES)

/*
 * Of a BWD90 line: K and V, two stages of Q and d_o, d_s, buffers of d_q in float; notes. In bwd_sm90_wide.cu (blocks > 0): two stages of Q
 * and d_s, P in float, smaller buffers; two blocks have one half of the keys each, a quarter of K besides, and the other one's d_s in
 * the place of a stage.
 */
#define ATTN_BWD90_NARROW_BYTES(dim, rows, keys, buffers)                                                                  \
    ((size_t)2 * ((keys) + 2 * (size_t)(rows)) * (dim)*2 + (size_t)(keys) * (rows)*2 + (size_t)(buffers) * (rows) * (dim)*4)
#define ATTN_BWD90_WIDE_BYTES(dim, rows, each, blocks, buffers)                                                            \
    (((size_t)2 * (each) + (2 + ATTN_WIDE_O_STAGES(dim)) * (size_t)(rows)) * (dim)*2 +                                     \
     ((blocks) == 2 ? (size_t)(each) * (dim) : 0) + (size_t)8 * (each) * (rows) +                                          \
     (size_t)(buffers) * (rows)*ATTN_WIDE_CHUNK(dim) * 4)
#define ATTN_BWD90_BYTES(dim, rows, keys, blocks, buffers)                                                                 \
    (((blocks) ? ATTN_BWD90_WIDE_BYTES(dim, rows, (keys) / ((blocks) + !(blocks)), blocks, buffers)                        \
               : ATTN_BWD90_NARROW_BYTES(dim, rows, keys, buffers)) +                                                      \
     ATTN_BWD90_NOTES)

/* Of a DECODE line: stages of K or V, notes; of 8 bits also the sums of teams, four or two; factors of keys, two each. */
#define ATTN_DECODE_BYTES(dtype, dim, rows, bn, stages, factors)                                                           \
    (((dtype) == ATTN_I8 ? (size_t)(stages) * (bn) + ((dim) > 128 ? 8 : 16) * (rows) : (size_t)(stages)*2 * (bn)) *        \
         (dim) +                                                                                                           \
     ((factors) ? (size_t)8 * (stages) * (bn) : 0) + ATTN_DECODE_NOTES)

/* Of a DECODE90 line: Q, stages of K, P that one consumer tells the other, notes. */
#define ATTN_DECODE90_BYTES(dim, bn, stages)                                                                               \
    ((size_t)2 * (ATTN_DECODE90_ROWS + (stages) * (bn)) * (dim) + (size_t)2 * ATTN_DECODE90_ROWS * (bn) +                  \
     ATTN_DECODE90_NOTES)

/* args.scale_log2; 0 where the scale is too small for a float. */
static inline float attn__scale_log2(const attn_problem *p) { return (float)(p->scale * ATTN_LOG2E); }

/* Of a FWD90 line: buffers of Q, stages of K and V, room for a wider O, all in blocks of columns; notes. */
#define ATTN_MAP_BLOCKS(dim) (((size_t)(dim) + ATTN_MAP_COLS - 1) / ATTN_MAP_COLS)
#define ATTN_HOPPER_BYTES(bm, bn, dim, dimv, stages, qbuf)                                                                 \
    (((size_t)(qbuf) * (bm)*ATTN_MAP_BLOCKS(dim) +                                                                         \
      ((qbuf) == 1 && (dimv) > (dim) ? (size_t)(bm)*ATTN_MAP_BLOCKS(dimv) : 0) +                                           \
      (size_t)(stages) * (bn) * (ATTN_MAP_BLOCKS(dim) + ATTN_MAP_BLOCKS(dimv))) *                                          \
         ATTN_MAP_COLS * 2 +                                                                                               \
     ATTN_HOPPER_NOTES)

/* Is there code of the kernel for this compute capability? sm_90a is for 9.0 and for nothing after it. */
static inline bool attn__cuda_is_for(const attn_cuda_entry *e, int32_t arch) {
    return e->hopper ? e->arch == arch : e->arch <= arch;
}

/* Does the kernel run there? */
static inline bool attn__cuda_runs_on(const attn_cuda_entry *e, const attn_gpu *gpu) {
    return attn__cuda_is_for(e, gpu->arch) && e->shared_bytes <= (size_t)gpu->shared_bytes;
}

/*
 * Do blocks of Hopper's backward add to d_q in turns? ATTN_UNORDERED lets them do without, which pays where they are many: d_q has to be cleared
 * before, and no block can tell that it is the last one.
 */
static inline bool attn__cuda_takes_turns(const attn_problem *p) {
    const int32_t most = p->dim_qk > p->dim_v ? p->dim_qk : p->dim_v;
    return !(p->flags & ATTN_UNORDERED) || p->max_kv < (most > 128 ? 2048 : 8192);
}

/*
 * Does the last block of Hopper's backward that adds to a tile of d_q write it? Otherwise bwd_cast does: where a block does not know that it is the
 * last one; and where all tiles of many blocks have the same last one, which would wait for the others all along.
 */
static inline bool attn__cuda_finishes(const attn_problem *p) {
    return !p->flashmask_vectors && attn__cuda_takes_turns(p) && ((p->flags & ATTN_CAUSAL) || p->max_kv <= 2048);
}

/* Do blocks of Hopper's kernels take their work from a counter, the plan's CUDA_COUNTER? */
bool attn__cuda_counts(const attn_problem *p);

/* What a kernel of the family has to take for this problem. aligned: rows of its tensors start at multiples of 16 bytes. */
attn_cuda_takes attn__cuda_wants(const attn_problem *p, bool hopper, bool aligned);

/* A backward in one pass: tiles of so many rows of all sequences and heads, which have turns; rows of d_q that are stored in float. */
int64_t attn__cuda_q_tiles(const attn_problem *p, int32_t rows);
int64_t attn__cuda_d_q_rows(const attn_problem *p);

/* Does a line do all that the problem asks for, its dtype apart? */
bool attn__cuda_serves(const attn_cuda_entry *e, const attn_problem *p, bool aligned);

/* ---- images (images.c) ---- */

/* The code of an entry's file; NULL when this library was built without it. With NULL: of any file. */
const void *attn__cuda_image(const char *file);

/* For tests: from here on this function is asked; NULL: the embedded images. */
void attn__cuda_image_replace(const void *(*image)(const char *file));

/* ---- tuning (tuning.c) ---- */

/* A line of the tuning file. */
typedef struct attn_cuda_tuned {
    int32_t arch; /* of the GPU, exactly */
    attn_dtype dtype;
    int32_t dim;            /* of the table's lines, not of the problem */
    attn_cuda_takes wanted; /* of a kernel: attn__cuda_wants */
    int32_t entry;          /* the kernel to take */
    int32_t line;           /* where it stands */
} attn_cuda_tuned;

enum { ATTN_MOST_TUNED = 256, ATTN_TUNING_PATH = 256 };

typedef struct attn_cuda_tuning {
    char path[ATTN_TUNING_PATH]; /* "": there is none */
    int32_t count;
    attn_cuda_tuned row[ATTN_MOST_TUNED];
} attn_cuda_tuning;

/* Reads the file that ATTN_TUNING names, if it names one. Errors name the file and the line. */
attn_status attn__cuda_tuning_read(attn_cuda *cuda);

/* What the file says instead of this entry on this GPU; -1: nothing. */
int attn__cuda_tuned(const attn_cuda *cuda, const attn_gpu *gpu, const attn_cuda_entry *instead_of, attn_cuda_takes wanted);

/* The words for it in the file. */
extern const char *const attn__cuda_takes_name[];

/* ---- pointers (pointers.c) ---- */

/* Of which device the memory of a call is. */
typedef struct attn_cuda_home {
    int32_t device;   /* -1: no pointer has said it */
    int32_t hint;     /* where pinned or managed memory was made; -1: there is none */
    const char *name; /* the pointer that said it */
    bool any;         /* was there a pointer at all? */
} attn_cuda_home;

/* All pointers of a call: pageable host memory and memory of two devices are refused. */
attn_status attn__cuda_find_buffers(const attn_driver *driver, const attn_plan *plan, const attn_buffers *f,
                                    attn_cuda_home *home);
attn_status attn__cuda_find_merge(const attn_driver *driver, const attn_merge_args *a, attn_cuda_home *home);
attn_status attn__cuda_find_rotary(const attn_driver *driver, const attn_rotary_args *a, attn_cuda_home *home);

/* ---- contexts and kernels (device.c) ---- */

/* What a context of this backend holds besides: context->cuda. */
struct attn_cuda {
    const attn_driver_state *state;
    pthread_mutex_t mutex; /* guards the loading of what follows; a plan's kernels do not change any more */
    uint64_t *status;      /* pinned host memory that every device sees at this address; NULL before the first plan */
    attn_cu_context primary[ATTN_MOST_GPUS]; /* the devices' primary contexts, retained; NULL: not */
    attn_cu_kernel kernel[ATTN_ENTRIES];     /* NULL: not loaded */
    uint32_t ready[ATTN_ENTRIES];            /* a bit for each GPU on which the kernel's shared memory has been asked for */
    bool early; /* kernels that wait by themselves are launched before the one before them has ended */
    bool waits[ATTN_ENTRIES][ATTN_MOST_GPUS]; /* those whose code does */
    struct {
        const char *file;
        attn_cu_library library;
    } loaded[ATTN_ENTRIES];
    int32_t libraries;       /* in loaded */
    attn_cuda_tuning tuning; /* read when the context is made, and constant from then on */
};

/* Where a call takes place. */
typedef struct attn_cuda_place {
    const attn_driver *driver;
    int32_t gpu; /* index into state->gpu */
    bool pushed; /* a context was made current for the call */
} attn_cuda_place;

/*
 * Makes a CUDA context current: that of the stream; else the current one, if its device is the right one; else the primary
 * context of that device. A stream of another device than the memory's is refused. Every enter that succeeds wants a leave.
 */
attn_status attn__cuda_enter(attn_cuda *cuda, const attn_cuda_home *home, void *stream, attn_cuda_place *place);
void attn__cuda_leave(const attn_cuda_place *place);

/* Loads entries, for all the GPUs whose bit is set in `gpus`, and makes the status word. Not for attn_run. */
attn_status attn__cuda_load(attn_cuda *cuda, const int *entries, int count, uint32_t gpus);

void attn__cuda_unload(attn_cuda *cuda);

/* ---- a run (cuda.c, launch.c, maps.c) ---- */

/* Parts of the workspace, as plan->part[]; attn__part (internal.h) gives the address. Empty ones have no bytes. */
enum {
    CUDA_PART_O,                 /* part_o of args.h */
    CUDA_PART_LSE,               /* part_lse of args.h */
    CUDA_RANGES,                 /* ranges of args.h */
    CUDA_COUNTER,                /* counter of args.h */
    CUDA_Q,                      /* ATTN_ROTARY: the rotated q; attn__cuda_rotated_q says how it lies */
    CUDA_ROWS,                   /* backward: delta of args.h */
    CUDA_D_Q = CUDA_PART_O,      /* backward in one pass: part_o of args.h */
    CUDA_TURNS = CUDA_COUNTER,   /* and turns */
    CUDA_SPANS = CUDA_PART_O,    /* decode: spans, then super_slots, of attn_cuda_decode */
    CUDA_TICKETS = CUDA_PART_LSE /* and counters */
};

/* What the launches of one call share. The CUDA context that they go to is current. */
typedef struct attn_cuda_run {
    const attn_driver *driver;
    const attn_cuda_entry *entries; /* [ATTN_ENTRIES]: attn__cuda_entries; `attn tune` puts others in the place of one */
    const attn_cu_kernel *kernels;  /* [ATTN_ENTRIES]; those that the plan (or the piece) needs are loaded */
    attn_cu_stream stream;
    int32_t gpu;                         /* index into state->gpu, */
    const bool (*waits)[ATTN_MOST_GPUS]; /* and that of attn_cuda; NULL: none */
    uint64_t *status;                    /* args.status */
    int32_t
        forward;    /* entry of the forward kernel, for this device and these buffers; of a backward that for d_k and d_v */
    bool vector_ok; /* args.vector_ok, of q as the forward kernel sees it; forward takes it into account */
    int32_t decode; /* entry of the kernel for sequences of few rows; -1: forward's own */
    int32_t sms;    /* multiprocessors of the device */
    int32_t shared; /* bytes of shared memory that a block of the device can have */
    int32_t tma;    /* args.tma, and the maps that it speaks of; a kernel that is not Hopper's has none */
    int32_t box;    /* args.box */
    int32_t whole;  /* attn_cuda_args90.whole */
    attn_tensor_map map_q, map_k, map_v, map_o;
} attn_cuda_run;

/*
 * What a decode kernel is given, its memory aside, on a device of so many multiprocessors and so much shared memory for a block; and
 * how many blocks it has. False: more than can be counted.
 */
bool attn__cuda_decode_sizes(const attn_cuda_entry *e, const attn_problem *p, int32_t sms, int32_t shared,
                             attn_cuda_decode *c, int64_t *blocks);

/* Floats of a slot of it. */
static inline int64_t attn__cuda_slot(const attn_cuda_entry *e, const attn_cuda_decode *c) {
    return (int64_t)c->rows * (e->dim + 2);
}

/* Do all rows of q (as the forward kernel sees it), k, v and o, of a backward d_o, start at multiples of 16 bytes? */
bool attn__cuda_aligned(const attn_plan *plan, const attn_buffers *f);

/* Is every row of v the beginning of that of k? */
bool attn__cuda_latent(const attn_plan *plan, const attn_buffers *f);

/* Makes the maps that run->forward wants, as far as the tensors can have any: run->tma says which. */
void attn__cuda_map(attn_cuda_run *run, const attn_plan *plan, const attn_buffers *f);

/* The rotated q in the workspace: rows are padded to 16 bytes. */
attn_tensor attn__cuda_rotated_q(const attn_plan *plan, const attn_buffers *f);

/*
 * Launches an entry on the run's stream. Without groups: so many blocks in x and, from 2^31 on, y, numbered by block_index(). With
 * groups each has so many blocks in x, and they are counted in y and then z. Either way the grid may have a few blocks too many: a
 * kernel leaves at once when it is past its count. No blocks: nothing is launched.
 */
attn_status attn__cuda_launch(const attn_cuda_run *run, int kernel, int64_t blocks, int64_t groups, int32_t threads,
                              size_t shared_bytes, const void *args);

/* launch.c. Forward and append; plan->chunks says how many chunks there are, 0 for no split. */
attn_status attn__cuda_forward(const attn_cuda_run *run, const attn_plan *plan, const attn_buffers *f);
attn_status attn__cuda_backward(const attn_cuda_run *run, const attn_plan *plan, const attn_buffers *f);
attn_status attn__cuda_merge(const attn_cuda_run *run, const attn_merge_args *args);
attn_status attn__cuda_rotary(const attn_cuda_run *run, const attn_rotary_args *args);

#endif
