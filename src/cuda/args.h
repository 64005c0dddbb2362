/*
 * What a CUDA kernel is given: one struct, by value, the same for all kernels of a run. Host (C) and device (CUDA C) share it.
 *
 * A run is a row of launches on the caller's stream, in this order; most problems need only the forward one. decode.cu's may begin while the one
 * before ends, and waits for it (grid.cuh), and does the first two itself where a.fuses:
 *
 *   append     ATTN_APPEND      k_new, v_new -> cache                                      append.cu
 *   rotate_q   ATTN_ROTARY      q -> workspace, rotated; the others then read it there     rotary.cu
 *   ranges     FlashMask        vectors -> minima and maxima per tile of keys              ranges.cu
 *   fwd_...    always           o, lse; or partial results of chunks of keys               fwd.cu, fwd_sm90.cu, any.cu
 *   fold       split            partial results -> o, lse, in the order of the chunks      merge.cu
 *   decode_... few rows         o, lse of sequences of at most ATTN_CUDA_SPLIT_ROWS rows   decode.cu, decode_sm90.cu
 *   fold_lat.. split            what decode_sm90.cu leaves of long sequences               fold_latent.cu
 *   probs      probs            recomputed from q and k                                    probs.cu
 *   fill       ATTN_VARLEN_Q    rows of o and lse that no sequence covers                  fill.cu
 *
 * A backward is:
 *
 *   bwd_delta  always           delta of each row                                          bwd_rows.cu
 *   ranges     FlashMask        as above                                                   ranges.cu
 *   bwd_fit    float16, Hopper  sizes of d_o, v and delta -> fits                          bwd_rows.cu
 *   bwd_..._q  d_q              not in one pass                                            bwd.cu, bwd_any.cu
 *   bwd_...    d_k or d_v       in one pass d_q too                                        bwd_sm90.cu, bwd_sm90_wide.cu, bwd_one.cu, bwd.cu, bwd_any.cu
 *   bwd_cast   d_q              Hopper's, where blocks have not finished it themselves     bwd_rows.cu
 *   bwd_bias   d_bias                                                                      bwd_any.cu
 *   bwd_sink   d_sink           from lse and delta                                         bwd_rows.cu
 *   bwd_fill   own lengths      rows of the gradients that no sequence covers              bwd_rows.cu
 */
#ifndef ATTN_CUDA_ARGS_H
#define ATTN_CUDA_ARGS_H

#include "attn.h"
#include "mask.h"
#include "philox.h"

enum {
    ATTN_CUDA_SPLIT_ROWS = 16, /* sequences of at most so many rows are split ... */
    ATTN_CUDA_CHUNK = 512,  /* ... in chunks of so many keys: fixed numbers, so that results do not depend on the batch */
    ATTN_DECODE_SPAN = 512, /* decode.cu: keys that are worked by themselves ... */
    ATTN_DECODE_SUPER = 8192 / ATTN_DECODE_SPAN, /* ... and how many such spans are folded first: fixed numbers too */
    ATTN_DECODE_PAIRS = 2 * ATTN_DECODE_SUPER,   /* spans from this one on, an even number, are worked two by two */
    ATTN_DECODE_WARPS = 4,                       /* of a block */
    ATTN_DECODE_NOTES = 3072,                    /* bytes of its shared memory besides tiles */
    ATTN_DECODE90_SPAN = 1024, /* decode_sm90.cu: the same. O of 64 rows is a tenth of such a span's keys */
    ATTN_DECODE90_ROWS = 64,
    ATTN_DECODE90_WARPS = 12,
    ATTN_DECODE90_NOTES = 3072,
    ATTN_SHORT_ELSEWHERE = -1,       /* attn_cuda_args.chunks: short sequences are not this kernel's, but decode's */
    ATTN_CUDA_WARPS = 4,             /* warps of a block of the pieces */
    ATTN_ANY_ROWS = ATTN_CUDA_WARPS, /* fwd_any: rows of a block, one warp each ... */
    ATTN_ANY_COLS = 32,              /* ... and keys that are masked or skipped together */
    ATTN_BWD_ANY_REALS = 4 * ATTN_ANY_ROWS * 576 + ATTN_ANY_COLS * 33, /* bwd_any: shared memory of a block */
    ATTN_BWD_NOTES = 512,     /* bwd.cuh: bytes of its shared memory besides tiles */
    ATTN_BWD90_NOTES = 3072,  /* bwd_sm90.cu: bytes of its shared memory besides tiles */
    ATTN_CAST_THREADS = 128,  /* bwd_cast: of a block ... */
    ATTN_D_Q_ROWS = 64,       /* ... and its rows: those of a tile of d_q in float, attn__d_q_rows */
    ATTN_DELTA_ROWS = 32,     /* bwd_delta and bwd_fit: of a warp */
    ATTN_FITS = 3,            /* numbers of args.fits for each sequence and KV head */
    ATTN_SINK_THREADS = 256,  /* bwd_sink: of a block */
    ATTN_MERGE_PARTS = 48,    /* parts that one launch of merge takes */
    ATTN_MAP_COLS = 64,       /* columns of a tensor map's box: 128 bytes, which its swizzle is over */
    ATTN_MAP_O_ROWS = 64,     /* rows of o's box: what one warpgroup stores. q: the kernel's bm; k and v: its bn */
    ATTN_HOPPER_NOTES = 2048, /* bytes of shared memory that a Hopper kernel has besides its tiles */
    ATTN_TMA_Q = 1,           /* bits of attn_cuda_args.tma */
    ATTN_TMA_KV = 2,
    ATTN_TMA_O = 4,
    ATTN_TMA_ALL = 7,
    ATTN_WHOLE_Q = 1, /* bits of attn_cuda_args90.whole */
    ATTN_WHOLE_K = 2,
    ATTN_WHOLE_V = 4
};

