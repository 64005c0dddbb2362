/*
 * Forward attention on Hopper: wgmma products, tiles by the tensor memory accelerator. One line FWD90 of variants.def is one build
 * of this file.
 *
 * A block stays on its multiprocessor and works through places (64 rows for each of its consumers, one head) until none is left.
 * Its last warpgroup, the producer, fetches Q, K and V; the others, the consumers, have 64 rows each. They meet at
 * barriers in shared memory, a pair for each buffer: `full` (the bytes have arrived) and `empty` (every consumer is done with
 * it). Per tile of keys a consumer does
 *
 *     wait for K(n), take its turn
 *     S = Q K(n)^T             begins
 *     wait for V(n + 1)
 *     O += P V(n + 1)          begins; P is that of the tile before
 *     pass the turn on
 *     wait for S               K(n) is empty
 *     softmax of S             beneath the second product, and beneath those of the other consumers
 *     wait for O               V(n + 1) is empty; O follows where a maximum moved; P is packed
 *
 * Turns (named barriers) keep consumers out of step: while one is at its softmax another one's products have the tensor cores.
 * The results go through the consumer's own rows of Q in shared memory. Lines with all = 1 know every feature; their producer
 * fetches what the accelerator cannot describe (pages, odd addresses, other dtypes) piece by piece with all its threads. Both kinds
 * give the same bits.
 */
#include <float.h>

#include "score.cuh"
#include "wgmma.cuh"

/* ---- the line of the table ---- */

#define PIECE(...)
#define FWD(...)
#define FWD90(name, dtype, dim, dimv, bn, consumers, stages, qbuf, all)                                                    \
    enum {                                                                                                                 \
        name##_DTYPE = ATTN_##dtype,                                                                                       \
        name##_DIM = dim,                                                                                                  \
        name##_DV = dimv,                                                                                                  \
        name##_BN = bn,                                                                                                    \
        name##_CONSUMERS = consumers,                                                                                      \
        name##_STAGES = stages,                                                                                            \
        name##_QBUF = qbuf,                                                                                                \
        name##_ALL = all                                                                                                   \
    };
#ifndef VARIANTS
#define VARIANTS "variants.def"
#endif
#include VARIANTS
#undef PIECE
#undef FWD
#undef FWD90
#define K_(variant, field) variant##_##field
#define K__(variant, field) K_(variant, field)
#define K(field) K__(VARIANT, field)

enum {
    DTYPE = K(DTYPE),
    DIM = K(DIM),
    DV = K(DV),
    BN = K(BN),
    CONSUMERS = K(CONSUMERS),
    STAGES = K(STAGES),
    QBUF = K(QBUF),
    ALL = K(ALL),
    BM = 64 * CONSUMERS,
    THREADS = 128 * CONSUMERS, /* that work on rows */
    MT = 1,
    NT = BN / 8,
    DT = DV / 8,
    PV_STEPS = BN / 16,
    EB = 2,
    PER_CHUNK = 8,
    QK_CHUNKS = DIM / 8,
    V_CHUNKS = DV / 8,
    Q_BYTES = BM * DIM * EB,
    K_BYTES = BN * DIM * EB,
    V_BYTES = BN * DV * EB,
    /* 65,536 registers: less for the producer, and all the rest for the consumers */
    PRODUCER_REGISTERS = ALL              ? 64
                         : CONSUMERS == 3 ? 32
                                          : 40,
    CONSUMER_REGISTERS = ALL              ? 216
                         : CONSUMERS == 3 ? 160
                                          : 232
};
enum { BARRIER_TURN = 1, BARRIER_ROWS = 4, BARRIER_STORE = 5, BARRIER_PRODUCER = 8 }; /* numbers of named barriers */

/* ---- shared memory: Q, K, V, each in blocks of 64 columns; barriers ---- */

/* Where a 16-byte piece lies: blocks of 64 columns of all rows, pieces permuted by the row. */
DEVICE uint32_t piece_at(uint32_t tile, int rows, int row, int chunk) {
    return tile + (chunk >> 3) * rows * 128 + row * 128 + (((chunk ^ row) & 7) << 4);
}
DEVICE uint32_t v_piece(uint32_t shared_v, int row, int chunk) { return piece_at(shared_v, BN, row, chunk); }
DEVICE void block_barrier(void) { bar_sync(BARRIER_ROWS, THREADS); }
/* Votes and shuffles say nothing new, but tell the compiler that all lanes agree: it has to know where products are under way. */
DEVICE bool block_or(bool x) { return __any_sync(~0u, bar_red_or(BARRIER_ROWS, THREADS, x)); }
DEVICE int32_t agreed(int32_t x) { return __shfl_sync(~0u, x, 0); }

