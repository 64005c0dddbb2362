/*
 * Arm's products of bf16 (bf16.h), by BFMMLA, the packing of their operands and the softmax between them, by NEON.
 *
 * BFMMLA multiplies 2 x 4 by 4 x 2 elements and adds the result to 2 x 2 floats: a row of either operand is two rows of m (or columns of n),
 * four of k each. So a tile is [8][16][4], for a as for b: a vector is two of the 16, and what is packed for one can be the other. A block of 8 x 8 of c
 * is 16 sums in registers, chains enough for the latency, and does 16 multiplications for 8 loads. c is [row][column] in memory; it is
 * taken apart into 2 x 2 at the beginning and put together at the end of a block.
 *
 * p and d_s are made [2 keys][4 rows] at a time, which is how they are operand a of the backward; operand b, with k over keys, takes a
 * transposition of 4 x 4. Exponentials, eight vectors at once, are those of the float kernels in base 2 (exp.h).
 */
#include "bf16.h"

#include <arm_neon.h>
#include <math.h>
#include <string.h>

#include "simd.h"

#include "exp.h"

/* ---- the mode of floating-point arithmetic ---- */

enum { FLUSH_TO_ZERO = 1 << 24, EXTENDED_BF16 = 1 << 13 }; /* the rest is 0: to the nearest, nothing traps */

INLINE uint64_t get_mode(void) {
    uint64_t mode;
    __asm__ volatile("mrs %0, fpcr" : "=r"(mode)::"memory");
    return mode;
}

INLINE void set_mode(uint64_t mode) { __asm__ volatile("msr fpcr, %0" ::"r"(mode) : "memory"); }

/* ---- products ---- */

void attn__bf16_begin(bool by_vectors) { (void)by_vectors; }
void attn__bf16_end(bool by_vectors) { (void)by_vectors; }

enum { BLOCK_M = 8, BLOCK_N = 8, KGROUP = 16 * ATTN_BF16_GROUP_A }; /* elements of a panel for four of k */

INLINE bfloat16x8_t load_two(const uint16_t *p) { return vreinterpretq_bf16_u16(vld1q_u16(p)); }

/* Two rows of four columns become two blocks of 2 x 2, and back. */
INLINE vreal first_halves(vreal a, vreal b) {
    return vreinterpretq_f32_f64(vzip1q_f64(vreinterpretq_f64_f32(a), vreinterpretq_f64_f32(b)));
}
INLINE vreal second_halves(vreal a, vreal b) {
    return vreinterpretq_f32_f64(vzip2q_f64(vreinterpretq_f64_f32(a), vreinterpretq_f64_f32(b)));
}

/* 8 x 8 of c, of which the first element, its row of a and its column of b are given. */
INLINE void block_8x8(float *c, int64_t ldc, const uint16_t *a, const uint16_t *b, int32_t k, bool accumulate) {
    vreal sum[4][4];
    UNROLL for (int i = 0; i < 4; i++) { UNROLL for (int j = 0; j < 4; j++) sum[i][j] = splat(0); }
    if (accumulate) {
        UNROLL for (int i = 0; i < 4; i++) {
            UNROLL for (int j = 0; j < 4; j += 2) {
                const float *at = c + 2 * i * ldc + 2 * j;
                vreal even = load(at), odd = load(at + ldc);
                sum[i][j] = first_halves(even, odd);
                sum[i][j + 1] = second_halves(even, odd);
            }
        }
    }
    do { /* at least once: with a test before it, gcc 12 copies every sum before and after */
        bfloat16x8_t row[4], column[4];
        UNROLL for (int i = 0; i < 4; i++) row[i] = load_two(a + 8 * i);
        UNROLL for (int j = 0; j < 4; j++) column[j] = load_two(b + 8 * j);
        UNROLL for (int i = 0; i < 4; i++) {
            UNROLL for (int j = 0; j < 4; j++) sum[i][j] = vbfmmlaq_f32(sum[i][j], row[i], column[j]);
        }
        a += KGROUP, b += KGROUP, k -= 4;
    } while (k > 0);
    UNROLL for (int i = 0; i < 4; i++) {
        UNROLL for (int j = 0; j < 4; j += 2) {
            float *at = c + 2 * i * ldc + 2 * j;
            store(at, first_halves(sum[i][j], sum[i][j + 1]));
            store(at + ldc, second_halves(sum[i][j], sum[i][j + 1]));
        }
    }
}

