/*
 * Packed outputs: rows that no sequence covers become o = 0, lse = -inf (C4). They lie before the first sequence, behind the last
 * one, and where used_q leaves the rest of a sequence out. One warp has one row of all heads.
 */
#include "warp.cuh"

/* Does a sequence write this row? */
DEVICE bool is_covered(const attn_cuda_args &a, int64_t row) {
    int32_t b = sequence_from(a.f.cu_q, a.p.batch, row);
    if (b < 0) return false;
    attn_seq s = sequence(a, b);
    return row >= s.q_row && row < s.q_row + s.sq;
}

/* Warps: [total_q]. */
KERNEL fill(const __grid_constant__ attn_cuda_args a) {
    int64_t row = warp_index();
    if (row >= a.p.total_q || is_covered(a, row)) return;
    for (int32_t h = 0; h < a.p.heads_q; h++)
        write_empty(a, row * a.f.o.stride[1] + h * a.f.o.stride[2], h * a.p.total_q + row);
}
