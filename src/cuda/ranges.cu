/*
 * FlashMask: minima and maxima of the vectors over each tile of keys, from which the forward kernels tell the class of a tile
 * (attn__mask_tile). One warp has one tile; only keys of the sequence count, so memory past its end does not matter.
 */
#include "warp.cuh"

/* Warps: [batch][flashmask_heads][range_tiles]. */
KERNEL ranges(const __grid_constant__ attn_cuda_args a) {
    int64_t n = warp_index();
    if (n >= (int64_t)a.p.batch * a.p.flashmask_heads * a.range_tiles) return;
    int32_t tile = (int32_t)(n % a.range_tiles), head = (int32_t)(n / a.range_tiles % a.p.flashmask_heads);
    attn_seq s = sequence(a, (int32_t)(n / a.range_tiles / a.p.flashmask_heads));
    attn_mask mask = attn__seq_mask(&a.p, &s);
    int32_t first = tile * a.range_cols, end = attn__min32(s.sk - first, a.range_cols) + first;
    if (first >= s.sk) return;
    attn_flash_range range;
    for (int32_t j = first + lane_index(); j - lane_index() < end; j += 32) {
        int32_t within = attn__min32(j, end - 1); /* a lane without a key of its own repeats the last */
        attn_flash flash = attn__flash_load(&mask, attn__flash_at(&a.p, &a.f, s.b, head, within));
        attn__flash_extend(&range, flash, j - lane_index() == first);
    }
    for (int v = 0; v < 4; v++) {
        range.min[v] = __reduce_min_sync(ALL_LANES, range.min[v]);
        range.max[v] = __reduce_max_sync(ALL_LANES, range.max[v]);
    }
    if (lane_index() == 0) a.ranges[n] = range;
}
