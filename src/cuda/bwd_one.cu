/*
 * The whole backward in one pass, with mma.sync: lines of side BOTH. As bwd.cu with keys in the place of its own, and d_q besides, so
 * that the products of a tile are five instead of seven: S and d_p are not computed a second time.
 *
 * A block keeps OWN keys and walks over tiles of 64 or 128 rows. Warps work in pairs, which have 32 keys in common. Per tile:
 *
 *     wait for it              barrier 1: Q and d_o are there for all warps, and nobody reads anything of the tile before
 *                              d_q of the tile before is passed on
 *     fetch the next one       into the other buffer; with stages = 1, when d_k is multiplied: barrier 3
 *     S = K Q^T, D = V d_o^T   a warp has its 32 keys and one half of the rows
 *     P, d_s                   as in bwd.cu, then to shared memory, [keys][rows]
 *     wait for the turn        d_q of these rows is there as the blocks of the keys before have left it; most often a look before S has shown that it is
 *                              barrier 2: P, d_s and the turn
 *     d_v += P d_o, d_k += d_s Q   a warp has its 32 keys and one half of the dims
 *     d_q += d_s^T K           a warp has 16 or 32 of the rows and a part of the dims
 *
 * d_q is a sum over blocks, and so that it is the same every time they take turns, in the order of keys: `turns` has, for each tile of
 * rows and head, the number of the last block that has added to it, plus 1. The sum is in float, in the workspace, as attn__d_q_rows says;
 * whoever comes last writes the result instead. A block only waits for blocks that were launched before it, and at a time
 * few of one head are at work (launch.c), so that they seldom wait at all. It passes the turn on at barrier 1 of the tile after, when all
 * its threads have written.
 */
#include "bwd.cuh"

enum {
    HALF = DT / 2,                  /* 8-column tiles of the sums of a warp: one half of the dims */
    W_BYTES = OWN * OTHERS * 2,     /* P or d_s of a tile */
    ACROSS = DIM % 64 == 0 ? 4 : 2, /* d_q: warps that share the dims ... */
    DOWN = WARPS / ACROSS,          /* ... and the rows */
    QM = OTHERS / DOWN / 16,        /* d_q: 16-row tiles of a warp */
    QN = DT / ACROSS,               /* d_q: 8-column tiles of a warp */
    AT_V = OWN_BYTES,
    AT_D_S = AT_P + W_BYTES
};
static_assert(PAIRED && WARPS == 8 && BF16, "what this file is written for");
static_assert(OTHERS % (2 * SUB) == 0 && OTHERS % 64 == 0, "a warp has one half of the rows");
static_assert(QN % 2 == 0 && HALF % 2 == 0, "want another dim");

/* ---- P and d_s in shared memory ---- */

/* A 16-byte piece: rows 8 * chunk, ... of a key. */
DEVICE uint32_t w_at(uint32_t base, int key, int chunk) { return base + key * OTHERS * 2 + ((chunk ^ (key & 7)) << 4); }

/* The address of piece c + 2 * step of a key, from that of piece c, as shared_step has it. */
DEVICE uint32_t w_step(uint32_t piece, int step) { return (piece ^ ((2 * step & 7) << 4)) + ((2 * step & ~7) << 4); }

/*
 * What a thread's lane and warp say of addresses, of P and of the first stage: worked out once. The rest of an address is a constant, or a
 * piece's number that is mixed into it.
 */
typedef struct corners {
    uint32_t left, right;     /* S: of K and Q */
    uint32_t put;             /* P, from the thread's first element on */
    uint32_t weights, others; /* d_k: P as the left operand, Q as the right one */
    uint32_t across, keys;    /* d_q: d_s from across, K */
} corners;

/* Dims that warps share: is a step from a warp's first piece mixed into its address? */
enum { MIXED_HALF = (HALF & (HALF - 1)) == 0, MIXED_Q = (QN & (QN - 1)) == 0 };
static_assert(NT == 4 && (QM & (QM - 1)) == 0 && QM <= 4,
              "a step is mixed into an address; sums of a warp are of one tile");

