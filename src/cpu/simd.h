/*
 * A part of micro.c: vectors of an ISA, and what is done with them. The ISA is what the compiler was told, or what cmake/library.cmake
 * defines; without either the compiler makes of its vector types what it can.
 */
#ifndef ATTN_CPU_SIMD_H
#define ATTN_CPU_SIMD_H

#include <string.h>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(ATTN_NEON) /* cmake/library.cmake; table c of aarch64 goes without */
#include <arm_neon.h>
#elif __ARM_FEATURE_SVE_BITS /* the vector that the compiler was told; only a CPU that has that one runs the table */
#include <arm_neon.h>
#include <arm_sve.h>
#define ATTN_SVE 1
#endif

#include "compiler.h"
#include "micro.h"

#if defined(__AVX512F__)
enum { VECTOR_BYTES = 64, MR = 6, NV = 4 };
#elif defined(__AVX2__)
enum { VECTOR_BYTES = 32, MR = 6, NV = 2 };
#elif defined(ATTN_NEON)
enum { VECTOR_BYTES = 16, MR = 4, NV = 4 };
#elif defined(ATTN_SVE)
enum { VECTOR_BYTES = __ARM_FEATURE_SVE_BITS / 8, MR = 6, NV = 4 };
#else
enum { VECTOR_BYTES = 16, MR = 6, NV = 2 };
#endif
enum { VL = VECTOR_BYTES / sizeof(real), KB = 4 };
enum { BLOCK = 16, GROUP = 64 }; /* of dims, see dots in micro.h */
#if defined(ATTN_NEON)
enum {
    DOTS_NV = 2
}; /* vectors of rows in a block of dots: the sums of a block and those of its group both stay in registers */
#else
enum { DOTS_NV = NV };
#endif

#ifdef ATTN_REAL_F64
typedef int64_t integer;
typedef uint64_t natural;
#else
typedef int32_t integer;
typedef uint32_t natural;
#endif
typedef real vreal __attribute__((vector_size(VECTOR_BYTES)));
typedef float vsingle __attribute__((vector_size(VL * sizeof(float))));
typedef uint16_t vhalf __attribute__((vector_size(VL * sizeof(uint16_t))));
#if defined(ATTN_NEON)
typedef __fp16 vfloat16 __attribute__((vector_size(VL * sizeof(uint16_t))));
#endif
typedef real pair __attribute__((vector_size(2 * sizeof(real))));
typedef integer vint __attribute__((vector_size(VECTOR_BYTES))); /* what comparisons give */
typedef natural vbits __attribute__((vector_size(VECTOR_BYTES)));
#if defined(ATTN_SVE) && defined(ATTN_REAL_F64)
#define ALL svptrue_b64()
#elif defined(ATTN_SVE)
#define ALL svptrue_b32()
#endif

INLINE vreal load(const real *p) {
    vreal v;
    memcpy(&v, p, sizeof v);
    return v;
}

INLINE void store(real *p, vreal v) { memcpy(p, &v, sizeof v); }

#if !defined(ATTN_REAL_F64) && !defined(__AVX2__) && !defined(ATTN_NEON) && !defined(ATTN_SVE)
/* f16 in the low bits of each lane: the exponent is moved by a product, exact for subnormals too; infinities by a mask. */
INLINE vreal widened_f16(vbits x) {
    vbits sign = (x & 0x8000) << 16, rest = (x & 0x7fff) << 13, infinite = (vbits)(rest >= 0x7c00u << 13);
    vbits bits = (vbits)((vreal)rest * 0x1p112f);
    return (vreal)(sign | bits | (infinite & 0x7f800000));
}
#endif

/* VL numbers from place `at` of an array of reals, or of what READABLE names. */
#define IS_BYTE(dtype) ((dtype) == ATTN_E4M3 || (dtype) == ATTN_E5M2 || (dtype) == ATTN_I8)
INLINE int dtype_bytes(const attn_dtype of) { return of == ATTN_F64 ? 8 : of == ATTN_F32 ? 4 : IS_BYTE(of) ? 1 : 2; }
#ifdef ATTN_REAL_F64
#if defined(ATTN_NEON) || defined(ATTN_SVE)
#define READABLE(dtype) ((dtype) == ATTN_F32 || (dtype) == ATTN_F16 || (dtype) == ATTN_BF16)
#else
#define READABLE(dtype) ((dtype) == ATTN_F32)
#endif
INLINE vreal load_any(const attn_dtype of, const void *p, int64_t at) {
    if (of == REAL_DTYPE) return load((const real *)p + at);
#if defined(ATTN_NEON)
    if (of == ATTN_F16 || of == ATTN_BF16) {
        uint32_t two;
        memcpy(&two, (const uint16_t *)p + at, sizeof two);
        uint16x4_t half = vreinterpret_u16_u32(vdup_n_u32(two));
        float32x4_t single = of == ATTN_F16 ? vcvt_f32_f16(vreinterpret_f16_u16(half)) : (float32x4_t)vshll_n_u16(half, 16);
        return vcvt_f64_f32(vget_low_f32(single));
    }
    return vcvt_f64_f32(vld1_f32((const float *)p + at));
#elif defined(ATTN_SVE)    /* loads and conversions of elements that lie in the low bits of wider ones */
    if (of == ATTN_F16) return svcvt_f64_f16_x(ALL, svreinterpret_f16_u64(svld1uh_u64(ALL, (const uint16_t *)p + at)));
    svuint64_t bits = of == ATTN_F32 ? svld1uw_u64(ALL, (const uint32_t *)p + at)
                                     : svlsl_n_u64_x(ALL, svld1uh_u64(ALL, (const uint16_t *)p + at), 16);
    return svcvt_f64_f32_x(ALL, svreinterpret_f32_u64(bits));
#elif defined(__AVX512F__) /* by hand: gcc converts halves and puts them together */
    return _mm512_cvtps_pd(_mm256_loadu_ps((const float *)p + at));
#elif defined(__AVX2__)
    return _mm256_cvtps_pd(_mm_loadu_ps((const float *)p + at));
#else
    vsingle v;
    memcpy(&v, (const float *)p + at, sizeof v);
    return __builtin_convertvector(v, vreal);
#endif
}
#else
#if defined(__AVX2__) || defined(ATTN_SVE) /* with shorter vectors it pays to widen 8 bits once for all rows: micro_load */
#define READABLE(dtype) ((dtype) == ATTN_F16 || (dtype) == ATTN_BF16 || IS_BYTE(dtype))
#else
#define READABLE(dtype) ((dtype) == ATTN_F16 || (dtype) == ATTN_BF16)
#endif

