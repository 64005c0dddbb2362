/*
 * The whole backward on Hopper in one pass: wgmma products, tiles by the tensor memory accelerator. One line BWD90 of variants.def is
 * one build of this file.
 *
 * A block keeps 128 keys of a KV head in shared memory, and their d_k and d_v in the registers of two consumers, warpgroups with 64 keys
 * each. It walks over tiles of BM rows of the query heads of its group, from the last rows to the first (bwd_one.cu says why). Behind the consumers
 * are the producers, four warps:
 *
 *   loader    fetches K and V, then Q and d_o of tile after tile, as buffers become empty
 *   tender    brings lse and delta of the rows; and where some pairs are masked, sees to it that 0 * NaN does not reach a product
 *   adders    two, for every other tile: add d_q of the tile to what the blocks of the keys before have left in memory
 *
 * With keys in the place of rows, P^T and d_s^T go from one product to the next in registers, as in bwd.cu; d_s goes through shared memory
 * besides, for d_q, of which each consumer makes one half. Per tile n a consumer does
 *
 *     (S(n) = K Q^T and D(n) = V d_o^T - delta are under way)
 *     wait for S               Q of the tile before is empty: its d_k was before S
 *     P = exp2(S - lse)        beneath D
 *     d_v += P d_o             begins
 *     wait for D
 *     d_s = P D                beneath d_v
 *     d_s to shared memory     when the other consumer has read that of the tile before; then both meet
 *     d_q = d_s K, d_k += d_s Q   begin
 *     wait for d_q             d_o is empty
 *     d_q to shared memory     beneath d_k; an adder takes it from there. All that S and D of the next tile wait for is waited for here
 *     wait for d_k
 *     S(n + 1), D(n + 1)       begin
 *
 * so that there is nearly always a product under way, though both consumers do the same at the same time.
 *
 * d_q is a sum over blocks. They take turns, in the order of keys, so that it has the same bits every time: `turns` has, for each tile of
 * rows and head, the number of the last block that has added to it, plus 1. An adder waits for the block before, and has a bulk
 * copy add the tile; nobody else waits for it, unless it is two tiles behind. The block whose turn is the last one has the sum of the others copied
 * into the buffer instead, and its consumers add theirs and write d_q; where nobody else has a turn there is no sum at all. With ATTN_UNORDERED
 * blocks add as they come, and then, or where attn__cuda_finishes says no, bwd_cast (bwd_rows.cu) turns the sums, which lie as threads hold them, into d_q.
 *
 * A masked pair has P = d_s = 0, which in a product with a row that is not finite still gives NaN. So where a tile has a mask the tender looks
 * through Q and d_o, and where a block may have such tiles the consumers look through K. Whatever is not finite becomes zero, and
 * those that see it get their NaN by another way: a row of Q by its lse, a row of d_o by its delta and for d_v in the end (add_nonfinite),
 * a key by its scale. Tiles without a mask are multiplied as they are.
 */
#include <stddef.h>

#include "device.cuh"

/* ---- the line of the table ---- */

#define PIECE(...)
#define FWD(...)
#define FWD90(...)
#define BWD(...)
#define BWD90(name, dtype, dim, rows, keys, blocks, buffers)                                                               \
    enum { name##_DTYPE = ATTN_##dtype, name##_DIM = dim, name##_BM = rows, name##_BN = keys, name##_QBUF = buffers };
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
    BM = K(BM),     /* rows of a tile */
    BN = K(BN),     /* keys of a block */
    QBUF = K(QBUF), /* buffers for d_q ... */
    PAIR = 1,
    CHUNKS = 1, /* ... each of a whole tile ... */
    ROUND = 1   /* ... and for one adder */
};

#include "bwd_sm90.cuh"

enum {
    CONSUMERS = 2,
    THREADS = 128 * CONSUMERS,
    STAGES = 2,
    BY_ROWS = BM == 128,                     /* consumers share d_q by rows; else by dims */
    QN = (BY_ROWS ? (int)DIM : DIM / 2) / 8, /* 8-column tiles of a consumer's d_q */
    /* In registers, for P twice, as numbers and as an operand: d_s is made beneath d_v. Else that comes later. */
    HAS_ROOM = BM == 64,
    EARLY = 4, /* 8-column tiles whose lse is fetched while S is under way */
    PRODUCER_REGISTERS = 24,
    CONSUMER_REGISTERS = 240
};
static_assert(BM == 64 || BM == 128, "rows of d_q in whole warpgroups");
static_assert(BN == 64 * CONSUMERS, "64 keys to a consumer");
static_assert(QBUF == 2, "a buffer for each adder");
static_assert(STAGES == 2, "the stage before is stage ^ 1");
static_assert(QN <= NT, "d_q takes the place of D");
static_assert(BY_ROWS ? DIM == 64 : DIM == 128, "want another way to share d_q");

