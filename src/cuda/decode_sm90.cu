/*
 * Decode for latent attention (MLA) on Hopper: sequences of at most ATTN_CUDA_SPLIT_ROWS query rows against a cache in which V is the first
 * columns of K, so that what is read once serves both. One line DECODE90 of variants.def is one build of this file.
 *
 * The rows of all query heads of a KV head, 64 at a time, are an item with a sequence. Its keys are worked in spans of ATTN_DECODE90_SPAN,
 * counted from the sequence's key 0, each by itself, and the items' spans are shared out evenly over the blocks (decode_list.cuh), one to a
 * multiprocessor. A sequence of more keys leaves its spans as parts in the workspace, and fold_latent.cu adds them up in their order. So
 * the bits depend on the sequence alone.
 *
 * A block has two consumers, warpgroups that multiply, and a third one whose warps fetch tiles of 64 keys, two for each of the two
 * buffers; cp.async, so that pages of any size are fetched as anything else is. O of 64 rows is 128 KB, half of all registers: a consumer has
 * one half of its columns. They take turns with the scores:
 *
 *     the owner of tile n                     the other
 *     wait for O of tile n - 1, and let go of that
 *     wait for K(n)
 *     S = Q K(n)^T
 *     m, P = exp2(S - m)
 *     tells m and P                           is told, thread by thread: registers of both hold the same rows
 *     O = O exp2(m0 - m) if m has grown
 *     O += P V(n) begins, each its columns
 *
 * Tiles are blocks of 64 columns with a swizzle of 128 bytes, as tensor maps have them: wgmma reads K from them by rows, and V by columns.
 *
 * Barriers: full[stage], a lane's fetching is done; empty[stage], a warp's products are; BARRIER_TOLD + c, consumer c has told; BARRIER_BOTH, of
 * all consumers; BARRIER_OWN + c, of one.
 */
#include <float.h>
#include <stddef.h>

#include "score.cuh"
#include "wgmma.cuh"

/* ---- the line of the table ---- */

#define PIECE(...)
#define FWD(...)
#define FWD90(...)
#define BWD(...)
#define BWD90(...)
#define DECODE90(name, dtype, dim, dimv, bn, stages)                                                                       \
    enum { name##_DTYPE = ATTN_##dtype, name##_DIM = dim, name##_DV = dimv, name##_BN = bn, name##_STAGES = stages };
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
    DTYPE = K(DTYPE),
    BF16 = DTYPE == ATTN_BF16,
    DIM = K(DIM),
    DV = K(DV),
    BN = K(BN),
    STAGES = K(STAGES),
    ROWS = 64, /* of an item */
    CONSUMERS = 2,
    WORKERS = 128 * CONSUMERS, /* threads that work on rows; behind them those that fetch */
    WARPS = ATTN_DECODE90_WARPS,
    THREADS = 32 * WARPS,
    FETCHERS = WARPS - WORKERS / 32,
    FETCHERS_EACH = FETCHERS / STAGES, /* warps that fetch a tile */
    FETCHED = BN / FETCHERS_EACH,      /* rows of each */
    BLOCKS = DIM / ATTN_MAP_COLS,      /* of columns */
    PARTS = 3,                         /* of a tile, that are fetched and waited for one after the other */
    PART_BLOCKS = BLOCKS / PARTS,
    ROW = 128, /* bytes of a row of one */
    BLOCK_BYTES = BN * ROW,
    TILE_BYTES = BLOCKS * BLOCK_BYTES,
    COLUMNS = DV / CONSUMERS,                           /* of O that a consumer has */
    HALF_BYTES = COLUMNS / ATTN_MAP_COLS * BLOCK_BYTES, /* of a tile, that it multiplies P with */
    NT = BN / 8,
    DT = COLUMNS / 8,
    PV_STEPS = BN / 16,
    TOLD_BYTES = 128 * PV_STEPS * 16, /* P */
    SPAN = ATTN_DECODE90_SPAN,
    SPAN_TILES = SPAN / BN,
    PAIRS_FROM = 0,
    AT_K = ROWS * BLOCKS * ROW,
    AT_TOLD = AT_K + STAGES * TILE_BYTES,
    AT_NOTES = AT_TOLD + TOLD_BYTES,
    /* 65,536 registers, 512 for each lane of four warps */
    FETCHER_REGISTERS = 56,
    WORKER_REGISTERS = 224
};
static_assert(ROWS == BN, "blocks of Q and of K are as large");
static_assert(FETCHED == 32 && PARTS == 3 && BLOCKS % PARTS == 0, "as fetch has it");
static_assert(DIM % ATTN_MAP_COLS == 0 && DV % (CONSUMERS * ATTN_MAP_COLS) == 0 && DV <= DIM, "want other dims");
enum { BARRIER_TOLD = 1, BARRIER_OWN = 3, BARRIER_BOTH = 5 };