DEVICE corners find_corners(uint32_t base) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2;
    corners c;
    c.left = left_of(base);
    c.right = right_of(base + AT_TILES, warp % 2 * (OTHERS / 2));
    c.put = w_at(base + AT_P, warp / 2 * MT * 16 + g, warp % 2 * (OTHERS / 16)) + (lane & 3) * 4;
    c.weights = w_at(base + AT_P, warp / 2 * MT * 16 + (lane & 15), lane >> 4);
    c.others = shared_at(base + AT_TILES, lane & 15, (MIXED_HALF ? warp % 2 * HALF : 0) + (lane >> 4));
    c.across = w_at(base + AT_D_S, (lane & 7) + (lane >> 4) * 8, warp / ACROSS * QM * 2 + (lane >> 3 & 1));
    c.keys = shared_at(base, lane & 15, (MIXED_Q ? warp % ACROSS * QN : 0) + (lane >> 4));
    return c;
}
DEVICE uint32_t others_step(uint32_t others, int n) {
    return shared_step(others, MIXED_HALF ? n : (int)(threadIdx.x >> 5) % 2 * (HALF / 2) + n);
}
DEVICE uint32_t keys_step(uint32_t keys, int n) {
    return shared_step(keys, MIXED_Q ? n : (int)(threadIdx.x >> 5) % ACROSS * (QN / 2) + n);
}

/* To P, or so many bytes behind it. */
DEVICE void put_weights(uint32_t put, int bytes, const float w[MT][NT][4]) {
#pragma unroll
    for (int mt = 0; mt < MT; mt++)
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int nt = 0; nt < NT; nt++)
                st_shared_b32((put ^ (nt << 4)) + bytes + (mt * 16 + half * 8) * OTHERS * 2,
                              pack(w[mt][nt][2 * half], w[mt][nt][2 * half + 1]));
}

DEVICE float weight_at(uint32_t base, int key, int row) {
    const uint32_t word = ld_shared_b32(w_at(base, key, row / 8) + row % 8 / 2 * 4);
    return attn__from_bf16((uint16_t)(word >> row % 2 * 16));
}

/* ---- products ---- */

/*
 * sums += w . others: of the pair's keys, all rows of the tile, and the warp's half of the dims; with the weights and the others so many bytes
 * behind these.
 */
DEVICE void add_weighted(float sums[MT][HALF][4], uint32_t weights, uint32_t others, int w_bytes, int bytes) {
#pragma unroll
    for (int step = 0; step < OTHERS / 16; step++) {
        uint32_t x[MT][4], y[4];
#pragma unroll
        for (int mt = 0; mt < MT; mt++) ldmatrix_x4(x[mt], w_step(weights, step) + w_bytes + mt * 16 * OTHERS * 2);
#pragma unroll
        for (int n = 0; n < HALF / 2; n++) {
            ldmatrix_x4_trans(y, others_step(others, n) + bytes + step * 16 * CHUNKS * 16);
#pragma unroll
            for (int mt = 0; mt < MT; mt++) multiply(sums[mt][2 * n], sums[mt][2 * n + 1], x[mt], y);
        }
    }
}

/* d_q += d_s^T . K: of all keys, the warp's part of the rows and of the dims. */
DEVICE void add_queries(float d_q[QM][QN][4], uint32_t across, uint32_t keys) {
#pragma unroll
    for (int step = 0; step < OWN / 16; step++) {
        uint32_t x[QM][4], y[4];
#pragma unroll
        for (int mt = 0; mt < QM; mt++) ldmatrix_x4_trans(x[mt], w_step(across, mt) + step * 16 * OTHERS * 2);
#pragma unroll
        for (int n = 0; n < QN / 2; n++) {
            ldmatrix_x4_trans(y, keys_step(keys, n) + step * 16 * CHUNKS * 16);
#pragma unroll
            for (int mt = 0; mt < QM; mt++) multiply(d_q[mt][2 * n], d_q[mt][2 * n + 1], x[mt], y);
        }
    }
}

/* ---- infinities and NaN, where some pairs are masked: rare, so slow ---- */