/* Numbers of named barriers. KEYS: they have been looked through; FREE + c: d_s may be written by consumer c. */
enum { BARRIER_KEYS = 1, BARRIER_D_S, BARRIER_FREE, BARRIER_END = BARRIER_FREE + CONSUMERS };

/* ---- shared memory: K, V, stages of Q and d_o, d_s, buffers of d_q; all but the last in blocks of 64 columns; notes ---- */

/* Barriers, and what the tender tells of a stage. raw: Q and d_o before it has looked at them. */
typedef struct shared_notes {
    uint64_t kv_full, q_full[STAGES], q_empty[STAGES], o_full[STAGES], o_empty[STAGES], stats_full[STAGES], raw[STAGES];
    uint64_t d_q_full[QBUF], d_q_empty[QBUF], whole[QBUF];
    result_note results[QBUF];
    float lse[STAGES][BM]; /* in base 2; +inf: P is 0 */
    float minus_delta[STAGES][BM];
    uint32_t tile[STAGES];        /* tile_word */
    float key_scale[BN];          /* NaN: the key is not finite */
    uint32_t bad_keys[CONSUMERS]; /* are there such keys? */
    uint32_t bad;                 /* some d_o was not finite */
    place at;                     /* here, and not in everybody's registers */
    float fit, d_q_scale;         /* float16: what is left of d_s's factor when P has its own; what d_q is multiplied by */
    int32_t is_there;             /* is there anything to do at all? */
    uint32_t with_keys[STAGES][EACH]; /* a bit for each row */
} shared_notes;
static_assert(sizeof(shared_notes) <= ATTN_BWD90_NOTES, "give the notes more room");

/*
 * A tile of rows: its number, whether the consumers shall write its d_q, whether there is another one after it, and for each consumer, whether
 * some pairs are masked.
 */
DEVICE uint32_t tile_word(int32_t n, bool last, bool more, uint32_t partial) {
    return (uint32_t)n << 4 | (uint32_t)last << 3 | (uint32_t)more << 2 | partial;
}

typedef struct buffers {
    uint32_t k, v, q, o, d_s, d_q, notes;
} buffers;
#define NOTE(b, field) ((b).notes + (uint32_t)offsetof(shared_notes, field))
#define BARRIER(b, field, n) (NOTE(b, field) + 8 * (n))

DEVICE buffers find_buffers(void) {
    buffers b;
    b.k = shared_start();
    b.v = b.k + KV_BYTES;
    b.q = b.v + KV_BYTES;
    b.o = b.q + STAGES * Q_BYTES;
    b.d_s = b.o + STAGES * Q_BYTES;
    b.d_q = b.d_s + D_S_BYTES;
    b.notes = b.d_q + QBUF * CHUNK_BYTES;
    return b;
}

DEVICE void make_barriers(const buffers &b) {
    mbarrier_init(NOTE(b, kv_full), 1);
    for (int n = 0; n < STAGES; n++) {
        mbarrier_init(BARRIER(b, q_full, n), 32); /* the loader for the tender's lanes, or they */
        mbarrier_init(BARRIER(b, o_full, n), 32);
        mbarrier_init(BARRIER(b, stats_full, n), 32);
        mbarrier_init(BARRIER(b, q_empty, n), THREADS / 32);
        mbarrier_init(BARRIER(b, o_empty, n), THREADS / 32);
        mbarrier_init(BARRIER(b, raw, n), 1);
    }
    for (int n = 0; n < QBUF; n++) {
        mbarrier_init(BARRIER(b, d_q_full, n), THREADS / 32);
        mbarrier_init(BARRIER(b, d_q_empty, n), 1);
        mbarrier_init(BARRIER(b, whole, n), 1);
    }
    for (int n = 0; n < CONSUMERS; n++) st_shared_b32(NOTE(b, bad_keys) + n * 4, 0);
    st_shared_b32(NOTE(b, bad), 0);
    fence_mbarrier_init();
}

/* ---- the loader: one thread ---- */

