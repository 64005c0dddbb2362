/*
 * What Hopper's two backward kernels share, bwd_sm90.cu and bwd_sm90_wide.cu: which keys a block has and which tiles of rows it walks
 * over, what is not finite, and how d_q of a tile is added to memory, in turns. The including file has said before what these are:
 *
 *   BF16, DIM, BM, BN      dtype; dims, rows of a tile, keys
 *   PAIR                   blocks that have these keys together, and a share of d_q each; 1 or 2
 *   CHUNKS, ROUND          how many buffers d_q of a tile fills one after the other, and which number of them an adder walks round
 */
#ifndef ATTN_BWD_SM90_CUH
#define ATTN_BWD_SM90_CUH

#include "cast.cuh"
#include "device.cuh"
#include "fit.cuh"
#include "wgmma.cuh"

enum {
    NT = BM / 8,  /* 8-column tiles of S and D, whose columns are rows */
    DT = DIM / 8, /* of d_k and d_v */
    STEPS = BM / 16,
    WORDS = NT / 8, /* of 32 bits, one for each of a thread's elements */
    ROW = 128,      /* bytes of a row of a block of 64 columns */
    BLOCKS = DIM / ATTN_MAP_COLS,
    KEYS = BN / PAIR, /* of a block */
    KV_BYTES = KEYS * BLOCKS * ROW,
    Q_BYTES = BM * BLOCKS * ROW,
    D_S_BYTES = KEYS * BM * 2,
    COLUMNS = DIM / PAIR / CHUNKS, /* of d_q in a chunk */
    GROUPS = BM / ATTN_D_Q_ROWS,   /* tiles of d_q in memory, and groups of rows in a chunk */
    GROUP_BYTES = ATTN_D_Q_ROWS * COLUMNS * 4,
    CHUNK_BYTES = GROUPS * GROUP_BYTES
};

/* A vote says nothing new, but tells ptxas that all lanes agree: what follows from it is in the registers that a warp has once. */
DEVICE bool says(bool x) { return __any_sync(~0u, x); }

DEVICE uint32_t pack(float low, float high) { return BF16 ? cvt_rn_bf16x2(low, high) : cvt_rn_f16x2(low, high); }

#include "product.cuh"

/* ---- where a block works ---- */

typedef struct place {
    attn_seq s;
    attn_mask mask;
    int32_t kv_head;
    int32_t own, count;     /* the first key, and how many there are */
    int32_t first, last;    /* tiles of rows that may see them */
    int32_t h, h_end;       /* query heads */
    bool tail;              /* rows past the last one are in memory, and may hold anything */
    bool masks;             /* may a pair be masked but by the end of the sequence? */
    attn_flash_range range; /* FlashMask's, of the keys */
} place;

/* ---- shared memory: tiles in blocks of 64 columns ---- */

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

/* Address of a 16-byte piece of a tile of so many rows, as the accelerator writes it. */
DEVICE uint32_t piece_at(uint32_t tile, int rows, int row, int chunk) {
    return tile + chunk / 8 * rows * ROW + row * ROW + (((chunk & 7) ^ (row & 7)) << 4);
}

/* Of FlashMask, over the keys of a block from j0 on; it has some. */
DEVICE attn_flash_range range_over(const attn_cuda_args &a, const place &at, int32_t j0) {
    attn_flash_range all = *flash_range(a, at.s.b, at.kv_head, j0 / ATTN_ANY_COLS);
    for (int32_t j = j0 + ATTN_ANY_COLS; j < attn__min32(j0 + BN, at.s.sk); j += ATTN_ANY_COLS) {
        const attn_flash_range *one = flash_range(a, at.s.b, at.kv_head, j / ATTN_ANY_COLS);
        for (int v = 0; v < 4; v++) {
            all.min[v] = attn__min32(all.min[v], one->min[v]);
            all.max[v] = attn__max32(all.max[v], one->max[v]);
        }
    }
    return all;
}

