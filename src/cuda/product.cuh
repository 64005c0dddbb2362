/*
 * wgmma by the number of columns and the dtype (BF16, or else float16), both constants where it is called, so that one case remains.
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
DEVICE void product_mn(int columns, float *d, uint64_t a, uint64_t b, int add) { EACH_WIDTH(mn); }
DEVICE void product_rs(int columns, float *d, const uint32_t *a, uint64_t b, int add) { EACH_WIDTH(rs); }
#undef WIDTH
#define WIDTH(n, kind)                                                                                                     \
    if (columns == n) {                                                                                                    \
        if (BF16)                                                                                                          \
            wgmma_m64n##n##k16_##kind##_bf16(d, a, b);                                                                     \
        else                                                                                                               \
            wgmma_m64n##n##k16_##kind##_f16(d, a, b);                                                                      \
    }
DEVICE void product_ss_set(int columns, float *d, uint64_t a, uint64_t b) { EACH_WIDTH(ss_set); }
DEVICE void product_mn_set(int columns, float *d, uint64_t a, uint64_t b) { EACH_WIDTH(mn_set); }
#undef WIDTH
#undef EACH_WIDTH

#endif
