/*
 * Micro-kernels: the few inner loops that a kernel is made of, one table of them for each ISA and number type. A later ISA fills
 * in a table of its own, or overrides single entries.
 *
 * Score tiles are stored transposed, [key][row]: query rows lie in the lanes of a vector, so maxima and sums over keys are
 * vertical, and probabilities come out in the order in which the product with V reads them. Widths (rows, dims) are
 * padded to a multiple of `lanes`; what is in the padding is finite and never stored.
 */
#ifndef ATTN_CPU_MICRO_H
#define ATTN_CPU_MICRO_H

#include "../internal.h"
#include "real.h"
#include "work.h"

/* Widths are padded to this in every table of a number type: 16 or 8, which is a multiple of each ISA's vector. */
enum { ATTN_LANES = 64 / sizeof(real) };

/* Rows of keys or values, where they lie: row j is at data + j * row, in elements. */
typedef struct attn_panel {
    const void *data;
    int64_t row;
    attn_dtype dtype;     /* one that is readable */
    int64_t ahead, pitch; /* so far from data are rows, `pitch` apart, that will be wanted later: they are asked for */
    int32_t at_once;      /* values: so many rows are worked for all columns, then the next ones */
} attn_panel;

typedef struct REAL(micro) {
    /* c[m][n] = (accumulate ? c : 0) + sum_k a[m*row + k*col] * b[k*ldb + n], n a multiple of ATTN_LANES; sums in order of k */
    void (*gemm)(real *c, int64_t ldc, const real *a, int64_t row, int64_t col, const real *b, int64_t ldb, int32_t m,
                 int32_t n, int32_t k, bool accumulate);

    /* So many columns, a multiple of ATTN_LANES, are worked by `dots` as well as more. */
    int32_t strip;

    /*
     * s[key][row] = dot product of k's row `key` [ldk] and column `row` of q_t [dim][columns], dim as it is; rows of s are `width` apart.
     * Short sums keep the rounding error small: BLOCK dims are summed before they meet the rest of their GROUP, and that before it
     * meets the rest.
     */
    void (*dots)(real *s, int32_t width, const real *k, int64_t ldk, const real *q_t, int32_t columns, int32_t keys,
                 int32_t dim);

    /*
     * For few rows. s[key][row] = dot product of a key's row and q[row][ldq], dim a multiple of ATTN_LANES; 0 in the rest of
     * the last vector, as softmax may count them; what is in other padding is no part of a result. Dims lie in lanes: nothing is spent on rows that are not there. The order of a sum depends on dim alone.
     */
    void (*narrow_dots)(real *s, int32_t width, const attn_panel *k, const real *q, int64_t ldq, int32_t rows, int32_t keys,
                        int32_t dim);

    /* The same bits from q_t [dim][width], and keys [ldk] that are real. */
    void (*chain_dots)(real *s, int32_t width, const real *k, int64_t ldk, const real *q_t, int32_t keys, int32_t dim);

    /* c[m][n] goes on with p[j][width] v[j][n], one j after the other: gemm's sums, if it begins with 0, with v as it lies. */
    void (*narrow_gemm)(real *c, int64_t ldc, const real *p, int32_t width, const attn_panel *v, int32_t m, int32_t n,
                        int32_t keys);

    /* Can an attn_panel be of that dtype? */
    bool (*readable)(attn_dtype dtype);

    /* Converts n elements; any dtype. */
    void (*load)(real *to, const void *from, attn_dtype dtype, int32_t n);

    /* to[n] = from[n] * factor + 0, rounded to real and then to dtype; the zero makes -0 into 0, which underflow may leave. */
    void (*store)(void *to, attn_dtype dtype, const real *from, real factor, int32_t n);

    /*
     * One step of online softmax over the first columns of s[keys][width]: max and sum are updated, alpha = e^(old max - new max), and s
     * becomes e^(s - new max). A column whose scores are all -inf so far keeps max = -inf, sum = 0 and gets s = 0. As many columns are
     * worked as vectors hold; those after them are left alone.
     */
    void (*softmax)(real *s, int32_t keys, int32_t width, int32_t columns, real *max, real *sum, real *alpha);

    /*
     * s[key][row] = e^(s + rest - lse[row] - low[row]); 0 where s = -inf, whatever lse is, and where lse = +inf. rest [keys][width] and
     * low, far smaller than s and lse, may be NULL: zero. sum[row] grows by the results, unless sum is NULL.
     */
    void (*exp)(real *s, const real *rest, int32_t keys, int32_t width, const real *lse, const real *low, double *sum);

    /* s = cap * tanh(s / cap) over n elements; slope, if not NULL, receives the derivative. */
    void (*softcap)(real *s, real *slope, int32_t n, real cap);

    /*
     * s[key][row] -= slope[row] * |i[row] + offset - key|, the product not rounded where the ISA can fuse it; rest, unless it is NULL,
     * receives what the difference rounds off, or 0 where s is 4096 and more.
     */
    void (*alibi)(real *s, real *rest, int32_t keys, int32_t width, const real *slope, const int32_t *i, int32_t offset);

    /* d_s = p * (d_p * keep - delta[row]), 0 wherever p is 0; then times slope, if not NULL. d_s replaces d_p. */
    void (*d_scores)(real *d_p, const real *p, const real *slope, int32_t keys, int32_t width, const real *delta,
                     real keep);

    /* sum[key] grows by the first columns of p[key][width], most[key] is the largest of them and what it was. */
    void (*weigh)(const real *p, int32_t keys, int32_t width, int32_t columns, real *sum, real *most);

    /* to[n][ldt] = from[m][ldf] transposed, of which rows m and columns n; ATTN_LANES columns of `to` are written, with zeros from m on. */
    void (*transpose)(real *to, int64_t ldt, const real *from, int64_t ldf, int32_t m, int32_t n);

    /* c[n] = c[n] * factor */
    void (*scale)(real *c, int32_t n, real factor);

    /* c[n] = c[n] + x[n] */
    void (*add)(real *c, const real *x, int32_t n);

    /* Is none of the n numbers infinite or NaN? */
    bool (*finite)(const real *x, int64_t n);
} REAL(micro);

typedef REAL(micro) attn_micro;

#endif
