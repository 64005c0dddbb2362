/*
 * A part of micro.c: e^x and the hyperbolic tangent of vectors, float or double.
 *
 * exp_of(x, with_rest, rest) is e^(x + rest), exp_all the same of n vectors, EXP_AT_ONCE of which are best. exp2_all, of NEON alone, is 2^x.
 */
#ifndef ATTN_CPU_EXP_H
#define ATTN_CPU_EXP_H

/* A statement for each i < n, which is known and at most 8. Written out: clang leaves loops as they are, and arrays in memory. */
#define EACH(...)                                                                                                          \
    do {                                                                                                                   \
        STEP_OF_EACH(0, __VA_ARGS__)                                                                                       \
        STEP_OF_EACH(1, __VA_ARGS__)                                                                                       \
        STEP_OF_EACH(2, __VA_ARGS__)                                                                                       \
        STEP_OF_EACH(3, __VA_ARGS__)                                                                                       \
        STEP_OF_EACH(4, __VA_ARGS__)                                                                                       \
        STEP_OF_EACH(5, __VA_ARGS__)                                                                                       \
        STEP_OF_EACH(6, __VA_ARGS__)                                                                                       \
        STEP_OF_EACH(7, __VA_ARGS__)                                                                                       \
    } while (0)
#define STEP_OF_EACH(place, ...)                                                                                           \
    if (n > place) {                                                                                                       \
        enum { i = place };                                                                                                \
        __VA_ARGS__;                                                                                                       \
    }

#if defined(ATTN_NEON)
/* A constant that a multiply-add will overwrite: loaded, for a copy would take a turn of the multipliers. */
#define FRESH(v, constant) __asm__ volatile("ldr %q0, %1" : "=w"(v) : "m"(constant))
#endif

#ifdef ATTN_REAL_F64

/*
 * e^f - 1 for x = n ln 2 + f, |f| <= ln 2 / 2: Taylor's polynomial of degree 13, whose error is 4e-18. Adding 1.5 * 2^52 leaves
 * the nearest integer n in the low bits of `shifted`; ln 2 is taken off in two parts, of which the first has so few bits that
 * its product is exact.
 */
INLINE vreal expm1_fraction(vreal x, const bool with_rest, vreal rest, vreal *shifted) {
    static const real coefficient[] = {1.0 / 479001600, 1.0 / 39916800, 1.0 / 3628800, 1.0 / 362880,
                                       1.0 / 40320,     1.0 / 5040,     1.0 / 720,     1.0 / 120,
                                       1.0 / 24,        1.0 / 6,        1.0 / 2};
    const vreal magic = splat(6755399441055744.0);
    *shifted = x * 1.44269504088896340736 + magic;
    vreal n = *shifted - magic;
    vreal f = x - n * 6.93147180369123816490e-01 - n * 1.90821492927058770002e-10;
    if (with_rest) f += rest;
    vreal y = splat(1.0 / 6227020800);
    UNROLL for (int i = 0; i < 11; i++) y = y * f + coefficient[i];
    return f + f * f * y;
}

#if defined(ATTN_NEON)

/* e^(x + rest) as below, of n vectors. The power of two, and what becomes of small x and NaN, as float's exp_all has it. */
INLINE void exp_all(const int n, vreal *x, const bool with_rest, const vreal *rest) {
    static const vreal coefficient[] = {{1.0 / 479001600, 1.0 / 479001600},
                                        {1.0 / 39916800, 1.0 / 39916800},
                                        {1.0 / 3628800, 1.0 / 3628800},
                                        {1.0 / 362880, 1.0 / 362880},
                                        {1.0 / 40320, 1.0 / 40320},
                                        {1.0 / 5040, 1.0 / 5040},
                                        {1.0 / 720, 1.0 / 720},
                                        {1.0 / 120, 1.0 / 120},
                                        {1.0 / 24, 1.0 / 24},
                                        {1.0 / 6, 1.0 / 6},
                                        {1.0 / 2, 1.0 / 2}};
    static const vreal magic = {6755399441056767.0, 6755399441056767.0}; /* 1.5 * 2^52 + 1023 */
    vreal shifted[8], y[8], f[8];
    EACH(FRESH(shifted[i], magic));
    EACH(x[i] = vmaxq_f64(x[i], splat(-709.08956571282)));
    EACH(shifted[i] = vfmaq_f64(shifted[i], x[i], splat(1.44269504088896340736)));
    EACH(y[i] = shifted[i] - magic);
    EACH(f[i] = vfmsq_f64(x[i], y[i], splat(6.93147180369123816490e-01)));
    EACH(f[i] = vfmsq_f64(f[i], y[i], splat(1.90821492927058770002e-10)));
    if (with_rest) EACH(f[i] += rest[i]);
    if (with_rest) EACH(f[i] = vmaxq_f64(f[i], splat(-64.0)));
    if (with_rest) EACH(f[i] = vminq_f64(f[i], splat(64.0)));
    EACH(y[i] = splat(1.0 / 6227020800));
    UNROLL16 for (int c = 0; c < 11; c++) {
        EACH(FRESH(x[i], coefficient[c]));
        EACH(y[i] = vfmaq_f64(x[i], y[i], f[i]));
    }
    EACH(x[i] = f[i] * f[i]);
    EACH(f[i] = vfmaq_f64(f[i], x[i], y[i]));
    EACH(shifted[i] = (vreal)((vbits)shifted[i] << 52));
    EACH(x[i] = vfmaq_f64(shifted[i], shifted[i], f[i]));
}

