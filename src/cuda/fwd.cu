/*
 * Forward attention with mma.sync, for every NVIDIA GPU since Ampere. One line of variants.def is one build of this file.
 *
 * A block computes bm query rows of one head; a warp has 16 or 32 of them to itself, so that rows meet only inside a quad of
 * lanes. Tiles of bn keys are walked from the last to the first (a causal mask has its partial tiles there, so they come
 * first, and the rest are full). Per tile:
 *
 *     wait for K(n)            barrier 1: K(n) is there for all warps, and nobody reads V of the tile before any more
 *     fetch V(n)               arrives under the product below
 *     S = Q K(n)^T             scores; scaled, capped, biased, masked where the tile is partial
 *     wait for V(n)            barrier 2: V(n) is there for all warps, and nobody reads K(n) any more
 *     fetch K(n - 1)           arrives under what follows
 *     P = exp2(S - m)          online softmax in base 2; m, l and O follow where a maximum moved
 *     O += P V(n)
 *
 * With eager = 2 K and V of the next tile are fetched at barrier 1 into a second pair of buffers, and there is no barrier 2. The
 * division by l comes at the end. Fragments follow the layouts of the PTX manual: lane = 4 g + t holds of a 16x8
 * accumulator the rows g, g + 8 and the columns 2t, 2t + 1. Float32 multiplies three times in TF32: with x = hi + lo,
 * a b = hi hi + hi lo + lo hi.
 */
#include "fwd.cuh"

#include <float.h>

/* ---- S = Q K^T ---- */

/* In float32, hi of the numbers stays in x. */
DEVICE void split_tf32(uint32_t x[4], uint32_t lo[4]) {
#pragma unroll
    for (int n = 0; n < 4; n++) {
        uint32_t hi = cvt_rna_tf32(__uint_as_float(x[n]));
        lo[n] = cvt_rna_tf32(__fsub_rn(__uint_as_float(x[n]), __uint_as_float(hi)));
        x[n] = hi;
    }
}

/*
 * The tensor core adds with truncation. Over the many steps of float32 that would add up to a few 1e-5, so sums run over a few
 * steps only and are then added in the ordinary way; 16-bit numbers do not notice.
 */
enum { SUM_STEPS = 4 };

/* c0, c1 += a b for the two 8-column tiles of a fragment b of 16 columns. */
DEVICE void multiply(float c0[4], float c1[4], uint32_t a[4], uint32_t b[4]) {
    if (WIDE) {
        uint32_t a_hi[4] = {a[0], a[1], a[2], a[3]}, b_hi[4] = {b[0], b[1], b[2], b[3]}, a_lo[4], b_lo[4];
        split_tf32(a_hi, a_lo);
        split_tf32(b_hi, b_lo);
        mma_m16n8k8_tf32(c0, a_lo, b_hi[0], b_hi[1]);
        mma_m16n8k8_tf32(c1, a_lo, b_hi[2], b_hi[3]);
        mma_m16n8k8_tf32(c0, a_hi, b_lo[0], b_lo[1]);
        mma_m16n8k8_tf32(c1, a_hi, b_lo[2], b_lo[3]);
        mma_m16n8k8_tf32(c0, a_hi, b_hi[0], b_hi[1]);
        mma_m16n8k8_tf32(c1, a_hi, b_hi[2], b_hi[3]);
    } else if (BF16) {
        mma_m16n8k16_bf16(c0, a, b[0], b[1]);
        mma_m16n8k16_bf16(c1, a, b[2], b[3]);
    } else {
        mma_m16n8k16_f16(c0, a, b[0], b[1]);
        mma_m16n8k16_f16(c1, a, b[2], b[3]);
    }
}

