/*
 * The products of a tile: S = Q K^T, O += P V. wgmma goes by the number of columns and the dtype, both constants where it is called,
 * so that one case remains. BF16: see rows.cuh; tiles are as fwd_sm90.cu says.
 */
#ifndef ATTN_PRODUCT_CUH
#define ATTN_PRODUCT_CUH

#define EACH_WIDTH(kind)                                                                                                   \
    WIDTH(64, kind)                                                                                                        \
    WIDTH(80, kind)                                                                                                        \
    WIDTH(96, kind)                                                                                                        \
    WIDTH(112, kind) WIDTH(128, kind) WIDTH(144, kind) WIDTH(160, kind) WIDTH(176, kind) WIDTH(192, kind) WIDTH(256, kind)
#define WIDTH(n, kind)                                                                                                     \
    if (columns == n) {                                                                                                    \
        if (BF16)                                                                                                          \
            wgmma_m64n##n##k16_##kind##_bf16(d, a, b, add);                                                                \
        else                                                                                                               \
            wgmma_m64n##n##k16_##kind##_f16(d, a, b, add);                                                                 \
    }
DEVICE void product_ss(int columns, float *d, uint64_t a, uint64_t b, int add) { EACH_WIDTH(ss); }
DEVICE void product_rs(int columns, float *d, const uint32_t *a, uint64_t b, int add) { EACH_WIDTH(rs); }
#undef WIDTH
#undef EACH_WIDTH

DEVICE void begin_qk(float s[MT][NT][4], uint64_t q, uint64_t k) {
    wgmma_fence();
#pragma unroll
    for (int c = 0; c < DIM / 16; c++) {
        const uint32_t to_q = c / 4 * BM * ROW + c % 4 * 32, to_k = c / 4 * BN * ROW + c % 4 * 32;
        product_ss(BN, s[0][0], wgmma_step(q, 1, to_q), wgmma_step(k, 1, to_k), c > 0);
    }
    wgmma_commit_group();
}

DEVICE void begin_pv(float o[MT][DT][4], uint32_t p[PV_STEPS][MT][4], uint64_t v) {
    wgmma_fence();
#pragma unroll
    for (int ks = 0; ks < PV_STEPS; ks++) product_rs(DV, o[0][0], p[ks][0], wgmma_step(v, ks, 16 * ROW), 1);
    wgmma_commit_group();
}

#endif
