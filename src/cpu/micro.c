/*
 * Micro-kernels in C with the compiler's vector types, compiled once per ISA (ATTN_ISA, which sets the vector length) and
 * per number type; intrinsics, and in block_avx512.h assembly, where a measurement said that an ISA gains by them.
 *
 * Every sum runs in the order of its index whatever the blocking, so a row gives the same bits in any tile; but for the sign of a zero among
 * scores, which no result shows, and which of two NaN a sum keeps: results have one kind of NaN only.
 */
#include "micro.h"

#include <math.h>
#include <string.h>

#include "../numeric.h"
#include "../schedule.h"
#include "compiler.h"
#include "simd.h"

/* ---- products ---- */

#if defined(__AVX512F__)
#include "block_avx512.h"
#define BY_ROWS(mr, call, ...)                                                                                             \
    switch (mr) {                                                                                                          \
    case 6: call##_6(__VA_ARGS__); break;                                                                                  \
    case 5: call##_5(__VA_ARGS__); break;                                                                                  \
    case 4: call##_4(__VA_ARGS__); break;                                                                                  \
    case 3: call##_3(__VA_ARGS__); break;                                                                                  \
    case 2: call##_2(__VA_ARGS__); break;                                                                                  \
    default: call##_1(__VA_ARGS__); break;                                                                                 \
    }
INLINE bool block_by_hand(const int mr, const int nv, const attn_dtype of, real *c, int64_t ldc, const real *a, int64_t row,
                          int64_t col, const real *b, int64_t ldb, int32_t k, bool accumulate) {
    const int64_t B = sizeof(real);
    if (nv != NV || of != REAL_DTYPE || k <= 0) return false;
    if (row == 1)
        BY_ROWS(mr, across, (char *)c, ldc * B, (const char *)a, col * B, (const char *)b, ldb * B, k, accumulate)
    else if (col == 1)
        BY_ROWS(mr, along, (char *)c, ldc * B, NULL, (const char *)a, row * B, (const char *)b, ldb * B, k, accumulate)
    return row == 1 || col == 1;
}
#elif defined(ATTN_NEON) && !defined(ATTN_REAL_F64)
#include "block_neon.h"
INLINE bool block_by_hand(const int mr, const int nv, const attn_dtype of, real *c, int64_t ldc, const real *a, int64_t row,
                          int64_t col, const real *b, int64_t ldb, int32_t k, bool accumulate) {
    const int64_t B = sizeof(real);
    if (mr != MR || nv != NV || of != REAL_DTYPE || k <= 0) return false;
    if (row == 1)
        block_across((char *)c, ldc * B, (const char *)a, col * B, (const char *)b, ldb * B, k, accumulate);
    else if (col == 1)
        block_along((char *)c, ldc * B, (const char *)a, row * B, (const char *)b, ldb * B, k, accumulate);
    return row == 1 || col == 1;
}
#else
INLINE bool block_by_hand(const int mr, const int nv, const attn_dtype of, real *c, int64_t ldc, const real *a, int64_t row,
                          int64_t col, const real *b, int64_t ldb, int32_t k, bool accumulate) {
    (void)mr, (void)nv, (void)of, (void)c, (void)ldc, (void)a, (void)row, (void)col, (void)b, (void)ldb, (void)k;
    return (void)accumulate, false;
}
#endif

/*
 * mr x nv vectors of the product stay in registers over the whole of k. They start from zero and meet c only at the end: a sum
 * over thousands of keys is so made of short sums, and its rounding error grows with their number, not with that of the keys.
 */
INLINE void block(const int mr, const int nv, const attn_dtype of, real *c, int64_t ldc, const real *a, int64_t row,
                  int64_t col, const void *b, int64_t at, int64_t ldb, int32_t k, bool accumulate) {
    if (block_by_hand(mr, nv, of, c, ldc, a, row, col, (const real *)b + at, ldb, k, accumulate)) return;
    vreal acc[MR][NV];
    UNROLL for (int i = 0; i < mr; i++) { UNROLL for (int v = 0; v < nv; v++) acc[i][v] = (vreal){0}; }
    for (int32_t n = 0; n < k; n++) {
        vreal bv[NV];
        UNROLL for (int v = 0; v < nv; v++) bv[v] = load_any(of, b, at + v * VL);
        UNROLL for (int i = 0; i < mr; i++) {
            vreal av = splat_from(a + i * row);
            UNROLL for (int v = 0; v < nv; v++) acc[i][v] = fused(av, bv[v], acc[i][v]);
        }
        a += col;
        at += ldb;
    }
    UNROLL for (int i = 0; i < mr; i++) {
        UNROLL for (int v = 0; v < nv; v++) {
            real *to = c + i * ldc + v * VL;
            store(to, accumulate ? load(to) + acc[i][v] : acc[i][v]);
        }
    }
}

/* All rows for nv vectors of columns, of which the first is at place `at` of b. */
INLINE void panel(const int nv, const attn_dtype of, real *c, int64_t ldc, const real *a, int64_t row, int64_t col,
                  const void *b, int64_t at, int64_t ldb, int32_t m, int32_t k, bool accumulate) {
#if defined(ATTN_NEON) && !defined(ATTN_REAL_F64)
    const int64_t B = sizeof(real);
    for (; nv == NV && of == REAL_DTYPE && row == 1 && k > 0 && m >= 6; m -= 6, c += 6 * ldc, a += 6)
        block_across_6((char *)c, ldc * B, (const char *)a, col * B, (const char *)b + at * B, ldb * B, k, accumulate);
#endif
    for (; m >= MR; m -= MR, c += MR * ldc, a += MR * row)
        block(MR, nv, of, c, ldc, a, row, col, b, at, ldb, k, accumulate);
    switch (m) {
#if !defined(ATTN_NEON)
    case 5: block(5, nv, of, c, ldc, a, row, col, b, at, ldb, k, accumulate); break;
    case 4: block(4, nv, of, c, ldc, a, row, col, b, at, ldb, k, accumulate); break;
#endif
    case 3: block(3, nv, of, c, ldc, a, row, col, b, at, ldb, k, accumulate); break;
    case 2: block(2, nv, of, c, ldc, a, row, col, b, at, ldb, k, accumulate); break;
    case 1: block(1, nv, of, c, ldc, a, row, col, b, at, ldb, k, accumulate); break;
    default: break;
    }
}