/* Q fragment of step kk: the 32 bytes from there on, of the warp's rows. */
DEVICE void load_q_step(uint32_t q[MT][4], uint32_t shared_q, int warp, int lane, int kk) {
    const uint32_t piece = shared_at(shared_q, warp * MT * 16 + (lane & 15), lane >> 4, QK_CHUNKS);
#pragma unroll
    for (int mt = 0; mt < MT; mt++) ldmatrix_x4(q[mt], shared_step(piece, kk, QK_CHUNKS) + mt * 16 * QK_CHUNKS * 16);
}

/* Fragments come in a stream: step by step of 32 bytes, in each 16 keys at a time. */
DEVICE void load_k_fragment(uint32_t k[4], uint32_t shared_k, int lane, int n) {
    int kk = n / (BN / 16), jj = n % (BN / 16);
    const uint32_t piece = shared_at(shared_k, (lane & 7) + (lane >> 4) * 8, lane >> 3 & 1, QK_CHUNKS);
    ldmatrix_x4(k, shared_step(piece, kk, QK_CHUNKS) + jj * 16 * QK_CHUNKS * 16);
}

DEVICE void product_qk(float s[MT][NT][4], uint32_t q_kept[Q_KEPT][MT][4], uint32_t shared_q, uint32_t shared_k, int warp,
                       int lane) {
    enum { COUNT = QK_STEPS * (BN / 16), SLOTS = KF * (1 + TWICE), Q_SLOTS = QF + (QF == 0) };
    uint32_t k[SLOTS][4], q[Q_SLOTS][MT][4];
    float sum[MT][NT][4], (*to)[NT][4] = WIDE ? sum : s;
    EACH_SCORE(mt, nt, e) s[mt][nt][e] = sum[mt][nt][e] = 0;
    if (TWICE) {
#pragma unroll
        for (int n = 0; n < KF; n++) load_k_fragment(k[n], shared_k, lane, n);
    }
#pragma unroll
    for (int n = 0; n < COUNT; n++) {
        int kk = n / (BN / 16), jj = n % (BN / 16);
        if (QF && jj == 0 && kk % (QF ? QF : 1) == 0) {
#pragma unroll
            for (int x = 0; x < QF; x++)
                if (kk + x < QK_STEPS) load_q_step(q[(kk + x) % Q_SLOTS], shared_q, warp, lane, kk + x);
        }
        if (n % KF == 0) {
#pragma unroll
            for (int x = TWICE * KF; x < (1 + TWICE) * KF; x++)
                if (n + x < COUNT) load_k_fragment(k[(n + x) % SLOTS], shared_k, lane, n + x);
        }
#pragma unroll
        for (int mt = 0; mt < MT; mt++)
            multiply(to[mt][2 * jj], to[mt][2 * jj + 1], QF ? q[kk % Q_SLOTS][mt] : q_kept[kk % Q_KEPT][mt], k[n % SLOTS]);
        if (WIDE && jj == BN / 16 - 1 && (kk % SUM_STEPS == SUM_STEPS - 1 || kk == QK_STEPS - 1)) {
            EACH_SCORE(mt, nt, e) {
                s[mt][nt][e] += sum[mt][nt][e];
                sum[mt][nt][e] = 0;
            }
        }
    }
}

/*
 * In float32 an infinity times a number whose lo is 0 is NaN. Where a score has become NaN the product of the hi alone tells
 * whether it is one. Rare, so slow.
 */
DEVICE void repair_scores(float s[MT][NT][4], uint32_t shared_q, uint32_t shared_k, int warp, int lane) {
    bool is_nan = false;
    EACH_SCORE(mt, nt, e) is_nan |= s[mt][nt][e] != s[mt][nt][e];
    if (!__any_sync(~0u, is_nan)) return;
#pragma unroll
    for (int jj = 0; jj < BN / 16; jj++) {
        float c[MT][2][4] = {};
#pragma unroll 1
        for (int kk = 0; kk < QK_STEPS; kk++) {
            uint32_t q[MT][4], k[4], lo[4];
            load_q_step(q, shared_q, warp, lane, kk);
            load_k_fragment(k, shared_k, lane, kk * (BN / 16) + jj);
            split_tf32(k, lo);
#pragma unroll
            for (int mt = 0; mt < MT; mt++) {
                split_tf32(q[mt], lo);
                mma_m16n8k8_tf32(c[mt][0], q[mt], k[0], k[1]);
                mma_m16n8k8_tf32(c[mt][1], q[mt], k[2], k[3]);
            }
        }
#pragma unroll
        for (int mt = 0; mt < MT; mt++)
#pragma unroll
            for (int e = 0; e < 8; e++) {
                float *score = &s[mt][2 * jj + e / 4][e % 4];
                if (*score != *score) *score = c[mt][e / 4][e % 4];
            }
    }
}