/* They become zeros, in so many words. */
static __device__ __noinline__ void clear_bad(uint32_t from, int words) {
#pragma unroll 1
    for (int n = threadIdx.x; n < words; n += THREADS) {
        const uint32_t word = ld_shared_b32(from + n * 4);
        const int which = nonfinite_word(word);
        if (which) st_shared_b32(from + n * 4, word & ((which & 1 ? 0 : 0xffffu) | (which & 2 ? 0 : 0xffff0000u)));
    }
}

/* What is not finite in a tile of others, times its weight, to the sums of the keys that rows with a weight have. */
static __device__ __noinline__ void add_bad_rows(float *sums, uint32_t w, uint32_t others) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
#pragma unroll 1
    for (int row = 0; row < OTHERS; row++)
#pragma unroll 1
        for (int dt = 0; dt < HALF; dt++) {
            const uint32_t word = ld_shared_b32(shared_at(others, row, warp % 2 * HALF + dt) + (lane & 3) * 4);
            const int which = nonfinite_word(word);
            for (int n = 0; n < MT * 4; n++) {
                if (!(which >> n % 2 & 1)) continue;
                const int key = (warp / 2 * MT + n / 4) * 16 + n / 2 % 2 * 8 + (lane >> 2);
                const float weight = weight_at(w, key, row);
                if (weight != 0)
                    sums[(n / 4 * HALF + dt) * 4 + n % 4] += weight * attn__from_bf16((uint16_t)(word >> n % 2 * 16));
            }
        }
}
DEVICE void add_bad(float sums[MT][HALF][4], uint32_t w, uint32_t others) {
    float copy[MT * HALF * 4];
#pragma unroll
    for (int n = 0; n < MT * HALF * 4; n++) copy[n] = sums[n / (HALF * 4)][n / 4 % HALF][n % 4];
    add_bad_rows(copy, w, others);
#pragma unroll
    for (int n = 0; n < MT * HALF * 4; n++) sums[n / (HALF * 4)][n / 4 % HALF][n % 4] = copy[n];
}

/* What is not finite among the own keys, times its weight, to d_q of the rows that have one. */
static __device__ __noinline__ void add_bad_keys(float *d_q, uint32_t d_s, uint32_t keys) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
#pragma unroll 1
    for (int n = 0; n < QM * QN * 4; n++) {
        const int row = (warp / ACROSS * QM + n / (QN * 4)) * 16 + n / 2 % 2 * 8 + (lane >> 2);
        const int column = (warp % ACROSS * QN + n / 4 % QN) * 8 + (lane & 3) * 2 + n % 2;
        for (int key = 0; key < OWN; key++) {
            const float weight = weight_at(d_s, key, row);
            const uint32_t word = ld_shared_b32(shared_at(keys, key, column / 8) + column % 8 / 2 * 4);
            if (weight != 0 && (nonfinite_word(word) >> column % 2 & 1))
                d_q[n] += weight * attn__from_bf16((uint16_t)(word >> column % 2 * 16));
        }
    }
}

static __device__ __noinline__ void load_keys_again(const attn_cuda_args &a, const place &at, uint32_t keys) {
    load_from(a, at, keys_of(a, a.f.k, at.s, at.kv_head, a.p.dim_qk), keys);
}

/* d_q += d_s^T . K where K holds such numbers: they are taken out of it for the product, and then K is fetched again. */
DEVICE void add_queries_of_bad(const attn_cuda_args &a, const place &at, float d_q[QM][QN][4], uint32_t base,
                               const corners &c) {
    const uint32_t d_s = base + AT_D_S, keys = base;
    float copy[QM * QN * 4];
#pragma unroll
    for (int n = 0; n < QM * QN * 4; n++) copy[n] = d_q[n / (QN * 4)][n / 4 % QN][n % 4];
    add_bad_keys(copy, d_s, keys);
#pragma unroll
    for (int n = 0; n < QM * QN * 4; n++) d_q[n / (QN * 4)][n / 4 % QN][n % 4] = copy[n];
    __syncthreads();
    clear_bad(keys, OWN * CHUNKS * 4);
    __syncthreads();
    add_queries(d_q, c.across, c.keys);
    __syncthreads();
    load_keys_again(a, at, keys);
}