INLINE vreal exp_of(vreal x, const bool with_rest, vreal rest) {
    exp_all(1, &x, with_rest, &rest);
    return x;
}

#else

/* e^(x + rest) for x <= 709, to within about one unit in the last place. Below 2^-1022 the result is 0; NaN stays NaN. */
INLINE vreal exp_of(vreal x, const bool with_rest, vreal rest) {
    vreal shifted, y = expm1_fraction(x, with_rest, rest, &shifted) + 1.0;
    y = (vreal)((vbits)y + ((vbits)shifted << 52)); /* unsigned: it wraps for what is set to 0 below */
    return (vreal)(~(vint)(x < splat(-708.39)) & (vint)(y + (x - x)));
}

#endif

/* cap * tanh(s / cap) by t / (t + 2), where t = e^(2 |s / cap|) - 1 = 2^n (e^f - 1) + (2^n - 1) loses nothing near 0. */
INLINE vreal softcap_vector(vreal s, real cap, real inverse) {
    const vint sign_bit = (vint)splat(-0.0);
    vreal x = s * inverse, size = 2 * (vreal)((vint)x & ~sign_bit), shifted;
    vreal part =
        expm1_fraction(pick(size > splat(40.0), splat(40.0), size), false, size, &shifted); /* from 38 on it is 1 */
    vreal power = (vreal)((vbits)splat(1.0) + ((vbits)shifted << 52)), t = power * part + (power - 1);
    return (vreal)((vint)(cap * (t / (t + 2))) | ((vint)x & sign_bit));
}

#else

#if defined(ATTN_NEON)

/*
 * e^(x + rest) as below, of n vectors, by fewer instructions. x is held at -127 ln 2, where n = -127: 2^n, made by a shift of the low
 * bits of `shifted`, which have n + 127, is 0 there, and so is the result. The polynomial's terms are summed by pairs. 2^n (1 + r) as
 * 2^n + 2^n r is rounded once. NaN stays NaN: fmax keeps it, and every product with it is. A rest belongs to what x was: where that was far below, the
 * rest may be anything, and what it is added to is held where its power is a number, so that times 2^n it is 0.
 *
 * One vector after the other would wait for itself. Constants that are not added to are elements of two vectors.
 */
INLINE void exp_all(const int n, vreal *x, const bool with_rest, const vreal *rest) {
    static const vreal magic = {12583039.0f, 12583039.0f, 12583039.0f, 12583039.0f}; /* 1.5 * 2^23 + 127 */
    static const vreal coefficient[] = {{8.36871687973e-3f, 8.36871687973e-3f, 8.36871687973e-3f, 8.36871687973e-3f},
                                        {4.16683880453e-2f, 4.16683880453e-2f, 4.16683880453e-2f, 4.16683880453e-2f},
                                        {1.66665206317e-1f, 1.66665206317e-1f, 1.66665206317e-1f, 1.66665206317e-1f},
                                        {4.99999934478e-1f, 4.99999934478e-1f, 4.99999934478e-1f, 4.99999934478e-1f},
                                        {1, 1, 1, 1}};
    const vreal c = {1.44269504089f, 0.693359375f, 2.12194440e-4f, 1.38145986467e-3f}, least = splat(-88.029691931f);
    vreal shifted[8], y[8], next[8];
    EACH(FRESH(shifted[i], magic));
    EACH(x[i] = vmaxq_f32(x[i], least));
    EACH(shifted[i] = vfmaq_laneq_f32(shifted[i], x[i], c, 0));
    EACH(y[i] = shifted[i] - magic);
    EACH(x[i] = vfmsq_laneq_f32(x[i], y[i], c, 1));
    EACH(x[i] = vfmaq_laneq_f32(x[i], y[i], c, 2));
    if (with_rest) EACH(x[i] += rest[i]);
    if (with_rest) EACH(x[i] = vmaxq_f32(x[i], splat(-64.0f)));
    if (with_rest) EACH(x[i] = vminq_f32(x[i], splat(64.0f)));
    EACH(FRESH(y[i], coefficient[0]); y[i] = vfmaq_laneq_f32(y[i], x[i], c, 3));
    EACH(FRESH(next[i], coefficient[1]); y[i] = vfmaq_f32(next[i], y[i], x[i]));
    EACH(FRESH(next[i], coefficient[2]); y[i] = vfmaq_f32(next[i], y[i], x[i]));
    EACH(FRESH(next[i], coefficient[3]); y[i] = vfmaq_f32(next[i], y[i], x[i]));
    EACH(shifted[i] = (vreal)((vbits)shifted[i] << 23));
    EACH(FRESH(next[i], coefficient[4]); y[i] = vfmaq_f32(next[i], y[i], x[i]));
    EACH(x[i] = x[i] * shifted[i]);
    EACH(x[i] = vfmaq_f32(shifted[i], x[i], y[i]));
}

