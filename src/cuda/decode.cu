/*
 * Decode: sequences of at most ATTN_CUDA_SPLIT_ROWS query rows against a long cache. One line DECODE of variants.def is one build of
 * this file. All that counts is that K and V stream through at the speed of memory; the rest hides behind that.
 *
 * The rows of all query heads that share a KV head are columns of the same products, whose rows are keys, then dims: of those there are always
 * 16. An item is a sequence, a KV head and ROWS such rows, 8 or 16.
 * Its keys are worked in spans of ATTN_DECODE_SPAN keys, counted from the sequence's key 0, each by itself; ATTN_DECODE_SUPER spans
 * are a super. From the third super on two spans are worked as one: short sequences want many spans, long ones few results of them. The
 * spans of a super are folded in their order, and then the supers: so every sum has one order, whoever works on it, and the bits depend
 * on the sequence alone.
 *
 * The spans of all items in a row are shared out evenly: each block has as many tiles of keys as the others, to within a span or a pair. A super that is
 * one block's stays in registers; of one that several blocks have, the results of spans go to the workspace, and the last to finish
 * folds them. Likewise the last to finish a super of an item folds the supers. Nobody waits.
 *
 * Within a block, each warp has 32 keys of a tile of 128 to itself, or 64 of 256; where O is wide two have 32 of 64, and each half of the dims. A
 * team, one warp or two, fetches what it works on, and teams meet at the end of a span only. A span is worked in stretches of two tiles, or one of 256 keys:
 *
 *     S^T = K Q^T              a tile of K after the other, each fetched some tiles ahead: the next item's, when this one has no more
 *     m, P = exp2(S - m)       over the team's keys of both; in registers, 8 x 8 numbers of it transposed by an instruction
 *     O = O exp2(m0 - m)       if a maximum has grown
 *     O^T += V^T P^T           a tile of V after the other
 *
 * At its end O of all teams goes to where the last tile of V was, or, of 8 bits, to a place of its own; a barrier; and each warp adds up a quarter of the columns.
 *
 * K and V of 8 bits (NARROW: e4m3, e5m2 or int8) are fetched as they are, and are float16 from shared memory to the product on, exactly. Q is
 * float16 then: rows of bfloat16 are brought into its range by a power of two, which their scale makes up for.
 *
 * Lane 4 g + t holds of a 16x8 accumulator the rows g, g + 8 (keys, or dims) and the columns 2t, 2t + 1 (query rows).
 */
#include "counter.cuh"
#include "decode_tile.cuh"
#include "grid.cuh"

/* Two numbers of o. */
DEVICE uint32_t pack_out(const attn_cuda_args &a, float low, float high) {
    if (!NARROW) return pack(low, high);
    return a.p.out_dtype == ATTN_BF16 ? cvt_rn_bf16x2(low, high) : cvt_rn_f16x2(low, high);
}

/* ---- rows of an item ---- */

/* What is known of them is in the notes. Of each eight rows a lane has 2t and 2t + 1 within a span, otherwise row g. */
DEVICE int row_number(int n) { return n / 2 * 8 + 2 * (threadIdx.x & 3) + n % 2; }
DEVICE const row_notes &row_at(const shared_notes &notes, int n) { return notes.row[row_number(n)]; }
DEVICE const row_notes &own_row(const shared_notes &notes, int e) { return notes.row[(threadIdx.x >> 2 & 7) + 8 * e]; }

/*
 * The power of two that a row of q in bfloat16 is multiplied with, so that its largest number is in [2^14, 2^15) and it can be float16: exact for
 * what is up to 2^31 times smaller, and off by 2^-39 of the largest below that.
 */
DEVICE int fit_of(float most) { return attn__min32(141 - (int32_t)(attn__bits(most) >> 23), 100); }
DEVICE float power_of_two(int x) { return attn__float((uint32_t)(127 + x) << 23); } /* -127: 0 */
DEVICE int32_t exponent_of(float x) {
    return (int32_t)(attn__bits(x) >> 23) - 127;
} /* of what is not negative; of 0 -127 */

/* As find_features of features.cuh. */
DEVICE void find_scale(const attn_cuda_args &a, row_notes &r, const walk &w, int fit) {
    const bool has_alibi = a.p.flags & ATTN_ALIBI;
    const double scale = NARROW ? score_scale(a, w.s, w.head) / power_of_two(fit) : a.p.scale;
    const float slope = has_alibi ? a.f.alibi[w.s.b * a.f.alibi_stride + r.h] : 0;
    const float divided = has_alibi ? (float)(slope / scale) : 0;
    const bool in_base_e = a.p.softcap > 0 || (has_alibi && !(scale > 1e-30 && fabsf(divided) < 1e28f));
    r.scale = in_base_e ? (float)scale : NARROW ? (float)(scale * ATTN_LOG2E) : a.scale_log2;
    if (NARROW && !in_base_e && scale > 0) r.scale = fmaxf(r.scale, FLT_MIN); /* is_plain is said of all rows */
    r.raw = 1;
    if (in_base_e || !(r.scale > 0)) {
        r.raw = r.scale;
        r.scale = in_base_e ? (float)ATTN_LOG2E : 1;
    }
    r.slope = in_base_e ? slope : divided;
    r.least = r.scale > 1 ? -FLT_MAX / r.scale : -FLT_MAX;
}

