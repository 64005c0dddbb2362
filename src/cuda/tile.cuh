/*
 * Plain tiles for kernels that take everything and are not in a hurry (any.cu, probs.cu): ATTN_ANY_ROWS query rows, one for each
 * warp, against ATTN_ANY_COLS keys, one for each lane. K and V come through shared memory in pieces of 32 dims, as numbers of
 * the type that is computed with, which is float, or double (attn__wide_problem): overloads, as in score.cuh.
 *
 * A key that a row may not see is computed like any other and then thrown away: its score becomes -inf whatever it was, and its
 * value is left out of the sum, so that NaN there does not matter (C2). Keys past the end are not read.
 */
#ifndef ATTN_TILE_CUH
#define ATTN_TILE_CUH

#include "score.cuh"
#include "warp.cuh"

enum {
    ROWS = ATTN_ANY_ROWS,
    COLS = ATTN_ANY_COLS,
    DIMS = 32,        /* of a piece of K or V: one for each lane */
    PITCH = DIMS + 1, /* distance of keys in a piece: lanes that read one dim of 32 keys meet 32 banks */
    /* Shared memory of a block, in reals. A row of q and of o belongs to its warp alone, the piece to all. */
    AT_Q = 0,                              /* [ROWS][ATTN_MAX_DIM] */
    AT_PIECE = AT_Q + ROWS * ATTN_MAX_DIM, /* [COLS][PITCH], of K or V */
    AT_O = AT_PIECE + COLS * PITCH,        /* [ROWS][ATTN_MAX_DIM]; only any.cu has it */
    TILE_REALS = AT_O
};

/* The rows of a block. */
typedef struct tile_rows {
    attn_seq s;
    attn_mask mask;
    int32_t h, kv_head;
    int32_t i0, i; /* first row; the row of this warp, from sq on: none */
    double scale;  /* of dot products */
} tile_rows;

DEVICE tile_rows make_rows(const attn_cuda_args &a, const attn_seq &s, int32_t h, int32_t i0) {
    tile_rows t;
    t.s = s;
    t.mask = attn__seq_mask(&a.p, &s);
    t.h = h;
    t.kv_head = h / (a.p.heads_q / a.p.heads_kv);
    t.i0 = i0;
    t.i = i0 + warp_in_block();
    t.scale = score_scale(a, s, t.kv_head);
    return t;
}

/* Keys [*first, *end) that any of the rows may see before FlashMask. */
DEVICE void keys_of_rows(const tile_rows &t, int32_t *first, int32_t *end) {
    attn__mask_rows(&t.mask, t.i0, attn__min32(t.i0 + ROWS, t.s.sq), first, end);
}

/* Does no row of the block see any of the keys [j0, j0 + COLS)? */
DEVICE bool is_skipped(const attn_cuda_args &a, const tile_rows &t, int32_t j0) {
    bool one = a.ranges && a.range_cols % COLS == 0; /* otherwise the tile lies in several ranges; elements tell */
    const attn_flash_range *range = one ? flash_range(a, t.s.b, t.kv_head, j0 / a.range_cols) : NULL;
    int32_t i1 = attn__min32(t.i0 + ROWS, t.s.sq);
    return attn__mask_tile(&t.mask, t.i0, i1, j0, j0 + COLS, range) == ATTN_TILE_SKIP;
}

DEVICE bool is_allowed(const attn_cuda_args &a, const tile_rows &t, int32_t j) {
    if (j >= t.s.sk) return false;
    const int32_t *flash = a.p.flashmask_vectors ? attn__flash_at(&a.p, &a.f, t.s.b, t.kv_head, j) : NULL;
    return attn__mask_allowed(&t.mask, t.i, j, flash);
}

DEVICE bool is_dropped(const attn_cuda_args &a, const tile_rows &t, int32_t j) {
    uint32_t batch_head = (uint32_t)t.s.b * (uint32_t)a.p.heads_q + (uint32_t)t.h;
    return a.philox.threshold && attn__dropped(&a.philox, batch_head, (uint32_t)t.i, (uint32_t)j);
}

