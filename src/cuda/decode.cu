/*
 * Decode: sequences of at most ATTN_CUDA_SPLIT_ROWS query rows against a long cache. One line DECODE of variants.def is one build of
 * this file. All that counts is that K and V stream through at the speed of memory; the rest hides behind that.
 *
 * The rows of all query heads that share a KV head are the 16 rows of mma.sync: an item is a sequence, a KV head and 16 such rows.
 * Its keys are worked in spans of ATTN_DECODE_SPAN keys, counted from the sequence's key 0, each by itself; ATTN_DECODE_SUPER spans
 * are a super. The spans of a super are folded in their order, and then the supers: so every sum has one order, whoever works
 * on it, and the bits depend on the sequence alone.
 *
 * The spans of all items in a row are shared out evenly: each block has as many tiles of keys as the others, to within a span. A super that is
 * one block's stays in registers; of one that several blocks have, the results of spans go to the workspace, and the last to finish
 * folds them. Likewise the last to finish a super of an item folds the supers. Nobody waits.
 *
 * Within a block, four warps, per tile of BN keys:
 *
 *     wait for K, V            barrier 1: the tile is there for all, and nobody reads the tile before any more
 *     fetch a tile ahead       into the buffer of the tile before: the next item's, when this one has no more
 *     S = Q K^T                each warp a quarter of the keys; masked
 *     maxima of the rows       barrier 2: of all warps
 *     P = exp2(S - m)          to shared memory; barrier 3
 *     O += P V                 each warp a quarter of the columns, all keys
 *
 * Fragments as in fwd.cu: lane = 4 g + t holds of a 16x8 accumulator the rows g, g + 8 and the columns 2t, 2t + 1.
 */
#include "ptx.cuh"
#include "score.cuh"

#include <float.h>

/* ---- the line of the table ---- */

#define PIECE(...)
#define FWD(...)
#define FWD90(...)
#define BWD(...)
#define BWD90(...)
#define DECODE(name, arch, dtype, dim, bn, stages, ctas)                                                                   \
    enum {                                                                                                                 \
        name##_DTYPE = ATTN_##dtype,                                                                                       \
        name##_DIM = dim,                                                                                                  \
        name##_BN = bn,                                                                                                    \
        name##_STAGES = stages,                                                                                            \
        name##_CTAS = ctas                                                                                                 \
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
    BF16 = K(DTYPE) == ATTN_BF16,
    DIM = K(DIM), /* of Q, K, V and O in shared memory and registers */
    BN = K(BN),
    STAGES = K(STAGES),
    WARPS = ATTN_DECODE_WARPS,
    THREADS = 32 * WARPS,
    ROWS = 16,               /* of an item */
    PIECES = DIM / 8,        /* of 16 bytes in a row */
    KEYS = BN / WARPS,       /* that a warp fetches, and whose scores it makes */
    NT = KEYS / 8,           /* 8-key tiles of them */
    STEPS = DIM / 16,        /* of S = Q K^T */
    DT = DIM / 8 / WARPS,    /* 8-column tiles of O that a warp has */
    TILE_BYTES = BN * DIM * 2,
    SPAN = ATTN_DECODE_SPAN, /* keys */
    SUPER = ATTN_DECODE_SUPER, /* spans */
    SPAN_TILES = SPAN / BN,
    AT_P = STAGES * 2 * TILE_BYTES, /* in shared memory, behind the tiles of K and V */
    AT_NOTES = AT_P + ROWS * BN * 2
};
static_assert(DIM % 32 == 0 && BN % 32 == 0 && SPAN % BN == 0 && KEYS <= 32, "want other dim or bn");
static_assert(KEYS * PIECES % 32 == 0, "lanes share the pieces of a warp's rows evenly");

#define HUGE_SCORE 4194304.0f /* as in rows.cuh */

/* What warps tell each other. */
typedef struct shared_notes {
    float most[WARPS][ROWS], sum[WARPS][ROWS]; /* of each row: of the warp's keys */
    int64_t work[WARPS];                       /* start_walk */
    int64_t before;                            /* start_walk: units before sequence b */
    int32_t b;
    int32_t last; /* is_last */
} shared_notes;
static_assert(sizeof(shared_notes) <= ATTN_DECODE_NOTES, "give the notes more room");

DEVICE void multiply(float c[4], const uint32_t a[4], uint32_t b0, uint32_t b1) {
    if (BF16)
        mma_m16n8k16_bf16(c, a, b0, b1);
    else
        mma_m16n8k16_f16(c, a, b0, b1);
}
DEVICE uint32_t pack(float low, float high) { return BF16 ? cvt_rn_bf16x2(low, high) : cvt_rn_f16x2(low, high); }

/* Address of a 16-byte piece: as shared_at of fwd.cuh. */
DEVICE uint32_t piece_at(uint32_t base, int row, int piece, int pieces) {
    int swizzle = pieces % 8 == 0 ? row & 7 : row >> 1 & 3;
    return base + row * pieces * 16 + ((piece ^ swizzle) << 4);
}

/* ---- the list of work: [sequence][KV head][16 rows][span] ---- */