/* As find_place of bwd.cuh: `group` heads at a time; among them the first keys, which see the most under a causal mask, come first. */
DEVICE bool find_place(const attn_cuda_args &a, place &at) {
    const int64_t first = (blockIdx.y + (int64_t)blockIdx.z * gridDim.y) * a.group;
    const int64_t left = (int64_t)a.p.batch * a.p.heads_kv - first;
    if (left <= 0) return false;
    const uint32_t size = left < a.group ? (uint32_t)left : (uint32_t)a.group;
    const uint32_t block = blockIdx.x / PAIR;
    const int32_t slot = (int32_t)(block / size), head = (int32_t)(first + block % size);
    const int32_t group = a.p.heads_q / a.p.heads_kv;
    if (slot >= a.slots) return false;
    at.s = sequence(a, head / a.p.heads_kv);
    at.kv_head = head % a.p.heads_kv;
    at.h = at.kv_head * group;
    at.h_end = at.h + group;
    at.own = slot * BN;
    at.count = attn__min32(BN, at.s.sk - at.own);
    if (at.count <= 0) return false;
    at.mask = attn__seq_mask(&a.p, &at.s);
    int32_t from, to;
    attn__mask_cols(&at.mask, at.own, at.own + at.count, &from, &to);
    at.first = from / BM;
    at.last = to > from ? (to - 1) / BM : -1;
    at.masks = (a.p.flags & (ATTN_CAUSAL | ATTN_WINDOW)) || a.ranges;
    if (a.ranges) at.range = range_over(a, at, at.own);
    at.tail = a.p.flags & ATTN_VARLEN_Q ? at.s.q_row + at.s.sq < a.p.total_q : at.s.sq < a.p.max_q;
    return true;
}

/* What tile n of rows and the keys [j0, j1) of the block are to each other: ATTN_TILE_... */
DEVICE int class_of(const attn_cuda_args &a, const place &at, int32_t n, int32_t j0, int32_t j1) {
    return attn__mask_tile(&at.mask, n * BM, attn__min32(n * BM + BM, at.s.sq), j0, j1, a.ranges ? &at.range : NULL);
}
DEVICE bool hides(const attn_cuda_args &a, const place &at, int32_t n, int32_t j0, int32_t j1) {
    return class_of(a, at, n, j0, j1) != ATTN_TILE_FULL;
}
/* Has the tender to look through the tile? Keys past the end get no gradient that could be spoilt. */
DEVICE bool is_tended(const attn_cuda_args &a, const place &at, int32_t n) {
    return (at.masks && hides(a, at, n, at.own, at.own + at.count)) || (at.tail && n * BM + BM > at.s.sq);
}

/* Where the walk over tiles of rows is. All warps walk alike, and FlashMask skips some. */
typedef struct walk {
    int32_t h, n;
} walk;
DEVICE walk find_tile(const attn_cuda_args &a, const place &at, walk w) {
    for (; w.h < at.h_end; w.n--) {
        if (w.n < at.first) {
            w.n = at.last;
            w.h++;
            if (w.h == at.h_end) break;
        }
        if (!a.ranges || class_of(a, at, w.n, at.own, at.own + BN) != ATTN_TILE_SKIP) break;
    }
    return w;
}
DEVICE walk first_tile(const attn_cuda_args &a, const place &at) {
    return find_tile(a, at, {at.last < at.first ? at.h_end : at.h, at.last});
}
DEVICE walk next_tile(const attn_cuda_args &a, const place &at, walk w) {
    w.n--;
    return find_tile(a, at, w);
}

/* ---- the loader ---- */

DEVICE void fetch(const attn_tensor_map *map, uint32_t to, uint32_t full, int rows, int32_t row, int32_t head,
                  int32_t batch) {
#pragma unroll
    for (int c = 0; c < BLOCKS; c++)
        cp_async_bulk_tensor_5d_load(to + c * rows * ROW, map, full, c * ATTN_MAP_COLS, row, 0, head, batch);
}

