/*
 * The backward on Hopper in one pass for dims above 128, where d_k and d_v of 64 keys are all that two warpgroups have registers for. A BWD90
 * line of variants.def with blocks is one build of this file.
 *
 * A block keeps 64 keys of a KV head in shared memory and walks over tiles of 64 rows, as in bwd_sm90.cu, which says how masks,
 * numbers that are not finite, and the turns of d_q are dealt with; what both have is in bwd_sm90.cuh. Three warpgroups have a
 * product or two of their own, and hand on what they make, each as far ahead of the next one as buffers let it:
 *
 *   scorer     S = K Q^T, P = exp2(S - lse), d_v += P d_o       P in float to shared memory, as threads hold it
 *   grader     D = V d_o^T, d_s = P (D - delta), d_k += d_s Q   d_s to shared memory, [keys][rows]
 *   summer     d_q = d_s K                                      d_q in float to shared memory, in chunks; an adder takes it from there. Or, of
 *                                                               the last block that adds to it, after the sum of the others to memory
 *   producers  loader, tender and two adders, a warp each
 *
 * While one of them makes numbers of a product, the others multiply. A masked pair is handed on as P = -0, which no exponential is.
 *
 * Rows and d_q go through the L2 cache once for every block, and 64 keys are few for that. So at dim 256 two blocks are a cluster, which
 * has 128 keys: each fetches one half of the columns of Q and d_o for both, and makes one half of the dims of d_q for all 128 keys, for
 * which it has those of the other block's K, and is sent the other block's d_s. Both walk over the same tiles. A stage is empty when
 * both are done with it; nobody leaves before the other one.
 */
#include <stddef.h>

#include "device.cuh"

/* ---- the line of the table ---- */

#define PIECE(...)
#define FWD(...)
#define FWD90(...)
#define BWD(...)
#define BWD90(name, dtype, dim, rows, keys, blocks, buffers)                                                               \
    enum {                                                                                                                 \
        name##_DTYPE = ATTN_##dtype,                                                                                       \
        name##_DIM = dim,                                                                                                  \
        name##_BM = rows,                                                                                                  \
        name##_BN = keys,                                                                                                  \
        name##_PAIR = blocks,                                                                                              \
        name##_QBUF = buffers                                                                                              \
    };
#include "variants.def"
#undef PIECE
#undef FWD
#undef FWD90
#undef BWD
#undef BWD90
#define K_(variant, field) variant##_##field
#define K__(variant, field) K_(variant, field)
#define K(field) K__(VARIANT, field)

enum {
    BF16 = (int)K(DTYPE) == (int)ATTN_BF16,
    DIM = K(DIM),
    BM = K(BM), /* rows of a tile */
    BN = K(BN), /* keys of a block, or of a pair of them */
    PAIR = K(PAIR),
    QBUF = K(QBUF),                             /* buffers for d_q ... */
    CHUNKS = DIM / PAIR / ATTN_WIDE_CHUNK(DIM), /* ... of which a tile fills so many ... */
    ROUND = QBUF                                /* ... in turn, for one adder or the other */
};

#include "bwd_sm90.cuh"

enum {
    WARPS = 4, /* of a warpgroup */
    THREADS = 3 * 32 * WARPS,
    STAGES = 2, /* of Q */
    O_STAGES = ATTN_WIDE_O_STAGES(DIM),
    D_S_STAGES = 2 / PAIR,
    PIECE = DIM / PAIR,                        /* dims of d_k and d_v that are multiplied at a time, and those of d_q */
    CHUNK_TILES = PIECE / CHUNKS / 8,          /* 8-column tiles of d_q in a chunk */
    SHARE_BLOCKS = DIM / PAIR / ATTN_MAP_COLS, /* blocks of columns that are a block's */
    OTHER_K_BYTES = (PAIR - 1) * KEYS * SHARE_BLOCKS * ROW,
    P_BYTES = BM * KEYS * 4,
    PRODUCER_REGISTERS = 32,
    SUMMER_REGISTERS = DIM == 256 ? 96 : 128,
    OTHERS_REGISTERS = (512 - PRODUCER_REGISTERS - SUMMER_REGISTERS) / 2
};
static_assert(DIM > 128, "bwd_sm90.cu has the others");
static_assert(BM == 64 && KEYS == 64, "a product of a warpgroup");
static_assert(CHUNKS % QBUF == 0, "a tile begins with the first buffer");
static_assert(PIECE * PAIR == DIM && CHUNK_TILES * CHUNKS * 8 == PIECE, "d_q of a block, in chunks");

