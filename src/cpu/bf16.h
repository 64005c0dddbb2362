/*
 * Products of bf16, and the softmax between them: what a bf16 kernel is made of, and one of float32 or f16, on CPUs that multiply bf16. On x86
 * that is AMX tiles, or vectors of AVX-512 BF16 where there are no tiles (bf16_amx.c); on Arm BFMMLA (bf16_neon.c). The loops around it are fwd_bf16.c and
 * bwd_bf16.c.
 *
 * As in micro.h, scores are transposed, [key][row], with query rows in the lanes; so is the output while it is summed up,
 * [dim][row]. Rows come in panels of 16. Both products of the forward are then c[m][n] (+)= sum_k a[m][k] b[k][n] with n over query rows:
 *
 *     S^T = K Q^T       a: K, packed             b: q                           k over dims
 *     O^T += V^T P^T    a: V^T, packed           b: P                           k over keys
 *
 * Operands are in panels of 16 (of m or of n), a panel being a row of tiles along k, of 16 x 32 elements, 1 KiB, without gaps: [panel][tile].
 * How the elements of a tile lie is the instruction's choice: as many of k are neighbours as it takes of each row or column at once
 * (ATTN_BF16_GROUP_A and _B),
 *
 *     tile [32 / group][16 of m or n][group]
 *
 * Sizes are padded with zeros, which change no bit of a sum: m and k to 32, n to 16. Memory beyond what is given is neither
 * read nor does it matter (C2).
 *
 * The products treat subnormal numbers as zero, in and out, whatever the mode of the processor. How a sum is rounded is the
 * instruction's:
 *
 *     AMX         in the order of k, in steps of 32: even k and odd k of a step apart, then both onto the rest; to the nearest
 *     AVX-512     pair by pair of k, each product onto the rest; to the nearest
 *     BFMMLA      pair by pair of k: the sum of a pair, then that onto the rest; each to odd, which is to say that bit 0 of a sum that
 *                 is not exact is 1, so it may be off by as much as one unit in the last place
 *
 * An element depends on its own row of a and column of b only, so on neither the other rows of a tile nor their number (C5).
 */
#ifndef ATTN_CPU_BF16_H
#define ATTN_CPU_BF16_H

#include "../internal.h"
#include "../numeric.h"

struct attn__micro_f32;

#if defined(ATTN_HAVE_AMX) || defined(ATTN_HAVE_NEONBF16)
#define ATTN_HAVE_BF16 1
#endif

enum {
    ATTN_BF16_M = 32,    /* m and k are multiples of this */
    ATTN_BF16_N = 16,    /* n is a multiple of this; on x86 twice as much is faster */
    ATTN_BF16_TILE = 512 /* elements of a tile */
};

/* Elements of k that are neighbours in a tile of a, and of b; and see attn__bf16_row. */
#if defined(__aarch64__)
enum { ATTN_BF16_GROUP_A = 4, ATTN_BF16_GROUP_B = 4, ATTN_BF16_GROUP_ROWS = 16 };
#else
enum { ATTN_BF16_GROUP_A = 32, ATTN_BF16_GROUP_B = 2, ATTN_BF16_GROUP_ROWS = 4 };
#endif

/* Where element (i, x), i of m or n and x of k, is in a packed operand whose panels are `panel` apart. */
static inline int64_t attn__bf16_place(int32_t group, int64_t panel, int32_t i, int32_t x) {
    return i / 16 * panel + x / group * (16 * group) + i % 16 * group + x % group;
}
static inline int64_t attn__bf16_place_a(int64_t panel, int32_t i, int32_t x) {
    return attn__bf16_place(ATTN_BF16_GROUP_A, panel, i, x);
}
static inline int64_t attn__bf16_place_b(int64_t panel, int32_t i, int32_t x) {
    return attn__bf16_place(ATTN_BF16_GROUP_B, panel, i, x);
}

/*
 * Around each unit of work: sets the tile registers of AMX up, and gives them back. A thread that sleeps is to hold no tiles, for the
 * kernel would save 8 KiB of them each time. by_vectors: there are none, and nothing is done.
 */
void attn__bf16_begin(bool by_vectors);
void attn__bf16_end(bool by_vectors);