/*
 * Of a BWD line: others that are worked at a time, so that a thread has at most 32 elements of their products; and whether a block
 * has room for the sums of d_k and d_v both.
 */
#define ATTN_BWD_SUB(own, others, warps) ((others) < 64 * 16 * (warps) / (own) ? (others) : 64 * 16 * (warps) / (own))
#define ATTN_BWD_SPLIT(own, warps, dim) ((own) / (warps) / 16 * (dim) > 160)

/* fold_latent: warps that share a row which is split in so many spans. */
#define ATTN_FOLD_SLICES(spans) ((spans) > 8 ? 4 : 1)

/* Of a BWD90 line of bwd_sm90_wide.cu: buffers of d_o, and dims of d_q that leave at a time. */
#define ATTN_WIDE_O_STAGES(dim) ((dim) > 192 ? 1 : 2)
#define ATTN_WIDE_CHUNK(dim) ((dim) == 192 ? 64 : 32)

/* What a forward kernel takes, each with what comes before it: variants.def says what that is. */
typedef enum attn_cuda_takes { ATTN_TAKES_PLAIN, ATTN_TAKES_OWN, ATTN_TAKES_ALL } attn_cuda_takes;

/* Flags with which sequences have lengths, rows or keys of their own. */
#define ATTN_OWN_LENGTHS                                                                                                   \
    (ATTN_BATCH_INDEX | ATTN_VARLEN_Q | ATTN_USED_Q | ATTN_VARLEN_KV | ATTN_USED_KV | ATTN_APPEND | ATTN_LEFTPAD)

/* x / by for x < 2^31 as a multiplication: a block has a few of them to do before it can begin. */
typedef struct attn_divider {
    uint32_t magic, shift;
} attn_divider;

static inline attn_divider attn__divider(int32_t by) {
    attn_divider d = {0, 31};
    while ((UINT64_C(1) << (d.shift - 31)) < (uint64_t)by) d.shift++;
    d.magic = (uint32_t)(((UINT64_C(1) << d.shift) + (uint64_t)by - 1) / (uint64_t)by);
    return d;
}
ATTN_HD uint32_t attn__divide(uint32_t x, attn_divider d) { return (uint32_t)((uint64_t)x * d.magic >> d.shift); }

