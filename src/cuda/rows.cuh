/*
 * What forward kernels share: where they work, what is done to scores, the formulas of the softmax, how results get out. A thread
 * has of S and O the elements that the tensor cores leave it: lane = 4 g + t of 16 rows the rows g, g + 8, of every 8 columns
 * 2t, 2t + 1.
 *
 * The kernel's file says before this one: DTYPE, DV, SLICED (V may be wider, and blocks then share it), BM, BN (tile), ALL, THREADS (that work on rows; warp w has the rows from
 * MT * 16 * w on), MT, NT, DT, PV_STEPS, EB, PER_CHUNK, HAS_ROOM.
 */
#ifndef ATTN_ROWS_CUH
#define ATTN_ROWS_CUH

#define HUGE_SCORE 4194304.0f /* 2^22: from here on the rounding of a score is no longer small */
enum {
    WIDE = DTYPE == ATTN_F32,
    BF16 = DTYPE == ATTN_BF16,
    CLIPS = ATTN_CUDA_CHUNK % BN != 0 /* a tile of keys may reach into the next chunk */
};

DEVICE uint32_t pack(float low, float high) { return BF16 ? cvt_rn_bf16x2(low, high) : cvt_rn_f16x2(low, high); }

/* ---- where a block works ---- */

typedef struct tile_place {
    attn_seq s;
    attn_mask mask;
    int32_t h, kv_head;
    int32_t row, rows;        /* query rows of the block; rows counts those below sq */
    int32_t n_first, n_last;  /* tiles of keys that may be visible */
    int32_t all_from, all_to; /* keys that every row sees, FlashMask aside */
    const uint8_t *k, *v;     /* portable kernels, rows at a fixed distance: where key 0 is */
    int32_t chunk;            /* split: which chunk of keys */
    int32_t from, to;         /* CLIPS: keys that count */
    int32_t pad_from, pad_to; /* rows that are padding, for whoever finds the place to fill: even one with nothing to do */
    int32_t dv0;              /* first dim of V that the block computes */
    bool split;
    bool gathers;    /* Hopper: the accelerator does not know the way to K and V */
    int8_t step;     /* STEP_...: what tiles without a mask need */
    int8_t bias;     /* BIAS_... */
    float cap, to_y; /* softcap; the factor of a product on its way to y of cap_scores */
    float slope;     /* of ALiBi; divided by the scale of scores where that is to come */
    float scale;     /* to base 2, descales included, positive: the factor of a score on its way into exp2 */
    float raw;       /* the factor of a product, applied before that, where `scale` cannot do: see find_features */
    float least;     /* below every score; finite, and so is its product with scale */
    float o_factor;  /* of O at the end: v_descale, dropout */
} tile_place;

/* All elements of S that a thread has. */
#define EACH_SCORE(mt, nt, e)                                                                                              \
    _Pragma("unroll") for (int mt = 0; mt < MT; mt++) _Pragma("unroll") for (int nt = 0; nt < NT; nt++)                    \
        _Pragma("unroll") for (int e = 0; e < 4; e++)

/* Row and key of element e of accumulator [mt][nt], in tile n of keys. */
DEVICE int32_t row_of(const tile_place &at, int mt, int half) {
    return at.row + ((threadIdx.x >> 5) * MT + mt) * 16 + half * 8 + (threadIdx.x >> 2 & 7);
}
DEVICE int32_t key_of(int32_t n, int nt, int e) { return n * BN + nt * 8 + (threadIdx.x & 3) * 2 + (e & 1); }

#include "features.cuh"

/* o = 0 and lse = -inf for the rows of a padded batch that are padding. */
DEVICE void fill_rows(const attn_cuda_args &a, int32_t b, int32_t h, int32_t from, int32_t to, int thread, int threads) {
    attn_seq s = {};
    s.b = b;
    for (int32_t i = from; i < to; i++) {
        int64_t row = attn__q_offset(&a.p, &a.f.o, &s, i, h);
        for (int32_t x = thread; x < a.p.dim_v; x += threads) attn__store(a.p.out_dtype, a.f.o.data, row + x, 0);
        if (thread == 0 && a.f.lse) ((float *)a.f.lse)[attn__lse_index(&a.p, &s, i, h)] = -INFINITY;
    }
}