/* Where a block is in the list: an item, and the spans of it that are the block's. Work is counted in units of a tile. */
typedef struct walk {
    attn_seq s;
    int32_t head, block;    /* KV head; which 16 rows of it */
    int32_t blocks;         /* of the sequence's rows: 0, and it is none of ours */
    int32_t from, to;       /* keys that any row sees */
    int32_t first;          /* the span that they begin in */
    int32_t tiles;          /* from there on */
    int32_t span, span_end; /* of the item, counted from `first`, that are this block's */
    int64_t before;         /* units of the list before the item */
} walk;

/* What a block has of the list. */
typedef struct share {
    int64_t from, to; /* units: the spans that begin there */
    int64_t all;      /* units of the whole list */
} share;

DEVICE int64_t ceil_div(int64_t x, int32_t by) { return (x + by - 1) / by; }

DEVICE int32_t spans_of(const walk &w) { return attn__max32(1, (w.tiles + SPAN_TILES - 1) / SPAN_TILES); }

/* An item has one unit even without keys: somebody has to write its results. */
DEVICE int32_t units_of(const walk &w) { return attn__max32(1, w.tiles); }

/* The list's next sequence. The lengths of most batches are in memory; where they are all alike they are not. */
DEVICE void see_sequence(const attn_cuda_args &a, walk &w, int32_t b) {
    if (a.p.flags & ATTN_OWN_LENGTHS) {
        w.s = sequence(a, b);
    } else {
        w.s = {};
        w.s.b = w.s.slot = b;
        w.s.sq = a.p.max_q;
        w.s.sk = w.s.used = a.p.max_kv;
    }
    w.head = w.block = 0;
    w.from = w.to = w.first = w.tiles = 0;
    w.blocks = w.s.sq > ATTN_CUDA_SPLIT_ROWS ? 0 : attn__max32(1, (w.s.sq * (a.p.heads_q / a.p.heads_kv) + ROWS - 1) / ROWS);
    if (w.s.sq == 0) return;
    const attn_mask mask = attn__seq_mask(&a.p, &w.s);
    attn__mask_rows(&mask, 0, w.s.sq, &w.from, &w.to);
    if (w.from >= w.to) w.from = w.to = 0;
    w.first = w.from / SPAN;
    w.tiles = (w.to - w.first * SPAN + BN - 1) / BN;
}

/* Units of a sequence. */
DEVICE int64_t work_of(const attn_cuda_args &a, const walk &w) { return (int64_t)units_of(w) * w.blocks * a.p.heads_kv; }

/* From the item at hand on, the first of which the block has a part. Is there one? */
DEVICE bool find_part(const attn_cuda_args &a, walk &w, const share &mine) {
    for (;;) {
        if (w.blocks) {
            const int64_t from = mine.from - w.before, to = mine.to - w.before;
            if (to <= 0) return false;
            const int32_t spans = spans_of(w);
            w.span = from <= 0 ? 0 : (int32_t)ceil_div(from, SPAN_TILES);
            w.span_end = to >= (int64_t)spans * SPAN_TILES ? spans : (int32_t)ceil_div(to, SPAN_TILES);
            if (w.span < w.span_end) return true;
            w.before += units_of(w);
            if (++w.block < w.blocks) continue;
            w.block = 0;
            if (++w.head < a.p.heads_kv) continue;
        }
        if (w.s.b + 1 >= a.p.batch) return false;
        see_sequence(a, w, w.s.b + 1);
    }
}
DEVICE bool next_part(const attn_cuda_args &a, walk &w, const share &mine) {
    const int32_t spans = spans_of(w);
    w.span = w.span_end;
    if (w.span < spans) return false; /* the rest is the next block's */
    w.before += units_of(w);
    if (++w.block >= w.blocks) {
        w.block = 0;
        if (++w.head >= a.p.heads_kv) w.blocks = 0; /* through with it */
    }
    return find_part(a, w, mine);
}

/*
 * Counts the work of all sequences, and finds that with which the block begins. A thread has some that follow each other. Is there
 * anything to do?
 */
DEVICE bool start_walk(const attn_cuda_args &a, walk &w, share &mine, shared_notes &notes) {
    const int32_t lane = (int32_t)threadIdx.x & 31, warp = (int32_t)threadIdx.x >> 5, batch = a.p.batch;
    int64_t before = 0;
    int32_t b = 0;
    if (a.p.flags & ATTN_OWN_LENGTHS) {
        const int32_t each = (batch + THREADS - 1) / THREADS, first = attn__min32((int32_t)threadIdx.x * each, batch);
        const int32_t end = attn__min32(first + each, batch);
        int64_t own = 0;
        for (b = first; b < end; b++) {
            see_sequence(a, w, b);
            own += work_of(a, w);
        }
        uint64_t sum = (uint64_t)own; /* of the lanes up to this one */
        for (int by = 1; by < 32; by *= 2) {
            const uint64_t others = __shfl_sync(~0u, sum, (lane - by) & 31);
            if (lane >= by) sum += others;
        }
        if (lane == 31) notes.work[warp] = (int64_t)sum;
        __syncthreads();
        before = (int64_t)sum - own;
        mine.all = 0;
        for (int n = 0; n < WARPS; n++) {
            if (n < warp) before += notes.work[n];
            mine.all += notes.work[n];
        }
        mine.from = ceil_div(mine.all * blockIdx.x, (int32_t)gridDim.x);
        if (before <= mine.from && mine.from < before + own) { /* one thread of the block, if there is work at all */
            for (b = first; b < end; b++) {
                see_sequence(a, w, b);
                if (mine.from < before + work_of(a, w)) break;
                before += work_of(a, w);
            }
            notes.b = b;
            notes.before = before;
        }
        __syncthreads();
        if (mine.from >= mine.all) return false;
        b = notes.b;
        before = notes.before;
    } else {
        see_sequence(a, w, 0);
        const int64_t each = work_of(a, w);
        mine.all = each * batch;
        mine.from = ceil_div(mine.all * blockIdx.x, (int32_t)gridDim.x);
        if (mine.from >= mine.all) return false;
        b = (int32_t)(mine.from / each);
        before = b * each;
    }
    mine.to = ceil_div(mine.all * (blockIdx.x + 1), (int32_t)gridDim.x);
    see_sequence(a, w, b);
    const int32_t item = (int32_t)((mine.from - before) / units_of(w));
    w.before = before + (int64_t)item * units_of(w);
    w.head = item / w.blocks;
    w.block = item % w.blocks;
    return find_part(a, w, mine);
}