#include "decode_list.cuh"
#include "decode_score.cuh"
#include "product.cuh"

/* A row of the item at hand. */
typedef struct row_notes {
    int32_t i, h;       /* query row, -1: there is none; and head */
    int32_t first, end; /* keys that it sees */
} row_notes;

/* What threads tell each other. */
typedef struct shared_notes {
    uint64_t full[STAGES * PARTS], empty[STAGES * FETCHERS_EACH];
    list_notes list;
    walk work;            /* where consumers are, */
    walk ahead[FETCHERS]; /* and each warp that fetches */
    row_notes row[ROWS];
    int32_t all_from, all_to; /* keys that all of them see */
    int32_t more;             /* is there another part? */
    float most[ROWS];         /* told with P */
    float sum[CONSUMERS][ROWS];
} shared_notes;
static_assert(sizeof(shared_notes) <= ATTN_DECODE90_NOTES, "give the notes more room");

#define BARRIER(field, n) (shared_start() + (uint32_t)(AT_NOTES + offsetof(shared_notes, field) + 8 * (n)))
DEVICE uint32_t tile_at(uint32_t count) { return shared_start() + AT_K + count % STAGES * TILE_BYTES; }
DEVICE uint32_t parity_of(uint32_t count) { return count / STAGES & 1; }

/* ---- fetching ---- */

/* Element offset of the lane's row of a tile whose first key is j0, and whether it is read at all. */
DEVICE bool find_row(const attn_cuda_args &a, const walk &w, int32_t j0, int64_t *offset) {
    const int32_t j = j0 + (int32_t)((threadIdx.x >> 5) % FETCHERS_EACH * FETCHED + (threadIdx.x & 31)),
                  at = w.s.leftpad + j;
    *offset = 0;
    if (j < w.from || j >= w.to) return false;
    if (a.p.page_size) {
        const int32_t row = at - (int32_t)attn__divide((uint32_t)at, a.by_page) * a.p.page_size;
        *offset = page_of(a, w.s, at) * a.f.k.stride[0] + row * a.f.k.stride[1] + w.head * a.f.k.stride[2];
    } else {
        *offset = attn__kv_offset(&a.p, &a.f, &a.f.k, &w.s, at, w.head);
    }
    return true;
}

/* A part of the warp's rows: eight lanes have 128 bytes of a row at a time. What is not read becomes zero. */
DEVICE void fetch_part(const attn_cuda_args &a, int64_t offset, uint32_t wanted, uint32_t to, int part) {
    const int lane = threadIdx.x & 31, first = (threadIdx.x >> 5) % FETCHERS_EACH * FETCHED;
    const uint8_t *data = (const uint8_t *)a.f.k.data + part * PART_BLOCKS * ROW + (lane & 7) * 16;
    to += part * PART_BLOCKS * BLOCK_BYTES + first * ROW;
#pragma unroll 4
    for (int n = 0; n < FETCHED; n += 4) {
        const int row = n + (lane >> 3);
        const uint8_t *from = data + 2 * (int64_t)__shfl_sync(~0u, (uint64_t)offset, row);
        const uint32_t at = to + row * ROW + (((lane ^ row) & 7) << 4);
#pragma unroll
        for (int c = 0; c < PART_BLOCKS; c++)
            cp_async_cg_zfill(at + c * BLOCK_BYTES, from + c * ROW, wanted >> row & 1 ? 16 : 0);
    }
    cp_async_commit_group();
}