/* ---- the tender ---- */

/* lse and delta of a tile's rows, a lane to every 32nd. */
enum { EACH = BM / 32 };
typedef struct stats {
    float lse, delta;
} stats;
DEVICE void load_stats(const attn_cuda_args &a, const place &at, const walk &w, stats x[EACH]) {
    const int32_t i = w.n * BM + (int32_t)(threadIdx.x & 31);
    const int64_t row = attn__lse_index(&a.p, &at.s, i, w.h);
    const float *lse = (const float *)a.f.lse + row, *delta = (const float *)a.delta + row;
#pragma unroll
    for (int n = 0; n < EACH; n++) x[n] = i + n * 32 < at.s.sq ? stats{lse[n * 32], delta[n * 32]} : stats{-INFINITY, 0};
}

/* In float16 lse is made so that P comes out multiplied by a power of two (fit.cuh): by this. */
DEVICE float fit_of_p(void) { return BF16 ? 1 : power_of_two(FIT_P); }
DEVICE float fitted_lse(float lse) {
    const float x = __fmul_rn(lse, (float)ATTN_LOG2E);
    return lse == -INFINITY ? INFINITY : BF16 ? x : x - FIT_P;
}

/* ---- what is not finite ---- */

/* In one word of a tile: bit 0 for its low half, bit 1 for its high half. */
DEVICE int nonfinite_word(uint32_t x) {
    const uint32_t ones = BF16 ? 0x7f80 : 0x7c00;
    return ((x & ones) == ones) | ((x >> 16 & ones) == ones) << 1;
}
DEVICE uint32_t most_of(uint32_t most, const uint4 &x) {
    most = __vmaxu2(__vmaxu2(most, x.x & 0x7fff7fff), x.y & 0x7fff7fff);
    return __vmaxu2(__vmaxu2(most, x.z & 0x7fff7fff), x.w & 0x7fff7fff);
}

/* Pieces [from, to) of a row: is there anything that is not finite? */
DEVICE bool holds_nonfinite(uint32_t tile, int rows, int row, int from, int to) {
    uint32_t most = 0;
#pragma unroll 4
    for (int c = from; c < to; c++) most = most_of(most, ld_shared_v4(piece_at(tile, rows, row, c)));
    return nonfinite_word(most) != 0;
}
DEVICE void clear_row(uint32_t tile, int rows, int row, int from, int to) {
#pragma unroll 1
    for (int c = from; c < to; c++) st_shared_v4(piece_at(tile, rows, row, c), make_uint4(0, 0, 0, 0));
}
/* Only what is not finite. */
DEVICE void clear_nonfinite(uint32_t tile, int rows, int row) {
#pragma unroll 1
    for (int n = 0; n < DIM / 2; n++) {
        const uint32_t from = piece_at(tile, rows, row, n / 4) + n % 4 * 4, word = ld_shared_b32(from);
        const int which = nonfinite_word(word);
        if (which) st_shared_b32(from, word & ((which & 1 ? 0 : 0xffffu) | (which & 2 ? 0 : 0xffff0000u)));
    }
}

/* A row of a tile with a mask; `empty`: it has no keys, or is none. The last three: where its lse and delta are, and the note of bad ones. */
DEVICE void tend_row(uint32_t q, uint32_t o, int row, bool empty, uint32_t lse, uint32_t delta, uint32_t bad) {
    if (empty || holds_nonfinite(q, BM, row, 0, DIM / 8)) {
        clear_row(q, BM, row, 0, DIM / 8);
        if (!empty) st_shared_b32(lse, __float_as_uint(NAN));
    }
    if (empty) {
        clear_row(o, BM, row, 0, DIM / 8);
    } else if (holds_nonfinite(o, BM, row, 0, DIM / 8)) {
        clear_nonfinite(o, BM, row);
        st_shared_b32(delta, __float_as_uint(NAN));
        st_shared_b32(bad, 1);
    }
}