/* ---- tiles of K and V to shared memory, a few ahead of the work ---- */

typedef struct fetcher {
    walk w;
    int32_t tile, end; /* of the part at hand, counted as w.tiles */
    bool more;
    int32_t page;   /* of the lane's row of the tile, as it stands in the table */
    uint32_t stage; /* where the tile goes */
} fetcher;

/* The lane's row of a tile: it finds out where that is for all. */
DEVICE int32_t row_of_lane(const fetcher &f) {
    return f.w.first * SPAN + f.tile * BN + (int32_t)(threadIdx.x >> 5) * KEYS + (int32_t)(threadIdx.x & 31) % KEYS;
}

/* Goes on to a part that has tiles, and asks for the pages of the first one. */
DEVICE void look_ahead(const attn_cuda_args &a, fetcher &f, const share &mine) {
    while (f.more && f.tile >= f.end) {
        f.more = next_part(a, f.w, mine);
        f.tile = f.w.span * SPAN_TILES;
        f.end = attn__min32(f.w.span_end * SPAN_TILES, f.w.tiles);
    }
    if (!f.more || !a.p.page_size) return;
    const int32_t j = row_of_lane(f);
    if (j >= f.w.from && j < f.w.to) f.page = page_in_table(a, f.w.s, f.w.s.leftpad + j);
}

DEVICE fetcher start_fetch(const attn_cuda_args &a, const walk &w, const share &mine) {
    fetcher f;
    f.w = w;
    f.tile = w.span * SPAN_TILES;
    f.end = attn__min32(w.span_end * SPAN_TILES, w.tiles);
    f.more = true;
    f.page = 0;
    f.stage = 0;
    look_ahead(a, f, mine);
    return f;
}

/* Element offset of cache position `at`, of which the page is known. */
DEVICE int64_t offset_of(const attn_cuda_args &a, const attn_tensor &t, const walk &w, int32_t at, int32_t page) {
    if (!a.p.page_size) return attn__kv_offset(&a.p, &a.f, &t, &w.s, at, w.head);
    const int32_t row = at - (int32_t)attn__divide((uint32_t)at, a.by_page) * a.p.page_size;
    return page * t.stride[0] + row * t.stride[1] + w.head * t.stride[2];
}

/* One piece of a row at any address. */
static __device__ __noinline__ void copy_elements(uint32_t to, const uint16_t *from, int count) {
    uint32_t word[4] = {0, 0, 0, 0};
    for (int x = 0; x < count; x++) word[x / 2] |= (uint32_t)from[x] << (x % 2 * 16);
    st_shared_v4(to, make_uint4(word[0], word[1], word[2], word[3]));
}

/* The warp's rows of one tile. Rows that nobody sees are not read and become zero, as do columns past the dim. */
DEVICE void fetch_rows(const attn_cuda_args &a, const void *data, int64_t offset, uint32_t there, int32_t dim, uint32_t to) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
#pragma unroll
    for (int n = 0; n < KEYS * PIECES / 32; n++) {
        const int row = (n * 32 + lane) / PIECES, piece = (n * 32 + lane) % PIECES;
        const uint16_t *from = (const uint16_t *)data + (int64_t)__shfl_sync(~0u, (uint64_t)offset, row) + piece * 8;
        const int count = there >> row & 1 ? attn__max32(0, attn__min32(8, dim - piece * 8)) : 0;
        const uint32_t where = piece_at(to, warp * KEYS + row, piece, PIECES);
        if (a.vector_ok)
            cp_async_cg_zfill(where, count ? from : data, count * 2);
        else
            copy_elements(where, from, count);
    }
}