/*
 * While a tile is fetched, the one after the next, which will have its place, is already on its way to L2: there may be more on the way from
 * memory than shared memory has room for.
 */
DEVICE void fetch(const attn_cuda_args &a, shared_notes &notes) {
    const uint32_t warp = (threadIdx.x - WORKERS) >> 5, stage = warp / FETCHERS_EACH, own = warp % FETCHERS_EACH;
    walk &w = notes.ahead[warp];
    uint32_t count = 0; /* tiles before the part */
    do {
        const int32_t first = w.span * SPAN_TILES, end = attn__min32(w.span_end * SPAN_TILES, w.tiles);
        int32_t tile = first + (int32_t)((stage - count) % STAGES);
        int64_t offset;
        bool is_there = find_row(a, w, w.first * SPAN + tile * BN, &offset);
#pragma unroll 1
        for (; tile < end; tile += STAGES) {
            const uint32_t number = count + (uint32_t)(tile - first), wanted = __ballot_sync(~0u, is_there);
            int64_t next;
            is_there = find_row(a, w, w.first * SPAN + (tile + STAGES) * BN, &next) && tile + STAGES < end;
            if (is_there) cp_async_bulk_prefetch_l2((const uint8_t *)a.f.k.data + 2 * next, 2 * DIM);
            mbarrier_wait_parity(BARRIER(empty, stage * FETCHERS_EACH + own), parity_of(number) ^ 1);
#pragma unroll 1
            for (int part = 0; part < PARTS; part++) fetch_part(a, offset, wanted, tile_at(number), part);
            cp_async_wait_group(2);
            fence_proxy_async();
            mbarrier_arrive(BARRIER(full, stage * PARTS));
            cp_async_wait_group(1);
            fence_proxy_async();
            mbarrier_arrive(BARRIER(full, stage * PARTS + 1));
            cp_async_wait_group(0);
            fence_proxy_async();
            mbarrier_arrive(BARRIER(full, stage * PARTS + 2));
            offset = next;
        }
        count += (uint32_t)attn__max32(end - first, 0);
    } while (next_part(a, w, notes.list.mine));
}

/* ---- rows of an item ---- */

/* The row of the item that is number `half` of the thread's two. */
DEVICE int row_of(int half) { return (threadIdx.x >> 5 & 3) * 16 + (threadIdx.x >> 2 & 7) + 8 * half; }

/* Q and notes of the item's rows. All consumers. */
DEVICE void see_rows(const attn_cuda_args &a, const walk &w, shared_notes &notes) {
    const int32_t group = a.group, number = w.block * ROWS, count = attn__min32(ROWS, w.s.sq * group - number);
    const attn_mask mask = attn__seq_mask(&a.p, &w.s);
    bar_sync(BARRIER_BOTH, WORKERS);
    if (threadIdx.x < ROWS) {
        row_notes x = {-1, w.head * group, 0, 0};
        if ((int32_t)threadIdx.x < count) {
            x.i = (int32_t)attn__divide((uint32_t)number + threadIdx.x, a.by_share);
            x.h += number + (int32_t)threadIdx.x - x.i * group;
            attn__mask_row(&mask, x.i, &x.first, &x.end);
        }
        notes.row[threadIdx.x] = x;
    }
    if (threadIdx.x == 0) {
        notes.all_from = notes.all_to = 0;
        if (count > 0) {
            const int32_t i0 = (int32_t)attn__divide((uint32_t)number, a.by_share);
            const int32_t i1 = (int32_t)attn__divide((uint32_t)(number + count - 1), a.by_share) + 1;
            attn__mask_rows_all(&mask, i0, i1, &notes.all_from, &notes.all_to);
        }
    }
    bar_sync(BARRIER_BOTH, WORKERS);
    const int lane = threadIdx.x & 7;
#pragma unroll 1
    for (int row = (int)(threadIdx.x >> 3); row < ROWS; row += WORKERS / 8) {
        const row_notes r = notes.row[row];
        const uint8_t *from = (const uint8_t *)a.f.q.data;
        const int bytes = r.i < 0 ? 0 : 16;
        if (bytes) from += 2 * attn__q_offset(&a.p, &a.f.q, &w.s, r.i, r.h) + lane * 16;
        const uint32_t at = shared_start() + row * ROW + (((lane ^ row) & 7) << 4);
#pragma unroll
        for (int c = 0; c < BLOCKS; c++) cp_async_cg_zfill(at + c * BLOCK_BYTES, from + c * ROW, bytes);
    }
    cp_async_wait_all();
    fence_proxy_async();
    bar_sync(BARRIER_BOTH, WORKERS);
}