/* ---- float16: fit.cuh ---- */

/* delta is made so that d_s comes out multiplied by fit_of. */
DEVICE float fitted_delta(float x, float fit) { return BF16 ? x : x * fit; }
/* d_s of P, D and delta; fit: what delta was multiplied by, a power of two. */
DEVICE float gradient_of(float p, float d, float delta, float fit) {
    return BF16 ? p * (d - delta) : p * __fmaf_rn(d, fit, -delta);
}

enum { BARRIER_BAD = 1, BARRIER_END }; /* the scorer's: keys have been looked through; d_v is stored */

/* ---- shared memory: K, V, stages of Q, d_o and d_s, the other block's, P, buffers of d_q; notes ---- */

/* Barriers, and what the tender tells of a stage of Q. raw: Q and d_o before it has looked at them. */
typedef struct shared_notes {
    uint64_t kv_full, q_full[STAGES], q_empty[STAGES], o_full[O_STAGES], o_empty[O_STAGES], stats_full[STAGES], raw[STAGES];
    uint64_t p_full, p_empty, d_s_full[D_S_STAGES], d_s_empty[D_S_STAGES], other_d_s_full;
    uint64_t d_q_full[2][QBUF], d_q_empty[QBUF];
    float lse[STAGES][BM]; /* in base 2; +inf: P is 0 */
    float delta[STAGES][BM];
    uint32_t tile[STAGES]; /* tile_word */
    float key_scale[KEYS]; /* NaN: the key is not finite */
    uint32_t bad;          /* some d_o was not finite */
    float fit;             /* of delta and D; of d_s it is 2^FIT_P more */
    place at;              /* here, and not in everybody's registers */
    int32_t is_there;      /* is there anything to do at all? */
    float d_q_scale;
    uint64_t whole[QBUF];
    uint64_t done[2][QBUF]; /* for each adder, by the other one */
    result_note results[2]; /* of each adder */
} shared_notes;
static_assert(sizeof(shared_notes) <= ATTN_BWD90_NOTES, "give the notes more room");

/* A tile of rows: its number, whether there is another one after it, and whether some pairs are masked. */
DEVICE uint32_t tile_word(int32_t n, bool more, bool partial) {
    return (uint32_t)n << 2 | (uint32_t)more << 1 | (uint32_t)partial;
}

typedef struct buffers {
    uint32_t k, v, q, o, d_s, p, d_q, notes;
    uint32_t other_k, other_d_s; /* of the other block: our dims, all rows */
    uint32_t rank;               /* of this block */
} buffers;
#define NOTE(b, field) ((b).notes + (uint32_t)offsetof(shared_notes, field))
#define BARRIER(b, field, n) (NOTE(b, field) + 8 * (n))

/* start: of shared memory. In a cluster it is not the same number for every block. */
DEVICE buffers find_buffers(uint32_t start) {
    buffers b;
    b.k = start;
    b.v = b.k + KV_BYTES;
    b.q = b.v + KV_BYTES;
    b.o = b.q + STAGES * Q_BYTES;
    b.d_s = b.o + O_STAGES * Q_BYTES;
    b.other_d_s = b.d_s + D_S_STAGES * D_S_BYTES;
    b.other_k = b.other_d_s + (PAIR - 1) * D_S_BYTES;
    b.p = b.other_k + OTHER_K_BYTES;
    b.d_q = b.p + P_BYTES;
    b.notes = b.d_q + QBUF * CHUNK_BYTES;
    b.rank = PAIR == 1 ? 0 : cluster_rank();
    return b;
}