DEVICE void load(const attn_cuda_args90 &x, const buffers &b, const place &at) {
    const attn_cuda_args &a = x.a;
    const bool packed_q = a.p.flags & ATTN_VARLEN_Q, packed = a.p.flags & ATTN_VARLEN_KV;
    const int32_t key = (int32_t)at.s.kv_row + at.s.leftpad + at.own, slot = packed ? 0 : at.s.slot;
    const int32_t row = (int32_t)at.s.q_row, batch = packed_q ? 0 : at.s.b;
    mbarrier_arrive_expect_tx(NOTE(b, kv_full), 2 * KV_BYTES);
    fetch(&x.k, b.k, NOTE(b, kv_full), BN, key, at.kv_head, slot);
    fetch(&x.v, b.v, NOTE(b, kv_full), BN, key, at.kv_head, slot);
    ring r = {};
    for (walk w = first_tile(a, at); w.h < at.h_end; w = next_tile(a, at, w)) {
        const bool tended = is_tended(a, at, w.n);
        const uint32_t raw = BARRIER(b, raw, r.at), q_full = tended ? raw : BARRIER(b, q_full, r.at);
        const uint32_t o_full = tended ? raw : BARRIER(b, o_full, r.at);
        mbarrier_wait_parity(BARRIER(b, q_empty, r.at), r.parity ^ 1);
        mbarrier_arrive_expect_tx(q_full, tended ? 2 * Q_BYTES : (int)Q_BYTES);
        if (!tended) mbarrier_arrive_count(q_full, 31);
        fetch(&x.q, b.q + r.at * Q_BYTES, q_full, BM, row + w.n * BM, w.h, batch);
        mbarrier_wait_parity(BARRIER(b, o_empty, r.at), r.parity ^ 1);
        if (!tended) {
            mbarrier_arrive_expect_tx(o_full, Q_BYTES);
            mbarrier_arrive_count(o_full, 31);
        }
        fetch(&x.o, b.o + r.at * Q_BYTES, o_full, BM, row + w.n * BM, w.h, batch);
        turn_ring(r, STAGES);
    }
}

/* ---- the tender: one warp ---- */

/* For each consumer a bit: are some pairs of tile n masked? */
DEVICE uint32_t partial_bits(const attn_cuda_args &a, const place &at, int32_t n) {
    if (n * BM + BM > at.s.sq) return 3; /* rows of zeros, and K may hold infinities */
    if (!at.masks) return (at.count < 64) | (at.count < BN) << 1;
    return hides(a, at, n, at.own, at.own + 64) | hides(a, at, n, at.own + 64, at.own + BN) << 1;
}

DEVICE void tend(const attn_cuda_args &a, const buffers &b, const place &at) {
    const bool nonsense = a.finishes && *a.overlap;
    const int lane = threadIdx.x & 31;
    ring r = {};
    uint32_t raw = 0; /* parities, a bit for each stage */
    walk w = first_tile(a, at);
    stats x[EACH]; /* of the tile to come: memory is far away */
    if (says(w.h < at.h_end)) load_stats(a, at, w, x);
    while (says(w.h < at.h_end)) {
        const walk next = next_tile(a, at, w);
        const bool more = says(next.h < at.h_end);
        const uint32_t word = tile_word(w.n, is_last(a, at, w.n, nonsense), more, partial_bits(a, at, w.n));
        mbarrier_wait_parity(BARRIER(b, o_empty, r.at), r.parity ^ 1);
        if (lane == 0) st_shared_b32(NOTE(b, tile) + r.at * 4, word);
#pragma unroll
        for (int n = 0; n < EACH; n++) {
            const uint32_t to = (r.at * BM + n * 32 + lane) * 4;
            st_shared_b32(NOTE(b, lse) + to, __float_as_uint(fitted_lse(x[n].lse)));
            st_shared_b32(NOTE(b, minus_delta) + to, __float_as_uint(-x[n].delta));
            const uint32_t with_keys = __ballot_sync(~0u, x[n].lse != -INFINITY);
            if (lane == 0) st_shared_b32(NOTE(b, with_keys) + (r.at * EACH + n) * 4, with_keys);
        }
        if (more) load_stats(a, at, next, x);
        if (is_tended(a, at, w.n)) {
            mbarrier_wait_parity(BARRIER(b, raw, r.at), raw >> r.at & 1);
            raw ^= 1u << r.at;
#pragma unroll 1
            for (int n = 0; n < EACH; n++) {
                const int row = n * 32 + lane;
                const uint32_t lse_at = NOTE(b, lse) + (r.at * BM + row) * 4,
                               delta_at = NOTE(b, minus_delta) + (r.at * BM + row) * 4;
                tend_row(b.q + r.at * Q_BYTES, b.o + r.at * Q_BYTES, row,
                         __uint_as_float(ld_shared_b32(lse_at)) == INFINITY, lse_at, delta_at, NOTE(b, bad));
            }
            fence_proxy_async();
            mbarrier_arrive(BARRIER(b, q_full, r.at));
            mbarrier_arrive(BARRIER(b, o_full, r.at));
        }
        mbarrier_arrive(BARRIER(b, stats_full, r.at));
        turn_ring(r, STAGES);
        w = next;
    }
}

