/*
 * A part of simd.h: numbers of 8 bits (e4m3, e5m2, i8) become floats, exactly.
 */
#ifndef ATTN_CPU_BYTES_H
#define ATTN_CPU_BYTES_H

/* Numbers of 8 bits, one to a lane, as f16: e5m2 is its first half. In e4m3, which has another bias, they are 2^-8 of what they were; all ones are NaN. */
#define AS_F16(of, x)                                                                                                      \
    ((of) == ATTN_E5M2 ? (x) << 8 : ((x)&0x80) << 8 | ((x)&0x7f) << 7 | ((__typeof__(x))(((x)&0x7f) == 0x7f) & 0x7c00))

INLINE vreal load_bytes(const attn_dtype of, const uint8_t *x) {
    vreal v;
#if defined(__AVX512F__)
    __m128i bytes = _mm_loadu_si128((const void *)x);
    if (of == ATTN_I8) return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
    vhalf half = (vhalf)_mm256_cvtepu8_epi16(bytes);
    v = _mm512_cvtph_ps((__m256i)AS_F16(of, half));
#elif defined(__AVX2__)
    __m128i bytes = _mm_loadl_epi64((const void *)x);
    if (of == ATTN_I8) return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
    vhalf half = (vhalf)_mm_cvtepu8_epi16(bytes);
    v = _mm256_cvtph_ps((__m128i)AS_F16(of, half));
#elif defined(ATTN_SVE)
    if (of == ATTN_I8) return svcvt_f32_s32_x(ALL, svld1sb_s32(ALL, (const int8_t *)x));
    vbits wide = svld1ub_u32(ALL, x);
    wide = AS_F16(of, wide);
    v = svcvt_f32_f16_x(ALL, svreinterpret_f16_u32(wide));
#else
    uint8_t byte[VL];
    vbits wide = {0};
    memcpy(byte, x, sizeof byte);
    UNROLL for (int i = 0; i < VL; i++) wide[i] = byte[i];
    if (of == ATTN_I8) return __builtin_convertvector((vint)(wide << 24) >> 24, vreal);
#if defined(ATTN_NEON)
    v = __builtin_convertvector((vfloat16) __builtin_convertvector(AS_F16(of, wide), vhalf), vreal);
#else
    v = widened_f16(AS_F16(of, wide));
#endif
#endif
    return of == ATTN_E4M3 ? v * 256 : v;
}

#if defined(ATTN_NEON)
/* 16 at once. As in AS_F16: the sign is extended, and taken out of where f16 has an exponent's first bit. */
INLINE void load_16(const attn_dtype of, float *restrict to, const uint8_t *from) {
    const uint8x16_t bytes = vld1q_u8(from), ones = vceqq_u8(vandq_u8(bytes, vdupq_n_u8(0x7f)), vdupq_n_u8(0x7f));
    const int8x16_t whole = vreinterpretq_s8_u8(bytes), nan = vreinterpretq_s8_u8(ones);
    UNROLL for (int half = 0; half < 2; half++) {
        int16x8_t x = half ? vmovl_high_s8(whole) : vmovl_s8(vget_low_s8(whole));
        if (of == ATTN_I8) {
            vst1q_f32(to + 8 * half, vcvtq_f32_s32(vmovl_s16(vget_low_s16(x))));
            vst1q_f32(to + 8 * half + 4, vcvtq_f32_s32(vmovl_high_s16(x)));
            continue;
        }
        x = of == ATTN_E5M2 ? vshlq_n_s16(x, 8)
                            : vorrq_s16(vandq_s16(vshlq_n_s16(x, 7), vdupq_n_s16((int16_t)0xbfff)),
                                        half ? vmovl_high_s8(nan) : vmovl_s8(vget_low_s8(nan)));
        const float16x8_t y = vreinterpretq_f16_s16(x);
        const float factor = of == ATTN_E4M3 ? 256 : 1;
        vst1q_f32(to + 8 * half, vcvt_f32_f16(vget_low_f16(y)) * factor);
        vst1q_f32(to + 8 * half + 4, vcvt_high_f32_f16(y) * factor);
    }
}
#endif

/* The last ones as a vector, too. */
INLINE void load_many(const attn_dtype of, real *restrict to, const uint8_t *from, int32_t n) {
#if defined(ATTN_NEON)
    for (; n >= 16; n -= 16, from += 16, to += 16) load_16(of, to, from);
#endif
    for (; n >= VL; n -= VL, from += VL, to += VL) store(to, load_bytes(of, from));
    if (n == 0) return;
    uint8_t last[VL] = {0};
    real wide[VL];
    memcpy(last, from, (size_t)n);
    store(wide, load_bytes(of, last));
    memcpy(to, wide, (size_t)n * sizeof *to);
}

#endif