/* Two barriers of the block: nobody reads the notes of the item before, and everybody sees those of this one. */
DEVICE void see_rows(const attn_cuda_args &a, const walk &w, shared_notes &notes) {
    const int32_t group = a.group, number = w.block * ROWS, count = attn__min32(ROWS, w.s.sq * group - number);
    const attn_mask mask = attn__seq_mask(&a.p, &w.s);
    __syncthreads();
    if (threadIdx.x < ROWS) {
        row_notes x = {-1, w.head * group, 0, 0, 0, 0, 0, 0};
        if ((int32_t)threadIdx.x < count) {
            x.i = (int32_t)attn__divide((uint32_t)number + threadIdx.x, a.by_share);
            x.h += number + (int32_t)threadIdx.x - x.i * group;
            attn__mask_row(&mask, x.i, &x.first, &x.end);
        }
        int fit = 0;
        if (NARROW && a.p.dtype == ATTN_BF16) {
            float most = notes.most[0][threadIdx.x];
            for (int n = 1; n < TEAM; n++) most = fmaxf(most, notes.most[n][threadIdx.x]);
            fit = fit_of(most);
            notes.fit[threadIdx.x] = (int8_t)fit;
        }
        find_scale(a, x, w, fit);
        notes.row[threadIdx.x] = x;
    }
    if (threadIdx.x == 0) {
        notes.rows = count;
        if (NARROW) notes.is_plain = !(a.p.softcap > 0) && !(a.p.flags & ATTN_ALIBI) && score_scale(a, w.s, w.head) > 0;
        notes.all_from = notes.all_to = 0;
        if (count > 0) {
            const int32_t i0 = (int32_t)attn__divide((uint32_t)number, a.by_share);
            const int32_t i1 = (int32_t)attn__divide((uint32_t)(number + count - 1), a.by_share) + 1;
            attn__mask_rows_all(&mask, i0, i1, &notes.all_from, &notes.all_to);
        }
    }
    __syncthreads();
}

/* Two numbers of a row at any address. */
static __device__ __noinline__ uint32_t pair_of(const uint16_t *row, int32_t column, int32_t dim) {
    const uint32_t low = column < dim ? row[column] : 0, high = column + 1 < dim ? row[column + 1] : 0;
    return low | high << 16;
}

/* The warp's dims of rows g of Q as the right operand. It does not ask the notes, so that they can be written meanwhile. */
DEVICE void load_q(const attn_cuda_args &a, const walk &w, uint32_t q[EIGHTS][STEPS][2]) {
    const int t = threadIdx.x & 3;
    const bool is_whole = a.vector_ok && a.p.dim_qk == DIM;
#pragma unroll
    for (int e = 0; e < EIGHTS; e++) {
        const int32_t number = w.block * ROWS + (int32_t)(threadIdx.x >> 2 & 7) + 8 * e;
        const int32_t i = (int32_t)attn__divide((uint32_t)number, a.by_share), h = w.head * a.group + number - i * a.group;
        const bool is_there = number < w.s.sq * a.group;
        const uint16_t *row = (const uint16_t *)a.f.q.data + attn__q_offset(&a.p, &a.f.q, &w.s, i, h);
#pragma unroll
        for (int n = 0; n < 2 * STEPS; n++) q[e][n / 2][n % 2] = 0;
        if (!is_there) continue;
        if (NARROW) { /* a lane has four dims of 16, in the order of the bytes of K */
#pragma unroll
            for (int n = 0; n < STEPS; n++) {
                const int column = (first_piece() + piece_of(n)) * 16 + 4 * t;
                const uint32_t *pairs = (const uint32_t *)(row + column); /* not both at once: that fixes their registers */
                q[e][n][0] = is_whole ? pairs[0] : pair_of(row, column, a.p.dim_qk);
                q[e][n][1] = is_whole ? pairs[1] : pair_of(row, column + 2, a.p.dim_qk);
            }
        } else if (is_whole) {
            const uint32_t *pairs = (const uint32_t *)(row + first_piece() * 8 + 2 * t);
#pragma unroll
            for (int n = 0; n < 2 * STEPS; n++) q[e][n / 2][n % 2] = pairs[piece_of(n) * 4];
        } else {
#pragma unroll
            for (int n = 0; n < 2 * STEPS; n++)
                q[e][n / 2][n % 2] = pair_of(row, (first_piece() + piece_of(n)) * 8 + 2 * t, a.p.dim_qk);
        }
    }
}

/* NARROW, q in bfloat16: the largest numbers of the warp's rows, for see_rows; */
DEVICE void measure_q(const uint32_t q[EIGHTS][STEPS][2], shared_notes &notes) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
#pragma unroll
    for (int e = 0; e < EIGHTS; e++) {
        float most = 0;
#pragma unroll
        for (int n = 0; n < 2 * STEPS; n++) {
            const uint32_t x = q[e][n / 2][n % 2];
            most = fmaxf(most, fmaxf(fabsf(attn__float(x << 16)), fabsf(attn__float(x & 0xffff0000))));
        }
        most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
        most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
        if ((lane & 3) == 0 && warp < TEAM) notes.most[warp][(lane >> 2) + 8 * e] = most;
    }
}
/* and q as float16, as see_rows wants it. */
DEVICE void fit_q(uint32_t q[EIGHTS][STEPS][2], const shared_notes &notes) {
#pragma unroll
    for (int e = 0; e < EIGHTS; e++) {
        const float fit = power_of_two(notes.fit[(threadIdx.x >> 2 & 7) + 8 * e]);
#pragma unroll
        for (int n = 0; n < 2 * STEPS; n++) {
            uint32_t *x = &q[e][n / 2][n % 2];
            *x = cvt_rn_f16x2(__fmul_rn(attn__float(*x << 16), fit), __fmul_rn(attn__float(*x & 0xffff0000), fit));
        }
    }
}

/* ---- softmax ---- */

/* m: largest score; l: sum of weights; o: unnormalised. Of rows g of the item, a quarter of the columns: 2t and 2t + 1 of every 8. */
typedef struct state {
    float m[EIGHTS], l[EIGHTS];
    float2 o[EIGHTS][DT];
} state;

DEVICE state empty_state(const shared_notes &notes) {
    state x;
#pragma unroll
    for (int e = 0; e < EIGHTS; e++) {
        x.m[e] = own_row(notes, e).least;
        x.l[e] = 0;
#pragma unroll
        for (int dt = 0; dt < DT; dt++) x.o[e][dt] = {0, 0};
    }
    return x;
}

