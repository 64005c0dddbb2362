/*
 * Packed outputs: rows that no sequence covers become o = 0, lse = -inf (C4). They lie before the first sequence, behind the last
 * one, and where used_q leaves the rest of a sequence out. One warp has one row of all heads.
 */
#include "warp.cuh"

/* Does a sequence write this row? The last one that starts at or before it is the only one that can: those that start at the same
   row are empty. */
DEVICE bool is_covered(const attn_cuda_args &a, int64_t row) {
    int32_t low = 0, high = a.p.batch; /* sequences below `low` start at or before the row, from `high` on after it */
    while (low < high) {
        int32_t middle = low + (high - low) / 2;
        if (a.f.cu_q[middle] <= row)
            low = middle + 1;
        else
            high = middle;
    }
    if (low == 0) return false;
    attn_seq s = sequence(a, low - 1);
    return row >= s.q_row && row < s.q_row + s.sq;
}

/* Warps: [total_q]. */
KERNEL fill(const __grid_constant__ attn_cuda_args a) {
    int64_t row = warp_index();
    if (row >= a.p.total_q || is_covered(a, row)) return;
    for (int32_t h = 0; h < a.p.heads_q; h++)
        write_empty(a, row * a.f.o.stride[1] + h * a.f.o.stride[2], h * a.p.total_q + row);
}