/* ---- the adders: a warp each ---- */

/* Tiles of rows are counted over all sequences and heads, as in bwd_one.cu. */
DEVICE int64_t tile_index(const attn_cuda_args &a, const place &at, const walk &w) {
    const int64_t first =
        a.p.flags & ATTN_VARLEN_Q ? at.s.q_row / BM + at.s.b : (int64_t)at.s.b * ((a.p.max_q + BM - 1) / BM);
    return (first + w.n) * a.p.heads_q + w.h;
}

/* FlashMask: do the rows of tile n see any key of key tile m? */
DEVICE bool meets(const attn_cuda_args &a, const place &at, int32_t n, int32_t m) {
    if (m * BN >= at.s.sk) return false;
    const attn_flash_range range = range_over(a, at, m * BN);
    return attn__mask_tile(&at.mask, n * BM, attn__min32(n * BM + BM, at.s.sq), m * BN, m * BN + BN, &range) !=
           ATTN_TILE_SKIP;
}

/* Who adds to the d_q of a tile of rows before and after this block: key tiles; -1: nobody. With FlashMask a warp looks at 32 at a time. */
typedef struct turn {
    int32_t before, after;
} turn;
DEVICE turn turn_of(const place &at, int32_t n, int32_t *first, int32_t *last) {
    int32_t from, to;
    attn__mask_rows(&at.mask, n * BM, attn__min32(n * BM + BM, at.s.sq), &from, &to);
    const int32_t m = at.own / BN;
    *first = from / BN;
    *last = (to - 1) / BN;
    return {m > *first ? m - 1 : -1, m < *last ? m + 1 : -1};
}
DEVICE turn find_turn(const attn_cuda_args &a, const place &at, int32_t n) {
    int32_t first, last;
    turn t = turn_of(at, n, &first, &last);
    if (!a.ranges) return t;
    const int32_t m = at.own / BN, lane = threadIdx.x & 31;
    t = {-1, -1};
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

/*
 * What an adder takes d_q from: ROUND buffers in shared memory, one after the other, and of each the two barriers. It has to see every phase
 * of its `full` ones, so that adders share none of them. Where nobody adds to a tile after this block and a.finishes, the consumers write d_q
 * instead of handing it on: before, `whole` of each buffer says that it holds the sum of the blocks before, if there is one, and the note where
 * d_q goes.
 */
typedef struct d_q_ring {
    uint32_t at, full, empty;
    uint32_t share; /* number of the block in its pair */
    uint32_t whole, note;
    uint32_t mine, others; /* ROUND > 1: barriers of each buffer: the other adder has done its tile; so has this one */
} d_q_ring;
typedef struct result_note {
    alignas(16) uint64_t to; /* the first row of the tile */
    int32_t rows;            /* that there are, from there on */
    int32_t adds;            /* is there a sum of the blocks before? */
} result_note;

/* Of chunk c nobody wants anything any more. */
DEVICE void leave_chunk(const d_q_ring &d, ring &r, int c) {
    if (ROUND > 1 && c + ROUND >= CHUNKS) mbarrier_arrive(d.others + 8 * r.at);
    mbarrier_arrive(d.empty + 8 * r.at);
    turn_ring(r, ROUND);
}

/*
 * d_q of a tile in memory: where it begins, rows that are stored, and columns. Chunks in shared memory are whole; of these, as they lie there,
 * 64 rows of any number of columns are one copy, and fewer rows one for every 8 columns.
 */
typedef struct sums {
    float *at;
    int32_t rows, columns;
} sums;
DEVICE sums sums_of(const attn_cuda_args &a, const place &at, const walk &w) {
    return {d_q_sums(a, at.s, w.n * BM, w.h), (int32_t)attn__d_q_rows(attn__min32(at.s.sq - w.n * BM, BM)),
            attn__d_q_columns(&a.p)};
}
/* The first column of a block's chunk c, and how many are there. */
DEVICE int32_t first_column(const d_q_ring &d, int c) { return ((int32_t)d.share * CHUNKS + c) * COLUMNS; }
DEVICE int32_t columns_of(const sums &x, int32_t first) { return attn__min32(attn__max32(x.columns - first, 0), COLUMNS); }

enum { TO_STORE, TO_ADD, TO_LOAD };
DEVICE void copy(float *memory, uint32_t at, uint32_t bytes, int how, uint32_t barrier) {
    if (how == TO_LOAD)
        cp_async_bulk_load(at, memory, bytes, barrier);
    else if (how == TO_ADD)
        cp_reduce_async_bulk_add_f32(memory, at, bytes);
    else
        cp_async_bulk_store(memory, at, bytes);
}
/* Chunk c, between memory and buffer `at`; barrier: of TO_LOAD. */
DEVICE void copy_chunk(const d_q_ring &d, const sums &x, int c, uint32_t at, int how, uint32_t barrier) {
    const int32_t first = first_column(d, c), columns = columns_of(x, first);
#pragma unroll 1
    for (int32_t g = 0; g < GROUPS; g++) {
        const int32_t rows = attn__min32(x.rows - g * ATTN_D_Q_ROWS, ATTN_D_Q_ROWS);
        const int32_t step = rows == ATTN_D_Q_ROWS ? columns : 8;
        float *const memory = x.at + g * ATTN_D_Q_ROWS * x.columns + first * rows;
#pragma unroll 1
        for (int32_t n = 0; n < columns && rows > 0; n += step)
            copy(memory + n * rows, at + g * GROUP_BYTES + n * ATTN_D_Q_ROWS * 4, (uint32_t)(step * rows * 4), how,
                 barrier);
    }
}

/* The sum of the blocks before, chunk c, to buffer n; none: there is nothing to wait for. */
DEVICE void return_chunk(const d_q_ring &d, const sums &x, int c, int n, bool adds) {
    const uint32_t whole = d.whole + 8 * n;
    if (adds) {
        mbarrier_arrive_expect_tx(whole, (uint32_t)(x.rows * columns_of(x, first_column(d, c)) * 4));
        copy_chunk(d, x, c, d.at + n * CHUNK_BYTES, TO_LOAD, whole);
    } else {
        mbarrier_arrive(whole);
    }
}

/* What was there before goes to the consumers. count: tiles that the block has had so far, of which the other adder had the last one. One thread. */
DEVICE void return_tile(const attn_cuda_args &a, const d_q_ring &d, const place &at, ring &r, const walk &w, const sums &x,
                        bool adds, int32_t count) {
    const uint64_t to = (uint64_t)((uint16_t *)a.f.d_q.data + attn__q_offset(&a.p, &a.f.d_q, &at.s, w.n * BM, w.h));
    st_shared_v4(d.note, make_uint4((uint32_t)to, (uint32_t)(to >> 32), (uint32_t)(at.s.sq - w.n * BM), adds));
    if (adds) fence_proxy_async_global();
#pragma unroll 1
    for (int c = 0; c < ROUND; c++) {
        if (ROUND > 1 && count > 0) mbarrier_wait_parity(d.mine + 8 * c, (count - 1) / 2 & 1);
        return_chunk(d, x, c, c, adds);
    }
#pragma unroll 1
    for (int c = 0; c < CHUNKS; c++) {
        mbarrier_wait_parity(d.full + 8 * r.at, r.parity);
        if (c + ROUND < CHUNKS) return_chunk(d, x, c + ROUND, (int)r.at, adds);
        leave_chunk(d, r, c);
    }
}

/* d_q of a tile, from shared memory to what the block before has left, and the turn to the one after. One thread. */
DEVICE void add_tile(const attn_cuda_args &a, const d_q_ring &d, const place &at, ring &r, const walk &w, const turn &t,
                     bool ordered, int32_t count) {
    const sums x = sums_of(a, at, w);
    uint32_t *const mine = a.turns + tile_index(a, at, w) * PAIR + d.share;
    if (ordered && t.before >= 0) wait_acquire_gpu(mine, (uint32_t)t.before + 1);
    if (a.finishes && t.after < 0) {
        return_tile(a, d, at, r, w, x, t.before >= 0, count);
        return;
    }
    const bool adds = t.before >= 0 || (!ordered && t.after >= 0), whole = x.rows == BM && x.columns == DIM;
#pragma unroll 1
    for (int c = 0; c < CHUNKS; c++) {
        mbarrier_wait_parity(d.full + 8 * r.at, r.parity);
        fence_proxy_async_global();
        if (whole)
            copy(x.at + first_column(d, c) * ATTN_D_Q_ROWS, d.at + r.at * CHUNK_BYTES, CHUNK_BYTES,
                 adds ? TO_ADD : TO_STORE, 0);
        else
            copy_chunk(d, x, c, d.at + r.at * CHUNK_BYTES, adds ? TO_ADD : TO_STORE, 0);
        cp_async_bulk_commit_group();
        cp_async_bulk_wait_group_read();
        mbarrier_arrive(d.whole + 8 * r.at); /* nobody waits, but it has the phases of `empty`, which comes after */
        leave_chunk(d, r, c);
    }
    if (!ordered || t.after < 0) return;
    cp_async_bulk_wait_group();
    fence_proxy_async_global();
    st_release_gpu(mine, (uint32_t)(at.own / BN) + 1);
}

/* Number 0 or 1 of two, which take every other tile. */
DEVICE void add(const attn_cuda_args &a, const d_q_ring &d, const place &at, int number) {
    const bool nonsense = *a.overlap; /* lengths that make no sense: nobody waits for ever, and each stores what it has */
    const bool ordered = nonsense || !(a.p.flags & ATTN_UNORDERED), alone = (threadIdx.x & 31) == 0;
    ring r = {};
    int32_t count = 0;
    for (walk w = first_tile(a, at); says(w.h < at.h_end); w = next_tile(a, at, w), count++) {
        if (says((count & 1) != number)) continue;
        const turn t = nonsense ? turn{-1, -1} : find_turn(a, at, w.n);
        if (alone) add_tile(a, d, at, r, w, t, ordered, count);
        __syncwarp();
    }
    if (alone) cp_async_bulk_wait_group();
}
/* The same where nobody wants d_q. One thread. */
DEVICE void drop(const attn_cuda_args &a, const d_q_ring &d, const place &at, int number) {
    ring r = {};
    int mine = 0;
    for (walk w = first_tile(a, at); w.h < at.h_end; w = next_tile(a, at, w), mine ^= 1)
#pragma unroll 1
        for (int c = 0; c < CHUNKS && mine == number; c++) {
            mbarrier_wait_parity(d.full + 8 * r.at, r.parity);
            mbarrier_arrive(d.empty + 8 * r.at);
            turn_ring(r, ROUND);
        }
}

/* ---- d_q in its dtype ---- */

/* Does nobody add to d_q of tile n after this block? As the adders find it; nonsense: as there. */
DEVICE bool is_last(const attn_cuda_args &a, const place &at, int32_t n, bool nonsense) {
    int32_t first, last;
    return a.finishes && (nonsense || turn_of(at, n, &first, &last).after < 0);
}

/* A warp's; one lane reads, which also arrives where the adder waits. */
DEVICE result_note read_note(uint32_t at) {
    uint4 x = {};
    if ((threadIdx.x & 31) == 0) x = ld_shared_v4(at);
    const uint64_t low = __shfl_sync(~0u, x.x, 0), high = __shfl_sync(~0u, x.y, 0);
    return {high << 32 | low, (int32_t)__shfl_sync(~0u, x.z, 0), (int32_t)__shfl_sync(~0u, x.w, 0)};
}

/* Adds the sum of the blocks before: `tiles` 8-column tiles, at `from` those of all threads of a warpgroup side by side. */
DEVICE void add_sum(float (*d_q)[4], uint32_t from, int tiles) {
#pragma unroll
    for (int n = 0; n < tiles; n++) {
        const uint4 x = ld_shared_v4(from + (n * 128 + (threadIdx.x & 127)) * 16);
        d_q[n][0] += __uint_as_float(x.x);
        d_q[n][1] += __uint_as_float(x.y);
        d_q[n][2] += __uint_as_float(x.z);
        d_q[n][3] += __uint_as_float(x.w);
    }
}

/*
 * Columns from `column` on of the thread's rows of a tile: `row`, and 8 further on. Rows without keys (their bits in `seen` are 0) are zero,
 * whatever is there.
 */
DEVICE void write_d_q(const attn_cuda_args &a, const result_note &note, const float (*d_q)[4], int tiles, int32_t row,
                      int32_t column, uint32_t seen, float scale) {
    uint16_t *const to = (uint16_t *)note.to + row * a.f.d_q.stride[1];
#pragma unroll
    for (int n = 0; n < tiles; n += 4)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            uint32_t w[4];
#pragma unroll
            for (int k = 0; k < 4; k++) {
                const uint32_t pair = pack(d_q[n + k][2 * half] * scale, d_q[n + k][2 * half + 1] * scale);
                w[k] = seen >> half & 1 ? pair : 0;
            }
            transpose_quad(w);
            if (row + 8 * half < note.rows)
                store_piece(to + 8 * half * a.f.d_q.stride[1], column + (n + (int32_t)(threadIdx.x & 3)) * 8, a.p.dim_qk,
                            w);
        }
}