/*
 * c = (accumulate ? c : 0) + a b. Row i of c is at c + i * ldc, panels of 16 columns are c_panel apart: [m][n] with c_panel = 16, or
 * [n / 16][m][16], which is better for the caches. Either operand may begin at any panel and at any tile of it. b may stay in the first cache
 * while a comes from the second: on x86, where n is worked in pairs of panels, up to k = 256 or 512.
 */
typedef struct attn_bf16_product {
    float *c;
    int64_t ldc, c_panel;
    const uint16_t *a, *b;
    int64_t a_panel, b_panel; /* elements from panel to panel */
    int32_t parts;            /* of a number: 0 or 1, or tiles alone 2 or 3, see below */
    int64_t a_part, b_part;   /* elements from part to part */
    int32_t m, n, k;          /* padded */
    bool accumulate;
    bool exact;      /* two parts: all four products of them, not the three that are larger */
    bool by_vectors; /* without tiles; on Arm always */
} attn_bf16_product;

void attn__bf16_run(const attn_bf16_product *product);

/* ---- operands from rows of bf16: `rows` of `dim` elements, `row` elements apart ---- */

/* m or k, padded. */
static inline int64_t attn__bf16_pad(int64_t n) { return (n + ATTN_BF16_M - 1) / ATTN_BF16_M * ATTN_BF16_M; }

/* a with m over rows, k over dims. */
void attn__bf16_pack_rows(uint16_t *a, const uint16_t *from, int64_t row, int32_t rows, int32_t dim);

/* a with m over dims, k over rows: the transpose. False if there is NaN or infinity among them. */
bool attn__bf16_pack_columns(uint16_t *a, const uint16_t *from, int64_t row, int32_t rows, int32_t dim);

/* b with n over rows, k over dims. The panels are ceil(rows / 16). */
void attn__bf16_pack_dims(uint16_t *b, const uint16_t *from, int64_t row, int32_t rows, int32_t dim);

/* b with n over dims, k over rows. The panels are ceil(dim / 16). */
void attn__bf16_pack_pairs(uint16_t *b, const uint16_t *from, int64_t row, int32_t rows, int32_t dim);

/* Is there neither NaN nor infinity among them? */
bool attn__bf16_finite(const uint16_t *from, int64_t row, int32_t rows, int32_t dim);

/* Are these bits of bf16 NaN or infinity? */
static inline bool attn__bf16_is_bad(uint16_t bits) { return (bits & 0x7f80) == 0x7f80; }

/* A copy without gaps, which is returned, with zeros for NaN and infinity; bad[i]: does row i differ? */
const uint16_t *attn__bf16_clean(uint16_t *to, const uint16_t *from, int64_t row, int32_t rows, int32_t dim, bool *bad);

/*
 * ---- floats as three bf16, halves (f16) as two, for tiles ----
 *
 * Each part is what the parts before it leave, the first two rounded, so that all of them add up to the number, of 24 bits or 11. Six of the nine
 * products of two floats' parts are as exact as a product of floats: of the other three the largest is 2^-25 of it (of P V 2^-23, as p's
 * parts are not rounded). The four of two halves' parts are their product. Where p or d_s is a factor three will do: the fourth is up to 2^-15 of the product, and
 * 2^-16 is what p's second part, which is rounded, may be off by.
 *
 * Tiles take subnormal
 * numbers as zero, so the parts of a float x are off by up to 2^-126 where it is tiny; and where it is out, its parts cannot be used. Either is
 * decided by the first part: tiny below ATTN_SPLIT_LEAST, 2^-102, but for 0; out beyond ATTN_SPLIT_MOST, 2^56, or where x is no number. A half is
 * out where it is no number, and never tiny.
 *
 * Scores are made of the same parts in the backward. The rest of it is products of products, so what they are made of is lifted to where there is the most room, by
 * powers of two: then nothing is tiny that float has as a normal number, but for the last 20 powers. Beyond ATTN_SPLIT_MOST when lifted are q, k and v from
 * 2^16 on, and d_o from 2^28. Below, a sum of 2^13 of the largest products, 2^24 2^16 2^28 2^9 2^15 (of dropout) 2^16 2^5, is a number.
 */
