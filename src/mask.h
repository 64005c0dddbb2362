/*
 * Mask semantics, once, for C and CUDA: which (row, key) pairs are allowed, and what a tile of them is.
 *
 * Causal and window are one thing here: row i sees the keys i + offset - left <= j <= i + offset + right inside [0, sk), with
 * offset = sk - sq. Causal is right = 0. An open side is ATTN_OPEN, which is large enough to reach past any sequence and
 * small enough that none of the sums below leaves 32 bits (sequences are at most 2^30 long).
 *
 * FlashMask adds, for each key, up to two half-open intervals of rows that are masked. Vectors are brought to one form,
 * masked = [v0, v1) or [v2, v3), by attn__flash_load, so that the four kinds are told apart in one place.
 */
#ifndef ATTN_MASK_H
#define ATTN_MASK_H

#include <stdint.h>

#ifdef __CUDACC__
#define ATTN_HD static __host__ __device__ __forceinline__
#else
#define ATTN_HD static inline
#endif

#define ATTN_OPEN (1 << 30)

enum { ATTN_TILE_SKIP = 0, ATTN_TILE_FULL = 1, ATTN_TILE_PARTIAL = 2 };

typedef struct attn_mask {
    int32_t sq, sk;      /* rows and keys of this sequence */
    int32_t left, right; /* ATTN_OPEN: no limit on that side */
    int32_t vectors;     /* FlashMask vectors: 0, 1, 2, 4 */
    int32_t causal;      /* tells the two meanings of two vectors apart */
} attn_mask;

/* Masked rows of one key, [v[0], v[1]) and [v[2], v[3]). */
typedef struct attn_flash {
    int32_t v[4];
} attn_flash;

/* The same over a range of keys: minimum and maximum of each bound. */
typedef struct attn_flash_range {
    int32_t min[4], max[4];
} attn_flash_range;

ATTN_HD int32_t attn__min32(int32_t a, int32_t b) { return a < b ? a : b; }
ATTN_HD int32_t attn__max32(int32_t a, int32_t b) { return a > b ? a : b; }

/* left and right as in attn_problem (-1: open); causal closes the right side at the diagonal. */
ATTN_HD attn_mask attn__mask_make(int32_t sq, int32_t sk, int causal, int window, int32_t left, int32_t right,
                                  int32_t vectors) {
    attn_mask m;
    m.sq = sq;
    m.sk = sk;
    m.left = !window || left < 0 || left > ATTN_OPEN ? ATTN_OPEN : left;
    m.right = !window || right < 0 || right > ATTN_OPEN ? ATTN_OPEN : right;
    if (causal) m.right = 0;
    m.vectors = vectors;
    m.causal = causal;
    return m;
}

/* Keys [*first, *end) that row i may see before FlashMask; empty when *first >= *end. */
ATTN_HD void attn__mask_row(const attn_mask *m, int32_t i, int32_t *first, int32_t *end) {
    int32_t diagonal = i + (m->sk - m->sq);
    *first = attn__max32(diagonal - m->left, 0);
    *end = m->right >= ATTN_OPEN ? m->sk : attn__min32(diagonal + m->right, m->sk - 1) + 1;
}

/* Keys that any of the rows [i0, i1) may see before FlashMask. */
ATTN_HD void attn__mask_rows(const attn_mask *m, int32_t i0, int32_t i1, int32_t *first, int32_t *end) {
    int32_t unused;
    attn__mask_row(m, i0, first, &unused);
    attn__mask_row(m, i1 - 1, &unused, end);
}

/* Keys that all of the rows [i0, i1) may see before FlashMask. */
ATTN_HD void attn__mask_rows_all(const attn_mask *m, int32_t i0, int32_t i1, int32_t *first, int32_t *end) {
    int32_t unused;
    attn__mask_row(m, i1 - 1, first, &unused);
    attn__mask_row(m, i0, &unused, end);
}

