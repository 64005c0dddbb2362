/*
 * The parts of the portable backward kernels that are not products: where a block works, how tiles get into shared memory, which
 * pairs count, what becomes of their products, how sums get out. Reads the line VARIANT of variants.def.
 *
 * A block keeps `own` keys (side KEYS) or rows (side ROWS) and walks over tiles of the others. Nearly all of this is the same for both;
 * row_at and key_at say which is which. A thread has of a tile of products, own x others, the elements that the tensor cores leave it:
 * lane = 4 g + t of 16 own ones g, g + 8, of every 8 others 2t, 2t + 1.
 */
#ifndef ATTN_BWD_CUH
#define ATTN_BWD_CUH

#include "ptx.cuh"
#include "score.cuh"

/* ---- the line of the table ---- */

enum { KEYS, ROWS, BOTH };
#define PIECE(...)
#define FWD(...)
#define FWD90(...)
#define BWD90(...)
#define BWD(name, arch, side, dtype, dim, own, others, warps, ctas, stages)                                                \
    enum {                                                                                                                 \
        name##_SIDE = side,                                                                                                \
        name##_DTYPE = ATTN_##dtype,                                                                                       \
        name##_DIM = dim,                                                                                                  \
        name##_OWN = own,                                                                                                  \
        name##_OTHERS = others,                                                                                            \
        name##_WARPS = warps,                                                                                              \
        name##_CTAS = ctas,                                                                                                \
        name##_STAGES = stages                                                                                             \
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
    PAIRED =
        (int)K(SIDE) == (int)BOTH, /* two warps have the same own ones, and each a half of the others, or of the dims */
    BY_KEYS = (int)K(SIDE) != (int)ROWS,
    BF16 = (int)K(DTYPE) == (int)ATTN_BF16,
    DIM = K(DIM),
    OWN = K(OWN),
    OTHERS = K(OTHERS),
    WARPS = K(WARPS),
    CTAS = K(CTAS),
    STAGES = K(STAGES),
    THREADS = 32 * WARPS,
    CHUNKS = DIM / 8,                     /* 16-byte pieces of a row */
    MT = OWN * (1 + PAIRED) / WARPS / 16, /* 16-row tiles of a warp */
    SUB = ATTN_BWD_SUB(OWN, OTHERS / (1 + PAIRED),
                       WARPS / (1 + PAIRED)),                      /* others that are worked at a time: what has room */
    NT = SUB / 8,                                                  /* 8-column tiles of these */
    DT = DIM / 8,                                                  /* 8-column tiles of the sums */
    ELEMENTS = MT * NT * 4,                                        /* of a tile, that a thread has */
    SPLIT = BY_KEYS && !PAIRED && ATTN_BWD_SPLIT(OWN, WARPS, DIM), /* blocks make either d_k or d_v */
    TWO = BY_KEYS && !SPLIT,                                       /* or both */
    TILE_BYTES = OTHERS * DIM * 2,                                 /* of one of the two streamed tensors */
    OWN_BYTES = OWN * DIM * 2,
    STATS_BYTES = BY_KEYS ? OTHERS * 8 : 0,
    STATS_STAGES = PAIRED ? 2 : STAGES,
    STAGE_BYTES = 2 * TILE_BYTES,
    AT_TILES = 2 * OWN_BYTES, /* shared memory: own ones, stages of the others, P and d_s (PAIRED), lse and delta, notes */
    AT_P = AT_TILES + STAGES * STAGE_BYTES,
    AT_STATS = AT_P + (PAIRED ? 2 * OWN * OTHERS * 2 : 0),
    AT_NOTES = AT_STATS + STATS_STAGES * STATS_BYTES
};
static_assert(ELEMENTS <= 32, "a word has a bit for each");
static_assert(OTHERS % SUB == 0 && SUB % 16 == 0 && OWN % (16 * WARPS / (1 + PAIRED)) == 0, "want other tiles");
static_assert(OWN % ATTN_ANY_COLS == 0 && OTHERS % ATTN_ANY_COLS == 0, "tiles of keys have whole ranges of FlashMask");

/* All elements that a thread has of a tile; x counts them. */
#define EACH(mt, nt, e)                                                                                                    \
    _Pragma("unroll") for (int mt = 0; mt < MT; mt++) _Pragma("unroll") for (int nt = 0; nt < NT; nt++)                    \
        _Pragma("unroll") for (int e = 0; e < 4; e++)
#define NUMBER(mt, nt, e) (((mt)*NT + (nt)) * 4 + (e))

DEVICE uint32_t pack(float low, float high) { return BF16 ? cvt_rn_bf16x2(low, high) : cvt_rn_f16x2(low, high); }

/* ---- shared memory: as fwd.cuh has it ---- */

/*
 * Address of a 16-byte piece. Eight rows of one column are read at a time (ldmatrix); they must lie in eight different groups of
 * four banks. Rows of a multiple of 128 bytes all begin in bank 0, so pieces are permuted by the row; otherwise two rows
 * share 128 bytes, and half of that does.
 */
DEVICE uint32_t shared_at(uint32_t base, int row, int chunk) {
    int swizzle = CHUNKS % 8 == 0 ? row & 7 : row >> 1 & 3;
    return base + row * CHUNKS * 16 + ((chunk ^ swizzle) << 4);
}
/* The address of piece c + 2 * step of a row, from that of piece c, 0 or 1. Rows may be stepped over in eights by adding to it. */
DEVICE uint32_t shared_step(uint32_t piece, int step) {
    const int mixed = CHUNKS % 8 == 0 ? 7 : 3; /* bits of the piece's number that the swizzle changes */
    return (piece ^ ((2 * step & mixed) << 4)) + ((2 * step & ~mixed) << 4);
}

/* ---- where a block works ---- */

/*
 * In shared memory, where it takes no registers. What does not change from tile to tile is found once, so that a tile without a mask
 * has little to do besides its products; and what does is worked out by one warp for all, a tile ahead (note).
 */