/* The next tile, if there is one; a group of copies in any case. */
DEVICE void fetch_tile(const attn_cuda_args &a, fetcher &f, const share &mine, uint32_t shared_tiles) {
    if (f.more) {
        const int32_t j = row_of_lane(f), at = f.w.s.leftpad + j;
        const bool is_there = j >= f.w.from && j < f.w.to;
        const int32_t page = is_there && a.p.page_size ? checked_page(a, f.w.s, f.page) : 0;
        const uint32_t there = __ballot_sync(~0u, is_there);
        const uint32_t to = shared_tiles + f.stage;
        fetch_rows(a, a.f.k.data, is_there ? offset_of(a, a.f.k, f.w, at, page) : 0, there, a.p.dim_qk, to);
        fetch_rows(a, a.f.v.data, is_there ? offset_of(a, a.f.v, f.w, at, page) : 0, there, a.p.dim_v, to + TILE_BYTES);
        f.stage = f.stage == (STAGES - 1) * 2 * TILE_BYTES ? 0 : f.stage + 2 * TILE_BYTES;
        f.tile++;
        look_ahead(a, f, mine);
    }
    cp_async_commit_group();
}

/* ---- rows of an item ---- */

/* What a lane knows of its two rows, g and g + 8. */
typedef struct rows {
    int32_t i[2], h[2];       /* query row, sq: there is none; and head */
    int32_t first[2], end[2]; /* keys that it sees */
    float scale[2], raw[2], slope[2], least[2]; /* as tile_place has them for a head: rows.cuh */
    int32_t count;                              /* of rows of the item */
    int32_t all_from, all_to;                   /* keys that all of them see */
} rows;

/* As find_features of features.cuh. */
DEVICE void find_scale(const attn_cuda_args &a, rows &r, int32_t b, int half) {
    const bool has_alibi = a.p.flags & ATTN_ALIBI;
    const double scale = a.p.scale;
    const float slope = has_alibi ? a.f.alibi[b * a.f.alibi_stride + r.h[half]] : 0;
    const float divided = has_alibi ? (float)(slope / scale) : 0;
    const bool in_base_e = a.p.softcap > 0 || (has_alibi && !(scale > 1e-30 && fabsf(divided) < 1e28f));
    r.scale[half] = in_base_e ? (float)scale : a.scale_log2;
    r.raw[half] = 1;
    if (in_base_e || !(r.scale[half] > 0)) {
        r.raw[half] = r.scale[half];
        r.scale[half] = in_base_e ? (float)ATTN_LOG2E : 1;
    }
    r.slope[half] = in_base_e ? slope : divided;
    r.least[half] = r.scale[half] > 1 ? -FLT_MAX / r.scale[half] : -FLT_MAX;
}

DEVICE rows see_rows(const attn_cuda_args &a, const walk &w) {
    const int32_t group = a.p.heads_q / a.p.heads_kv, g = (int32_t)(threadIdx.x >> 2 & 7);
    const attn_mask mask = attn__seq_mask(&a.p, &w.s);
    rows r;
    r.count = attn__min32(ROWS, w.s.sq * group - w.block * ROWS);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int32_t row = g + 8 * half, number = w.block * ROWS + row;
        r.i[half] = row < r.count ? (int32_t)attn__divide((uint32_t)number, a.by_share) : w.s.sq;
        r.h[half] = row < r.count ? w.head * group + number - r.i[half] * group : w.head * group;
        r.first[half] = r.end[half] = 0;
        if (row < r.count) attn__mask_row(&mask, r.i[half], &r.first[half], &r.end[half]);
        find_scale(a, r, w.s.b, half);
    }
    r.all_from = r.all_to = 0;
    if (r.count > 0) {
        const int32_t i0 = (int32_t)attn__divide((uint32_t)(w.block * ROWS), a.by_share);
        const int32_t i1 = (int32_t)attn__divide((uint32_t)(w.block * ROWS + r.count - 1), a.by_share) + 1;
        attn__mask_rows_all(&mask, i0, i1, &r.all_from, &r.all_to);
    }
    return r;
}

/* Q as the left operand. */
DEVICE void load_q(const attn_cuda_args &a, const walk &w, const rows &r, uint32_t q[STEPS][4]) {
    const int t = threadIdx.x & 3;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const bool is_there = r.i[half] < w.s.sq;
        const uint16_t *row = (const uint16_t *)a.f.q.data;
        if (is_there) row += attn__q_offset(&a.p, &a.f.q, &w.s, r.i[half], r.h[half]);
#pragma unroll
        for (int n = 0; n < 2 * STEPS; n++) {
            const int column = n * 8 + 2 * t;
            uint32_t pair = 0;
            if (is_there && a.vector_ok && column + 1 < a.p.dim_qk) {
                pair = *(const uint32_t *)(row + column);
            } else {
                if (is_there && column < a.p.dim_qk) pair = row[column];
                if (is_there && column + 1 < a.p.dim_qk) pair |= (uint32_t)row[column + 1] << 16;
            }
            q[n / 2][n % 2 * 2 + half] = pair;
        }
    }
}

/* ---- softmax over a span ---- */

/* m: largest score; l: sum of weights, within a span the lane's part of it; o: unnormalised. */
typedef struct state {
    float m[2], l[2], o[DT][4];
} state;

DEVICE state empty_state(const rows &r) {
    state x;
#pragma unroll
    for (int half = 0; half < 2; half++) x.m[half] = r.least[half], x.l[half] = 0;
#pragma unroll
    for (int n = 0; n < DT * 4; n++) x.o[n / 4][n % 4] = 0;
    return x;
}