/* ---- the consumers ---- */

/*
 * A bit for each element: element e of 8-column tile nt is bit 4 (nt % 8) + e of word nt / 8. These are the columns below x of the first
 * key's, 8 nt and 8 nt + 1 of the thread's; the second key has theirs two bits further on.
 */
DEVICE uint32_t bits_below(int32_t x) {
    const uint32_t at = (uint32_t)attn__min32(attn__max32(x, 0), 64);
    const uint32_t even = (uint32_t)((UINT64_C(1) << ((at + 7) / 8 * 4)) - 1) & 0x11111111;
    const uint32_t odd = (uint32_t)((UINT64_C(1) << ((at + 6) / 8 * 4)) - 1) & 0x22222222;
    return even | odd;
}
/* Rows [from, to), of those from `row` on; any numbers. */
DEVICE uint32_t bits_between(int32_t from, int32_t to, int32_t row) {
    return bits_below(attn__max32(to, 0) - row) & ~bits_below(attn__max32(from, 0) - row);
}

/* Which pairs of the thread's two keys (my_key: the first one in the block) and the rows of tile n are seen. */
DEVICE void find_seen(const attn_cuda_args &a, const place &at, int32_t my_key, int32_t n, uint32_t seen[WORDS]) {
    const int32_t row = n * BM + (int32_t)(threadIdx.x & 3) * 2;
#pragma unroll
    for (int w = 0; w < WORDS; w++) seen[w] = 0;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int32_t key = at.own + my_key + half * 8;
        if (key >= at.own + at.count) continue;
        int32_t first, end;
        attn__mask_cols(&at.mask, key, key + 1, &first, &end);
        attn_flash flash = {};
        if (a.ranges) flash = attn__flash_load(&at.mask, attn__flash_at(&a.p, &a.f, at.s.b, at.kv_head, key));
#pragma unroll
        for (int w = 0; w < WORDS; w++) {
            uint32_t bits = bits_between(first, attn__min32(end, at.s.sq), row + 64 * w);
            if (a.ranges)
                bits &= ~(bits_between(flash.v[0], flash.v[1], row + 64 * w) |
                          bits_between(flash.v[2], flash.v[3], row + 64 * w));
            seen[w] |= bits << 2 * half;
        }
    }
}