/* ---- softmax and O += P V ---- */

/* V fragment of 16 dims for the keys of step ks: 16 keys, or 8 in float32. */
DEVICE void load_v_fragment(uint32_t v[4], uint32_t shared_v, int lane, int n) {
    int ks = n / (DV / 16), dd = n % (DV / 16);
    if (!WIDE) {
        const uint32_t piece = shared_at(shared_v, lane & 15, lane >> 4, V_CHUNKS);
        ldmatrix_x4_trans(v, shared_step(piece, dd, V_CHUNKS) + ks * 16 * V_CHUNKS * 16);
        return;
    }
    /* lane 4g + t takes column g of the rows 2t, 2t + 1: the columns that it holds of P */
    int g = lane >> 2, t = lane & 3;
#pragma unroll
    for (int x = 0; x < 4; x++) {
        int row = ks * 8 + 2 * t + (x & 1), column = dd * 16 + (x >> 1) * 8 + g;
        v[x] = ld_shared_b32(shared_at(shared_v, row, column / 4, V_CHUNKS) + column % 4 * 4);
    }
}

/* p = exp2(scale * s - m) of step ks, added to l, as the left operand of the product. */
DEVICE void exponentials(uint32_t p[4], float s[NT][4], float scale, const float m[2], float l[2], int ks) {
#pragma unroll
    for (int half = 0; half < (WIDE ? 1 : 2); half++) {
        float y[4];
#pragma unroll
        for (int e = 0; e < 4; e++) {
            y[e] = ex2_approx(__fmaf_rn(s[WIDE ? ks : 2 * ks + half][e], scale, -m[e >> 1]));
            l[e >> 1] += y[e];
        }
        if (WIDE) { /* columns 2t, 2t + 1 stand for k = t, t + 4 */
#pragma unroll
            for (int e = 0; e < 4; e++) p[(e >> 1) + (e & 1) * 2] = __float_as_uint(y[e]);
        } else {
            p[2 * half] = pack(y[0], y[1]);
            p[2 * half + 1] = pack(y[2], y[3]);
        }
    }
}

enum { V_SLOTS = VF * (1 + TWICE) };

/* With double-buffering, the first fragments of V. */
DEVICE void begin_pv(uint32_t v[V_SLOTS][4], uint32_t shared_v, int lane) {
#pragma unroll
    for (int n = 0; n < VF * TWICE; n++) load_v_fragment(v[n], shared_v, lane, n);
}

DEVICE void product_pv(float o[MT][DT][4], uint32_t p[PV_STEPS][MT][4], uint32_t v[V_SLOTS][4], uint32_t shared_v,
                       int lane) {
    enum { EACH = DV / 16, COUNT = PV_STEPS * EACH };
#pragma unroll
    for (int n = 0; n < COUNT; n++) {
        int ks = n / EACH, dd = n % EACH;
        if (n % VF == 0) {
#pragma unroll
            for (int x = TWICE * VF; x < (1 + TWICE) * VF; x++)
                if (n + x < COUNT) load_v_fragment(v[(n + x) % V_SLOTS], shared_v, lane, n + x);
        }
#pragma unroll
        for (int mt = 0; mt < MT; mt++) multiply(o[mt][2 * dd], o[mt][2 * dd + 1], p[ks][mt], v[n % V_SLOTS]);
    }
}