enum { ATTN_SPLIT_MOST = (127 + 56) << 7, ATTN_SPLIT_LEAST = (127 - 102) << 7 }; /* as bits of bf16 */
enum { ATTN_SPLIT_LARGE = (127 + 16) << 7 };                                     /* from here on ATTN_LIFT_V is too much */
#define ATTN_LIFT_V 0x1p40f                                                      /* v of d_p, which is larger by this */
#define ATTN_LIFT_D_O 0x1p28f                                                    /* and this, of d_o */
#define ATTN_LIFT_P 0x1p24f                                                      /* p and d_s */
#define ATTN_LIFT_OTHERS 0x1p5f /* q, k and d_o that are multiplied with them */
#define ATTN_DELTA_MOST 0x1p63f /* beyond it delta is larger than any d_p of theirs */
enum { ATTN_SPLIT_OUT = 1, ATTN_SPLIT_TINY = 2, ATTN_SPLIT_IS_LARGE = 4 };

/* Which of them x is. */
static inline int attn__bf16_odd(float x) {
    const uint32_t size = attn__bits(x) & INT32_MAX, first = (size + 0x8000) >> 16;
    return size == 0 || (first >= ATTN_SPLIT_LEAST && first <= ATTN_SPLIT_MOST) ? 0
           : first > ATTN_SPLIT_MOST                                            ? ATTN_SPLIT_OUT
                                                                                : ATTN_SPLIT_TINY;
}

/* How many parts a number of this dtype has. */
static inline int32_t attn__bf16_parts(attn_dtype dtype) { return dtype == ATTN_F32 ? 3 : dtype == ATTN_F16 ? 2 : 1; }

/*
 * Elements from part to part of an operand, of which each has so many; 0: there is one. Tiles of all parts that are multiplied one after the other would
 * lie in the same sets of the first cache, were it not for a tile in between. And the elements of all parts.
 */
static inline int64_t attn__bf16_part_of(int32_t parts, int64_t elements) {
    return parts > 1 ? elements + ATTN_BF16_TILE : 0;
}
static inline int64_t attn__bf16_whole_of(int32_t parts, int64_t elements) {
    return elements + (parts - 1) * attn__bf16_part_of(parts, elements);
}

/* Rows of numbers to be taken apart, times a power of two. */
typedef struct attn_bf16_numbers {
    const void *from;
    attn_dtype dtype; /* ATTN_F32 or ATTN_F16 */
    int64_t row;      /* elements from row to row */
    float factor;
} attn_bf16_numbers;

#ifdef ATTN_HAVE_AMX
/* As pack_rows, pack_columns, pack_dims and pack_pairs; the parts are `part` elements apart. Returns what some of the products may be. */
int attn__bf16_split_rows(uint16_t *a, int64_t part, const attn_bf16_numbers *of, int32_t rows, int32_t dim);
int attn__bf16_split_columns(uint16_t *a, int64_t part, const attn_bf16_numbers *of, int32_t rows, int32_t dim);
int attn__bf16_split_dims(uint16_t *b, int64_t part, const attn_bf16_numbers *of, int32_t rows, int32_t dim);
int attn__bf16_split_pairs(uint16_t *b, int64_t part, const attn_bf16_numbers *of, int32_t rows, int32_t dim);

/* o[dim][16] = o times alpha[16], plus more[dim][16]. */
void attn__bf16_take_in(float *o, int32_t dim, const float *alpha, const float *more);
#else /* no kernel of Arm's asks for it: BFMMLA does four times what fmla does, and six products would be wanted */
static inline int attn__bf16_no_split(uint16_t *to, int64_t part, const attn_bf16_numbers *of, int32_t rows, int32_t dim) {
    (void)to, (void)part, (void)of, (void)rows, (void)dim;
    return 0;
}
#define attn__bf16_split_rows attn__bf16_no_split
#define attn__bf16_split_columns attn__bf16_no_split
#define attn__bf16_split_dims attn__bf16_no_split
#define attn__bf16_split_pairs attn__bf16_no_split
static inline void attn__bf16_take_in(float *o, int32_t dim, const float *alpha, const float *more) {
    (void)o, (void)dim, (void)alpha, (void)more;
}
#endif

/* ---- between the products ---- */