/* ---- products ---- */

DEVICE void wait_for_part(uint32_t count, int part) {
    mbarrier_wait_parity(BARRIER(full, count % STAGES * PARTS + part), parity_of(count));
}

DEVICE void let_go(uint32_t count, int half) {
    __syncwarp();
    if ((threadIdx.x & 31) == 0) mbarrier_arrive(BARRIER(empty, count % STAGES * FETCHERS_EACH + half));
}

/* As the parts of the tile arrive. */
DEVICE void begin_qk(float s[NT][4], uint32_t count) {
    const uint64_t q = wgmma_k_major(shared_start()), k = wgmma_k_major(tile_at(count));
#pragma unroll
    for (int c = 0; c < DIM / 16; c++) {
        const uint32_t to = c / 4 * BLOCK_BYTES + c % 4 * 32;
        if (c % (PART_BLOCKS * 4) == 0) {
            wait_for_part(count, c / (PART_BLOCKS * 4));
            wgmma_fence();
        }
        if (c == 0)
            product_ss_set(BN, s[0], q, k);
        else
            product_ss(BN, s[0], wgmma_step(q, 1, to), wgmma_step(k, 1, to), 1);
    }
    wgmma_commit_group();
}

/* In two groups, for the rows of V that each warp has fetched. */
DEVICE void begin_pv(float o[DT][4], const uint32_t p[PV_STEPS][4], uint64_t v) {
    wgmma_fence();
#pragma unroll
    for (int n = 0; n < PV_STEPS; n++) {
        product_rs(COLUMNS, o[0], p[n], wgmma_step(v, n, 16 * ROW), 1);
        if ((n + 1) % (PV_STEPS / FETCHERS_EACH) == 0) wgmma_commit_group();
    }
}

/* ---- softmax ---- */

/* As row_notes of decode.cuh has it, without ALiBi: the same for all rows. */
typedef struct scoring {
    float scale, raw, least;
    float cap, to_y;
    bool is_plain; /* products with the scale are scores */
} scoring;

DEVICE scoring find_scoring(const attn_cuda_args &a) {
    scoring x;
    x.cap = (float)a.p.softcap;
    x.to_y = x.cap > 0 ? (float)fmin(fmax(2 * a.p.scale / a.p.softcap, -1e38), 1e38) : 0;
    x.scale = x.cap > 0 ? (float)ATTN_LOG2E : a.scale_log2;
    x.raw = 1;
    x.is_plain = !(x.cap > 0) && x.scale > 0;
    if (!(x.scale > 0)) {
        x.raw = x.scale;
        x.scale = 1;
    }
    x.least = x.scale > 1 ? -FLT_MAX / x.scale : -FLT_MAX;
    return x;
}

/* What a thread has of its rows: m, the largest score; l, the sum of its weights, in the tiles that its consumer owns; o, unnormalised. */
typedef struct state {
    float m[2], l[2], o[DT][4];
} state;

/* Of an item: keys that any of its rows sees, and that all see. */
typedef struct bounds {
    int32_t from, to, all_from, all_to;
} bounds;

DEVICE void finish_scores(const scoring &x, const shared_notes &notes, const bounds &keys, float s[NT][4], int32_t j0) {
    if (!x.is_plain)
#pragma unroll
        for (int n = 0; n < NT * 4; n++)
            s[n / 4][n % 4] = x.cap > 0 ? capped(s[n / 4][n % 4], x.cap, x.to_y) : __fmul_rn(s[n / 4][n % 4], x.raw);
    if (j0 >= keys.all_from && j0 + BN <= keys.all_to) return;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const row_notes &r = notes.row[row_of(half)];
        const uint32_t from = (uint32_t)(j0 + 2 * (int32_t)(threadIdx.x & 3) - r.first),
                       count = (uint32_t)attn__max32(r.end - r.first, 0);
#pragma unroll
        for (int n = 0; n < 2 * NT; n++)
            if (from + (n / 2 * 8 + n % 2) >= count) s[n / 2][2 * half + n % 2] = -INFINITY;
    }
}