#include "rows.cuh"

typedef struct buffers {
    uint32_t q, k, v;
    uint32_t q_full, q_empty, k_full, k_empty, v_full, v_empty;
} buffers;

DEVICE buffers find_buffers(uint32_t shared) {
    buffers b;
    b.q = shared;
    b.k = b.q + QBUF * Q_BYTES;
    b.v = b.k + STAGES * K_BYTES;
    b.q_full = b.v + STAGES * V_BYTES;
    b.q_empty = b.q_full + 8 * QBUF;
    b.k_full = b.q_empty + 8 * QBUF;
    b.k_empty = b.k_full + 8 * STAGES;
    b.v_full = b.k_empty + 8 * STAGES;
    b.v_empty = b.v_full + 8 * STAGES;
    return b;
}

DEVICE void make_barriers(const buffers &b) {
    for (int n = 0; n < QBUF; n++) {
        mbarrier_init(b.q_full + 8 * n, 1);
        mbarrier_init(b.q_empty + 8 * n, CONSUMERS);
    }
    for (int n = 0; n < STAGES; n++) {
        mbarrier_init(b.k_full + 8 * n, 1);
        mbarrier_init(b.v_full + 8 * n, 1);
        mbarrier_init(b.k_empty + 8 * n, CONSUMERS);
        mbarrier_init(b.v_empty + 8 * n, CONSUMERS);
    }
    fence_mbarrier_init();
}

/* Which of several buffers is at hand, and the parity of its `full` barrier: it changes at every round. */
typedef struct ring {
    uint32_t at, parity;
} ring;
DEVICE void turn_ring(ring &r, uint32_t size) {
    if (++r.at == size) {
        r.at = 0;
        r.parity ^= 1;
    }
}

/* ---- work ---- */

/*
 * Place i of this block; false if there is nothing to do at it. Blocks take places in turn, forwards and backwards: the long ones,
 * which come first, and the short ones then add up to the same for each.
 */