/* Eight rows of a stay in the first cache, and so does b; a comes from the second once. */
static void run_plain(const attn_bf16_product *product) {
    const attn_bf16_product p = *product;
    for (int32_t i = 0; i < p.m; i += BLOCK_M) {
        const uint16_t *a = p.a + attn__bf16_place_a(p.a_panel, i, 0);
        for (int32_t j = 0; j < p.n; j += BLOCK_N)
            block_8x8(p.c + i * p.ldc + j / 16 * p.c_panel + j % 16, p.ldc, a, p.b + attn__bf16_place_b(p.b_panel, j, 0),
                      p.k, p.accumulate);
    }
}

/* BFMMLA pays no attention to the mode, but where the caller has set FPCR.EBF: that makes another instruction of it. */
void attn__bf16_run(const attn_bf16_product *product) {
    uint64_t mode = get_mode();
    if (mode & EXTENDED_BF16) set_mode(mode & ~(uint64_t)EXTENDED_BF16);
    run_plain(product);
    if (mode & EXTENDED_BF16) set_mode(mode);
}

/* ---- operands from rows ---- */

typedef uint16x8_t words;
#include "bf16_pack.h"

static inline void take_square(square *q, const uint16_t *from, int64_t row, int32_t rows, int32_t dims) {
    q->data = from;
    q->row = row;
    if (rows >= 32 && dims >= 32) return;
    memset(q->copy, 0, sizeof q->copy);
    for (int32_t i = 0; i < rows && i < 32; i++)
        memcpy(q->copy + (ptrdiff_t)32 * i, from + i * row, (size_t)(dims < 32 ? dims : 32) * sizeof *from);
    q->data = q->copy;
    q->row = 32;
}

INLINE uint16x8_t low_halves(uint16x8_t a, uint16x8_t b) {
    return vreinterpretq_u16_u64(vzip1q_u64(vreinterpretq_u64_u16(a), vreinterpretq_u64_u16(b)));
}
INLINE uint16x8_t high_halves(uint16x8_t a, uint16x8_t b) {
    return vreinterpretq_u16_u64(vzip2q_u64(vreinterpretq_u64_u16(a), vreinterpretq_u64_u16(b)));
}

/* m or n over rows: two rows' dims, four and four. */
INLINE void square_of_rows(uint16_t *to, int64_t panel, const square *q, bool both, words *most) {
    (void)most;
    for (int32_t i = 0; i < (both ? 32 : 16); i += 2) {
        uint16_t *at = to + i / 16 * panel + (ptrdiff_t)(i % 16) * 4;
        UNROLL for (int x = 0; x < 32; x += 8, at += 2 * KGROUP) {
            uint16x8_t even = vld1q_u16(q->data + i * q->row + x), odd = vld1q_u16(q->data + (i + 1) * q->row + x);
            vst1q_u16(at, low_halves(even, odd));
            vst1q_u16(at + KGROUP, high_halves(even, odd));
        }
    }
}

/* m or n over dims: the transposition of 4 rows by 8 dims. */
INLINE uint16x8_t transpose_four(uint16_t *to, const uint16_t *from, int64_t row, uint16x8_t most) {
    uint16x8_t in[4];
    UNROLL for (int n = 0; n < 4; n++) {
        in[n] = vld1q_u16(from + n * row);
        most = vmaxq_u16(most, vaddq_u16(in[n], in[n]));
    }
    uint16x8_t even = vzip1q_u16(in[0], in[2]), odd = vzip1q_u16(in[1], in[3]);
    vst1q_u16(to, vzip1q_u16(even, odd));
    vst1q_u16(to + 8, vzip2q_u16(even, odd));
    even = vzip2q_u16(in[0], in[2]), odd = vzip2q_u16(in[1], in[3]);
    vst1q_u16(to + 16, vzip1q_u16(even, odd));
    vst1q_u16(to + 24, vzip2q_u16(even, odd));
    return most;
}

INLINE void square_of_columns(uint16_t *to, int64_t panel, const square *q, bool both, words *most) {
    uint16x8_t m = *most;
    for (int32_t i = 0; i < 32; i += 4, to += KGROUP) {
        const uint16_t *from = q->data + i * q->row;
        for (int32_t x = 0; x < (both ? 32 : 16); x += 8)
            m = transpose_four(to + x / 16 * panel + (ptrdiff_t)(x % 16) * 4, from + x, q->row, m);
    }
    *most = m;
}