/* cap * tanh(raw * s / cap), as cap_scores of features.cuh. */
DEVICE float capped(float s, float cap, float to_y) {
    const float y = __fmul_rn(s, to_y), t = y * y;
    if (!(fabsf(y) < 1.8f)) return fmaf(-2 * cap, rcp_approx(1 + ex2_approx(y * (float)ATTN_LOG2E)), cap);
    const float c[6] = {cap * 0.4999999f,       cap * -0.0416644173f,  cap * 0.00415832574f,
                        cap * -0.000410048877f, cap * 3.51292659e-05f, cap * -1.79529371e-06f};
    return __fmul_rn(y, fmaf(t, fmaf(t, fmaf(t, fmaf(t, fmaf(t, c[5], c[4]), c[3]), c[2]), c[1]), c[0]));
}

/* Semantics 1 to 3 and 5. The warp's keys begin with j0. */
DEVICE void finish_scores(const attn_cuda_args &a, const walk &w, const rows &r, float s[NT][4], int32_t j0) {
    const int t = threadIdx.x & 3;
    const float cap = (float)a.p.softcap;
    const float to_y = cap > 0 ? (float)fmin(fmax(2 * a.p.scale / a.p.softcap, -1e38), 1e38) : 0;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const uint32_t from = (uint32_t)(j0 + 2 * t - r.first[half]);
        const uint32_t count = (uint32_t)attn__max32(r.end[half] - r.first[half], 0);
        const float distance = (float)(r.i[half] + (w.s.sk - w.s.sq) - (j0 + 2 * t));
#pragma unroll
        for (int n = 0; n < 2 * NT; n++) {
            const int key = n / 2 * 8 + n % 2; /* from j0 + 2t on */
            float *x = &s[n / 2][2 * half + n % 2];
            if (cap > 0)
                *x = capped(*x, cap, to_y);
            else if (r.raw[half] != 1)
                *x = __fmul_rn(*x, r.raw[half]);
            if (a.p.flags & ATTN_ALIBI) *x = fmaf(-r.slope[half], fabsf(distance - (float)key), *x);
            if (from + key >= count) *x = -INFINITY;
        }
    }
}

/* The maxima of the rows follow the scores of all warps, and l and o with them. A barrier of the block. */
DEVICE void raise_maxima(state &x, const rows &r, const float s[NT][4], shared_notes &notes) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float most = fmaxf(s[0][2 * half], s[0][2 * half + 1]);
#pragma unroll
        for (int nt = 1; nt < NT; nt++) most = fmaxf(most, fmaxf(s[nt][2 * half], s[nt][2 * half + 1]));
        most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
        most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
        if ((lane & 3) == 0) notes.most[warp][g + 8 * half] = most;
    }
    __syncthreads(); /* 2 */
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const float before = x.m[half];
#pragma unroll
        for (int n = 0; n < WARPS; n++) x.m[half] = fmaxf(x.m[half], notes.most[n][g + 8 * half]);
        const float factor = ex2_approx(__fmul_rn(before - x.m[half], r.scale[half]));
        x.l[half] *= factor;
#pragma unroll
        for (int n = 0; n < 2 * DT; n++) x.o[n / 2][2 * half + n % 2] *= factor;
    }
}

/* P of the warp's keys to shared memory; l. Where scores are huge s - m is taken first, exactly: rows.cuh says why. */
DEVICE void make_p(state &x, const rows &r, float s[NT][4], uint32_t shared_p) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const float scale = r.scale[half], product = __fmul_rn(x.m[half], scale);
        const bool is_huge = fabsf(product) > HUGE_SCORE;
        const float minus = is_huge ? x.m[half] : 0, less = is_huge ? 0 : product;
#pragma unroll
        for (int nt = 0; nt < NT; nt++) {
            const float p0 = ex2_approx(__fmaf_rn(s[nt][2 * half] - minus, scale, -less));
            const float p1 = ex2_approx(__fmaf_rn(s[nt][2 * half + 1] - minus, scale, -less));
            x.l[half] += p0 + p1;
            st_shared_b32(piece_at(shared_p, g + 8 * half, warp * NT + nt, BN / 8) + t * 4, pack(p0, p1));
        }
    }
}

/* ---- infinities and NaN in V, where some rows do not see a key: 0 * NaN ---- */

DEVICE int nonfinite_word(uint32_t x) { /* bit 0 for the low half, bit 1 for the high one */
    const uint32_t ones = BF16 ? 0x7f80 : 0x7c00;
    return ((x & ones) == ones) | ((x >> 16 & ones) == ones) << 1;
}

DEVICE float number_of(uint16_t x) { return BF16 ? attn__from_bf16(x) : cvt_f32_f16(x); }

/*
 * What is not finite in the warp's columns of V is taken out, and added to the rows with a weight for it: such a term is p * v = v
 * for any p > 0. Rare, so slow.
 */
static __device__ __noinline__ void add_nonfinite(state &x, uint32_t shared_v, uint32_t shared_p) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
#pragma unroll 1
    for (int j = 0; j < BN; j++)