/* Semantics 1 to 3, where a product is not a score already. The warp's keys begin with j0; the sequence has so many more keys than rows. */
DEVICE void finish_scores(const attn_cuda_args &a, const shared_notes &notes, float s[EIGHTS * NT][4], int32_t beyond,
                          int32_t j0) {
    const int g = here(threadIdx.x >> 2 & 7);
    const float cap = (float)a.p.softcap;
    float to_y = cap > 0 && !NARROW ? (float)fmin(fmax(2 * a.p.scale / a.p.softcap, -1e38), 1e38) : 0;
#pragma unroll
    for (int r = 0; r < 2 * EIGHTS; r++) {
        const row_notes &row = row_at(notes, r);
        const float raw = row.raw, slope = row.slope, distance = (float)(row.i + beyond - (j0 + g));
        if (NARROW && cap > 0) to_y = raw == raw ? fminf(fmaxf(2 * raw / cap, -1e38f), 1e38f) : raw; /* NaN: a descale's */
#pragma unroll
        for (int n = 0; n < 2 * NT; n++) {
            float *x = &s[r / 2 * NT + n / 2][n % 2 * 2 + r % 2];
            *x = cap > 0 ? capped(*x, cap, to_y) : __fmul_rn(*x, raw); /* by 1, with ALiBi alone */
            if (a.p.flags & ATTN_ALIBI) *x = fmaf(-slope, fabsf(distance - (float)(8 * n)), *x);
        }
    }
}

/* Semantics 5. */
DEVICE void mask_scores(const shared_notes &notes, float s[EIGHTS * NT][4], int32_t j0) {
    const int g = here(threadIdx.x >> 2 & 7);
#pragma unroll
    for (int r = 0; r < 2 * EIGHTS; r++) {
        const row_notes &row = row_at(notes, r);
        const uint32_t from = (uint32_t)(j0 + g - row.first), count = (uint32_t)attn__max32(row.end - row.first, 0);
#pragma unroll
        for (int n = 0; n < 2 * NT; n++)
            if (from + 8 * n >= count) s[r / 2 * NT + n / 2][n % 2 * 2 + r % 2] = -INFINITY;
    }
}

/* Over the lanes with the same t, which have the same rows. */
DEVICE float most_of_lanes(float x) {
#pragma unroll
    for (int by = 4; by < 32; by *= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, by));
    return x;
}
DEVICE float sum_of_lanes(float x) {
#pragma unroll
    for (int by = 4; by < 32; by *= 2) x += __shfl_xor_sync(~0u, x, by);
    return x;
}

/*
 * FACTORS: weights of a stretch become those of the stored values, times a power of two for each row that brings the largest into [1, 2): so
 * what float16 leaves out of P is small beside the largest term of a sum, whatever the factors are. e is that of o so far; o and P get the larger of
 * both, under the new maximum. *by of it is for o then.
 */
DEVICE bool weigh_values(int32_t e[2 * EIGHTS], float by[2 * EIGHTS], float p[STRETCH_TILES][EIGHTS * NT][4],
                         const float factor[STRETCH_TILES][2 * NT]) {
    enum { MOST = 120 };
    bool grew = false;
#pragma unroll
    for (int r = 0; r < 2 * EIGHTS; r++) {
        float most = 0;
#pragma unroll
        for (int n = 0; n < STRETCH_TILES * 2 * NT; n++) {
            float *x = &p[n / (2 * NT)][r / 2 * NT + n % (2 * NT) / 2][n % 2 * 2 + r % 2];
            *x = *x == 0 ? 0 : __fmul_rn(*x, factor[n / (2 * NT)][n % (2 * NT)]); /* what is not seen may have any factor */
            most = fmaxf(most, fabsf(*x));
        }
        const int32_t largest = exponent_of(most_of_lanes(most)), before = e[r] + exponent_of(by[r]);
        const int32_t now = attn__min32(attn__max32(attn__max32(largest, before), -MOST), MOST);
        by[r] = __fmul_rn(by[r], power_of_two(attn__min32(attn__max32(e[r] - now, -127), 127)));
        grew |= by[r] != 1;
        e[r] = now;
#pragma unroll
        for (int n = 0; n < STRETCH_TILES * 2 * NT; n++) {
            float *x = &p[n / (2 * NT)][r / 2 * NT + n % (2 * NT) / 2][n % 2 * 2 + r % 2];
            *x = __fmul_rn(*x, power_of_two(-now));
        }
    }
    return grew;
}

/*
 * P of the team's keys of a stretch, as the right operand: s is their weights then. m, l (the lane's part of it) and o are of the span so far. o is
 * scaled where there is something in it and a maximum has grown: otherwise it would be a product with 1, or of 0. Where scores are huge s - m is
 * taken first, exactly: rows.cuh says why.
 */
DEVICE void make_p(float m[2 * EIGHTS], float l[2 * EIGHTS], float o[EIGHTS * STEPS][4],
                   uint32_t p[STRETCH_TILES][EIGHTS * NT][2], float s[STRETCH_TILES][EIGHTS * NT][4],
                   const shared_notes &notes, int32_t e[2 * EIGHTS], const float factor[STRETCH_TILES][2 * NT]) {
    float by[2 * EIGHTS];
    bool grew = false;
#pragma unroll
    for (int r = 0; r < 2 * EIGHTS; r++) {
        const int half = r % 2;
        const float scale = row_at(notes, r).scale;
        float most = m[r], sum = 0;
#pragma unroll
        for (int n = 0; n < STRETCH_TILES * NT; n++) {
            const float *x = s[n / NT][r / 2 * NT + n % NT];
            most = fmaxf(most, fmaxf(x[half], x[2 + half]));
        }
        most = most_of_lanes(most);
        const float product = __fmul_rn(most, scale);
        const bool is_huge = fabsf(product) > HUGE_SCORE;
        const float minus = is_huge ? most : 0, less = is_huge ? 0 : product;
#pragma unroll
        for (int n = 0; n < STRETCH_TILES * NT; n++) {
            float *x = s[n / NT][r / 2 * NT + n % NT];
            x[half] = ex2_approx(__fmaf_rn(x[half] - minus, scale, -less));
            x[2 + half] = ex2_approx(__fmaf_rn(x[2 + half] - minus, scale, -less));
            sum += x[half] + x[2 + half];
        }
        by[r] = ex2_approx(__fmul_rn(m[r] - most, scale));
        grew |= most > m[r] && l[r] != 0;
        m[r] = most;
        l[r] = __fmaf_rn(l[r], by[r], sum);
    }
    if (FACTORS) grew = weigh_values(e, by, s, factor);
#pragma unroll
    for (int n = 0; n < STRETCH_TILES * EIGHTS * NT; n++) {
        const float *x = s[n / (EIGHTS * NT)][n % (EIGHTS * NT)];
        uint32_t *to = p[n / (EIGHTS * NT)][n % (EIGHTS * NT)];
        to[0] = movmatrix_trans(pack(x[0], x[1]));
        to[1] = movmatrix_trans(pack(x[2], x[3]));
    }
    if (__any_sync(~0u, grew))
#pragma unroll
        for (int n = 0; n < EIGHTS * STEPS * 4; n++)
            o[n / 4][n % 4] = __fmul_rn(o[n / 4][n % 4], by[n / (STEPS * 4) * 2 + n % 2]);
}