/* The same for operand a, whose panels come in pairs. */
INLINE void square_of_rows_a(uint16_t *to, int64_t panel, const square *q, bool both, words *most) {
    (void)both;
    square_of_rows(to, panel, q, true, most);
}
INLINE void square_of_columns_a(uint16_t *to, int64_t panel, const square *q, bool both, words *most) {
    (void)both;
    square_of_columns(to, panel, q, true, most);
}

INLINE bool is_finite(uint16x8_t most) { return vmaxvq_u16(most) < TWICE_INFINITY; }

void attn__bf16_pack_rows(uint16_t *a, const uint16_t *from, int64_t row, int32_t rows, int32_t dim) {
    pack(square_of_rows_a, true, a, from, row, rows, dim, NULL);
}

bool attn__bf16_pack_columns(uint16_t *a, const uint16_t *from, int64_t row, int32_t rows, int32_t dim) {
    uint16x8_t most = vdupq_n_u16(0);
    pack(square_of_columns_a, false, a, from, row, rows, dim, &most);
    return is_finite(most);
}

void attn__bf16_pack_dims(uint16_t *b, const uint16_t *from, int64_t row, int32_t rows, int32_t dim) {
    pack(square_of_rows, true, b, from, row, rows, dim, NULL);
}

void attn__bf16_pack_pairs(uint16_t *b, const uint16_t *from, int64_t row, int32_t rows, int32_t dim) {
    uint16x8_t unused = vdupq_n_u16(0);
    pack(square_of_columns, false, b, from, row, rows, dim, &unused);
}

bool attn__bf16_finite(const uint16_t *from, int64_t row, int32_t rows, int32_t dim) {
    uint16x8_t most = vdupq_n_u16(0);
    bool finite = true;
    for (int32_t i = 0; i < rows; i++) {
        const uint16_t *at = from + i * row; /* the stride of a row alone may be any number: never past the last one */
        int32_t x = 0;
        for (; x + 8 <= dim; x += 8) {
            uint16x8_t v = vld1q_u16(at + x);
            most = vmaxq_u16(most, vaddq_u16(v, v));
        }
        for (; x < dim; x++) finite &= !attn__bf16_is_bad(at[x]);
    }
    return finite && is_finite(most);
}

/* ---- from floats to operands ---- */

/* Two vectors as bf16, one after the other: four rows of two keys. */
INLINE uint16x8_t rounded(vreal first, vreal second) {
    return vreinterpretq_u16_bf16(vcvtq_high_bf16_f32(vcvtq_low_bf16_f32(first), second));
}

/* Four keys of four rows, a key pair in each vector, with k over keys. */
INLINE void store_by_keys(uint16_t *to, uint16x8_t first, uint16x8_t second) {
    uint16x8_t even = vzip1q_u16(first, second), odd = vzip2q_u16(first, second);
    vst1q_u16(to, vzip1q_u16(even, odd));
    vst1q_u16(to + 8, vzip2q_u16(even, odd));
}

/* ---- softmax ---- */

enum {
    KEYS = 8
}; /* whose exponentials are made at once, and summed before they meet the rest: short sums keep the rounding error small */

/* What four columns' p are made with, and what they leave. */
typedef struct columns {
    vreal scale, factor, minus; /* p = 2^(factor * (scale * s) + minus) */
    vreal sum;                  /* of p */
} columns;

/* p of KEYS keys, at place p of operand b. */
INLINE void exp_keys(columns *c, uint16_t *p, const float *s) {
    const int n = KEYS;
    vreal x[KEYS];
    EACH(x[i] = vmulq_f32(load(s + 16 * i), c->scale));
    EACH(x[i] = vfmaq_f32(c->minus, x[i], c->factor));
    exp2_all(n, x);
    store_by_keys(p, rounded(x[0], x[1]), rounded(x[2], x[3]));
    store_by_keys(p + KGROUP, rounded(x[4], x[5]), rounded(x[6], x[7]));
    vreal low = (x[0] + x[1]) + (x[2] + x[3]), high = (x[4] + x[5]) + (x[6] + x[7]);
    c->sum += low + high;
}