typedef struct place {
    attn_seq s;
    attn_mask mask;
    int32_t h, h_end; /* query heads: one, or, of keys, their group */
    int32_t kv_head;
    int32_t own, count;        /* the first own key or row, and how many there are */
    int32_t first, last;       /* tiles of others that may be seen, before FlashMask */
    int32_t all_from, all_to;  /* those of which every pair is seen, before FlashMask */
    bool for_k;                /* SPLIT: d_k, else d_v */
    bool plain;                /* neither softcap, ALiBi, bias nor dropout */
    bool whole;                /* rows have DIM numbers and begin at multiples of 16 bytes */
    bool finds_turns;          /* PAIRED: with FlashMask blocks that take turns have to be looked for */
    int32_t before_to;         /* PAIRED: rows below it have a block before this one that adds to d_q ... */
    int32_t after_from;        /* ... and from here on one after it; without FlashMask */
    uint32_t tile;             /* PAIRED: number of the sequence's first tile of rows */
    int64_t stats, stats_step; /* BY_KEYS: where lse and delta of row 0 are, and from one head to the next */
    const uint8_t *others[2];  /* BY_KEYS: row 0 of head 0 of q and d_o; otherwise key 0 of k and v */
    attn_flash_range range;    /* BY_KEYS: FlashMask's, of the own keys */
} place;

/* A tile of the walk. */
typedef struct note {
    alignas(16) const uint8_t *one; /* where the others of the tile begin: the first tensor ... */
    const uint8_t *two;             /* ... and the second */
    int64_t stats;                  /* BY_KEYS: where their lse and delta are */
    float *sums;                    /* PAIRED: d_q in float */
    int32_t h, n;
    int32_t before, after; /* PAIRED: key tiles that add to d_q before and after this block; -1: none */
    uint32_t index;        /* PAIRED: of the tile in `turns` */
    int32_t stored;        /* PAIRED: rows of it in `sums` */
    bool partial;          /* is the mask to be looked at? */
    bool whole;            /* are there OTHERS rows of DIM numbers? */
    bool done;             /* there is none */
} note;

typedef struct notes {
    note tiles[4]; /* of the tile that is worked, the one before, and two after it */
    place at;
} notes;
static_assert(sizeof(notes) <= ATTN_BWD_NOTES, "the host has room for no more");

DEVICE notes &notes_of(uint32_t base) { return *(notes *)shared_pointer(base + AT_NOTES); }
DEVICE const place &place_of(uint32_t base) { return notes_of(base).at; }
/* Of the tile that comes after so many others. */
DEVICE note &note_of(uint32_t base, uint32_t count) { return notes_of(base).tiles[count % 4]; }

DEVICE int32_t heads_of(const attn_cuda_args &a) { return BY_KEYS ? a.p.heads_kv : a.p.heads_q; }
DEVICE int32_t group_of(const attn_cuda_args &a) { return a.p.heads_q / a.p.heads_kv; }

/* Of FlashMask, over the keys [j0, j0 + count), which begin and end with ranges. */
DEVICE attn_flash_range range_over(const attn_cuda_args &a, const place &at, int32_t j0, int32_t count) {
    attn_flash_range all = *flash_range(a, at.s.b, at.kv_head, j0 / ATTN_ANY_COLS);
    for (int32_t j = j0 + ATTN_ANY_COLS; j < attn__min32(j0 + count, at.s.sk); j += ATTN_ANY_COLS) {
        const attn_flash_range *one = flash_range(a, at.s.b, at.kv_head, j / ATTN_ANY_COLS);
        for (int v = 0; v < 4; v++) {
            all.min[v] = attn__min32(all.min[v], one->min[v]);
            all.max[v] = attn__max32(all.max[v], one->max[v]);
        }
    }
    return all;
}

/*
 * Work is ordered for the L2 cache: `group` heads at a time; among them what sees the most comes first: under a causal mask the first
 * keys, or the last rows. Returns false when there is nothing to do.
 */
DEVICE bool find_place(const attn_cuda_args &a, place &at) {
    const int64_t first = (blockIdx.y + (int64_t)blockIdx.z * gridDim.y) * a.group;
    const int64_t left = (int64_t)a.p.batch * heads_of(a) - first;
    if (left <= 0) return false;
    const uint32_t size = left < a.group ? (uint32_t)left : (uint32_t)a.group;
    const int32_t slot = (int32_t)(blockIdx.x / size), head = (int32_t)(first + blockIdx.x % size);
    if (slot >= a.slots) return false;
    at.for_k = SPLIT && slot % 2;
    if (SPLIT && !(at.for_k ? a.f.d_k.data : a.f.d_v.data)) return false;
    at.s = sequence(a, head / heads_of(a));
    at.kv_head = BY_KEYS ? head % heads_of(a) : head % heads_of(a) / group_of(a);
    at.h = BY_KEYS ? at.kv_head * group_of(a) : head % heads_of(a);
    at.h_end = at.h + (BY_KEYS ? group_of(a) : 1);
    at.own = (BY_KEYS ? slot / (SPLIT ? 2 : 1) : a.row_tiles - 1 - slot) * OWN;
    at.count = attn__min32(OWN, (BY_KEYS ? at.s.sk : at.s.sq) - at.own);
    if (at.count <= 0) return false;
    at.mask = attn__seq_mask(&a.p, &at.s);
    int32_t from, to, all_from, all_to;
    if (BY_KEYS) {
        attn__mask_cols(&at.mask, at.own, at.own + at.count, &from, &to);
        attn__mask_cols_all(&at.mask, at.own, at.own + OWN, &all_from, &all_to);
        if (at.count < OWN) all_to = 0;
    } else {
        attn__mask_rows(&at.mask, at.own, at.own + at.count, &from, &to);
        attn__mask_rows_all(&at.mask, at.own, at.own + at.count, &all_from, &all_to);
    }
    at.first = from / OTHERS;
    at.last = to > from ? (to - 1) / OTHERS : -1;
    at.all_from = (all_from + OTHERS - 1) / OTHERS;
    at.all_to = all_to / OTHERS;
    at.plain = !(a.p.flags & (ATTN_ALIBI | ATTN_BIAS)) && !(a.p.softcap > 0) && a.philox.threshold == 0;
    if (BY_KEYS && a.ranges) at.range = range_over(a, at, at.own, OWN);
    return true;
}

/* Where the walk over the others is: a tile of them, and, of keys, a head of their group. */
typedef struct walk {
    int32_t h, n;
    bool partial; /* is the mask to be looked at? */
    bool done;
} walk;

/*
 * Tiles are walked upwards, or, where blocks take turns (PAIRED), downwards: under a causal mask or a window the keys before have come
 * by the same rows earlier then, or at the same time, and not later.
 */
