/*
 * The parts of the decode kernel that are not arithmetic: the list of work and a block's share of it, and how tiles of K and V get into
 * shared memory. Reads the line VARIANT of variants.def.
 */
#ifndef ATTN_DECODE_CUH
#define ATTN_DECODE_CUH

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
    enum { name##_DTYPE = ATTN_##dtype, name##_DIM = dim, name##_BN = bn, name##_STAGES = stages, name##_CTAS = ctas };
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
    ROWS = 16,                   /* of an item */
    KEYS = 32,                   /* of a tile that a team has */
    TEAMS = BN / KEYS,           /* of a block: a warp, or two that share the dims of Q, K, V and O */
    TEAM = WARPS / TEAMS,        /* warps of one */
    FETCHED = KEYS / TEAM,       /* rows of a tile that a warp fetches */
    PIECES = DIM / 8,            /* of 16 bytes in a row */
    ROW_BYTES = DIM * 2,         /* of K or V */
    NT = KEYS / 8,               /* 8-key tiles of a team's keys */
    STEPS = DIM / 16 / TEAM,     /* of S = Q K^T that a warp does */
    DT_TEAM = DIM / 8 / TEAM,    /* 8-column tiles of O that a warp has within a span */
    DT = DIM / 8 / WARPS,        /* and then, when the teams have met */
    TEAM_BYTES = KEYS * DIM * 2, /* the team's rows of a tile */
    TILE_BYTES = BN * DIM * 2,
    SPAN = ATTN_DECODE_SPAN,   /* keys */
    SUPER = ATTN_DECODE_SUPER, /* spans */
    SPAN_TILES = SPAN / BN,
    AT_NOTES = STAGES * TILE_BYTES /* in shared memory, behind the tiles */
};
static_assert(DIM % 32 == 0 && SPAN % BN == 0 && BN % KEYS == 0 && WARPS % TEAMS == 0, "want other dim or bn");
static_assert(TEAM_BYTES == ROWS * DIM * 4, "O of a team goes where its rows of V were");

/* A row of the item at hand. */
typedef struct row_notes {
    int32_t i, h;                   /* query row, -1: there is none; and head */
    int32_t first, end;             /* keys that it sees */
    float scale, raw, slope, least; /* as tile_place has them: rows.cuh */
} row_notes;

/* What threads tell each other. */
typedef struct shared_notes {
    row_notes row[ROWS];
    float most[TEAMS][ROWS]; /* of a row: maximum and sum over the team's keys of a span */
    float sum[TEAMS][ROWS];
    int64_t work[WARPS]; /* start_walk */
    int64_t before;      /* start_walk: units before sequence b */
    int32_t b;
    int32_t last; /* is_last */
} shared_notes;
static_assert(sizeof(shared_notes) <= ATTN_DECODE_NOTES, "give the notes more room");

/*
 * Where 16-byte pieces are: within each AROUND of a row they are exchanged by the row's number, so that a column of pieces is in all
 * banks. The address of one is that of the row's piece 0 with a few bits turned over.
 */
enum { AROUND = PIECES % 8 == 0 ? 8 : 4 };
DEVICE int turn_of(int row) { return AROUND == 8 ? row & 7 : row >> 1 & 3; }
DEVICE uint32_t start_of_row(uint32_t base, int row) { return base + row * ROW_BYTES + (turn_of(row) << 4); }
DEVICE uint32_t piece_at(uint32_t row, int piece) { return (row ^ (piece % AROUND << 4)) + piece / AROUND * AROUND * 16; }

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
    w.blocks =
        w.s.sq > ATTN_CUDA_SPLIT_ROWS ? 0 : attn__max32(1, (w.s.sq * (a.p.heads_q / a.p.heads_kv) + ROWS - 1) / ROWS);
    if (w.s.sq == 0) return;
    const attn_mask mask = attn__seq_mask(&a.p, &w.s);
    attn__mask_rows(&mask, 0, w.s.sq, &w.from, &w.to);
    if (w.from >= w.to) w.from = w.to = 0;
    w.first = w.from / SPAN;
    w.tiles = (w.to - w.first * SPAN + BN - 1) / BN;
}