/* Most problems have lengths all alike, and one test skips what reads the others. */
DEVICE attn_seq sequence_at(const attn_cuda_args &a, int32_t b) {
    if (a.p.flags & ATTN_OWN_LENGTHS) return sequence(a, b);
    attn_seq s = {};
    s.b = s.slot = b;
    s.sq = a.p.max_q;
    s.sk = s.used = a.p.max_kv;
    return s;
}

/* attn_cuda_args.heads; where V is never shared the other one costs fewer registers. */
DEVICE int32_t heads_of(const attn_cuda_args &a) { return SLICED ? a.heads : a.p.heads_q; }

/* Which head that is, of attn_cuda_args.heads, and which dims of its V. */
DEVICE void see_head(const attn_cuda_args &a, tile_place &at, uint32_t head) {
    const uint32_t parts = (uint32_t)a.dv_blocks;
    at.h = (int32_t)(SLICED ? head / parts : head);
    at.dv0 = SLICED ? (int32_t)(head % parts) * DV : 0;
    at.kv_head = (int32_t)attn__divide((uint32_t)at.h, a.by_share);
}

/* n / by, for numbers that hardly ever come: a loop, because a call of the compiler's division would take many registers. */
DEVICE uint64_t divide_slowly(uint64_t n, uint32_t by) {
    uint64_t rest = 0;
#pragma unroll 1
    for (int bit = 0; bit < 64; bit++) { /* the quotient moves into n from below as n moves out */
        rest = rest << 1 | n >> 63;
        n <<= 1;
        if (rest >= by) rest -= by, n |= 1;
    }
    return n;
}

/* Row tile `tile` of a sequence and head, or chunk `slot` of its keys. */
typedef struct spot {
    int32_t batch;
    uint32_t head; /* of attn_cuda_args.heads */
    int32_t slot, tile;
} spot;

/* Returns false when there is nothing to do there. */
DEVICE bool see_place(const attn_cuda_args &a, tile_place &at, const spot &x) {
    const int32_t slot = x.slot, tile = x.tile;
    see_head(a, at, x.head);
    at.s = sequence_at(a, x.batch);
    at.split = is_split(a, at.s);
    bool padded = !(a.p.flags & ATTN_VARLEN_Q) && at.dv0 == 0;
    if (padded && tile >= 0) {
        at.pad_from = attn__max32(at.s.sq, tile * BM);
        at.pad_to = attn__min32(a.p.max_q, tile * BM + BM);
    }
    if (a.chunks == ATTN_SHORT_ELSEWHERE && at.s.sq <= ATTN_CUDA_SPLIT_ROWS) return false;
    at.chunk = at.split ? slot : 0;
    at.row = at.split ? 0 : tile * BM;
    if (at.row < 0 || at.row >= at.s.sq) return false;
    at.rows = attn__min32(BM, at.s.sq - at.row);
    at.mask = attn__seq_mask(&a.p, &at.s);
    int32_t from, to;
    attn__mask_rows(&at.mask, at.row, at.row + at.rows, &from, &to);
    attn__mask_rows_all(&at.mask, at.row, at.row + at.rows, &at.all_from, &at.all_to);
    if (at.split) {
        if (slot && (slot >= a.chunks || slot * ATTN_CUDA_CHUNK >= at.s.sk)) return false; /* fold does not look there */
        from = attn__max32(from, at.chunk * ATTN_CUDA_CHUNK);
        to = attn__min32(to, at.chunk * ATTN_CUDA_CHUNK + ATTN_CUDA_CHUNK);
    }
    if (CLIPS) {
        at.from = from;
        at.to = to;
        at.all_from = attn__max32(at.all_from, from);
        at.all_to = attn__min32(at.all_to, to);
    }
    at.n_first = from / BN;
    at.n_last = to > from ? (to - 1) / BN : -1;
    at.scale = a.scale_log2;
    at.raw = 1;
    at.o_factor = 1;
    at.step = STEP_PLAIN;
    if (ALL) {
        at.o_factor = (float)value_scale(a, at.s, at.kv_head);
        find_features(a, at, score_scale(a, at.s, at.kv_head));
    }
    at.least = !ALL ? a.least : at.scale > 1 ? -FLT_MAX / at.scale : -FLT_MAX;
    return true;
}

