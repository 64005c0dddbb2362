/*
 * The small kernels around a backward: what it needs to know of each row before, and what nobody else writes after.
 *
 *   bwd_delta   delta = rowsum(d_o * o) - d_lse of each row, as args.h says
 *   bwd_fit     how large d_o, v and delta are, for Hopper's float16
 *   bwd_sink    d_sink: a sink is a key without a value, so its gradient is a sum over rows, of -exp(sink - lse) * delta
 *   bwd_fill    C4: rows of d_q, d_k and d_v that no sequence covers become 0
 *   bwd_cast    d_q of the sums that Hopper's kernels have left, where they do not write it themselves
 */
#include "cast.cuh"
#include "fit.cuh"
#include "warp.cuh"

/* ---- delta ---- */

/* As attn__from_f16, without branches. */
DEVICE float float_of_f16(uint32_t x) {
    const float size = attn__float((x & 0x7fff) << 13) * attn__float((127 + 112) << 23);
    return attn__float(attn__bits(size) | (x & 0x8000) << 16 | ((x & 0x7c00) == 0x7c00 ? 0x7f800000 : 0));
}

/* Eight 16-bit numbers as they are loaded: number x of them. */
DEVICE float number_of(const uint4 &piece, int x, bool bf16) {
    const uint32_t word = x < 2 ? piece.x : x < 4 ? piece.y : x < 6 ? piece.z : piece.w;
    if (bf16) return attn__float(x % 2 ? word & 0xffff0000 : word << 16);
    return float_of_f16(word >> x % 2 * 16 & 0xffff);
}

/* Where a lane stands: number `lane` of `lanes` that share a row, eight dims each, or eight at a time. */
typedef struct stand {
    int32_t lane, lanes;
} stand;
DEVICE stand stand_of(const attn_cuda_args &a) {
    int32_t lanes = 1;
    while (lanes < 32 && lanes * 8 < a.p.dim_v) lanes *= 2;
    return {lane_index() & (lanes - 1), lanes};
}

/* Of 16-bit numbers o and d_o the sum is taken in float: S and D of the same rows are no better. Not where all of it is to be in double. */
DEVICE bool is_halves(const attn_cuda_args &a) {
    return (a.p.out_dtype == ATTN_BF16 || a.p.out_dtype == ATTN_F16) && !attn__wide_problem(&a.p);
}

/* sum, and the products of a piece. */
DEVICE float add_piece(float sum, const uint4 &one, const uint4 &two, bool bf16) {
#pragma unroll
    for (int n = 0; n < 8; n++) sum = __fmaf_rn(number_of(one, n, bf16), number_of(two, n, bf16), sum);
    return sum;
}

/* Is a row one piece of eight for each lane, wherever it is? */
DEVICE bool has_pieces(const attn_cuda_args &a, const stand &at) {
    bool aligned = is_halves(a) && a.p.dim_v % 8 == 0 && a.p.dim_v <= at.lanes * 8 &&
                   ((uint64_t)a.f.o.data | (uint64_t)a.f.d_o.data) % 16 == 0;
    for (int n = 0; n < 3; n++) aligned = aligned && (a.f.o.stride[n] | a.f.d_o.stride[n]) % 8 == 0;
    return aligned;
}

/* The lane's part of the sum: the same whether rows are aligned or not. */
DEVICE double delta_part(const attn_cuda_args &a, const attn_seq &s, int32_t i, int32_t h, const stand &at) {
    const int64_t o = attn__q_offset(&a.p, &a.f.o, &s, i, h), d_o = attn__q_offset(&a.p, &a.f.d_o, &s, i, h);
    const bool halves = is_halves(a);
    double sum = 0;
    for (int32_t x = at.lane * 8; x < a.p.dim_v; x += at.lanes * 8)
        for (int32_t n = x; n < attn__min32(x + 8, a.p.dim_v); n++) {
            const double one = attn__load(a.p.out_dtype, a.f.o.data, o + n),
                         two = attn__load(a.p.out_dtype, a.f.d_o.data, d_o + n);
            sum = halves ? __fmaf_rn((float)one, (float)two, (float)sum) : sum + one * two;
        }
    return sum;
}

/* Of all lanes that share a row. */
DEVICE double delta_sum(const attn_cuda_args &a, double part, const stand &at) {
    for (int step = at.lanes / 2; step; step /= 2) {
        const double other = __shfl_xor_sync(ALL_LANES, part, step);
        part = is_halves(a) ? (float)part + (float)other : part + other;
    }
    return part;
}