INLINE void product(const attn_dtype of, real *c, int64_t ldc, const real *a, int64_t row, int64_t col, const void *b,
                    int64_t ldb, int32_t m, int32_t n, int32_t k, bool accumulate) {
    int32_t x = 0;
    for (; x + NV * VL <= n; x += NV * VL) panel(NV, of, c + x, ldc, a, row, col, b, x, ldb, m, k, accumulate);
    for (; x < n; x += VL) panel(1, of, c + x, ldc, a, row, col, b, x, ldb, m, k, accumulate);
}

static void micro_gemm(real *c, int64_t ldc, const real *a, int64_t row, int64_t col, const real *b, int64_t ldb, int32_t m,
                       int32_t n, int32_t k, bool accumulate) {
    product(REAL_DTYPE, c, ldc, a, row, col, b, ldb, m, n, k, accumulate);
}

/* ---- dot products ---- */

#if defined(__AVX512F__)
/* One group, of dim <= GROUP dims, by hand: blocks meet in s if this is the first group, or else in a place of their own and then s. */
INLINE bool dots_by_blocks(const int mr, const int nv, real *s, int32_t width, const real *k, int64_t ldk, const real *q_t,
                           int32_t ldq, int32_t dim, bool accumulate) {
    const int64_t B = sizeof(real), lds = width * B, ldg = NV * VL * B;
    if (nv != NV) return false;
    real group[MR * NV * VL] __attribute__((aligned(64)));
    for (int32_t n = 0, some; n < dim; n += some) {
        some = dim - n < BLOCK ? dim - n : BLOCK;
        const bool last = n + some == dim, here = !accumulate || last;
        BY_ROWS(mr, along, (char *)(here ? s : group), here ? lds : ldg, accumulate && last && n > 0 ? (char *)group : NULL,
                (const char *)(k + n), ldk * B, (const char *)(q_t + (int64_t)n * ldq), ldq * B, some,
                accumulate ? last || n > 0 : n > 0)
    }
    return true;
}
#else
INLINE bool dots_by_blocks(const int mr, const int nv, real *s, int32_t width, const real *k, int64_t ldk, const real *q_t,
                           int32_t ldq, int32_t dim, bool accumulate) {
    (void)mr, (void)nv, (void)s, (void)width, (void)k, (void)ldk, (void)q_t, (void)ldq, (void)dim;
    return (void)accumulate, false;
}
#endif

/*
 * One group, of dim <= GROUP dims: mr keys against nv vectors of rows. Blocks meet in a place of their own, at distances that the
 * compiler knows, and then s, unless this is the first group.
 */
INLINE void dots_block(const int mr, const int nv, real *s, int32_t width, const real *k, int64_t ldk, const real *q_t,
                       int32_t ldq, int32_t dim, bool accumulate) {
    if (dots_by_blocks(mr, nv, s, width, k, ldk, q_t, ldq, dim, accumulate)) return;
    real group[MR * NV * VL] __attribute__((aligned(64)));
    block(mr, nv, REAL_DTYPE, group, NV * VL, k, ldk, 1, q_t, 0, ldq, dim < BLOCK ? dim : BLOCK, false);
    for (int32_t n = BLOCK; n < dim; n += BLOCK)
        block(mr, nv, REAL_DTYPE, group, NV * VL, k + n, ldk, 1, q_t, (int64_t)n * ldq, ldq,
              dim - n < BLOCK ? dim - n : BLOCK, true);
    UNROLL for (int i = 0; i < mr; i++) {
        UNROLL for (int v = 0; v < nv; v++) {
            real *to = s + i * width + v * VL;
            vreal sum = load(group + (i * NV + v) * VL);
            store(to, accumulate ? load(to) + sum : sum);
        }
    }
}

INLINE void dots_panel(const int nv, real *s, int32_t width, const real *k, int64_t ldk, const real *q_t, int32_t ldq,
                       int32_t keys, int32_t dim, bool accumulate) {
#if defined(ATTN_NEON) && !defined(ATTN_REAL_F64)
    const int64_t B = sizeof(real);
    for (; nv == DOTS_NV && dim == 2 * GROUP && keys >= 4; keys -= 4, s += 4 * width, k += 4 * ldk)
        dots_of_two_groups((char *)s, width * B, (const char *)k, ldk * B, (const char *)q_t, ldq * B, accumulate);
    for (; nv == DOTS_NV && dim % 4 == 0 && keys >= 4; keys -= 4, s += 4 * width, k += 4 * ldk)
        dots_of_group((char *)s, width * B, (const char *)k, ldk * B, (const char *)q_t, ldq * B, dim / BLOCK,
                      dim % BLOCK / 4, accumulate);
#endif
    for (; keys >= MR; keys -= MR, s += MR * width, k += MR * ldk)
        dots_block(MR, nv, s, width, k, ldk, q_t, ldq, dim, accumulate);
    switch (keys) {
#if !defined(ATTN_NEON)
    case 5: dots_block(5, nv, s, width, k, ldk, q_t, ldq, dim, accumulate); break;
    case 4: dots_block(4, nv, s, width, k, ldk, q_t, ldq, dim, accumulate); break;
#endif
    case 3: dots_block(3, nv, s, width, k, ldk, q_t, ldq, dim, accumulate); break;
    case 2: dots_block(2, nv, s, width, k, ldk, q_t, ldq, dim, accumulate); break;
    case 1: dots_block(1, nv, s, width, k, ldk, q_t, ldq, dim, accumulate); break;
    default: break;
    }
}

/* Group by group: of q_t so much stays in the first cache. */
static void micro_dots(real *s, int32_t width, const real *k, int64_t ldk, const real *q_t, int32_t columns, int32_t keys,
                       int32_t dim) {
    for (int32_t n = 0, dims; n < dim; n += dims) {
        int32_t r = 0;
        dims = dim - n < GROUP ? dim - n : GROUP;
#if defined(ATTN_NEON) && !defined(ATTN_REAL_F64)
        if (dim - n >= 2 * GROUP && keys % 4 == 0) dims = 2 * GROUP;
#endif
        const real *q = q_t + (int64_t)n * columns;
        for (; r + DOTS_NV * VL <= columns; r += DOTS_NV * VL)
            dots_panel(DOTS_NV, s + r, width, k + n, ldk, q + r, columns, keys, dims, n > 0);
        for (; r < columns; r += VL) dots_panel(1, s + r, width, k + n, ldk, q + r, columns, keys, dims, n > 0);
    }
}