DEVICE void make_barriers(const buffers &b) {
    mbarrier_init(NOTE(b, kv_full), 1);
    for (int n = 0; n < STAGES; n++) {
        mbarrier_init(BARRIER(b, q_full, n), 32); /* the loader for the tender's lanes, or they */
        mbarrier_init(BARRIER(b, q_empty, n), 2 * WARPS * PAIR);
        mbarrier_init(BARRIER(b, stats_full, n), 32);
        mbarrier_init(BARRIER(b, raw, n), 1);
    }
    for (int n = 0; n < D_S_STAGES; n++) {
        mbarrier_init(BARRIER(b, d_s_full, n), WARPS);
        mbarrier_init(BARRIER(b, d_s_empty, n), WARPS * PAIR);
    }
    mbarrier_init(NOTE(b, other_d_s_full), 1);
    for (int n = 0; n < O_STAGES; n++) {
        mbarrier_init(BARRIER(b, o_full, n), 32);
        mbarrier_init(BARRIER(b, o_empty, n), 2 * WARPS * PAIR);
    }
    for (int n = 0; n < QBUF; n++) {
        mbarrier_init(BARRIER(b, d_q_full, n), WARPS); /* for each adder */
        mbarrier_init(BARRIER(b, d_q_full, QBUF + n), WARPS);
        mbarrier_init(BARRIER(b, d_q_empty, n), 1);
        mbarrier_init(BARRIER(b, whole, n), 1);
        mbarrier_init(BARRIER(b, done, n), 1);
        mbarrier_init(BARRIER(b, done, QBUF + n), 1);
    }
    mbarrier_init(NOTE(b, p_full),
                  32 * WARPS); /* threads write and read P themselves, and racecheck follows no arrival for others */
    mbarrier_init(NOTE(b, p_empty), 32 * WARPS);
    st_shared_b32(NOTE(b, bad), 0);
    fence_mbarrier_init();
}

/* ---- the loader: one thread ---- */

/* Rows of a tile: all columns, or our half of them for both blocks. */
DEVICE void fetch_rows(const attn_tensor_map *map, const buffers &b, uint32_t to, uint32_t full, int32_t row, int32_t head,
                       int32_t batch) {
    if (PAIR == 1) fetch(map, to, full, BM, row, head, batch);
#pragma unroll
    for (int n = 0; n < SHARE_BLOCKS * (PAIR - 1); n++) {
        const int c = (int)b.rank * SHARE_BLOCKS + n;
        cp_async_bulk_tensor_5d_load_multicast(to + c * BM * ROW, map, full, c * ATTN_MAP_COLS, row, 0, head, batch, 3);
    }
}

DEVICE void fetch_keys(const attn_cuda_args90 &x, const buffers &b, int32_t key, int32_t head, int32_t slot) {
    const uint32_t full = NOTE(b, kv_full);
    const int32_t mine = key + (int32_t)b.rank * KEYS, others = key + (int32_t)(b.rank ^ 1) * KEYS;
    mbarrier_arrive_expect_tx(full, 2 * KV_BYTES + OTHER_K_BYTES);
    fetch(&x.k, b.k, full, KEYS, mine, head, slot);
    fetch(&x.v, b.v, full, KEYS, mine, head, slot);
#pragma unroll
    for (int n = 0; n < SHARE_BLOCKS * (PAIR - 1); n++)
        cp_async_bulk_tensor_5d_load(b.other_k + n * KEYS * ROW, &x.k, full,
                                     ((int)b.rank * SHARE_BLOCKS + n) * ATTN_MAP_COLS, others, 0, head, slot);
}

DEVICE void load(const attn_cuda_args90 &x, const buffers &b, const place &at) {
    const attn_cuda_args &a = x.a;
    const bool packed_q = a.p.flags & ATTN_VARLEN_Q, packed = a.p.flags & ATTN_VARLEN_KV;
    const int32_t key = (int32_t)at.s.kv_row + at.s.leftpad + at.own, slot = packed ? 0 : at.s.slot;
    const int32_t row = (int32_t)at.s.q_row, batch = packed_q ? 0 : at.s.b;
    fetch_keys(x, b, key, at.kv_head, slot);
    ring q = {}, o = {};
    for (walk w = first_tile(a, at); w.h < at.h_end; w = next_tile(a, at, w)) {
        const bool tended = is_tended(a, at, w.n);
        const uint32_t raw = BARRIER(b, raw, q.at), q_full = tended ? raw : BARRIER(b, q_full, q.at);
        const uint32_t o_full = tended ? raw : BARRIER(b, o_full, o.at);
        mbarrier_wait_parity(BARRIER(b, q_empty, q.at), q.parity ^ 1);
        mbarrier_arrive_expect_tx(q_full, tended ? 2 * Q_BYTES : (int)Q_BYTES);
        if (!tended) mbarrier_arrive_count(q_full, 31);
        fetch_rows(&x.q, b, b.q + q.at * Q_BYTES, q_full, row + w.n * BM, w.h, batch);
        mbarrier_wait_parity(BARRIER(b, o_empty, o.at), o.parity ^ 1);
        if (!tended) {
            mbarrier_arrive_expect_tx(o_full, Q_BYTES);
            mbarrier_arrive_count(o_full, 31);
        }
        fetch_rows(&x.o, b, b.o + o.at * Q_BYTES, o_full, row + w.n * BM, w.h, batch);
        turn_ring(q, STAGES);
        turn_ring(o, O_STAGES);
    }
}