typedef struct attn_cuda_args {
    attn_problem p;           /* resolved */
    attn_buffers f;           /* checked; q is the rotated one where there is one */
    uint64_t *status;         /* sticky word: see attn_device_status; device address of host memory */
    attn_flash_range *ranges; /* FlashMask: [batch][flashmask_heads][range_tiles]; else NULL */
    int32_t range_tiles;      /* ceil(max_kv / range_cols) */
    int32_t range_cols;       /* keys of a tile: the forward kernel's bn */
    /*
     * Split: part_o[row][chunks][dim_v], part_lse[row][chunks]; floats, or doubles (attn__wide_problem). Sequence b has rows [heads_q][sq] from
     * b * part_rows * heads_q on, where part_rows = min(max_q, ATTN_CUDA_SPLIT_ROWS); of packed sequences from cu_q[b] * heads_q
     * on where that is less, so that there are never more than total_q * heads_q either (part_index in device.cuh, split_rows in
     * cuda.c). Only sequences of at most ATTN_CUDA_SPLIT_ROWS rows use them.
     * A chunk without allowed keys has lse -inf and need not write part_o. Sinks are added by fold.
     */
    void *part_o, *part_lse;
    int32_t part_rows;
    int32_t chunks;    /* ceil(max_kv / ATTN_CUDA_CHUNK); 0: nothing is split; ATTN_SHORT_ELSEWHERE */
    int32_t row_tiles; /* query tiles of max_q rows; bwd_cast: of ATTN_D_Q_ROWS */
    int32_t slots;     /* blocks of one sequence and head: max(row_tiles, chunks) */
    int32_t dv_blocks; /* blocks that share the dims of V of the same rows: ceil(dim_v / the kernel's dimv) */
    int32_t heads;     /* heads_q, each dv_blocks times */
    int32_t
        group; /* of these, that are worked side by side: a grid is [groups of heads][slot][head]; decode: heads_q / heads_kv */
    float scale_log2;    /* scale * log2(e), the descales aside */
    attn_philox philox;  /* dropout */
    float least;         /* -FLT_MAX, or so that its product with scale_log2 is still finite */
    int32_t vector_ok;   /* every row of q, k, v and o starts at a multiple of 16 bytes */
    int32_t fuses;       /* decode.cu brings new keys into the cache and rotates q; 0: append and rotate_q */
    attn_tensor other_q; /* ATTN_ROTARY: where rotate_q writes, as f.q is later; where decode.cu fuses it, q as given */
    attn_divider by_group, by_heads, by_share; /* by group, by heads, by heads_q / heads_kv */
    attn_divider by_each;                      /* Hopper: by group * slots */
    attn_divider by_page;                      /* by page_size */
    int64_t work; /* Hopper: places [groups of heads][slot][head] that blocks share; the last group may be short of heads */
    union {
        int32_t box; /* Hopper: rows of a box of k and v: those of a tile, or as many as fit into both a tile and a page */
        int32_t
            finishes; /* its backward: the last block that adds to a tile of d_q writes it in its dtype; 0: bwd_cast does */
    };
    int32_t tma; /* Hopper: ATTN_TMA_...: which of the maps in attn_cuda_args90 can be used */
    union {
        uint32_t *counter; /* Hopper: 0 before the launch; places taken besides the first of each block. NULL: in turn */
        /*
         * Hopper's backward in float16: of each sequence and KV head, the largest |d_o|, |v| and |delta| that are finite and that some pair has to
         * do with, as bits: bwd_fit makes them; fit_of (fit.cuh) is the power of two that d_s is multiplied by. NULL: none.
         */
        uint32_t *fits;
    };
    /*
     * Backward: of each row, in the order of lse, delta = rowsum(d_o * o) - d_lse; floats, for F64 and ATTN_PRECISE doubles. Rows
     * without keys have 0 and those that no sequence covers -0, whatever the caller's arrays hold there.
     */
    void *delta;
    /*
     * Backward in one pass: d_q as far as it has come, in part_o (attn__d_q_rows), and the turns of blocks that add to it: bwd_one.cu, bwd_sm90.cu.
     * bwd_delta then writes zeros to d_q, for rows that no block comes by.
     */
    uint32_t *turns;
    uint32_t *
        overlap; /* not 0: cu_q is not ascending, so packed sequences share tiles; bwd_delta says so, and nobody waits for a turn */
} attn_cuda_args;

/*
 * d_q of a backward in one pass, in float, as tensor cores leave it: of each sequence and head tiles of ATTN_D_Q_ROWS rows, the last one of what
 * is left; of a tile [8 columns][16 rows][lane] of four numbers, lane 4 g + t having columns 2t, 2t + 1 of rows g and g + 8. Lanes
 * without rows are at the end, and left out: where r of 16 rows are there, 2 r rows are stored, and never more than 16.
 */