#pragma unroll
        for (int dt = 0; dt < DT; dt++) {
            const uint32_t word = ld_shared_b32(piece_at(shared_v, j, warp * DT + dt, PIECES) + t * 4);
            const int which = nonfinite_word(word);
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const uint32_t pair = ld_shared_b32(piece_at(shared_p, g + 8 * half, j / 8, BN / 8) + j % 8 / 2 * 4);
                if (!(pair >> 16 * (j % 2) & 0xffff)) continue;
                if (which & 1) x.o[dt][2 * half] += number_of((uint16_t)word);
                if (which & 2) x.o[dt][2 * half + 1] += number_of((uint16_t)(word >> 16));
            }
        }
    __syncwarp();
    for (int n = lane; n < BN * DT * 4; n += 32) {
        const uint32_t at = piece_at(shared_v, n / (DT * 4), warp * DT + n / 4 % DT, PIECES) + n % 4 * 4;
        const uint32_t word = ld_shared_b32(at);
        const int which = nonfinite_word(word);
        if (which) st_shared_b32(at, word & ((which & 1 ? 0 : 0xffffu) | (which & 2 ? 0 : 0xffff0000u)));
    }
    __syncwarp();
}

DEVICE bool holds_nonfinite(uint32_t shared_v) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    bool found = false;
#pragma unroll 4
    for (int n = lane; n < BN * DT; n += 32) {
        const uint4 x = ld_shared_v4(piece_at(shared_v, n / DT, warp * DT + n % DT, PIECES));
        found |= (nonfinite_word(x.x) | nonfinite_word(x.y) | nonfinite_word(x.z) | nonfinite_word(x.w)) != 0;
    }
    return __any_sync(~0u, found);
}

/* ---- a tile ---- */

/* 8 keys and 32 dims at a time, two steps of the product. */
DEVICE void product_qk(float s[NT][4], const uint32_t q[STEPS][4], uint32_t shared_k) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
#pragma unroll
    for (int n = 0; n < NT * 4; n++) s[n / 4][n % 4] = 0;
#pragma unroll
    for (int kk = 0; kk < STEPS; kk += 2)
#pragma unroll
        for (int nt = 0; nt < NT; nt++) {
            uint32_t k[4];
            ldmatrix_x4(k, piece_at(shared_k, warp * KEYS + nt * 8 + (lane & 7), 2 * kk + (lane >> 3), PIECES));
            multiply(s[nt], q[kk], k[0], k[1]);
            multiply(s[nt], q[kk + 1], k[2], k[3]);
        }
}

/* 32 keys and 8 dims at a time. */
DEVICE void product_pv(float o[DT][4], uint32_t shared_p, uint32_t shared_v) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
#pragma unroll
    for (int ks = 0; ks < BN / 16; ks += 2) {
        uint32_t p[2][4];
        ldmatrix_x4(p[0], piece_at(shared_p, lane & 15, 2 * ks + (lane >> 4), BN / 8));
        ldmatrix_x4(p[1], piece_at(shared_p, lane & 15, 2 * ks + 2 + (lane >> 4), BN / 8));
#pragma unroll
        for (int dt = 0; dt < DT; dt++) {
            uint32_t v[4];
            ldmatrix_x4_trans(v, piece_at(shared_v, ks * 16 + lane, warp * DT + dt, PIECES));
            multiply(o[dt], p[0], v[0], v[1]);
            multiply(o[dt], p[1], v[2], v[3]);
        }
    }
}

/* What a block has all along. */
typedef struct desk {
    uint32_t tiles, p; /* in shared memory */
    uint32_t stage;    /* of the tile at hand */
    shared_notes *notes;
    share mine;
    fetcher f;
} desk;

/* The tile at hand, of which key 0 is j0. */
DEVICE void work_tile(const attn_cuda_args &a, const walk &w, const rows &r, const uint32_t q[STEPS][4], state &x, desk &d,
                      int32_t j0) {
    const int warp = threadIdx.x >> 5;
    const uint32_t shared_k = d.tiles + d.stage, shared_v = shared_k + TILE_BYTES;
    float s[NT][4];
    cp_async_wait_group(STAGES - 2);
    __syncthreads(); /* 1 */
    fetch_tile(a, d.f, d.mine, d.tiles);
    product_qk(s, q, shared_k);
    finish_scores(a, w, r, s, j0 + warp * KEYS);
    raise_maxima(x, r, s, *d.notes);
    make_p(x, r, s, d.p);
    __syncthreads(); /* 3 */
    const int32_t from = attn__max32(j0, w.from), to = attn__min32(j0 + BN, w.to);
    if ((from < r.all_from || to > r.all_to) && holds_nonfinite(shared_v)) {
        state copy = x; /* o stays in registers */
        add_nonfinite(copy, shared_v, d.p);
        x = copy;
    }
    product_pv(x.o, d.p, shared_v);
    d.stage = d.stage == (STAGES - 1) * 2 * TILE_BYTES ? 0 : d.stage + 2 * TILE_BYTES;
}

/* Span `span` of the item, counted from w.first. */
DEVICE state work_span(const attn_cuda_args &a, const walk &w, const rows &r, const uint32_t q[STEPS][4], desk &d,
                       int32_t span) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2;
    const int32_t end = attn__min32((span + 1) * SPAN_TILES, w.tiles);
    state x = empty_state(r);
    if (span * SPAN_TILES >= end) return x;
#pragma unroll 1
    for (int32_t tile = span * SPAN_TILES; tile < end; tile++) work_tile(a, w, r, q, x, d, w.first * SPAN + tile * BN);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float sum = x.l[half];
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        if ((lane & 3) == 0) d.notes->sum[warp][g + 8 * half] = sum;
    }
    __syncthreads(); /* the next ones are written behind those of a tile */