/* ---- the tender: one warp ---- */

DEVICE void tend(const attn_cuda_args &a, const buffers &b, const place &at) {
    const int lane = threadIdx.x & 31;
    const int32_t key = at.own + (int32_t)b.rank * KEYS;
    ring q = {}, o = {};
    uint32_t raw = 0; /* parities, a bit for each stage */
    const float fit = BF16 ? 1 : __uint_as_float(ld_shared_b32(NOTE(b, fit)));
    walk w = first_tile(a, at);
    stats x[EACH]; /* of the tile to come: memory is far away */
    if (says(w.h < at.h_end)) load_stats(a, at, w, x);
    while (says(w.h < at.h_end)) {
        const walk next = next_tile(a, at, w);
        const bool more = says(next.h < at.h_end),
                   end = w.n * BM + BM > at.s.sq; /* rows of zeros, and K may hold infinities */
        const uint32_t word = tile_word(w.n, more, end || hides(a, at, w.n, key, key + KEYS));
        mbarrier_wait_parity(BARRIER(b, q_empty, q.at), q.parity ^ 1);
        if (lane == 0) st_shared_b32(NOTE(b, tile) + q.at * 4, word);
#pragma unroll
        for (int n = 0; n < EACH; n++) {
            const uint32_t to = (q.at * BM + n * 32 + lane) * 4;
            const float lse = fitted_lse(x[n].lse);
            st_shared_b32(NOTE(b, lse) + to, __float_as_uint(lse));
            st_shared_b32(NOTE(b, delta) + to, __float_as_uint(fitted_delta(x[n].delta, fit)));
        }
        if (more) load_stats(a, at, next, x);
        if (is_tended(a, at, w.n)) {
            mbarrier_wait_parity(BARRIER(b, raw, q.at), raw >> q.at & 1);
            raw ^= 1u << q.at;
#pragma unroll 1
            for (int n = 0; n < EACH; n++) {
                const int row = n * 32 + lane;
                const uint32_t lse_at = NOTE(b, lse) + (q.at * BM + row) * 4,
                               delta_at = NOTE(b, delta) + (q.at * BM + row) * 4;
                tend_row(b.q + q.at * Q_BYTES, b.o + o.at * Q_BYTES, row,
                         __uint_as_float(ld_shared_b32(lse_at)) == INFINITY, lse_at, delta_at, NOTE(b, bad));
            }
            fence_proxy_async();
            mbarrier_arrive(BARRIER(b, q_full, q.at));
            mbarrier_arrive(BARRIER(b, o_full, o.at));
        }
        mbarrier_arrive(BARRIER(b, stats_full, q.at));
        turn_ring(q, STAGES);
        turn_ring(o, O_STAGES);
        w = next;
    }
}

/* ---- what the three warpgroups have in common ---- */

/* The first of the thread's two keys in the block; the other one is 8 further on. */
DEVICE int32_t my_key(void) { return (int32_t)((threadIdx.x >> 5 & 3) * 16 + (threadIdx.x >> 2 & 7)); }

/* A barrier that waits for warps, after what all lanes have done. */
DEVICE void hand_on(uint32_t barrier) {
    __syncwarp();
    arrive_by_warps(barrier);
}
/* A buffer that is empty: for both blocks, where both fill it. After a product, or __syncwarp. */
DEVICE void give_back(const buffers &b, uint32_t barrier) {
    arrive_by_warps(barrier);
    if (PAIR == 2 && (threadIdx.x & 31) == 1) mbarrier_arrive_remote(mapa(barrier, b.rank ^ 1));
}

/* S = K Q^T, D = V d_o^T: all keys, all rows of a tile. */
DEVICE void begin_scores(float s[NT][4], uint32_t kept, uint32_t tile) {
    const uint64_t keys = wgmma_k_major(kept), rows = wgmma_k_major(tile);
    wgmma_fence();
    product_ss_set(BM, s[0], keys, rows);
#pragma unroll
    for (int c = 1; c < DIM / 16; c++)
        product_ss(BM, s[0], wgmma_step(keys, 1, c / 4 * KEYS * ROW + c % 4 * 32),
                   wgmma_step(rows, 1, c / 4 * BM * ROW + c % 4 * 32), 1);
    wgmma_commit_group();
}