/* ---- a span ---- */

/* What a block has all along. */
typedef struct desk {
    uint32_t tiles; /* the team's rows of the first stage, in shared memory */
    uint32_t stage; /* of the tile at hand */
    shared_notes *notes;
    fetcher f;
} desk;

/* Barrier 0 is the block's. */
DEVICE void meet_team(void) {
    if (TEAM == 1)
        __syncwarp();
    else
        bar_sync(1 + threadIdx.x / (32 * TEAM), 32 * TEAM);
}

/* Where the team's rows of the tile at hand are, when they are there. */
DEVICE uint32_t take_tile(const desk &d) {
    cp_async_wait_group(STAGES - 1);
    meet_team();
    return d.tiles + d.stage;
}

/* Nobody reads the tile any more, and another one comes in its place. */
DEVICE void leave_tile(const attn_cuda_args &a, const attn_cuda_args &copy, desk &d) {
    fetch_tile(a, copy, d.f, *d.notes, d.tiles + d.stage);
    d.stage = d.stage == (STAGES - 1) * TILE_BYTES ? 0 : d.stage + TILE_BYTES;
}
DEVICE void leave_tile(const attn_cuda_args &a, desk &d) { leave_tile(a, d.notes->a, d); }

DEVICE uint4 words_of(const float x[4]) {
    return make_uint4(__float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]), __float_as_uint(x[3]));
}

/* Where teams meet, a number of o: columns of a row are exchanged by its number, so that those of rows 2t are in other banks. */
DEVICE uint32_t sum_at(int row, int column) { return 4 * (row * DIM + (column ^ (row >> 1 & 3) * 8)); }

/* A span's o of the lane. */
DEVICE void put_sums(const float o[EIGHTS * STEPS][4], uint32_t to) {
#pragma unroll
    for (int n = 0; n < EIGHTS * STEPS; n++) {
        const uint4 x = words_of(o[n]);
        const int row = row_number(n / STEPS * 2), column = column_of(n % STEPS);
        const uint32_t first = to + sum_at(row, column), second = to + sum_at(row, column + NEXT_COLUMN);
        if (NARROW) {
            st_shared_v2(first, x.x, x.z);
            st_shared_v2(first + 4 * DIM, x.y, x.w);
        } else {
            st_shared_b32(first, x.x);
            st_shared_b32(first + 4 * DIM, x.y);
            st_shared_b32(second, x.z);
            st_shared_b32(second + 4 * DIM, x.w);
        }
    }
}

/*
 * The sums of all teams, in their order; of each column one warp has them. A team's o goes through its rows of the tile at hand, which
 * it has read; NARROW, these may not be large enough, and it has a place of its own.
 */
DEVICE state meet_teams(desk &d, const float m[2 * EIGHTS], const float l[2 * EIGHTS], const float o[EIGHTS * STEPS][4]) {
    const int lane = here(threadIdx.x & 31), warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3, team = warp / TEAM;
    const uint32_t all = d.tiles - team * TEAM_BYTES + (NARROW ? (uint32_t)AT_SUMS : d.stage);
    shared_notes &notes = *d.notes;
    state x;
    put_sums(o, all + team * SUM_STEP);
    if (g == 0 && warp % TEAM == 0)
#pragma unroll
        for (int r = 0; r < 2 * EIGHTS; r++) {
            notes.most[team][row_number(r)] = m[r];
            notes.sum[team][row_number(r)] = l[r];
        }
    __syncthreads();
#pragma unroll
    for (int e = 0; e < EIGHTS; e++) {
        float by[TEAMS], most[TEAMS];
#pragma unroll
        for (int n = 0; n < TEAMS; n++) most[n] = notes.most[n][g + 8 * e];
        x.m[e] = most[0];
        x.l[e] = 0;
#pragma unroll
        for (int n = 1; n < TEAMS; n++) x.m[e] = fmaxf(x.m[e], most[n]);
#pragma unroll
        for (int n = 0; n < TEAMS; n++) {
            by[n] = ex2_approx(__fmul_rn(most[n] - x.m[e], own_row(notes, e).scale));
            x.l[e] = __fmaf_rn(notes.sum[n][g + 8 * e], by[n], x.l[e]);
        }
#pragma unroll
        for (int dt = 0; dt < DT; dt++) {
            float2 *to = &x.o[e][dt];
            *to = {0, 0};
#pragma unroll
            for (int n = 0; n < TEAMS; n++) {
                const uint2 y = ld_shared_v2(all + n * SUM_STEP + sum_at(g + 8 * e, (warp * DT + dt) * 8 + 2 * t));
                to->x = __fmaf_rn(__uint_as_float(y.x), by[n], to->x);
                to->y = __fmaf_rn(__uint_as_float(y.y), by[n], to->y);
            }
        }
    }
    __syncthreads();
    return x;
}

/* What the two warps of a team have of S is added up, by way of a tile that both have read. */
DEVICE void add_scores(float s[EIGHTS * NT][4], uint32_t tile) {
    enum { ALL = EIGHTS * NT * 512 };
    const uint32_t at = tile + here(threadIdx.x & 31) * 16, own = (threadIdx.x >> 5) % TEAM * ALL;
    meet_team();
#pragma unroll
    for (int n = 0; n < EIGHTS * NT; n++) st_shared_v4(at + own + n * 512, words_of(s[n]));
    meet_team();
#pragma unroll
    for (int n = 0; n < EIGHTS * NT; n++) {
        const uint4 y = ld_shared_v4(at + (ALL - own) + n * 512);
        s[n][0] += __uint_as_float(y.x);
        s[n][1] += __uint_as_float(y.y);
        s[n][2] += __uint_as_float(y.z);
        s[n][3] += __uint_as_float(y.w);
    }
}