/* Of rows 2t, 2t + 1 of 8-column tile nt. */
DEVICE void load_pair(float x[2], uint32_t of_rows, int nt) {
    const uint2 two = ld_shared_v2(of_rows + (nt * 8 + (threadIdx.x & 3) * 2) * 4);
    x[0] = __uint_as_float(two.x);
    x[1] = __uint_as_float(two.y);
}

/* Two 8-column tiles as wgmma wants 16 columns of its left operand: as it leaves a product. */
DEVICE void pack_weights(uint32_t w[4], const float x[2][4]) {
#pragma unroll
    for (int e = 0; e < 4; e++) w[e] = pack(x[e / 2][e % 2 * 2], x[e / 2][e % 2 * 2 + 1]);
}

/* A barrier that waits for all warps of the consumers. */
DEVICE void arrive_by_warps(uint32_t empty) {
    if ((threadIdx.x & 31) == 0) mbarrier_arrive(empty);
}

/* ---- results ---- */

/* Of the thread's two keys; first: the first one in the block. */
DEVICE void store_keys(const attn_cuda_args &a, const place &at, int32_t first, const attn_tensor &to,
                       const float sum[DT][4], int32_t dim, float factor) {
    if (!to.data) return;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int32_t key = at.own + first + half * 8;
        const int32_t column = (int32_t)(threadIdx.x & 3) * 2;
        if (key >= at.own + at.count) continue;
        uint8_t *row =
            (uint8_t *)to.data + (attn__kv_offset(&a.p, &a.f, &to, &at.s, at.s.leftpad + key, at.kv_head) + column) * 2;
        const bool pairs = (uint64_t)row % 4 == 0 && dim % 2 == 0;
#pragma unroll
        for (int dt = 0; dt < DT; dt++) {
            const uint32_t pair = pack(sum[dt][2 * half] * factor, sum[dt][2 * half + 1] * factor);
            const int32_t left = dim - dt * 8 - column;
            if (pairs && left > 0) *(uint32_t *)(row + dt * 16) = pair;
            if (!pairs && left > 0) *(uint16_t *)(row + dt * 16) = (uint16_t)pair;
            if (!pairs && left > 1) *(uint16_t *)(row + dt * 16 + 2) = (uint16_t)(pair >> 16);
        }
    }
}
/*
 * What the tender took out of d_o, added to d_v of the keys [from, to) of the block that its rows see: p * d_o = d_o for any p > 0. Rare, so
 * slow: a thread has a column, and looks at d_o in memory again. Tiles without a mask add theirs twice, which changes nothing.
 */
