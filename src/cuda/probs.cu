/*
 * Attention probabilities, for those who ask to see them: p before dropout, its sign bit set where it is dropped, 0 where a pair
 * is not allowed or padding. Twice over the keys, first for maximum and sum, then to write; so it needs neither lse, which the
 * caller may not want, nor what the forward kernel has rounded. One warp has one row, four make a block (tile.cuh).
 */
#ifndef real

#include "tile.cuh"

#define real float
#include "probs.cu"
#undef real
#define real double
#include "probs.cu"
#undef real

/* Blocks: [batch][heads_q][ceil(max_q / ROWS)]. */
KERNEL __launch_bounds__(32 * WARPS, 3) probs(const __grid_constant__ attn_cuda_args a) {
    __shared__ double memory[TILE_REALS];
    if (attn__wide_problem(&a.p))
        write_probs(a, memory);
    else
        write_probs(a, (float *)memory);
}

#else

/* What exp(s - most) is to be multiplied with; 0 for a row without keys. */
DEVICE real probs_factor(const attn_cuda_args &a, const tile_rows &t, real most, real sum) {
    real factor = 1;
    if (most == (real)-INFINITY && sum == 0) return 0;
    if (a.p.flags & ATTN_SINK) add_sink(most + log(sum), (real)a.f.sink[t.h], &factor);
    return factor / sum;
}

/* Keys [j0, j0 + COLS) of the row of this warp; a lane has p of one of them. */
DEVICE void write_tile(const attn_cuda_args &a, const tile_rows &t, int32_t j0, unsigned seen, real p) {
    int32_t j = j0 + lane_index();
    if (t.i >= a.p.max_q || j >= a.p.max_kv) return;
    bool allowed = seen >> lane_index() & 1;
    real number = !allowed ? 0 : is_dropped(a, t, j) ? -p : p;
    attn__store(attn__real_dtype(a.p.dtype), a.f.probs.data, attn__matrix_at(&a.f.probs, t.s.b, t.h, t.i, j), number);
}

DEVICE void write_probs(const attn_cuda_args &a, real *memory) {
    int64_t n = block_index();
    int32_t tiles = (a.p.max_q + ROWS - 1) / ROWS;
    if (n >= (int64_t)a.p.batch * a.p.heads_q * tiles) return;
    attn_seq s = sequence(a, (int32_t)(n / tiles / a.p.heads_q));
    tile_rows t = make_rows(a, s, (int32_t)(n / tiles % a.p.heads_q), (int32_t)(n % tiles) * ROWS);
    int32_t first = 0, end = 0;
    if (t.i0 < s.sq) keys_of_rows(t, &first, &end);
    real alpha, most = (real)-INFINITY, sum = 0;
    unsigned seen;
    load_q(a, t, memory);
    for (int32_t j0 = first / COLS * COLS; j0 < end; j0 += COLS)
        if (!is_skipped(a, t, j0)) softmax_step(tile_score(a, t, j0, memory, &seen), &most, &sum, &alpha);
    real factor = probs_factor(a, t, most, warp_sum(sum));
    for (int32_t j0 = 0; j0 < a.p.max_kv; j0 += COLS) {
        real p = 0;
        seen = 0;
        if (j0 < end && j0 + COLS > first && !is_skipped(a, t, j0)) {
            real s = tile_score(a, t, j0, memory, &seen);
            p = factor == 0 || s == (real)-INFINITY ? 0 : exp(s - most) * factor;
        }
        write_tile(a, t, j0, seen, p);
    }
}

#endif
