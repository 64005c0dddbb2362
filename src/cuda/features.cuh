/*
 * What is done to scores before the softmax (softcap, ALiBi, bias) and to P after it (dropout). rows.cuh includes this.
 *
 * All of it is per element, 64 of them in a thread. On Hopper tensor cores need as long for a tile as 16 instructions per element
 * take (dim 128), of which the softmax has 5. So what a tile needs is a constant where its code is compiled (STEP_...), little of it
 * is done twice, and what does not need the scores is done while their product is under way (tile_extras).
 */
#ifndef ATTN_FEATURES_CUH
#define ATTN_FEATURES_CUH

/* What a tile needs: nothing, or one thing alone; or any of them. With a mask it is either that alone, or any. */
enum { STEP_PLAIN, STEP_MASK, STEP_CAP, STEP_ALIBI, STEP_BIAS, STEP_DROP, STEP_ANY };
/* Is that to be done in a step of this kind, a constant? here: it is asked for. */
DEVICE bool does(int what, int kind, bool here) { return kind == what || (kind == STEP_ANY && here); }

DEVICE bool drops(const attn_cuda_args &a) { return ALL && a.philox.threshold > 0; }

/* How a bias lies in memory: keys side by side, in pairs that one load can fetch, as floats or in the tile's own dtype; or anyhow. */
enum { BIAS_FLOATS, BIAS_HALVES, BIAS_ANY };

DEVICE int8_t bias_kind(const attn_cuda_args &a, const tile_place &at) {
    const attn_matrix &m = a.f.bias;
    const bool wide = a.p.bias_dtype == ATTN_F32;
    const uint64_t first = (uint64_t)m.data + attn__matrix_at(&m, at.s.b, at.h, 0, 0) * (wide ? 4 : 2);
    if (!wide && a.p.bias_dtype != (attn_dtype)DTYPE) return BIAS_ANY;
    if (m.stride[3] != 1 || m.stride[2] % 2 || first % (wide ? 8 : 4)) return BIAS_ANY;
    return wide ? BIAS_FLOATS : BIAS_HALVES;
}

/*
 * The numbers that features need. Scores are products times `raw`, with softcap and the rest, times `scale`: then they are in base
 * 2. Without softcap and bias raw is 1, and the slope of ALiBi is divided by what raw would be; unless the quotient, or the scale,
 * is out of all proportion, or the scale not positive.
 */
DEVICE void find_features(const attn_cuda_args &a, tile_place &at, double scale) {
    const bool has_cap = a.p.softcap > 0, has_alibi = a.p.flags & ATTN_ALIBI, has_bias = a.p.flags & ATTN_BIAS;
    const float slope = has_alibi ? a.f.alibi[at.s.b * a.f.alibi_stride + at.h] : 0, divided = (float)(slope / scale);
    const bool in_base_e = has_cap || has_bias || (has_alibi && !(scale > 1e-30 && fabsf(divided) < 1e28f));
    at.scale = (float)(in_base_e ? scale : scale * ATTN_LOG2E);
    at.raw = 1;
    if (in_base_e || !(at.scale > 0)) {
        at.raw = at.scale;
        at.scale = in_base_e ? (float)ATTN_LOG2E : 1;
    }
    at.slope = in_base_e ? slope : divided;
    at.bias = has_bias ? bias_kind(a, at) : (int8_t)BIAS_ANY;
    const int count = has_cap + has_alibi + has_bias + drops(a);
    if (count > 1 || (has_bias && at.bias == BIAS_ANY) || (at.raw != 1 && !has_cap && !has_bias))
        at.step = STEP_ANY;
    else if (count == 1)
        at.step = has_cap ? STEP_CAP : has_alibi ? STEP_ALIBI : has_bias ? STEP_BIAS : STEP_DROP;
    at.cap = (float)a.p.softcap;
    at.to_y = has_cap ? (float)fmin(fmax(2 * scale / a.p.softcap, -1e38), 1e38) : 0;
    if (scale != scale) at.to_y = (float)scale; /* a descale that is NaN */
}

/* ---- softcap, ALiBi ---- */

/*
 * cap * tanh(x / cap) of a product s, with x = raw * s and y = 2 x / cap: a polynomial where x is up to 0.9 cap, off by 2e-7
 * of itself at most, which needs no special function; further out cap - 2 cap / (1 + e^y), off by a few units of the last place of
 * cap. Which of them it is depends on the number alone. Float32, whose P would notice, has it exact.
 */