/* P of a tile, as the left operand, and the maximum that follows. Where scores are huge s - m is taken first, exactly: rows.cuh says why. */
DEVICE void make_p(const scoring &x, float most[2], float sum[2], uint32_t p[PV_STEPS][4], const float s[NT][4]) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
#pragma unroll
        for (int n = 0; n < NT; n++) most[half] = fmaxf(most[half], fmaxf(s[n][2 * half], s[n][2 * half + 1]));
        most[half] = fmaxf(most[half], __shfl_xor_sync(~0u, most[half], 1));
        most[half] = fmaxf(most[half], __shfl_xor_sync(~0u, most[half], 2));
        const float product = __fmul_rn(most[half], x.scale);
        const bool is_huge = fabsf(product) > HUGE_SCORE;
        const float minus = is_huge ? most[half] : 0, less = is_huge ? 0 : product;
        sum[half] = 0;
#pragma unroll
        for (int n = 0; n < NT; n++) {
            const float p0 = ex2_approx(__fmaf_rn(s[n][2 * half] - minus, x.scale, -less));
            const float p1 = ex2_approx(__fmaf_rn(s[n][2 * half + 1] - minus, x.scale, -less));
            sum[half] += p0 + p1;
            p[n / 2][n % 2 * 2 + half] = pack(p0, p1);
        }
    }
}

/* l and o follow the maximum; o only where one has grown: the factor is 1 otherwise. */
DEVICE void follow(const scoring &x, state &y, const float most[2]) {
    float by[2];
    bool grew = false;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        grew |= most[half] > y.m[half];
        by[half] = ex2_approx(__fmul_rn(y.m[half] - most[half], x.scale));
        y.l[half] = __fmul_rn(y.l[half], by[half]);
        y.m[half] = most[half];
    }
    if (__any_sync(~0u, grew))
#pragma unroll
        for (int n = 0; n < DT * 4; n++) y.o[n / 4][n % 4] = __fmul_rn(y.o[n / 4][n % 4], by[n % 4 / 2]);
}

/* ---- what one consumer tells the other ---- */

DEVICE uint32_t told_at(int n) { return shared_start() + AT_TOLD + n * 2048 + (threadIdx.x & 127) * 16; }

DEVICE void tell(shared_notes &notes, int number, const float most[2], const uint32_t p[PV_STEPS][4]) {
#pragma unroll
    for (int n = 0; n < PV_STEPS; n++) st_shared_v4(told_at(n), make_uint4(p[n][0], p[n][1], p[n][2], p[n][3]));
    if ((threadIdx.x & 3) == 0)
#pragma unroll
        for (int half = 0; half < 2; half++) notes.most[row_of(half)] = most[half];
    bar_arrive(BARRIER_TOLD + number, WORKERS);
}

DEVICE void be_told(const shared_notes &notes, int number, float most[2], uint32_t p[PV_STEPS][4]) {
    bar_sync(BARRIER_TOLD + (1 - number), WORKERS);
#pragma unroll
    for (int n = 0; n < PV_STEPS; n++) {
        const uint4 x = ld_shared_v4(told_at(n));
        p[n][0] = x.x;
        p[n][1] = x.y;
        p[n][2] = x.z;
        p[n][3] = x.w;
    }
#pragma unroll
    for (int half = 0; half < 2; half++) most[half] = notes.most[row_of(half)];
}

/* ---- infinities and NaN in V, where some rows do not see a key: 0 * NaN ---- */

DEVICE bool holds_nonfinite(uint32_t half) {
    bool found = false;
#pragma unroll 4
    for (int n = threadIdx.x & 127; n < HALF_BYTES / 16; n += 128) {
        const uint4 x = ld_shared_v4(half + n * 16);
        found |= (nonfinite_word(x.x) | nonfinite_word(x.y) | nonfinite_word(x.z) | nonfinite_word(x.w)) != 0;
    }
    return found;
}