DEVICE int32_t first_tile(const place &at) { return PAIRED ? at.last : at.first; }
DEVICE walk next_tile(walk w) {
    w.n += PAIRED ? -1 : 1;
    return w;
}

/* The others of the next head, if there is one. */
DEVICE void next_head(const place &at, walk &w) {
    w.h++;
    w.n = first_tile(at);
    w.done = at.last < at.first || w.h >= at.h_end;
}
DEVICE bool is_past(const place &at, const walk &w) { return PAIRED ? w.n < at.first : w.n > at.last; }

/* The same with FlashMask, of which tiles may be skipped. */
static __device__ __noinline__ walk find_flash_tile(const attn_cuda_args &a, const place &at, walk w) {
    for (;; w = next_tile(w)) {
        if (is_past(at, w)) next_head(at, w);
        if (w.done) return w;
        const int32_t n0 = w.n * OTHERS;
        const int32_t i0 = BY_KEYS ? n0 : at.own, i1 = BY_KEYS ? attn__min32(n0 + OTHERS, at.s.sq) : at.own + at.count;
        const int32_t j0 = BY_KEYS ? at.own : n0, j1 = j0 + (BY_KEYS ? (int)OWN : (int)OTHERS);
        const attn_flash_range range = BY_KEYS ? at.range : range_over(a, at, n0, OTHERS);
        const int tile_class = attn__mask_tile(&at.mask, i0, i1, j0, j1, &range);
        w.partial = tile_class == ATTN_TILE_PARTIAL || (BY_KEYS && n0 + OTHERS > at.s.sq); /* K may hold infinities */
        if (tile_class != ATTN_TILE_SKIP) return w;
    }
}

/* The first tile from here on that is not skipped. */
DEVICE void find_tile(const attn_cuda_args &a, const place &at, walk &w) {
    if (a.ranges) {
        w = find_flash_tile(a, at, w);
    } else {
        if (is_past(at, w)) next_head(at, w);
        w.partial = w.n < at.all_from || w.n >= at.all_to;
    }
}

/* Own key or row of half `half` of 16-row tile mt; another one, of the sub-tile that begins with n0. */
DEVICE int32_t own_at(const place &at, int mt, int half) {
    return at.own + ((int32_t)(threadIdx.x >> 5) / (1 + PAIRED) * MT + mt) * 16 + half * 8 +
           (int32_t)(threadIdx.x >> 2 & 7);
}
DEVICE int32_t other_at(int32_t n0, int nt, int c) { return n0 + nt * 8 + (int32_t)(threadIdx.x & 3) * 2 + c; }
DEVICE int32_t row_at(int32_t own, int32_t other) { return BY_KEYS ? other : own; }
DEVICE int32_t key_at(int32_t own, int32_t other) { return BY_KEYS ? own : other; }

/* ---- tiles to shared memory ---- */

/* What is read: of rows q and d_o, of keys k and v. */
typedef struct source {
    const uint8_t *data;
    int64_t row, first; /* elements between rows; of row or key 0 */
    int32_t count, dim;
} source;

DEVICE source rows_of(const attn_cuda_args &a, const attn_tensor &t, const attn_seq &s, int32_t h, int32_t dim) {
    return {(const uint8_t *)t.data, t.stride[1], attn__q_offset(&a.p, &t, &s, 0, h), s.sq, dim};
}
DEVICE source keys_of(const attn_cuda_args &a, const attn_tensor &t, const attn_seq &s, int32_t kv_head, int32_t dim) {
    return {(const uint8_t *)t.data, t.stride[1], attn__kv_offset(&a.p, &a.f, &t, &s, s.leftpad, kv_head), s.sk, dim};
}

/* One piece of a row that begins at any address. */
static __device__ __noinline__ uint4 gather(const uint8_t *from, int32_t count) {
    uint32_t word[4] = {0, 0, 0, 0};
    for (int x = 0; x < count; x++) word[x / 2] |= (uint32_t)((const uint16_t *)from)[x] << (x % 2 * 16);
    return make_uint4(word[0], word[1], word[2], word[3]);
}

/*
 * Who fetches. PAIRED: the first two warps look after turns, which takes them as long, and the last one makes notes; so the four after the
 * first two fetch tiles, and the next one lse and delta. A thread has every LANES-th piece of its rows, so that there is next to nothing to work
 * out for each.
 */
enum {
    LANES = CHUNKS % 8 == 0 ? 8 : 4,
    FETCHERS = PAIRED ? 128 : (int)THREADS,
    FETCHER = PAIRED ? 64 : 0, /* the first */
    AT_ONCE = FETCHERS / LANES,
    STATS_FETCHERS = PAIRED ? 32 : (int)THREADS,
    STATS_FETCHER = PAIRED ? FETCHER + FETCHERS : 0
};
static_assert(OTHERS % AT_ONCE == 0 && OWN % AT_ONCE == 0 && CHUNKS % LANES == 0 && AT_ONCE % 8 == 0, "want other tiles");

/* A tile of so many rows, which are all there and have DIM numbers. */
DEVICE void load_whole(const uint8_t *first, int64_t row_bytes, uint32_t to, int rows) {
    const uint32_t thread = (uint32_t)thread_here() - FETCHER, row = thread / LANES, c = thread % LANES;
    if (PAIRED && thread >= FETCHERS) return;
    const uint8_t *from = first + row * row_bytes + c * 16;
    const uint32_t piece = shared_at(to, (int)row, (int)c);
#pragma unroll
    for (int r = 0; r < rows; r += AT_ONCE) {
#pragma unroll
        for (int x = 0; x < CHUNKS; x += LANES) cp_async_cg(piece + r * CHUNKS * 16 + x * 16, from + x * 16);
        from += AT_ONCE * row_bytes;
    }
}

