/*
 * The cuda backend: what its host files know of each other.
 *
 *   cuda.c     the backend: open, plan, run; which kernel is taken, what the workspace holds
 *   images.c   the kernels' code, embedded in the library
 *   driver.c   the driver as a table of functions
 *   launch.c   a run as a row of launches (args.h has the list)
 *
 * A run is attn_run -> run_cuda (cuda.c) -> attn__cuda_forward (launch.c) -> attn__cuda_launch -> kernel.
 */
#ifndef ATTN_CUDA_H
#define ATTN_CUDA_H

#include "args.h"
#include "driver.h"
#include "schedule.h"

/* ---- kernels ---- */

/* Entry points, by number: the pieces in the order of variants.def, then its FWD lines. ATTN_ENTRY_append, ... */
enum {
#define FWD(...)
#define PIECE(name, file) ATTN_ENTRY_##name,
#include "variants.def"
#undef FWD
#undef PIECE
#define FWD(name, ...) ATTN_ENTRY_##name,
#define PIECE(...)
#include "variants.def"
#undef FWD
#undef PIECE
    ATTN_ENTRIES
};

/* What the table says of an entry point. */
typedef struct attn_cuda_entry {
    const char *name; /* its symbol */
    const char *file; /* the image is named like it, without ".cu" */
    int32_t arch;     /* least compute capability, times ten */
    attn_dtype dtype; /* of tiles; ATTN_DTYPE_DEFAULT: every one (fwd_any), or no forward kernel at all */
    int32_t dim;      /* largest dim_qk and dim_v; 0: no forward kernel */
    int32_t bm, bn;   /* tile; fwd_any: ATTN_ANY_ROWS, ATTN_ANY_COLS */
    int32_t warps;
    bool all;            /* takes every feature, and rows of any alignment */
    size_t shared_bytes; /* dynamic shared memory */
} attn_cuda_entry;

extern const attn_cuda_entry attn__cuda_entries[ATTN_ENTRIES];

/* ---- a run ---- */

/* Parts of the workspace, as plan->part[]; attn__part (internal.h) gives the address. Empty ones have no bytes. */
enum {
    CUDA_PART_O,   /* part_o of args.h */
    CUDA_PART_LSE, /* part_lse of args.h */
    CUDA_RANGES,   /* ranges of args.h */
    CUDA_Q,        /* ATTN_ROTARY: the rotated q; attn__cuda_rotated_q says how it lies */
    CUDA_LSE       /* forward: lse, for probs, where the buffers have none; shaped like f->lse */
};

/* What the launches of one call share. The CUDA context that they go to is current. */
typedef struct attn_cuda_run {
    const attn_driver *driver;
    const attn_cu_kernel *kernels; /* [ATTN_ENTRIES]; those that the plan (or the piece) needs are loaded */
    attn_cu_stream stream;
    uint64_t *status; /* args.status */
    int32_t forward;  /* entry of the forward kernel, for this device and these buffers */
    bool vector_ok;   /* args.vector_ok, of q as the forward kernel sees it */
} attn_cuda_run;

/* The rotated q in the workspace: rows are padded to 16 bytes. */
attn_tensor attn__cuda_rotated_q(const attn_plan *plan, const attn_buffers *f);

/*
 * Launches an entry on the run's stream with so many blocks in x and, from 2^31 on, y. There the grid may have a few blocks too
 * many: a kernel leaves at once when block_index() is past its count. No blocks: nothing is launched.
 */
attn_status attn__cuda_launch(const attn_cuda_run *run, int kernel, int64_t blocks, int32_t threads, size_t shared_bytes,
                              const void *args, size_t args_bytes);

/* launch.c. Forward and append; plan->chunks says how many chunks there are, 0 for no split. */
attn_status attn__cuda_forward(const attn_cuda_run *run, const attn_plan *plan, const attn_buffers *f);
attn_status attn__cuda_merge(const attn_cuda_run *run, const attn_merge_args *args);
attn_status attn__cuda_rotary(const attn_cuda_run *run, const attn_rotary_args *args);

/* ---- images (images.c) ---- */

typedef struct attn_image {
    const char *name; /* of the file, without ".cu", or of the FWD line */
    const void *start;
    size_t bytes;
} attn_image;

/* The code of an image; NULL when this library was built without it. With name NULL: of any image. */
const void *attn__cuda_image(const char *name);

/* For tests: every name has this image; NULL: the embedded ones. */
void attn__cuda_image_replace(const void *image);

#endif