ATTN_HD int32_t attn__d_q_columns(const attn_problem *p) { return (p->dim_qk + 7) / 8 * 8; }
ATTN_HD int64_t attn__d_q_rows(int32_t rows) { return (int64_t)(rows / 16 * 16) + attn__min32(rows % 16 * 2, 16); }

/*
 * Rows that are stored of a head before sequence b, which begins with row q_row if it is packed; of b = batch, and total_q, all there are. What
 * is left out of packed sequences before depends on their lengths: each has at most 8 rows more than there are, and not more than twice as many.
 */
ATTN_HD int64_t attn__d_q_first(const attn_problem *p, int32_t b, int64_t q_row) {
    if (!(p->flags & ATTN_VARLEN_Q)) return b * attn__d_q_rows(p->max_q);
    return q_row < INT64_C(8) * b ? 2 * q_row : q_row + INT64_C(8) * b;
}

#ifdef __cplusplus
#define ATTN_ALIGNED(bytes) alignas(bytes)
#else
#define ATTN_ALIGNED(bytes) _Alignas(bytes)
#endif

/*
 * A tensor as the tensor memory accelerator walks it, made by the driver (cuTensorMapEncodeTiled). Coordinates are column, row,
 * block of columns, head, batch; a packed tensor is one batch. What is outside is read as 0 and not written: columns past the dim too.
 * Dims that are whole blocks of ATTN_MAP_COLS columns are walked as such, and one request brings all blocks of a tile; others
 * are one block as wide as the dim, and a request brings ATTN_MAP_COLS columns of it.
 */
typedef struct attn_tensor_map {
    ATTN_ALIGNED(64) uint64_t opaque[16];
} attn_tensor_map;

/*
 * What a kernel of fwd_sm90.cu is given, or of bwd_sm90.cu, where o is d_o. A map is there (its bit in a.tma is set) when the tensor is of the kernel's
 * dtype, not paged, not empty, and its start and strides are what the driver takes. Plain kernels are
 * launched with all of them only.
 */
typedef struct attn_cuda_args90 {
    attn_tensor_map q, k, v, o;
    attn_cuda_args a;
    int32_t whole; /* ATTN_WHOLE_...: tiles that one request brings */
} attn_cuda_args90;

/*
 * What a kernel of decode.cu is given. Results that are not finished lie in slots of floats: o[rows][the kernel's dim], then m and
 * l of each row. An item is a sequence, a KV head and 8 or 16 rows; there are batch * heads_kv * blocks of them.
 */
typedef struct attn_cuda_decode {
    attn_cuda_args a;
    float *spans;       /* [shared][each]: those of supers that several blocks have */
    float *super_slots; /* [items][supers] */
    uint64_t *counters; /* [shared], spans that are done; [items], supers that are done; nobody clears them: counter.cuh */
    int32_t rows;       /* of a slot: what an item can have, at most the line's */
    int32_t blocks;     /* of the line's rows: what a sequence can have */
    int32_t supers;     /* what an item can have */
    int32_t each;       /* spans that a super can have */
    int32_t shared;     /* supers that can be several blocks': all there are, or one less than blocks of the grid */
    int32_t by_item;    /* all there are */
} attn_cuda_decode;

/* What merge is given: some of the parts. A merge of more parts is several launches, with `state` between them. */
typedef struct attn_cuda_merge {
    attn_dtype dtype, out_dtype;
    int32_t parts, batch, rows, heads, dim; /* parts: of this launch */
    int32_t is_first, is_last;              /* is there no state before it; does it write o and lse */
    double *state; /* [batch * heads * rows][dim + 2]: o, unnormalised; largest lse; sum of weights */
    attn_tensor o;
    void *lse;
    attn_tensor o_parts[ATTN_MERGE_PARTS];
    const void *lse_parts[ATTN_MERGE_PARTS];
} attn_cuda_merge;

/* What rotary is given. */
typedef struct attn_cuda_rotary {
    attn_rotary_args r;
    uint64_t *status; /* as in attn_cuda_args */
} attn_cuda_rotary;

#endif
