/*
 * Partial results of the same rows over disjoint keys become one: fold for the chunks of a split run, merge for attn_merge.
 * One warp has one row of one head, lanes have its dims. Both add in the order of the parts and in double: that costs nothing
 * beside reading them, and a single part with keys comes out as it went in, with weight exp(0) = 1 and divided by 1.
 */
#include "score.cuh"
#include "warp.cuh"

enum { LANE_DIMS = (ATTN_CUDA_MAX_DIM + 31) / 32 }; /* numbers of a row that a lane has */

/* ---- chunks ---- */

/* The largest lse of `count` chunks; -inf when no chunk has keys. */
DEVICE double largest_lse(attn_dtype real_dtype, const void *lse, int64_t at, int32_t count) {
    double most = -INFINITY;
    for (int32_t c = lane_index(); c < count; c += 32) most = fmax(most, attn__load(real_dtype, lse, at + c));
    return warp_max(most);
}

/* Adds up the chunks of a row: o[n] of dim lane + 32 n, unnormalised; returns the sum of weights. */
DEVICE double fold_chunks(const attn_cuda_args &a, int64_t at, int32_t count, double most, double *o) {
    attn_dtype real_dtype = attn__real_dtype(a.p.dtype);
    double sum = 0;
    for (int32_t c0 = 0; c0 < count; c0 += 32) {
        int32_t mine = c0 + lane_index();
        double lse = mine < count ? attn__load(real_dtype, a.part_lse, at + mine) : -INFINITY;
        double weights = lse == -INFINITY ? 0 : exp(lse - most); /* a lane has the weight of one chunk */
        unsigned some = __ballot_sync(ALL_LANES, lse != -INFINITY);
        for (; some; some &= some - 1) {
            int32_t c = __ffs((int)some) - 1;
            double weight = __shfl_sync(ALL_LANES, weights, c);
            int64_t from = (at + c0 + c) * a.p.dim_v;
            sum += weight;
#pragma unroll
            for (int n = 0; n < LANE_DIMS; n++) {
                int32_t x = lane_index() + 32 * n;
                if (x < a.p.dim_v) o[n] += weight * attn__load(real_dtype, a.part_o, from + x);
            }
        }
    }
    return sum;
}

/* o / sum and lse without the sink, rounded to the real of the problem as the forward kernels have them, then with it. */
DEVICE void write_folded(const attn_cuda_args &a, const attn_seq &s, int32_t i, int32_t h, double most, double sum,
                         const double *o) {
    bool wide = attn__wide(a.p.dtype), has_sink = (a.p.flags & ATTN_SINK) != 0;
    double lse = most + log(sum), factor = 1;
    float lse_float = (float)lse, factor_float = 1;
    if (has_sink && wide) lse = add_sink(lse, (double)a.f.sink[h], &factor);
    if (has_sink && !wide) lse_float = add_sink(lse_float, a.f.sink[h], &factor_float);
    int64_t to = attn__q_offset(&a.p, &a.f.o, &s, i, h), lse_at = attn__lse_index(&a.p, &s, i, h);
#pragma unroll
    for (int n = 0; n < LANE_DIMS; n++) {
        int32_t x = lane_index() + 32 * n;
        double value = wide ? o[n] / sum * factor : (float)(o[n] / sum) * factor_float;
        if (x < a.p.dim_v) attn__store(a.p.out_dtype, a.f.o.data, to + x, value);
    }
    if (!a.f.lse || lane_index() != 0) return;
    attn__store(attn__real_dtype(a.p.dtype), a.f.lse, lse_at, wide ? lse : lse_float);
}

/* Warps: [batch][heads_q][part_rows]. Chunks past the last key were not written and are not read. */
KERNEL fold(const __grid_constant__ attn_cuda_args a) {
    int64_t n = warp_index();
    if (n >= (int64_t)a.p.batch * a.p.heads_q * a.part_rows) return;
    int32_t i = (int32_t)(n % a.part_rows), h = (int32_t)(n / a.part_rows % a.p.heads_q);
    attn_seq s = sequence(a, (int32_t)(n / a.part_rows / a.p.heads_q));
    if (!is_split(a, s) || i >= s.sq) return;
    int64_t at = part_index(a, s, i, h, 0);
    int32_t count = (int32_t)(((int64_t)s.sk + ATTN_CUDA_CHUNK - 1) / ATTN_CUDA_CHUNK);
    double o[LANE_DIMS] = {0}, most = largest_lse(attn__real_dtype(a.p.dtype), a.part_lse, at, count);
    double sum = fold_chunks(a, at, count, most, o);
    if (sum == 0)
        write_empty(a, attn__q_offset(&a.p, &a.f.o, &s, i, h), attn__lse_index(&a.p, &s, i, h));
    else
        write_folded(a, s, i, h, most, sum, o);
}