/* Any tile, of so many rows; `count` of them are there, and the others become zeros, as does what is past the dim. */
DEVICE void load_any(const attn_cuda_args &a, const uint8_t *first, int64_t row_bytes, int32_t count, int32_t dim,
                     uint32_t to, int rows) {
    const int row = (int)threadIdx.x / LANES, c = (int)threadIdx.x % LANES;
#pragma unroll 1
    for (int r = row; r < rows; r += THREADS / LANES)
#pragma unroll 1
        for (int x = c; x < CHUNKS; x += LANES) {
            const int numbers = r < count ? attn__min32(attn__max32(dim - x * 8, 0), 8) : 0;
            const uint8_t *from = first + r * row_bytes + x * 16;
            if (a.vector_ok && numbers)
                cp_async_cg_zfill(shared_at(to, r, x), from, numbers * 2);
            else
                st_shared_v4(shared_at(to, r, x), numbers ? gather(from, numbers) : make_uint4(0, 0, 0, 0));
        }
}
/* Own ones. */
DEVICE void load_from(const attn_cuda_args &a, const place &at, const source &from, uint32_t to) {
    const uint8_t *first = from.data + (from.first + at.own * from.row) * 2;
    if (at.whole && at.count == OWN)
        load_whole(first, from.row * 2, to, OWN);
    else
        load_any(a, first, from.row * 2, at.count, from.dim, to, OWN);
}

/* The others of a tile: q and d_o, or k and v. d_v alone does without the second product, but not without d_o. */
static __device__ __noinline__ void load_any_others(const attn_cuda_args &a, const place &at, const note &x, uint32_t to) {
    const attn_tensor &one = BY_KEYS ? a.f.q : a.f.k, &two = BY_KEYS ? a.f.d_o : a.f.v;
    const int32_t count = (BY_KEYS ? at.s.sq : at.s.sk) - x.n * OTHERS;
    load_any(a, x.one, one.stride[1] * 2, count, a.p.dim_qk, to, OTHERS);
    load_any(a, x.two, two.stride[1] * 2, count, a.p.dim_v, to + TILE_BYTES, OTHERS);
}
DEVICE void load_others(const attn_cuda_args &a, const place &at, const note &x, uint32_t to) {
    if (!x.whole) return load_any_others(a, at, x, to);
    const attn_tensor &one = BY_KEYS ? a.f.q : a.f.k, &two = BY_KEYS ? a.f.d_o : a.f.v;
    load_whole(x.one, one.stride[1] * 2, to, OTHERS);
    load_whole(x.two, two.stride[1] * 2, to + TILE_BYTES, OTHERS);
}
DEVICE void load_own(const attn_cuda_args &a, const place &at, uint32_t to) {
    const source one =
        BY_KEYS ? keys_of(a, a.f.k, at.s, at.kv_head, a.p.dim_qk) : rows_of(a, a.f.q, at.s, at.h, a.p.dim_qk);
    const source two =
        BY_KEYS ? keys_of(a, a.f.v, at.s, at.kv_head, a.p.dim_v) : rows_of(a, a.f.d_o, at.s, at.h, a.p.dim_v);
    load_from(a, at, one, to);
    load_from(a, at, two, to + OWN_BYTES);
}

/* What find_place leaves open: where the others are. */
DEVICE void find_others(const attn_cuda_args &a, place &at) {
    const source one = BY_KEYS ? rows_of(a, a.f.q, at.s, 0, a.p.dim_qk) : keys_of(a, a.f.k, at.s, at.kv_head, a.p.dim_qk);
    const source two = BY_KEYS ? rows_of(a, a.f.d_o, at.s, 0, a.p.dim_v) : keys_of(a, a.f.v, at.s, at.kv_head, a.p.dim_v);
    at.whole = a.vector_ok && a.p.dim_qk == DIM && a.p.dim_v == DIM;
    at.others[0] = one.data + one.first * 2;
    at.others[1] = two.data + two.first * 2;
    at.stats = attn__lse_index(&a.p, &at.s, 0, 0);
    at.stats_step = attn__lse_index(&a.p, &at.s, 0, 1) - at.stats;
}

/* The last warp has the least to do besides, and makes the notes. */
DEVICE bool makes_notes(void) { return threadIdx.x >= THREADS - 32; }

/* What there is to know of a tile, besides turns. */
DEVICE void write_note(const attn_cuda_args &a, const place &at, const walk &w, note &to) {
    const attn_tensor &one = BY_KEYS ? a.f.q : a.f.k, &two = BY_KEYS ? a.f.d_o : a.f.v;
    const int64_t n0 = w.n * OTHERS;
    to.h = w.h;
    to.n = w.n;
    to.partial = w.partial;
    to.done = w.done;
    to.whole = at.whole && n0 + OTHERS <= (BY_KEYS ? at.s.sq : at.s.sk);
    to.one = at.others[0] + (n0 * one.stride[1] + (BY_KEYS ? w.h * one.stride[2] : 0)) * 2;
    to.two = at.others[1] + (n0 * two.stride[1] + (BY_KEYS ? w.h * two.stride[2] : 0)) * 2;
    to.stats = at.stats + w.h * at.stats_step + n0;
}

/* ---- lse and delta ---- */

typedef struct stats {
    float lse, delta;
} stats;

/* Zeros past the end: there q and d_o are zeros too, and nothing comes of it. */
DEVICE stats row_stats(const attn_cuda_args &a, const place &at, int32_t h, int32_t i) {
    if (i >= at.s.sq) return {0, 0};
    const int64_t row = attn__lse_index(&a.p, &at.s, i, h);
    return {((const float *)a.f.lse)[row], ((const float *)a.delta)[row]};
}

/* A row without keys has p = 0. */
DEVICE float safe_lse(float lse) { return lse == -INFINITY ? INFINITY : lse; }

/*
 * BY_KEYS: are there rows in the tile that have no keys? Whatever their q and d_o hold, zeros take their place, or 0 * NaN would reach
 * keys; and weigh_plain has to know of them. Rare. All warps see the same.
 */
static __device__ __noinline__ void clear_rows_of(uint32_t tile, uint32_t of_stats) {
#pragma unroll 1
    for (int n = threadIdx.x; n < OTHERS * CHUNKS; n += THREADS) {
        if (__uint_as_float(ld_shared_b32(of_stats + n / CHUNKS * 8)) != -INFINITY) continue;
        st_shared_v4(tile + n * 16, make_uint4(0, 0, 0, 0));
        st_shared_v4(tile + TILE_BYTES + n * 16, make_uint4(0, 0, 0, 0));
    }
    __syncthreads();
}
DEVICE bool clear_empty_rows(uint32_t tile, uint32_t of_stats) {
    bool any = false;
#pragma unroll
    for (int n = 0; n < OTHERS; n += 32)
        any |= __uint_as_float(ld_shared_b32(of_stats + (n + (threadIdx.x & 31)) * 8)) == -INFINITY;
    if (!__any_sync(~0u, any)) return false;
    clear_rows_of(tile, of_stats);
    return true;
}