/*
 * Work is ordered for the L2 cache: `group` heads at a time, from head `first` on; among them the last rows, which see the most
 * keys under a causal mask, come first: number `index` of the group. Returns false when there is none.
 */
DEVICE bool find_spot(const attn_cuda_args &a, spot &x, int64_t first, uint32_t index) {
    int64_t left = (int64_t)a.p.batch * heads_of(a) - first, bh;
    if (left <= 0) return false;
    uint32_t size = left < a.group ? (uint32_t)left : (uint32_t)a.group;
    int32_t slot = (int32_t)(size == (uint32_t)a.group ? attn__divide(index, a.by_group) : index / size);
    if (slot >= a.slots) return false;
    bh = first + (index - slot * size);
    x.batch = bh <= INT32_MAX ? (int32_t)attn__divide((uint32_t)bh, a.by_heads)
                              : (int32_t)divide_slowly((uint64_t)bh, (uint32_t)heads_of(a));
    x.head = (uint32_t)(bh - (int64_t)x.batch * heads_of(a));
    x.slot = slot;
    x.tile = a.row_tiles - 1 - slot;
    return true;
}
DEVICE bool find_place(const attn_cuda_args &a, tile_place &at, int64_t first, uint32_t index) {
    spot x;
    at.pad_from = at.pad_to = 0;
    return find_spot(a, x, first, index) && see_place(a, at, x);
}

DEVICE const attn_flash_range *range_of(const attn_cuda_args &a, const tile_place &at, int32_t n) {
    return a.ranges ? flash_range(a, at.s.b, at.kv_head, n) : NULL;
}

/* ---- pieces of rows, by elements ---- */

/* Elements of piece `chunk` that lie before column dim. */
DEVICE int chunk_count(int chunk, int dim) {
    int left = dim - chunk * PER_CHUNK;
    return left < 0 ? 0 : left < PER_CHUNK ? left : (int)PER_CHUNK;
}

/* ---- scores ---- */

/* FlashMask: hidden is of make_hidden. The pair of keys 2t, 2t + 1 of 8 is number 4 nt + t of the tile: that lane of that word has it. */
DEVICE void flash_scores(const uint32_t hidden[MT][FLASH_WORDS], float s[MT][NT][4]) {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int mt = 0; mt < MT; mt++)
#pragma unroll
        for (int nt = 0; nt < NT; nt++) {
            const uint32_t pair = __shfl_sync(~0u, hidden[mt][nt / 8], nt % 8 * 4 + (lane & 3)) >> (lane >> 2);
#pragma unroll
            for (int e = 0; e < 4; e++)
                if (pair >> (16 * (e & 1) + 8 * (e >> 1)) & 1) s[mt][nt][e] = -INFINITY;
        }
}

/* -inf where a pair is not allowed. */
DEVICE void mask_scores(const attn_cuda_args &a, const tile_place &at, int32_t n, float s[MT][NT][4], tile_extras &x) {
    if (ALL && at.mask.vectors) {
        if (!FLASH_EARLY) make_hidden(a, at, n, x.hidden);
        flash_scores(x.hidden, s);
        return;
    }
#pragma unroll
    for (int mt = 0; mt < MT; mt++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int32_t first, end;
            attn__mask_row(&at.mask, row_of(at, mt, half), &first, &end);
            if (CLIPS) {
                first = attn__max32(first, at.from);
                end = attn__min32(end, at.to);
            }
            const uint32_t from = (uint32_t)(key_of(n, 0, 0) - first), count = (uint32_t)attn__max32(end - first, 0);
#pragma unroll
            for (int nt = 0; nt < NT; nt++)
#pragma unroll
                for (int c = 0; c < 2; c++) /* first <= key < end in one comparison */
                    if (from + (nt * 8 + c) >= count) s[mt][nt][2 * half + c] = -INFINITY;
        }
}

