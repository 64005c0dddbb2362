/*
 * Number formats: bf16, f16 and fp8 to and from float, round to nearest even; and element access by dtype for code that
 * is not in a hurry. Micro-kernels have loads of their own.
 */
#ifndef ATTN_NUMERIC_H
#define ATTN_NUMERIC_H

#include <math.h>
#include <string.h>

#include "attn.h"
#include "mask.h"

#define ATTN_LOG2E 1.4426950408889634074

ATTN_HD uint32_t attn__bits(float x) {
    uint32_t u;
    memcpy(&u, &x, sizeof u);
    return u;
}

ATTN_HD float attn__float(uint32_t u) {
    float x;
    memcpy(&x, &u, sizeof x);
    return x;
}

ATTN_HD float attn__from_bf16(uint16_t x) { return attn__float((uint32_t)x << 16); }

ATTN_HD uint16_t attn__to_bf16(float x) {
    uint32_t u = attn__bits(x);
    if ((u & 0x7fffffff) > 0x7f800000) return (uint16_t)(u >> 16 | 0x40); /* a quiet NaN stays one */
    return (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}

/*
 * Formats of one sign bit, E exponent bits and M mantissa bits (f16: 5, 10; e5m2: 5, 2; e4m3: 4, 3). e4m3 has no infinities:
 * its exponent of ones holds ordinary numbers, all ones is NaN.
 */
ATTN_HD float attn__from_small(uint32_t x, int e_bits, int m_bits, int has_inf) {
    uint32_t sign = (x >> (e_bits + m_bits)) << 31, bias = (1u << (e_bits - 1)) - 1;
    uint32_t e = x >> m_bits & ((1u << e_bits) - 1), m = x & ((1u << m_bits) - 1), e_max = (1u << e_bits) - 1;
    if (has_inf && e == e_max) return attn__float(sign | 0x7f800000 | m << (23 - m_bits));
    if (!has_inf && e == e_max && m == (1u << m_bits) - 1) return attn__float(sign | 0x7fc00000);
    if (e == 0) { /* subnormal: m * 2^(1 - bias - m_bits), exact in float */
        float tiny = (float)m * attn__float((127 + 1 - bias - (uint32_t)m_bits) << 23);
        return attn__float(sign | attn__bits(tiny));
    }
    return attn__float(sign | (e + 127 - bias) << 23 | m << (23 - m_bits));
}

/* saturate: finite overflow (and infinity) gives the largest number instead of infinity or NaN. */
ATTN_HD uint32_t attn__to_small(float x, int e_bits, int m_bits, int has_inf, int saturate) {
    uint32_t u = attn__bits(x), sign = (u >> 31) << (e_bits + m_bits), a = u & 0x7fffffff;
    int32_t bias = (1 << (e_bits - 1)) - 1;
    uint32_t e_max = (1u << e_bits) - 1, all = e_max << m_bits | ((1u << m_bits) - 1);
    uint32_t infinity = has_inf ? e_max << m_bits : all, largest = has_inf ? infinity - 1 : all - 1;
    if (a > 0x7f800000) return sign | (has_inf ? infinity | 1u << (m_bits - 1) : all);
    int32_t e = (int32_t)(a >> 23) - 127; /* exponent of x */
    int drop = 23 - m_bits;               /* mantissa bits to round away */
    uint32_t result;
    if (e < 1 - bias) { /* subnormal there: round the significand at a fixed place */
        drop += 1 - bias - e;
        if (drop > 25) return sign;
        uint32_t full = (a & 0x7fffff) | (a >> 23 ? 0x800000 : 0);
        result = (full + (1u << (drop - 1)) - 1 + (full >> drop & 1)) >> drop;
    } else {
        uint32_t rounded = a + (1u << (drop - 1)) - 1 + (a >> drop & 1);
        result = (rounded >> drop) - ((uint32_t)(127 - bias) << m_bits);
    }
    if (result > largest || a == 0x7f800000) result = saturate ? largest : infinity;
    return sign | result;
}

ATTN_HD float attn__from_f16(uint16_t x) { return attn__from_small(x, 5, 10, 1); }
ATTN_HD uint16_t attn__to_f16(float x) { return (uint16_t)attn__to_small(x, 5, 10, 1, 0); }

/* Rounding double -> float -> narrow twice can be off by one; make the middle step odd so that it is not. */
ATTN_HD float attn__to_odd(double x) {
    float f = (float)x;
    if ((double)f == x || f - f != 0.0f) return f; /* exact, infinite or NaN */
    uint32_t u = attn__bits(f);
    if (u & 1) return f;
    int away = (x > (double)f) == (x > 0); /* |x| > |f| */
    if ((u & 0x7fffffff) == 0) return attn__float((x < 0 ? 0x80000000u : 0) | 1);
    return attn__float(away ? u + 1 : u - 1);
}

/* Bytes of an element; 0 for anything that is no dtype. */
ATTN_HD int attn__dtype_bytes(attn_dtype dtype) {
    switch (dtype) {
    case ATTN_F64: return 8;
    case ATTN_F32: return 4;
    case ATTN_F16:
    case ATTN_BF16: return 2;
    case ATTN_E4M3:
    case ATTN_E5M2:
    case ATTN_I8: return 1;
    default: return 0;
    }
}

/* Any dtype but F64. */
ATTN_HD float attn__load_float(attn_dtype dtype, const void *data, int64_t at) {
    switch (dtype) {
    case ATTN_F32: return ((const float *)data)[at];
    case ATTN_F16: return attn__from_f16(((const uint16_t *)data)[at]);
    case ATTN_BF16: return attn__from_bf16(((const uint16_t *)data)[at]);
    case ATTN_E4M3: return attn__from_small(((const uint8_t *)data)[at], 4, 3, 0);
    case ATTN_E5M2: return attn__from_small(((const uint8_t *)data)[at], 5, 2, 1);
    case ATTN_I8: return ((const int8_t *)data)[at];
    default: return 0;
    }
}

ATTN_HD double attn__load(attn_dtype dtype, const void *data, int64_t at) {
    return dtype == ATTN_F64 ? ((const double *)data)[at] : attn__load_float(dtype, data, at);
}

/* fp8 and integers saturate. */
ATTN_HD void attn__store(attn_dtype dtype, void *data, int64_t at, double x) {
    switch (dtype) {
    case ATTN_F32: ((float *)data)[at] = (float)x; break;
    case ATTN_F16: ((uint16_t *)data)[at] = attn__to_f16(attn__to_odd(x)); break;
    case ATTN_BF16: ((uint16_t *)data)[at] = attn__to_bf16(attn__to_odd(x)); break;
    case ATTN_F64: ((double *)data)[at] = x; break;
    case ATTN_E4M3: ((uint8_t *)data)[at] = (uint8_t)attn__to_small(attn__to_odd(x), 4, 3, 0, 1); break;
    case ATTN_E5M2: ((uint8_t *)data)[at] = (uint8_t)attn__to_small(attn__to_odd(x), 5, 2, 1, 1); break;
    case ATTN_I8: ((int8_t *)data)[at] = (int8_t)(!(x > -128) ? (x == x ? -128 : 0) : x > 127 ? 127 : nearbyint(x)); break;
    default: break;
    }
}

/* Are lse, d_lse and probs double? And which dtype have they? */
ATTN_HD int attn__wide(attn_dtype dtype) { return dtype == ATTN_F64; }
ATTN_HD attn_dtype attn__real_dtype(attn_dtype dtype) { return attn__wide(dtype) ? ATTN_F64 : ATTN_F32; }

/* Is all of a problem computed in double? */
ATTN_HD int attn__wide_problem(const attn_problem *p) { return attn__wide(p->dtype) || (p->flags & ATTN_PRECISE) != 0; }

#endif