/* BY_KEYS: lse and delta of a tile's rows, on their way to shared memory. */
DEVICE void fetch_stats(const attn_cuda_args &a, const place &at, const note &x, uint32_t to) {
    const int32_t thread = thread_here() - STATS_FETCHER;
    if ((uint32_t)thread >= STATS_FETCHERS) return;
#pragma unroll
    for (int r = 0; r < OTHERS; r += STATS_FETCHERS) {
        const int32_t row = r + thread, bytes = x.n * OTHERS + row < at.s.sq ? 4 : 0;
        if (STATS_FETCHERS > OTHERS && row >= OTHERS) continue;
        cp_async_ca_4_zfill(to + row * 8, (const float *)a.f.lse + x.stats + row, bytes);
        cp_async_ca_4_zfill(to + row * 8 + 4, (const float *)a.delta + x.stats + row, bytes);
    }
}

/* Q and d_o, or K and V, of a tile, and lse and delta. */
DEVICE void fetch(const attn_cuda_args &a, uint32_t base, uint32_t count) {
    const note &x = note_of(base, count);
    if (x.done) return;
    load_others(a, place_of(base), x, base + AT_TILES + count % STAGES * STAGE_BYTES);
    if (BY_KEYS) fetch_stats(a, place_of(base), x, base + AT_STATS + count % STATS_STAGES * STATS_BYTES);
}

/* ---- which pairs count ---- */

/* Others that this own one may see before FlashMask. */
DEVICE void others_of(const place &at, int32_t own, int32_t *first, int32_t *end) {
    if (BY_KEYS)
        attn__mask_cols(&at.mask, own, own + 1, first, end);
    else
        attn__mask_row(&at.mask, own, first, end);
    *end = attn__min32(*end, BY_KEYS ? at.s.sq : at.s.sk);
    if (own >= at.own + at.count) *end = *first;
}

DEVICE attn_flash flash_of(const attn_cuda_args &a, const place &at, int32_t j) {
    return attn__flash_load(&at.mask, attn__flash_at(&a.p, &a.f, at.s.b, at.kv_head, attn__min32(j, at.s.sk - 1)));
}

/* FlashMask: of these pairs those that it leaves. */
static __device__ __noinline__ uint32_t flash_seen(const attn_cuda_args &a, const place &at, int32_t n0, uint32_t seen) {
#pragma unroll 1
    for (int x = 0; x < ELEMENTS; x++) {
        const int32_t own = own_at(at, x / (NT * 4), x >> 1 & 1), other = other_at(n0, x / 4 % NT, x & 1);
        if (!(seen >> x & 1)) continue;
        if (attn__flash_masked(flash_of(a, at, key_at(own, other)), row_at(own, other))) seen &= ~(1u << x);
    }
    return seen;
}

/* A bit for each element of the sub-tile from n0 on: is the pair allowed? */
DEVICE uint32_t seen_pairs(const attn_cuda_args &a, const place &at, int32_t n0) {
    uint32_t seen = 0;
#pragma unroll
    for (int mt = 0; mt < MT; mt++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int32_t first, end;
            others_of(at, own_at(at, mt, half), &first, &end);
            const uint32_t from = (uint32_t)(other_at(n0, 0, 0) - first), count = (uint32_t)attn__max32(end - first, 0);
#pragma unroll
            for (int nt = 0; nt < NT; nt++)
#pragma unroll
                for (int c = 0; c < 2; c++) /* first <= other < end in one comparison */
                    if (from + (nt * 8 + c) < count) seen |= 1u << NUMBER(mt, nt, 2 * half + c);
        }
    if (!a.ranges) return seen;
    return flash_seen(a, at, n0, seen);
}

/*
 * Dropout: a bit for each element that is kept. One call of the generator serves eight neighbouring keys of a row. These are the own
 * keys of eight lanes (BY_KEYS), or those of one 8-column tile, which a quad shares. So each lane makes one call in eight, or in four, eight bits
 * of each, and they exchange them.
 */
DEVICE uint32_t kept_pairs(const attn_cuda_args &a, const place &at, int32_t h, int32_t n0) {
    enum { CALLS = BY_KEYS ? MT * 2 * NT * 2 : MT * 2 * NT, SHARE = BY_KEYS ? 8 : 4, BYTES = (CALLS + SHARE - 1) / SHARE };
    static_assert(BYTES <= 4, "a word has room for them");
    const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3, mine = BY_KEYS ? g : t;
    const uint32_t head = (uint32_t)at.s.b * (uint32_t)a.p.heads_q + (uint32_t)h;
    uint32_t bytes = 0, kept = 0;
#pragma unroll 1
    for (int n = 0; n < BYTES; n++) {
        const int call = n * SHARE + mine, each = BY_KEYS ? NT * 2 : (int)NT; /* calls of one half of 16 own ones */
        const int32_t own = own_at(at, call / each / 2, call / each % 2);
        const int32_t other = BY_KEYS ? other_at(n0, call % each / 2, call % 2) : n0 + call % each * 8;
        uint32_t words[4];
        attn__philox4(&a.philox, head, (uint32_t)row_at(own, other), (uint32_t)key_at(own, other) / ATTN_PHILOX_KEYS,
                      words);
#pragma unroll
        for (int key = 0; key < 8; key++)
            if (!attn__drops(&a.philox, words, (uint32_t)key)) bytes |= 1u << (n * 8 + key);
    }
#pragma unroll
    for (int from = 0; from < SHARE; from++) {
        const uint32_t theirs = __shfl_sync(~0u, bytes, BY_KEYS ? from * 4 + t : g * 4 + from);
        EACH(mt, nt, e) {
            const int call = BY_KEYS ? (mt * 2 + (e >> 1)) * NT * 2 + nt * 2 + (e & 1) : (mt * 2 + (e >> 1)) * NT + nt;
            const int key = BY_KEYS ? g : 2 * t + (e & 1);
            if (call % SHARE == from && (theirs >> (call / SHARE * 8 + key) & 1)) kept |= 1u << NUMBER(mt, nt, e);
        }
    }
    return kept;
}

/* ---- from products to weights ---- */

