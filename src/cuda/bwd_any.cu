/*
 * bwd_any: backward for whatever no line of variants.def takes, F64, ATTN_PRECISE and the largest head dims: every feature, every dtype, no tensor
 * cores. The two halves of it are one scheme, with rows and keys in each other's place:
 *
 *   bwd_any     d_k, d_v   a block has four keys, one to a warp, and walks over the rows of all heads of its group
 *   bwd_any_q   d_q        a block has four rows, and walks over their keys
 *
 *     p = exp(s - lse)    d_p = d_o . v    d_s = p (d_p - delta)    d_v += p d_o    d_k += d_s slope q    d_q += d_s slope k
 *
 * The others come 32 at a time, one to a lane, through shared memory in pieces of 32 dims. Sums go up in the order of rows or keys
 * and belong to one warp: the same bits every time. A pair that is not allowed is left out of them, not multiplied by 0 (C2).
 *
 *   bwd_bias    d_bias     a block has four rows and 32 keys of d_bias, of each the sum over the dims along which it is broadcast
 *
 * Barriers: load_piece has two, one before it overwrites the last piece and one after which the new one is complete. All warps of
 * a block walk the same tiles, those without a row or key too.
 */
#ifndef real

#include "score.cuh"
#include "warp.cuh"

enum {
    OWN = ATTN_ANY_ROWS,    /* rows or keys of a block */
    OTHERS = ATTN_ANY_COLS, /* keys or rows that they meet at a time, one for each lane */
    DIMS = 32,              /* of a piece */
    PITCH = DIMS + 1,       /* distance of rows in a piece: lanes that read one dim of 32 rows meet 32 banks */
    /* Shared memory of a block, in reals. What is [OWN] belongs to its warp alone, the piece to all. */
    AT_QK = 0,                              /* [OWN][ATTN_MAX_DIM]: q of the rows, or k of the keys */
    AT_V = AT_QK + OWN * ATTN_MAX_DIM,      /* [OWN][ATTN_MAX_DIM]: d_o, or v */
    AT_D_QK = AT_V + OWN * ATTN_MAX_DIM,    /* [OWN][ATTN_MAX_DIM]: d_q, or d_k; sums */
    AT_D_V = AT_D_QK + OWN * ATTN_MAX_DIM,  /* [OWN][ATTN_MAX_DIM]: d_v */
    AT_PIECE = AT_D_V + OWN * ATTN_MAX_DIM, /* [OTHERS][PITCH] */
    REALS = AT_PIECE + OTHERS * PITCH
};
static_assert((int)REALS == (int)ATTN_BWD_ANY_REALS, "args.h says otherwise");

/* One sequence and head. */
typedef struct place {
    attn_seq s;
    attn_mask mask;
    int32_t h, kv_head;
    double scale; /* of dot products */
    double keep;  /* 1 / (1 - dropout) */
} place;

DEVICE place place_of(const attn_cuda_args &a, const attn_seq &s, int32_t h) {
    place t;
    t.s = s;
    t.mask = attn__seq_mask(&a.p, &s);
    t.h = h;
    t.kv_head = h / (a.p.heads_q / a.p.heads_kv);
    t.scale = a.p.scale;
    t.keep = 1 / (1 - a.p.dropout);
    return t;
}

DEVICE bool is_allowed(const attn_cuda_args &a, const place &t, int32_t i, int32_t j) {
    if (i >= t.s.sq || j >= t.s.sk) return false;
    const int32_t *flash = a.p.flashmask_vectors ? attn__flash_at(&a.p, &a.f, t.s.b, t.kv_head, j) : NULL;
    return attn__mask_allowed(&t.mask, i, j, flash);
}

DEVICE bool is_dropped(const attn_cuda_args &a, const place &t, int32_t i, int32_t j) {
    uint32_t batch_head = (uint32_t)t.s.b * (uint32_t)a.p.heads_q + (uint32_t)t.h;
    return a.philox.threshold && attn__dropped(&a.philox, batch_head, (uint32_t)i, (uint32_t)j);
}