/* The same in float32: column by column, so that few sums are open at a time. */
DEVICE void product_pv_wide(float o[MT][DT][4], uint32_t p[PV_STEPS][MT][4], uint32_t shared_v, int lane) {
#pragma unroll
    for (int dd = 0; dd < DV / 16; dd++) {
        float sum[MT][2][4] = {};
#pragma unroll
        for (int ks = 0; ks < PV_STEPS; ks++) {
            uint32_t v[4];
            load_v_fragment(v, shared_v, lane, ks * (DV / 16) + dd);
#pragma unroll
            for (int mt = 0; mt < MT; mt++) multiply(sum[mt][0], sum[mt][1], p[ks][mt], v);
            if (ks % SUM_STEPS != SUM_STEPS - 1 && ks != PV_STEPS - 1) continue;
#pragma unroll
            for (int mt = 0; mt < MT; mt++)
#pragma unroll
                for (int e = 0; e < 8; e++) {
                    o[mt][2 * dd + e / 4][e % 4] += sum[mt][e / 4][e % 4];
                    sum[mt][e / 4][e % 4] = 0;
                }
        }
    }
}

/*
 * Online softmax, base 2: P is 2^(scale * (s - m)) with m the largest score of the row so far, and O and l follow when it grows.
 * That becomes rare as tiles go by, so a warp first asks whether any of its rows has grown at all, each lane looking at its
 * own columns only.
 *
 * scale * s - scale * m is one multiply-add. The rounding of scale * m is then a factor common to the row, which the division by
 * l takes out again; but where scores are so large that this rounding is too, s - m is taken first, exactly.
 */
DEVICE void raise_maximum(float o[MT][DT][4], float most[MT][2], float m[MT][2], float l[MT][2], float scale,
                          bool is_first) {
    float factor[MT][2];
#pragma unroll
    for (int mt = 0; mt < MT; mt++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float x = most[mt][half], before = m[mt][half];
            x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
            x = fmaxf(x, __shfl_xor_sync(~0u, x, 2));
            m[mt][half] = fmaxf(before, x);
            /* In float32 as it enters the exponentials, rounded; 16 bits do not notice, and this way nothing overflows. */
            float less = __fmul_rn(before, scale), more = __fmul_rn(m[mt][half], scale);
            bool exactly = !WIDE || fmaxf(fabsf(less), fabsf(more)) > HUGE_SCORE;
            float grown = exactly ? __fmul_rn(before - m[mt][half], scale) : less - more;
            factor[mt][half] = ex2_approx(grown); /* 1 where nothing grew */
            l[mt][half] *= factor[mt][half];
        }
    if (FIRST && is_first) return;
#pragma unroll
    for (int mt = 0; mt < MT; mt++)
#pragma unroll
        for (int dt = 0; dt < DT; dt++)
#pragma unroll
            for (int e = 0; e < 4; e++) o[mt][dt][e] *= factor[mt][e >> 1];
}