/* ---- products of few rows ---- */

#if defined(ATTN_NEON)
#include "narrow_neon.h"
#elif defined(__AVX512F__) && !defined(ATTN_REAL_F64)
#include "narrow_avx512.h"
#endif

/*
 * Asks for some bytes of rows. Where heads lie side by side the rows of one can be pages apart, and then the hardware does not look ahead
 * by itself. An address past the end does no harm: nothing is read.
 */
INLINE void ask_for(const void *from, int32_t rows, int64_t row, int64_t bytes) {
    enum { LINE = 64 };
    uintptr_t at = (uintptr_t)from;
    for (int32_t i = 0; i < rows; i++, at += (uintptr_t)row) {
        for (int64_t byte = 0; byte < bytes; byte += LINE) __builtin_prefetch((const void *)(at + (uintptr_t)byte));
    }
}

/* The sums of mr rows and nv vectors of columns go on with so many keys. */
INLINE void narrow_block(const int mr, const int nv, const attn_dtype of, real *sum, int64_t lds, const real *p,
                         int32_t width, const void *v, int64_t at, int64_t ldv, int32_t keys) {
    vreal acc[MR][NV];
    UNROLL for (int i = 0; i < mr; i++) { UNROLL for (int x = 0; x < nv; x++) acc[i][x] = load(sum + i * lds + x * VL); }
    for (int32_t j = 0; j < keys; j++, at += ldv, p += width) {
        vreal value[NV];
        UNROLL for (int x = 0; x < nv; x++) value[x] = load_any(of, v, at + x * VL);
        UNROLL for (int i = 0; i < mr; i++) {
            UNROLL for (int x = 0; x < nv; x++) acc[i][x] = fused(splat_from(p + i), value[x], acc[i][x]);
        }
    }
    UNROLL for (int i = 0; i < mr; i++) { UNROLL for (int x = 0; x < nv; x++) store(sum + i * lds + x * VL, acc[i][x]); }
}

INLINE void narrow_rows(const int nv, const attn_dtype of, real *sum, int64_t lds, const real *p, int32_t width,
                        const void *v, int64_t at, int64_t ldv, int32_t m, int32_t keys) {
    for (; m >= 4; m -= 4, sum += 4 * lds, p += 4) narrow_block(4, nv, of, sum, lds, p, width, v, at, ldv, keys);
    for (; m > 0; m--, sum += lds, p++) narrow_block(1, nv, of, sum, lds, p, width, v, at, ldv, keys);
}

/* A few keys at a time for all columns, so that memory is read about in its order and ahead of its use; the sums wait in c. */
INLINE void narrow_product(const attn_dtype of, real *c, int64_t ldc, const real *p, int32_t width, const attn_panel *panel,
                           int32_t m, int32_t n, int32_t keys) {
    const int64_t size = (int64_t)dtype_bytes(of), ldv = panel->row, pitch = panel->pitch * size;
    const char *v = panel->data, *next = v + panel->ahead * size;
    for (int32_t j = 0, some; j < keys; j += some, p += some * width) {
        int32_t x = 0;
        some = keys - j < panel->at_once ? keys - j : panel->at_once;
#if defined(ATTN_NEON)
        x = n / (NV * VL) * (NV * VL);
        if (x > 0)
            sums_by_hand(of, c, ldc, p, width, v + j * ldv * size, ldv, next + j * pitch, pitch, m, x / (NV * VL), some);
#elif defined(__AVX512F__) && !defined(ATTN_REAL_F64)
        x = n / (NV * VL) * (NV * VL);
        sums_by_hand(of, c, ldc, p, width, v + j * ldv * size, ldv * size, next + j * pitch, pitch, m, x / (NV * VL), some);
#endif
        for (; x + NV * VL <= n; x += NV * VL) {
            ask_for(next + j * pitch + x * size, some, pitch, NV * VL * size);
            narrow_rows(NV, of, c + x, ldc, p, width, v, j * ldv + x, ldv, m, some);
        }
        for (; x < n; x += VL) narrow_rows(1, of, c + x, ldc, p, width, v, j * ldv + x, ldv, m, some);
    }
}

/* What a table may read besides its reals: ELSE_OF each. */
#ifdef ATTN_REAL_F64
#define OTHER_DTYPES                                                                                                       \
    ELSE_OF(ATTN_F32);                                                                                                     \
    ELSE_OF(ATTN_F16);                                                                                                     \
    ELSE_OF(ATTN_BF16)
#else
#define OTHER_DTYPES                                                                                                       \
    ELSE_OF(ATTN_F16);                                                                                                     \
    ELSE_OF(ATTN_BF16);                                                                                                    \
    ELSE_OF(ATTN_E4M3);                                                                                                    \
    ELSE_OF(ATTN_E5M2);                                                                                                    \
    ELSE_OF(ATTN_I8)
#endif

static void micro_narrow_gemm(real *c, int64_t ldc, const real *p, int32_t width, const attn_panel *v, int32_t m, int32_t n,
                              int32_t keys) {
    if (v->dtype == REAL_DTYPE) narrow_product(REAL_DTYPE, c, ldc, p, width, v, m, n, keys);
#define ELSE_OF(of) else if (READABLE(of) && v->dtype == (of)) narrow_product(of, c, ldc, p, width, v, m, n, keys)
    OTHER_DTYPES;
#undef ELSE_OF
}

/*
 * Dot products in VL chains: chain c sums every VL-th dim from c on, then the chains are added by halves. There are two ways to
 * do that, which give the same bits: chains in the lanes of one vector, with which nothing is spent on rows that are not there;
 * and rows in lanes, each chain a vector, which needs no sum over lanes. SVE adds neighbours instead of halves: it has an
 * instruction that does.
 */
enum { KEYS = 6 * NV / VL < 1 ? 1 : 6 * NV / VL < 6 ? 6 * NV / VL : 6 };

#if defined(ATTN_SVE)

INLINE real sum_of_lanes(vreal v) {
#ifdef ATTN_REAL_F64
    return svaddv_f64(ALL, v);
#else
    return svaddv_f32(ALL, v);
#endif
}