#define NEAR 1.8f /* of |y| */
DEVICE float capped_near(float y, const float c[6]) {
    const float t = y * y; /* and a product that stays one, whatever is added to it */
    return __fmul_rn(y, fmaf(t, fmaf(t, fmaf(t, fmaf(t, fmaf(t, c[5], c[4]), c[3]), c[2]), c[1]), c[0]));
}
DEVICE float capped_far(float y, float cap) {
    return fmaf(-2 * cap, rcp_approx(1 + ex2_approx(y * (float)ATTN_LOG2E)), cap);
}

DEVICE void cap_scores(float s[MT][NT][4], const tile_place &at) {
    const float cap = at.cap, to_y = at.to_y;
    if (WIDE) {
        EACH_SCORE(mt, nt, e) s[mt][nt][e] = cap * tanhf(__fmul_rn(s[mt][nt][e], at.raw) / cap);
        return;
    }
    const float c[6] = {cap * 0.4999999f,       cap * -0.0416644173f,  cap * 0.00415832574f,
                        cap * -0.000410048877f, cap * 3.51292659e-05f, cap * -1.79529371e-06f};
    float most[4] = {}; /* in four chains: one alone would take as long as the polynomials */
    EACH_SCORE(mt, nt, e) most[e] = fmaxf(most[e], fabsf(s[mt][nt][e]));
    const float largest = fmaxf(fmaxf(most[0], most[1]), fmaxf(most[2], most[3]));
    if (!__any_sync(~0u, !(fabsf(__fmul_rn(largest, to_y)) < NEAR))) { /* most often */
        EACH_SCORE(mt, nt, e) s[mt][nt][e] = capped_near(__fmul_rn(s[mt][nt][e], to_y), c);
    } else {
        EACH_SCORE(mt, nt, e) {
            const float y = __fmul_rn(s[mt][nt][e], to_y);
            s[mt][nt][e] = fabsf(y) < NEAR ? capped_near(y, c) : capped_far(y, cap);
        }
    }
}