DEVICE uint32_t finite_part(uint32_t x) {
    const int which = nonfinite_word(x);
    return x & ((which & 1 ? 0 : 0xffffu) | (which & 2 ? 0 : 0xffff0000u));
}

/*
 * What is not finite in the consumer's half of V is added to the rows with a weight for it, as p * v = v for any p > 0, and taken out. Rare, so
 * slow. P is where it was told.
 */
DEVICE void add_nonfinite(float o[DT][4], uint32_t half, int number) {
    const int lane = threadIdx.x & 31, t = lane & 3;
#pragma unroll 1
    for (int j = 0; j < BN; j++) {
        uint32_t weight[2];
#pragma unroll
        for (int k = 0; k < 2; k++) {
            const uint32_t pair = ld_shared_b32(told_at(j / 16) - t * 16 + j % 8 / 2 * 16 + (j / 8 % 2 * 2 + k) * 4);
            weight[k] = pair >> 16 * (j % 2) & 0xffff;
        }
#pragma unroll
        for (int n = 0; n < DT; n++) {
            const uint32_t word = ld_shared_b32(half + n / 8 * BLOCK_BYTES + j * ROW + (((n ^ j) & 7) << 4) + t * 4);
            const int which = nonfinite_word(word);
            if (!__any_sync(~0u, which)) continue;
#pragma unroll
            for (int k = 0; k < 2; k++) {
                if ((which & 1) && weight[k]) o[n][2 * k] += number_of((uint16_t)word);
                if ((which & 2) && weight[k]) o[n][2 * k + 1] += number_of((uint16_t)(word >> 16));
            }
        }
    }
    bar_sync(BARRIER_OWN + number, 128);
#pragma unroll 1
    for (int n = threadIdx.x & 127; n < HALF_BYTES / 16; n += 128) {
        const uint4 x = ld_shared_v4(half + n * 16);
        st_shared_v4(half + n * 16, make_uint4(finite_part(x.x), finite_part(x.y), finite_part(x.z), finite_part(x.w)));
    }
    fence_proxy_async();
    bar_sync(BARRIER_OWN + number, 128);
}

/* ---- a span ---- */

/* Waits for O of the tile before; its rows are let go of as the products are done with them. */
DEVICE void leave_tile(uint32_t count, bool is_there) {
    wgmma_wait_group(1);
    if (is_there) let_go(count, 0);
    wgmma_wait_group(0);
    if (is_there) let_go(count, 1);
}

/* Scores of a tile, and what becomes of them. */
DEVICE void make_weights(const scoring &x, shared_notes &notes, const bounds &keys, int number, uint32_t count, int32_t j0,
                         float most[2], state &y, uint32_t p[PV_STEPS][4]) {
    float s[NT][4], sum[2];
    begin_qk(s, count);
    wgmma_wait_group(0);
    finish_scores(x, notes, keys, s, j0);
    make_p(x, most, sum, p, s);
    tell(notes, number, most, p);
    follow(x, y, most);
    y.l[0] += sum[0];
    y.l[1] += sum[1];
}

/* Tiles of span `span` of the item; `count` are those before them. Returns how many they are. */
DEVICE int32_t work_span(const walk &w, const scoring &x, shared_notes &notes, int number, int32_t span, uint32_t count,
                         state &y) {
    const int32_t tiles = attn__min32(SPAN_TILES, w.tiles - span * SPAN_TILES);
    const bounds keys = {w.from, w.to, notes.all_from, notes.all_to};
    int32_t j0 = (w.first + span) * SPAN;
#pragma unroll 1
    for (int32_t n = 0; n < tiles; n++, count++, j0 += BN) {
        const uint32_t half = tile_at(count) + number * HALF_BYTES;
        uint32_t p[PV_STEPS][4];
        float most[2] = {y.m[0], y.m[1]};
        leave_tile(count - 1, n > 0);
        if ((n & 1) == number) {
            make_weights(x, notes, keys, number, count, j0, most, y, p);
        } else {
            be_told(notes, number, most, p);
            for (int part = 0; part < PARTS; part++) wait_for_part(count, part); /* they are there */
            follow(x, y, most);
        }
        if (attn__max32(j0, keys.from) < keys.all_from || attn__min32(j0 + BN, keys.to) > keys.all_to) {
            if (bar_red_or(BARRIER_OWN + number, 128, holds_nonfinite(half))) add_nonfinite(y.o, half, number);
            bar_sync(BARRIER_BOTH, WORKERS); /* P is told again after that */
        }
        begin_pv(y.o, p, wgmma_mn_major(half, BLOCK_BYTES));
    }
    leave_tile(count - 1, tiles > 0);
#pragma unroll
    for (int n = 0; n < DT * 4; n++) y.o[n / 4][n % 4] = here_float(y.o[n / 4][n % 4]); /* nothing of it before the wait */
    return attn__max32(tiles, 0);
}