/* ---- infinities and NaN in V ---- */

/* In one word of a tile: bit 0 for its number (float32) or its low half, bit 1 for its high half. */
DEVICE int nonfinite_word(uint32_t x) {
    if (WIDE) return (x & 0x7f800000) == 0x7f800000;
    const uint32_t ones = BF16 ? 0x7f80 : 0x7c00;
    return ((x & ones) == ones) | ((x >> 16 & ones) == ones) << 1;
}

/* The larger of the halves, each by itself; signs do not count. */
DEVICE uint32_t larger_halves(uint32_t most, uint32_t x) { return __vmaxu2(most, x & 0x7fff7fff); }

/* ---- O to memory ---- */

DEVICE void store_number(attn_dtype dtype, void *data, int64_t at, float x) {
    if (dtype == ATTN_F32)
        ((float *)data)[at] = x;
    else if (dtype == ATTN_BF16)
        ((uint16_t *)data)[at] = attn__to_bf16(x);
    else
        ((uint16_t *)data)[at] = (uint16_t)cvt_rn_f16x2(x, 0);
}

/* ---- softmax ---- */

/*
 * Online softmax, base 2: P is 2^(scale * (s - m)) with m the largest score of the row so far, and O and l follow when it grows.
 * That becomes rare as tiles go by, so a warp first asks whether any of its rows has grown at all, each lane looking at its
 * own columns only.
 *
 * scale * s - scale * m is one multiply-add. The rounding of scale * m is then a factor common to the row, which the division by
 * l takes out again; but where scores are so large that this rounding is too, s - m is taken first, exactly.
 */
/*
 * The maximum of each row follows `most`, the largest scores that the lane sees, and l with it; factor is what O has to be
 * multiplied by, 1 where nothing grew. Says whether any maximum of the warp is huge.
 */
DEVICE bool raise_maximum(float factor[MT][2], const float most[MT][2], float m[MT][2], float l[MT][2], float scale) {
    bool has_huge = false;
#pragma unroll
    for (int mt = 0; mt < MT; mt++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float x = most[mt][half], before = m[mt][half];
            x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
            x = fmaxf(x, __shfl_xor_sync(~0u, x, 2));
            m[mt][half] = fmaxf(before, x);
            /* In float32 as it enters the exponentials, rounded; 16 bits do not notice, and this way nothing overflows. */
            float less = __fmul_rn(before, scale), more = __fmul_rn(m[mt][half], scale);
            bool exactly = !WIDE || fmaxf(fabsf(less), fabsf(more)) > HUGE_SCORE;
            float grown = exactly ? __fmul_rn(before - m[mt][half], scale) : less - more;
            factor[mt][half] = ex2_approx(grown);
            l[mt][half] *= factor[mt][half];
            has_huge |= fabsf(more) > HUGE_SCORE;
        }
    return __any_sync(~0u, has_huge);
}

DEVICE void rescale(float o[MT][DT][4], const float factor[MT][2]) {
#pragma unroll
    for (int mt = 0; mt < MT; mt++)
#pragma unroll
        for (int dt = 0; dt < DT; dt++)
#pragma unroll
            for (int e = 0; e < 4; e++) o[mt][dt][e] *= factor[mt][e >> 1];
}

/* The largest scores that the lane sees of each row; true if one of the warp's rows has grown. */
DEVICE bool find_maximum(float most[MT][2], float s[MT][NT][4], const float m[MT][2]) {
    bool raise = false;
#pragma unroll
    for (int mt = 0; mt < MT; mt++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float x = fmaxf(s[mt][0][2 * half], s[mt][0][2 * half + 1]);
#pragma unroll
            for (int nt = 1; nt < NT; nt++) x = fmaxf(x, fmaxf(s[mt][nt][2 * half], s[mt][nt][2 * half + 1]));
            raise |= x > m[mt][half];
            most[mt][half] = x;
        }
    return __any_sync(~0u, raise);
}