/* Is any number among the own keys not finite? A barrier of the whole block. */
static __device__ __noinline__ bool holds_bad_keys(uint32_t keys) {
    uint32_t most = 0;
    for (int n = threadIdx.x; n < OWN * CHUNKS; n += THREADS) {
        const uint4 x = ld_shared_v4(keys + n * 16);
        most = __vmaxu2(__vmaxu2(most, x.x & 0x7fff7fff), x.y & 0x7fff7fff);
        most = __vmaxu2(__vmaxu2(most, x.z & 0x7fff7fff), x.w & 0x7fff7fff);
    }
    return __syncthreads_or(nonfinite_word(most));
}

/* ---- turns ---- */

/* With FlashMask: do the rows of tile n see any key of key tile m? The same as find_tile says of the own ones. */
DEVICE bool meets(const attn_cuda_args &a, const place &at, int32_t n, int32_t m) {
    const int32_t i0 = n * OTHERS, i1 = attn__min32(i0 + OTHERS, at.s.sq), j0 = m * OWN;
    if (j0 >= at.s.sk) return false;
    const attn_flash_range range = range_over(a, at, j0, OWN);
    return attn__mask_tile(&at.mask, i0, i1, j0, j0 + OWN, &range) != ATTN_TILE_SKIP;
}

/* Who adds to the d_q of a tile of rows before and after this block: key tiles; -1: nobody. */
typedef struct turn {
    int32_t before, after;
} turn;

/* With FlashMask: a warp looks at 32 key tiles at a time. */
static __device__ __noinline__ turn find_flash_turn(const attn_cuda_args &a, const place &at, int32_t n) {
    const int32_t i0 = n * OTHERS, i1 = attn__min32(i0 + OTHERS, at.s.sq), m = at.own / OWN, lane = threadIdx.x & 31;
    int32_t from, to;
    attn__mask_rows(&at.mask, i0, i1, &from, &to);
    const int32_t first = from / OWN, last = (to - 1) / OWN;
    turn t = {-1, -1};
    for (int32_t x = m - 1; x >= first && t.before < 0; x -= 32) {
        const uint32_t found = __ballot_sync(~0u, x - lane >= first && meets(a, at, n, x - lane));
        if (found) t.before = x - (__ffs((int)found) - 1);
    }
    for (int32_t x = m + 1; x <= last && t.after < 0; x += 32) {
        const uint32_t found = __ballot_sync(~0u, x + lane <= last && meets(a, at, n, x + lane));
        if (found) t.after = x + __ffs((int)found) - 1;
    }
    return t;
}

DEVICE turn find_turn(const attn_cuda_args &a, const place &at, int32_t n) {
    if (at.finds_turns) return find_flash_turn(a, at, n);
    const int32_t m = at.own / OWN;
    return {n * OTHERS < at.before_to ? m - 1 : -1, n * OTHERS + OTHERS > at.after_from ? m + 1 : -1};
}

/*
 * Tiles of rows are counted over all sequences and heads: [tile of the sequence][head]. Packed ones have as many as their rows can
 * touch: each begins with a tile of its own. There are fewer than 2^32, as each has d_q in the workspace.
 */
DEVICE uint32_t tile_index(const attn_cuda_args &a, const place &at, int32_t h, int32_t n) {
    return (at.tile + (uint32_t)n) * (uint32_t)a.p.heads_q + (uint32_t)h;
}