/* ---- the consumers: keys ---- */

typedef struct consumer {
    int number;
    ring in, out;           /* stages of Q and d_o; buffers of d_q */
    uint64_t k, v;          /* S, D: its own keys, K-major */
    uint64_t d_s, k_across; /* d_q: its rows of d_s, its dims of K; both MN-major */
} consumer;

/* The first of the thread's two keys in the block; the other one is 8 further on. */
DEVICE int32_t my_key(const consumer &me) {
    return me.number * 64 + (int32_t)((threadIdx.x >> 5 & 3) * 16 + (threadIdx.x >> 2 & 7));
}

/*
 * Keys past the end become zeros; under a mask those that hold something that is not finite too, and key_scale and bad_keys say so. Two threads
 * to a key.
 */
DEVICE void tend_keys(const attn_cuda_args &a, const buffers &b, const place &at, const consumer &me) {
    if (!at.masks && at.count == BN) return;
    const int key = me.number * 64 + (int)(threadIdx.x & 127) / 2, from = (int)(threadIdx.x & 1) * (DIM / 16);
    bool bad = at.masks && holds_nonfinite(b.k, BN, key, from, from + DIM / 16);
    bad = __shfl_xor_sync(~0u, (int)bad, 1) || bad;
    if (bad || key >= at.count) clear_row(b.k, BN, key, from, from + DIM / 16);
    if (from == 0) st_shared_b32(NOTE(b, key_scale) + key * 4, __float_as_uint(bad ? NAN : a.scale_log2));
    if (bad) st_shared_b32(NOTE(b, bad_keys) + me.number * 4, 1);
    fence_proxy_async();
    bar_sync(BARRIER_KEYS, THREADS);
}
DEVICE uint32_t has_bad_keys(const buffers &b, const consumer &me) {
    return ld_shared_b32(NOTE(b, bad_keys) + me.number * 4);
}

/* ---- the consumers: products ---- */

/*
 * S = K Q^T, D = V d_o^T: 64 keys of 128, all rows of a tile. _set: P, which was made of the S before, may not be in the way, as a product is
 * always under way; without HAS_ROOM there are times when none is, and then P and S have the same registers.
 */
DEVICE void begin_product(float s[NT][4], uint64_t keys, uint32_t tile, bool add) {
    const uint64_t rows = wgmma_k_major(tile);
    wgmma_fence();
    if (add)
        product_ss(BM, s[0], keys, rows, 1);
    else if (HAS_ROOM)
        product_ss_set(BM, s[0], keys, rows);
    else
        product_ss(BM, s[0], keys, rows, 0);
#pragma unroll
    for (int c = 1; c < DIM / 16; c++)
        product_ss(BM, s[0], wgmma_step(keys, 1, c / 4 * BN * ROW + c % 4 * 32),
                   wgmma_step(rows, 1, c / 4 * BM * ROW + c % 4 * 32), 1);
    wgmma_commit_group();
}

/* d_v += P d_o, d_k += d_s Q. */
DEVICE void begin_sum(float sum[DT][4], const uint32_t w[STEPS][4], uint32_t tile) {
    const uint64_t rows = wgmma_mn_major(tile, BM * ROW);
    wgmma_fence();
#pragma unroll
    for (int ks = 0; ks < STEPS; ks++) product_rs(DIM, sum[0], w[ks], wgmma_step(rows, ks, 16 * ROW), 1);
    wgmma_commit_group();
}

/* d_q = d_s K: all keys, 64 rows and all dims, or all rows and 64 dims. */
DEVICE void begin_d_q(float d_q[NT][4], const consumer &me) {
    wgmma_fence();
    product_mn_set(QN * 8, d_q[0], me.d_s, me.k_across);
#pragma unroll
    for (int ks = 1; ks < BN / 16; ks++)
        product_mn(QN * 8, d_q[0], wgmma_step(me.d_s, ks, 16 * ROW), wgmma_step(me.k_across, ks, 16 * ROW), 1);
    wgmma_commit_group();
}

/* ---- the consumers: from products to weights ---- */