static __device__ __noinline__ void add_nonfinite(const attn_cuda_args &a, const place &at, int32_t from, int32_t to,
                                                  int32_t c) {
    if (c >= a.p.dim_v || !a.f.d_v.data) return;
    for (walk w = first_tile(a, at); w.h < at.h_end; w = next_tile(a, at, w))
        for (int32_t i = w.n * BM; i < attn__min32(w.n * BM + BM, at.s.sq); i++) {
            const float x =
                (float)attn__load(a.p.out_dtype, a.f.d_o.data, attn__q_offset(&a.p, &a.f.d_o, &at.s, i, w.h) + c);
            if (fabsf(x) < INFINITY) continue;
            for (int32_t j = at.own + from; j < at.own + attn__min32(to, at.count); j++) {
                const int32_t *flash = a.ranges ? attn__flash_at(&a.p, &a.f, at.s.b, at.kv_head, j) : NULL;
                if (!attn__mask_allowed(&at.mask, i, j, flash)) continue;
                const int64_t sum = attn__kv_offset(&a.p, &a.f, &a.f.d_v, &at.s, at.s.leftpad + j, at.kv_head) + c;
                attn__store(a.p.kv_dtype, a.f.d_v.data, sum, attn__load(a.p.kv_dtype, a.f.d_v.data, sum) + x);
            }
        }
}

#endif