/* What find_place leaves open: the turns of a block without FlashMask, and where d_q of its rows is. */
DEVICE void find_turns(const attn_cuda_args &a, place &at) {
    const bool ordered =
        a.f.d_q.data && !*a.overlap; /* lengths that make no sense: results do not either, but nobody waits for ever */
    int32_t unused;
    at.finds_turns = ordered && a.ranges;
    at.before_to = 0;
    at.after_from = INT32_MAX;
    if (ordered && at.own > 0) attn__mask_cols(&at.mask, at.own - 1, at.own, &unused, &at.before_to);
    if (ordered && at.own + OWN < at.s.sk) {
        attn__mask_cols(&at.mask, at.own + OWN, at.own + OWN + 1, &at.after_from, &unused);
        if (at.after_from >= at.s.sq) at.after_from = INT32_MAX;
    }
    at.tile = (uint32_t)(a.p.flags & ATTN_VARLEN_Q ? at.s.q_row / OTHERS + at.s.b
                                                   : (int64_t)at.s.b * ((a.p.max_q + OTHERS - 1) / OTHERS));
}

/*
 * Where the sums of the warp's rows and dims are (attn__d_q_rows): the thread's first four; from there on 8-column tiles are `step` apart, and 16-row
 * tiles 32. It has so many of them that are stored. whole: there are OTHERS rows of DIM numbers; a constant.
 */
typedef struct sums_at {
    float4 *first;
    int32_t step, across, down;
} sums_at;
DEVICE sums_at find_sums(const attn_cuda_args &a, const note &w, bool whole) {
    const int32_t thread = thread_here(), lane = thread & 31, warp = thread >> 5;
    const int32_t across = warp % ACROSS * QN, down = warp / ACROSS * QM, group = down / 4, unit = down % 4;
    const int32_t columns = whole ? (int32_t)DIM : attn__d_q_columns(&a.p);
    const int32_t rows = whole ? (int32_t)ATTN_D_Q_ROWS : attn__min32(w.stored - group * ATTN_D_Q_ROWS, ATTN_D_Q_ROWS);
    return {(float4 *)w.sums + group * 16 * columns + across * rows * 2 + unit * 32 + lane, rows * 2, columns / 8 - across,
            (rows * 2 - unit * 32 - lane + 31) / 32};
}
DEVICE void fetch_q(const sums_at &from, float d_q[QM][QN][4], bool whole) {
#pragma unroll
    for (int n = 0; n < QM * QN; n++) {
        if (!whole && (n % QN >= from.across || n / QN >= from.down)) continue;
        const float4 x = ld_global_cg_v4(from.first + n % QN * (whole ? 128 : from.step) + n / QN * 32);
        float *to = d_q[n / QN][n % QN];
        to[0] = x.x, to[1] = x.y, to[2] = x.z, to[3] = x.w;
    }
}
DEVICE void keep_q(const sums_at &to, const float d_q[QM][QN][4], bool whole) {
#pragma unroll
    for (int n = 0; n < QM * QN; n++) {
        if (!whole && (n % QN >= to.across || n / QN >= to.down)) continue;
        const float *x = d_q[n / QN][n % QN];
        st_global_cg_v4(to.first + n % QN * (whole ? 128 : to.step) + n / QN * 32, x[0], x[1], x[2], x[3]);
    }
}
DEVICE void fetch_q(const attn_cuda_args &a, const note &w, float d_q[QM][QN][4]) {
    if (w.whole)
        fetch_q(find_sums(a, w, true), d_q, true);
    else
        fetch_q(find_sums(a, w, false), d_q, false);
}
DEVICE void keep_q(const attn_cuda_args &a, const note &w, const float d_q[QM][QN][4]) {
    if (w.whole)
        keep_q(find_sums(a, w, true), d_q, true);
    else
        keep_q(find_sums(a, w, false), d_q, false);
}

/* The result. Rows without keys have zeros, whatever the keys hold. */
DEVICE void store_q(const attn_cuda_args &a, const place &at, const note &w, const float d_q[QM][QN][4],
                    uint32_t of_stats) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const float scale = (float)a.p.scale;
#pragma unroll
    for (int mt = 0; mt < QM; mt++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row = (warp / ACROSS * QM + mt) * 16 + half * 8 + (lane >> 2);
            const int32_t i = w.n * OTHERS + row;
            if (i >= at.s.sq) continue;
            const bool empty = __uint_as_float(ld_shared_b32(of_stats + row * 8)) == -INFINITY;
            const int64_t to = attn__q_offset(&a.p, &a.f.d_q, &at.s, i, w.h);
#pragma unroll
            for (int nt = 0; nt < QN; nt++) {
                const float *x = &d_q[mt][nt][2 * half];
                store_pair(a.f.d_q.data, to, (warp % ACROSS * QN + nt) * 8 + (lane & 3) * 2, a.p.dim_qk,
                           empty ? 0 : x[0] * scale, empty ? 0 : x[1] * scale);
            }
        }
}