/* Rows [*first, *end) that may see any of the keys [j0, j1) before FlashMask. */
ATTN_HD void attn__mask_cols(const attn_mask *m, int32_t j0, int32_t j1, int32_t *first, int32_t *end) {
    int32_t offset = m->sk - m->sq;
    *first = m->right >= ATTN_OPEN ? 0 : attn__max32(j0 - offset - m->right, 0);
    *end = m->left >= ATTN_OPEN ? m->sq : attn__min32(j1 - 1 - offset + m->left, m->sq - 1) + 1;
}

/* Rows that may see all of the keys [j0, j1), which are all there, before FlashMask. */
ATTN_HD void attn__mask_cols_all(const attn_mask *m, int32_t j0, int32_t j1, int32_t *first, int32_t *end) {
    int32_t unused;
    attn__mask_cols(m, j1 - 1, j1, first, &unused);
    attn__mask_cols(m, j0, j0 + 1, &unused, end);
}

/* The vectors of one key in their common form; p points to m->vectors numbers. */
ATTN_HD attn_flash attn__flash_load(const attn_mask *m, const int32_t *p) {
    attn_flash f = {{0, 0, 0, 0}};
    f.v[0] = p[0];
    if (m->vectors == 1) { /* rows >= p0 */
        f.v[1] = INT32_MAX;
    } else if (m->vectors == 4) { /* p0 <= rows < p1, or p2 <= rows < p3 */
        f.v[1] = p[1];
        f.v[2] = p[2];
        f.v[3] = p[3];
    } else if (m->causal) { /* p0 <= rows < p1 */
        f.v[1] = p[1];
    } else { /* rows >= p0, or rows < p1 */
        f.v[1] = INT32_MAX;
        f.v[3] = p[1];
    }
    return f;
}

ATTN_HD int attn__flash_masked(attn_flash f, int32_t i) {
    return (i >= f.v[0] && i < f.v[1]) || (i >= f.v[2] && i < f.v[3]);
}

ATTN_HD void attn__flash_extend(attn_flash_range *r, attn_flash f, int is_first) {
    for (int n = 0; n < 4; n++) {
        r->min[n] = is_first ? f.v[n] : attn__min32(r->min[n], f.v[n]);
        r->max[n] = is_first ? f.v[n] : attn__max32(r->max[n], f.v[n]);
    }
}

/* The element predicate. flash: the vectors of key j, ignored when there are none. */
ATTN_HD int attn__mask_allowed(const attn_mask *m, int32_t i, int32_t j, const int32_t *flash) {
    int32_t first, end;
    attn__mask_row(m, i, &first, &end);
    if (j < first || j >= end || i >= m->sq) return 0;
    return m->vectors == 0 || !attn__flash_masked(attn__flash_load(m, flash), i);
}

/*
 * Class of the tile rows [i0, i1) x keys [j0, j1), which must not be empty and may reach past sk (the keys there are masked).
 * `range` covers at least the tile's keys below sk; NULL when there is no FlashMask.
 */
ATTN_HD int attn__mask_tile(const attn_mask *m, int32_t i0, int32_t i1, int32_t j0, int32_t j1,
                            const attn_flash_range *range) {
    int32_t first, end, first_all, end_all;
    attn__mask_rows(m, i0, i1, &first, &end);
    if (j0 >= end || j1 <= first) return ATTN_TILE_SKIP;
    attn__mask_rows_all(m, i0, i1, &first_all, &end_all);
    int full = j0 >= first_all && j1 <= end_all;
    if (range) {
        for (int n = 0; n < 4; n += 2) {
            if (i0 >= range->max[n] && i1 <= range->min[n + 1]) return ATTN_TILE_SKIP; /* every key masks every row */
            int may_mask = range->min[n] < i1 && range->max[n + 1] > i0;               /* some key may mask some row */
            if (may_mask) full = 0;
        }
    }
    return full ? ATTN_TILE_FULL : ATTN_TILE_PARTIAL;
}

#endif