/* All keys; what is missing to a group is -inf, whose p is 0 and changes no sum, and then come zeros to the end of the tile. */
INLINE void exp_columns(columns *of, uint16_t *p, const float *s, int32_t keys) {
    columns c = *of; /* of which nobody has the address: it stays in registers */
    int32_t j = 0, end = (int32_t)attn__bf16_pad(keys);
    for (; j + KEYS <= keys; j += KEYS, p += KEYS / 4 * KGROUP, s += (ptrdiff_t)16 * KEYS) exp_keys(&c, p, s);
    if (j < keys) {
        float rest[16 * KEYS];
        for (int32_t n = 0; n < KEYS; n++)
            store(rest + (ptrdiff_t)16 * n, n < keys - j ? load(s + (ptrdiff_t)16 * n) : splat(-INFINITY));
        exp_keys(&c, p, rest);
        j += KEYS, p += KEYS / 4 * KGROUP;
    }
    for (; j < end; j += 4, p += KGROUP) {
        vst1q_u16(p, vdupq_n_u16(0));
        vst1q_u16(p + 8, vdupq_n_u16(0));
    }
    *of = c;
}

#define LARGE 0x1p20f

/*
 * Where the maximum is beyond LARGE, factor * x - max would keep what the rounding of factor * x to the maximum has left, and that
 * may be much above 0. In these columns s is replaced by factor * x, rounded; the others stay as they are.
 */
static void scale_large(float *s, int32_t keys, columns *c, uint32x4_t large) {
    const vreal one = splat(1);
    for (int32_t j = 0; j < keys; j++, s += 16) {
        vreal x = load(s);
        store(s, vbslq_f32(large, vmulq_f32(vmulq_f32(x, c->scale), c->factor), x));
    }
    c->scale = vbslq_f32(large, one, c->scale);
    c->factor = vbslq_f32(large, one, c->factor);
}

/* Four columns from r on, whose largest score is given. */
INLINE void softmax_columns(const attn_bf16_softmax *m, int32_t r, vreal largest) {
    const vreal before = load(m->max + r);
    float *s = m->s + r / 16 * m->s_panel + r % 16;
    columns c = {.scale = splat(m->scale), .factor = splat(m->factor), .sum = splat(0)};
    vreal most = vmaxnmq_f32(vmulq_f32(vmulq_f32(largest, c.scale), c.factor), before);
    vreal base = vbslq_f32(vceqq_f32(most, splat(-INFINITY)), splat(0), most);
    uint32x4_t large = vcgtq_f32(vabsq_f32(base), splat(LARGE));
    if (vmaxvq_u32(large)) scale_large(s, m->keys, &c, large);
    c.minus = vnegq_f32(base);
    exp_columns(&c, m->p + attn__bf16_place_b(m->p_panel, r, 0), s, m->keys);
    vreal alpha = vsubq_f32(before, base);
    exp2_all(1, &alpha);
    alpha = vbslq_f32(vceqq_f32(before, base), splat(1), alpha);
    store(m->max + r, most);
    store(m->alpha + r, alpha);
    store(m->sum + r, vfmaq_f32(c.sum, load(m->sum + r), alpha));
}

/* A panel of 16 columns. What is not a number is passed over where the largest is looked for. */
static void softmax_panel(const attn_bf16_softmax *m, int32_t r) {
    const float *s = m->s + r / 16 * m->s_panel;
    vreal most[4];
    UNROLL for (int v = 0; v < 4; v++) most[v] = splat(-INFINITY);
    for (int32_t j = 0; j < m->keys; j++, s += 16) {
        UNROLL for (int v = 0; v < 4; v++) most[v] = vmaxnmq_f32(load(s + 4 * v), most[v]);
    }
    for (int v = 0; v < 4; v++) softmax_columns(m, r + 4 * v, most[v]);
}

void attn__bf16_softmax(const attn_bf16_softmax *step, const attn_bf16_product *products, int32_t count) {
    uint64_t mode = get_mode();
    set_mode(FLUSH_TO_ZERO);
    for (int32_t r = 0; r < step->width; r += 16) softmax_panel(step, r);
    for (int32_t n = 0; n < count; n++) run_plain(&products[n]);
    set_mode(mode);
}

/* ---- p and d_s of the backward ---- */

/* Four rows: the panel of scores and the lanes of it, and what is known of them. */
typedef struct lanes {
    int32_t r;
    vreal minus_lse, minus_delta;
    uint32x4_t has_key; /* lse is not +inf */
} lanes;

/*
 * p of four rows and KEYS keys. plain: no slope, no rest, and every lse is a finite number, so that -inf in s makes p = 0 by
 * itself. Of an lse that is not that of the scores the exponent may be any number: it is held at 128, where p is infinity.
 */