/* ---- a tile ---- */

/* The sums of a warp, of one half of the dims. */
typedef struct totals {
    float d_k[MT][HALF][4], d_v[MT][HALF][4];
} totals;

/* d_q of the tile, from where the block before has left it to the one after. */
DEVICE void add_to_q(const attn_cuda_args &a, const note &w, float d_q[QM][QN][4], uint32_t base, const corners &c,
                     uint32_t of_stats, bool bad) {
    if (bad)
        add_queries_of_bad(a, place_of(base), d_q, base, c);
    else
        add_queries(d_q, (uint32_t)here((int)c.across), (uint32_t)here((int)c.keys));
    if (w.after < 0)
        store_q(a, place_of(base), w, d_q, of_stats);
    else
        keep_q(a, w, d_q);
}

DEVICE void step(const attn_cuda_args &a, totals &sum, uint32_t base, const corners &c, uint32_t count, bool bad_keys) {
    const uint32_t stage = count % STAGES * STAGE_BYTES;
    const uint32_t tile = base + AT_TILES + stage, of_stats = base + AT_STATS + count % 2 * STATS_BYTES;
    const note &w = note_of(base, count);
    bool waits = threadIdx.x == 0 && w.before >= 0;
    if (waits) waits = ld_acquire_gpu(a.turns + w.index) != (uint32_t)w.before + 1;
    const bool partial = clear_empty_rows(tile, of_stats) || w.partial;
    const bool bad = partial && holds_nonfinite(tile);
#pragma unroll 1
    for (int round = 0; round < OTHERS / 2 / SUB; round++) {
        float s[MT][NT][4], d[MT][NT][4];
        const int first = (int)(threadIdx.x >> 5) % 2 * (OTHERS / 2) + round * SUB;
        const uint32_t left = (uint32_t)here((int)c.left);
        const uint32_t right = (uint32_t)here((int)(c.right + stage + round * (SUB * CHUNKS * 16)));
        product(s, left, right, 0, 0);
        product(d, left, right, AT_V, TILE_BYTES);
        weigh(a, place_of(base), w.h, s, d, partial, w.n * OTHERS + first, of_stats + first * 8, NULL);
        const uint32_t put = (uint32_t)here((int)c.put) ^ (round * NT << 4);
        put_weights(put, 0, s);
        put_weights(put, W_BYTES, d);
    }
    const note &again = note_of(base, (uint32_t)here((int)count)); /* an address less to keep */
    if (waits) wait_acquire_gpu(a.turns + again.index, (uint32_t)again.before + 1);
    __syncthreads(); /* 2 */
    float d_q[QM][QN][4] = {};
    if (again.before >= 0) fetch_q(a, again, d_q);
    if (bad) {
        add_bad(sum.d_v, base + AT_P, tile + TILE_BYTES);
        add_bad(sum.d_k, base + AT_D_S, tile);
        __syncthreads();
        clear_bad(tile, 2 * OTHERS * CHUNKS * 4);
        __syncthreads();
    }
    const uint32_t weights = (uint32_t)here((int)c.weights), others = (uint32_t)here((int)(c.others + stage));
    add_weighted(sum.d_v, weights, others, 0, TILE_BYTES);
    add_weighted(sum.d_k, weights, others, W_BYTES, 0);
    if (STAGES == 1) {
        __syncthreads(); /* 3 */
        fetch(a, base, (uint32_t)here((int)count) + 1);
    }
    if (a.f.d_q.data) add_to_q(a, again, d_q, base, c, of_stats, bad_keys && partial);
}

