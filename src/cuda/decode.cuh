/*
 * The parts of the decode kernel that are not arithmetic: what its threads tell each other, and how tiles of K and V get into
 * shared memory; the list of work is in decode_list.cuh. Reads the line VARIANT of variants.def.
 */
#ifndef ATTN_DECODE_CUH
#define ATTN_DECODE_CUH

#include "append.cuh"
#include "ptx.cuh"
#include "score.cuh"

#include <float.h>

/* ---- the line of the table ---- */

#define PIECE(...)
#define FWD(...)
#define FWD90(...)
#define BWD(...)
#define BWD90(...)
#define DECODE(name, arch, dtype, dim, rows, bn, stages, ctas, pages)                                                      \
    enum {                                                                                                                 \
        name##_DTYPE = ATTN_##dtype,                                                                                       \
        name##_DIM = dim,                                                                                                  \
        name##_ROWS = rows,                                                                                                \
        name##_BN = bn,                                                                                                    \
        name##_STAGES = stages,                                                                                            \
        name##_CTAS = ctas,                                                                                                \
        name##_PAGES = pages                                                                                               \
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
    NARROW = K(DTYPE) == ATTN_I8, /* K and V of 8 bits, of any kind; they are multiplied in float16 */
    FACTORS = K(PAGES),           /* of k and v, of pages */
    BYTES = NARROW ? 1 : 2,       /* of an element of K or V */
    DIM = K(DIM),                 /* of Q, K, V and O in shared memory and registers */
    BN = K(BN),
    STAGES = K(STAGES),
    WARPS = ATTN_DECODE_WARPS,
    THREADS = 32 * WARPS,
    ROWS = K(ROWS),                         /* of an item */
    EIGHTS = ROWS / 8,                      /* products have eight each */
    TEAM = DIM > 128 ? 2 : 1,               /* warps that share the dims of Q, K, V and O */
    TEAMS = WARPS / TEAM,                   /* of a block */
    KEYS = BN / TEAMS,                      /* of a tile that a team has */
    FETCHED = KEYS / TEAM,                  /* rows of a tile that a warp fetches ... */
    LOT = FETCHED < 32 ? (int)FETCHED : 32, /* ... and that its lanes find out about at a time, ... */
    LOTS = FETCHED / LOT,                   /* ... where it is not simply the next one */
    ROW_BYTES = DIM * BYTES,                /* of K or V */
    PIECES = ROW_BYTES / 16,                /* of 16 bytes in a row */
    EACH_PIECE = 16 / BYTES,                /* elements */
    NT = KEYS / 16,                         /* 16-key tiles of a team's keys, of each eight rows */
    STEPS = DIM / 16 / TEAM, /* of S^T = K Q^T that a warp does, and 16-column tiles of O^T that it has within a span */
    DT = DIM / 8 / WARPS,    /* 8-column tiles that it has when the teams have met */
    TEAM_BYTES = KEYS * ROW_BYTES, /* the team's rows of a tile */
    TILE_BYTES = BN * ROW_BYTES,
    SUM_BYTES = ROWS * DIM * 4,                           /* O of a team, where teams meet */
    SUM_STEP = NARROW ? (int)SUM_BYTES : (int)TEAM_BYTES, /* from one to the next */
    SPAN = ATTN_DECODE_SPAN,                              /* keys */
    SUPER = ATTN_DECODE_SUPER,                            /* spans */
    PAIRS_FROM = ATTN_DECODE_PAIRS,                       /* spans from there on are worked two by two */
    SPAN_TILES = SPAN / BN,
    STRETCH_TILES = 64 / KEYS,     /* of a stretch, whose scores are in registers at once */
    AT_SUMS = STAGES * TILE_BYTES, /* in shared memory, behind the tiles: NARROW, where teams meet */
    AT_NOTES = AT_SUMS + (NARROW ? TEAMS * SUM_BYTES : 0),
    AT_FACTORS = AT_NOTES + ATTN_DECODE_NOTES /* FACTORS: of k and v, of each row of each stage that holds keys */
};
static_assert(DIM % 32 == 0 && (KEYS == 32 || KEYS == 64), "want other dim or bn");
static_assert(ROWS == 8 || ROWS == 16, "want other rows");
static_assert(!FACTORS || NARROW, "lines of 8 bits have factors");
static_assert(NARROW || (int)TEAM_BYTES >= (int)SUM_BYTES, "O of a team goes where its rows of V were");
static_assert(PIECES % (4 * TEAM) == 0, "four pieces at a time, of each warp: first_piece, piece_of");