/* In one pass, rows that no block comes by: d_q is zero. */
DEVICE void clear_unseen(const attn_cuda_args &a, const attn_seq &s, int32_t i, int32_t h, const stand &at) {
    if (!a.ranges && !(a.p.flags & (ATTN_CAUSAL | ATTN_WINDOW)) && s.sk > 0) return;
    const attn_mask mask = attn__seq_mask(&a.p, &s);
    int32_t first, end;
    attn__mask_row(&mask, i, &first, &end);
    if (first < end && !a.ranges) return;
    const int64_t to = attn__q_offset(&a.p, &a.f.d_q, &s, i, h);
    for (int32_t x = at.lane; x < a.p.dim_qk; x += at.lanes) attn__store(a.p.dtype, a.f.d_q.data, to + x, 0);
}

DEVICE attn_dtype delta_dtype(const attn_cuda_args &a) { return attn__wide_problem(&a.p) ? ATTN_F64 : ATTN_F32; }

/* In one pass: do packed sequences overlap? All warps look, at 32 sequences at a time. */
DEVICE void find_overlap(const attn_cuda_args &a, int64_t warp, int64_t warps) {
    for (int64_t b = warp * 32 + lane_index(); b < a.p.batch; b += warps * 32)
        if (a.f.cu_q[b] > a.f.cu_q[b + 1]) *a.overlap = 1;
}

/*
 * Row n of lse, which is row `row` of its head: all lanes of the warp come here, each for the row that it has a share in. part: of
 * the sum, if it is known (`has_part`).
 */
DEVICE void write_delta(const attn_cuda_args &a, const attn_seq &s, int64_t n, int64_t row, int32_t h, bool exists,
                        const stand &at, bool has_part, double part) {
    const int64_t i = row - s.q_row;
    const bool there = exists && i >= 0 && i < s.sq;
    const attn_dtype real_dtype = attn__real_dtype(a.p.dtype);
    const double lse = there ? attn__load(real_dtype, a.f.lse, n) : -INFINITY;
    double delta = 0;
    if (lse != -INFINITY) delta = has_part ? part : delta_part(a, s, (int32_t)i, h, at); /* without keys nothing counts */
    delta = delta_sum(a, delta, at);
    if (lse != -INFINITY && a.f.d_lse) delta -= attn__load(real_dtype, a.f.d_lse, n);
    if (a.turns && there) clear_unseen(a, s, (int32_t)i, h, at);
    if (!exists || at.lane != 0) return;
    attn__store(delta_dtype(a), a.delta, n, there ? delta : -0.0);
}

/* The sequence of a row of lse; of packed ones, and not empty ones before them. */
DEVICE attn_seq sequence_of(const attn_cuda_args &a, int64_t row) {
    const int32_t b = row < a.p.total_q ? sequence_from(a.f.cu_q, a.p.batch, row) : -1;
    return b >= 0 ? sequence(a, b) : attn_seq{};
}

/*
 * Four rows, of which all lanes have a part: the sum of one of them, (lane / (lanes / 4)) % 4, in the order of delta_sum; of its lanes each has it.
 * Two steps halve the rows as well as the parts.
 */
DEVICE float sum_of_four(const float x[4], int32_t lanes) {
    const bool upper = lane_index() & lanes / 2, odd = lane_index() & lanes / 4;
    const float one = (upper ? x[2] : x[0]) + __shfl_xor_sync(ALL_LANES, upper ? x[0] : x[2], lanes / 2);
    const float two = (upper ? x[3] : x[1]) + __shfl_xor_sync(ALL_LANES, upper ? x[1] : x[3], lanes / 2);
    float sum = (odd ? two : one) + __shfl_xor_sync(ALL_LANES, odd ? one : two, lanes / 4);
    for (int step = lanes / 8; step; step /= 2) sum += __shfl_xor_sync(ALL_LANES, sum, step);
    return sum;
}

/*
 * ATTN_DELTA_ROWS rows of a head, from their first one on, where each lane has a piece of a row: four rows of a lane are under way at a time. In the
 * end each lane has a row's sum; *row: which one.
 */