/* Is pair e of 8-column tile nt seen? all: every one is; a constant. */
DEVICE bool sees(const uint32_t seen[WORDS], int nt, int e, bool all) {
    return all || (seen[nt / 8] >> (nt % 8 * 4 + e) & 1);
}

/* s: products of q and k, becomes P; with HAS_ROOM it is packed too. */
DEVICE void weigh(float s[NT][4], uint32_t p[STEPS][4], const float scale[2], const float early[EARLY][2], uint32_t lse,
                  const uint32_t seen[WORDS], bool all) {
#pragma unroll
    for (int nt = 0; nt < NT; nt++) {
        float less[2];
        if (nt < EARLY) {
            less[0] = early[nt][0];
            less[1] = early[nt][1];
        } else {
            load_pair(less, lse, nt);
        }
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const float x = ex2_approx(__fmaf_rn(s[nt][e], scale[e >> 1], -less[e & 1]));
            s[nt][e] = all || (sees(seen, nt, e, false) && less[e & 1] != INFINITY) ? x : 0;
        }
        if (HAS_ROOM && nt % 2) pack_weights(p[nt / 2], &s[nt - 1]);
    }
}

/* d: products of d_o and v; d_s is packed, without HAS_ROOM P too. fit: of float16. */
DEVICE void weigh_gradient(const float d[NT][4], const float s[NT][4], uint32_t p[STEPS][4], uint32_t d_s[STEPS][4],
                           const uint32_t seen[WORDS], float fit, bool all) {
#pragma unroll
    for (int ks = 0; ks < STEPS; ks++) {
        float x[2][4];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int nt = 2 * ks + half;
#pragma unroll
            for (int e = 0; e < 4; e++) {
                x[half][e] = s[nt][e] * d[nt][e] * (BF16 ? 1 : fit);
                if (!sees(seen, nt, e, all)) x[half][e] = 0;
            }
        }
        pack_weights(d_s[ks], x);
        if (!HAS_ROOM) pack_weights(p[ks], &s[2 * ks]);
    }
}

/* d_s to shared memory, [keys][rows]: lane l has the address of key l % 16 of its warp and of 8-column tile l / 16, then every other one. */
DEVICE void put_d_s(const buffers &b, const consumer &me, const uint32_t w[STEPS][4]) {
    const int lane = (int)(threadIdx.x & 31), key = me.number * 64 + (int)(threadIdx.x >> 5 & 3) * 16 + lane % 16;
    const uint32_t to = piece_at(b.d_s, BN, key, lane / 16);
#pragma unroll
    for (int ks = 0; ks < STEPS; ks++) stmatrix_x4((to + ks / 4 * BN * ROW) ^ ks % 4 * 32, w[ks]);
}

/* d_q to shared memory as threads hold it, 16 bytes of each side by side. */
DEVICE void put_d_q(const buffers &b, const consumer &me, const float d_q[NT][4]) {
    const uint32_t to = b.d_q + me.out.at * CHUNK_BYTES + (me.number * QN * 128 + (threadIdx.x & 127)) * 16;
#pragma unroll
    for (int n = 0; n < QN; n++)
        st_shared_v4(to + n * 128 * 16, make_uint4(__float_as_uint(d_q[n][0]), __float_as_uint(d_q[n][1]),
                                                   __float_as_uint(d_q[n][2]), __float_as_uint(d_q[n][3])));
}

/* The first of the thread's two rows of d_q in the tile; the other one is 8 further on. */
DEVICE int32_t my_row(const consumer &me) {
    return (BY_ROWS ? me.number * 64 : 0) + (int32_t)((threadIdx.x >> 5 & 3) * 16 + (threadIdx.x >> 2 & 7));
}
/* Two bits: do the thread's rows have keys? Before the tile is left. */
DEVICE uint32_t find_rows(const buffers &b, const consumer &me, uint32_t stage) {
    const int32_t row = my_row(me);
    const uint32_t word = ld_shared_b32(NOTE(b, with_keys) + (stage * EACH + row / 32) * 4) >> row % 32;
    return (word & 1) | (word >> 8 & 1) << 1;
}

/* What a consumer has of a tile. Arrays by themselves: in a struct they would live in memory. */
typedef struct tile {
    int32_t n;
    bool last, more, partial;
    uint32_t seen[WORDS]; /* partial */
} tile;