/* A row of the item at hand. */
typedef struct row_notes {
    int32_t i, h;                   /* query row, -1: there is none; and head */
    int32_t first, end;             /* keys that it sees */
    float scale, raw, slope, least; /* as tile_place has them: rows.cuh */
} row_notes;

/*
 * Where 16-byte pieces are: within each AROUND of a row they are exchanged by the row's number, so that a column of pieces is in all
 * banks. The address of one is that of the row's piece 0 with a few bits turned over.
 */
enum { AROUND = PIECES % 8 == 0 ? 8 : 4 };
DEVICE int turn_of(int row) { return AROUND == 8 ? row & 7 : row >> 1 & 3; }
DEVICE uint32_t start_of_row(uint32_t base, int row) { return base + row * ROW_BYTES + (turn_of(row) << 4); }
DEVICE uint32_t piece_at(uint32_t row, int piece) { return (row ^ (piece % AROUND << 4)) + piece / AROUND * AROUND * 16; }

#include "decode_list.cuh"

/* What threads tell each other. */
typedef struct shared_notes {
    row_notes row[ROWS];
    int32_t rows;             /* of the item at hand */
    int32_t all_from, all_to; /* keys that all of them see */
    int32_t last;             /* is_last */
    float most[TEAMS][ROWS];  /* of a row: maximum and sum over the team's keys of a span */
    float sum[TEAMS][ROWS];
    list_notes list;
    walk work[WARPS]; /* where each warp works, */
    walk ahead
        [WARPS]; /* and where it fetches: here, as there is no room in registers, and memory is far while K and V stream in */
    attn_cuda_args a; /* of the kernel: next_fetch */
    int32_t is_plain; /* NARROW: products with a positive scale are scores */
    int8_t fit[ROWS]; /* NARROW: q of a row is multiplied with 2^fit */
} shared_notes;
static_assert(sizeof(shared_notes) <= ATTN_DECODE_NOTES, "give the notes more room");

/* ---- tiles of K and V to shared memory, a few ahead of the work ---- */

/*
 * How rows are fetched that all are read: whole rows at multiples of 16 bytes, the next always a stride away; so eight at a time, as they lie
 * in one page; whole rows, each where its page is; any.
 */
enum { FETCH_ROWS, FETCH_EIGHTS, FETCH_SINGLES, FETCH_ANY };

/* Of each stretch of a span first the tiles of K and then those of V. */
typedef struct fetcher {
    int32_t left;         /* tiles of the part at hand */
    int32_t step;         /* of the stretch: its tile of K, or, past the last, of V */
    int32_t at;           /* cache position of the warp's first row of the tile */
    int32_t from, to;     /* cache positions that are read */
    int32_t how;          /* K and, two bits higher, V: FETCH_... */
    const uint8_t *k, *v; /* of the sequence (of no page) and head */
    const int32_t *table; /* its pages */
    int32_t page[LOTS];   /* of the lane's rows, as it stands there */
} fetcher;

DEVICE const uint8_t *start_of(const attn_cuda_args &a, const attn_tensor &t, const walk &w) {
    const int64_t at = a.p.page_size ? w.head * t.stride[2] : attn__kv_offset(&a.p, &a.f, &t, &w.s, 0, w.head);
    return (const uint8_t *)t.data + BYTES * at;
}
DEVICE int32_t how_of(const attn_cuda_args &a, const attn_tensor &t, int32_t dim, int32_t leftpad) {
    if (!a.vector_ok || dim != DIM) return FETCH_ANY;
    if ((uint64_t)t.stride[1] >> 28) return a.p.page_size ? FETCH_SINGLES : FETCH_ANY;
    if (!a.p.page_size) return FETCH_ROWS;
    return (a.p.page_size | leftpad) % 8 == 0 ? FETCH_EIGHTS : FETCH_SINGLES;
}