/* After a barrier: all threads have written their part. Not the warp that looks for the next turn: both take their time. */
DEVICE void pass_turn(const attn_cuda_args &a, uint32_t base, uint32_t count) {
    if (threadIdx.x != 32) return;
    const note &w = note_of(base, count);
    if (w.after >= 0) st_release_gpu(a.turns + w.index, (uint32_t)(place_of(base).own / OWN) + 1);
}

/* The note of the first tile from here on. The last warp. */
DEVICE void make_note(const attn_cuda_args &a, const place &at, walk w, note &to) {
    find_tile(a, at, w);
    const turn t = w.done ? turn{-1, -1} : find_turn(a, at, w.n);
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
        write_note(a, at, w, to);
        to.before = t.before;
        to.after = t.after;
        to.index = tile_index(a, at, w.h, w.n);
        to.sums = d_q_sums(a, at.s, w.n * OTHERS, w.h);
        to.stored = (int32_t)attn__d_q_rows(attn__min32(at.s.sq - w.n * OTHERS, OTHERS));
    }
    __syncwarp();
}
DEVICE void make_next_note(const attn_cuda_args &a, uint32_t base, uint32_t count) {
    const note &last = note_of(base, count - 1);
    make_note(a, place_of(base), next_tile({last.h, last.n, false, last.done}), note_of(base, count));
}

DEVICE void walk_rows(const attn_cuda_args &a, totals &sum, uint32_t base) {
    uint32_t count = 0;
    bool bad_keys = false;
    if (makes_notes()) {
        const place &at = place_of(base);
        make_note(a, at, {at.h, first_tile(at), false, false}, note_of(base, 0));
        make_next_note(a, base, 1);
    }
    __syncthreads();
    if (note_of(base, 0).done) return;
    load_own(a, place_of(base), base);
    fetch(a, base, 0);
    const corners c = find_corners(base);
#pragma unroll 1
    do {
        cp_async_wait_all();
        __syncthreads(); /* 1 */
        if (count == 0)
            bad_keys = holds_bad_keys(base);
        else
            pass_turn(a, base, count - 1);
        if (STAGES == 2) fetch(a, base, count + 1);
        if (makes_notes()) make_next_note(a, base, count + 2);
        step(a, sum, base, c, count, bad_keys);
        count++;
    } while (!note_of(base, count).done);
    cp_async_wait_all(); /* K, where it was fetched again */
    __syncthreads();
    pass_turn(a, base, count - 1);
}

/* The warp's half of the dims of its keys. */
DEVICE void store_keys(const attn_cuda_args &a, const place &at, const attn_tensor &to, const float sums[MT][HALF][4],
                       int32_t dim, float factor) {
    if (!to.data) return;
#pragma unroll
    for (int mt = 0; mt < MT; mt++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int32_t key = own_at(at, mt, half);
            if (key >= at.own + at.count) continue;
            const int64_t row = attn__kv_offset(&a.p, &a.f, &to, &at.s, at.s.leftpad + key, at.kv_head);
#pragma unroll
            for (int dt = 0; dt < HALF; dt++) {
                const float *x = &sums[mt][dt][2 * half];
                const int column = ((int)(threadIdx.x >> 5) % 2 * HALF + dt) * 8 + (int)(threadIdx.x & 3) * 2;
                store_pair(to.data, row, column, dim, x[0] * factor, x[1] * factor);
            }
        }
}

KERNEL __launch_bounds__(THREADS, CTAS) VARIANT(const __grid_constant__ attn_cuda_args a) {
    extern __shared__ __align__(128) uint8_t shared[];
    const uint32_t base = (uint32_t)here((int)cvta_shared(shared));
    {
        place found;
        if (!find_place(a, found)) return;
        find_others(a, found);
        find_turns(a, found);
        if (threadIdx.x == 0) notes_of(base).at = found;
    }
    __syncthreads();
    totals sum = {};
    walk_rows(a, sum, base);
    store_keys(a, place_of(base), a.f.d_k, sum.d_k, a.p.dim_qk, (float)a.p.scale);
    store_keys(a, place_of(base), a.f.d_v, sum.d_v, a.p.dim_v, (float)(1 / (1 - a.p.dropout)));
}