DEVICE float delta_of_rows(const attn_cuda_args &a, const uint8_t *o, const uint8_t *d_o, int32_t count, const stand &at,
                           bool bf16, int32_t *row) {
    enum { AHEAD = 4 };
    static_assert(ATTN_DELTA_ROWS == 32, "a row for each lane");
    const int32_t step = 32 / at.lanes, first = lane_index() / at.lanes, turn = lane_index() & (at.lanes / 4 - 1);
    const int64_t o_step = a.f.o.stride[1] * 2 * step, d_o_step = a.f.d_o.stride[1] * 2 * step;
    const bool has = at.lane * 8 < a.p.dim_v;
    float mine = 0;
    o += first * a.f.o.stride[1] * 2 + at.lane * 16;
    d_o += first * a.f.d_o.stride[1] * 2 + at.lane * 16;
#pragma unroll 1
    for (int32_t n = 0; n < at.lanes / 4; n++) {
        uint4 x[AHEAD], y[AHEAD];
        float part[AHEAD];
#pragma unroll
        for (int k = 0; k < AHEAD; k++, o += o_step, d_o += d_o_step) {
            const bool there = has && first + (n * AHEAD + k) * step < count;
            x[k] = there ? *(const uint4 *)o : make_uint4(0, 0, 0, 0);
            y[k] = there ? *(const uint4 *)d_o : make_uint4(0, 0, 0, 0);
        }
#pragma unroll
        for (int k = 0; k < AHEAD; k++) part[k] = add_piece(0, x[k], y[k], bf16);
        const float sum = sum_of_four(part, at.lanes);
        if (n == turn) mine = sum;
    }
    *row = first + (turn * AHEAD + at.lane / (at.lanes / 4)) * step;
    return mine;
}

/* Warps: ATTN_DELTA_ROWS rows of lse each, [batch][heads_q][tiles of max_q] or [heads_q][tiles of total_q]. */
KERNEL __launch_bounds__(32 * WARPS, 8) bwd_delta(const __grid_constant__ attn_cuda_args a) {
    const bool packed = a.p.flags & ATTN_VARLEN_Q;
    const int64_t each = packed ? a.p.total_q : a.p.max_q, heads = (packed ? 1 : a.p.batch) * (int64_t)a.p.heads_q;
    const int64_t tiles = (each + ATTN_DELTA_ROWS - 1) / ATTN_DELTA_ROWS, warp = warp_index();
    if (warp >= heads * tiles) return;
    if (a.overlap && packed) find_overlap(a, warp, heads * tiles);
    const int64_t head = warp / tiles, first = (warp - head * tiles) * ATTN_DELTA_ROWS;
    const int32_t h = (int32_t)(head % a.p.heads_q), b = packed ? 0 : (int32_t)(head / a.p.heads_q);
    const stand at = stand_of(a);
    attn_seq s = {};
    if (!packed) s = sequence(a, b);
    if (has_pieces(a, at) && at.lanes >= 4) { /* as most are */
        const int64_t o = b * a.f.o.stride[0] + first * a.f.o.stride[1] + h * a.f.o.stride[2];
        const int64_t d_o = b * a.f.d_o.stride[0] + first * a.f.d_o.stride[1] + h * a.f.d_o.stride[2];
        const uint8_t *const of_o = (const uint8_t *)a.f.o.data + o * 2, *const of_d_o =
                                                                             (const uint8_t *)a.f.d_o.data + d_o * 2;
        const int32_t count = each - first < ATTN_DELTA_ROWS ? (int32_t)(each - first) : ATTN_DELTA_ROWS;
        int32_t mine;
        const float part = a.p.out_dtype == ATTN_BF16 ? delta_of_rows(a, of_o, of_d_o, count, at, true, &mine)
                                                      : delta_of_rows(a, of_o, of_d_o, count, at, false, &mine);
        const int64_t row = first + mine;
        if (packed) s = sequence_of(a, row);
        write_delta(a, s, head * each + row, row, h, row < each, {0, 1}, true, part);
        return;
    }
    for (int32_t r = lane_index() / at.lanes; r < ATTN_DELTA_ROWS; r += 32 / at.lanes) {
        const int64_t row = first + r;
        if (packed) s = sequence_of(a, row);
        write_delta(a, s, head * each + row, row, h, row < each, at, false, 0);
    }
}

/* ---- sizes ---- */