/* -slope * |distance| of row and key. They are whole numbers, so floats are exact; and row g + 8 is as far from key j + 8 as g from j. */
DEVICE void alibi_scores(const tile_place &at, int32_t n, float s[MT][NT][4]) {
    const float slope = -at.slope;
#pragma unroll
    for (int mt = 0; mt < MT; mt++) {
        const float first = (float)(row_of(at, mt, 0) + (at.s.sk - at.s.sq) - key_of(n, 0, 0));
#pragma unroll
        for (int nt = 0; nt < NT; nt++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                s[mt][nt][e] = fmaf(slope, fabsf(first - (float)((nt - (e >> 1)) * 8 + (e & 1))), s[mt][nt][e]);
    }
}

/* ---- what does not need the scores: made while their product is under way ---- */

enum { EARLY = HAS_ROOM ? 2 * MT * NT : 0 }; /* words */
enum { FLASH_WORDS = (BN / 2 + 31) / 32, FLASH_EARLY = DV <= 128 };
typedef struct tile_extras {
    uint32_t hidden[MT][FLASH_WORDS]; /* FlashMask: make_hidden */
    uint32_t kept[MT][2];             /* dropout: bit 15 - nt of a row is element 2t of 8 keys; 16 further 2t + 1 */
    const uint8_t *bias[MT][2];       /* where the rows' bias of this tile begins, if it is fetched in pairs */
    uint32_t early[EARLY + 1];        /* STEP_BIAS: the first words of it */
} tile_extras;

#define FIRST_WORD(mt, half, nt, words) ((((mt)*2 + (half)) * NT + (nt)) * (words)) /* in tile_extras.early */

/* Is the bias of tile n fetched in pairs? Each is one row's elements 2t and 2t + 1 of 8 keys. */
DEVICE bool has_pairs(const tile_place &at, int32_t n) { return at.bias != BIAS_ANY && n * BN + BN <= at.s.sk; }
DEVICE uint64_t two_floats(const uint8_t *row, int nt) { return *(const uint64_t *)(row + nt * 32); }
DEVICE uint32_t two_halves(const uint8_t *row, int nt) { return *(const uint32_t *)(row + nt * 16); }
/* All pairs of the thread, neighbours in memory one after the other. */
#define EACH_PAIR(mt, nt, half)                                                                                            \
    _Pragma("unroll") for (int mt = 0; mt < MT; mt++) _Pragma("unroll") for (int half = 0; half < 2; half++)               \
        _Pragma("unroll") for (int nt = 0; nt < NT; nt++)

DEVICE const uint8_t *bias_at(const attn_cuda_args &a, const tile_place &at, int32_t i, int32_t j) {
    i = attn__min32(i, at.s.sq - 1); /* rows past the end count for nothing */
    return (const uint8_t *)a.f.bias.data +
           attn__matrix_at(&a.f.bias, at.s.b, at.h, i, j) * (at.bias == BIAS_FLOATS ? 4 : 2);
}

/*
 * Dropout. One call of the generator serves eight neighbours of a row, which the lanes of a quad share: each draws for one of the two
 * rows and one half of the tile, both halves of a word at a time, and they exchange bits.
 */
static_assert(NT % 2 == 0 && NT <= 16, "a tile of keys is two times up to eight draws");
DEVICE void draw_kept(const attn_cuda_args &a, const tile_place &at, int32_t n, uint32_t kept[MT][2]) {
    enum { DRAWS = NT / 2 };
    const uint32_t head = (uint32_t)at.s.b * (uint32_t)a.p.heads_q + (uint32_t)at.h, ones = ATTN_PHILOX_BITS * 0x10001u;
    const uint32_t least = (ATTN_PHILOX_BITS + 1 - a.philox.threshold) * 0x10001u; /* added, bit 15 says what is kept */
    const bool odd = threadIdx.x & 1, second = threadIdx.x & 2;
    const uint32_t first = (uint32_t)n * NT + (second ? DRAWS : 0);
#pragma unroll
    for (int mt = 0; mt < MT; mt++) {
        const uint32_t row = (uint32_t)row_of(at, mt, odd);
        uint32_t bits[4] = {}; /* of lane e's elements, in the end: bit 15 - k for draw k, 16 further for the second one */
#pragma unroll 2
        for (int k = DRAWS - 1; k >= 0; k--) {
            uint32_t r[4];
            attn__philox4(&a.philox, head, row, first + k, r);
#pragma unroll
            for (int e = 0; e < 4; e++) bits[e] = (((r[e] & ones) + least) & ~ones) | bits[e] >> 1;
        }
        uint32_t both[2]; /* for one of two lanes, all of the row */
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const uint32_t own = second ? bits[e + 2] : bits[e];
            const uint32_t other = __shfl_xor_sync(~0u, second ? bits[e] : bits[e + 2], 2);
            both[e] = (second ? other : own) | (second ? own : other) >> DRAWS;
        }
        const uint32_t own = odd ? both[1] : both[0], other = __shfl_xor_sync(~0u, odd ? both[0] : both[1], 1);
        kept[mt][0] = odd ? other : own;
        kept[mt][1] = odd ? own : other;
    }
}

DEVICE bool is_dropped(const attn_cuda_args &a, const tile_place &at, int32_t i, int32_t j) {
    return attn__dropped(&a.philox, (uint32_t)at.s.b * (uint32_t)a.p.heads_q + (uint32_t)at.h, (uint32_t)i, (uint32_t)j);
}

/* The bias of the tile before n, of the warp's rows, on its way to the L2 cache. */
DEVICE void fetch_bias(const attn_cuda_args &a, const tile_place &at, int32_t n) {
    if (n <= at.n_first) return;
    const int lane = here(threadIdx.x) & 31, bytes = BN * (at.bias == BIAS_FLOATS ? 4 : 2);
#pragma unroll
    for (int mt = 0; mt < MT; mt++) {
        const uint8_t *from = bias_at(a, at, row_of(at, mt, 0) - (lane >> 2) + (lane >> 1), (n - 1) * BN) + lane % 2 * 32;
#pragma unroll 1
        for (int x = 0; x < bytes; x += 64) prefetch_global_l2(from + x);
    }
}

