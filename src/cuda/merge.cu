/*
 * Partial results of the same rows over disjoint keys become one: fold for the chunks of a split run, merge for attn_merge.
 * Lanes have dims. Both add in the order of the parts and in double: that costs nothing beside reading them, and a single part
 * with keys comes out as it went in, with weight exp(0) = 1 and divided by 1.
 */
#include "score.cuh"
#include "warp.cuh"

/* ---- chunks ---- */

DEVICE double load_real(bool wide, const void *data, int64_t at) {
    return wide ? ((const double *)data)[at] : ((const float *)data)[at];
}

/* The largest lse of `count` chunks; -inf when no chunk has keys. */
DEVICE double largest_lse(const attn_cuda_args &a, int64_t at, int32_t count) {
    bool wide = attn__wide_problem(&a.p);
    double most = -INFINITY;
    for (int32_t c = lane_index(); c < count; c += 32) most = fmax(most, load_real(wide, a.part_lse, at + c));
    return warp_max(most);
}

/* Adds up dim x of the chunks, unnormalised; *sum is that of their weights. Each lane works out the weight of one chunk in 32. */
DEVICE double fold_chunks(const attn_cuda_args &a, int64_t at, int32_t count, double most, int32_t x, double *sum) {
    bool wide = attn__wide_problem(&a.p);
    double o = 0;
    *sum = 0;
    for (int32_t c0 = 0; c0 < count; c0 += 32) {
        int32_t mine = c0 + lane_index();
        double lse = mine < count ? load_real(wide, a.part_lse, at + mine) : -INFINITY;
        double weights = lse == -INFINITY ? 0 : exp(lse - most);
        unsigned some = __ballot_sync(ALL_LANES, lse != -INFINITY);
        for (; some; some &= some - 1) { /* in ascending order; a chunk without keys has not written its o */
            int32_t c = __ffs((int)some) - 1;
            double weight = __shfl_sync(ALL_LANES, weights, c);
            *sum += weight;
            if (x < a.p.dim_v) o += weight * load_real(wide, a.part_o, (at + c0 + c) * a.p.dim_v + x);
        }
    }
    return o;
}

/*
 * Warps: [batch][heads_q][part_rows][ceil(dim_v / 32)]. Chunks past the last key were not written and are not read. o and lse
 * without the sink are rounded to the real of the problem, as a forward kernel has them, before the sink comes in.
 */
KERNEL fold(const __grid_constant__ attn_cuda_args a) {
    int64_t n = warp_index();
    int32_t slices = (a.p.dim_v + 31) / 32;
    if (n >= (int64_t)a.p.batch * a.p.heads_q * a.part_rows * slices) return;
    int32_t x = (int32_t)(n % slices) * 32 + lane_index(), i = (int32_t)(n / slices % a.part_rows);
    int32_t h = (int32_t)(n / slices / a.part_rows % a.p.heads_q);
    attn_seq s = sequence(a, (int32_t)(n / slices / a.part_rows / a.p.heads_q));
    if (!is_split(a, s) || i >= s.sq) return;
    int64_t at = part_index(a, s, i, h, 0);
    int32_t count = s.sk / ATTN_CUDA_CHUNK + (s.sk % ATTN_CUDA_CHUNK != 0);
    double sum, factor = 1, most = largest_lse(a, at, count), o = fold_chunks(a, at, count, most, x, &sum);
    double lse = sum == 0 ? -INFINITY : most + log(sum);
    o = sum == 0 ? 0 : o / sum;
    if (attn__wide_problem(&a.p)) {
        if (a.p.flags & ATTN_SINK) lse = add_sink(lse, (double)a.f.sink[h], &factor);
        o *= factor;
    } else {
        float factor_float = 1, lse_float = (float)lse;
        if (a.p.flags & ATTN_SINK) lse = add_sink(lse_float, a.f.sink[h], &factor_float);
        o = (float)o * factor_float;
    }
    if (x < a.p.dim_v) attn__store(a.p.out_dtype, a.f.o.data, attn__q_offset(&a.p, &a.f.o, &s, i, h) + x, o);
    if (a.f.lse && x == 0) attn__store(attn__real_dtype(a.p.dtype), a.f.lse, attn__lse_index(&a.p, &s, i, h), lse);
}

/* ---- attn_merge ---- */

/*
 * The weights of the parts of this launch, exp(lse_p - *most), go to shared memory; *most, and *sum, which is under the maximum
 * before, are brought up to date. Returns the factor for what was added up before.
 */
DEVICE double weigh_parts(const attn_cuda_merge &m, int64_t at, double *weights, double *most, double *sum) {
    attn_dtype real_dtype = attn__real_dtype(m.dtype);
    double before = *most, factor = 1;
    for (int32_t part = 0; part < m.parts; part++) {
        double lse = attn__load(real_dtype, m.lse_parts[part], at);
        if (lse > *most || lse != lse) *most = lse;
    }
    if (*sum != 0 && before != *most) factor = exp(before - *most);
    *sum *= factor;
    for (int32_t part = lane_index(); part < m.parts; part += 32) {
        double lse = attn__load(real_dtype, m.lse_parts[part], at);
        weights[part] = lse == -INFINITY ? -1 : exp(lse - *most); /* below zero: nothing in it, not to be read */
    }
    __syncwarp();
    for (int32_t part = 0; part < m.parts; part++)
        if (!(weights[part] < 0)) *sum += weights[part];
    return factor;
}

/* Warps: [batch][heads][rows], the order of lse. */
KERNEL merge(const __grid_constant__ attn_cuda_merge m) {
    __shared__ double memory[WARPS][ATTN_MERGE_PARTS];
    double *weights = memory[warp_in_block()], most = -INFINITY, sum = 0;
    int64_t n = warp_index();
    if (n >= (int64_t)m.batch * m.heads * m.rows) return;
    int32_t row = (int32_t)(n % m.rows), h = (int32_t)(n / m.rows % m.heads), b = (int32_t)(n / m.rows / m.heads);
    double *state = m.state + n * (m.dim + 2);
    if (!m.is_first) {
        most = state[m.dim];
        sum = state[m.dim + 1];
    }
    double factor = weigh_parts(m, n, weights, &most, &sum);
    int64_t to = b * m.o.stride[0] + row * m.o.stride[1] + h * m.o.stride[2];
    for (int32_t x = lane_index(); x < m.dim; x += 32) {
        double o = m.is_first ? 0 : state[x] * factor;
        for (int32_t part = 0; part < m.parts; part++) {
            const attn_tensor &t = m.o_parts[part];
            int64_t from = b * t.stride[0] + row * t.stride[1] + h * t.stride[2];
            if (!(weights[part] < 0)) o += weights[part] * attn__load(m.dtype, t.data, from + x);
        }
        if (m.is_last)
            attn__store(m.out_dtype, m.o.data, to + x, sum == 0 ? 0 : o / sum);
        else
            state[x] = o;
    }
    if (lane_index() != 0) return; /* weigh_parts has a barrier behind the reading of state */
    if (!m.is_last) {
        state[m.dim] = most;
        state[m.dim + 1] = sum;
    } else if (m.lse) {
        attn__store(attn__real_dtype(m.dtype), m.lse, n, sum == 0 ? -INFINITY : most + log(sum));
    }
}