/* scale * m for the exponentials of the 8-key tiles [from, to); where it is huge s - m is taken at once, and 0 remains. */
DEVICE void subtract_maximum(float less[MT][2], float s[MT][NT][4], const float m[MT][2], float scale, bool has_huge,
                             int from, int to) {
#pragma unroll
    for (int mt = 0; mt < MT; mt++)
#pragma unroll
        for (int half = 0; half < 2; half++) less[mt][half] = __fmul_rn(m[mt][half], scale);
    if (has_huge) {
#pragma unroll
        for (int mt = 0; mt < MT; mt++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                if (!(fabsf(less[mt][half]) > HUGE_SCORE)) continue;
                less[mt][half] = 0;
#pragma unroll
                for (int nt = from; nt < to; nt++)
#pragma unroll
                    for (int c = 0; c < 2; c++) s[mt][nt][2 * half + c] -= m[mt][half];
            }
    }
}

/* ---- the end ---- */

/* One over a row sum, times `factor`. 16-bit results do not notice the last bit. */
DEVICE float share_of(float factor, float sum) {
    if (sum == 0) return 0;
    return WIDE ? factor / sum : __fmul_rn(factor, rcp_approx(sum));
}

/*
 * O divided by l; or the partial result of a chunk. Each lane of a quad looks after the lse of one of the four rows (two, where a
 * warp has 16) that they share; that is returned.
 */
DEVICE float finish_o(const attn_cuda_args &a, const tile_place &at, float o[MT][DT][4], float m[MT][2], float l[MT][2]) {
    const int lane = threadIdx.x & 31, t = lane & 3;
    float most = 0, sum = 0;
#pragma unroll
    for (int r = 0; r < 2 * MT; r++) {
        float x = l[r / 2][r % 2];
        x += __shfl_xor_sync(~0u, x, 1);
        x += __shfl_xor_sync(~0u, x, 2);
        float factor = share_of(at.o_factor, x);
        const float largest = here_float(m[r / 2][r % 2]); /* a choice between the two must not put them into memory */
        if (t % (2 * MT) == r) sum = x, most = largest;
#pragma unroll
        for (int x = 0; x < 2 * DT; x++) {
            float *number = &o[r / 2][x / 2][r % 2 * 2 + x % 2];
            *number = __fmul_rn(*number, factor);
        }
    }
    float lse = sum == 0 ? -INFINITY : lse_of(most, at.scale, sum), share = 1;
    if ((a.p.flags & ATTN_SINK) && !at.split) { /* else fold does */
        lse = add_sink(lse, a.f.sink[at.h], &share);
#pragma unroll
        for (int r = 0; r < 2 * MT; r++) {
            float factor = __shfl_sync(~0u, share, (lane & ~3) + r);
#pragma unroll
            for (int x = 0; x < 2 * DT; x++) {
                float *number = &o[r / 2][x / 2][r % 2 * 2 + x % 2];
                *number = __fmul_rn(*number, factor);
            }
        }
    }
    return lse;
}

DEVICE void store_lse(const attn_cuda_args &a, const tile_place &at, float lse) {
    const int t = threadIdx.x & 3;
    const int32_t i = row_of(at, t % (2 * MT) / 2, t % 2);
    if (t >= 2 * MT || i >= at.s.sq || at.dv0) return;
    if (at.split)
        ((float *)a.part_lse)[part_index(a, at.s, i, at.h, at.chunk)] = lse;
    else if (a.f.lse)
        ((float *)a.f.lse)[attn__lse_index(&a.p, &at.s, i, at.h)] = lse;
}

DEVICE void finish(const attn_cuda_args &a, const tile_place &at, float o[MT][DT][4], float m[MT][2], float l[MT][2]) {
    store_lse(a, at, finish_o(a, at, o, m, l));
}

#endif
