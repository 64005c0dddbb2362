/*
 * What decode_sm90.cu has left of sequences of several spans becomes o and lse. As fold of merge.cu, but in float, whole rows at a time: there are
 * up to 128 rows of 512 columns to a sequence, and what counts is that they stream through.
 */
#include "ptx.cuh"
#include "score.cuh"
#include "warp.cuh"

/* Adds up lane's columns of a row's spans, `wide` times four of them 128 apart, in their order; each lane works out the weight of one in 32. */
template <int WIDE>
DEVICE void fold_spans(const float *lse, const float *from, int32_t dim, int32_t count, float4 o[WIDE], float *most,
                       float *sum) {
    enum { EACH = 16 / WIDE }; /* that are fetched at a time */
    *most = -INFINITY;
    *sum = 0;
    for (int32_t c = lane_index(); c < count; c += 32) *most = fmaxf(*most, lse[c]);
    *most = warp_max(*most);
#pragma unroll
    for (int k = 0; k < WIDE; k++) o[k] = {0, 0, 0, 0};
#pragma unroll 1
    for (int32_t c0 = 0; c0 < count; c0 += 32) {
        const float own = c0 + lane_index() < count ? lse[c0 + lane_index()] : -INFINITY;
        const float weights = own == -INFINITY ? 0 : expf(own - *most);
        const unsigned some = __ballot_sync(ALL_LANES, own != -INFINITY); /* one without keys has not written its o */
#pragma unroll 1
        for (int32_t c1 = 0; c1 < 32 && some >> c1; c1 += EACH) {
            float4 part[EACH][WIDE];
#pragma unroll
            for (int n = 0; n < EACH * WIDE; n++) {
                const int c = c1 + n / WIDE;
                part[n / WIDE][n % WIDE] = {0, 0, 0, 0};
                if (some >> c & 1)
                    part[n / WIDE][n % WIDE] = *(const float4 *)(from + (int64_t)(c0 + c) * dim + n % WIDE * 128);
            }
#pragma unroll
            for (int n = 0; n < EACH; n++) {
                const float weight = __shfl_sync(ALL_LANES, weights, c1 + n);
                *sum += weight;
#pragma unroll
                for (int k = 0; k < WIDE; k++) {
                    o[k].x = fmaf(weight, part[n][k].x, o[k].x);
                    o[k].y = fmaf(weight, part[n][k].y, o[k].y);
                    o[k].z = fmaf(weight, part[n][k].z, o[k].z);
                    o[k].w = fmaf(weight, part[n][k].w, o[k].w);
                }
            }
        }
    }
}

/* One row, columns from x on; as fold, but in float: a single span with keys comes out as it went in here too. */
template <int WIDE> DEVICE void fold_row(const attn_cuda_args &a, const attn_seq &s, int32_t i, int32_t h, int32_t x) {
    const int64_t at = part_index(a, s, i, h, 0), to = attn__q_offset(&a.p, &a.f.o, &s, i, h) + x;
    const int32_t count = (int32_t)(((int64_t)s.sk + ATTN_DECODE90_SPAN - 1) / ATTN_DECODE90_SPAN);
    float4 o[WIDE];
    float most, sum, keys = 1;
    fold_spans<WIDE>((const float *)a.part_lse + at, (const float *)a.part_o + at * a.p.dim_v + x, a.p.dim_v, count, o,
                     &most, &sum);
    float lse = sum == 0 ? -INFINITY : most + logf(sum);
    const float factor = sum == 0 ? 0 : 1 / sum;
    if (a.p.flags & ATTN_SINK) lse = add_sink(lse, a.f.sink[h], &keys);
    if (a.f.lse && x == 0) ((float *)a.f.lse)[attn__lse_index(&a.p, &s, i, h)] = lse;
#pragma unroll
    for (int k = 0; k < WIDE; k++) {
        const float y[4] = {o[k].x * factor * keys, o[k].y * factor * keys, o[k].z * factor * keys, o[k].w * factor * keys};
        if (a.p.out_dtype == ATTN_F32) {
            *(float4 *)((float *)a.f.o.data + to + k * 128) = {y[0], y[1], y[2], y[3]};
        } else {
            const bool bf16 = a.p.out_dtype == ATTN_BF16;
            uint2 *z = (uint2 *)((uint16_t *)a.f.o.data + to + k * 128);
            z->x = bf16 ? cvt_rn_bf16x2(y[0], y[1]) : cvt_rn_f16x2(y[0], y[1]);
            z->y = bf16 ? cvt_rn_bf16x2(y[2], y[3]) : cvt_rn_f16x2(y[2], y[3]);
        }
    }
}

/* Warps: [batch][heads_q][part_rows], each with all of the 512 columns; or, of many spans, four for a row. o is aligned, as decode_sm90.cu wants it. */
KERNEL fold_latent(const __grid_constant__ attn_cuda_args a) {
    const int32_t slices = ATTN_FOLD_SLICES(a.chunks);
    const int64_t n = warp_index(), row = n / slices;
    if (row >= (int64_t)a.p.batch * a.p.heads_q * a.part_rows) return;
    const int32_t i = (int32_t)(row % a.part_rows), h = (int32_t)(row / a.part_rows % a.p.heads_q);
    const attn_seq s = sequence(a, (int32_t)(row / a.part_rows / a.p.heads_q));
    if (!is_split(a, s) || i >= s.sq) return;
    if (slices == 1)
        fold_row<4>(a, s, i, h, lane_index() * 4);
    else
        fold_row<1>(a, s, i, h, (int32_t)(n % slices) * 128 + lane_index() * 4);
}