/* d_v += P d_o, d_k += d_s Q. PIECE dims at a time: with 512 threads ptxas takes no product of 256 columns (C7602). */
DEVICE void begin_sum(float sum[DT][4], const uint32_t w[STEPS][4], uint32_t tile) {
    const uint64_t rows = wgmma_mn_major(tile, BM * ROW);
    wgmma_fence();
#pragma unroll
    for (int ks = 0; ks < STEPS; ks++)
#pragma unroll
        for (int n = 0; n < DIM / PIECE; n++)
            product_rs(PIECE, sum[n * (PIECE / 8)], w[ks],
                       wgmma_step(rows, 1, ks * 16 * ROW + n * (PIECE / ATTN_MAP_COLS) * BM * ROW), 1);
    wgmma_commit_group();
}

/* Where a thread's four numbers of 8-column tile nt are: those of all threads side by side. */
DEVICE uint32_t number_at(uint32_t start, int nt) { return start + (nt * 128 + (threadIdx.x & 127)) * 16; }

DEVICE void put_numbers(uint32_t start, int nt, const float x[4]) {
    st_shared_v4(number_at(start, nt),
                 make_uint4(__float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]), __float_as_uint(x[3])));
}

/* ---- the scorer ---- */

/* A key of a tile of so many columns, by two threads: zeros if it is past the end or, under a mask, not finite; is it that? */
DEVICE bool tend_key(const place &at, uint32_t tile, int key, int number, int columns) {
    const int from = (int)(threadIdx.x & 1) * (columns / 16);
    bool bad = at.masks && holds_nonfinite(tile, KEYS, key, from, from + columns / 16);
    bad = __shfl_xor_sync(~0u, (int)bad, 1) || bad;
    if (bad || number >= at.count) clear_row(tile, KEYS, key, from, from + columns / 16);
    return bad;
}

/* All keys; key_scale says which are not finite. Are there any? Those of the other block's are its own affair, but that 0 * NaN is not 0. */
DEVICE bool tend_keys(const attn_cuda_args &a, const buffers &b, const place &at) {
    if (!at.masks && at.count == BN) return false;
    const int key = (int)(threadIdx.x & 127) / 2;
    const bool bad = tend_key(at, b.k, key, (int)b.rank * KEYS + key, DIM);
    if (threadIdx.x % 2 == 0) st_shared_b32(NOTE(b, key_scale) + key * 4, __float_as_uint(bad ? NAN : a.scale_log2));
    if (PAIR == 2) tend_key(at, b.other_k, key, (int)(b.rank ^ 1) * KEYS + key, DIM / PAIR);
    fence_proxy_async();
    return bar_red_or(BARRIER_BAD, 128, bad);
}

/* s: products of q and k, becomes P, and is packed too. all: every pair is seen; a constant. */
DEVICE void weigh(float s[NT][4], uint32_t p[STEPS][4], const float scale[2], uint32_t lse, const uint32_t seen[WORDS],
                  bool all) {
#pragma unroll
    for (int nt = 0; nt < NT; nt++) {
        float less[2];
        load_pair(less, lse, nt);
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const float x = ex2_approx(__fmaf_rn(s[nt][e], scale[e >> 1], -less[e & 1]));
            s[nt][e] = all || ((seen[nt / 8] >> (nt % 8 * 4 + e) & 1) && less[e & 1] != INFINITY) ? x : -0.0f;
        }
        if (nt % 2) pack_weights(p[nt / 2], &s[nt - 1]);
    }
}

DEVICE void make_p(const attn_cuda_args &a, const buffers &b, const place &at, float s[NT][4], uint32_t p[STEPS][4],
                   uint32_t stage, uint32_t word, bool bad_keys) {
    const uint32_t lse = NOTE(b, lse) + stage * BM * 4;
    uint32_t seen[WORDS] = {};
    float scale[2] = {a.scale_log2, a.scale_log2};
    if (!says((word & 1) || bad_keys)) {
        weigh(s, p, scale, lse, seen, true);
        return;
    }
    if (bad_keys) {
        const uint32_t scales = NOTE(b, key_scale) + my_key() * 4;
        scale[0] = __uint_as_float(ld_shared_b32(scales));
        scale[1] = __uint_as_float(ld_shared_b32(scales + 32));
    }
    find_seen(a, at, (int32_t)b.rank * KEYS + my_key(), (int32_t)(word >> 2), seen);
    weigh(s, p, scale, lse, seen, false);
}

