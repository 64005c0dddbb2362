/*
 * fwd_any: forward for whatever no line of variants.def takes, F64, ATTN_PRECISE and the largest head dims: every feature, every dtype, no tensor
 * cores. One warp has one query row, four make a block (tile.cuh); running maximum and sum per row, the division last.
 * A block of a split sequence has one chunk of keys and all rows of the sequence, four after the other.
 *
 * Barriers: load_piece has two, one before it overwrites the last piece and one after which the new one is complete. All warps of
 * a block walk the same tiles, those without a row too.
 */
#ifndef real

#include "tile.cuh"

#define real float
#include "any.cu"
#undef real
#define real double
#include "any.cu"
#undef real

/* Blocks: [batch][heads_q][slots]. */
KERNEL __launch_bounds__(32 * WARPS, 3) fwd_any(const __grid_constant__ attn_cuda_args a) {
    __shared__ double memory[AT_O + ROWS * ATTN_MAX_DIM];
    if (attn__wide_problem(&a.p))
        forward(a, memory);
    else
        forward(a, (float *)memory);
}

#else

/*
 * o becomes o * alpha + the tile's weights times its values; a lane has the weight of one key. Keys that are not allowed are left
 * out, not multiplied by 0.
 */
DEVICE void add_values(const attn_cuda_args &a, const tile_rows &t, int32_t j0, unsigned seen, real weights, real alpha,
                       real *memory) {
    real *o = memory + AT_O + warp_in_block() * ATTN_MAX_DIM + lane_index();
    for (int32_t x0 = 0; x0 < a.p.dim_v; x0 += DIMS) {
        const real *piece = load_piece(a, t, a.f.v, a.p.dim_v, j0, x0, memory) + lane_index();
        real sum = 0;
        for (int32_t key = 0; key < COLS; key++) {
            real weight = __shfl_sync(ALL_LANES, weights, key);
            if (seen >> key & 1) sum += weight * piece[key * PITCH];
        }
        o[x0] = o[x0] * alpha + sum;
    }
}

/* The row of this warp is done: its partial result for `chunk`, or, with chunk -1, o and lse. */
DEVICE void finish_row(const attn_cuda_args &a, const tile_rows &t, int32_t chunk, real most, real sum, const real *o) {
    bool is_empty = most == (real)-INFINITY && sum == 0; /* C1 */
    real lse = is_empty ? (real)-INFINITY : most + log(sum), sink_factor = 1;
    real factor = (real)value_scale(a, t.s, t.kv_head) / sum;
    attn_dtype dtype = sizeof(real) == sizeof(double) ? ATTN_F64 : ATTN_F32, lse_dtype = dtype;
    void *o_data = a.part_o, *lse_data = a.part_lse;
    int64_t lse_at, o_at;
    if (chunk >= 0) {
        lse_at = part_index(a, t.s, t.i, t.h, chunk);
        o_at = lse_at * a.p.dim_v;
    } else {
        if (a.p.flags & ATTN_SINK) lse = add_sink(lse, (real)a.f.sink[t.h], &sink_factor);
        dtype = a.p.out_dtype;
        lse_dtype = attn__real_dtype(a.p.dtype);
        o_data = a.f.o.data;
        lse_data = a.f.lse;
        lse_at = attn__lse_index(&a.p, &t.s, t.i, t.h);
        o_at = attn__q_offset(&a.p, &a.f.o, &t.s, t.i, t.h);
    }
    for (int32_t x = lane_index(); x < a.p.dim_v; x += 32) {
        real number = o[x] * factor; /* rounded by itself, as fold has it */
        attn__store(dtype, o_data, o_at + x, is_empty ? 0 : number * sink_factor);
    }
    if (lse_data && lane_index() == 0) attn__store(lse_dtype, lse_data, lse_at, lse);
}

/* Rows [i0, i0 + ROWS) against the keys of `chunk`, or, with chunk -1, all keys. */
DEVICE void work_rows(const attn_cuda_args &a, const attn_seq &s, int32_t h, int32_t i0, int32_t chunk, real *memory) {
    tile_rows t = make_rows(a, s, h, i0);
    int32_t first, end;
    keys_of_rows(t, &first, &end);
    if (chunk >= 0) {
        first = attn__max32(first, chunk * ATTN_CUDA_CHUNK);
        end = attn__min32(end, s.sk - chunk * ATTN_CUDA_CHUNK > ATTN_CUDA_CHUNK ? (chunk + 1) * ATTN_CUDA_CHUNK : s.sk);
    }
    real *o = memory + AT_O + warp_in_block() * ATTN_MAX_DIM, most = (real)-INFINITY, sum = 0;
    load_q(a, t, memory);
    for (int32_t x = lane_index(); x < ATTN_MAX_DIM; x += 32) o[x] = 0;
    for (int32_t j0 = first / COLS * COLS; j0 < end; j0 += COLS) {
        if (is_skipped(a, t, j0)) continue;
        unsigned seen;
        real alpha, p = softmax_step(tile_score(a, t, j0, memory, &seen), &most, &sum, &alpha);
        if ((seen >> lane_index() & 1) && is_dropped(a, t, j0 + lane_index())) p = 0;
        add_values(a, t, j0, seen, p, alpha, memory);
    }
    sum = warp_sum(sum);
    if (t.i < s.sq) finish_row(a, t, chunk, most, sum, o);
}

DEVICE void forward(const attn_cuda_args &a, real *memory) {
    int64_t n = block_index();
    if (n >= (int64_t)a.p.batch * a.p.heads_q * a.slots) return;
    int32_t slot = (int32_t)(n % a.slots), h = (int32_t)(n / a.slots % a.p.heads_q);
    attn_seq s = sequence(a, (int32_t)(n / a.slots / a.p.heads_q));
    if (slot < a.row_tiles && !(a.p.flags & ATTN_VARLEN_Q)) { /* the padding among the rows of this slot */
        int32_t i = slot * ROWS + warp_in_block();
        if (i >= s.sq && i < a.p.max_q)
            write_empty(a, attn__q_offset(&a.p, &a.f.o, &s, i, h), attn__lse_index(&a.p, &s, i, h));
    }
    if (a.chunks == ATTN_SHORT_ELSEWHERE && s.sq <= ATTN_CUDA_SPLIT_ROWS) return;
    if (!is_split(a, s)) {
        if (slot < a.row_tiles && slot * ROWS < s.sq) work_rows(a, s, h, slot * ROWS, -1, memory);
    } else if (slot < a.chunks && slot * (int64_t)ATTN_CUDA_CHUNK < s.sk) {
        for (int32_t i0 = 0; i0 < s.sq; i0 += ROWS) work_rows(a, s, h, i0, slot, memory);
    }
}

#endif