/* Does no row of [i0, i1) see any of the keys [j0, j1), which lie in one range of FlashMask? */
DEVICE bool is_skipped(const attn_cuda_args &a, const place &t, int32_t i0, int32_t i1, int32_t j0, int32_t j1) {
    const attn_flash_range *range = a.ranges ? flash_range(a, t.s.b, t.kv_head, j0 / a.range_cols) : NULL;
    return attn__mask_tile(&t.mask, i0, attn__min32(i1, t.s.sq), j0, j1, range) == ATTN_TILE_SKIP;
}

DEVICE float load_number(attn_dtype dtype, const void *data, int64_t at, float) {
    return attn__load_float(dtype, data, at);
}
DEVICE double load_number(attn_dtype dtype, const void *data, int64_t at, double) { return attn__load(dtype, data, at); }

/* What is read: of rows q and d_o, of keys k and v. */
typedef enum tensor_of { OF_Q, OF_D_O, OF_K, OF_V } tensor_of;

DEVICE int32_t dim_of(const attn_cuda_args &a, tensor_of which) {
    return which == OF_Q || which == OF_K ? a.p.dim_qk : a.p.dim_v;
}

#define real float
#include "bwd_any.cu"
#undef real
#define real double
#include "bwd_any.cu"
#undef real

/* Blocks: [batch][heads_kv][ceil(max_kv / OWN)]. */
KERNEL __launch_bounds__(32 * WARPS, 3) bwd_any(const __grid_constant__ attn_cuda_args a) {
    extern __shared__ __align__(128) uint8_t shared[];
    if (attn__wide_problem(&a.p))
        work_keys(a, (double *)shared);
    else
        work_keys(a, (float *)shared);
}

/* Blocks: [batch][heads_q][ceil(max_q / OWN)]. */
KERNEL __launch_bounds__(32 * WARPS, 3) bwd_any_q(const __grid_constant__ attn_cuda_args a) {
    extern __shared__ __align__(128) uint8_t shared[];
    if (attn__wide_problem(&a.p))
        work_rows(a, (double *)shared);
    else
        work_rows(a, (float *)shared);
}

/* Blocks: [batch or 1][heads_q or 1][ceil(max_q / OWN) or 1][ceil(max_kv / OTHERS) or 1], 1 along dims that are summed. */
KERNEL __launch_bounds__(32 * WARPS, 3) bwd_bias(const __grid_constant__ attn_cuda_args a) {
    extern __shared__ __align__(128) uint8_t shared[];
    if (attn__wide_problem(&a.p))
        work_bias(a, (double *)shared);
    else
        work_bias(a, (float *)shared);
}

#else

/* Element x of row or key n; zero past the end of the sequence and of its rows. */
DEVICE real number_of(const attn_cuda_args &a, const place &t, tensor_of which, int32_t n, int32_t x, real) {
    const bool keys = which == OF_K || which == OF_V;
    if (n >= (keys ? t.s.sk : t.s.sq) || x >= dim_of(a, which)) return 0;
    const attn_tensor &from = which == OF_Q ? a.f.q : which == OF_D_O ? a.f.d_o : which == OF_K ? a.f.k : a.f.v;
    const attn_dtype dtype = keys ? a.p.kv_dtype : which == OF_Q ? a.p.dtype : a.p.out_dtype;
    const int64_t at = keys ? attn__kv_offset(&a.p, &a.f, &from, &t.s, t.s.leftpad + n, t.kv_head)
                            : attn__q_offset(&a.p, &from, &t.s, n, t.h);
    return load_number(dtype, from.data, at + x, (real)0);
}

/* The row or key of this warp, zeros when it has none. */
DEVICE void load_own(const attn_cuda_args &a, const place &t, tensor_of which, int32_t n, real *memory) {
    real *own = memory + (which == OF_Q || which == OF_K ? AT_QK : AT_V) + warp_in_block() * ATTN_MAX_DIM;
    __syncwarp(); /* no lane reads the one before this any more */
    for (int32_t x = lane_index(); x < ATTN_MAX_DIM; x += 32) own[x] = number_of(a, t, which, n, x, (real)0);
    __syncwarp();
}