INLINE void p_of(const attn_bf16_gradients *m, const lanes *c, int64_t at, const bool plain, vreal *p) {
    const int n = KEYS;
    const vreal log2e = splat(1.44269504088896340736f), scale = splat(m->scale), most = splat(128);
    EACH(p[i] = vfmaq_f32(c->minus_lse, load(m->s + at + 16 * i), scale));
    if (!plain && m->rest) EACH(p[i] = vaddq_f32(p[i], load(m->rest + at + 16 * i)));
    EACH(p[i] = vminq_f32(vmulq_f32(p[i], log2e), most));
    exp2_all(n, p);
    if (plain) return;
    for (int32_t j = 0; j < KEYS; j++) {
        uint32x4_t masked = vceqq_f32(load(m->s + at + 16 * j), splat(-INFINITY));
        uint32x4_t allowed = vbicq_u32(c->has_key, masked);
        p[j] = vreinterpretq_f32_u32(vandq_u32(allowed, vreinterpretq_u32_f32(p[j])));
    }
}

/* From p to d_s. */
INLINE void d_s_of(const attn_bf16_gradients *m, const lanes *c, int64_t at, const bool plain, vreal *p) {
    const int n = KEYS;
    const vreal keep = splat(m->keep);
    vreal d[KEYS];
    EACH(d[i] = vfmaq_f32(c->minus_delta, load(m->d_p + at + 16 * i), keep));
    if (!plain && m->slope) EACH(d[i] = vmulq_f32(d[i], load(m->slope + at + 16 * i)));
    EACH(d[i] = vmulq_f32(d[i], p[i]));
    EACH(p[i] = vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(d[i]), vceqzq_f32(p[i]))));
}

/* Four rows and KEYS keys as operand a: four vectors, which are stored in `to` and left in `two`. */
INLINE void store_by_rows(uint16_t *to, const vreal *x, uint16x8_t two[4]) {
    UNROLL for (int n = 0; n < 4; n++) {
        two[n] = rounded(x[2 * n], x[2 * n + 1]);
        vst1q_u16(to + 8 * n, two[n]);
    }
}

INLINE void gradient_keys(const attn_bf16_gradients *step, const lanes *c, const bool plain) {
    attn_bf16_gradients m = *step;
    int64_t scores = c->r / 16 * m.panel + c->r % 16;
    for (int32_t j = 0; j < m.keys; j += KEYS) {
        int64_t at = scores + (int64_t)16 * j, to = attn__bf16_place_a(m.down, j, c->r);
        vreal x[KEYS];
        uint16x8_t two[4];
        p_of(&m, c, at, plain, x);
        store_by_rows(m.p + to, x, two);
        d_s_of(&m, c, at, plain, x);
        store_by_rows(m.d_s + to, x, two);
        uint16_t *b = m.pairs + attn__bf16_place_b((int64_t)16 * m.keys, c->r, j);
        store_by_keys(b, two[0], two[1]);
        store_by_keys(b + KGROUP, two[2], two[3]);
    }
}

void attn__bf16_gradients(const attn_bf16_gradients *step) {
    const vreal none = splat(INFINITY);
    uint64_t mode = get_mode();
    set_mode(FLUSH_TO_ZERO);
    bool plain = !step->slope && !step->rest;
    for (int32_t r = 0; r < 32; r += 4) plain &= vminvq_u32(vcltq_f32(vabsq_f32(load(step->lse + r)), none)) != 0;
    for (int32_t r = 0; r < 32; r += 4) {
        vreal lse = load(step->lse + r);
        lanes c = {.r = r,
                   .minus_lse = vnegq_f32(lse),
                   .minus_delta = vnegq_f32(load(step->delta + r)),
                   .has_key = vmvnq_u32(vceqq_f32(lse, none))};
        if (plain)
            gradient_keys(step, &c, true);
        else
            gradient_keys(step, &c, false);
    }
    set_mode(mode);
}

void attn__bf16_rescale(float *o, int32_t dim, const float *alpha) {
    vreal factor[4];
    uint32x4_t same = vdupq_n_u32(~0u);
    UNROLL for (int v = 0; v < 4; v++) {
        factor[v] = load(alpha + 4 * v);
        same = vandq_u32(same, vceqq_f32(factor[v], splat(1)));
    }
    if (vminvq_u32(same)) return;
    for (int32_t x = 0; x < dim; x++, o += 16) {
        UNROLL for (int v = 0; v < 4; v++) store(o + 4 * v, vmulq_f32(load(o + 4 * v), factor[v]));
    }
}