/* What is to be done with the pairs of a sub-tile, besides. */
typedef struct pairs {
    uint32_t seen, kept; /* bits */
    float keep;          /* 1 / (1 - dropout) */
} pairs;

/* Where the bias of the thread's own ones begins, with the first of the others from n0 on. */
typedef struct bias_rows {
    const uint8_t *row[MT][2];
    int64_t along; /* numbers between others */
} bias_rows;
DEVICE bias_rows find_bias(const attn_cuda_args &a, const place &at, int32_t h, int32_t n0) {
    const attn_matrix &m = a.f.bias;
    const int64_t of_own = m.stride[BY_KEYS ? 3 : 2];
    const int bytes = a.p.bias_dtype == ATTN_F64 ? 8 : a.p.bias_dtype == ATTN_F32 ? 4 : 2;
    bias_rows x;
    x.along = m.stride[BY_KEYS ? 2 : 3];
    const int64_t first = attn__matrix_at(&m, at.s.b, h, 0, 0) + other_at(n0, 0, 0) * x.along;
#pragma unroll
    for (int r = 0; r < 2 * MT; r++)
        x.row[r / 2][r % 2] = (const uint8_t *)m.data + (first + own_at(at, r / 2, r % 2) * of_own) * bytes;
    return x;
}

/* The bias of 8-column tile nt, of the pairs that are seen; of others nothing is read. The dtype is one for all: this branches once. */
#define EACH_OF(mt, e) _Pragma("unroll") for (int mt = 0; mt < MT; mt++) _Pragma("unroll") for (int e = 0; e < 4; e++)
DEVICE void load_bias(const attn_cuda_args &a, const bias_rows &x, float bias[MT][4], uint32_t seen, int nt) {
    EACH_OF(mt, e) bias[mt][e] = 0;
    if (a.p.bias_dtype == ATTN_F32) {
        EACH_OF(mt, e)
        if (seen >> NUMBER(mt, nt, e) & 1) bias[mt][e] = ((const float *)x.row[mt][e >> 1])[(nt * 8 + (e & 1)) * x.along];
    } else if (a.p.bias_dtype == ATTN_F64) {
        EACH_OF(mt, e)
        if (seen >> NUMBER(mt, nt, e) & 1)
            bias[mt][e] = (float)((const double *)x.row[mt][e >> 1])[(nt * 8 + (e & 1)) * x.along];
    } else {
        EACH_OF(mt, e) if (seen >> NUMBER(mt, nt, e) & 1) {
            const uint16_t number = ((const uint16_t *)x.row[mt][e >> 1])[(nt * 8 + (e & 1)) * x.along];
            bias[mt][e] = a.p.bias_dtype == ATTN_BF16 ? attn__from_bf16(number) : cvt_f32_f16(number);
        }
    }
}

/* BY_KEYS: of the two rows of 8 that this thread has. */
DEVICE void load_stats(stats of_tile[2], uint32_t of_stats, int nt) {
    const uint4 two = ld_shared_v4(of_stats + (nt * 8 + (threadIdx.x & 3) * 2) * 8);
    of_tile[0] = {__uint_as_float(two.x), __uint_as_float(two.y)};
    of_tile[1] = {__uint_as_float(two.z), __uint_as_float(two.w)};
}
DEVICE void load_safe_stats(stats of_tile[2], uint32_t of_stats, int nt) {
    load_stats(of_tile, of_stats, nt);
    of_tile[0].lse = safe_lse(of_tile[0].lse);
    of_tile[1].lse = safe_lse(of_tile[1].lse);
}

/* Lse and delta of the rows of this thread's elements: of the others, or its own. */
#define STATS_OF(nt, e, tile_stats, own_stats, mt) (BY_KEYS ? (tile_stats)[(e)&1] : (own_stats)[mt][(e) >> 1])

/*
 * s: products of q and k, becomes p, what is dropped left out; d: of d_o and v, becomes d_s. In base 2: exp2(scale * s - lse).
 * of_stats: BY_KEYS, where those of the sub-tile's rows are; own_stats: otherwise.
 */
DEVICE void weigh_plain(const attn_cuda_args &a, float s[MT][NT][4], float d[MT][NT][4], const pairs &x, bool all,
                        uint32_t of_stats, const stats (*own_stats)[2]) {
    const float scale = a.scale_log2, log2e = (float)ATTN_LOG2E;
#pragma unroll
    for (int nt = 0; nt < NT; nt++) {
        stats of_tile[2] = {};
        if (BY_KEYS && all) load_stats(of_tile, of_stats, nt); /* no row without keys */
        if (BY_KEYS && !all) load_safe_stats(of_tile, of_stats, nt);
#pragma unroll
        for (int mt = 0; mt < MT; mt++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const stats row = STATS_OF(nt, e, of_tile, own_stats, mt);
                float p = ex2_approx(__fmaf_rn(s[mt][nt][e], scale, -__fmul_rn(row.lse, log2e)));
                if (all) {
                    s[mt][nt][e] = p;
                    d[mt][nt][e] = p * (d[mt][nt][e] - row.delta);
                } else {
                    const int bit = NUMBER(mt, nt, e);
                    const bool seen = (x.seen >> bit & 1) && row.lse != INFINITY, kept = x.kept >> bit & 1;
                    const float d_s = p * ((kept ? x.keep * d[mt][nt][e] : 0) - row.delta);
                    d[mt][nt][e] = seen ? d_s : 0;
                    s[mt][nt][e] = seen && kept ? p : 0;
                }
            }
    }
}