/* The largest of the lane's part of a row, as the bits of its size; pieces with numbers that are not finite do not count. */
DEVICE uint32_t largest_part(const attn_cuda_args &a, const attn_tensor &t, int64_t row, const stand &at) {
    const uint16_t *from = (const uint16_t *)t.data + row;
    uint32_t most = 0;
    for (int32_t x = at.lane * 8; x < a.p.dim_v; x += at.lanes * 8) {
        uint32_t part = 0;
        if (x + 8 <= a.p.dim_v && (uint64_t)(from + x) % 16 == 0) {
            const uint4 four = *(const uint4 *)(from + x);
            const uint32_t ones = 0x7fff7fff;
            part = __vmaxu2(__vmaxu2(four.x & ones, four.y & ones), __vmaxu2(four.z & ones, four.w & ones));
            part = (uint32_t)attn__max32((int32_t)(part & 0xffff), (int32_t)(part >> 16));
        } else {
            for (int32_t n = x; n < attn__min32(x + 8, a.p.dim_v); n++)
                part = (uint32_t)attn__max32((int32_t)part, from[n] & 0x7fff);
        }
        if (part < 0x7c00 && part > most) most = part;
    }
    return most;
}

/* Maximum over the lanes into *to. Most warps find there what is enough. */
DEVICE void raise_to(uint32_t *to, uint32_t x) {
    const uint32_t most = (uint32_t)__reduce_max_sync(ALL_LANES, (int32_t)x);
    if (lane_index() == 0 && most > *(volatile uint32_t *)to) atomicMax(to, most);
}

/* Does any row see the key? */
DEVICE bool is_seen(const attn_cuda_args &a, const attn_seq &s, const attn_mask &mask, int32_t kv_head, int32_t key) {
    int32_t row, end;
    attn__mask_cols(&mask, key, key + 1, &row, &end);
    end = attn__min32(end, s.sq);
    if (a.p.flashmask_vectors) {
        const attn_flash flash = attn__flash_load(&mask, attn__flash_at(&a.p, &a.f, s.b, kv_head, key));
        for (int n = 0; n < 4; n++) /* past one interval, past the other, and again */
            if (row >= flash.v[n % 2 * 2] && row < flash.v[n % 2 * 2 + 1]) row = flash.v[n % 2 * 2 + 1];
    }
    return row < end;
}

/* Warps: ATTN_DELTA_ROWS rows of a sequence and head, [batch][heads_q][tiles of max_q], then keys likewise. Of what is 16 bits wide. */
KERNEL bwd_fit(const __grid_constant__ attn_cuda_args a) {
    const int64_t tiles = (a.p.max_q + ATTN_DELTA_ROWS - 1) / ATTN_DELTA_ROWS, all = a.p.batch * a.p.heads_q * tiles;
    const int64_t key_tiles = (a.p.max_kv + ATTN_DELTA_ROWS - 1) / ATTN_DELTA_ROWS, warp = warp_index();
    const bool keys = warp >= all;
    const int64_t n = keys ? warp - all : warp, each = keys ? key_tiles : tiles;
    const int32_t heads = keys ? a.p.heads_kv : a.p.heads_q;
    if (each == 0 || n >= a.p.batch * heads * each) return;
    const int32_t h = (int32_t)(n / each % heads), b = (int32_t)(n / each / heads),
                  first = (int32_t)(n % each) * ATTN_DELTA_ROWS;
    const attn_seq s = sequence(a, b);
    const attn_mask mask = attn__seq_mask(&a.p, &s);
    const int32_t kv_head = keys ? h : h / (a.p.heads_q / a.p.heads_kv), count = keys ? s.sk : s.sq;
    const stand at = stand_of(a);
    uint32_t most = 0, delta = 0;
    for (int32_t i = first + lane_index() / at.lanes; i < attn__min32(first + ATTN_DELTA_ROWS, count); i += 32 / at.lanes) {
        uint32_t part = 0;
        if (keys) {
            if (is_seen(a, s, mask, h, i))
                part = largest_part(a, a.f.v, attn__kv_offset(&a.p, &a.f, &a.f.v, &s, s.leftpad + i, h), at);
        } else {
            const int64_t row = attn__lse_index(&a.p, &s, i, h);
            const uint32_t size = attn__bits(((const float *)a.delta)[row]) & 0x7fffffff;
            if (((const float *)a.f.lse)[row] == -INFINITY) continue;
            part = largest_part(a, a.f.d_o, attn__q_offset(&a.p, &a.f.d_o, &s, i, h), at);
            if (size < 0x7f800000 && size > delta) delta = size;
        }
        if (part > most) most = part;
    }
    uint32_t *to = a.fits + ((int64_t)b * a.p.heads_kv + kv_head) * ATTN_FITS;
    raise_to(to + keys, most);
    if (!keys) raise_to(to + 2, delta);
}