DEVICE void score(const attn_cuda_args &a, const buffers &b, const place &at) {
    float d_v[DT][4] = {}, s[NT][4];
    uint32_t p[STEPS][4];
    ring q = {}, o = {};
    uint32_t parity = 1; /* of p_empty */
    mbarrier_wait_parity(NOTE(b, kv_full), 0);
    const bool bad_keys = says(tend_keys(a, b, at));
    bool more = says(first_tile(a, at).h < at.h_end);
#pragma unroll 1
    while (more) {
        mbarrier_wait_parity(BARRIER(b, q_full, q.at), q.parity);
        begin_scores(s, b.k, b.q + q.at * Q_BYTES);
        mbarrier_wait_parity(BARRIER(b, stats_full, q.at), q.parity);
        const uint32_t word = ld_shared_b32(NOTE(b, tile) + q.at * 4);
        more = says(word & 2);
        wgmma_wait_group(0);
        make_p(a, b, at, s, p, q.at, word, bad_keys);
        __syncwarp(); /* all lanes have read lse */
        give_back(b, BARRIER(b, q_empty, q.at));
        mbarrier_wait_parity(NOTE(b, p_empty), parity);
#pragma unroll
        for (int nt = 0; nt < NT; nt++) put_numbers(b.p, nt, s[nt]);
        mbarrier_arrive(NOTE(b, p_full));
        parity ^= 1;
        mbarrier_wait_parity(BARRIER(b, o_full, o.at), o.parity);
        begin_sum(d_v, p, b.o + o.at * Q_BYTES);
        wgmma_wait_group(0);
        give_back(b, BARRIER(b, o_empty, o.at));
        turn_ring(q, STAGES);
        turn_ring(o, O_STAGES);
    }
    store_keys(a, at, (int32_t)b.rank * KEYS + my_key(), a.f.d_v, d_v, a.p.dim_v, 1 / fit_of_p());
    bar_sync(BARRIER_END, 128);
    if (!ld_shared_b32(NOTE(b, bad))) return;
    const int32_t first = (int32_t)b.rank * KEYS; /* the other block has stored its own, or not yet */
    for (int32_t c = threadIdx.x; c < DIM; c += 128) add_nonfinite(a, at, first, first + KEYS, c);
}

/* ---- the grader ---- */

/* d: products of d_o and v; with P it becomes d_s, which is packed. all: no pair is masked; a constant. */
DEVICE void weigh_gradient(const float d[NT][4], uint32_t p, uint32_t d_s[STEPS][4], uint32_t delta, float fit, bool all) {
#pragma unroll
    for (int ks = 0; ks < STEPS; ks++) {
        float x[2][4];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int nt = 2 * ks + half;
            float less[2];
            load_pair(less, delta, nt);
            const uint4 four = ld_shared_v4(number_at(p, nt));
            const uint32_t weight[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
            for (int e = 0; e < 4; e++) {
                x[half][e] = gradient_of(__uint_as_float(weight[e]), d[nt][e], less[e & 1], fit);
                if (!all && weight[e] == 0x80000000u) x[half][e] = 0;
            }
        }
        pack_weights(d_s[ks], x);
    }
}

/* d_s to shared memory, [keys][rows]. */
DEVICE void put_d_s(uint32_t start, const uint32_t w[STEPS][4]) {
    const int g = threadIdx.x >> 2 & 7;
    const uint32_t to = start + my_key() * ROW + (threadIdx.x & 3) * 4;
#pragma unroll
    for (int nt = 0; nt < NT; nt++)
#pragma unroll
        for (int half = 0; half < 2; half++)
            st_shared_b32(to + half * 8 * ROW + ((nt ^ g) << 4), w[nt / 2][nt % 2 * 2 + half]);
}

/* A warp's 16 keys of d_s to the other block. */
DEVICE void send_d_s(const buffers &b) {
    enum { BYTES = D_S_BYTES / WARPS };
    const uint32_t from = (threadIdx.x >> 5 & 3) * BYTES, other = b.rank ^ 1;
    if ((threadIdx.x & 31) == 0)
        cp_async_bulk_to_block(mapa(b.other_d_s + from, other), b.d_s + from, BYTES, mapa(NOTE(b, other_d_s_full), other));
}