#else

INLINE real sum_of_lanes(vreal v) {
    pair x[VL / 2];
    memcpy(x, &v, sizeof v);
    UNROLL for (int half = VL / 4; half > 0; half /= 2) { UNROLL for (int i = 0; i < half; i++) x[i] += x[i + half]; }
    return x[0][0] + x[0][1];
}

#endif

#if defined(__AVX512F__) && defined(ATTN_REAL_F64)

/*
 * sum_of_lanes of 4 x 4 vectors at once, into s [key][row]. Each step adds halves, as it does, of two vectors, and leaves one. Of floats it
 * is narrow_avx512.h that does so.
 */
INLINE void sums_of_lanes(real *s, int32_t width, vreal acc[KB][NV]) {
    vreal x[16];
    UNROLL16 for (int i = 0; i < 16; i++) x[i] = acc[i % 4][i / 4];
    UNROLL for (int i = 0; i < 8; i++) x[i] =
        _mm512_shuffle_f64x2(x[2 * i], x[2 * i + 1], 0x44) + _mm512_shuffle_f64x2(x[2 * i], x[2 * i + 1], 0xee);
    UNROLL for (int i = 0; i < 4; i++) x[i] =
        _mm512_shuffle_f64x2(x[2 * i], x[2 * i + 1], 0x88) + _mm512_shuffle_f64x2(x[2 * i], x[2 * i + 1], 0xdd);
    UNROLL for (int i = 0; i < 2; i++) x[i] =
        _mm512_unpacklo_pd(x[2 * i], x[2 * i + 1]) + _mm512_unpackhi_pd(x[2 * i], x[2 * i + 1]);
    real sum[2][8];
    store(sum[0], x[0]);
    store(sum[1], x[1]);
    UNROLL for (int j = 0; j < 4; j++) {
        memcpy(s + j * width, sum[0] + 2 * j, 2 * sizeof *s);
        memcpy(s + j * width + 2, sum[1] + 2 * j, 2 * sizeof *s);
    }
}

#endif

/* kb keys against rb rows, chains in lanes. */
INLINE void dot_block(const int kb, const int rb, const attn_dtype of, real *s, int32_t width, const void *k, int64_t at,
                      int64_t ldk, const real *q, int64_t ldq, int32_t dim) {
    vreal acc[KB][NV];
    UNROLL for (int j = 0; j < kb; j++) { UNROLL for (int r = 0; r < rb; r++) acc[j][r] = (vreal){0}; }
    for (int32_t x = 0; x < dim; x += VL) {
        vreal qv[NV];
        UNROLL for (int r = 0; r < rb; r++) qv[r] = load(q + r * ldq + x);
        UNROLL for (int j = 0; j < kb; j++) {
            vreal kv = load_any(of, k, at + j * ldk + x);
            UNROLL for (int r = 0; r < rb; r++) acc[j][r] = fused(kv, qv[r], acc[j][r]);
        }
    }
#if defined(__AVX512F__) && defined(ATTN_REAL_F64)
    if (kb == 4 && rb == 4) {
        sums_of_lanes(s, width, acc);
        return;
    }
#endif
    UNROLL for (int j = 0; j < kb; j++) { UNROLL for (int r = 0; r < rb; r++) s[j * width + r] = sum_of_lanes(acc[j][r]); }
}

/* All rows against kb keys. */
INLINE void dot_rows(const int kb, const attn_dtype of, real *s, int32_t width, const void *k, int64_t at, int64_t ldk,
                     const real *q, int64_t ldq, int32_t rows, int32_t dim) {
    int32_t r = 0;
    for (; r + NV <= rows; r += NV) dot_block(kb, NV, of, s + r, width, k, at, ldk, q + r * ldq, ldq, dim);
    for (; r < rows; r++) dot_block(kb, 1, of, s + r, width, k, at, ldk, q + r * ldq, ldq, dim);
    for (; r < width; r++) {
        UNROLL for (int j = 0; j < kb; j++) s[j * width + r] = 0;
    }
}

INLINE void dots(const attn_dtype of, real *s, int32_t width, const attn_panel *panel, const real *q, int64_t ldq,
                 int32_t rows, int32_t keys, int32_t dim) {
    const int64_t size = (int64_t)dtype_bytes(of), ldk = panel->row, pitch = panel->pitch * size;
    const char *k = panel->data, *next = k + panel->ahead * size;
    int32_t j = 0;
#if defined(ATTN_NEON)
    if (rows <= NARROW_ROWS && keys >= 4) {
        dots_by_hand(of, s, width, k, ldk, next, pitch, q, ldq, rows, keys / 4 * 4, dim);
        j = keys / 4 * 4;
        for (int32_t i = 0; i < j; i++) {
            for (int32_t r = rows; r < NARROW_ROWS; r++) s[(int64_t)i * width + r] = 0;
        }
    }
#elif defined(__AVX512F__) && !defined(ATTN_REAL_F64)
    if (rows <= NARROW_ROWS) j = dots_by_hand(of, s, width, k, ldk * size, next, pitch, q, ldq, rows, keys, dim);
#endif
    for (; j + KB <= keys; j += KB) {
        ask_for(next + j * pitch, KB, pitch, dim * size);
        dot_rows(KB, of, s + (int64_t)j * width, width, k, j * ldk, ldk, q, ldq, rows, dim);
    }
    for (; j < keys; j++) dot_rows(1, of, s + (int64_t)j * width, width, k, j * ldk, ldk, q, ldq, rows, dim);
}

static void micro_narrow_dots(real *s, int32_t width, const attn_panel *k, const real *q, int64_t ldq, int32_t rows,
                              int32_t keys, int32_t dim) {
    if (k->dtype == REAL_DTYPE) dots(REAL_DTYPE, s, width, k, q, ldq, rows, keys, dim);
#define ELSE_OF(of) else if (READABLE(of) && k->dtype == (of)) dots(of, s, width, k, q, ldq, rows, keys, dim)
    OTHER_DTYPES;
#undef ELSE_OF
}

static bool micro_readable(attn_dtype dtype) { return dtype == REAL_DTYPE || READABLE(dtype); }