/* ---- d_sink ---- */

/* What row n of lse adds. Where no sequence has a row, delta is -0 and lse could be anything. */
DEVICE double sink_part(const attn_cuda_args &a, double sink, int64_t n) {
    const double delta = attn__load(delta_dtype(a), a.delta, n), lse = attn__load(attn__real_dtype(a.p.dtype), a.f.lse, n);
    if (lse == -INFINITY || (delta == 0 && copysign(1.0, delta) < 0)) return 0;
    return -exp(sink - lse) * delta;
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

/* ---- d_q of Hopper's backward ---- */

DEVICE uint32_t two_halves(uint32_t low, uint32_t high, float scale, bool bf16) {
    const float x = __uint_as_float(low) * scale, y = __uint_as_float(high) * scale;
    return bf16 ? attn__to_bf16(x) | (uint32_t)attn__to_bf16(y) << 16 : attn__to_f16(x) | (uint32_t)attn__to_f16(y) << 16;
}

/* Blocks: [batch][row_tiles][heads_q]. Four times 8 columns at a time: a quad has 32 columns of a row then, each lane eight of them. */
KERNEL __launch_bounds__(ATTN_CAST_THREADS) bwd_cast(const __grid_constant__ attn_cuda_args a) {
    const int64_t block = block_index();
    const int32_t thread = threadIdx.x, columns = attn__d_q_columns(&a.p);
    if (block >= (int64_t)a.p.batch * a.row_tiles * a.p.heads_q) return;
    const int32_t h = (int32_t)(block % a.p.heads_q), n = (int32_t)(block / a.p.heads_q % a.row_tiles);
    const attn_seq s = sequence(a, (int32_t)(block / a.p.heads_q / a.row_tiles));
    const int32_t first = n * ATTN_D_Q_ROWS, i = first + thread / 32 * 16 + thread / 4 % 8;
    if (first >= s.sq) return;
    const int32_t rows = (int32_t)attn__d_q_rows(attn__min32(s.sq - first, ATTN_D_Q_ROWS));
    const uint4 *from = (const uint4 *)d_q_sums(a, s, first, h) + thread;
    const float scale = (float)a.p.scale / fit_of(a, s.b, h / (a.p.heads_q / a.p.heads_kv));
    const attn_mask mask = attn__seq_mask(&a.p, &s);
    const bool bf16 = a.p.dtype == ATTN_BF16;
    uint16_t *const to = (uint16_t *)a.f.d_q.data + attn__q_offset(&a.p, &a.f.d_q, &s, i, h);
    bool seen[2]; /* rows that see nothing are zero, whatever is there */
    for (int32_t half = 0; half < 2; half++) {
        int32_t key, end;
        attn__mask_row(&mask, i + half * 8, &key, &end);
        seen[half] = key < end && i + half * 8 < s.sq &&
                     ((const float *)a.f.lse)[attn__lse_index(&a.p, &s, i + half * 8, h)] != -INFINITY;
    }
    for (int32_t c = 0; c < columns; c += 32) {
        uint4 x[4];
        uint32_t low[4], high[4];
#pragma unroll
        for (int k = 0; k < 4; k++, from += 2 * rows)
            x[k] = (seen[0] || seen[1]) && c + k * 8 < columns ? *from : make_uint4(0, 0, 0, 0);
#pragma unroll
        for (int k = 0; k < 4; k++) {
            low[k] = seen[0] ? two_halves(x[k].x, x[k].y, scale, bf16) : 0;
            high[k] = seen[1] ? two_halves(x[k].z, x[k].w, scale, bf16) : 0;
        }
        transpose_quad(low);
        transpose_quad(high);
        const int32_t column = c + thread % 4 * 8;
        if (i < s.sq) store_piece(to, column, a.p.dim_qk, low);
        if (i + 8 < s.sq) store_piece(to + 8 * a.f.d_q.stride[1], column, a.p.dim_qk, high);
    }
}