/* Dims [x0, x0 + DIMS) of rows or keys [first, first + OTHERS). All warps of the block must call it together. */
DEVICE const real *load_piece(const attn_cuda_args &a, const place &t, tensor_of which, int32_t first, int32_t x0,
                              real *memory) {
    real *piece = memory + AT_PIECE;
    __syncthreads(); /* no warp reads the piece before this one any more */
    for (int32_t n = warp_in_block(); n < OTHERS; n += WARPS)
        piece[n * PITCH + lane_index()] = number_of(a, t, which, first + n, x0 + lane_index(), (real)0);
    __syncthreads();
    return piece;
}

/* The product of the warp's own row or key with that of the lane. */
DEVICE real dot(const attn_cuda_args &a, const place &t, tensor_of which, int32_t first, real *memory) {
    const real *own = memory + (which == OF_Q || which == OF_K ? AT_QK : AT_V) + warp_in_block() * ATTN_MAX_DIM;
    real result = 0;
    for (int32_t x0 = 0; x0 < dim_of(a, which); x0 += DIMS) {
        const real *piece = load_piece(a, t, which, first, x0, memory) + lane_index() * PITCH;
        real sum = 0; /* of 32 products at a time: that halves the rounding error of a long row */
        for (int32_t x = 0; x < DIMS; x++) sum += own[x0 + x] * piece[x];
        result += sum;
    }
    return result;
}

/* Adds the others, each by the weight that its lane has, to the warp's sums; those that are not seen are left out. */
DEVICE void add_others(const attn_cuda_args &a, const place &t, tensor_of which, int32_t first, unsigned seen, real weights,
                       int32_t at_sums, real *memory) {
    real *sums = memory + at_sums + warp_in_block() * ATTN_MAX_DIM + lane_index();
    for (int32_t x0 = 0; x0 < dim_of(a, which); x0 += DIMS) {
        const real *piece = load_piece(a, t, which, first, x0, memory) + lane_index();
        real sum = 0;
        for (int32_t n = 0; n < OTHERS; n++) {
            real weight = __shfl_sync(ALL_LANES, weights, n);
            if (seen >> n & 1) sum += weight * piece[n * PITCH];
        }
        sums[x0] += sum;
    }
}

DEVICE void clear_sums(real *memory) {
    for (int32_t x = lane_index(); x < ATTN_MAX_DIM; x += 32)
        memory[AT_D_QK + warp_in_block() * ATTN_MAX_DIM + x] = memory[AT_D_V + warp_in_block() * ATTN_MAX_DIM + x] = 0;
}

/* lse and delta of row i; a row past the end is one without keys. */
DEVICE void row_stats(const attn_cuda_args &a, const place &t, int32_t i, real *lse, real *delta) {
    *lse = (real)-INFINITY;
    *delta = 0;
    if (i >= t.s.sq) return;
    const int64_t row = attn__lse_index(&a.p, &t.s, i, t.h);
    *lse = (real)attn__load(attn__real_dtype(a.p.dtype), a.f.lse, row);
    *delta = ((const real *)a.delta)[row];
}

/*
 * The pair of row i and key j, from the products of q with k and of d_o with v: what d_o is multiplied with in d_v, and the
 * gradients of the score and of the first product, its scale aside. False when the row does not see the key.
 */
DEVICE bool see_pair(const attn_cuda_args &a, const place &t, int32_t i, int32_t j, real lse, real delta, real qk, real d_p,
                     real *weight, real *d_score, real *d_qk) {
    *weight = *d_score = *d_qk = 0;
    if (lse == (real)-INFINITY || !is_allowed(a, t, i, j)) return false;
    real slope, p = exp(score(a, t.s, t.h, i, j, (real)t.scale * qk, &slope) - lse), keep = (real)t.keep;
    if (is_dropped(a, t, i, j)) keep = d_p = 0;
    *weight = keep * p;
    *d_score = p * (keep * d_p - delta);
    *d_qk = *d_score * slope;
    return true;
}

/* The sums of this warp, to row or key n of a gradient. */
DEVICE void store_sums(const attn_tensor &to, attn_dtype dtype, int64_t at, int32_t dim, double factor, const real *sums) {
    if (!to.data) return;
    for (int32_t x = lane_index(); x < dim; x += 32)
        attn__store(dtype, to.data, at + x, factor * (double)sums[warp_in_block() * ATTN_MAX_DIM + x]);
}