#pragma unroll
    for (int half = 0; half < 2; half++) {
        x.l[half] = d.notes->sum[0][g + 8 * half];
#pragma unroll
        for (int n = 1; n < WARPS; n++) x.l[half] += d.notes->sum[n][g + 8 * half];
    }
    return x;
}

/* ---- partial results ---- */

/* x becomes x and y. Either may be empty, and then this is exact. */
DEVICE void fold(state &x, const state &y, const rows &r) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const float m = fmaxf(x.m[half], y.m[half]);
        const float by_x = ex2_approx(__fmul_rn(x.m[half] - m, r.scale[half]));
        const float by_y = ex2_approx(__fmul_rn(y.m[half] - m, r.scale[half]));
        x.m[half] = m;
        x.l[half] = __fmaf_rn(x.l[half], by_x, __fmul_rn(y.l[half], by_y));
#pragma unroll
        for (int n = 0; n < 2 * DT; n++) {
            float *o = &x.o[n / 2][2 * half + n % 2];
            *o = __fmaf_rn(*o, by_x, __fmul_rn(y.o[n / 2][2 * half + n % 2], by_y));
        }
    }
}

/* A slot of the workspace: o[rows][DIM], then m and l of each row. */
DEVICE float *slot_at(const attn_cuda_decode &c, float *slots, int64_t n) { return slots + n * c.rows * (DIM + 2); }

DEVICE void put_state(const attn_cuda_decode &c, float *slot, const state &x, const rows &r) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int row = g + 8 * half;
        if (row >= r.count) continue;
#pragma unroll
        for (int dt = 0; dt < DT; dt++)
            st_global_cg_v2(slot + row * DIM + (warp * DT + dt) * 8 + 2 * t, x.o[dt][2 * half], x.o[dt][2 * half + 1]);
        if (warp == 0 && t == 0) st_global_cg_v2(slot + c.rows * DIM + 2 * row, x.m[half], x.l[half]);
    }
}
DEVICE state get_state(const attn_cuda_decode &c, const float *slot, const rows &r) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
    state x = empty_state(r);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int row = g + 8 * half;
        if (row >= r.count) continue;
#pragma unroll
        for (int dt = 0; dt < DT; dt++) {
            const float2 pair = ld_global_cg_v2(slot + row * DIM + (warp * DT + dt) * 8 + 2 * t);
            x.o[dt][2 * half] = pair.x;
            x.o[dt][2 * half + 1] = pair.y;
        }
        const float2 pair = ld_global_cg_v2(slot + c.rows * DIM + 2 * row);
        x.m[half] = pair.x;
        x.l[half] = pair.y;
    }
    return x;
}

/* Slots [from, to), in their order. */
DEVICE state fold_slots(const attn_cuda_decode &c, float *slots, int64_t from, int64_t to, const rows &r) {
    state x = empty_state(r);
#pragma unroll 2
    for (int64_t n = from; n < to; n++) fold(x, get_state(c, slot_at(c, slots, n), r), r);
    return x;
}

/* The block has put `done` of `all` results where others may want them. Is it the last, and so to fold them? */
DEVICE bool is_last(uint32_t *counter, uint32_t done, uint32_t all, shared_notes &notes) {
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        notes.last = atomicAdd(counter, done) + done == all;
        __threadfence();
    }
    __syncthreads();
    return notes.last;
}

/* ---- results ---- */

DEVICE void store_pair(const attn_cuda_args &a, int64_t at, int32_t columns, float x, float y) {
    if (columns <= 0) return;
    if (a.p.out_dtype == (attn_dtype)K(DTYPE) && a.vector_ok && columns > 1) {
        *(uint32_t *)((uint16_t *)a.f.o.data + at) = pack(x, y);
    } else if (a.p.out_dtype == ATTN_F32) {
        ((float *)a.f.o.data)[at] = x;
        if (columns > 1) ((float *)a.f.o.data)[at + 1] = y;
    } else {
        const uint32_t both = a.p.out_dtype == ATTN_BF16 ? cvt_rn_bf16x2(x, y) : cvt_rn_f16x2(x, y);
        ((uint16_t *)a.f.o.data)[at] = (uint16_t)both;
        if (columns > 1) ((uint16_t *)a.f.o.data)[at + 1] = (uint16_t)(both >> 16);
    }
}

/* o and lse of the item's rows: as finish_o of rows.cuh. */
DEVICE void finish_item(const attn_cuda_args &a, const walk &w, const rows &r, const state &x) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, t = lane & 3;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        if (r.i[half] >= w.s.sq) continue;
        const float sum = x.l[half], factor = sum == 0 ? 0 : rcp_approx(sum);
        float lse = sum == 0 ? -INFINITY : lse_of(x.m[half], r.scale[half], sum), keys = 1;
        if (a.p.flags & ATTN_SINK) lse = add_sink(lse, a.f.sink[r.h[half]], &keys);
        const int64_t at = attn__q_offset(&a.p, &a.f.o, &w.s, r.i[half], r.h[half]);