/* A part, from its first tile on. */
DEVICE void see_part(const attn_cuda_args &a, const walk &w, fetcher &f) {
    const int32_t tile = w.span * SPAN_TILES, end = attn__min32(w.span_end * SPAN_TILES, w.tiles);
    f.left = end - tile;
    f.step = 0;
    f.from = w.s.leftpad + w.from;
    f.to = w.s.leftpad + w.to;
    f.at = w.s.leftpad + w.first * SPAN + tile * BN + (int32_t)(threadIdx.x >> 5) * FETCHED;
    f.k = start_of(a, a.f.k, w);
    f.v = start_of(a, a.f.v, w);
    f.how = how_of(a, a.f.k, a.p.dim_qk, w.s.leftpad) | how_of(a, a.f.v, a.p.dim_v, w.s.leftpad) << 2;
    if (a.p.page_size) f.table = a.f.page_table + w.s.slot * attn__pages_per_slot(&a.p, &a.f);
}

/* Rows of Q of the part ahead, a lane each, to L2: when they are asked for, what streams in is not in their way any more. */
DEVICE void expect_q(const attn_cuda_args &a, const walk &w) {
    const int32_t number = w.block * ROWS + (int32_t)(threadIdx.x & 31);
    if (threadIdx.x >= ROWS || number >= w.s.sq * a.group) return;
    const int32_t i = (int32_t)attn__divide((uint32_t)number, a.by_share), h = w.head * a.group + number - i * a.group;
    const uint16_t *row = (const uint16_t *)a.f.q.data + attn__q_offset(&a.p, &a.f.q, &w.s, i, h);
    for (int32_t x = 0; x < a.p.dim_qk; x += 64) prefetch_global_l2(row + x);
}

/* Of the lane's row of a lot: it finds out for all where that is. */
DEVICE int32_t position_of(const fetcher &f, int lot) { return f.at + lot * LOT + (int32_t)(threadIdx.x & 31) % LOT; }
DEVICE bool is_read(const fetcher &f, int lot) { return position_of(f, lot) >= f.from && position_of(f, lot) < f.to; }

/* Goes on to a part that has tiles. By itself, and with a copy, as it is seldom called: a fetcher then is in registers. */
static __device__ __noinline__ fetcher next_fetch(const attn_cuda_args &a, fetcher f, shared_notes &notes) {
    walk &w = notes.ahead[threadIdx.x >> 5];
    while (f.left == 0) {
        f.left = -1; /* no more */
        if (!next_part(a, w, notes.list.mine)) break;
        see_part(a, w, f);
        expect_q(a, w);
    }
    return f;
}

/* Asks for the pages of the next tile. `copy` is of a, or the same: for a function that reads it as memory. */
DEVICE void look_ahead(const attn_cuda_args &a, const attn_cuda_args &copy, fetcher &f, shared_notes &notes) {
    if (f.left == 0) f = next_fetch(copy, f, notes);
    if (!a.p.page_size || f.left <= 0) return;
#pragma unroll
    for (int lot = 0; lot < LOTS; lot++)
        if (is_read(f, lot)) f.page[lot] = f.table[attn__divide((uint32_t)position_of(f, lot), a.by_page)];
}

/* What the kernel is given is far too, unless an instruction has its address in it. */
DEVICE void copy_args(const attn_cuda_args &a, attn_cuda_args &copy) {
#pragma unroll 1
    for (uint32_t n = threadIdx.x; n < sizeof a / 4; n += THREADS) ((uint32_t *)&copy)[n] = ((const uint32_t *)&a)[n];
}

/* A row that lies so many positions behind the sequence's first new key. */
static __device__ __noinline__ void rotate_at(const attn_cuda_args &a, const attn_seq &s, int32_t steps, uint16_t *to,
                                              const uint16_t *from) {
    attn_rotation r;
    if (!rotation_at(a, s, steps, &r)) r.rotary_dim = 0;
    rotate_halves(r, NARROW ? a.p.dtype == ATTN_BF16 : (bool)BF16, to, from, a.p.dim_qk);
}

