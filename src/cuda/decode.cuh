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
    ROWS = 16,                    /* of an item */
    PIECES = DIM / 8,             /* of 16 bytes in a row */
    KEYS = BN / WARPS,            /* that a warp fetches, and whose scores it makes */
    TOGETHER = DIM > 192 ? 4 : 8, /* copies: where Q and O are large registers are scarce */
    NT = KEYS / 8,                /* 8-key tiles of them */
    STEPS = DIM / 16,             /* of S = Q K^T */
    DT = DIM / 8 / WARPS,         /* 8-column tiles of O that a warp has */
    TILE_BYTES = BN * DIM * 2,
    SPAN = ATTN_DECODE_SPAN,   /* keys */
    SUPER = ATTN_DECODE_SUPER, /* spans */
    SPAN_TILES = SPAN / BN,
    AT_P = STAGES * 2 * TILE_BYTES, /* in shared memory, behind the tiles of K and V */
    AT_NOTES = AT_P + ROWS * BN * 2
};
static_assert(DIM % 32 == 0 && BN % 32 == 0 && SPAN % BN == 0 && KEYS <= 32, "want other dim or bn");
static_assert(KEYS * PIECES % 32 == 0, "lanes share the pieces of a warp's rows evenly");

/* A row of the item at hand. */
typedef struct row_notes {
    int32_t i, h;                   /* query row, -1: there is none; and head */
    int32_t first, end;             /* keys that it sees */
    float scale, raw, slope, least; /* as tile_place has them: rows.cuh */
} row_notes;

/* What threads tell each other. */
typedef struct shared_notes {
    row_notes row[ROWS];
    float number[WARPS][ROWS]; /* of a row: maximum or sum over the warp's keys */
    int64_t work[WARPS];       /* start_walk */
    int64_t before;            /* start_walk: units before sequence b */
    int32_t b;
    int32_t last; /* is_last */
} shared_notes;
static_assert(sizeof(shared_notes) <= ATTN_DECODE_NOTES, "give the notes more room");

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

typedef struct fetcher {
    walk *w;              /* where it is, ahead of the work */
    int32_t left;         /* tiles of the part at hand */
    int32_t at;           /* cache position of the lane's row of the tile: it finds out where that is for all */
    int32_t from, to;     /* cache positions that are read */
    int64_t k, v;         /* element offsets of the sequence (of no page) and head */
    const int32_t *table; /* its pages */
    int32_t page;         /* of the lane's row, as it stands there */
    uint32_t stage;       /* where the tile goes */
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
    f.from = w.s.leftpad + w.from;
    f.to = w.s.leftpad + w.to;
    f.at =
        w.s.leftpad + w.first * SPAN + tile * BN + (int32_t)(threadIdx.x >> 5) * KEYS + (int32_t)(threadIdx.x & 31) % KEYS;
    f.k = start_of(a, a.f.k, w);
    f.v = start_of(a, a.f.v, w);
    if (a.p.page_size) f.table = a.f.page_table + w.s.slot * attn__pages_per_slot(&a.p, &a.f);
}

DEVICE bool is_read(const fetcher &f) { return f.at >= f.from && f.at < f.to; }

/* Goes on to a part that has tiles, and asks for the pages of the first one. */
DEVICE void look_ahead(const attn_cuda_args &a, fetcher &f, const share &mine) {
    while (f.left == 0) {
        f.left = -1; /* no more */
        if (next_part(a, *f.w, mine)) see_part(a, f);
    }
    if (f.left > 0 && a.p.page_size && is_read(f)) f.page = f.table[attn__divide((uint32_t)f.at, a.by_page)];
}

DEVICE fetcher start_fetch(const attn_cuda_args &a, walk &w, const share &mine) {
    fetcher f;
    f.w = &w;
    f.page = 0;
    f.table = NULL;
    f.stage = 0;
    see_part(a, f);
    look_ahead(a, f, mine);
    return f;
}

/* Element offset of the lane's row; page: of it, where there are any, and its row there. */
DEVICE int64_t offset_of(const attn_cuda_args &a, const attn_tensor &t, int64_t start, int32_t page, int32_t row) {
    return start + (a.p.page_size ? page * t.stride[0] : 0) + row * t.stride[1];
}