/* The first words of this tile's bias. */
DEVICE void load_early(const tile_place &at, tile_extras &x) {
    if (at.bias == BIAS_FLOATS) {
        EACH_PAIR(mt, nt, half) {
            const int word = FIRST_WORD(mt, half, nt, 2);
            if (word + 2 > EARLY) continue;
            const uint64_t pair = two_floats(x.bias[mt][half], nt);
            x.early[word] = (uint32_t)pair;
            x.early[word + 1] = (uint32_t)(pair >> 32);
        }
    } else {
        EACH_PAIR(mt, nt, half) {
            const int word = FIRST_WORD(mt, half, nt, 1);
            if (word < EARLY) x.early[word] = two_halves(x.bias[mt][half], nt);
        }
    }
}

/* Those of 16 rows, from row0 on, that are in [from, to): a bit each. */
DEVICE uint32_t rows_between(int32_t from, int32_t to, int32_t row0) {
    const int32_t first = attn__min32(attn__max32(from, row0), row0 + 16) - row0;
    const int32_t end = attn__min32(attn__max32(to, row0), row0 + 16) - row0;
    return first < end ? (1u << end) - (1u << first) : 0;
}

/*
 * With FlashMask: which of the warp's rows do not see its keys, for any reason; two neighbouring keys to a lane and word, 16 bits each.
 * So the vectors of a tile are read once by a warp, all at a time.
 */
DEVICE void make_hidden(const attn_cuda_args &a, const tile_place &at, int32_t n, uint32_t hidden[MT][FLASH_WORDS]) {
#pragma unroll
    for (int w = 0; w < FLASH_WORDS; w++) {
        const int32_t key = 2 * (32 * w + (int32_t)(threadIdx.x & 31));
#pragma unroll
        for (int c = 0; c < 2; c++) {
            const int32_t j = n * BN + key + c, there = attn__min32(j, at.s.sk - 1);
            const attn_flash f = attn__flash_load(&at.mask, attn__flash_at(&a.p, &a.f, at.s.b, at.kv_head, there));
            int32_t first, end;
            attn__mask_cols(&at.mask, j, j + 1, &first, &end);
            if (j >= at.s.sk || (CLIPS && (j < at.from || j >= at.to))) end = first;
#pragma unroll
            for (int mt = 0; mt < MT; mt++) {
                const int32_t row0 = at.row + ((int32_t)(here(threadIdx.x) >> 5) * MT + mt) * 16;
                const uint32_t rows = (~rows_between(first, end, row0) & 0xffff) | rows_between(f.v[0], f.v[1], row0) |
                                      rows_between(f.v[2], f.v[3], row0);
                hidden[mt][w] = c == 0 ? rows : hidden[mt][w] | rows << 16;
            }
        }
    }
}

DEVICE void make_extras(const attn_cuda_args &a, const tile_place &at, int kind, int32_t n, tile_extras &x) {
    if (FLASH_EARLY && (kind == STEP_ANY || kind == STEP_MASK) && at.mask.vectors) make_hidden(a, at, n, x.hidden);
    if (does(STEP_DROP, kind, drops(a))) draw_kept(a, at, n, x.kept);
    if (!does(STEP_BIAS, kind, (a.p.flags & ATTN_BIAS) && has_pairs(at, n))) return;
#pragma unroll
    for (int r = 0; r < 2 * MT; r++) x.bias[r / 2][r % 2] = bias_at(a, at, row_of(at, r / 2, r % 2), key_of(n, 0, 0));
    if (kind == STEP_BIAS) load_early(at, x);
    fetch_bias(a, at, n);
}

/* Zeroes what is dropped in the fragment of step ks. */
DEVICE void drop(const tile_extras &x, uint32_t p[4], int mt, int ks) {
    enum { PARTS = WIDE ? 1 : 2 };
#pragma unroll
    for (int part = 0; part < PARTS; part++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int bit = 15 - (WIDE ? ks : 2 * ks + part); /* it and that 16 further become the highest of a byte */
            const uint32_t mask = prmt(x.kept[mt][half] << (7 - bit % 8), 0, bit < 8 ? 0xaa88 : 0xbb99);
            if (WIDE) {
                if (!(mask & 1)) p[half] = 0;
                if (!(mask >> 31)) p[half + 2] = 0;
            } else {
                p[2 * part + half] &= mask;
            }
        }
}

/* ---- bias ---- */