INLINE vreal exp_of(vreal x, const bool with_rest, vreal rest) {
    exp_all(1, &x, with_rest, &rest);
    return x;
}

/*
 * 2^x for x <= 128, of n vectors, in the same way, for what is rounded to bf16 (bf16_neon.c): relative error 9.3e-8, 1.5e-7
 * with rounding. 2^0 is 1, and above 127.5 it is infinity; past 128 the shift would reach the sign: a caller with such x
 * holds them there. The power of two comes last: times what is not the whole result yet, the smallest would make 0 of it. It
 * counts on the processor making 0 of results below 2^-126.
 */
INLINE void exp2_all(const int n, vreal *x) {
    static const vreal coefficient[] = {{9.67129134e-3f, 9.67129134e-3f, 9.67129134e-3f, 9.67129134e-3f},
                                        {5.55071086e-2f, 5.55071086e-2f, 5.55071086e-2f, 5.55071086e-2f},
                                        {2.40222469e-1f, 2.40222469e-1f, 2.40222469e-1f, 2.40222469e-1f},
                                        {6.93147004e-1f, 6.93147004e-1f, 6.93147004e-1f, 6.93147004e-1f},
                                        {1, 1, 1, 1}};
    const vreal magic = splat(12583039.0f), least = splat(-127.0f), first = splat(1.32695166e-3f); /* 1.5 * 2^23 + 127 */
    vreal shifted[8], y[8], next[8];
    EACH(x[i] = vmaxq_f32(x[i], least));
    EACH(shifted[i] = x[i] + magic);
    EACH(y[i] = shifted[i] - magic);
    EACH(x[i] = x[i] - y[i]);
    EACH(FRESH(y[i], coefficient[0]); y[i] = vfmaq_f32(y[i], x[i], first));
    EACH(FRESH(next[i], coefficient[1]); y[i] = vfmaq_f32(next[i], y[i], x[i]));
    EACH(FRESH(next[i], coefficient[2]); y[i] = vfmaq_f32(next[i], y[i], x[i]));
    EACH(shifted[i] = (vreal)((vbits)shifted[i] << 23));
    EACH(FRESH(next[i], coefficient[3]); y[i] = vfmaq_f32(next[i], y[i], x[i]));
    EACH(FRESH(next[i], coefficient[4]); y[i] = vfmaq_f32(next[i], y[i], x[i]));
    EACH(x[i] = y[i] * shifted[i]);
}

#elif defined(__AVX512F__)

/*
 * e^(x + rest) as below, of n vectors: a CPU looks ahead by some hundred instructions, which of one vector after the other are too few to
 * fill the time that each of them waits for the last.
 */