/* Elements of piece n of the warp's rows that are there; rows that nobody sees are not read and become zero, as do columns past the dim. */
DEVICE int count_of(uint32_t there, int row, int piece, int32_t dim) {
    return there >> row & 1 ? attn__max32(0, attn__min32(8, dim - piece * 8)) : 0;
}

/* The warp's rows of one tile, at any address. */
static __device__ __noinline__ void copy_rows(const uint16_t *data, int64_t offset, uint32_t there, int32_t dim,
                                              uint32_t to) {
    const int lane = threadIdx.x & 31;
#pragma unroll 1
    for (int n = lane; n < KEYS * PIECES; n += 32) {
        const int row = n / PIECES, piece = n % PIECES, count = count_of(there, row, piece, dim);
        const uint16_t *from = data + (int64_t)__shfl_sync(~0u, (uint64_t)offset, row) + piece * 8;
        uint32_t word[4] = {0, 0, 0, 0};
#pragma unroll
        for (int x = 0; x < 8; x++)
            if (x < count) word[x / 2] |= (uint32_t)from[x] << (x % 2 * 16);
        st_shared_v4(piece_at(to, row, piece, PIECES), make_uint4(word[0], word[1], word[2], word[3]));
    }
}

/* The same at multiples of 16 bytes, which arrive later. Most tiles are whole. `to` is a multiple of 8 rows. */
DEVICE void fetch_rows(const void *data, int64_t offset, uint32_t there, int32_t dim, uint32_t to) {
    const int lane = here(threadIdx.x & 31);
    if (there == ~0u && dim == DIM) {
#pragma unroll TOGETHER
        for (int n = 0; n < KEYS * PIECES / 32; n++) {
            const int row = (n * 32 + lane) / PIECES, piece = (n * 32 + lane) % PIECES;
            const uint16_t *from = (const uint16_t *)data + (int64_t)__shfl_sync(~0u, (uint64_t)offset, row);
            cp_async_cg(piece_at(to, row, piece, PIECES), from + piece * 8);
        }
        return;
    }
#pragma unroll 2
    for (int n = 0; n < KEYS * PIECES / 32; n++) {
        const int row = (n * 32 + lane) / PIECES, piece = (n * 32 + lane) % PIECES;
        const uint16_t *from = (const uint16_t *)data + (int64_t)__shfl_sync(~0u, (uint64_t)offset, row);
        const int count = count_of(there, row, piece, dim);
        cp_async_cg_zfill(piece_at(to, row, piece, PIECES), count ? from + piece * 8 : data, count * 2);
    }
}

/* The next tile, if there is one; a group of copies in any case. */
DEVICE void fetch_tile(const attn_cuda_args &a, fetcher &f, const share &mine, uint32_t shared_tiles) {
    if (f.left > 0) {
        const bool is_there = is_read(f);
        const uint32_t there = __ballot_sync(~0u, is_there);
        const uint32_t to = shared_tiles + f.stage + (threadIdx.x >> 5) * KEYS * PIECES * 16; /* the warp's rows */
        int32_t page = 0, row = f.at;
        if (is_there && a.p.page_size) {
            page = clamped(a, f.page, 0, a.p.num_pages - 1, ATTN_FLAW_PAGE_TABLE, f.w->s.b);
            row -= (int32_t)attn__divide((uint32_t)f.at, a.by_page) * a.p.page_size;
        }
        const int64_t k = is_there ? offset_of(a, a.f.k, f.k, page, row) : 0;
        const int64_t v = is_there ? offset_of(a, a.f.v, f.v, page, row) : 0;
        if (a.vector_ok) {
            fetch_rows(a.f.k.data, k, there, a.p.dim_qk, to);
            fetch_rows(a.f.v.data, v, there, a.p.dim_v, to + TILE_BYTES);
        } else {
            copy_rows((const uint16_t *)a.f.k.data, k, there, a.p.dim_qk, to);
            copy_rows((const uint16_t *)a.f.v.data, v, there, a.p.dim_v, to + TILE_BYTES);
        }
        f.stage = f.stage == (STAGES - 1) * 2 * TILE_BYTES ? 0 : f.stage + 2 * TILE_BYTES;
        f.at += BN;
        f.left--;
        look_ahead(a, f, mine);
    }
    cp_async_commit_group();
}

#endif
