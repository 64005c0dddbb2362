/*
 * A warp as a unit: the small kernels give each warp one row, and have WARPS of them in a block. Everything that lanes say to
 * each other is here.
 */
#ifndef ATTN_WARP_CUH
#define ATTN_WARP_CUH

#include "device.cuh"

enum { WARPS = ATTN_CUDA_WARPS };

#define ALL_LANES 0xffffffffu

DEVICE int32_t warp_in_block(void) { return (int32_t)(threadIdx.x / 32); }

/* The number of this warp, counted over the whole grid. */
DEVICE int64_t warp_index(void) { return block_index() * WARPS + warp_in_block(); }

/* Maximum over the lanes; NaN does not count. The same in every lane, as is the sum: both add the same pairs. */
DEVICE float warp_max(float x) {
    for (int step = 16; step; step /= 2) x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, step));
    return x;
}
DEVICE double warp_max(double x) {
    for (int step = 16; step; step /= 2) x = fmax(x, __shfl_xor_sync(ALL_LANES, x, step));
    return x;
}
DEVICE float warp_sum(float x) {
    for (int step = 16; step; step /= 2) x += __shfl_xor_sync(ALL_LANES, x, step);
    return x;
}
DEVICE double warp_sum(double x) {
    for (int step = 16; step; step /= 2) x += __shfl_xor_sync(ALL_LANES, x, step);
    return x;
}

/* A row without keys, or past the end of its sequence, by its offset in o and its index in lse: o = 0, lse = -inf. */
DEVICE void write_empty(const attn_cuda_args &a, int64_t o_at, int64_t lse_at) {
    for (int32_t x = lane_index(); x < a.p.dim_v; x += 32) attn__store(a.p.out_dtype, a.f.o.data, o_at + x, 0);
    if (a.f.lse && lane_index() == 0) attn__store(attn__real_dtype(a.p.dtype), a.f.lse, lse_at, -INFINITY);
}

#endif
