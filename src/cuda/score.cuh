/*
 * From a dot product to a score, and from the softmax over keys to that with a sink: once in float and once in double. Overloads
 * by number type: the file includes itself once for each.
 */
#ifndef ATTN_SCORE_CUH
#define ATTN_SCORE_CUH

#include "device.cuh"

/* What dot(q_i, k_j) of the stored numbers is multiplied with, besides a factor of their page. */
DEVICE double score_scale(const attn_cuda_args &a, const attn_seq &s, int32_t kv_head) {
    return a.p.scale * attn__descale(&a.f, a.f.q_descale, s.b, kv_head) *
           attn__kv_descale(&a.p, &a.f, a.f.k_descale, s.b, kv_head);
}

/* What sum p_j v_j of the stored numbers is multiplied with, likewise; p before dropout. */
DEVICE double value_scale(const attn_cuda_args &a, const attn_seq &s, int32_t kv_head) {
    return attn__kv_descale(&a.p, &a.f, a.f.v_descale, s.b, kv_head) / (1 - a.p.dropout);
}

/* log(2^(scale * m) * sum). In base 2 it may be past the largest float where it is not in base e; then sum has no bit in it. */
DEVICE float lse_of(float m, float scale, float sum) {
    const float high = 0.693147182f, low = -1.90465421e-9f; /* of log(2) */
    float x = __fmul_rn(m, scale) + log2f(sum);
    return fabsf(x) == INFINITY ? m * (scale * high) : __fmaf_rn(x, high, __fmul_rn(x, low));
}

#define real float
#include "score.cuh"
#undef real
#define real double
#include "score.cuh"
#undef real

#elif defined(real)

/* Steps 2 to 4 of attn.h: x is scale * dot(q_i, k_j). *slope becomes the derivative by x. */
DEVICE real score(const attn_cuda_args &a, const attn_seq &s, int32_t h, int32_t i, int32_t j, real x, real *slope) {
    *slope = 1;
    if (a.p.softcap > 0) {
        real cap = (real)a.p.softcap, part = tanh(x / cap);
        x = cap * part;
        *slope = 1 - part * part;
    }
    if (a.p.flags & ATTN_ALIBI) {
        int32_t distance = abs(i + (s.sk - s.sq) - j);
        x = fma(-(real)a.f.alibi[s.b * a.f.alibi_stride + h], (real)distance, x);
    }
    if (a.p.flags & ATTN_BIAS)
        x += (real)attn__load(a.p.bias_dtype, a.f.bias.data, attn__matrix_at(&a.f.bias, s.b, h, i, j));
    return x;
}
DEVICE real score(const attn_cuda_args &a, const attn_seq &s, int32_t h, int32_t i, int32_t j, real x) {
    real slope;
    return score(a, s, h, i, j, x, &slope);
}

/*
 * lse of the keys alone becomes that with the sink; *factor is what o, normalised over the keys, is to be multiplied with.
 * Without keys (-inf) a sink changes nothing, C1. fold and the forward kernels both multiply the o that they have rounded to
 * real, so that a sequence gives the same bits whether or not it is split.
 */
DEVICE real add_sink(real lse, real sink, real *factor) {
    *factor = 1;
    if (lse == (real)-INFINITY || sink == (real)-INFINITY) return lse;
    real most = sink > lse ? sink : lse, keys = exp(lse - most), sum = keys + exp(sink - most);
    *factor = keys / sum;
    return most + log(sum);
}

#endif
