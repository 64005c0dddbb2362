/*
 * d_q of Hopper's backward, from the way in which threads hold it to rows of memory: for bwd_cast, and for blocks that have the whole sum.
 *
 * Of an 8-column tile lane 4 g + t has columns 2t, 2t + 1 of rows g and g + 8. With four such tiles at a time a quad has 32 columns of a row, and
 * each lane ends with eight of them: 16 bytes.
 */
#ifndef ATTN_CAST_CUH
#define ATTN_CAST_CUH

#include "device.cuh"

/* Number n of each lane of a quad goes to lane n, whose number n' it becomes, n' being the lane that it came from. */
DEVICE void transpose_quad(uint32_t x[4]) {
    const bool odd = threadIdx.x & 1, second = threadIdx.x & 2;
#pragma unroll
    for (int n = 0; n < 4; n += 2) {
        const uint32_t other = __shfl_xor_sync(~0u, odd ? x[n] : x[n + 1], 1);
        x[n] = odd ? other : x[n];
        x[n + 1] = odd ? x[n + 1] : other;
    }
#pragma unroll
    for (int n = 0; n < 2; n++) {
        const uint32_t other = __shfl_xor_sync(~0u, second ? x[n] : x[n + 2], 2);
        x[n] = second ? other : x[n];
        x[n + 2] = second ? x[n + 2] : other;
    }
}

/* Columns [column, column + 8) of a row, as pairs; fewer where there are no more. */
DEVICE void store_piece(uint16_t *row, int32_t column, int32_t dim, const uint32_t x[4]) {
    uint16_t *const to = row + column;
    if (column + 8 <= dim && (uint64_t)to % 16 == 0) {
        *(uint4 *)to = make_uint4(x[0], x[1], x[2], x[3]);
    } else {
#pragma unroll
        for (int32_t n = 0; n < 8; n++)
            if (column + n < dim) to[n] = (uint16_t)(x[n / 2] >> n % 2 * 16);
    }
}

#endif