/* The rows of a table move up by one: a loop that is not unrolled takes the first, or brings the last. */
template <typename T, int EACH> DEVICE void move_up(T x[STRETCH_TILES][EIGHTS * NT][EACH]) {
    enum { ROW = EIGHTS * NT * EACH };
#pragma unroll
    for (int n = 0; n < (STRETCH_TILES - 1) * ROW; n++)
        x[n / ROW][n % ROW / EACH][n % EACH] = x[n / ROW + 1][n % ROW / EACH][n % EACH];
}

/* FACTORS: scores get those of k; those of v are for make_p, as S is, in the last row of `factor`. */
DEVICE void see_factors(const shared_notes &notes, float s[EIGHTS * NT][4], float factor[STRETCH_TILES][2 * NT],
                        uint32_t tile) {
    const uint32_t from = factors_of(notes, tile) + 8 * (threadIdx.x >> 2 & 7);
#pragma unroll
    for (int n = 0; n < (STRETCH_TILES - 1) * 2 * NT; n++)
        factor[n / (2 * NT)][n % (2 * NT)] = factor[n / (2 * NT) + 1][n % (2 * NT)];
#pragma unroll
    for (int n = 0; n < 2 * NT; n++) {
        const uint2 x = ld_shared_v2(from + 64 * n);
        factor[STRETCH_TILES - 1][n] = __uint_as_float(x.y);
#pragma unroll
        for (int r = 0; r < 2 * EIGHTS; r++) {
            float *y = &s[r / 2 * NT + n / 2][n % 2 * 2 + r % 2];
            *y = __fmul_rn(*y, __uint_as_float(x.x));
        }
    }
}

/* S of the stretch's tiles, to the last rows of s; those before have no keys. */
DEVICE void make_scores(const attn_cuda_args &a, const walk &w, const uint32_t q[EIGHTS][STEPS][2], desk &d,
                        float s[STRETCH_TILES][EIGHTS * NT][4], float factor[STRETCH_TILES][2 * NT], int32_t tiles,
                        int32_t j0) {
    const bool is_plain =
        NARROW ? d.notes->is_plain != 0 : !(a.p.softcap > 0) && !(a.p.flags & ATTN_ALIBI) && a.scale_log2 > 0;
#pragma unroll
    for (int n = 0; n < STRETCH_TILES * EIGHTS * NT * 4; n++)
        s[n / (EIGHTS * NT * 4)][n / 4 % (EIGHTS * NT)][n % 4] = -INFINITY;
#pragma unroll 1
    for (int32_t j = j0; j < j0 + tiles * BN; j += BN) {
        float x[EIGHTS * NT][4];
        const uint32_t tile = take_tile(d);
        if (NARROW)
            product_qk_narrow(x, q, tile, a.p.kv_dtype);
        else
            product_qk(x, q, tile);
        if (TEAM > 1) add_scores(x, tile);
        if (FACTORS) see_factors(*d.notes, x, factor, tile);
        meet_team();
        leave_tile(a, d);
        if (!is_plain) finish_scores(a, *d.notes, x, w.s.sk - w.s.sq, j);
        if (j < d.notes->all_from || j + KEYS > d.notes->all_to) mask_scores(*d.notes, x, j);
        move_up<float, 4>(s);
#pragma unroll
        for (int n = 0; n < EIGHTS * NT * 4; n++) s[STRETCH_TILES - 1][n / 4][n % 4] = x[n / 4][n % 4];
    }
}

/* To O of the warp's columns, from the last rows of p. The span's last tile is not left yet if teams meet there. */
DEVICE void add_values(const attn_cuda_args &a, const walk &w, desk &d, float o[EIGHTS * STEPS][4],
                       uint32_t p[STRETCH_TILES][EIGHTS * NT][2], int32_t tiles, int32_t j0, bool is_end) {
    const int first = first_piece();
#pragma unroll 1
    for (int32_t n = tiles; n < STRETCH_TILES; n++) move_up<uint32_t, 2>(p);
#pragma unroll 1
    for (int32_t j = j0;; j += BN) {
        const uint32_t shared_v = take_tile(d);
        const int32_t from = attn__max32(j, w.from), to = attn__min32(j + KEYS, w.to);
        if ((from < d.notes->all_from || to > d.notes->all_to) && holds_nonfinite(shared_v, first, a.p.kv_dtype)) {
            float copy[EIGHTS * STEPS][4]; /* else o would be in memory all along */
            uint32_t weights[EIGHTS * NT][2];
#pragma unroll
            for (int n = 0; n < EIGHTS * STEPS * 4; n++) copy[n / 4][n % 4] = o[n / 4][n % 4];
#pragma unroll
            for (int n = 0; n < EIGHTS * NT * 2; n++) weights[n / 2][n % 2] = p[0][n / 2][n % 2];
            add_nonfinite(copy, weights, shared_v, first, a.p.kv_dtype);
#pragma unroll
            for (int n = 0; n < EIGHTS * STEPS * 4; n++) o[n / 4][n % 4] = copy[n / 4][n % 4];
        }
        if (NARROW)
            product_pv_narrow(o, p[0], shared_v, first, a.p.kv_dtype);
        else
            product_pv(o, p[0], shared_v, first);
        meet_team();
        tiles--;
        if (tiles == 0 && is_end && !NARROW) return;
        leave_tile(a, d);
        if (tiles == 0) return;
        move_up<uint32_t, 2>(p);
    }
}