DEVICE void grade(const attn_cuda_args &a, const buffers &b, const place &at) {
    float d_k[DT][4] = {}, d[NT][4];
    uint32_t d_s[STEPS][4];
    ring q = {}, o = {}, out = {}; /* out: d_s */
    uint32_t parity = 0;           /* of p_full */
    mbarrier_wait_parity(NOTE(b, kv_full), 0);
    bool more = says(first_tile(a, at).h < at.h_end);
#pragma unroll 1
    while (more) {
        const uint32_t delta = NOTE(b, delta) + q.at * BM * 4;
        const float fit = BF16 ? 1 : __uint_as_float(ld_shared_b32(NOTE(b, fit)));
        mbarrier_wait_parity(BARRIER(b, o_full, o.at), o.parity);
        begin_scores(d, b.v, b.o + o.at * Q_BYTES);
        mbarrier_wait_parity(BARRIER(b, stats_full, q.at), q.parity);
        const uint32_t word = ld_shared_b32(NOTE(b, tile) + q.at * 4);
        more = says(word & 2);
        wgmma_wait_group(0);
        give_back(b, BARRIER(b, o_empty, o.at));
        mbarrier_wait_parity(NOTE(b, p_full), parity);
        parity ^= 1;
        if (says(word & 1))
            weigh_gradient(d, b.p, d_s, delta, fit, false);
        else
            weigh_gradient(d, b.p, d_s, delta, fit, true);
        mbarrier_arrive(NOTE(b, p_empty));
        mbarrier_wait_parity(BARRIER(b, d_s_empty, out.at), out.parity ^ 1);
        put_d_s(b.d_s + out.at * D_S_BYTES, d_s);
        fence_proxy_async();
        hand_on(BARRIER(b, d_s_full, out.at));
        if (PAIR == 2) send_d_s(b);
        turn_ring(out, D_S_STAGES);
        mbarrier_wait_parity(BARRIER(b, q_full, q.at), q.parity);
        begin_sum(d_k, d_s, b.q + q.at * Q_BYTES);
        wgmma_wait_group(0);
        give_back(b, BARRIER(b, q_empty, q.at));
        turn_ring(q, STAGES);
        turn_ring(o, O_STAGES);
    }
    const float scale = (float)a.p.scale / fit_of(a, at.s.b, at.kv_head);
    store_keys(a, at, (int32_t)b.rank * KEYS + my_key(), a.f.d_k, d_k, a.p.dim_qk, scale);
}

/* ---- the summer ---- */

/* d_q (+)= d_s K, of 64 keys and PIECE dims from `keys` on. */
DEVICE void multiply_d_q(float d_q[PIECE / 8][4], uint32_t d_s, uint32_t keys, bool adds) {
    const uint64_t rows = wgmma_mn_major(d_s, KEYS * ROW), dims = wgmma_mn_major(keys, KEYS * ROW);
    if (adds)
        product_mn(PIECE, d_q[0], rows, dims, 1);
    else
        product_mn_set(PIECE, d_q[0], rows, dims);
#pragma unroll
    for (int ks = 1; ks < KEYS / 16; ks++)
        product_mn(PIECE, d_q[0], wgmma_step(rows, ks, 16 * ROW), wgmma_step(dims, ks, 16 * ROW), 1);
}

/* Two bits: do the thread's two rows of tile w have keys? */
DEVICE uint32_t find_rows(const attn_cuda_args &a, const place &at, const walk &w) {
    const int32_t i = w.n * BM + my_key(); /* as keys of S lie */
    const float *lse = (const float *)a.f.lse + attn__lse_index(&a.p, &at.s, i, w.h);
    return (i < at.s.sq && lse[0] != -INFINITY) | (i + 8 < at.s.sq && lse[8] != -INFINITY) << 1;
}