/* D = V d_o^T - delta. */
DEVICE void prepare_d(const buffers &b, const consumer &me, float d[NT][4]) {
    const uint32_t delta = NOTE(b, minus_delta) + me.in.at * BM * 4;
#pragma unroll
    for (int nt = 0; nt < NT; nt++) {
        load_pair(d[nt], delta, nt);
        d[nt][2] = d[nt][0];
        d[nt][3] = d[nt][1];
    }
    mbarrier_wait_parity(BARRIER(b, o_full, me.in.at), me.in.parity);
}
DEVICE void begin_d(const buffers &b, const consumer &me, float d[NT][4]) {
    begin_product(d, me.v, b.o + me.in.at * Q_BYTES, true);
}
DEVICE void read_tile(const buffers &b, const consumer &me, tile &t) {
    mbarrier_wait_parity(BARRIER(b, stats_full, me.in.at), me.in.parity);
    const uint32_t word = ld_shared_b32(NOTE(b, tile) + me.in.at * 4);
    t.n = (int32_t)(word >> 4);
    t.last = says(word & 8);
    t.more = says(word & 4);
    t.partial = says((word >> me.number & 1) | has_bad_keys(b, me));
}

/* From S and D, which are under way, to D, which is there, with d_v under way: s becomes P. first: there is no tile before it, whose Q would
 * be empty now. */
DEVICE void make_p(const attn_cuda_args &a, const buffers &b, const place &at, const consumer &me, float s[NT][4],
                   uint32_t p[STEPS][4], float d_v[DT][4], tile &t, bool first) {
    const uint32_t stage = me.in.at, lse = NOTE(b, lse) + stage * BM * 4;
    float early[EARLY][2]; /* lse, while S is under way */
#pragma unroll
    for (int nt = 0; nt < EARLY; nt++) load_pair(early[nt], lse, nt);
    wgmma_wait_group(1);
    if (!first) arrive_by_warps(BARRIER(b, q_empty, stage ^ 1));
    if (t.partial) {
        const uint32_t scales = NOTE(b, key_scale) + my_key(me) * 4;
        float scale[2] = {a.scale_log2, a.scale_log2};
        if (has_bad_keys(b, me)) {
            scale[0] = __uint_as_float(ld_shared_b32(scales));
            scale[1] = __uint_as_float(ld_shared_b32(scales + 32));
        }
        find_seen(a, at, my_key(me), t.n, t.seen);
        weigh(s, p, scale, early, lse, t.seen, false);
    } else {
        const float scale[2] = {a.scale_log2, a.scale_log2};
        weigh(s, p, scale, early, lse, t.seen, true);
    }
    if (HAS_ROOM) {
        begin_sum(d_v, p, b.o + stage * Q_BYTES);
        wgmma_wait_group(1);
    } else {
        wgmma_wait_group(0);
    }
}

/* d_q, which is there, to shared memory, when the adder has taken what was there before; or, of the last one, to memory. */
DEVICE void wait_for_adder(const buffers &b, const consumer &me) {
    mbarrier_wait_parity(BARRIER(b, d_q_empty, me.out.at), me.out.parity ^ 1);
}
DEVICE void give_d_q(const attn_cuda_args &a, const buffers &b, consumer &me, float d_q[NT][4], bool last, uint32_t rows) {
    if (!last) {
        put_d_q(b, me, d_q);
        return;
    }
    mbarrier_wait_parity(BARRIER(b, whole, me.out.at), me.out.parity);
    const result_note note = read_note(NOTE(b, results) + me.out.at * (uint32_t)sizeof(result_note));
    if (note.adds) add_sum(d_q, b.d_q + me.out.at * CHUNK_BYTES + me.number * QN * 128 * 16, QN);
    const float scale = BF16 ? (float)a.p.scale : __uint_as_float(ld_shared_b32(NOTE(b, d_q_scale)));
    write_d_q(a, note, d_q, QN, my_row(me), BY_ROWS ? 0 : me.number * QN * 8, rows, scale);
}
DEVICE void pass_d_q(const buffers &b, consumer &me) {
    fence_proxy_async();
    __syncwarp();
    arrive_by_warps(BARRIER(b, d_q_full, me.out.at));
    turn_ring(me.out, QBUF);
}
/* Nobody reads d_o and d_s of the tile any more. */
DEVICE void leave_tile(const buffers &b, const consumer &me, uint32_t stage) {
    arrive_by_warps(BARRIER(b, o_empty, stage));
    bar_arrive(BARRIER_FREE + 1 - me.number, THREADS);
}