/* append_row, half a warp for the key and half for the value. */
DEVICE void append_here(const attn_cuda_args &a, const attn_seq &s, int32_t row, int32_t h) {
    if (NARROW) {
        append_row(a, s, row, h);
        return;
    }
    if (!has_place(a, s, row)) return;
    const uint16_t *k_new = (const uint16_t *)a.f.k_new.data + attn__new_offset(&a.p, &a.f.k_new, &s, row, h),
                   *v_new = (const uint16_t *)a.f.v_new.data + attn__new_offset(&a.p, &a.f.v_new, &s, row, h);
    uint16_t *k = (uint16_t *)a.f.k.data + cache_offset(a, a.f.k, s, s.used + row, h),
             *v = (uint16_t *)a.f.v.data + cache_offset(a, a.f.v, s, s.used + row, h);
    const bool rotates = a.p.flags & ATTN_ROTARY, is_v = lane_index() >= 16;
    copy_row((char *)(is_v ? v : k), (const char *)(is_v ? v_new : k_new),
             is_v      ? 2 * a.p.dim_v
             : rotates ? 0
                       : 2 * a.p.dim_qk,
             lane_index() % 16, 16);
    if (rotates) rotate_at(a, s, row, k, k_new);
}

/* New keys and values of the part that are in rows which this warp fetches. Are there any? */
DEVICE bool append_own(const attn_cuda_args &a, const walk &w) {
    const int32_t start = w.s.leftpad + (w.first + w.span) * SPAN, used = w.s.used;
    const int32_t count = attn__min32(w.s.appended, start + (w.span_end - w.span) * SPAN - used);
    bool wrote = false;
    for (int32_t row = attn__max32(start - used, 0); row < count; row++) {
        if ((used + row - w.s.leftpad) % BN / FETCHED != (int32_t)(threadIdx.x >> 5)) continue;
        append_here(a, w.s, row, w.head);
        wrote = true;
    }
    return wrote;
}

/* q of the item's rows, a warp for each, from where it was given to where load_q finds it. */
DEVICE void rotate_own(const attn_cuda_args &a, const walk &w) {
    const int32_t first = w.block * ROWS, end = attn__min32(first + ROWS, w.s.sq * a.group);
#pragma unroll 1
    for (int32_t n = first + (int32_t)(threadIdx.x >> 5); n < end; n += WARPS) {
        const int32_t i = (int32_t)attn__divide((uint32_t)n, a.by_share), h = w.head * a.group + n - i * a.group;
        rotate_at(a, w.s, i * attn__rotary_q_step(&a.p), (uint16_t *)a.f.q.data + attn__q_offset(&a.p, &a.f.q, &w.s, i, h),
                  (const uint16_t *)a.other_q.data + attn__q_offset(&a.p, &a.other_q, &w.s, i, h));
    }
}

/*
 * What append and rotate_q do where they are not launched, for the parts of the block. A new key goes into the cache by way of the warp that
 * will fetch it, so nobody waits for anybody. Blocks that have other keys or rows of the same item or head write the same.
 */
static __device__ __noinline__ void bring_new(shared_notes &notes) {
    const attn_cuda_args &a = notes.a;
    walk &w = notes.ahead[threadIdx.x >> 5];
    bool wrote = false;
    do {
        if (a.p.flags & ATTN_ROTARY) rotate_own(a, w);
        wrote |= append_own(a, w);
    } while (next_part(a, w, notes.list.mine));
    if (wrote) __threadfence(); /* other lanes will ask for them */
    __syncwarp();
    if (lane_index() == 0) w = notes.work[threadIdx.x >> 5];
    __syncwarp();
}

DEVICE fetcher start_fetch(const attn_cuda_args &a, shared_notes &notes) {
    fetcher f;
    for (int lot = 0; lot < LOTS; lot++) f.page[lot] = 0;
    f.table = NULL;
    see_part(a, notes.ahead[threadIdx.x >> 5], f);
    look_ahead(a, a, f, notes);
    return f;
}