/* ---- results ---- */

/* Two numbers of o, from element `at` on. */
DEVICE void store_pair(const attn_cuda_args &a, int64_t at, float x, float y) {
    if (a.p.out_dtype == ATTN_F32) {
        st_global_cg_v2((float *)a.f.o.data + at, x, y);
    } else {
        *(uint32_t *)((uint16_t *)a.f.o.data + at) = a.p.out_dtype == ATTN_BF16 ? cvt_rn_bf16x2(x, y) : cvt_rn_f16x2(x, y);
    }
}

/*
 * A row of o as floats. Of two tiles of 8 columns that lie side by side, an even lane takes four columns of the first from itself and its
 * neighbour, an odd one of the second.
 */
DEVICE void put_row(float *row, const float o[DT][4], int half, float factor) {
    const int t = threadIdx.x & 3;
    const bool odd = t & 1;
    float *const to = row + odd * 8 + t / 2 * 4;
#pragma unroll
    for (int n = 0; n < DT; n += 2) {
        const float *first = &o[n][2 * half], *second = &o[n + 1][2 * half];
        const float x = __shfl_xor_sync(~0u, odd ? first[0] : second[0], 1),
                    y = __shfl_xor_sync(~0u, odd ? first[1] : second[1], 1);
        const float four[4] = {odd ? x : first[0], odd ? y : first[1], odd ? second[0] : x, odd ? second[1] : y};
        if (row)
            st_global_cg_v4((float4 *)(to + n * 8), __fmul_rn(four[0], factor), __fmul_rn(four[1], factor),
                            __fmul_rn(four[2], factor), __fmul_rn(four[3], factor));
    }
}

/* The same as the result, in its dtype. */
DEVICE void store_row(const attn_cuda_args &a, int64_t at, const float o[DT][4], int half, float factor, float keys) {
#pragma unroll
    for (int n = 0; n < DT; n++)
        store_pair(a, at + n * 8 + 2 * (int)(threadIdx.x & 3), __fmul_rn(__fmul_rn(o[n][2 * half], factor), keys),
                   __fmul_rn(__fmul_rn(o[n][2 * half + 1], factor), keys));
}

/* The span's results: parts in the workspace, or o and lse. As finish_o of rows.cuh. */
DEVICE void finish_span(const attn_cuda_args &a, const walk &w, const scoring &x, shared_notes &notes, int number,
                        int32_t span, state &y) {
    const int t = threadIdx.x & 3;
    const bool splits = is_split(a, w.s), writes = number == 0 && t == 0;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        y.l[half] += __shfl_xor_sync(~0u, y.l[half], 1);
        y.l[half] += __shfl_xor_sync(~0u, y.l[half], 2);
        if (t == 0) notes.sum[number][row_of(half)] = y.l[half];
    }
    bar_sync(BARRIER_BOTH, WORKERS);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const row_notes r = notes.row[row_of(half)];
        const float sum = notes.sum[0][row_of(half)] + notes.sum[1][row_of(half)];
        const float factor = sum == 0 ? 0 : rcp_approx(sum);
        float lse = sum == 0 ? -INFINITY : lse_of(y.m[half], x.scale, sum), keys = 1;
        if (splits) {
            const int64_t part = r.i < 0 ? 0 : part_index(a, w.s, r.i, r.h, w.first + span);
            if (writes && r.i >= 0) ((float *)a.part_lse)[part] = lse;
            float *row = (float *)a.part_o + part * DV + number * COLUMNS;
            if (__any_sync(~0u, r.i >= 0)) put_row(r.i < 0 || sum == 0 ? NULL : row, y.o, half, factor);
        } else if (r.i >= 0) {
            if (a.p.flags & ATTN_SINK) lse = add_sink(lse, a.f.sink[r.h], &keys);
            if (a.f.lse && writes) ((float *)a.f.lse)[attn__lse_index(&a.p, &w.s, r.i, r.h)] = lse;
            store_row(a, attn__q_offset(&a.p, &a.f.o, &w.s, r.i, r.h) + number * COLUMNS, y.o, half, factor, keys);
        }
    }
    bar_sync(BARRIER_BOTH, WORKERS); /* nobody reads sums any more */
}

