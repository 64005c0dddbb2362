/* Numbers and scores in decode's kernels, whose files say before this one whether 16-bit numbers are BF16 or else float16. */
#ifndef ATTN_DECODE_SCORE_CUH
#define ATTN_DECODE_SCORE_CUH

#include "device.cuh"
#include "ptx.cuh"

#define HUGE_SCORE 4194304.0f /* as in rows.cuh */

DEVICE uint32_t pack(float low, float high) { return BF16 ? cvt_rn_bf16x2(low, high) : cvt_rn_f16x2(low, high); }

DEVICE int nonfinite_word(uint32_t x) { /* bit 0 for the low half, bit 1 for the high one */
    const uint32_t ones = BF16 ? 0x7f80 : 0x7c00;
    return ((x & ones) == ones) | ((x >> 16 & ones) == ones) << 1;
}

DEVICE float number_of(uint16_t x) { return BF16 ? attn__from_bf16(x) : cvt_f32_f16(x); }

/* cap * tanh(raw * s / cap), as cap_scores of features.cuh. */
DEVICE float capped(float s, float cap, float to_y) {
    const float y = __fmul_rn(s, to_y), t = y * y;
    if (!(fabsf(y) < 1.8f)) return fmaf(-2 * cap, rcp_approx(1 + ex2_approx(y * (float)ATTN_LOG2E)), cap);
    const float c[6] = {cap * 0.4999999f,       cap * -0.0416644173f,  cap * 0.00415832574f,
                        cap * -0.000410048877f, cap * 3.51292659e-05f, cap * -1.79529371e-06f};
    return __fmul_rn(y, fmaf(t, fmaf(t, fmaf(t, fmaf(t, fmaf(t, c[5], c[4]), c[3]), c[2]), c[1]), c[0]));
}

#endif
