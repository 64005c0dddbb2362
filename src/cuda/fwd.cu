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
 *     P = exp2(S - m)          online softmax in base 2; m, l and O follow where a maximum moved
 *     fetch K(n - 1)           arrives under the product below; kernels with every feature fetch it at barrier 2
 *     O += P V(n)
 *
 * With eager = 2 K and V of the next tile are fetched during S = Q K(n)^T, a round at a time, into a second pair of buffers, and
 * there is no barrier 2. A tile that is partial has one more barrier, in float32 every tile (holds_nonfinite). Where O is large, P
 * and its product are made of one half of the keys after the other. The division by l comes at the end.
 *
 * Fragments follow the layouts of the PTX manual: lane = 4 g + t holds of a 16x8 accumulator the rows g, g + 8 and the columns
 * 2t, 2t + 1. Float32 multiplies three times in TF32: with x = hi + lo, a b = hi hi + hi lo + lo hi.
 */
#include "fwd.cuh"

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

/* The pieces of shared memory with which the fragments of a lane begin. */
typedef struct pieces {
    uint32_t q, k, v;
} pieces;

DEVICE pieces first_pieces(uint32_t shared_q, uint32_t shared_k, uint32_t shared_v, int warp, int lane) {
    pieces at;
    at.q = shared_at(shared_q, warp * MT * 16 + (lane & 15), lane >> 4, QK_CHUNKS);
    at.k = shared_at(shared_k, (lane & 7) + (lane >> 4) * 8, lane >> 3 & 1, QK_CHUNKS);
    at.v = shared_at(shared_v, lane & 15, lane >> 4, V_CHUNKS);
    return at;
}

/* Q fragment of step kk: the 32 bytes from there on, of the warp's rows. */
DEVICE void load_q_step(uint32_t q[MT][4], uint32_t piece, int kk) {
#pragma unroll
    for (int mt = 0; mt < MT; mt++) ldmatrix_x4(q[mt], shared_step(piece, kk, QK_CHUNKS) + mt * 16 * QK_CHUNKS * 16);
}

/* Fragments come in a stream: step by step of 32 bytes, in each 16 keys at a time. */
DEVICE void load_k_fragment(uint32_t k[4], uint32_t piece, int n) {
    int kk = n / (BN / 16), jj = n % (BN / 16);
    ldmatrix_x4(k, shared_step(piece, kk, QK_CHUNKS) + jj * 16 * QK_CHUNKS * 16);
}

/* What is fetched beneath the products of a tile: where to, how far rows are apart, and how many pieces of each. */
typedef struct errand {
    uint32_t to_k, to_v;
    int64_t k_row, v_row;
    int k, v;
} errand;

/*
 * Rounds of the fetch that fall to fragment n of `count`. Each place where loads stand costs three idle instructions, so K and V
 * share one; with eager = 1, where they cannot, all rounds stand in one place.
 */
enum { ROUNDS = BN / ROUND_ROWS, PLACES = EAGER == 2 ? (int)ROUNDS : 1 };

DEVICE void fetch_k_beneath(fetch &f, const errand &e, int n, int count) {
#pragma unroll
    for (int round = 0; round < ROUNDS; round++)
        if (n == round * PLACES / ROUNDS * count / PLACES) f.k = fetch_round(f.k, e.k_row, e.to_k, round, QK_CHUNKS, e.k);
}
DEVICE void fetch_v_beneath(fetch &f, const errand &e, int n, int count) {
#pragma unroll
    for (int round = 0; round < ROUNDS; round++)
        if (n == round * PLACES / ROUNDS * count / PLACES) f.v = fetch_round(f.v, e.v_row, e.to_v, round, V_CHUNKS, e.v);
}