DEVICE void sum(const attn_cuda_args &a, const buffers &b, const place &at) {
    float d_q[PIECE / 8][4];
    ring in = {}, out = {};
    uint32_t adder = 0, parity = 0; /* of other_d_s_full */
    const bool nonsense = a.finishes && *a.overlap;
    mbarrier_wait_parity(NOTE(b, kv_full), 0);
    for (walk w = first_tile(a, at); says(w.h < at.h_end); w = next_tile(a, at, w)) {
        if (PAIR == 2 && (threadIdx.x & 127) == 0) mbarrier_arrive_expect_tx(NOTE(b, other_d_s_full), D_S_BYTES);
        const bool last = says(is_last(a, at, w.n, nonsense));
        const uint32_t rows = last ? find_rows(a, at, w) : 0;
        mbarrier_wait_parity(BARRIER(b, d_s_full, in.at), in.parity);
        if (PAIR == 2) mbarrier_wait_parity(NOTE(b, other_d_s_full), parity);
        parity ^= 1;
        wgmma_fence();
        multiply_d_q(d_q, b.d_s + in.at * D_S_BYTES, b.k + b.rank * SHARE_BLOCKS * KEYS * ROW, false);
        if (PAIR == 2) multiply_d_q(d_q, b.other_d_s, b.other_k, true);
        wgmma_commit_group();
        wgmma_wait_group(0);
        give_back(b, BARRIER(b, d_s_empty, in.at));
        turn_ring(in, D_S_STAGES);
#pragma unroll
        for (int c = 0; c < CHUNKS; c++) {
            const uint32_t buffer = b.d_q + out.at * CHUNK_BYTES;
            mbarrier_wait_parity(BARRIER(b, d_q_empty, out.at), out.parity ^ 1);
            if (last) {
                mbarrier_wait_parity(BARRIER(b, whole, out.at), out.parity);
                const result_note note = read_note(NOTE(b, results) + adder * (uint32_t)sizeof(result_note));
                if (note.adds) add_sum(&d_q[c * CHUNK_TILES], buffer, CHUNK_TILES);
                write_d_q(a, note, &d_q[c * CHUNK_TILES], CHUNK_TILES, my_key(),
                          (int32_t)b.rank * PIECE + c * CHUNK_TILES * 8, rows,
                          __uint_as_float(ld_shared_b32(NOTE(b, d_q_scale))));
            } else {
#pragma unroll
                for (int nt = 0; nt < CHUNK_TILES; nt++) put_numbers(buffer, nt, d_q[c * CHUNK_TILES + nt]);
            }
            fence_proxy_async();
            hand_on(BARRIER(b, d_q_full, adder * QBUF + out.at));
            turn_ring(out, QBUF);
        }
        adder ^= 1;
    }
}

DEVICE void produce(const attn_cuda_args90 &x, const buffers &b, const place &at, int warp) {
    const bool alone = (threadIdx.x & 31) == 0;
    if (warp == 0) {
        if (alone) load(x, b, at);
    } else if (warp == 1) {
        tend(x.a, b, at);
    } else {
        const int n = warp - 2;
        d_q_ring d_q;
        d_q.at = b.d_q;
        d_q.full = BARRIER(b, d_q_full, n * QBUF);
        d_q.empty = BARRIER(b, d_q_empty, 0);
        d_q.share = b.rank;
        d_q.whole = BARRIER(b, whole, 0);
        d_q.note = NOTE(b, results) + n * (uint32_t)sizeof(result_note);
        d_q.mine = BARRIER(b, done, n * QBUF);
        d_q.others = BARRIER(b, done, (n ^ 1) * QBUF);
        if (x.a.f.d_q.data)
            add(x.a, d_q, at, n);
        else if (alone)
            drop(x.a, d_q, at, n);
    }
}

KERNEL __cluster_dims__(PAIR, 1, 1) __launch_bounds__(THREADS + 128, 1)
    VARIANT(const __grid_constant__ attn_cuda_args90 x) {
    extern __shared__ __align__(1024) uint8_t shared[];
    const buffers b = find_buffers(PAIR == 1 ? shared_start() : cvta_shared(shared));
    shared_notes &notes = *(shared_notes *)(shared + (b.notes - b.k));
    const place &at = notes.at;
    const int group = (int)threadIdx.x / 128;
    if (PAIR == 1 && cvta_shared(shared) != shared_start()) __trap();
    if (threadIdx.x == 0) {
        make_barriers(b);
        notes.is_there = find_place(x.a, notes.at);
        if (notes.is_there) {
            const float fit = fit_of(x.a, at.s.b, at.kv_head);
            notes.fit = fit / fit_of_p();
            notes.d_q_scale = (float)x.a.p.scale / fit;
        }
    }
    if (PAIR == 2)
        cluster_sync();
    else
        __syncthreads();
    if (!notes.is_there) return;
    if (group == 0) {
        setmaxnreg_inc(OTHERS_REGISTERS);
        score(x.a, b, at);
    } else if (group == 1) {
        setmaxnreg_inc(OTHERS_REGISTERS);
        grade(x.a, b, at);
    } else if (group == 2) {
        if (SUMMER_REGISTERS > 128)
            setmaxnreg_inc(SUMMER_REGISTERS);
        else
            setmaxnreg_dec(SUMMER_REGISTERS);
        sum(x.a, b, at);
    } else {
        setmaxnreg_dec(PRODUCER_REGISTERS);
        produce(x, b, at, (int)(threadIdx.x - THREADS) / 32);
    }
    if (PAIR == 2) cluster_sync();
}