/* kb keys against VL rows, rows in lanes. */
INLINE void chain_block(const int kb, real *s, int32_t width, const real *k, int64_t ldk, const real *q_t, int32_t dim) {
    vreal acc[KEYS][VL];
    UNROLL for (int j = 0; j < kb; j++) { UNROLL for (int c = 0; c < VL; c++) acc[j][c] = (vreal){0}; }
    for (int32_t x = 0; x < dim; x += VL) {
        UNROLL for (int c = 0; c < VL; c++) {
            vreal qv = load(q_t + (int64_t)(x + c) * width);
            KEEP(qv);
            UNROLL for (int j = 0; j < kb; j++) acc[j][c] = fused(splat_from(k + j * ldk + x + c), qv, acc[j][c]);
        }
    }
    UNROLL for (int j = 0; j < kb; j++) {
        UNROLL for (int half = VL / 2; half > 0; half /= 2) {
#if defined(ATTN_SVE)
            UNROLL for (int c = 0; c < half; c++) acc[j][c] = acc[j][2 * c] + acc[j][2 * c + 1];
#else
            UNROLL for (int c = 0; c < half; c++) acc[j][c] += acc[j][c + half];
#endif
        }
        store(s + j * width, acc[j][0]);
    }
}

static void micro_chain_dots(real *s, int32_t width, const real *k, int64_t ldk, const real *q_t, int32_t keys,
                             int32_t dim) {
    for (int32_t r = 0; r < width; r += VL) {
        int32_t j = 0;
        for (; j + KEYS <= keys; j += KEYS)
            chain_block(KEYS, s + (int64_t)j * width + r, width, k + j * ldk, ldk, q_t + r, dim);
        for (; j < keys; j++) chain_block(1, s + (int64_t)j * width + r, width, k + j * ldk, ldk, q_t + r, dim);
    }
}

/* ---- conversion ---- */

#if !defined(ATTN_REAL_F64) && (defined(ATTN_NEON) || defined(ATTN_SVE))
#define ATTN_BY_NEON 1 /* what is not worth longer vectors */
#elif !defined(ATTN_REAL_F64) && defined(__F16C__) && defined(__FMA__)
#define ATTN_BY_F16C 1
#endif

static void micro_load(real *restrict to, const void *from, attn_dtype dtype, int32_t n) {
#if defined(ATTN_BY_NEON)
    if (dtype == ATTN_F16) {
        const uint16_t *x = from;
        for (; n >= 8; n -= 8, x += 8, to += 8) {
            float16x8_t half = vreinterpretq_f16_u16(vld1q_u16(x));
            vst1q_f32(to, vcvt_f32_f16(vget_low_f16(half)));
            vst1q_f32(to + 4, vcvt_high_f32_f16(half));
        }
        from = x;
    }
#elif defined(ATTN_BY_F16C)
    if (dtype == ATTN_F16) {
        const uint16_t *x = from;
        for (; n >= 8; n -= 8, x += 8, to += 8) _mm256_storeu_ps(to, _mm256_cvtph_ps(_mm_loadu_si128((const void *)x)));
        uint16_t last[8] = {0}; /* by the same instruction: what is subnormal may be 0 to others */
        float wide[8];
        memcpy(last, x, (size_t)n * sizeof *x);
        _mm256_storeu_ps(wide, _mm256_cvtph_ps(_mm_loadu_si128((const void *)last)));
        memcpy(to, wide, (size_t)n * sizeof *to);
        return;
    }
#endif
    if (dtype == REAL_DTYPE) {
        memcpy(to, from, (size_t)n * sizeof *to);
#ifndef ATTN_REAL_F64
    } else if (dtype == ATTN_E4M3) {
        load_many(ATTN_E4M3, to, from, n);
    } else if (dtype == ATTN_E5M2) {
        load_many(ATTN_E5M2, to, from, n);
    } else if (dtype == ATTN_I8) {
        load_many(ATTN_I8, to, from, n);
#endif
    } else if (dtype == ATTN_F32) {
        const float *x = from;
        for (int32_t i = 0; i < n; i++) to[i] = (real)x[i];
    } else if (dtype == ATTN_BF16) {
        const uint16_t *x = from;
        for (int32_t i = 0; i < n; i++) to[i] = attn__from_bf16(x[i]);
    } else if (dtype == ATTN_F16) { /* the exponent is moved by a product, exact for subnormals too; infinities by a mask */
        const uint16_t *x = from;
        for (int32_t i = 0; i < n; i++) {
            uint32_t sign = (uint32_t)(x[i] & 0x8000) << 16, rest = (uint32_t)(x[i] & 0x7fff) << 13;
            uint32_t bits = attn__bits(attn__float(rest) * 0x1p112f);
            to[i] = attn__float(sign | (rest >= 0x7c00u << 13 ? bits | 0x7f800000 : bits));
        }
    } else {
        for (int32_t i = 0; i < n; i++) to[i] = (real)attn__load(dtype, from, i);
    }
}

/* What is stored of x: no -0, and one kind of NaN. */
INLINE real stored(real x, real factor) {
    x = x * factor + 0;
    return x == x ? x : (real)NAN;
}