/* The same with softcap, ALiBi or bias, which score() of score.cuh defines: of all elements, in base e. with_bias: a constant. */
DEVICE void weigh_scored(const attn_cuda_args &a, const place &at, int32_t h, float s[MT][NT][4], float d[MT][NT][4],
                         const pairs &x, bool with_bias, int32_t n0, uint32_t of_stats, const stats (*own_stats)[2]) {
    const float scale = (float)a.p.scale, cap = (float)a.p.softcap, by_cap = cap > 0 ? 1 / cap : 0;
    const float slope_h = a.p.flags & ATTN_ALIBI ? a.f.alibi[at.s.b * a.f.alibi_stride + h] : 0;
    const int32_t offset = at.s.sk - at.s.sq; /* distances are whole numbers: below 2^24 exact in float */
    bias_rows biases;
    if (with_bias) biases = find_bias(a, at, h, n0);
#pragma unroll
    for (int nt = 0; nt < NT; nt++) {
        stats of_tile[2] = {};
        if (BY_KEYS) load_safe_stats(of_tile, of_stats, nt);
        float bias[MT][4];
        if (with_bias) load_bias(a, biases, bias, x.seen, nt);
#pragma unroll
        for (int mt = 0; mt < MT; mt++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const stats row = STATS_OF(nt, e, of_tile, own_stats, mt);
                const int32_t own = own_at(at, mt, e >> 1), other = other_at(n0, nt, e & 1);
                const float distance = (float)(row_at(own, other) + offset - key_at(own, other));
                float y = __fmul_rn(s[mt][nt][e], scale), slope = 1;
                if (cap > 0) {
                    const float part = tanhf(__fmul_rn(y, by_cap));
                    y = cap * part;
                    slope = 1 - part * part;
                }
                y = fmaf(-slope_h, fabsf(distance), y);
                if (with_bias) y += bias[mt][e];
                const float p = ex2_approx(__fmul_rn(y - row.lse, (float)ATTN_LOG2E));
                const int bit = NUMBER(mt, nt, e);
                const bool seen = (x.seen >> bit & 1) && row.lse != INFINITY, kept = x.kept >> bit & 1;
                const float d_s = p * ((kept ? x.keep * d[mt][nt][e] : 0) - row.delta) * slope;
                d[mt][nt][e] = seen ? d_s : 0;
                s[mt][nt][e] = seen && kept ? p : 0;
            }
    }
}

DEVICE void weigh(const attn_cuda_args &a, const place &at, int32_t h, float s[MT][NT][4], float d[MT][NT][4], bool partial,
                  int32_t n0, uint32_t of_stats, const stats (*own_stats)[2]) {
    pairs x = {~0u, ~0u, 1};
    if (at.plain && !partial) return weigh_plain(a, s, d, x, true, of_stats, own_stats);
    const bool has_bias = a.p.flags & ATTN_BIAS; /* which is not read for own rows that are not there */
    if (partial || (has_bias && at.count < OWN)) x.seen = seen_pairs(a, at, n0);
    if (a.philox.threshold > 0) {
        x.kept = kept_pairs(a, at, h, n0);
        x.keep = (float)(1 / (1 - a.p.dropout));
    }
    if (has_bias)
        weigh_scored(a, at, h, s, d, x, true, n0, of_stats, own_stats);
    else if ((a.p.flags & ATTN_ALIBI) || a.p.softcap > 0)
        weigh_scored(a, at, h, s, d, x, false, n0, of_stats, own_stats);
    else
        weigh_plain(a, s, d, x, false, of_stats, own_stats);
}

/* ---- float16: numbers that are small ---- */

/*
 * P and d_s are rounded to the tile's dtype, and most of them are far below 1: in float16 they would vanish. P, at most 1, is
 * multiplied by a constant. d_s can be of any size, so each own key or row has a factor, a power of two, under which its largest one so far
 * is about 2^13; when a larger one comes, the factor and the sums follow. That is rare, as a maximum in a softmax.
 */
enum { FITS = !BF16 };
#define P_FACTOR (FITS ? 4096.0f : 1.0f)

DEVICE float first_factor(void) { return FITS ? 0x1p100f : 1.0f; }

/* 2^13 divided by a number, as a power of two. */
DEVICE float factor_for(float most) {
    const int32_t e = attn__min32(attn__max32((int32_t)(__float_as_uint(most) >> 23 & 255) - 127, -86), 120);
    return __uint_as_float((uint32_t)(127 + 13 - e) << 23);
}

DEVICE void fit(float w[MT][NT][4], float sums[MT][DT][4], float factor[MT][2]) {
    float most[MT][2];
    bool over = false;
#pragma unroll
    for (int r = 0; r < 2 * MT; r++) {
        float x = 0;
#pragma unroll
        for (int nt = 0; nt < NT; nt++)
            x = fmaxf(x, fmaxf(fabsf(w[r / 2][nt][r % 2 * 2]), fabsf(w[r / 2][nt][r % 2 * 2 + 1])));
        most[r / 2][r % 2] = x;
        over |= __fmul_rn(x, factor[r / 2][r % 2]) > 16384.0f;
    }
    if (__any_sync(~0u, over)) {
#pragma unroll
        for (int r = 0; r < 2 * MT; r++) {
            float x = most[r / 2][r % 2], before = factor[r / 2][r % 2];
            x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
            x = fmaxf(x, __shfl_xor_sync(~0u, x, 2));
            if (!(__fmul_rn(x, before) > 16384.0f)) continue;
            factor[r / 2][r % 2] = factor_for(x);
            const float ratio = factor[r / 2][r % 2] / before;
#pragma unroll
            for (int n = 0; n < 2 * DT; n++) sums[r / 2][n / 2][r % 2 * 2 + n % 2] *= ratio;
        }
    }
    EACH(mt, nt, e) w[mt][nt][e] *= factor[mt][e >> 1];
}

/* ---- infinities and NaN, where some pairs are masked ---- */

/* In one word of a tile: bit 0 for its low half, bit 1 for its high half. */
DEVICE int nonfinite_word(uint32_t x) {
    const uint32_t ones = BF16 ? 0x7f80 : 0x7c00;
    return ((x & ones) == ones) | ((x >> 16 & ones) == ones) << 1;
}

/* Does any thread see one in the tile? Of keys only the first tensor is summed up. A barrier of the whole block. */
static __device__ __noinline__ bool holds_nonfinite(uint32_t tile) {
    uint32_t most = 0;
#pragma unroll 4
    for (int n = threadIdx.x; n < OTHERS * CHUNKS * (BY_KEYS ? 2 : 1); n += THREADS) {
        const uint4 x = ld_shared_v4(tile + n * 16);
        most = __vmaxu2(__vmaxu2(most, x.x & 0x7fff7fff), x.y & 0x7fff7fff);
        most = __vmaxu2(__vmaxu2(most, x.z & 0x7fff7fff), x.w & 0x7fff7fff);
    }
    return __syncthreads_or(nonfinite_word(most));
}