#include "bytes.h"

INLINE vreal load_any(const attn_dtype of, const void *p, int64_t at) {
    if (of == REAL_DTYPE) return load((const real *)p + at);
    if (IS_BYTE(of)) return load_bytes(of, (const uint8_t *)p + at);
    const uint16_t *x = (const uint16_t *)p + at;
#if defined(__AVX512F__)
    __m256i half = _mm256_loadu_si256((const void *)x);
    if (of == ATTN_F16) return _mm512_cvtph_ps(half);
    return (vreal)_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16);
#elif defined(__AVX2__)
    __m128i half = _mm_loadu_si128((const void *)x);
    if (of == ATTN_F16) return _mm256_cvtph_ps(half);
    return (vreal)_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16);
#elif defined(ATTN_NEON)
    vhalf v;
    memcpy(&v, x, sizeof v);
    if (of == ATTN_F16) return __builtin_convertvector((vfloat16)v, vreal);
    return (vreal)vshll_n_u16(v, 16);
#elif defined(ATTN_SVE)
    svuint32_t half = svld1uh_u32(ALL, x);
    if (of == ATTN_F16) return svcvt_f32_f16_x(ALL, svreinterpret_f16_u32(half));
    return svreinterpret_f32_u32(svlsl_n_u32_x(ALL, half, 16));
#else
    vhalf v;
    memcpy(&v, x, sizeof v);
    vbits wide = __builtin_convertvector(v, vbits);
    return of == ATTN_F16 ? widened_f16(wide) : (vreal)(wide << 16);
#endif
}
#endif

INLINE vreal splat(real x) { return x - (vreal){0}; }

/* *p in all lanes. SVE's load that does it takes a pointer and no distance; the compiler would load, and copy in a multiplier's time. */
INLINE vreal splat_from(const real *p) {
#if defined(ATTN_SVE)
    __asm__("" : "+r"(p));
#endif
    return splat(*p);
}

/*
 * a * b + c, rounded once where the ISA can. Sums have to round alike in every block that they are compiled for, of six rows or of one, and with
 * -ffp-contract a compiler may fuse here and not there.
 */
INLINE vreal fused(vreal a, vreal b, vreal c) {
#if defined(__AVX512F__) && defined(ATTN_REAL_F64)
    return _mm512_fmadd_pd(a, b, c);
#elif defined(__AVX512F__)
    return _mm512_fmadd_ps(a, b, c);
#elif defined(__AVX2__) && defined(ATTN_REAL_F64)
    return _mm256_fmadd_pd(a, b, c);
#elif defined(__AVX2__)
    return _mm256_fmadd_ps(a, b, c);
#elif defined(ATTN_NEON) && defined(ATTN_REAL_F64)
    return vfmaq_f64(c, a, b);
#elif defined(ATTN_NEON)
    return vfmaq_f32(c, a, b);
#elif defined(ATTN_SVE) && defined(ATTN_REAL_F64)
    return svmla_f64_x(ALL, c, a, b);
#elif defined(ATTN_SVE)
    return svmla_f32_x(ALL, c, a, b);
#else
    return a * b + c;
#endif
}
INLINE vreal pick(vint mask, vreal a, vreal b) { return (vreal)((mask & (vint)a) | (~mask & (vint)b)); }

/* a where it is larger than b, otherwise (NaN too) b, which is no NaN. */
INLINE vreal larger(vreal a, vreal b) {
#if defined(ATTN_NEON) && defined(ATTN_REAL_F64)
    return vmaxnmq_f64(a, b);
#elif defined(ATTN_NEON)
    return vmaxnmq_f32(a, b);
#elif defined(ATTN_SVE) && defined(ATTN_REAL_F64)
    return svmaxnm_f64_x(ALL, a, b);
#elif defined(ATTN_SVE)
    return svmaxnm_f32_x(ALL, a, b);
#elif defined(ATTN_REAL_F64)
    return pick(a > b, a, b);
#elif defined(__AVX512F__)
    return _mm512_max_ps(a, b);
#elif defined(__AVX2__)
    return _mm256_max_ps(a, b);
#else
    return pick(a > b, a, b);
#endif
}

#endif