#pragma unroll
        for (int dt = 0; dt < DT; dt++) {
            const int32_t column = (warp * DT + dt) * 8 + 2 * t;
            store_pair(a, at + column, a.p.dim_v - column, __fmul_rn(__fmul_rn(x.o[dt][2 * half], factor), keys),
                       __fmul_rn(__fmul_rn(x.o[dt][2 * half + 1], factor), keys));
        }
        if (a.f.lse && warp == 0 && t == 0) ((float *)a.f.lse)[attn__lse_index(&a.p, &w.s, r.i[half], r.h[half])] = lse;
    }
}

/* o = 0 and lse = -inf for rows that are padding, where no other kernel comes by. */
static __device__ __noinline__ void fill_padding(const attn_cuda_args &a, const walk &w) {
    const int32_t group = a.p.heads_q / a.p.heads_kv;
    for (int32_t i = w.s.sq; i < a.p.max_q; i++)
        for (int32_t h = w.head * group; h < w.head * group + group; h++) {
            const int64_t at = attn__q_offset(&a.p, &a.f.o, &w.s, i, h);
            for (int32_t x = threadIdx.x; x < a.p.dim_v; x += THREADS) attn__store(a.p.out_dtype, a.f.o.data, at + x, 0);
            if (threadIdx.x == 0 && a.f.lse) ((float *)a.f.lse)[attn__lse_index(&a.p, &w.s, i, h)] = -INFINITY;
        }
}

/* ---- the block's part of an item ---- */

/* Which of the supers that blocks share this is: that of the item, or that in which a block's share ends; each ends in one. */
DEVICE int64_t shared_super(const attn_cuda_decode &c, const share &mine, int64_t item, int32_t super, int64_t begins) {
    return c.by_item ? item * c.supers + super : begins * gridDim.x / mine.all;
}

/* The super's spans [from, to), counted as w.span, of [first, end): folded, if nobody is still to come. */
DEVICE bool work_super(const attn_cuda_decode &c, const walk &w, const rows &r, const uint32_t q[STEPS][4], desk &d,
                       state &x, int64_t slot, int32_t from, int32_t to, int32_t first, int32_t end) {
    const bool is_whole = from == first && to == end;
    x = empty_state(r);
#pragma unroll 1
    for (int32_t span = from; span < to; span++) {
        const state y = work_span(c.a, w, r, q, d, span);
        if (is_whole)
            fold(x, y, r);
        else
            put_state(c, slot_at(c, c.spans, slot * c.each + (span - first)), y, r);
    }
    if (is_whole) return true;
    if (!is_last(&c.counters[slot], (uint32_t)(to - from), (uint32_t)(end - first), *d.notes)) return false;
    x = fold_slots(c, c.spans, slot * c.each, slot * c.each + (end - first), r);
    return true;
}

DEVICE void work_part(const attn_cuda_decode &c, const walk &w, desk &d) {
    const attn_cuda_args &a = c.a;
    const int32_t spans = spans_of(w), last = (w.first + spans - 1) / SUPER, supers = last - w.first / SUPER + 1;
    const int64_t item = ((int64_t)w.s.b * a.p.heads_kv + w.head) * c.blocks + w.block;
    const rows r = see_rows(a, w);
    uint32_t q[STEPS][4];
    state x;
    load_q(a, w, r, q);
#pragma unroll 1
    for (int32_t super = (w.first + w.span) / SUPER, from = w.span; from < w.span_end; super++) {
        const int32_t first = attn__max32(super * SUPER - w.first, 0);
        const int32_t end = attn__min32((super + 1) * SUPER - w.first, spans), to = attn__min32(end, w.span_end);
        const int64_t slot = shared_super(c, d.mine, item, super, w.before + (int64_t)first * SPAN_TILES);
        const bool is_done = work_super(c, w, r, q, d, x, slot, from, to, first, end);
        from = to;
        if (!is_done) continue;
        if (supers > 1) {
            put_state(c, slot_at(c, c.super_slots, item * c.supers + super), x, r);
            if (!is_last(&c.counters[c.shared + item], 1, (uint32_t)supers, *d.notes)) continue;
            x = fold_slots(c, c.super_slots, item * c.supers + w.first / SUPER, item * c.supers + last + 1, r);
        }
        finish_item(a, w, r, x);
    }
}

KERNEL __launch_bounds__(THREADS, K(CTAS)) VARIANT(const __grid_constant__ attn_cuda_decode c) {
    extern __shared__ __align__(128) uint8_t shared[];
    const attn_cuda_args &a = c.a;
    walk w;
    desk d;
    d.tiles = cvta_shared(shared);
    d.p = d.tiles + AT_P;
    d.notes = (shared_notes *)(shared + AT_NOTES);
    d.stage = 0;
    if (!start_walk(a, w, d.mine, *d.notes)) return;
    d.f = start_fetch(a, w, d.mine);
    for (int n = 0; n < STAGES - 1; n++) fetch_tile(a, d.f, d.mine, d.tiles);
    do {
        work_part(c, w, d);
        const bool pads = !(a.p.flags & ATTN_VARLEN_Q) && a.p.max_q <= ATTN_CUDA_SPLIT_ROWS;
        if (pads && w.block == 0 && w.span == 0 && w.s.sq < a.p.max_q) fill_padding(a, w);
    } while (next_part(a, w, d.mine));
    cp_async_wait_all();
}
