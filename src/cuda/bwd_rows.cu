/*
 * The small kernels around a backward: what it needs to know of each row before, and what nobody else writes after.
 *
 *   bwd_delta   lse and delta = rowsum(d_o * o) - d_lse of each row, as args.h says (row_stats)
 *   bwd_sink    d_sink: a sink is a key without a value, so its gradient is a sum over rows, of -exp(sink - lse) * delta
 *   bwd_fill    C4: rows of d_q, d_k and d_v that no sequence covers become 0
 */
#include "warp.cuh"

/* ---- delta ---- */

/* Lanes have dims. o and d_o are of one dtype; the sum is in double, and so the same however lanes share it. */
DEVICE double row_delta(const attn_cuda_args &a, const attn_seq &s, int32_t i, int32_t h) {
    int64_t o = attn__q_offset(&a.p, &a.f.o, &s, i, h), d_o = attn__q_offset(&a.p, &a.f.d_o, &s, i, h);
    double sum = 0;
    for (int32_t x = lane_index(); x < a.p.dim_v; x += 32)
        sum += attn__load(a.p.out_dtype, a.f.o.data, o + x) * attn__load(a.p.out_dtype, a.f.d_o.data, d_o + x);
    return warp_sum(sum);
}

/* Warps: as lse, [batch][heads_q][max_q] or [heads_q][total_q]. */
KERNEL bwd_delta(const __grid_constant__ attn_cuda_args a) {
    const bool packed = a.p.flags & ATTN_VARLEN_Q;
    const int64_t each = packed ? a.p.total_q : a.p.max_q, n = warp_index();
    if (n >= (packed ? 1 : a.p.batch) * (int64_t)a.p.heads_q * each) return;
    int64_t i = n % each;
    int32_t h = (int32_t)(n / each % a.p.heads_q), b = (int32_t)(n / each / a.p.heads_q);
    if (packed) b = sequence_from(a.f.cu_q, a.p.batch, i);
    attn_seq s = {};
    if (b >= 0) s = sequence(a, b);
    i -= s.q_row;
    double lse = -INFINITY, delta = 0;
    const attn_dtype real_dtype = attn__real_dtype(a.p.dtype);
    if (i >= 0 && i < s.sq) lse = attn__load(real_dtype, a.f.lse, n);
    if (lse != -INFINITY) { /* a row without keys: its d_o does not count, nor does its d_lse */
        delta = row_delta(a, s, (int32_t)i, h);
        if (a.f.d_lse) delta -= attn__load(real_dtype, a.f.d_lse, n);
    }
    if (a.turns && i >= 0 && i < s.sq) {
        const int64_t to = attn__q_offset(&a.p, &a.f.d_q, &s, (int32_t)i, h);
        for (int32_t x = lane_index(); x < a.p.dim_qk; x += 32) attn__store(a.p.dtype, a.f.d_q.data, to + x, 0);
    }
    if (lane_index() != 0) return;
    attn__store(real_dtype, a.row_stats, 2 * n, lse);
    attn__store(real_dtype, a.row_stats, 2 * n + 1, delta);
}

/* ---- d_sink ---- */

/* What row n of lse adds. */
DEVICE double sink_part(const attn_cuda_args &a, double sink, int64_t n) {
    const attn_dtype real_dtype = attn__real_dtype(a.p.dtype);
    double lse = attn__load(real_dtype, a.row_stats, 2 * n), delta = attn__load(real_dtype, a.row_stats, 2 * n + 1);
    return lse == -INFINITY ? 0 : -exp(sink - lse) * delta;
}

/* Blocks: [heads_q]. Each thread adds its rows up in their order, then pairs of threads do: the same bits every time. */
KERNEL __launch_bounds__(ATTN_SINK_THREADS) bwd_sink(const __grid_constant__ attn_cuda_args a) {
    __shared__ double sums[ATTN_SINK_THREADS];
    const int64_t h = block_index();
    if (h >= a.p.heads_q) return;
    const bool packed = a.p.flags & ATTN_VARLEN_Q;
    const int64_t each = packed ? a.p.total_q : a.p.max_q, rows = packed ? each : a.p.batch * each;
    double sum = 0;
    for (int64_t row = threadIdx.x; row < rows; row += ATTN_SINK_THREADS) {
        int64_t b = packed ? 0 : row / each;
        sum += sink_part(a, a.f.sink[h], (b * a.p.heads_q + h) * each + row - b * each);
    }
    sums[threadIdx.x] = sum;
    for (int32_t step = ATTN_SINK_THREADS / 2; step; step /= 2) {
        __syncthreads();
        if ((int32_t)threadIdx.x < step) sums[threadIdx.x] += sums[threadIdx.x + step];
    }
    if (threadIdx.x == 0) a.f.d_sink[h] = (float)sums[0];
}

/* ---- padding ---- */

/* Zeros for one row of all heads, its first element at `at`. */
DEVICE void clear_row(const attn_tensor &t, attn_dtype dtype, int64_t at, int32_t heads, int32_t dim) {
    if (!t.data) return;
    for (int32_t h = 0; h < heads; h++)
        for (int32_t x = lane_index(); x < dim; x += 32) attn__store(dtype, t.data, at + h * t.stride[2] + x, 0);
}

DEVICE void clear_q(const attn_cuda_args &a, int64_t n) {
    const bool packed = a.p.flags & ATTN_VARLEN_Q;
    int32_t b = packed ? sequence_from(a.f.cu_q, a.p.batch, n) : (int32_t)(n / a.p.max_q);
    int64_t row = packed ? n : n % a.p.max_q;
    attn_seq s = {};
    if (b >= 0) s = sequence(a, b);
    if (b >= 0 && row >= s.q_row && row < s.q_row + s.sq) return;
    clear_row(a.f.d_q, a.p.dtype, (packed ? 0 : b * a.f.d_q.stride[0]) + row * a.f.d_q.stride[1], a.p.heads_q, a.p.dim_qk);
}

DEVICE void clear_kv(const attn_cuda_args &a, int64_t n) {
    const bool packed = a.p.flags & ATTN_VARLEN_KV;
    int32_t b = packed ? sequence_from(a.f.cu_kv, a.p.batch, n) : (int32_t)(n / a.p.max_kv);
    int64_t row = packed ? n : n % a.p.max_kv;
    attn_seq s = {};
    if (b >= 0) s = sequence(a, b);
    if (b >= 0 && row >= s.kv_row + s.leftpad && row < s.kv_row + s.leftpad + s.sk) return;
    const int64_t k_batch = packed ? 0 : b * a.f.d_k.stride[0], v_batch = packed ? 0 : b * a.f.d_v.stride[0];
    clear_row(a.f.d_k, a.p.kv_dtype, k_batch + row * a.f.d_k.stride[1], a.p.heads_kv, a.p.dim_qk);
    clear_row(a.f.d_v, a.p.kv_dtype, v_batch + row * a.f.d_v.stride[1], a.p.heads_kv, a.p.dim_v);
}

/* Warps: rows of q, [batch][max_q] or [total_q], then rows of the keys likewise. */
KERNEL bwd_fill(const __grid_constant__ attn_cuda_args a) {
    const int64_t n = warp_index();
    const int64_t rows = a.p.flags & ATTN_VARLEN_Q ? a.p.total_q : (int64_t)a.p.batch * a.p.max_q;
    const int64_t keys = a.p.flags & ATTN_VARLEN_KV ? a.p.total_kv : (int64_t)a.p.batch * a.p.max_kv;
    if (n < rows)
        clear_q(a, n);
    else if (n - rows < keys)
        clear_kv(a, n - rows);
}