/* From P and D to d_q and d_k, which are under way then: d becomes d_q. */
DEVICE void begin_gradients(const buffers &b, const consumer &me, const float s[NT][4], float d[NT][4],
                            uint32_t p[STEPS][4], float d_v[DT][4], uint32_t d_s[STEPS][4], float d_k[DT][4],
                            const tile &t) {
    const float fit = BF16 ? 1 : __uint_as_float(ld_shared_b32(NOTE(b, fit)));
    if (t.partial)
        weigh_gradient(d, s, p, d_s, t.seen, fit, false);
    else
        weigh_gradient(d, s, p, d_s, t.seen, fit, true);
    bar_sync(BARRIER_FREE + me.number, THREADS);
    put_d_s(b, me, d_s);
    fence_proxy_async();
    bar_sync(BARRIER_D_S, THREADS);
    if (HAS_ROOM)
        wgmma_wait_group(0); /* for d_v: registers of p */
    else
        begin_sum(d_v, p, b.o + me.in.at * Q_BYTES);
    begin_d_q(d, me);
    begin_sum(d_k, d_s, b.q + me.in.at * Q_BYTES);
}

/*
 * All tiles. ptxas wants what is read to have begun in the same round of the loop, and no way out of its middle, or it waits for every
 * product at once: so a round begins when P and D of a tile are there.
 */
DEVICE void walk_rows(const attn_cuda_args &a, const buffers &b, const place &at, consumer &me, float d_k[DT][4],
                      float d_v[DT][4]) {
    float s[NT][4], d[NT][4]; /* S, then P; D, then d_q: registers are scarce */
    uint32_t p[STEPS][4], d_s[STEPS][4];
    tile t;
    mbarrier_wait_parity(BARRIER(b, q_full, 0), 0);
    begin_product(s, me.k, b.q, false);
    read_tile(b, me, t);
    prepare_d(b, me, d);
    begin_d(b, me, d);
    make_p(a, b, at, me, s, p, d_v, t, true);
#pragma unroll 1
    while (t.more) {
        const uint32_t stage = me.in.at;
        const bool last = t.last;
        begin_gradients(b, me, s, d, p, d_v, d_s, d_k, t);
        turn_ring(me.in, STAGES);
        read_tile(b, me, t);
        wait_for_adder(b, me);
        mbarrier_wait_parity(BARRIER(b, q_full, me.in.at), me.in.parity);
        const uint32_t rows = last ? find_rows(b, me, stage) : 0;
        wgmma_wait_group(1);
        leave_tile(b, me, stage);
        give_d_q(a, b, me, d, last, rows);
        if (HAS_ROOM) {
            prepare_d(b, me, d);
            pass_d_q(b, me);
        }
        wgmma_wait_group(0); /* for d_k: registers of d_s, which S wants */
        begin_product(s, me.k, b.q + me.in.at * Q_BYTES, false);
        if (!HAS_ROOM) prepare_d(b, me, d);
        begin_d(b, me, d);
        if (!HAS_ROOM) pass_d_q(b, me);
        make_p(a, b, at, me, s, p, d_v, t, false);
    }
    begin_gradients(b, me, s, d, p, d_v, d_s, d_k, t);
    const uint32_t rows = t.last ? find_rows(b, me, me.in.at) : 0;
    wait_for_adder(b, me);
    wgmma_wait_group(0);
    leave_tile(b, me, me.in.at);
    give_d_q(a, b, me, d, t.last, rows);
    pass_d_q(b, me);
    bar_sync(BARRIER_FREE + me.number, THREADS); /* what the other one has arrived for */
}

/* ---- results ---- */