DEVICE void softmax(uint32_t p[PV_STEPS][MT][4], float o[MT][DT][4], float s[MT][NT][4], float m[MT][2], float l[MT][2],
                    const attn_cuda_args &a, const tile_place &at) {
    const float scale = at.scale;
    float most[MT][2], less[MT][2];
    bool raise = false, has_huge = false;
#pragma unroll
    for (int mt = 0; mt < MT; mt++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float x = fmaxf(s[mt][0][2 * half], s[mt][0][2 * half + 1]);
#pragma unroll
            for (int nt = 1; nt < NT; nt++) x = fmaxf(x, fmaxf(s[mt][nt][2 * half], s[mt][nt][2 * half + 1]));
            raise |= x > m[mt][half];
            most[mt][half] = x;
        }
    if (__any_sync(~0u, raise)) raise_maximum(o, most, m, l, scale, at.n == at.n_last);
#pragma unroll
    for (int mt = 0; mt < MT; mt++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            less[mt][half] = __fmul_rn(m[mt][half], scale);
            has_huge |= fabsf(less[mt][half]) > HUGE_SCORE;
        }
    if (has_huge) {
#pragma unroll
        for (int mt = 0; mt < MT; mt++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                if (!(fabsf(less[mt][half]) > HUGE_SCORE)) continue;
                less[mt][half] = 0;
#pragma unroll
                for (int nt = 0; nt < NT; nt++)
#pragma unroll
                    for (int c = 0; c < 2; c++) s[mt][nt][2 * half + c] -= m[mt][half];
            }
    }
#pragma unroll
    for (int ks = 0; ks < PV_STEPS; ks++)
#pragma unroll
        for (int mt = 0; mt < MT; mt++) {
            exponentials(p[ks][mt], s[mt], scale, less[mt], l[mt], ks);
            if (ALL && at.drops) drop(a, at, p[ks][mt], mt, ks);
        }
}

/* ---- the end ---- */

/* O divided by l, lse; or the partial result of a chunk. */
DEVICE void finish(const attn_cuda_args &a, const tile_place &at, float o[MT][DT][4], float m[MT][2], float l[MT][2],
                   uint32_t shared_q) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
#pragma unroll
    for (int mt = 0; mt < MT; mt++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float sum = l[mt][half];
            sum += __shfl_xor_sync(~0u, sum, 1);
            sum += __shfl_xor_sync(~0u, sum, 2);
            int32_t i = at.row + (warp * MT + mt) * 16 + half * 8 + g;
            float lse = sum == 0 ? -INFINITY : (__fmul_rn(m[mt][half], at.scale) + log2f(sum)) / (float)ATTN_LOG2E,
                  share = 1;
            if ((a.p.flags & ATTN_SINK) && !at.split) lse = add_sink(lse, a.f.sink[at.h], &share); /* else fold does */
            float factor = sum == 0 ? 0 : at.o_factor / sum;
#pragma unroll
            for (int dt = 0; dt < DT; dt++) {
                o[mt][dt][2 * half] = __fmul_rn(__fmul_rn(o[mt][dt][2 * half], factor), share);
                o[mt][dt][2 * half + 1] = __fmul_rn(__fmul_rn(o[mt][dt][2 * half + 1], factor), share);
            }
            if (t || i >= at.s.sq || at.dv0) continue;
            if (at.split)
                ((float *)a.part_lse)[part_index(a, at.s, i, at.h, at.chunk)] = lse;
            else if (a.f.lse)
                ((float *)a.f.lse)[attn__lse_index(&a.p, &at.s, i, at.h)] = lse;
        }
    }
    store_o(a, at, o, shared_q);
}

/* The next tile of keys from n downwards that is not skipped, or -1; and whether it needs the mask. */
DEVICE int32_t next_tile(const attn_cuda_args &a, const tile_place &at, int32_t n, bool *partial) {
    for (; n >= at.n_first; n--) {
        *partial = n * BN < at.all_from || n * BN + BN > at.all_to;
        if (!ALL || !a.ranges) return n; /* without FlashMask every tile from n_first to n_last has something allowed */
        int tile_class = attn__mask_tile(&at.mask, at.row, at.row + at.rows, n * BN, n * BN + BN, range_of(a, at, n));
        *partial = tile_class == ATTN_TILE_PARTIAL;
        if (tile_class != ATTN_TILE_SKIP) return n;
    }
    return -1;
}

/* The state of the walk over the keys. */
typedef struct walk {
    int32_t n;      /* the tile at hand; -1: none */
    bool partial;   /* does it need the mask? */
    uint32_t stage; /* two buffers: offset of the one at hand */
} walk;