/* A lot of the warp's rows of one tile, at any address. Rows that nobody sees are not read and become zero, as do columns past the dim. */
static __device__ __noinline__ void copy_rows(const uint8_t *data, int64_t offset, uint32_t there, int32_t dim,
                                              bool vector_ok, uint32_t to) {
    const int lane = threadIdx.x & 31;
#pragma unroll 1
    for (int n = lane; n < LOT * PIECES; n += 32) {
        const int row = n / PIECES, piece = n % PIECES;
        const int count = there >> row & 1 ? attn__max32(0, attn__min32(EACH_PIECE, dim - piece * EACH_PIECE)) : 0;
        const uint8_t *from = data + (int64_t)__shfl_sync(~0u, (uint64_t)offset, row) + piece * 16;
        const uint32_t at = piece_at(start_of_row(to, row), piece);
        if (vector_ok) {
            cp_async_cg_zfill(at, count ? from : data, count * BYTES);
            continue;
        }
        uint32_t word[4] = {0, 0, 0, 0};
#pragma unroll
        for (int x = 0; x < EACH_PIECE; x++)
            if (x < count)
                word[x * BYTES / 4] |= (NARROW ? (uint32_t)from[x] : (uint32_t)((const uint16_t *)from)[x])
                                       << (x * BYTES % 4 * 8);
        st_shared_v4(at, make_uint4(word[0], word[1], word[2], word[3]));
    }
}

/*
 * Whole rows, all or a lot of them. So many requests are whole rows that what a lane fetches begins with them anew. Rows are `step` bytes apart:
 * all, or eight, or none, and lane n says where row n is, in pieces.
 */
template <int HOW> DEVICE void fetch_rows(const uint8_t *data, uint32_t step, uint32_t pieces, uint32_t to) {
    enum { REQUESTS = PIECES % 3 == 0 ? 3 : 1, EACH = REQUESTS * 32 / PIECES, SINGLES = HOW == FETCH_SINGLES };
    enum { COUNT = HOW == FETCH_ROWS ? (int)FETCHED : (int)LOT };
    static_assert(8 % EACH == 0 && COUNT % 8 == 0, "want other dims");
    const int lane = here(threadIdx.x & 31);
#pragma unroll
    for (int c = 0; c < REQUESTS; c++) {
        const uint32_t row = (uint32_t)(c * 32 + lane) / PIECES, piece = (uint32_t)(c * 32 + lane) % PIECES;
        const uint32_t at = piece_at(start_of_row(to, (int)row), (int)piece);
        const uint8_t *from = data + piece * 16 + (SINGLES ? 0 : (uint64_t)row * step);
#pragma unroll HOW == FETCH_ROWS ? COUNT / 8 : 1
        for (int eight = 0; eight < COUNT; eight += 8) {
            const uint8_t *x = from;
            if (HOW == FETCH_EIGHTS) x += (uint64_t)__shfl_sync(~0u, pieces, eight) * 16;
#pragma unroll
            for (int n = 0; n < 8; n += EACH) { /* EACH is a power of 2: turns add up like bits */
                if (SINGLES) x = from + (uint64_t)__shfl_sync(~0u, pieces, (int)row + eight + n) * 16;
                cp_async_cg_once((at ^ turn_of(n) << 4) + (eight + n) * ROW_BYTES, x);
                x += EACH * step;
            }
            if (HOW == FETCH_ROWS) from = x;
        }
    }
}

static __device__ __noinline__ void fetch_singles(const uint8_t *data, uint32_t pieces, uint32_t to) {
    fetch_rows<FETCH_SINGLES>(data, 0, pieces, to);
}

/* FACTORS: where those of the row are that is at `row` of a stage. */
DEVICE uint32_t factors_of(const shared_notes &notes, uint32_t row) {
    const uint32_t all = cvta_shared(&notes) - AT_NOTES;
    return all + AT_FACTORS + (row - all) / ROW_BYTES * 8;
}