INLINE void exp_all(const int n, vreal *x, const bool with_rest, const vreal *rest) {
    const vreal magic = splat(12582912.0f);
    __mmask16 counts[8];
    vreal whole[8], y[8];
    EACH(whole[i] = _mm512_fmadd_ps(x[i], splat(1.44269504089f), magic));
    EACH(counts[i] = _mm512_cmp_ps_mask(x[i], splat(-87.336544f), _CMP_NLT_UQ));
    EACH(whole[i] = whole[i] - magic);
    EACH(x[i] = _mm512_fnmadd_ps(whole[i], splat(0.693359375f), x[i]));
    EACH(x[i] = _mm512_fmadd_ps(whole[i], splat(2.12194440e-4f), x[i]));
    if (with_rest) EACH(x[i] += rest[i]);
    EACH(y[i] = _mm512_fmadd_ps(x[i], splat(1.38145986467e-3f), splat(8.36871687973e-3f)));
    EACH(y[i] = _mm512_fmadd_ps(y[i], x[i], splat(4.16683880453e-2f)));
    EACH(y[i] = _mm512_fmadd_ps(y[i], x[i], splat(1.66665206317e-1f)));
    EACH(y[i] = _mm512_fmadd_ps(y[i], x[i], splat(4.99999934478e-1f)));
    EACH(y[i] = _mm512_fmadd_ps(y[i], x[i], splat(1.0f)));
    EACH(y[i] = _mm512_fmadd_ps(y[i], x[i], splat(1.0f)));
    EACH(x[i] = _mm512_maskz_scalef_ps(counts[i], y[i], whole[i]));
}

INLINE vreal exp_of(vreal x, const bool with_rest, vreal rest) {
    exp_all(1, &x, with_rest, &rest);
    return x;
}

#else

/*
 * e^(x + rest) for x <= 87, to within 1.1 units in the last place. x = n ln 2 + f: adding 1.5 * 2^23 leaves the nearest integer n in the
 * low bits; ln 2 is taken off in two parts, of which the first has so few bits that its product and difference are exact. A
 * polynomial of degree 6 (minimax on |f| <= ln 2 / 2 among those that begin with 1 + f, relative error 4e-9) does the rest.
 * Below 2^-126 the result is 0: no subnormals, which are slow. NaN stays NaN (by x - x, which is 0 for every number).
 */
INLINE vreal exp_of(vreal x, const bool with_rest, vreal rest) {
    const vreal magic = splat(12582912.0f);
    vreal shifted = x * 1.44269504089f + magic, n = shifted - magic;
    vreal f = x - n * 0.693359375f + n * 2.12194440e-4f;
    if (with_rest) f += rest;
    vreal y = f * 1.38145986467e-3f + 8.36871687973e-3f;
    y = y * f + 4.16683880453e-2f;
    y = y * f + 1.66665206317e-1f;
    y = y * f + 4.99999934478e-1f;
    y = y * f + 1.0f;
    y = y * f + 1.0f;
    y = (vreal)((vbits)y + ((vbits)shifted << 23)); /* unsigned: it wraps for what is set to 0 below */
    return (vreal)(~(vint)(x < splat(-87.336544f)) & (vint)(y + (x - x)));
}

#endif

/*
 * cap * tanh(s / cap). Up to (s / cap)^2 = 0.4 by a polynomial (relative error 5e-9) in such a way that s itself is a term: what
 * s / cap rounds off then counts for little. Beyond by 1 - 2 / (e^(2 |s / cap|) + 1).
 */
INLINE vreal softcap_vector(vreal s, real cap, real inverse) {
    const vint sign_bit = (vint)splat(-0.0f);
    vreal x = s * inverse, size = (vreal)((vint)x & ~sign_bit), z = x * x;
    vreal p = z * -5.66079002105e-3f + 2.06020086685e-2f;
    p = p * z + -5.37292303385e-2f;
    p = p * z + 1.33313289644e-1f;
    p = p * z + -3.33332783156e-1f;
    vreal near = s + s * (z * p);
    vreal capped = pick(size > splat(20.0f), splat(20.0f), size);
    vreal far = cap - 2.0f * cap / (exp_of(2.0f * capped, false, x) + 1.0f);
    return pick(z < splat(0.4f), near, (vreal)((vint)far | ((vint)x & sign_bit)));
}

#endif

INLINE vreal exp_vector(vreal x) { return exp_of(x, false, x); }

#if defined(ATTN_NEON)
enum { EXP_AT_ONCE = 8 };
#elif defined(__AVX512F__) && !defined(ATTN_REAL_F64)
enum { EXP_AT_ONCE = 4 };
#else
enum { EXP_AT_ONCE = 1 };
INLINE void exp_all(const int n, vreal *x, const bool with_rest, const vreal *rest) {
    EACH(x[i] = exp_of(x[i], with_rest, rest[i]));
}
#endif

/*
 * What x = a - b rounds off, which can be more than all else that exp rounds. It is found exactly for any a and b (`exact`), or, with
 * half of the operations, for |a| <= |b|.
 */
INLINE vreal lost_by_difference(const bool exact, vreal a, vreal b, vreal x) {
    vreal back = x - a;
    return exact ? (a - (x - back)) - (b + back) : a - (x + b);
}

#endif
