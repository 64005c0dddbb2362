/*
 * How Hopper's backward brings P and d_s into the range of float16: powers of two, so that nothing is rounded twice. P, at most 1, by 2^12. d_s, at most
 * dim_v |d_o| |v| + |delta|, by one number for a sequence and KV head, which is known before (bwd_fit): d_q is a sum over keys of several
 * blocks. It leaves the largest d_s that there could be just below 2^15, 29 binades above what has fewer than 11 bits, 40 above what is lost.
 */
#ifndef ATTN_FIT_CUH
#define ATTN_FIT_CUH

#include "device.cuh"

enum { FIT_P = 12 };

DEVICE float power_of_two(int x) { return attn__float((uint32_t)(127 + x) << 23); }

/* For d_s; 1 where nothing has to fit. */
DEVICE float fit_of(const attn_cuda_args &a, int32_t b, int32_t kv_head) {
    if (!a.fits) return 1;
    const uint32_t *most = a.fits + ((int64_t)b * a.p.heads_kv + kv_head) * ATTN_FITS;
    const float d_o = attn__from_f16((uint16_t)most[0]), v = attn__from_f16((uint16_t)most[1]);
    const float bound = (float)a.p.dim_v * d_o * v + attn__float(most[2]);
    const int exponent = (int)(attn__bits(bound) >> 23) - 126; /* it is below 2^exponent */
    return power_of_two(attn__max32(-60, attn__min32(60, 15 - exponent)));
}

#endif