/* A bias as float; the dtype is the same for all, so this branches once. */
DEVICE float bias_number(attn_dtype dtype, const void *data, int64_t at) {
    if (dtype == ATTN_F32) return ((const float *)data)[at];
    if (dtype == ATTN_F64) return (float)((const double *)data)[at];
    uint16_t x = ((const uint16_t *)data)[at];
    return dtype == ATTN_BF16 ? attn__from_bf16(x) : cvt_f32_f16(x);
}

/* A bias that lies anyhow, or past the end of the keys: slow, but little code. */
DEVICE void any_bias(const attn_cuda_args &a, const tile_place &at, int32_t n, float s[MT][NT][4], float factor) {
    enum { PART = NT % 4 == 0 ? 4 : 2 }; /* so many at a time, because all of them would not fit into registers */
    float bias[MT * PART * 4];
#pragma unroll
    for (int first = 0; first < NT; first += PART) {
#pragma unroll 1
        for (int x = 0; x < MT * PART * 4; x++) {
            const int32_t i = row_of(at, x / (PART * 4), x >> 1 & 1), j = key_of(n, first + x / 4 % PART, x);
            bias[x] = i >= at.s.sq || j >= at.s.sk
                          ? 0
                          : bias_number(a.p.bias_dtype, a.f.bias.data, attn__matrix_at(&a.f.bias, at.s.b, at.h, i, j));
        }
        EACH_SCORE(mt, nt, e)
        if (nt >= first && nt < first + PART)
            s[mt][nt][e] = fmaf(s[mt][nt][e], factor, bias[(mt * PART + nt - first) * 4 + e]);
    }
}

/* s = factor * s + bias. */
DEVICE void bias_scores(const attn_cuda_args &a, const tile_place &at, int kind, int32_t n, float s[MT][NT][4],
                        float factor, const tile_extras &x) {
    if (kind == STEP_ANY && !has_pairs(at, n)) {
        any_bias(a, at, n, s, factor);
    } else if (at.bias == BIAS_FLOATS) {
        EACH_PAIR(mt, nt, half) {
            const int word = FIRST_WORD(mt, half, nt, 2);
            float *y = &s[mt][nt][2 * half];
            const uint64_t pair = kind == STEP_ANY || word + 2 > EARLY ? two_floats(x.bias[mt][half], nt)
                                                                       : x.early[word] | (uint64_t)x.early[word + 1] << 32;
            y[0] = fmaf(y[0], factor, __uint_as_float((uint32_t)pair));
            y[1] = fmaf(y[1], factor, __uint_as_float((uint32_t)(pair >> 32)));
        }
    } else {
        EACH_PAIR(mt, nt, half) {
            const int word = FIRST_WORD(mt, half, nt, 1);
            float *y = &s[mt][nt][2 * half];
            const uint32_t pair = kind == STEP_ANY || word >= EARLY ? two_halves(x.bias[mt][half], nt) : x.early[word];
            y[0] = fmaf(y[0], factor, BF16 ? __uint_as_float(pair << 16) : cvt_f32_f16((uint16_t)pair));
            y[1] = fmaf(y[1], factor, BF16 ? __uint_as_float(pair & 0xffff0000) : cvt_f32_f16((uint16_t)(pair >> 16)));
        }
    }
}

/* ---- all of it ---- */

/*
 * The numbers of semantics 1 to 4, as score() of score.cuh, a step at a time for all elements of the thread; times `scale` they are
 * in base 2.
 */
DEVICE void scores(const attn_cuda_args &a, const tile_place &at, int kind, int32_t n, float s[MT][NT][4],
                   const tile_extras &x) {
    if (!ALL) return;
    const bool has_cap = does(STEP_CAP, kind, at.cap > 0), has_alibi = does(STEP_ALIBI, kind, a.p.flags & ATTN_ALIBI);
    const bool has_bias = does(STEP_BIAS, kind, a.p.flags & ATTN_BIAS);
    const bool with_bias = has_bias && !has_alibi && !has_cap; /* products are multiplied as it is added */
    if (has_cap) {
        cap_scores(s, at);
    } else if (kind == STEP_ANY && at.raw != 1 && !with_bias) {
        EACH_SCORE(mt, nt, e) s[mt][nt][e] = __fmul_rn(s[mt][nt][e], at.raw);
    }
    if (has_alibi) alibi_scores(at, n, s);
    if (has_bias) bias_scores(a, at, kind, n, s, with_bias ? at.raw : 1, x);
}

#endif