/* Of the sub-tile that begins with row `first` of a tensor's tile: adds what is not finite, times its weight, to the sums of those that see it. */
static __device__ __noinline__ void add_nonfinite(float *sums, const float *weights, uint32_t tile, int first) {
    const int lane = threadIdx.x & 31, t = lane & 3;
#pragma unroll 1
    for (int n = 0; n < SUB; n++) {
        const int from = (lane & ~3) + n % 8 / 2;
        float weight[MT * 2];
        for (int r = 0; r < MT * 2; r++)
            weight[r] = __shfl_sync(~0u, weights[NUMBER(r / 2, n / 8, r % 2 * 2 + n % 2)], from);
            /* the number that the source gives is of its own n: all lanes ask for the same one */
#pragma unroll 1
        for (int dt = 0; dt < DT; dt++) {
            const uint32_t word = ld_shared_b32(shared_at(tile, first + n, dt) + t * 4);
            const int which = nonfinite_word(word);
            for (int c = 0; c < 2; c++) {
                if (!(which >> c & 1)) continue;
                const uint16_t half = (uint16_t)(word >> 16 * c);
                const float number = BF16 ? attn__from_bf16(half) : cvt_f32_f16(half);
                for (int r = 0; r < MT * 2; r++)
                    if (weight[r] != 0) sums[(r / 2 * DT + dt) * 4 + r % 2 * 2 + c] += weight[r] * number;
            }
        }
    }
}

/* What is not finite in the sub-tile of a tensor becomes zero, for the products. */
DEVICE void clear_nonfinite(uint32_t tile, int first) {
    for (int n = threadIdx.x; n < SUB * CHUNKS * 4; n += THREADS) {
        const uint32_t at = tile + first * CHUNKS * 16 + n * 4, word = ld_shared_b32(at);
        const int which = nonfinite_word(word);
        if (which) st_shared_b32(at, word & ((which & 1 ? 0 : 0xffffu) | (which & 2 ? 0 : 0xffff0000u)));
    }
}

/* Sums by memory, so that the function above can stand by itself. */
DEVICE void add_bad(float sums[MT][DT][4], const float w[MT][NT][4], uint32_t tile, int first) {
    float copy[MT * DT * 4], weights[ELEMENTS];
#pragma unroll
    for (int n = 0; n < MT * DT * 4; n++) copy[n] = sums[n / (DT * 4)][n / 4 % DT][n % 4];
    EACH(mt, nt, e) weights[NUMBER(mt, nt, e)] = w[mt][nt][e];
    add_nonfinite(copy, weights, tile, first);
#pragma unroll
    for (int n = 0; n < MT * DT * 4; n++) sums[n / (DT * 4)][n / 4 % DT][n % 4] = copy[n];
}

/* ---- products ---- */

/* c0, c1 += a b for the two 8-column tiles of a fragment b of 16 columns. */
DEVICE void multiply(float c0[4], float c1[4], const uint32_t a[4], const uint32_t b[4]) {
    if (BF16) {
        mma_m16n8k16_bf16(c0, a, b[0], b[1]);
        mma_m16n8k16_bf16(c1, a, b[2], b[3]);
    } else {
        mma_m16n8k16_f16(c0, a, b[0], b[1]);
        mma_m16n8k16_f16(c1, a, b[2], b[3]);
    }
}

/* Where a warp's left and right operands of the product below begin: its own rows of a tile, and of another those from `first` on. */
DEVICE uint32_t left_of(uint32_t own) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    return shared_at(own, warp / (1 + PAIRED) * MT * 16 + (lane & 15), lane >> 4);
}
DEVICE uint32_t right_of(uint32_t others, int first) {
    const int lane = threadIdx.x & 31;
    return shared_at(others, first + (lane & 7) + (lane >> 4) * 8, lane >> 3 & 1);
}

/* c = own . others, of the warp's own rows and SUB rows of the others: those of the tensors so many bytes behind left and right. */
DEVICE void product(float c[MT][NT][4], uint32_t left, uint32_t right, int left_bytes, int right_bytes) {
    EACH(mt, nt, e) c[mt][nt][e] = 0;
#pragma unroll
    for (int step = 0; step < DIM / 16; step++) {
        uint32_t x[MT][4], y[4];
#pragma unroll
        for (int mt = 0; mt < MT; mt++) ldmatrix_x4(x[mt], shared_step(left, step) + left_bytes + mt * 16 * CHUNKS * 16);
#pragma unroll
        for (int n = 0; n < NT / 2; n++) {
            ldmatrix_x4(y, shared_step(right, step) + right_bytes + n * 16 * CHUNKS * 16);
#pragma unroll
            for (int mt = 0; mt < MT; mt++) multiply(c[mt][2 * n], c[mt][2 * n + 1], x[mt], y);
        }
    }
}

/* ---- sums to memory ---- */

/* Columns `column` and the next, as far as there are such. */
DEVICE void store_pair(void *data, int64_t row, int column, int32_t dim, float low, float high) {
    uint16_t *const to = (uint16_t *)data + row + column;
    const uint32_t two = pack(low, high);
    if (column + 1 < dim && ((uint64_t)data + row * 2) % 4 == 0) {
        *(uint32_t *)to = two;
    } else {
        if (column < dim) to[0] = (uint16_t)two;
        if (column + 1 < dim) to[1] = (uint16_t)(two >> 16);
    }
}

/* Divided by `factors`, times `scale`; rows of which `empty` says so have zeros. */
DEVICE void store_sums(const attn_cuda_args &a, const place &at, const attn_tensor &to, float sums[MT][DT][4], int32_t dim,
                       float scale, const float (*factors)[2], const bool (*empty)[2]) {
    if (!to.data) return;
#pragma unroll
    for (int mt = 0; mt < MT; mt++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int32_t own = own_at(at, mt, half);
            if (own >= at.own + at.count) continue;
            const int64_t row = BY_KEYS ? attn__kv_offset(&a.p, &a.f, &to, &at.s, at.s.leftpad + own, at.kv_head)
                                        : attn__q_offset(&a.p, &to, &at.s, own, at.h);
            const bool zero = !BY_KEYS && empty[mt][half];
            const float factor = 1 / factors[mt][half];
#pragma unroll
            for (int dt = 0; dt < DT; dt++) {
                const int column = dt * 8 + (threadIdx.x & 3) * 2;
                const float low = zero ? 0 : sums[mt][dt][2 * half] * factor * scale;
                const float high = zero ? 0 : sums[mt][dt][2 * half + 1] * factor * scale;
                store_pair(to.data, row, column, dim, low, high);
            }
        }
}

#endif