/* Span `span` of the item, counted from w.first, or so many from there on as one. */
DEVICE state work_span(const attn_cuda_args &a, const walk &w, const uint32_t q[EIGHTS][STEPS][2], desk &d, int32_t span,
                       int32_t together) {
    int32_t tiles = attn__min32(together * SPAN_TILES, w.tiles - span * SPAN_TILES);
    int32_t j0 = (w.first + span) * SPAN + (int32_t)(threadIdx.x / (32 * TEAM)) * KEYS; /* the team's first key */
    float m[2 * EIGHTS], l[2 * EIGHTS], o[EIGHTS * STEPS][4];
    int32_t e[2 * EIGHTS]; /* FACTORS: o is so many powers of two too small */
    if (tiles <= 0) return empty_state(*d.notes);
#pragma unroll
    for (int r = 0; r < 2 * EIGHTS; r++) m[r] = row_at(*d.notes, r).least, l[r] = 0, e[r] = 0;
#pragma unroll
    for (int n = 0; n < EIGHTS * STEPS * 4; n++) o[n / 4][n % 4] = 0;
#pragma unroll 1
    for (; tiles > 0; tiles -= STRETCH_TILES, j0 += STRETCH_TILES * BN) {
        const int32_t some = attn__min32(STRETCH_TILES, tiles);
        float s[STRETCH_TILES][EIGHTS * NT][4];
        float factor[STRETCH_TILES][2 * NT] = {};
        uint32_t p[STRETCH_TILES][EIGHTS * NT][2];
        make_scores(a, w, q, d, s, factor, some, j0);
        make_p(m, l, o, p, s, *d.notes, e, factor);
        add_values(a, w, d, o, p, some, j0, some == tiles);
    }
#pragma unroll
    for (int r = 0; r < 2 * EIGHTS; r++) l[r] = sum_of_lanes(l[r]);
    if (FACTORS)
#pragma unroll
        for (int n = 0; n < EIGHTS * STEPS * 4; n++)
            o[n / 4][n % 4] = __fmul_rn(o[n / 4][n % 4], power_of_two(e[n / (STEPS * 4) * 2 + n % 2]));
    const state x = meet_teams(d, m, l, o);
    if (!NARROW) leave_tile(a, d);
    return x;
}

/* ---- partial results ---- */

/* x becomes that of x and y. Either may be empty, and then this is exact. */
DEVICE void fold(state &x, const state &y, const shared_notes &notes) {
#pragma unroll
    for (int e = 0; e < EIGHTS; e++) {
        const float scale = own_row(notes, e).scale, m = fmaxf(x.m[e], y.m[e]);
        const float by_x = ex2_approx(__fmul_rn(x.m[e] - m, scale)), by_y = ex2_approx(__fmul_rn(y.m[e] - m, scale));
        x.m[e] = m;
        x.l[e] = __fmaf_rn(x.l[e], by_x, __fmul_rn(y.l[e], by_y));
#pragma unroll
        for (int dt = 0; dt < DT; dt++) {
            float2 *o = &x.o[e][dt];
            o->x = __fmaf_rn(o->x, by_x, __fmul_rn(y.o[e][dt].x, by_y));
            o->y = __fmaf_rn(o->y, by_x, __fmul_rn(y.o[e][dt].y, by_y));
        }
    }
}

/* A slot of the workspace: o[rows][DIM], then m and l of each row. */
DEVICE float *slot_at(const attn_cuda_decode &c, float *slots, int64_t n) { return slots + n * c.rows * (DIM + 2); }

DEVICE void put_state(const attn_cuda_decode &c, float *slot, const state &x, int32_t rows) {
    const int lane = here(threadIdx.x & 31), warp = threadIdx.x >> 5, t = lane & 3;
#pragma unroll
    for (int e = 0; e < EIGHTS; e++) {
        const int row = (lane >> 2) + 8 * e;
        if (row >= rows) continue;
#pragma unroll
        for (int dt = 0; dt < DT; dt++)
            st_global_cg_v2(slot + row * DIM + (warp * DT + dt) * 8 + 2 * t, x.o[e][dt].x, x.o[e][dt].y);
        if (warp == 0 && t == 0) st_global_cg_v2(slot + c.rows * DIM + 2 * row, x.m[e], x.l[e]);
    }
}

/* The block has put `done` of `all` results where others may want them. Is it the last, and so to fold them? */
DEVICE bool is_last(uint64_t *counter, uint32_t done, uint32_t all, shared_notes &notes) {
    __syncthreads();
    if (threadIdx.x == 0) notes.last = count_to(counter, done, all);
    __syncthreads();
    return notes.last;
}

/* ---- results ---- */

/* Whole rows of the line's dtype, so that pairs of numbers are stored at once. */
DEVICE bool stores_pairs(const attn_cuda_args &a) {
    const bool is_packed = NARROW ? a.p.out_dtype != ATTN_F32 : a.p.out_dtype == (attn_dtype)K(DTYPE);
    return a.vector_ok && is_packed && a.p.dim_v == DIM;
}

/* Two numbers, or one, or none, of any dtype at any address. */
static __device__ __noinline__ void store_elements(const attn_cuda_args &a, int64_t at, int32_t columns, float x, float y) {
    if (columns <= 0) return;
    if (a.p.out_dtype == ATTN_F32) {
        ((float *)a.f.o.data)[at] = x;
        if (columns > 1) ((float *)a.f.o.data)[at + 1] = y;
    } else {
        const uint32_t both = a.p.out_dtype == ATTN_BF16 ? cvt_rn_bf16x2(x, y) : cvt_rn_f16x2(x, y);
        ((uint16_t *)a.f.o.data)[at] = (uint16_t)both;
        if (columns > 1) ((uint16_t *)a.f.o.data)[at + 1] = (uint16_t)(both >> 16);
    }
}

/* Of a row: where its o is, and what o is multiplied with. */
typedef struct ending {
    int64_t at;
    float factor, keys;
} ending;

/* Writes lse, if one of the row's lanes is to do it. As finish_o of rows.cuh. */
DEVICE ending end_row(const attn_cuda_args &a, const walk &w, const row_notes &r, float m, float sum, bool writes) {
    float lse = sum == 0 ? -INFINITY : lse_of(m, r.scale, sum);
    ending e = {attn__q_offset(&a.p, &a.f.o, &w.s, r.i, r.h), sum == 0 ? 0 : rcp_approx(sum), 1};
    if (a.p.flags & ATTN_SINK) lse = add_sink(lse, a.f.sink[r.h], &e.keys);
    if (NARROW && sum != 0) e.keys = __fmul_rn(e.keys, (float)value_scale(a, w.s, w.head));
    if (a.f.lse && writes) ((float *)a.f.lse)[attn__lse_index(&a.p, &w.s, r.i, r.h)] = lse;
    return e;
}
DEVICE float finished(float o, const ending &e) { return __fmul_rn(__fmul_rn(o, e.factor), e.keys); }