/* The keys of the block against 32 rows of a head. */
DEVICE void add_rows(const attn_cuda_args &a, const place &t, int32_t i0, int32_t j, real *memory) {
    const int32_t i = i0 + lane_index();
    real lse, delta, weight, d_score, d_qk;
    row_stats(a, t, i, &lse, &delta);
    real qk = dot(a, t, OF_Q, i0, memory), d_p = a.f.d_k.data ? dot(a, t, OF_D_O, i0, memory) : 0;
    bool sees = see_pair(a, t, i, j, lse, delta, qk, d_p, &weight, &d_score, &d_qk);
    unsigned seen = __ballot_sync(ALL_LANES, sees);
    if (a.f.d_v.data) add_others(a, t, OF_D_O, i0, seen, weight, AT_D_V, memory);
    if (a.f.d_k.data) add_others(a, t, OF_Q, i0, seen, d_qk, AT_D_QK, memory);
}

DEVICE void work_keys(const attn_cuda_args &a, real *memory) {
    const int64_t n = block_index(), tiles = ((int64_t)a.p.max_kv + OWN - 1) / OWN;
    if (n >= a.p.batch * (int64_t)a.p.heads_kv * tiles) return;
    const int32_t j0 = (int32_t)(n % tiles) * OWN, j = j0 + warp_in_block(), group = a.p.heads_q / a.p.heads_kv;
    const int32_t kv_head = (int32_t)(n / tiles % a.p.heads_kv);
    place t = place_of(a, sequence(a, (int32_t)(n / tiles / a.p.heads_kv)), kv_head * group);
    if (j0 >= t.s.sk) return; /* bwd_fill has written what is padding */
    const int32_t j1 = attn__min32(j0 + OWN, t.s.sk);
    int32_t first, end;
    attn__mask_cols(&t.mask, j0, j1, &first, &end);
    load_own(a, t, OF_K, j, memory);
    load_own(a, t, OF_V, j, memory);
    clear_sums(memory);
    for (int32_t h = 0; h < group; h++) {
        t.h = kv_head * group + h;
        for (int32_t i0 = first / OTHERS * OTHERS; i0 < end; i0 += OTHERS)
            if (!is_skipped(a, t, i0, i0 + OTHERS, j0, j1)) add_rows(a, t, i0, j, memory);
    }
    if (j >= t.s.sk) return;
    store_sums(a.f.d_k, a.p.kv_dtype, attn__kv_offset(&a.p, &a.f, &a.f.d_k, &t.s, t.s.leftpad + j, kv_head), a.p.dim_qk,
               t.scale, memory + AT_D_QK);
    store_sums(a.f.d_v, a.p.kv_dtype, attn__kv_offset(&a.p, &a.f, &a.f.d_v, &t.s, t.s.leftpad + j, kv_head), a.p.dim_v, 1,
               memory + AT_D_V);
}

DEVICE void work_rows(const attn_cuda_args &a, real *memory) {
    const int64_t n = block_index(), tiles = ((int64_t)a.p.max_q + OWN - 1) / OWN;
    if (n >= a.p.batch * (int64_t)a.p.heads_q * tiles) return;
    const int32_t i0 = (int32_t)(n % tiles) * OWN, i = i0 + warp_in_block();
    const place t = place_of(a, sequence(a, (int32_t)(n / tiles / a.p.heads_q)), (int32_t)(n / tiles % a.p.heads_q));
    if (i0 >= t.s.sq) return;
    int32_t first, end;
    attn__mask_rows(&t.mask, i0, attn__min32(i0 + OWN, t.s.sq), &first, &end);
    real lse, delta, weight, d_score, d_qk;
    row_stats(a, t, i, &lse, &delta);
    load_own(a, t, OF_Q, i, memory);
    load_own(a, t, OF_D_O, i, memory);
    clear_sums(memory);
    for (int32_t j0 = first / OTHERS * OTHERS; j0 < end; j0 += OTHERS) {
        if (is_skipped(a, t, i0, i0 + OWN, j0, j0 + OTHERS)) continue;
        real qk = dot(a, t, OF_K, j0, memory), d_p = dot(a, t, OF_V, j0, memory);
        bool sees = see_pair(a, t, i, j0 + lane_index(), lse, delta, qk, d_p, &weight, &d_score, &d_qk);
        add_others(a, t, OF_K, j0, __ballot_sync(ALL_LANES, sees), d_qk, AT_D_QK, memory);
    }
    if (i < t.s.sq)
        store_sums(a.f.d_q, a.p.dtype, attn__q_offset(&a.p, &a.f.d_q, &t.s, i, t.h), a.p.dim_qk, t.scale, memory + AT_D_QK);
}