/* Spans of the sequence that no row of it sees are not in the list: their parts have no keys. */
DEVICE void leave_out_spans(const attn_cuda_args &a, const walk &w, const shared_notes &notes) {
    const int32_t count = (int32_t)(((int64_t)w.s.sk + SPAN - 1) / SPAN), end = w.first + spans_of(w);
    if (!is_split(a, w.s) || (w.first == 0 && end >= count)) return;
    for (int row = (int)(threadIdx.x >> 2); row < ROWS; row += WORKERS / 4) {
        const row_notes r = notes.row[row];
        if (r.i < 0) continue;
        const int64_t part = part_index(a, w.s, r.i, r.h, 0);
        for (int32_t c = (int32_t)(threadIdx.x & 3); c < count; c += 4)
            if (c < w.first || c >= end) ((float *)a.part_lse)[part + c] = -INFINITY;
    }
}

DEVICE void consume(const attn_cuda_args &a, shared_notes &notes) {
    const int number = (int)__shfl_sync(~0u, threadIdx.x >> 7, 0);
    const walk &w = notes.work;
    const scoring x = find_scoring(a);
    uint32_t count = 0;
    do {
        see_rows(a, w, notes);
        if (w.span == 0) leave_out_spans(a, w, notes);
#pragma unroll 1
        for (int32_t span = w.span; span < w.span_end; span++) {
            state y = {{x.least, x.least}, {0, 0}, {}};
            count += (uint32_t)work_span(w, x, notes, number, span, count, y);
            finish_span(a, w, x, notes, number, span, y);
        }
        const bool pads = !(a.p.flags & ATTN_VARLEN_Q) && a.p.max_q <= ATTN_CUDA_SPLIT_ROWS;
        if (pads && w.block == 0 && w.span == 0 && w.s.sq < a.p.max_q) fill_padding(a, w.s.b, w.head, w.s.sq, WORKERS);
        bar_sync(BARRIER_BOTH, WORKERS);
        if (threadIdx.x < 32) notes.more = next_part(a, notes.work, notes.list.mine);
        bar_sync(BARRIER_BOTH, WORKERS);
    } while (notes.more);
}

KERNEL __launch_bounds__(THREADS, 1) VARIANT(const __grid_constant__ attn_cuda_args a) {
    extern __shared__ __align__(1024) uint8_t shared[];
    shared_notes &notes = *(shared_notes *)shared_pointer(shared_start() + AT_NOTES);
    walk first;
    if (cvta_shared(shared) != shared_start()) __trap();
    if (!start_walk(a, notes.list, first)) return;
    if (threadIdx.x == 0) {
        for (int n = 0; n < STAGES * PARTS; n++) mbarrier_init(BARRIER(full, n), 32 * FETCHERS_EACH);
        for (int n = 0; n < STAGES * FETCHERS_EACH; n++) mbarrier_init(BARRIER(empty, n), WORKERS / 32);
        fence_mbarrier_init();
        notes.work = first;
        for (int n = 0; n < FETCHERS; n++) notes.ahead[n] = first;
    }
    __syncthreads();
    if (threadIdx.x >= WORKERS) {
        setmaxnreg_dec(FETCHER_REGISTERS);
        fetch(a, notes);
    } else {
        setmaxnreg_inc(WORKER_REGISTERS);
        consume(a, notes);
    }
}