/* o and lse of the item's rows. */
DEVICE void finish_item(const attn_cuda_args &a, const walk &w, const shared_notes &notes, const state &x) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, t = lane & 3;
    const bool is_whole = stores_pairs(a);
    const int32_t first = warp * DT * 8 + 2 * t;
#pragma unroll
    for (int e = 0; e < EIGHTS; e++) {
        const row_notes &r = own_row(notes, e);
        if (r.i < 0) continue;
        const ending end = end_row(a, w, r, x.m[e], x.l[e], warp == 0 && t == 0);
        if (is_whole) {
            uint16_t *row = (uint16_t *)a.f.o.data + end.at + first;
#pragma unroll
            for (int dt = 0; dt < DT; dt++)
                *(uint32_t *)(row + dt * 8) = pack_out(a, finished(x.o[e][dt].x, end), finished(x.o[e][dt].y, end));
        } else {
#pragma unroll
            for (int dt = 0; dt < DT; dt++) {
                const int32_t column = first + dt * 8;
                store_elements(a, end.at + column, a.p.dim_v - column, finished(x.o[e][dt].x, end),
                               finished(x.o[e][dt].y, end));
            }
        }
    }
}

/* Of a row of some slots, of which so many are there, the lane's columns. */
template <int SOME, int PAIRS> DEVICE void get_some(float2 y[SOME][PAIRS], const float *from, int64_t step, int32_t count) {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int n = 0; n < SOME; n++)
#pragma unroll
        for (int k = 0; k < PAIRS; k++) {
            const int column = 64 * k + 2 * lane;
            y[n][k] = {0, 0};
            if (n < count && column < DIM) y[n][k] = ld_global_cg_v2(from + n * step + column);
        }
}

/*
 * So many slots in their order, as fold does it: to a slot, or (NULL) to the results. A warp has every fourth row; a lane finds the
 * factors of one slot of 32, and fetches two columns in 64 of some slots at a time.
 */
DEVICE void fold_slots(const attn_cuda_decode &c, const walk &w, const shared_notes &notes, const float *slots,
                       int32_t count, int32_t rows, float *to) {
    enum { PAIRS = (DIM + 63) / 64, SOME = PAIRS > 3 ? 8 : 16 };
    const int lane = threadIdx.x & 31;
    const int64_t step = (int64_t)c.rows * (DIM + 2);
#pragma unroll 1
    for (int32_t row = (int32_t)(threadIdx.x >> 5); row < rows; row += WARPS) {
        const row_notes &r = notes.row[row];
        float m = r.least, l = 0;
        float2 o[PAIRS];
#pragma unroll
        for (int n = 0; n < PAIRS; n++) o[n] = {0, 0};
#pragma unroll 1
        for (int32_t n0 = 0; n0 < count; n0 += 32) {
            const float *from = slots + n0 * step;
            float2 number = {r.least, 0}; /* m and l */
            float2 y[SOME][PAIRS];
            if (n0 + lane < count) number = ld_global_cg_v2(from + lane * step + c.rows * DIM + 2 * row);
            get_some<SOME, PAIRS>(y, from + row * DIM, step, count - n0);
            float most = fmaxf(m, number.x);
            for (int by = 1; by < 32; by *= 2) {
                const float other = __shfl_sync(~0u, most, (lane - by) & 31);
                if (lane >= by) most = fmaxf(most, other);
            }
            const float shuffled = __shfl_sync(~0u, most, (lane - 1) & 31), before = lane ? shuffled : m;
            const float by_x = ex2_approx(__fmul_rn(before - most, r.scale)),
                        by_y = ex2_approx(__fmul_rn(number.x - most, r.scale));
            const float term = __fmul_rn(number.y, by_y);
            m = __shfl_sync(~0u, most, 31);
#pragma unroll 1
            for (int32_t n1 = 0;;) {
#pragma unroll
                for (int n = 0; n < SOME; n++) {
                    const float x1 = __shfl_sync(~0u, by_x, n1 + n), y1 = __shfl_sync(~0u, by_y, n1 + n);
                    l = __fmaf_rn(l, x1, __shfl_sync(~0u, term, n1 + n));
#pragma unroll
                    for (int k = 0; k < PAIRS; k++) {
                        o[k].x = __fmaf_rn(o[k].x, x1, __fmul_rn(y[n][k].x, y1));
                        o[k].y = __fmaf_rn(o[k].y, x1, __fmul_rn(y[n][k].y, y1));
                    }
                }
                n1 += SOME;
                if (n1 >= attn__min32(32, count - n0)) break;
                get_some<SOME, PAIRS>(y, from + n1 * step + row * DIM, step, count - n0 - n1);
            }
        }
        const ending e = to ? ending{0, 0, 0} : end_row(c.a, w, r, m, l, lane == 0);
#pragma unroll
        for (int k = 0; k < PAIRS; k++) {
            const int32_t column = 64 * k + 2 * lane;
            if (column >= DIM) continue;
            if (to)
                st_global_cg_v2(to + row * DIM + column, o[k].x, o[k].y);
            else if (stores_pairs(c.a))
                *(uint32_t *)((uint16_t *)c.a.f.o.data + e.at + column) =
                    pack_out(c.a, finished(o[k].x, e), finished(o[k].y, e));
            else
                store_elements(c.a, e.at + column, c.a.p.dim_v - column, finished(o[k].x, e), finished(o[k].y, e));
        }
        if (to && lane == 0) st_global_cg_v2(to + c.rows * DIM + 2 * row, m, l);
    }
}

/* ---- the block's part of an item ---- */

/* A super of the item, and what the block has of it; spans are counted as w.span. */
typedef struct super_part {
    int32_t first, end; /* its spans */
    int32_t from, to;   /* those that are the block's */
    int32_t shared;     /* its number among the supers that several blocks have */
} super_part;