/* They come with the keys, those of values too: weights are multiplied with them before V is there. The lane's row of a lot is in `page`. */
DEVICE void fetch_factors(const attn_cuda_args &a, const shared_notes &notes, int32_t page, bool is_there, uint32_t to) {
    const int lane = threadIdx.x & 31;
    const int64_t from = page * a.f.descale_stride[0] + notes.ahead[threadIdx.x >> 5].head * a.f.descale_stride[1];
    const uint32_t at = factors_of(notes, to) + 8 * lane;
    if (lane >= LOT) return;
    if (a.f.k_descale && is_there)
        cp_async_ca_4_zfill(at, a.f.k_descale + from, 4);
    else
        st_shared_b32(at, __float_as_uint(1));
    if (a.f.v_descale && is_there)
        cp_async_ca_4_zfill(at + 4, a.f.v_descale + from, 4);
    else
        st_shared_b32(at + 4, __float_as_uint(1));
}

/* A lot of rows that are not simply one after the other. */
DEVICE void fetch_lot(const attn_cuda_args &a, const fetcher &f, const shared_notes &notes, int lot, int32_t how, bool is_v,
                      uint32_t to) {
    const int64_t stride = is_v ? a.f.v.stride[1] : a.f.k.stride[1];
    const uint8_t *data = is_v ? f.v : f.k;
    const bool is_there = is_read(f, lot);
    int64_t offset = 0; /* bytes */
    int32_t page = 0;
    if (is_there) {
        int32_t row = position_of(f, lot);
        if (a.p.page_size) {
            row -= (int32_t)attn__divide((uint32_t)row, a.by_page) * a.p.page_size;
            page = clamped(a, f.page[lot], 0, a.p.num_pages - 1, ATTN_FLAW_PAGE_TABLE, notes.ahead[threadIdx.x >> 5].s.b);
        }
        offset = (a.p.page_size ? page * (is_v ? a.f.v.stride[0] : a.f.k.stride[0]) : 0) + row * stride;
        offset *= BYTES;
    }
    if (FACTORS && !is_v) fetch_factors(a, notes, page, is_there, to);
    const bool is_near = !__any_sync(~0u, (uint64_t)offset >> 36 != 0);
    if (is_near && how == FETCH_EIGHTS)
        fetch_rows<FETCH_EIGHTS>(data, (uint32_t)stride * BYTES, (uint32_t)(offset >> 4), to);
    else if (is_near && how == FETCH_SINGLES)
        fetch_singles(data, (uint32_t)(offset >> 4), to);
    else
        copy_rows(data, offset, __ballot_sync(~0u, is_there), is_v ? a.p.dim_v : a.p.dim_qk, a.vector_ok, to);
}

/* The next tile, if there is one, to the team's rows at `to`; a group of copies in any case. */
DEVICE void fetch_tile(const attn_cuda_args &a, const attn_cuda_args &copy, fetcher &f, shared_notes &notes, uint32_t to) {
    if (f.left > 0) {
        const int32_t tiles = attn__min32(STRETCH_TILES, f.left); /* of the stretch: no share ends within one */
        const bool is_v = f.step >= tiles, is_whole = f.at >= f.from && f.at + FETCHED <= f.to;
        const int64_t stride = is_v ? a.f.v.stride[1] : a.f.k.stride[1];
        const uint8_t *data = is_v ? f.v : f.k;
        const int32_t how = is_whole ? f.how >> (is_v ? 2 : 0) & 3 : (int32_t)FETCH_ANY;
        to += (threadIdx.x >> 5) % TEAM * FETCHED * ROW_BYTES;
        if (how == FETCH_ROWS) {
            const uint32_t step = (uint32_t)stride * BYTES;
            fetch_rows<FETCH_ROWS>(data + (uint64_t)(uint32_t)f.at * step, step, 0, to);
        } else {
#pragma unroll
            for (int lot = 0; lot < LOTS; lot++) fetch_lot(a, f, notes, lot, how, is_v, to + lot * LOT * ROW_BYTES);
        }
        f.at += BN;
        if (++f.step == tiles) f.at -= tiles * BN;
        if (f.step == 2 * tiles) {
            f.step = 0;
            f.left -= tiles;
        }
        look_ahead(a, copy, f, notes);
    }
    cp_async_commit_group();
}

#endif