DEVICE float load_number(attn_dtype dtype, const void *data, int64_t at, float) {
    return attn__load_float(dtype, data, at);
}
DEVICE double load_number(attn_dtype dtype, const void *data, int64_t at, double) { return attn__load(dtype, data, at); }

#define real float
#include "tile.cuh"
#undef real
#define real double
#include "tile.cuh"
#undef real

#elif defined(real)

/* The row of this warp, zeros when it has none. */
DEVICE void load_q(const attn_cuda_args &a, const tile_rows &t, real *memory) {
    real *q = memory + AT_Q + warp_in_block() * ATTN_MAX_DIM;
    int64_t at = attn__q_offset(&a.p, &a.f.q, &t.s, t.i, t.h);
    __syncwarp(); /* no lane reads the row before this one any more */
    for (int32_t x = lane_index(); x < ATTN_MAX_DIM; x += 32) {
        bool is_there = t.i < t.s.sq && x < a.p.dim_qk;
        q[x] = is_there ? load_number(a.p.dtype, a.f.q.data, at + x, (real)0) : 0;
    }
    __syncwarp();
}

/*
 * Dims [x0, x0 + DIMS) of keys [j0, j0 + COLS) of k or v; zeros past the end of the sequence and of its rows. All warps of the
 * block must call it together.
 */
DEVICE const real *load_piece(const attn_cuda_args &a, const tile_rows &t, const attn_tensor &from, int32_t dim, int32_t j0,
                              int32_t x0, real *memory) {
    real *piece = memory + AT_PIECE;
    int32_t x = x0 + lane_index();
    __syncthreads(); /* no warp reads the piece before this one any more */
    for (int32_t key = warp_in_block(); key < COLS; key += WARPS) {
        real number = 0;
        if (j0 + key < t.s.sk && x < dim) {
            int32_t position = t.s.leftpad + j0 + key;
            number = load_number(a.p.kv_dtype, from.data, cache_offset(a, from, t.s, position, t.kv_head) + x, (real)0);
            number *= (real)page_descale(a, &from == &a.f.k ? a.f.k_descale : a.f.v_descale, t.s, position, t.kv_head);
        }
        piece[key * PITCH + lane_index()] = number;
    }
    __syncthreads();
    return piece;
}

/*
 * Scores of keys [j0, j0 + COLS): a lane gets that of key j0 + lane, -inf where it is not allowed. Bit n of *seen: key j0 + n is
 * allowed. All warps of the block must call it together.
 */
DEVICE real tile_score(const attn_cuda_args &a, const tile_rows &t, int32_t j0, real *memory, unsigned *seen) {
    const real *q = memory + AT_Q + warp_in_block() * ATTN_MAX_DIM;
    real dot = 0;
    for (int32_t x0 = 0; x0 < a.p.dim_qk; x0 += DIMS) {
        const real *piece = load_piece(a, t, a.f.k, a.p.dim_qk, j0, x0, memory) + lane_index() * PITCH;
        real sum = 0; /* of 32 products at a time: that halves the rounding error of a long row */
        for (int32_t x = 0; x < DIMS; x++) sum += q[x0 + x] * piece[x];
        dot += sum;
    }
    int32_t j = j0 + lane_index();
    bool allowed = is_allowed(a, t, j);
    *seen = __ballot_sync(ALL_LANES, allowed);
    return allowed ? score(a, t.s, t.h, t.i, j, (real)t.scale * dot) : (real)-INFINITY;
}

/*
 * Online softmax: returns exp(s - *most), the maximum so far; *sum is this lane's own part. *alpha is the factor for what was
 * added up under the maximum before. NaN leaves the maximum alone and shows in the sum.
 */
DEVICE real softmax_step(real s, real *most, real *sum, real *alpha) {
    real above = warp_max(s);
    *alpha = 1;
    if (above > *most) {
        *alpha = exp(*most - above);
        *most = above;
    }
    real p = s == (real)-INFINITY ? 0 : exp(s - *most);
    *sum = *sum * *alpha + p;
    return p;
}

#endif