/* Spans of it that are worked as one. */
DEVICE int32_t together_in(const walk &w, const super_part &x) { return w.first + x.first >= PAIRS_FROM ? 2 : 1; }

DEVICE bool is_whole(const super_part &x) { return x.from == x.first && x.to == x.end; }

/* Those that blocks share are numbered by item, or by the block whose share ends in them; each ends in one. */
DEVICE super_part see_super(const attn_cuda_decode &c, const walk &w, const share &mine, int32_t super) {
    super_part x;
    x.first = attn__max32(super * SUPER - w.first, 0);
    x.end = attn__min32((super + 1) * SUPER - w.first, spans_of(w));
    x.from = attn__max32(x.first, w.span);
    x.to = attn__min32(x.end, w.span_end);
    x.shared = -1;
    if (is_whole(x)) return x;
    const int32_t item = (w.s.b * c.a.p.heads_kv + w.head) * c.blocks + w.block;
    const int64_t begins = w.before + (int64_t)x.first * SPAN_TILES;
    x.shared = c.by_item ? item * c.supers + super : (int32_t)quotient(begins * gridDim.x, mine.all);
    return x;
}

/* The block's spans of a super: in x if they are all of them. */
DEVICE void work_super(const attn_cuda_decode &c, const super_part &s, const walk &w, const uint32_t q[EIGHTS][STEPS][2],
                       desk &d, state &x) {
    const int32_t together = together_in(w, s);
    float *slot = is_whole(s) ? NULL : slot_at(c, c.spans, (int64_t)s.shared * c.each + (s.from - s.first) / together);
    x = empty_state(*d.notes);
#pragma unroll 1
    for (int32_t span = s.from; span < s.to; span += together) {
        const state y = work_span(c.a, w, q, d, span, together);
        if (slot) {
            put_state(c, slot, y, d.notes->rows);
            slot = slot_at(c, slot, 1);
        } else {
            fold(x, y, *d.notes);
        }
    }
}

/* What comes then: of the super, if it is done, and of the item. */
DEVICE void end_super(const attn_cuda_decode &c, const super_part &s, const walk &w, const state &x, desk &d, int32_t count,
                      int32_t super) {
    const int32_t first = w.first / SUPER, supers = (w.first + spans_of(w) - 1) / SUPER - first + 1;
    const int32_t item = (w.s.b * c.a.p.heads_kv + w.head) * c.blocks + w.block;
    float *slots = slot_at(c, c.super_slots, (int64_t)item * c.supers),
          *slot = supers > 1 ? slot_at(c, slots, super) : NULL;
    const float *from = NULL; /* slots to fold */
    int32_t some = 0;
    if (!is_whole(s)) {
        if (!is_last(&c.counters[s.shared], (uint32_t)(s.to - s.from), (uint32_t)(s.end - s.first), *d.notes)) return;
        from = slot_at(c, c.spans, (int64_t)s.shared * c.each);
        some = (s.end - s.first + together_in(w, s) - 1) / together_in(w, s);
    } else if (slot) {
        put_state(c, slot, x, count);
    } else {
        finish_item(c.a, w, *d.notes, x);
    }
#pragma unroll 1
    for (;;) {
        if (from) fold_slots(c, w, *d.notes, from, some, count, slot);
        if (!slot || !is_last(&c.counters[c.shared + item], 1, (uint32_t)supers, *d.notes)) return;
        from = slot_at(c, slots, first);
        some = supers;
        slot = NULL;
    }
}

DEVICE void work_part(const attn_cuda_decode &c, const walk &w, desk &d) {
    uint32_t q[EIGHTS][STEPS][2];
    load_q(c.a, w, q);
    const bool wants_fit = NARROW && c.a.p.dtype == ATTN_BF16;
    if (wants_fit) measure_q(q, *d.notes);
    see_rows(c.a, w, *d.notes);
    if (wants_fit) fit_q(q, *d.notes);
    state x;
#pragma unroll 1
    for (int32_t super = (w.first + w.span) / SUPER; super * SUPER - w.first < w.span_end; super++) {
        work_super(c, see_super(c, w, d.notes->list.mine, super), w, q, d, x);
        super = here(super); /* where the super is, is found out again: meanwhile registers are scarce */
        end_super(c, see_super(c, w, d.notes->list.mine, super), w, x, d, d.notes->rows, super);
    }
}

KERNEL __launch_bounds__(THREADS, K(CTAS)) VARIANT(const __grid_constant__ attn_cuda_decode c) {
    extern __shared__ __align__(128) uint8_t shared[];
    const attn_cuda_args &a = c.a;
    shared_notes &notes = *(shared_notes *)(shared + AT_NOTES);
    griddepcontrol_launch_dependents();
    if (a.p.flags & ATTN_OWN_LENGTHS) griddepcontrol_wait(); /* else the block's share follows from the arguments alone */
    const int warp = threadIdx.x >> 5;
    walk first, &w = notes.work[warp];
    const bool has_work = start_walk(a, notes.list, first);
    griddepcontrol_wait();
    if (!has_work) return;
    if ((threadIdx.x & 31) == 0) notes.work[warp] = notes.ahead[warp] = first;
    if (a.fuses) copy_args(a, notes.a);
    __syncthreads();
    if (a.fuses) bring_new(notes);
    desk d = {cvta_shared(shared) + warp / TEAM * TEAM_BYTES, 0, &notes, start_fetch(a, notes)};
#pragma unroll 1
    for (int n = 0; n < STAGES; n++) leave_tile(a, a, d);
    if (!a.fuses) copy_args(a, notes.a);
    if (a.fuses && (a.p.flags & ATTN_ROTARY)) __syncthreads(); /* q is there */
    do {
        work_part(c, w, d);
        const bool pads = !(a.p.flags & ATTN_VARLEN_Q) && a.p.max_q <= ATTN_CUDA_SPLIT_ROWS;
        if (pads && w.block == 0 && w.span == 0 && w.s.sq < a.p.max_q) fill_padding(a, w.s.b, w.head, w.s.sq, THREADS);
    } while (next_part(a, w, notes.list.mine));
    cp_async_wait_all();
}