/* Keys of d_k or d_v, a warp's 16: through shared memory, the place of a tile that nobody reads any more, so that rows leave in whole. */
DEVICE void send_keys(const attn_cuda_args &a, uint32_t tile, const place &at, const consumer &me, const attn_tensor &to,
                      const float sum[DT][4], int32_t dim, float factor) {
    if (!to.data) return;
    const int lane = (int)(threadIdx.x & 31), first = me.number * 64 + (int)(threadIdx.x >> 5 & 3) * 16;
    const uint32_t from = piece_at(tile, BN, first + lane % 16, lane / 16);
#pragma unroll
    for (int dt = 0; dt < DT; dt += 2) {
        uint32_t w[4];
#pragma unroll
        for (int e = 0; e < 4; e++)
            w[e] = pack(sum[dt + e / 2][e % 2 * 2] * factor, sum[dt + e / 2][e % 2 * 2 + 1] * factor);
        stmatrix_x4((from + dt / 8 * BN * ROW) ^ dt % 8 * 16, w);
    }
    __syncwarp();
    enum { PIECES = DIM / 8, AT_ONCE = 32 / PIECES };
    const int c = lane % PIECES;
    int key = first + lane / PIECES;
    uint16_t *row =
        (uint16_t *)to.data + attn__kv_offset(&a.p, &a.f, &to, &at.s, at.s.leftpad + at.own + key, at.kv_head) + c * 8;
    if (c * 8 >= dim) return;
    const bool whole = (uint64_t)row % 16 == 0 && to.stride[1] % 8 == 0 && c * 8 + 8 <= dim;
#pragma unroll 4
    for (int n = 0; n < 16; n += AT_ONCE, key += AT_ONCE, row += AT_ONCE * to.stride[1]) {
        if (key >= at.count) return;
        const uint4 x = ld_shared_v4(piece_at(tile, BN, key, c));
        if (whole) {
            *(uint4 *)row = x;
        } else {
            const uint32_t w[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
            for (int e = 0; e < 8; e++)
                if (c * 8 + e < dim) row[e] = (uint16_t)(w[e / 2] >> e % 2 * 16);
        }
    }
}

DEVICE void consume(const attn_cuda_args &a, const buffers &b, const place &at) {
    float d_k[DT][4] = {}, d_v[DT][4] = {};
    consumer me = {};
    me.number = says(threadIdx.x >= 128);
    me.k = wgmma_k_major(b.k + me.number * 64 * ROW);
    me.v = wgmma_k_major(b.v + me.number * 64 * ROW);
    me.d_s = wgmma_mn_major(b.d_s + (BY_ROWS ? me.number * BN * ROW : 0), BN * ROW);
    me.k_across = wgmma_mn_major(b.k + (BY_ROWS ? 0 : me.number * BN * ROW), BN * ROW);
    mbarrier_wait_parity(NOTE(b, kv_full), 0);
    tend_keys(a, b, at, me);
    bar_arrive(BARRIER_FREE + 1 - me.number, THREADS); /* nobody reads d_s yet */
    if (says(first_tile(a, at).h < at.h_end))
        walk_rows(a, b, at, me, d_k, d_v);
    else
        bar_sync(BARRIER_FREE + me.number, THREADS);
    send_keys(a, b.k, at, me, a.f.d_k, d_k, a.p.dim_qk, (float)a.p.scale / fit_of(a, at.s.b, at.kv_head));
    __syncwarp();
    send_keys(a, b.v, at, me, a.f.d_v, d_v, a.p.dim_v, 1 / fit_of_p());
    __syncwarp();
    bar_sync(BARRIER_END, THREADS);
    if (ld_shared_b32(NOTE(b, bad))) add_nonfinite(a, at, 0, BN, threadIdx.x);
}

KERNEL __launch_bounds__(THREADS + 128, 1) VARIANT(const __grid_constant__ attn_cuda_args90 x) {
    extern __shared__ __align__(1024) uint8_t shared[];
    const buffers b = find_buffers();
    shared_notes &notes = *(shared_notes *)(shared + (b.notes - b.k));
    const place &at = notes.at;
    if (cvta_shared(shared) != shared_start()) __trap();
    if (threadIdx.x == 0) {
        make_barriers(b);
        notes.is_there = find_place(x.a, notes.at);
        if (!BF16 && notes.is_there) {
            const float fit = fit_of(x.a, at.s.b, at.kv_head);
            notes.fit = fit / fit_of_p();
            notes.d_q_scale = (float)x.a.p.scale / fit;
        }
    }
    __syncthreads();
    if (!notes.is_there) return;
    if (threadIdx.x >= THREADS) {
        const int warp = (int)(threadIdx.x - THREADS) / 32;
        const bool alone = (threadIdx.x & 31) == 0;
        setmaxnreg_dec(PRODUCER_REGISTERS);
        if (warp == 0) {
            if (alone) load(x, b, at);
        } else if (warp == 1) {
            tend(x.a, b, at);
        } else {
            const int n = warp - 2;
            d_q_ring d_q = {};
            d_q.at = b.d_q + n * CHUNK_BYTES;
            d_q.full = BARRIER(b, d_q_full, n);
            d_q.empty = BARRIER(b, d_q_empty, n);
            d_q.whole = BARRIER(b, whole, n);
            d_q.note = NOTE(b, results) + n * (uint32_t)sizeof(result_note);
            if (x.a.f.d_q.data)
                add(x.a, d_q, at, n);
            else if (alone)
                drop(x.a, d_q, at, n);
        }
    } else {
        setmaxnreg_inc(CONSUMER_REGISTERS);
        consume(x.a, b, at);
    }
}