/* One tile; `partial` is a constant where this is called. */
DEVICE void step(const attn_cuda_args &a, tile_place &at, walk &w, bool partial, float o[MT][DT][4], float m[MT][2],
                 float l[MT][2], uint32_t q_kept[Q_KEPT][MT][4], uint32_t shared_q, uint32_t shared_k, uint32_t shared_v) {
    const int lane = here(threadIdx.x & 31), warp = threadIdx.x >> 5;
    float s[MT][NT][4];
    uint32_t p[PV_STEPS][MT][4], v[V_SLOTS][4];
    if (EAGER == 0) load_k(a, at, shared_k, w.n, true);
    cp_async_wait_all();
    __syncthreads(); /* 1 */
    bool next_partial = false;
    int32_t next = next_tile(a, at, w.n - 1, &next_partial);
    const uint32_t now = EAGER == 2 ? w.stage : 0, then = EAGER == 2 ? STAGE_BYTES - w.stage : 0;
    if (EAGER == 1) load_v(a, at, shared_v, w.n, partial);
    if (EAGER == 2 && next >= 0) {
        load_k(a, at, shared_k + then, next, false);
        load_v(a, at, shared_v + then, next, false);
    }
    cp_async_commit_group();
    product_qk(s, q_kept, shared_q, shared_k + now, warp, lane);
    if (WIDE) repair_scores(s, shared_q, shared_k + now, warp, lane);
    at.n = w.n;
    scores(a, at, s);
    if (partial) mask_scores(a, at, s);
    if (EAGER != 2) {
        if (EAGER == 0) load_v(a, at, shared_v, w.n, partial);
        cp_async_wait_all();
        __syncthreads(); /* 2 */
        if (EAGER == 1 && next >= 0) load_k(a, at, shared_k, next, false);
        cp_async_commit_group();
    }
    softmax(p, o, s, m, l, a, at);
    if ((partial || WIDE) && holds_nonfinite(shared_v + now)) add_nonfinite(o, p, shared_v + now);
    if (WIDE) {
        product_pv_wide(o, p, shared_v + now, lane);
    } else {
        begin_pv(v, shared_v + now, lane);
        product_pv(o, p, v, shared_v + now, lane);
    }
    w.n = next;
    w.partial = next_partial;
    w.stage = then;
}

KERNEL __launch_bounds__(THREADS, CTAS) VARIANT(const __grid_constant__ attn_cuda_args a) {
    extern __shared__ __align__(128) uint8_t shared[];
    const uint32_t shared_q = cvta_shared(shared), shared_k = shared_q + BM * DIM * EB, shared_v = shared_k + BN * DIM * EB;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    tile_place at;
    if (!find_place(a, at)) return;

    float o[MT][DT][4] = {}, m[MT][2], l[MT][2] = {};
    uint32_t q_kept[Q_KEPT][MT][4];
#pragma unroll
    for (int mt = 0; mt < MT; mt++) m[mt][0] = m[mt][1] = at.scale > 1 ? -FLT_MAX / at.scale : -FLT_MAX;

    walk w = {-1, false, 0};
    w.n = next_tile(a, at, at.n_last, &w.partial);
    if (w.n >= 0) {
        load_q(a, at, shared_q);
        if (EAGER) load_k(a, at, shared_k, w.n, true);
        if (EAGER == 2) load_v(a, at, shared_v, w.n, true);
        cp_async_commit_group();
        if (QF == 0) {
            cp_async_wait_all();
            __syncthreads();
#pragma unroll
            for (int kk = 0; kk < QK_STEPS; kk++) load_q_step(q_kept[kk % Q_KEPT], shared_q, warp, lane, kk);
        }
    }
    while (w.n >= 0) {
#pragma unroll 1
        while (w.n >= 0 && w.partial) step(a, at, w, true, o, m, l, q_kept, shared_q, shared_k, shared_v);
#pragma unroll 1
        while (w.n >= 0 && !w.partial) step(a, at, w, false, o, m, l, q_kept, shared_q, shared_k, shared_v);
    }
    finish(a, at, o, m, l, shared_q);
}