DEVICE void product_qk(float s[MT][NT][4], uint32_t q_kept[Q_KEPT][MT][4], const pieces &at, fetch &f, const errand &e) {
    enum { COUNT = QK_STEPS * (BN / 16), SLOTS = KF * (1 + TWICE) };
    uint32_t k[SLOTS][4], q[QF][MT][4];
    float sum[MT][NT][4], (*to)[NT][4] = WIDE ? sum : s;
    EACH_SCORE(mt, nt, e) s[mt][nt][e] = sum[mt][nt][e] = 0;
    if (TWICE) {
#pragma unroll
        for (int n = 0; n < KF; n++) load_k_fragment(k[n], at.k, n);
    }
#pragma unroll
    for (int n = 0; n < COUNT; n++) {
        int kk = n / (BN / 16), jj = n % (BN / 16);
        if (kk >= HELD && jj == 0 && (kk - HELD) % QF == 0) {
#pragma unroll
            for (int x = 0; x < QF; x++)
                if (kk + x < QK_STEPS) load_q_step(q[(kk + x) % QF], at.q, kk + x);
        }
        if (n % KF == 0) {
#pragma unroll
            for (int x = TWICE * KF; x < (1 + TWICE) * KF; x++)
                if (n + x < COUNT) load_k_fragment(k[(n + x) % SLOTS], at.k, n + x);
        }
        if (!ALL && EAGER == 2) fetch_k_beneath(f, e, n, COUNT);
        if (!ALL && EAGER) fetch_v_beneath(f, e, n, EAGER == 2 ? (int)COUNT : COUNT / 2);
#pragma unroll
        for (int mt = 0; mt < MT; mt++)
            multiply(to[mt][2 * jj], to[mt][2 * jj + 1], kk < HELD ? q_kept[kk % Q_KEPT][mt] : q[kk % QF][mt],
                     k[n % SLOTS]);
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
DEVICE void repair_scores(float s[MT][NT][4], const pieces &at) {
    bool is_nan = false;
    EACH_SCORE(mt, nt, e) is_nan |= s[mt][nt][e] != s[mt][nt][e];
    if (!__any_sync(~0u, is_nan)) return;
#pragma unroll
    for (int jj = 0; jj < BN / 16; jj++) {
        float c[MT][2][4] = {};
#pragma unroll 1
        for (int kk = 0; kk < QK_STEPS; kk++) {
            uint32_t q[MT][4], k[4], lo[4];
            load_q_step(q, at.q, kk);
            load_k_fragment(k, at.k, kk * (BN / 16) + jj);
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

/* Where O leaves few registers, P is made of one half of the keys at a time: it can be live in full no more than once. */
enum { HALVES = MT == 2 && DV >= 128 ? 2 : 1 };
static_assert(PV_STEPS % HALVES == 0, "want a larger bn");

/* V fragment of 16 dims for the keys of step ks: 16 keys, or 8 in float32. */
DEVICE void load_v_fragment(uint32_t v[4], uint32_t piece, int n) {
    int ks = n / (DV / 16), dd = n % (DV / 16);
    ldmatrix_x4_trans(v, shared_step(piece, dd, V_CHUNKS) + ks * 16 * V_CHUNKS * 16);
}

/* In float32 without ldmatrix: lane 4g + t takes column g of the rows 2t, 2t + 1: the columns that it holds of P. */
DEVICE void load_v_wide(uint32_t v[4], uint32_t shared_v, int lane, int n) {
    int ks = n / (DV / 16), dd = n % (DV / 16), g = lane >> 2, t = lane & 3;
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
            if (e & 1) l[e >> 1] += y[e - 1] + y[e];
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

/*
 * Where a warp has 16 rows and nearly all of its registers are O, scaling O down is many instructions, which leave the tensor cores
 * idle if they stand by themselves. There it is done within the product of the tile's first keys, piece by piece, for every
 * tile, by 1 if nothing grew. Tiles with a mask may have to add what is not finite to O first, and scale it before.
 */
enum { SCALES_WITHIN = !ALL && MT == 1 && DV > 192 };

/* The keys of the steps [from, to). factor: of O, before the first of them; NULL: none. */
DEVICE void product_pv(float o[MT][DT][4], const float (*factor)[2], uint32_t p[PV_STEPS][MT][4], uint32_t piece, fetch &f,
                       const errand &e, int from, int to) {
    enum { EACH = DV / 16, COUNT = PV_STEPS * EACH, SLOTS = VF * (1 + TWICE) };
    uint32_t v[SLOTS][4];
#pragma unroll
    for (int n = from * EACH; n < from * EACH + VF * TWICE; n++) load_v_fragment(v[n % SLOTS], piece, n);
#pragma unroll
    for (int n = from * EACH; n < to * EACH; n++) {
        int ks = n / EACH, dd = n % EACH;
        if (n % VF == 0) {
#pragma unroll
            for (int x = TWICE * VF; x < (1 + TWICE) * VF; x++)
                if (n + x < to * EACH) load_v_fragment(v[(n + x) % SLOTS], piece, n + x);
        }
        if (!ALL && EAGER == 1) fetch_k_beneath(f, e, n, COUNT / 2);
        if (factor && ks == 0) {
#pragma unroll
            for (int x = 0; x < MT * 8; x++) o[x / 8][2 * dd + x / 4 % 2][x % 4] *= factor[x / 8][x % 4 >> 1];
        }
#pragma unroll
        for (int mt = 0; mt < MT; mt++) multiply(o[mt][2 * dd], o[mt][2 * dd + 1], p[ks][mt], v[n % SLOTS]);
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
            load_v_wide(v, shared_v, lane, ks * (DV / 16) + dd);
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

/* within: product_pv scales O by `factor`. */
DEVICE void follow_maximum(float o[MT][DT][4], float factor[MT][2], float s[MT][NT][4], float m[MT][2], float l[MT][2],
                           bool &has_huge, const tile_place &at, int32_t n, bool within) {
    float most[MT][2];
#pragma unroll
    for (int mt = 0; mt < MT; mt++) factor[mt][0] = factor[mt][1] = 1;
    if (!find_maximum(most, s, m)) return;
    has_huge = raise_maximum(factor, most, m, l, at.scale);
    if (!within && (!FIRST || n != at.n_last)) rescale(o, factor);
}

/* P of the steps [from, to). */
DEVICE void make_p(uint32_t p[PV_STEPS][MT][4], float s[MT][NT][4], float m[MT][2], float l[MT][2], bool has_huge,
                   const attn_cuda_args &a, const tile_place &at, const tile_extras &x, int from, int to) {
    float less[MT][2];
    subtract_maximum(less, s, m, at.scale, has_huge, from * NT / PV_STEPS, to * NT / PV_STEPS);
#pragma unroll
    for (int ks = from; ks < to; ks++)
#pragma unroll
        for (int mt = 0; mt < MT; mt++) {
            exponentials(p[ks][mt], s[mt], at.scale, less[mt], l[mt], ks);
            if (drops(a)) drop(x, p[ks][mt], mt, ks);
        }
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
    bool has_huge;  /* is the maximum of any of the warp's rows huge? It begins so. */
    uint32_t stage; /* two buffers: offset of the one at hand */
    pieces kept;    /* plain kernels */
    fetch f;        /* plain kernels */
} walk;

/* One tile; `partial` is a constant where this is called, but for float32. */
DEVICE void step(const attn_cuda_args &a, const tile_place &at, walk &w, bool partial, float o[MT][DT][4], float m[MT][2],
                 float l[MT][2], uint32_t q_kept[Q_KEPT][MT][4], uint32_t shared_q, uint32_t shared_k, uint32_t shared_v) {
    const int lane = here(threadIdx.x & 31), warp = threadIdx.x >> 5;
    float s[MT][NT][4], factor[MT][2];
    uint32_t p[PV_STEPS][MT][4];
    if (EAGER == 0) load_k(a, at, shared_k, w.n, true);
    cp_async_wait_all();
    __syncthreads(); /* 1 */
    bool next_partial = false;
    int32_t next = next_tile(a, at, w.n - 1, &next_partial);
    const uint32_t now = EAGER == 2 ? w.stage : 0, then = EAGER == 2 ? STAGE_BYTES - w.stage : 0;
    errand e = {(w.f.to & ~15u) + then, 0, a.f.k.stride[1] * EB, a.f.v.stride[1] * EB, (int)(w.f.to & 3),
                (int)(w.f.to >> 2 & 3)};
    e.to_v = e.to_k + BN * DIM * EB;
    if (next < 0) e.k = 0;
    if (EAGER == 2 ? next < 0 : partial) e.v = 0;
    if (ALL) {
        if (EAGER == 1) load_v(a, at, shared_v, w.n, partial);
        if (EAGER == 2 && next >= 0) {
            load_k(a, at, shared_k + then, next, false);
            load_v(a, at, shared_v + then, next, false);
        }
    } else if (EAGER == 1 && partial) {
        load_v(a, at, shared_v, w.n, true);
    }
    pieces piece = ALL ? first_pieces(shared_q, shared_k, shared_v, warp, lane) : w.kept;
    piece.k += now;
    piece.v += now;
    tile_extras x = {};
    if (ALL && WIDE) make_extras(a, at, STEP_ANY, w.n, x); /* before or after S: where it costs fewer registers */
    product_qk(s, q_kept, piece, w.f, e);
    cp_async_commit_group();
    if (WIDE) repair_scores(s, piece);
    if (ALL && !WIDE) make_extras(a, at, STEP_ANY, w.n, x);
    scores(a, at, STEP_ANY, w.n, s, x);
    if (partial) mask_scores(a, at, w.n, s, x);
    if (EAGER != 2) {
        if (EAGER == 0) load_v(a, at, shared_v, w.n, partial);
        cp_async_wait_all();
        __syncthreads(); /* 2 */
        if (ALL && EAGER == 1 && next >= 0) load_k(a, at, shared_k, next, false);
    }
    const bool within = SCALES_WITHIN && !partial;
    follow_maximum(o, factor, s, m, l, w.has_huge, at, w.n, within);
    if (partial || WIDE) {
        make_p(p, s, m, l, w.has_huge, a, at, x, 0, PV_STEPS);
        if (holds_nonfinite(shared_v + now)) add_nonfinite(o, p, shared_v + now);
        if (WIDE)
            product_pv_wide(o, p, shared_v + now, lane);
        else
            product_pv(o, NULL, p, piece.v, w.f, e, 0, PV_STEPS);
    } else {
#pragma unroll
        for (int ks = 0; ks < PV_STEPS; ks += PV_STEPS / HALVES) {
            make_p(p, s, m, l, w.has_huge, a, at, x, ks, ks + PV_STEPS / HALVES);
            product_pv(o, within ? factor : NULL, p, piece.v, w.f, e, ks, ks + PV_STEPS / HALVES);
        }
    }
    cp_async_commit_group();
    w.n = next;
    w.partial = next_partial;
    w.stage = then;
}

enum {
    Q_BEFORE_K = !ALL && HELD && EAGER == 1, /* steps of Q are read while K of the first tile is still under way */
    LSE_LAST = !ALL && DV > 192              /* O is under way before lse is stored: measured at dim 256 only */
};

/* The rows of a block against all their keys. */
DEVICE void work(const attn_cuda_args &a, tile_place &at, uint32_t shared_q) {
    const uint32_t shared_k = shared_q + BM * DIM * EB, shared_v = shared_k + BN * DIM * EB;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    find_keys(a, at);

    float o[MT][DT][4] = {}, m[MT][2], l[MT][2] = {};
    uint32_t q_kept[Q_KEPT][MT][4];
#pragma unroll
    for (int mt = 0; mt < MT; mt++) m[mt][0] = m[mt][1] = at.least;

    walk w = {};
    w.has_huge = true;
    w.n = next_tile(a, at, at.n_last, &w.partial);
    if (w.n >= 0) {
        if (!ALL && EAGER == 2 && a.p.dim_qk < DIM) clear_columns(shared_k + STAGE_BYTES, BN, QK_CHUNKS, a.p.dim_qk);
        if (!ALL && a.p.dim_v < DV) clear_columns(shared_v + (EAGER == 2) * STAGE_BYTES, BN, V_CHUNKS, a.p.dim_v);
        load_q(a, at, shared_q);
        if (Q_BEFORE_K) cp_async_commit_group();
        if (EAGER) load_k(a, at, shared_k, w.n, true);
        if (EAGER == 2) load_v(a, at, shared_v, w.n, true);
        cp_async_commit_group();
        w.kept = first_pieces(shared_q, shared_k, shared_v, warp, lane);
        if (!ALL) {
            w.f = make_fetch(a, at, w.n, w.n + (EAGER == 1), shared_k);
            w.kept.q = here(w.kept.q), w.kept.k = here(w.kept.k), w.kept.v = here(w.kept.v);
        }
        if (HELD) {
            if (Q_BEFORE_K)
                cp_async_wait_group(1);
            else
                cp_async_wait_all();
            __syncthreads();
#pragma unroll
            for (int kk = 0; kk < HELD; kk++) load_q_step(q_kept[kk % Q_KEPT], w.kept.q, kk);
        }
    }
    while (WIDE && w.n >= 0) /* the mask is little beside three products: one body for all tiles */
        step(a, at, w, w.partial, o, m, l, q_kept, shared_q, shared_k, shared_v);
    while (!WIDE && w.n >= 0) {
#pragma unroll 1
        while (w.n >= 0 && w.partial) step(a, at, w, true, o, m, l, q_kept, shared_q, shared_k, shared_v);
#pragma unroll 1
        while (w.n >= 0 && !w.partial) step(a, at, w, false, o, m, l, q_kept, shared_q, shared_k, shared_v);
    }
    const float lse = finish_o(a, at, o, m, l);
    if (!LSE_LAST) store_lse(a, at, lse);
    store_o(a, at, o, shared_q);
    if (LSE_LAST) store_lse(a, at, lse);
}

/* By itself: within the kernel it would cost registers. */
static __device__ __noinline__ void fill_padding(const attn_cuda_args &a, const tile_place &at) {
    fill_rows(a, at.s.b, at.h, at.pad_from, at.pad_to, threadIdx.x, THREADS);
}

KERNEL __launch_bounds__(THREADS, CTAS) VARIANT(const __grid_constant__ attn_cuda_args a) {
    extern __shared__ __align__(128) uint8_t shared[];
    tile_place at;
    if (find_place(a, at, (blockIdx.y + (int64_t)blockIdx.z * gridDim.y) * a.group, blockIdx.x))
        work(a, at, cvta_shared(shared));
    /* Last, where nothing else is in registers: before the work this call costs even those without padding a few of them. */
    if (at.pad_from < at.pad_to) fill_padding(a, at);
}
