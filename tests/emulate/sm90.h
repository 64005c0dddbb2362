/*
 * The instructions of sm90.cuh and wgmma.cuh on the CPU, under the same names; this file stands for both. What they do is in
 * hopper.c and products.c. Descriptors are made by the kernels' own operand.cuh.
 */
#ifndef EMULATE_SM90_H
#define EMULATE_SM90_H

#define ATTN_SM90_CUH  /* not again */
#define ATTN_WGMMA_CUH /* neither */
#define PTX static inline

#include "operand.cuh"

/* ---- barriers ---- */

PTX void mbarrier_init(uint32_t barrier, int arrivals) { emulate_mbarrier_init(barrier, arrivals); }
PTX void fence_mbarrier_init(void) { emulate_fence_mbarrier_init(); }
PTX void mbarrier_arrive(uint32_t barrier) { emulate_mbarrier_arrive(barrier, 1, 0); }
PTX void mbarrier_arrive_count(uint32_t barrier, int arrivals) { emulate_mbarrier_arrive(barrier, arrivals, 0); }
PTX void mbarrier_arrive_expect_tx(uint32_t barrier, int bytes) { emulate_mbarrier_arrive(barrier, 1, bytes); }
PTX void mbarrier_wait_parity(uint32_t barrier, uint32_t parity) { emulate_mbarrier_wait(barrier, parity); }
PTX void bar_sync(int barrier, int threads) { emulate_bar_sync(barrier, threads, 0); }
PTX void bar_arrive(int barrier, int threads) { emulate_bar_arrive(barrier, threads); }
PTX bool bar_red_or(int barrier, int threads, bool x) { return emulate_bar_sync(barrier, threads, x); }

/* ---- clusters ---- */

PTX uint32_t cluster_rank(void) { return emulate_rank; }
PTX void cluster_sync(void) { emulate_cluster_barrier(); }
PTX uint32_t mapa(uint32_t at, uint32_t rank) { return emulate_mapa(at, rank); }
PTX void mbarrier_arrive_remote(uint32_t barrier) { emulate_mbarrier_arrive_remote(barrier); }
PTX void cp_async_bulk_tensor_5d_load_multicast(uint32_t to, const void *map, uint32_t barrier, int x, int y, int z, int w,
                                                int v, uint16_t mask) {
    const int at[EMULATE_RANK] = {x, y, z, w, v};
    emulate_tensor_load_multicast(to, map, barrier, at, mask);
}
PTX void cp_async_bulk_to_block(uint32_t to, uint32_t from, uint32_t bytes, uint32_t barrier) {
    emulate_bulk_to_block(to, from, bytes, barrier);
}

/* ---- tensor memory accelerator: a map is attn_tensor_map to the kernel ---- */

PTX void cp_async_bulk_tensor_5d_load(uint32_t to, const void *map, uint32_t barrier, int x, int y, int z, int w, int v) {
    const int at[EMULATE_RANK] = {x, y, z, w, v};
    emulate_tensor_load(to, map, barrier, at);
}
PTX void cp_async_bulk_tensor_5d_store(const void *map, uint32_t from, int x, int y, int z, int w, int v) {
    const int at[EMULATE_RANK] = {x, y, z, w, v};
    emulate_tensor_store(map, from, at);
}
PTX void cp_async_bulk_store(void *to, uint32_t from, uint32_t bytes) { emulate_bulk_store(to, from, bytes, 0); }
PTX void cp_reduce_async_bulk_add_f32(void *to, uint32_t from, uint32_t bytes) { emulate_bulk_store(to, from, bytes, 1); }
PTX void cp_async_bulk_load(uint32_t to, const void *from, uint32_t bytes, uint32_t barrier) {
    emulate_bulk_load(to, from, bytes, barrier);
}
PTX void cp_async_bulk_prefetch_l2(const void *from, uint32_t bytes) { /* not past the end */
    if ((uintptr_t)from % 16 || bytes % 16) emulate_fail("cp.async.bulk.prefetch of %u bytes from %p", bytes, from);
    (void)((const volatile uint8_t *)from)[0], (void)((const volatile uint8_t *)from)[bytes - 1];
}
PTX void cp_async_bulk_commit_group(void) { emulate_bulk_commit(); }
PTX void cp_async_bulk_wait_group_read(void) { emulate_bulk_wait(1); }
PTX void cp_async_bulk_wait_group(void) { emulate_bulk_wait(0); }
PTX void fence_proxy_async(void) { emulate_fence_proxy_async(); }
PTX void fence_proxy_async_global(void) {} /* stores are complete at their wait */

/* ---- registers of a warpgroup ---- */

PTX void setmaxnreg_inc(int count) { emulate_setmaxnreg(count, 1); }
PTX void setmaxnreg_dec(int count) { emulate_setmaxnreg(count, 0); }

/* ---- products ---- */

PTX void wgmma_fence(void) { emulate_wgmma_fence(); }
PTX void wgmma_commit_group(void) { emulate_wgmma_commit(); }
PTX void wgmma_wait_group(int left) { emulate_wgmma_wait(left); }

/* Lane 4 g + t has of each matrix the numbers 2t, 2t + 1 of row g. */
PTX void stmatrix_x4(uint32_t to, const uint32_t r[4]) {
    const emulate_words *all = emulate_exchange(&to, 1);
    const uint32_t g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    for (uint32_t n = 0; n < 4; n++) st_shared_b32(all[8 * n + g].word[0] + 4 * t, r[n]);
}

#define WGMMA(columns, type, is_bf16)                                                                                      \
    PTX void wgmma_m64n##columns##k16_ss_##type(float *d, uint64_t a, uint64_t b, int add) {                               \
        emulate_wgmma(emulate_product{columns, is_bf16, add != 0, 0, a, b, NULL, d});                                      \
    }                                                                                                                      \
    PTX void wgmma_m64n##columns##k16_mn_##type(float *d, uint64_t a, uint64_t b, int add) {                               \
        emulate_wgmma(emulate_product{columns, is_bf16, add != 0, 1, a, b, NULL, d});                                      \
    }                                                                                                                      \
    PTX void wgmma_m64n##columns##k16_ss_set_##type(float *d, uint64_t a, uint64_t b) {                                    \
        emulate_wgmma(emulate_product{columns, is_bf16, 0, 0, a, b, NULL, d});                                             \
    }                                                                                                                      \
    PTX void wgmma_m64n##columns##k16_mn_set_##type(float *d, uint64_t a, uint64_t b) {                                    \
        emulate_wgmma(emulate_product{columns, is_bf16, 0, 1, a, b, NULL, d});                                             \
    }                                                                                                                      \
    PTX void wgmma_m64n##columns##k16_rs_##type(float *d, const uint32_t *a, uint64_t b, int add) {                        \
        emulate_wgmma(emulate_product{columns, is_bf16, add != 0, 0, 0, b, a, d});                                         \
    }
#define WGMMA_BOTH(columns) WGMMA(columns, f16, 0) WGMMA(columns, bf16, 1)
WGMMA_BOTH(64)
WGMMA_BOTH(80)
WGMMA_BOTH(96)
WGMMA_BOTH(112)
WGMMA_BOTH(128)
WGMMA_BOTH(144)
WGMMA_BOTH(160)
WGMMA_BOTH(176)
WGMMA_BOTH(192)
WGMMA_BOTH(256)
#undef WGMMA_BOTH
#undef WGMMA

#endif