/*
 * One step of online softmax: p = 2^(factor * x - max), where x = scale * s, rounded; p is rounded to bf16, as operand b of the product
 * with V; sum grows by the p before they are rounded. max is the largest factor * x so far, hence p of the largest is 1, which bf16 has: without that the
 * error of o would be 3 percent larger. alpha = 2^(old max - new max) is what O must be multiplied by, exactly 1 where nothing
 * has changed. The logarithm of the sum of e^scores is (max + log2(sum)) ln 2.
 *
 * A column of nothing but -inf so far keeps max = -inf and sum = 0, and its p is 0. NaN comes through. What would be
 * below 2^-126 is 0. The columns have nothing to do with each other.
 *
 * With `parts` (tiles alone) p comes in two or three parts, and with sum ATTN_SPLIT_SHIFT times as large: three are then normal numbers wherever float
 * has p. It is 2^(factor * (x - max)) there, and max the largest x: what is rounded is a difference, not what may be millions.
 */
#define ATTN_SPLIT_SHIFT 0x1p32f

typedef struct attn_bf16_softmax {
    float *s; /* [width / 16][keys][16], scratch afterwards */
    int64_t s_panel;
    int32_t keys, width;
    float scale, factor;      /* above 0; factor is log2(e) for scores in base e */
    float *max, *sum, *alpha; /* [width] */
    uint16_t *p;              /* keys padded to 32 */
    int32_t parts;            /* as in a product */
    int64_t p_panel, p_part;  /* from part to part */
} attn_bf16_softmax;

/*
 * The step, and products (`count`, may be 0) that have nothing to do with it, done meanwhile: tiles multiply while vectors make
 * exponentials. Such are the scores of the next keys, and the product of V and P of those before: in parts if p is. The bits are the same
 * either way.
 * Products by vectors, which would be in each other's way, come after it.
 */
void attn__bf16_softmax(const attn_bf16_softmax *step, const attn_bf16_product *products, int32_t count);

/*
 * Between the products of the backward, for 32 query rows, two panels:
 *
 *     p = e^(scale * s + rest - lse)        d_s = p (keep * d_p - delta) slope
 *
 * both rounded to bf16 (to the nearest, half-way to even; subnormals become 0). p is 0 where s is -inf or lse is +inf, whatever else there is;
 * d_s is 0 where p is. The columns have nothing to do with each other.
 *
 * With `parts` (tiles alone) p and d_s come in two or three parts, ATTN_LIFT_P times as large. p is as exact as that of micro.h's exp,
 * e^(scale * s + rest - lse - low); and where it is kept, it takes the place of s.
 */
typedef struct attn_bf16_gradients {
    float *s;                  /* [2][keys][16], `panel` from the first to the second */
    const float *d_p;          /* the same */
    const float *slope, *rest; /* the same; NULL: 1 and 0 */
    int64_t panel;
    int32_t keys; /* a multiple of 32 */
    float scale, keep;
    const float *lse, *delta; /* [32] */
    const float *low;         /* [32]; in parts alone, as keep_p */
    bool keep_p;
    uint16_t *p, *d_s;  /* operands a, m over keys, k over these rows; panels are `down` apart */
    int32_t parts;      /* as in a product */
    int64_t down, part; /* from part to part */
    uint16_t
        *pairs; /* d_s as operand b, k over keys, n over rows in the order of attn__bf16_row; panels are 16 * keys apart */
    int64_t pairs_part;
} attn_bf16_gradients;

void attn__bf16_gradients(const attn_bf16_gradients *step);

/* The row, of 32, that is column `c` of panel `n` of `pairs`: what is cheapest to make may have them in groups. And back: 16 n + c. */
static inline int32_t attn__bf16_row(int32_t n, int32_t c) {
    const int32_t group = ATTN_BF16_GROUP_ROWS;
    return c / group * (2 * group) + n * group + c % group;
}
static inline int32_t attn__bf16_column(int32_t r) {
    const int32_t group = ATTN_BF16_GROUP_ROWS;
    return r / group % 2 * 16 + r / (2 * group) * group + r % group;
}

/* o[dim][16] times alpha[16], a panel of O^T; nothing is done where alpha is 1. */
void attn__bf16_rescale(float *o, int32_t dim, const float *alpha);

/* to[16][ld] = the transpose of a panel [dim][16], dim a multiple of 16. */
void attn__bf16_transpose(const struct attn__micro_f32 *micro, float *to, int64_t ld, const float *panel, int32_t dim);

#endif