/* ---- d_bias ---- */

/* What the rows [i0, i0 + OWN) and the keys from j0 to j1 of one head add to the element that a lane has. */
DEVICE double bias_of_rows(const attn_cuda_args &a, const place &t, int32_t i0, int32_t j0, int32_t j1, real *memory) {
    const int32_t i = i0 + warp_in_block();
    real lse, delta, weight, d_score, d_qk;
    double sum = 0;
    bool loaded = false;
    row_stats(a, t, i, &lse, &delta);
    for (; j0 < attn__min32(j1, t.s.sk); j0 += OTHERS) {
        if (is_skipped(a, t, i0, i0 + OWN, j0, j0 + OTHERS)) continue;
        if (!loaded) {
            load_own(a, t, OF_Q, i, memory);
            load_own(a, t, OF_D_O, i, memory);
            loaded = true;
        }
        real qk = dot(a, t, OF_K, j0, memory), d_p = dot(a, t, OF_V, j0, memory);
        if (see_pair(a, t, i, j0 + lane_index(), lse, delta, qk, d_p, &weight, &d_score, &d_qk)) sum += (double)d_score;
    }
    return sum;
}

/* One sequence and head: all its rows and keys where they are summed. */
DEVICE double bias_of_head(const attn_cuda_args &a, int32_t b, int32_t h, int32_t i0, int32_t j0, real *memory) {
    const place t = place_of(a, sequence(a, b), h);
    const bool all_rows = a.f.d_bias.stride[2] == 0, all_keys = a.f.d_bias.stride[3] == 0;
    const int32_t i1 = attn__min32(all_rows ? t.s.sq : i0 + OWN, t.s.sq);
    double sum = 0;
    for (; i0 < i1; i0 += OWN) sum += bias_of_rows(a, t, i0, j0, all_keys ? t.s.sk : j0 + OTHERS, memory);
    return sum;
}

DEVICE void work_bias(const attn_cuda_args &a, real *memory) {
    const int64_t *stride = a.f.d_bias.stride;
    const int64_t rows = stride[2] ? ((int64_t)a.p.max_q + OWN - 1) / OWN : 1;
    const int64_t keys = stride[3] ? ((int64_t)a.p.max_kv + OTHERS - 1) / OTHERS : 1;
    const int64_t heads = stride[1] ? a.p.heads_q : 1, batches = stride[0] ? a.p.batch : 1, n = block_index();
    if (n >= batches * heads * rows * keys) return;
    const int32_t j0 = (int32_t)(n % keys) * OTHERS, i0 = (int32_t)(n / keys % rows) * OWN;
    const int32_t h0 = (int32_t)(n / keys / rows % heads), b0 = (int32_t)(n / keys / rows / heads);
    double sum = 0, *sums = (double *)(memory + AT_PIECE);
    for (int32_t b = b0; b < (stride[0] ? b0 + 1 : a.p.batch); b++)
        for (int32_t h = h0; h < (stride[1] ? h0 + 1 : a.p.heads_q); h++) sum += bias_of_head(a, b, h, i0, j0, memory);
    if (!stride[3]) sum = warp_sum(sum);
    if (!stride[2]) { /* the rows of the four warps */
        __syncthreads();
        sums[threadIdx.x] = sum;
        __syncthreads();
        sum = 0;
        for (int32_t warp = 0; warp < WARPS; warp++) sum += sums[warp * 32 + lane_index()];
    }
    const int32_t i = i0 + warp_in_block(), j = j0 + lane_index();
    if (stride[2] ? i >= a.p.max_q : warp_in_block() > 0) return;
    if (stride[3] ? j >= a.p.max_kv : lane_index() > 0) return;
    attn__store(a.p.bias_dtype, a.f.d_bias.data, attn__matrix_at(&a.f.d_bias, b0, h0, i, j), sum);
}

#endif