DEVICE bool find_work(const attn_cuda_args &a, tile_place &at, int64_t i, bool fills) {
    int64_t n = i * gridDim.x + (i & 1 ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
    if (n >= a.work) return false;
    uint32_t each = (uint32_t)a.group * (uint32_t)a.slots;
    int64_t group = n / each;
    return find_place(a, at, group * a.group, (uint32_t)(n - group * each), fills);
}
DEVICE int64_t work_end(const attn_cuda_args &a) { return (a.work + gridDim.x - 1) / gridDim.x; }

/* ---- the producer ---- */

/* A tile piece by piece, with all threads of the producer. row0: query row, or cache position. */
DEVICE void gather_tile(const attn_cuda_args &a, const tile_place &at, const attn_tensor &t, bool is_q, uint32_t to,
                        int rows, int chunks, int32_t row0, int valid, int dim) {
    const attn_dtype dtype = is_q ? a.p.dtype : a.p.kv_dtype;
    const bool whole = a.vector_ok && dtype == (attn_dtype)DTYPE;
    for (int n = threadIdx.x - THREADS; n < rows * chunks; n += 128) {
        int row = n / chunks, c = n % chunks, count = row < valid ? chunk_count(c, dim) : 0;
        uint4 x = make_uint4(0, 0, 0, 0);
        if (count) {
            int64_t from = c * PER_CHUNK + (is_q ? attn__q_offset(&a.p, &t, &at.s, row0 + row, at.h)
                                                 : cache_offset(a, t, at.s, row0 + row, at.kv_head));
            x = whole && count == PER_CHUNK ? *(const uint4 *)((const uint8_t *)t.data + from * EB)
                                            : gather(t.data, dtype, from, count);
        }
        st_shared_v4(piece_at(to, rows, row, c), x);
    }
    fence_proxy_async();
    bar_sync(BARRIER_PRODUCER, 128);
}

/* One thread of the producer, the only one that works in plain kernels. */
DEVICE bool is_leader(void) { return threadIdx.x == THREADS; }

DEVICE void fetch_q(const attn_cuda_args90 &x, const tile_place &at, uint32_t to, uint32_t full) {
    const attn_cuda_args &a = x.a;
    if (ALL && !(a.tma & ATTN_TMA_Q)) {
        gather_tile(a, at, a.f.q, true, to, BM, QK_CHUNKS, at.row, at.rows, a.p.dim_qk);
        if (is_leader()) mbarrier_arrive(full);
        return;
    }
    if (!is_leader()) return;
    const bool packed = a.p.flags & ATTN_VARLEN_Q;
    mbarrier_arrive_expect_tx(full, Q_BYTES);
#pragma unroll 1
    for (int c = 0; c < DIM / 64; c++)
        cp_async_bulk_tensor_4d_load(to + c * BM * 128, &x.q, full, c * 64, (int)(packed ? at.s.q_row : 0) + at.row, at.h,
                                     packed ? 0 : at.s.b);
}

/* Tile n of K or V. */
DEVICE void fetch_kv(const attn_cuda_args90 &x, const tile_place &at, bool is_k, uint32_t to, uint32_t full, int32_t n) {
    const attn_cuda_args &a = x.a;
    const int chunks = is_k ? QK_CHUNKS : V_CHUNKS;
    if (ALL && !(a.tma & ATTN_TMA_KV)) {
        gather_tile(a, at, is_k ? a.f.k : a.f.v, false, to, BN, chunks, at.s.leftpad + n * BN, at.s.sk - n * BN,
                    is_k ? a.p.dim_qk : a.p.dim_v);
        if (is_leader()) mbarrier_arrive(full);
        return;
    }
    if (!is_leader()) return;
    const bool packed = a.p.flags & ATTN_VARLEN_KV;
    mbarrier_arrive_expect_tx(full, is_k ? K_BYTES : V_BYTES);
#pragma unroll 1
    for (int c = 0; c < chunks / 8; c++)
        cp_async_bulk_tensor_4d_load(to + c * BN * 128, is_k ? &x.k : &x.v, full, c * 64,
                                     (int)(packed ? at.s.kv_row : 0) + at.s.leftpad + n * BN, at.kv_head,
                                     packed ? 0 : at.s.slot);
}

DEVICE void produce(const attn_cuda_args90 &x, const buffers &b) {
    const attn_cuda_args &a = x.a;
    ring q = {}, kv = {};
    for (int64_t i = 0; i < work_end(a); i++) {
        tile_place at;
        bool partial;
        if (!find_work(a, at, i, false)) continue;
        int32_t n = next_tile(a, at, at.n_last, &partial);
        if (n < 0) continue;
        mbarrier_wait_parity(b.q_empty + 8 * q.at, q.parity ^ 1);
        fetch_q(x, at, b.q + q.at * Q_BYTES, b.q_full + 8 * q.at);
        turn_ring(q, QBUF);
        for (; n >= 0; n = next_tile(a, at, n - 1, &partial)) {
            mbarrier_wait_parity(b.k_empty + 8 * kv.at, kv.parity ^ 1);
            fetch_kv(x, at, true, b.k + kv.at * K_BYTES, b.k_full + 8 * kv.at, n);
            mbarrier_wait_parity(b.v_empty + 8 * kv.at, kv.parity ^ 1);
            fetch_kv(x, at, false, b.v + kv.at * V_BYTES, b.v_full + 8 * kv.at, n);
            turn_ring(kv, STAGES);
        }
    }
}

/* ---- the consumers ---- */

/* The product of so many columns: a constant, so that one case remains. */
#define EACH_WIDTH(kind)                                                                                                   \
    WIDTH(64, kind)                                                                                                        \
    WIDTH(80, kind)                                                                                                        \
    WIDTH(96, kind) WIDTH(112, kind) WIDTH(128, kind) WIDTH(144, kind) WIDTH(160, kind) WIDTH(176, kind) WIDTH(192, kind)  \
        WIDTH(256, kind)
#define WIDTH(n, kind)                                                                                                     \
    if (columns == n) {                                                                                                    \
        if (BF16)                                                                                                          \
            wgmma_m64n##n##k16_##kind##_bf16(d, a, b, add);                                                                \
        else                                                                                                               \
            wgmma_m64n##n##k16_##kind##_f16(d, a, b, add);                                                                 \
    }
DEVICE void product_ss(int columns, float *d, uint64_t a, uint64_t b, int add){EACH_WIDTH(ss)} DEVICE
    void product_rs(int columns, float *d, const uint32_t *a, uint64_t b, int add){EACH_WIDTH(rs)}
#undef WIDTH
#undef EACH_WIDTH

DEVICE void begin_qk(float s[MT][NT][4], uint64_t q, uint64_t k) {
    wgmma_fence();
#pragma unroll
    for (int c = 0; c < DIM / 16; c++) {
        const uint32_t to_q = c / 4 * BM * 128 + c % 4 * 32, to_k = c / 4 * BN * 128 + c % 4 * 32;
        product_ss(BN, s[0][0], wgmma_step(q, to_q), wgmma_step(k, to_k), c > 0);
    }
    wgmma_commit_group();
}

DEVICE void begin_pv(float o[MT][DT][4], uint32_t p[PV_STEPS][MT][4], uint64_t v) {
    wgmma_fence();
#pragma unroll
    for (int ks = 0; ks < PV_STEPS; ks++) product_rs(DV, o[0][0], p[ks][0], wgmma_step(v, ks * 16 * 128), 1);
    wgmma_commit_group();
}

/* What a consumer holds between two tiles. */
typedef struct consumer {
    int number;
    ring q, k, v;
    bool has_huge;
    bool partial; /* was the last tile of S one with a mask? */
    int32_t n;    /* its number */
} consumer;

DEVICE bool is_first_thread(void) { return (threadIdx.x & 127) == 0; }
DEVICE void take_turn(const consumer &me) { bar_sync(BARRIER_TURN + me.number, 256); }
DEVICE void pass_turn(const consumer &me) { bar_arrive(BARRIER_TURN + (me.number + 1) % CONSUMERS, 256); }

/* In memory and by itself: rare, and no place for registers that products write to. */
static __device__ __noinline__ void add_nonfinite_in_memory(float (*o)[DT][4], uint32_t (*p)[MT][4], uint32_t shared_v) {
    add_nonfinite(o, p, shared_v);
}

/*
 * V of a tile with a mask, before its product: rows that do not belong to the sequence become zero, and what is not finite goes
 * another way (add_nonfinite). All consumers do this together, outside of their turns.
 */
DEVICE void prepare_v(const attn_cuda_args &a, const tile_place &at, const consumer &me, float o[MT][DT][4],
                      uint32_t p[PV_STEPS][MT][4], uint32_t shared_v) {
    const int left = at.s.sk - me.n * BN;
    if (left < BN && !(ALL && !(a.tma & ATTN_TMA_KV))) { /* a gathered tile ends in zeros */
        for (int n = threadIdx.x; n < (BN - left) * V_CHUNKS; n += THREADS)
            st_shared_v4(v_piece(shared_v, left + n / V_CHUNKS, n % V_CHUNKS), make_uint4(0, 0, 0, 0));
        block_barrier();
    }
    if (holds_nonfinite(shared_v)) {
        float o_copy[MT][DT][4];
        uint32_t p_copy[PV_STEPS][MT][4];
#pragma unroll
        for (int n = 0; n < DT * 4; n++) o_copy[0][n / 4][n % 4] = o[0][n / 4][n % 4];
#pragma unroll
        for (int n = 0; n < PV_STEPS * 4; n++) p_copy[n / 4][0][n % 4] = p[n / 4][0][n % 4];
        add_nonfinite_in_memory(o_copy, p_copy, shared_v);
#pragma unroll
        for (int n = 0; n < DT * 4; n++) o[0][n / 4][n % 4] = o_copy[0][n / 4][n % 4];
    }
    fence_proxy_async();
    block_barrier();
}

/* Exponentials of S, in place; O is left to whoever waits for it: the answer is whether it has to be rescaled. */
DEVICE bool softmax(const attn_cuda_args &a, tile_place &at, consumer &me, float s[MT][NT][4], float m[MT][2],
                    float l[MT][2], float factor[MT][2]) {
    float most[MT][2], less[MT][2];
    at.n = me.n;
    scores(a, at, s);
    if (me.partial) mask_scores(a, at, s);
    bool raise = find_maximum(most, s, m);
    if (raise) me.has_huge = raise_maximum(factor, most, m, l, at.scale);
    subtract_maximum(less, s, m, at.scale, me.has_huge, 0, NT);
#pragma unroll
    for (int nt = 0; nt < NT; nt++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float *y = &s[0][nt][2 * half];
            y[0] = ex2_approx(__fmaf_rn(y[0], at.scale, -less[0][half]));
            y[1] = ex2_approx(__fmaf_rn(y[1], at.scale, -less[0][half]));
            l[0][half] += y[0] + y[1];
        }
    return raise;
}

DEVICE void pack_p(const attn_cuda_args &a, const tile_place &at, uint32_t p[PV_STEPS][MT][4], float s[MT][NT][4]) {
#pragma unroll
    for (int ks = 0; ks < PV_STEPS; ks++) {
#pragma unroll
        for (int e = 0; e < 4; e++)
            p[ks][0][e] = pack(s[0][2 * ks + e / 2][e % 2 * 2], s[0][2 * ks + e / 2][e % 2 * 2 + 1]);
        if (ALL && at.drops) drop(a, at, p[ks][0], 0, ks);
    }
}

/* O from registers to memory, through the warp's rows of Q. The first thread of the consumer gives Q back. */
DEVICE void store_o(const attn_cuda_args90 &x, const tile_place &at, const consumer &me, float o[MT][DT][4],
                    uint32_t shared_q, uint32_t q_empty, bool has_q) {
    const attn_cuda_args &a = x.a;
    const int lane = threadIdx.x & 31, first = (threadIdx.x >> 5) * 16;
    const bool whole = !at.split && a.vector_ok && a.p.out_dtype == (attn_dtype)DTYPE && a.p.dim_v % PER_CHUNK == 0;
    if (!whole || !has_q) {
        float copy[MT][DT][4];
#pragma unroll
        for (int n = 0; n < DT * 4; n++) copy[0][n / 4][n % 4] = o[0][n / 4][n % 4];
        store_from_memory(a, at, copy);
        bar_sync(BARRIER_STORE + me.number, 128);
        if (has_q && is_first_thread()) mbarrier_arrive(q_empty);
        return;
    }
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
        for (int dt = 0; dt < DT; dt++)
            st_shared_b32(piece_at(shared_q, BM, first + half * 8 + (lane >> 2), dt) + (lane & 3) * 4,
                          pack(o[0][dt][2 * half], o[0][dt][2 * half + 1]));
    const int row0 = me.number * 64;
    if ((a.tma & ATTN_TMA_O) && row0 + 64 <= at.rows) {
        fence_proxy_async();
        bar_sync(BARRIER_STORE + me.number, 128);
        if (!is_first_thread()) return;
        const bool packed = a.p.flags & ATTN_VARLEN_Q;
#pragma unroll 1
        for (int c = 0; c < DV / 64; c++)
            cp_async_bulk_tensor_4d_store(&x.o, shared_q + c * BM * 128 + row0 * 128, c * 64,
                                          (int)(packed ? at.s.q_row : 0) + at.row + row0, at.h, packed ? 0 : at.s.b);
        cp_async_bulk_commit_group();
        cp_async_bulk_wait_group_read();
        mbarrier_arrive(q_empty);
        return;
    }
    __syncwarp();
#pragma unroll 1
    for (int n = lane; n < 16 * V_CHUNKS; n += 32) {
        int row = first + n / V_CHUNKS, c = n % V_CHUNKS;
        uint4 y = ld_shared_v4(piece_at(shared_q, BM, row, c));
        if (row < at.rows && c * PER_CHUNK < a.p.dim_v)
            *(uint4 *)((uint8_t *)a.f.o.data +
                       (attn__q_offset(&a.p, &a.f.o, &at.s, at.row + row, at.h) + c * PER_CHUNK) * EB) = y;
    }
    fence_proxy_async(); /* the next tile of Q comes from the accelerator */
    bar_sync(BARRIER_STORE + me.number, 128);
    if (is_first_thread()) mbarrier_arrive(q_empty);
}

/* All tiles of one place; me.n is the first of them. */
DEVICE void walk(const attn_cuda_args &a, tile_place &at, consumer &me, const buffers &b, float o[MT][DT][4],
                 float m[MT][2], float l[MT][2]) {
    float s[MT][NT][4], factor[MT][2];
    uint32_t p[PV_STEPS][MT][4];
    const uint64_t q = wgmma_k_major(b.q + me.q.at * Q_BYTES + me.number * 64 * 128), k = wgmma_k_major(b.k),
                   v = wgmma_mn_major(b.v, BN * 128);
    mbarrier_wait_parity(b.q_full + 8 * me.q.at, me.q.parity);
    mbarrier_wait_parity(b.k_full + 8 * me.k.at, me.k.parity);
    take_turn(me);
    begin_qk(s, q, wgmma_step(k, me.k.at * K_BYTES));
    pass_turn(me);
    wgmma_wait_group(0);
    if (is_first_thread()) mbarrier_arrive(b.k_empty + 8 * me.k.at);
    turn_ring(me.k, STAGES);
    softmax(a, at, me, s, m, l, factor);
    pack_p(a, at, p, s);
    for (;;) {
        bool partial;
        int32_t next = agreed(next_tile(a, at, me.n - 1, &partial));
        mbarrier_wait_parity(b.v_full + 8 * me.v.at, me.v.parity);
        if (me.partial) prepare_v(a, at, me, o, p, b.v + me.v.at * V_BYTES);
        if (next < 0) break;
        mbarrier_wait_parity(b.k_full + 8 * me.k.at, me.k.parity);
        take_turn(me);
        begin_qk(s, q, wgmma_step(k, me.k.at * K_BYTES));
        begin_pv(o, p, wgmma_step(v, me.v.at * V_BYTES));
        pass_turn(me);
        wgmma_wait_group(1);
        if (is_first_thread()) mbarrier_arrive(b.k_empty + 8 * me.k.at);
        turn_ring(me.k, STAGES);
        me.n = next;
        me.partial = __any_sync(~0u, partial);
        bool raise = softmax(a, at, me, s, m, l, factor);
        wgmma_wait_group(0);
        if (is_first_thread()) mbarrier_arrive(b.v_empty + 8 * me.v.at);
        turn_ring(me.v, STAGES);
        if (raise) rescale(o, factor);
        pack_p(a, at, p, s);
    }
    begin_pv(o, p, wgmma_step(v, me.v.at * V_BYTES));
    wgmma_wait_group(0);
    if (is_first_thread()) mbarrier_arrive(b.v_empty + 8 * me.v.at);
    turn_ring(me.v, STAGES);
}

DEVICE void consume(const attn_cuda_args90 &x, const buffers &b) {
    const attn_cuda_args &a = x.a;
    consumer me = {};
    me.number = threadIdx.x >> 7;
    if (me.number == CONSUMERS - 1) bar_arrive(BARRIER_TURN, 256); /* the first turn is the first consumer's */
    for (int64_t i = 0; i < work_end(a); i++) {
        tile_place at;
        if (!find_work(a, at, i, true)) continue;
        float o[MT][DT][4] = {}, m[MT][2], l[MT][2] = {};
        m[0][0] = m[0][1] = at.least;
        me.has_huge = true;
        me.n = agreed(next_tile(a, at, at.n_last, &me.partial));
        me.partial = __any_sync(~0u, me.partial);
        const bool has_q = me.n >= 0;
        if (has_q) walk(a, at, me, b, o, m, l);
        finish(a, at, o, m, l);
        store_o(x, at, me, o, b.q + me.q.at * Q_BYTES, b.q_empty + 8 * me.q.at, has_q);
        if (has_q) turn_ring(me.q, QBUF);
    }
    if (is_first_thread()) cp_async_bulk_wait_group();
}

KERNEL __launch_bounds__(THREADS + 128, 1) VARIANT(const __grid_constant__ attn_cuda_args90 x) {
    extern __shared__ __align__(1024) uint8_t shared[];
    const buffers b = find_buffers(cvta_shared(shared));
    if (threadIdx.x == 0) make_barriers(b);
    __syncthreads();
    if (threadIdx.x >= THREADS) {
        setmaxnreg_dec(PRODUCER_REGISTERS);
        if (ALL || is_leader()) produce(x, b);
    } else {
        setmaxnreg_inc(CONSUMER_REGISTERS);
        consume(x, b);
    }
}