/* ---- attn_merge ---- */

/* The state of a row between launches: dim numbers of o, unnormalised, then the largest lse and the sum of weights. */
DEVICE double *state_of(const attn_cuda_merge &m, int64_t row) { return m.state + row * (m.dim + 2); }

DEVICE void load_state(const attn_cuda_merge &m, int64_t row, double *o, double *most, double *sum) {
    const double *state = state_of(m, row);
    *most = state[m.dim];
    *sum = state[m.dim + 1];
#pragma unroll
    for (int n = 0; n < LANE_DIMS; n++)
        if (lane_index() + 32 * n < m.dim) o[n] = state[lane_index() + 32 * n];
}

DEVICE void store_state(const attn_cuda_merge &m, int64_t row, const double *o, double most, double sum) {
    double *state = state_of(m, row);
    __syncwarp(); /* every lane has read what lane 0 is about to write */
    if (lane_index() == 0) {
        state[m.dim] = most;
        state[m.dim + 1] = sum;
    }
#pragma unroll
    for (int n = 0; n < LANE_DIMS; n++)
        if (lane_index() + 32 * n < m.dim) state[lane_index() + 32 * n] = o[n];
}

/* Takes the parts of this launch in. A part weighs exp(lse_p - most); one with nothing in it is not read. */
DEVICE void merge_parts(const attn_cuda_merge &m, int64_t at, int32_t b, int32_t row, int32_t h, double *o, double *most,
                        double *sum) {
    attn_dtype real_dtype = attn__real_dtype(m.dtype);
    double before = *most;
    for (int32_t part = 0; part < m.parts; part++) {
        double lse = attn__load(real_dtype, m.lse_parts[part], at);
        if (lse > *most || lse != lse) *most = lse;
    }
    if (*sum != 0 && before != *most) {
        double factor = exp(before - *most);
        *sum *= factor;
#pragma unroll
        for (int n = 0; n < LANE_DIMS; n++) o[n] *= factor;
    }
    for (int32_t part = 0; part < m.parts; part++) {
        double lse = attn__load(real_dtype, m.lse_parts[part], at);
        if (lse == -INFINITY) continue;
        const attn_tensor &t = m.o_parts[part];
        int64_t from = b * t.stride[0] + row * t.stride[1] + h * t.stride[2];
        double weight = exp(lse - *most);
        *sum += weight;
#pragma unroll
        for (int n = 0; n < LANE_DIMS; n++) {
            int32_t x = lane_index() + 32 * n;
            if (x < m.dim) o[n] += weight * attn__load(m.dtype, t.data, from + x);
        }
    }
}

/* Warps: [batch][heads][rows], the order of lse. */
KERNEL merge(const __grid_constant__ attn_cuda_merge m) {
    int64_t n = warp_index();
    if (n >= (int64_t)m.batch * m.heads * m.rows) return;
    int32_t row = (int32_t)(n % m.rows), h = (int32_t)(n / m.rows % m.heads), b = (int32_t)(n / m.rows / m.heads);
    double o[LANE_DIMS] = {0}, most = -INFINITY, sum = 0;
    if (!m.is_first) load_state(m, n, o, &most, &sum);
    merge_parts(m, n, b, row, h, o, &most, &sum);
    if (!m.is_last) {
        store_state(m, n, o, most, sum);
        return;
    }
    int64_t to = b * m.o.stride[0] + row * m.o.stride[1] + h * m.o.stride[2];
#pragma unroll
    for (int k = 0; k < LANE_DIMS; k++) {
        int32_t x = lane_index() + 32 * k;
        if (x < m.dim) attn__store(m.out_dtype, m.o.data, to + x, sum == 0 ? 0 : o[k] / sum);
    }
    if (m.lse && lane_index() == 0)
        attn__store(attn__real_dtype(m.dtype), m.lse, n, sum == 0 ? -INFINITY : most + log(sum));
}