/* Units of a sequence. */
DEVICE int64_t work_of(const attn_cuda_args &a, const walk &w) { return (int64_t)units_of(w) * w.blocks * a.p.heads_kv; }

/*
 * From the item at hand on, the first of which the block has a part. Is there one? By itself, as it is seldom called: walks then are in
 * memory and not in registers.
 */
static __device__ __noinline__ bool find_part(const attn_cuda_args &a, walk &w, const share &mine) {
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
static __device__ __noinline__ bool start_walk(const attn_cuda_args &a, walk &w, share &mine, shared_notes &notes) {
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

/* Of each span first the tiles of K and then those of V. */
typedef struct fetcher {
    walk *w;              /* where it is, ahead of the work */
    int32_t left;         /* tiles of the part at hand */
    int32_t step;         /* of the span: its tile of K, or, past the last, of V */
    int32_t at;           /* cache position of the warp's first row of the tile */
    int32_t from, to;     /* cache positions that are read */
    int64_t k, v;         /* element offsets of the sequence (of no page) and head */
    const int32_t *table; /* its pages */
    int32_t page;         /* of the lane's row, as it stands there */
} fetcher;

DEVICE int64_t start_of(const attn_cuda_args &a, const attn_tensor &t, const walk &w) {
    if (a.p.page_size) return w.head * t.stride[2];
    return attn__kv_offset(&a.p, &a.f, &t, &w.s, 0, w.head);
}

/* A part, from its first tile on. */
DEVICE void see_part(const attn_cuda_args &a, fetcher &f) {
    const walk &w = *f.w;
    const int32_t tile = w.span * SPAN_TILES, end = attn__min32(w.span_end * SPAN_TILES, w.tiles);
    f.left = end - tile;
    f.step = 0;
    f.from = w.s.leftpad + w.from;
    f.to = w.s.leftpad + w.to;
    f.at = w.s.leftpad + w.first * SPAN + tile * BN + (int32_t)(threadIdx.x >> 5) * FETCHED;
    f.k = start_of(a, a.f.k, w);
    f.v = start_of(a, a.f.v, w);
    if (a.p.page_size) f.table = a.f.page_table + w.s.slot * attn__pages_per_slot(&a.p, &a.f);
}

/* Of the lane's row: it finds out for all where that is. */
DEVICE int32_t position_of(const fetcher &f) { return f.at + (int32_t)(threadIdx.x & 31) % FETCHED; }
DEVICE bool is_read(const fetcher &f) { return position_of(f) >= f.from && position_of(f) < f.to; }

/* Goes on to a part that has tiles. By itself, and with a copy, as it is seldom called: a fetcher then is in registers. */
static __device__ __noinline__ fetcher next_fetch(const attn_cuda_args &a, fetcher f, const share &mine) {
    while (f.left == 0) {
        f.left = -1; /* no more */
        if (next_part(a, *f.w, mine)) see_part(a, f);
    }
    return f;
}

/* Asks for the pages of the next tile. */
DEVICE void look_ahead(const attn_cuda_args &a, fetcher &f, const share &mine) {
    if (f.left == 0) f = next_fetch(a, f, mine);
    if (a.p.page_size && f.left > 0 && is_read(f)) f.page = f.table[attn__divide((uint32_t)position_of(f), a.by_page)];
}

DEVICE fetcher start_fetch(const attn_cuda_args &a, walk &w, const share &mine) {
    fetcher f;
    f.w = &w;
    f.page = 0;
    f.table = NULL;
    see_part(a, f);
    look_ahead(a, f, mine);
    return f;
}

/* The warp's rows of one tile, at any address. Rows that nobody sees are not read and become zero, as do columns past the dim. */
static __device__ __noinline__ void copy_rows(const uint16_t *data, int64_t offset, uint32_t there, int32_t dim,
                                              bool vector_ok, uint32_t to) {
    const int lane = threadIdx.x & 31;
#pragma unroll 1
    for (int n = lane; n < FETCHED * PIECES; n += 32) {
        const int row = n / PIECES, piece = n % PIECES;
        const int count = there >> row & 1 ? attn__max32(0, attn__min32(8, dim - piece * 8)) : 0;
        const uint16_t *from = data + (int64_t)__shfl_sync(~0u, (uint64_t)offset, row) + piece * 8;
        const uint32_t at = piece_at(start_of_row(to, row), piece);
        if (vector_ok) {
            cp_async_cg_zfill(at, count ? from : data, count * 2);
            continue;
        }
        uint32_t word[4] = {0, 0, 0, 0};
#pragma unroll
        for (int x = 0; x < 8; x++)
            if (x < count) word[x / 2] |= (uint32_t)from[x] << (x % 2 * 16);
        st_shared_v4(at, make_uint4(word[0], word[1], word[2], word[3]));
    }
}

/*
 * Whole rows at multiples of 16 bytes. So many requests are whole rows that what a lane fetches begins with them anew; the rows are
 * `stride` apart, or (BY_LANE) lane n says where row n is, in pieces.
 */
template <bool BY_LANE> DEVICE void fetch_rows(const uint16_t *data, int64_t stride, uint32_t pieces, uint32_t to) {
    enum { REQUESTS = PIECES % 3 == 0 ? 3 : 1, EACH = REQUESTS * 32 / PIECES };
    static_assert(8 % EACH == 0 && FETCHED % 8 == 0, "want other dims");
    const int lane = here(threadIdx.x & 31);
#pragma unroll
    for (int c = 0; c < REQUESTS; c++) {
        const int row = (c * 32 + lane) / PIECES, piece = (c * 32 + lane) % PIECES;
        const uint32_t at = piece_at(start_of_row(to, row), piece);
        const uint16_t *from = data + piece * 8 + (BY_LANE ? 0 : row * stride);
#pragma unroll BY_LANE ? 1 : FETCHED / 8
        for (int eight = 0; eight < FETCHED; eight += 8)
#pragma unroll
            for (int n = 0; n < 8; n += EACH) { /* EACH is a power of 2: turns add up like bits */
                const uint16_t *x = from;
                if (BY_LANE) x += (uint64_t)__shfl_sync(~0u, pieces, row + eight + n) * 8;
                cp_async_cg((at ^ turn_of(n) << 4) + (eight + n) * ROW_BYTES, x);
                if (!BY_LANE) from += EACH * stride;
            }
    }
}

/* The next tile, if there is one, to the team's rows at `to`; a group of copies in any case. */
DEVICE void fetch_tile(const attn_cuda_args &a, fetcher &f, const share &mine, uint32_t to) {
    if (f.left > 0) {
        const int32_t tiles = attn__min32(SPAN_TILES, f.left); /* of the span */
        const bool is_v = f.step >= tiles, is_there = is_read(f);
        const uint32_t there = __ballot_sync(~0u, is_there);
        const int64_t stride = is_v ? a.f.v.stride[1] : a.f.k.stride[1];
        const int32_t dim = is_v ? a.p.dim_v : a.p.dim_qk;
        const uint16_t *data = (const uint16_t *)(is_v ? a.f.v.data : a.f.k.data) + (is_v ? f.v : f.k);
        const bool is_whole = there == ~0u && dim == DIM && a.vector_ok;
        to += (threadIdx.x >> 5) % TEAM * FETCHED * ROW_BYTES;
        if (!a.p.page_size && is_whole) {
            fetch_rows<false>(data + f.at * stride, stride, 0, to);
        } else {
            int64_t offset = 0;
            if (is_there) {
                int32_t page = 0, row = position_of(f);
                if (a.p.page_size) {
                    row -= (int32_t)attn__divide((uint32_t)row, a.by_page) * a.p.page_size;
                    page = clamped(a, f.page, 0, a.p.num_pages - 1, ATTN_FLAW_PAGE_TABLE, f.w->s.b);
                }
                offset = (a.p.page_size ? page * (is_v ? a.f.v.stride[0] : a.f.k.stride[0]) : 0) + row * stride;
            }
            if (is_whole && !__any_sync(~0u, (uint64_t)offset >> 35 != 0))
                fetch_rows<true>(data, 0, (uint32_t)(offset >> 3), to);
            else
                copy_rows(data, offset, there, dim, a.vector_ok, to);
        }
        f.at += BN;
        if (++f.step == tiles) f.at -= tiles * BN;
        if (f.step == 2 * tiles) {
            f.step = 0;
            f.left -= tiles;
        }
        look_ahead(a, f, mine);
    }
    cp_async_commit_group();
}

#endif