#if defined(ATTN_BY_F16C)
INLINE void store_f16(uint16_t *to, const float *from, float factor) {
    __m256 x = _mm256_fmadd_ps(_mm256_loadu_ps(from), _mm256_set1_ps(factor), _mm256_setzero_ps());
    x = _mm256_blendv_ps(x, _mm256_set1_ps(NAN), _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    _mm_storeu_si128((void *)to, _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}
#endif

static void micro_store(void *to, attn_dtype dtype, const real *from, real factor, int32_t n) {
#if defined(ATTN_BY_NEON)
    if (dtype == ATTN_F16) {
        uint16_t *y = to;
        for (; n >= 4; n -= 4, from += 4, y += 4) {
            float32x4_t x = vld1q_f32(from) * factor + 0;
            vst1_u16(y, vreinterpret_u16_f16(vcvt_f16_f32(vbslq_f32(vceqq_f32(x, x), x, vdupq_n_f32(NAN)))));
        }
        to = y;
    }
#elif defined(ATTN_BY_F16C)
    if (dtype == ATTN_F16) {
        uint16_t *y = to, last[8];
        float wide[8] = {0};
        for (; n >= 8; n -= 8, from += 8, y += 8) store_f16(y, from, factor);
        memcpy(wide, from, (size_t)n * sizeof *from);
        store_f16(last, wide, factor);
        memcpy(y, last, (size_t)n * sizeof *y);
        return;
    }
#endif
    if (dtype == REAL_DTYPE) {
        real *y = to;
        for (int32_t i = 0; i < n; i++) y[i] = stored(from[i], factor);
    } else if (dtype == ATTN_F32) {
        float *y = to;
        for (int32_t i = 0; i < n; i++) y[i] = (float)stored(from[i], factor);
    } else if (dtype == ATTN_BF16) {
        uint16_t *y = to;
        for (int32_t i = 0; i < n; i++) y[i] = attn__to_bf16((float)stored(from[i], factor));
    } else {
        for (int32_t i = 0; i < n; i++) attn__store(dtype, to, i, stored(from[i], factor));
    }
}

#include "exp.h"

/* ---- softmax ---- */

/* The largest of `most` and a column of s, in four chains: one would spend its time waiting for itself. */
INLINE vreal column_max(const real *s, int32_t keys, int32_t width, vreal most) {
    vreal chain[4] = {most, most, most, most};
    int32_t j = 0;
    for (; j + 4 <= keys; j += 4) {
        UNROLL for (int i = 0; i < 4; i++) chain[i] = larger(load(s + (int64_t)(j + i) * width), chain[i]);
    }
    for (; j < keys; j++) chain[0] = larger(load(s + (int64_t)j * width), chain[0]);
    return larger(larger(chain[0], chain[1]), larger(chain[2], chain[3]));
}

/* n keys of a column: e^(s - base), and their sum with `part`. */
INLINE vreal softmax_keys(const int n, real *s, int32_t width, vreal base, vreal part) {
    vreal x[8];
    EACH(x[i] = load(s + (int64_t)i * width) - base);
    exp_all(n, x, false, x);
    EACH(store(s + (int64_t)i * width, x[i]));
    EACH(part += x[i]);
    return part;
}

#if defined(__AVX512F__) && !defined(ATTN_REAL_F64)

/* A vector of four columns of four keys. */
INLINE vreal load_quarters(const real *s, int32_t width) {
    __m512 x = _mm512_castps128_ps512(_mm_loadu_ps(s));
    x = _mm512_insertf32x4(x, _mm_loadu_ps(s + width), 1);
    x = _mm512_insertf32x4(x, _mm_loadu_ps(s + 2 * width), 2);
    return _mm512_insertf32x4(x, _mm_loadu_ps(s + 3 * width), 3);
}

INLINE void store_quarters(real *s, int32_t width, vreal x) {
    _mm_storeu_ps(s, _mm512_castps512_ps128(x));
    _mm_storeu_ps(s + width, _mm512_extractf32x4_ps(x, 1));
    _mm_storeu_ps(s + 2 * width, _mm512_extractf32x4_ps(x, 2));
    _mm_storeu_ps(s + 3 * width, _mm512_extractf32x4_ps(x, 3));
}

/*
 * micro_softmax of up to four columns: the exponentials of four keys in a vector, of which one key would fill a quarter. Maxima and sums
 * are made as they are there.
 */
static void softmax_of_four(real *s, int32_t keys, int32_t width, real *max, real *sum, real *alpha) {
    const vreal before = load(max);
    __m128 chain[4] = {_mm512_castps512_ps128(before), _mm512_castps512_ps128(before), _mm512_castps512_ps128(before),
                       _mm512_castps512_ps128(before)};
    int32_t j = 0;
    for (; j + 4 <= keys; j += 4) {
        UNROLL for (int i = 0; i < 4; i++) chain[i] = _mm_max_ps(_mm_loadu_ps(s + (int64_t)(j + i) * width), chain[i]);
    }
    for (; j < keys; j++) chain[0] = _mm_max_ps(_mm_loadu_ps(s + (int64_t)j * width), chain[0]);
    __m128 largest = _mm_max_ps(_mm_max_ps(chain[0], chain[1]), _mm_max_ps(chain[2], chain[3]));
    vreal most = _mm512_mask_mov_ps(before, 0xf, _mm512_zextps128_ps512(largest));
    vreal none = splat((real)-INFINITY), base = pick(most == none, (vreal){0}, most), shrink = exp_vector(before - base);
    vreal bases = _mm512_shuffle_f32x4(base, base, 0);
    for (j = 0; j + 16 <= keys; j += 16) {
        vreal x[4];
        UNROLL for (int i = 0; i < 4; i++) x[i] = load_quarters(s + (int64_t)(j + 4 * i) * width, width) - bases;
        exp_all(4, x, false, x);
        UNROLL for (int i = 0; i < 4; i++) store_quarters(s + (int64_t)(j + 4 * i) * width, width, x[i]);
    }
    for (; j < keys; j++) {
        __m512 x = exp_vector(_mm512_zextps128_ps512(_mm_loadu_ps(s + (int64_t)j * width)) - bases);
        _mm_storeu_ps(s + (int64_t)j * width, _mm512_castps512_ps128(x));
    }
    __m128 total = _mm_setzero_ps();
    for (int32_t j0 = 0; j0 < keys; j0 += 8) { /* short sums keep the rounding error small */
        __m128 part = _mm_setzero_ps();
        for (j = j0; j < keys && j < j0 + 8; j++) part += _mm_loadu_ps(s + (int64_t)j * width);
        total += part;
    }
    store(max, most);
    store(alpha, shrink);
    store(sum, load(sum) * shrink + _mm512_zextps128_ps512(total));
}

#endif

static void micro_softmax(real *s, int32_t keys, int32_t width, int32_t columns, real *max, real *sum, real *alpha) {
#if defined(__AVX512F__) && !defined(ATTN_REAL_F64)
    if (columns <= 4) {
        softmax_of_four(s, keys, width, max, sum, alpha);
        return;
    }
#endif
    for (int32_t r = 0; r < columns; r += VL) {
        vreal before = load(max + r), most = column_max(s + r, keys, width, before), total = (vreal){0};
        vreal none = splat((real)-INFINITY), base = pick(most == none, (vreal){0}, most);
        vreal shrink = exp_vector(before - base);
        for (int32_t j0 = 0; j0 < keys; j0 += 8) { /* short sums keep the rounding error small */
            vreal part = (vreal){0};
            int32_t j = j0, end = j0 + 8 < keys ? j0 + 8 : keys;
            for (; j + EXP_AT_ONCE <= end; j += EXP_AT_ONCE)
                part = softmax_keys(EXP_AT_ONCE, s + (int64_t)j * width + r, width, base, part);
            for (; j < end; j++) part = softmax_keys(1, s + (int64_t)j * width + r, width, base, part);
            total += part;
        }
        store(max + r, most);
        store(alpha + r, shrink);
        store(sum + r, load(sum + r) * shrink + total);
    }
}

/* n keys of a column: e^(s + rest - base - low), and their sum with `part`. with_rest: the scores have a rest. */
INLINE vreal exp_keys(const int n, const bool with_rest, real *s, const real *rest, int32_t width, vreal base, vreal low,
                      vreal part) {
    const vreal infinite = splat((real)INFINITY),
                none = pick(base == infinite, infinite, -infinite); /* such scores give 0 */
    vreal score[8], x[8], lost[8];
    EACH(score[i] = load(s + (int64_t)i * width));
    EACH(x[i] = score[i] - base);
    EACH(lost[i] = lost_by_difference(with_rest, score[i], base, x[i]) +
                   (with_rest ? load(rest + (int64_t)i * width) - low : -low));
    exp_all(n, x, true, lost);
    EACH(x[i] = (vreal)(~(vint)(score[i] <= none) & (vint)x[i]));
    EACH(store(s + (int64_t)i * width, x[i]));
    EACH(part += x[i]);
    return part;
}

/* One vector of columns. */
INLINE vreal exp_columns(const bool with_rest, real *s, const real *rest, int32_t keys, int32_t width, vreal base,
                         vreal low) {
    vreal total = (vreal){0};
    for (int32_t j0 = 0; j0 < keys; j0 += 8) { /* short sums keep the rounding error small */
        vreal part = (vreal){0};
        int32_t j = j0, end = j0 + 8 < keys ? j0 + 8 : keys;
        for (; j + EXP_AT_ONCE <= end; j += EXP_AT_ONCE)
            part = exp_keys(EXP_AT_ONCE, with_rest, s + (int64_t)j * width, with_rest ? rest + (int64_t)j * width : rest,
                            width, base, low, part);
        for (; j < end; j++)
            part = exp_keys(1, with_rest, s + (int64_t)j * width, with_rest ? rest + (int64_t)j * width : rest, width, base,
                            low, part);
        total += part;
    }
    return total;
}

static void micro_exp(real *s, const real *rest, int32_t keys, int32_t width, const real *lse, const real *low,
                      double *sum) {
    for (int32_t r = 0; r < width; r += VL) {
        vreal base = load(lse + r), less = low ? load(low + r) : (vreal){0};
        vreal total = rest ? exp_columns(true, s + r, rest + r, keys, width, base, less)
                           : exp_columns(false, s + r, rest, keys, width, base, less);
        for (int i = 0; sum && i < VL; i++) sum[r + i] += (double)total[i];
    }
}

static void micro_softcap(real *s, real *slope, int32_t n, real cap) {
    real inverse = 1 / cap;
    for (int32_t i = 0; i < n; i += VL) {
        vreal capped = softcap_vector(load(s + i), cap, inverse), t = capped * inverse;
        store(s + i, capped);
        if (slope) store(slope + i, (1 - t) * (1 + t));
    }
}

/* Of larger scores ALiBi has no rest in the backward, as it has none in the forward: p is to be that of the forward. */
static const real REST_MOST = 4096;

#if !defined(ATTN_REAL_F64) && (defined(__FMA__) || defined(__aarch64__)) /* c too: aarch64 has no other */

/* One key: s -= slope * |distance|, rounded once, as in the forward, and what that rounds off. `near` is the same rounded twice, and off by `off`. */
INLINE void alibi_row(real *s, real *rest, int32_t width, const real *slope, const int32_t *i, int32_t shift) {
    for (int32_t r = 0; r < width; r += VL) {
        vint distance;
        memcpy(&distance, i + r, sizeof distance);
        distance += shift;
        distance = (distance ^ (distance >> 31)) - (distance >> 31);
        vreal factor = load(slope + r), minus = -factor, steps = __builtin_convertvector(distance, vreal);
        vreal product = factor * steps;
        KEEP(product); /* rounded, not fused with what follows */
        KEEP(factor);  /* or the compiler takes that product for the next ones, and nothing is ever lost */
        KEEP(minus);
        vreal lost = fused(factor, steps, -product);
        vreal before = load(s + r), x = fused(minus, steps, before), near = before - product, back = near - before;
        vreal off = (before - (near - back)) - (product + back) - lost;
        store(s + r, x);
        store(rest + r, (vreal)((vint)((x < REST_MOST) & (x > -REST_MOST)) & (vint)((near - x) + off)));
    }
}

#else

INLINE void alibi_row(real *s, real *rest, int32_t width, const real *slope, const int32_t *i, int32_t shift) {
    for (int32_t r = 0; r < width; r++) {
        int32_t distance = i[r] + shift;
        const real steps = (real)(distance < 0 ? -distance : distance), before = s[r];
        const double exact = (double)before - (double)slope[r] * (double)steps;
        s[r] = before - slope[r] * steps;
        rest[r] = s[r] < REST_MOST && s[r] > -REST_MOST ? (real)(exact - (double)s[r]) : 0;
    }
}

#endif

static void micro_alibi(real *s, real *rest, int32_t keys, int32_t width, const real *slope, const int32_t *i,
                        int32_t offset) {
    for (int32_t j = 0; rest && j < keys; j++)
        alibi_row(s + (int64_t)j * width, rest + (int64_t)j * width, width, slope, i, offset - j);
    for (int32_t j = 0; !rest && j < keys; j++) {
        for (int32_t r = 0; r < width; r++) {
            int32_t distance = i[r] + offset - j;
            s[(int64_t)j * width + r] -= slope[r] * (real)(distance < 0 ? -distance : distance);
        }
    }
}

static void micro_d_scores(real *d_p, const real *p, const real *slope, int32_t keys, int32_t width, const real *delta,
                           real keep) {
    for (int32_t j = 0; j < keys; j++) {
        for (int32_t r = 0; r < width; r += VL) {
            int64_t at = (int64_t)j * width + r;
            vreal weight = load(p + at), d = weight * (load(d_p + at) * keep - load(delta + r));
            if (slope) d *= load(slope + at);
            store(d_p + at, (vreal)((vint)(weight != (vreal){0}) & (vint)d));
        }
    }
}

#if defined(__AVX512F__) && !defined(ATTN_REAL_F64)

/* 16 x 16 in registers: pairs of rows are interleaved, by elements, by pairs, by quarters of a vector. */
INLINE void transpose_16(float *to, int64_t ldt, const float *from, int64_t ldf) {
    __m512 a[16], b[16];
    UNROLL16 for (int i = 0; i < 16; i++) a[i] = _mm512_loadu_ps(from + i * ldf);
    UNROLL16 for (int i = 0; i < 16; i += 2) {
        b[i] = _mm512_unpacklo_ps(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_ps(a[i], a[i + 1]);
    }
    UNROLL16 for (int i = 0; i < 16; i += 4) {
        a[i] = _mm512_shuffle_ps(b[i], b[i + 2], 0x44);
        a[i + 1] = _mm512_shuffle_ps(b[i], b[i + 2], 0xee);
        a[i + 2] = _mm512_shuffle_ps(b[i + 1], b[i + 3], 0x44);
        a[i + 3] = _mm512_shuffle_ps(b[i + 1], b[i + 3], 0xee);
    }
    UNROLL16 for (int i = 0; i < 4; i++) {
        b[i] = _mm512_shuffle_f32x4(a[i], a[i + 4], 0x88);
        b[i + 4] = _mm512_shuffle_f32x4(a[i], a[i + 4], 0xdd);
        b[i + 8] = _mm512_shuffle_f32x4(a[i + 8], a[i + 12], 0x88);
        b[i + 12] = _mm512_shuffle_f32x4(a[i + 8], a[i + 12], 0xdd);
    }
    UNROLL16 for (int i = 0; i < 8; i++) {
        _mm512_storeu_ps(to + i * ldt, _mm512_shuffle_f32x4(b[i], b[i + 8], 0x88));
        _mm512_storeu_ps(to + (i + 8) * ldt, _mm512_shuffle_f32x4(b[i], b[i + 8], 0xdd));
    }
}

#elif defined(ATTN_BY_NEON)

/* 16 rows by 4 columns, in four squares. */
INLINE void transpose_16(float *to, int64_t ldt, const float *from, int64_t ldf) {
    for (int r = 0; r < 16; r += 4) {
        const float *x = from + r * ldf;
        float32x4_t a = vld1q_f32(x), b = vld1q_f32(x + ldf), c = vld1q_f32(x + 2 * ldf), d = vld1q_f32(x + 3 * ldf);
        float32x4_t ab = vtrn1q_f32(a, b), cd = vtrn1q_f32(c, d), ab2 = vtrn2q_f32(a, b), cd2 = vtrn2q_f32(c, d);
        vst1q_f32(to + r, (float32x4_t)vtrn1q_f64((float64x2_t)ab, (float64x2_t)cd));
        vst1q_f32(to + r + ldt, (float32x4_t)vtrn1q_f64((float64x2_t)ab2, (float64x2_t)cd2));
        vst1q_f32(to + r + 2 * ldt, (float32x4_t)vtrn2q_f64((float64x2_t)ab, (float64x2_t)cd));
        vst1q_f32(to + r + 3 * ldt, (float32x4_t)vtrn2q_f64((float64x2_t)ab2, (float64x2_t)cd2));
    }
}

#endif

static void micro_transpose(real *to, int64_t ldt, const real *from, int64_t ldf, int32_t m, int32_t n) {
    int32_t c = 0;
#if defined(__AVX512F__) && !defined(ATTN_REAL_F64)
    for (; m == 16 && c + 16 <= n; c += 16) transpose_16(to + c * ldt, ldt, from + c, ldf);
#elif defined(ATTN_BY_NEON)
    for (; m == 16 && c + 4 <= n; c += 4) transpose_16(to + c * ldt, ldt, from + c, ldf);
#endif
    for (; c < n; c++) {
        memset(to + c * ldt, 0, ATTN_LANES * sizeof *to);
        for (int32_t r = 0; r < m; r++) to[c * ldt + r] = from[r * ldf + c];
    }
}

static void micro_weigh(const real *p, int32_t keys, int32_t width, int32_t columns, real *sum, real *most) {
    for (int32_t j = 0; j < keys; j++, p += width) {
        vreal sums = {0}, mosts = {0};
        int32_t r = 0;
        for (; r + VL <= columns; r += VL) {
            sums += load(p + r);
            mosts = larger(load(p + r), mosts);
        }
        real total = sum_of_lanes(sums), largest = most[j];
        for (int n = 0; n < VL; n++) largest = mosts[n] > largest ? mosts[n] : largest;
        for (; r < columns; r++) {
            total += p[r];
            largest = p[r] > largest ? p[r] : largest;
        }
        sum[j] += total;
        most[j] = largest;
    }
}

static void micro_scale(real *c, int32_t n, real factor) {
    for (int32_t i = 0; i < n; i++) c[i] *= factor;
}

static void micro_add(real *c, const real *x, int32_t n) {
    for (int32_t i = 0; i < n; i++) c[i] += x[i];
}

static bool micro_finite(const real *x, int64_t n) {
    int bad = 0;
    for (int64_t i = 0; i < n; i++) bad |= !(x[i] - x[i] == 0);
    return !bad;
}

#define TABLE_NAME_(isa) REAL(micro_##isa)
#define TABLE_NAME(isa) TABLE_NAME_(isa)

extern const attn_micro TABLE_NAME(ATTN_ISA);
const attn_micro TABLE_NAME(ATTN_ISA) = {
    .gemm = micro_gemm,
    .strip = NV * VL < ATTN_LANES ? ATTN_LANES : NV * VL,
    .dots = micro_dots,
    .narrow_dots = micro_narrow_dots,
    .chain_dots = micro_chain_dots,
    .narrow_gemm = micro_narrow_gemm,
    .readable = micro_readable,
    .load = micro_load,
    .store = micro_store,
    .softmax = micro_softmax,
    .exp = micro_exp,
    .softcap = micro_softcap,
    .alibi = micro_alibi,
    .d_scores = micro_d_scores,
    .weigh = micro_weigh,
    .transpose = micro_transpose,
    .scale = micro_scale,
    .add = micro_add,
    .finite = micro_finite,
};
