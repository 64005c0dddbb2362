/* PTX instructions of compute capability 9.0 as functions of the same name; nothing else. Products are in wgmma.cuh. */
#ifndef ATTN_SM90_CUH
#define ATTN_SM90_CUH

#include "args.h"
#include "ptx.cuh"

/* ---- mbarrier: an object of 8 bytes in shared memory ---- */

PTX void mbarrier_init(uint32_t barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
/* After mbarrier_init, before anybody else uses the barriers. */
PTX void fence_mbarrier_init(void) { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
PTX void mbarrier_arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
PTX void mbarrier_arrive_count(uint32_t barrier, int arrivals) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
/* Arrives, and the phase also waits for so many bytes of cp.async.bulk. */
PTX void mbarrier_arrive_expect_tx(uint32_t barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
/* Waits until the phase of that parity has ended. A fresh barrier is in phase 0; "phase 1" before it counts as ended. */
PTX void mbarrier_wait_parity(uint32_t barrier, uint32_t parity) {
    asm volatile(
        "{ .reg .pred p; AGAIN: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1; @!p bra AGAIN; }" ::"r"(barrier),
        "r"(parity)
        : "memory");
}

/* ---- named barriers: number 0 is that of __syncthreads ---- */

PTX void bar_arrive(int barrier, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

/* bar_sync; says whether any thread of it says yes. */
PTX bool bar_red_or(int barrier, int threads, bool x) {
    int any;
    asm volatile("{ .reg .pred p, q; setp.ne.b32 p, %3, 0; bar.red.or.pred q, %1, %2, p; selp.b32 %0, 1, 0, q; }"
                 : "=r"(any)
                 : "r"(barrier), "r"(threads), "r"((int)x)
                 : "memory");
    return any;
}

/* ---- clusters: blocks that run at the same time and reach each other's shared memory ---- */

PTX uint32_t cluster_rank(void) {
    uint32_t rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
/* As __syncthreads for all threads of the cluster. */
PTX void cluster_sync(void) { asm volatile("barrier.cluster.arrive.release; barrier.cluster.wait.acquire;" ::: "memory"); }
/* The same address in the shared memory of block `rank`. */
PTX uint32_t mapa(uint32_t at, uint32_t rank) {
    uint32_t there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(at), "r"(rank));
    return there;
}
/* At a barrier of another block, as mapa gives it; of what this thread has read or multiplied, not written (.release.cluster is a fence). */
PTX void mbarrier_arrive_remote(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

/* ---- tensor memory accelerator ---- */

/* The box at these coordinates (column, row, block, head, batch) to shared memory; its bytes complete on the barrier. */
PTX void cp_async_bulk_tensor_5d_load(uint32_t to, const attn_tensor_map *map, uint32_t barrier, int x, int y, int z, int w,
                                      int v) {
    asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], "
                 "[%1, {%3,%4,%5,%6,%7}], [%2];" ::"r"(to),
                 "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(w), "r"(v)
                 : "memory");
}
/* The same to these addresses of every block of the cluster whose bit is set; each has its own barrier there. */
PTX void cp_async_bulk_tensor_5d_load_multicast(uint32_t to, const attn_tensor_map *map, uint32_t barrier, int x, int y,
                                                int z, int w, int v, uint16_t mask) {
    asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
                 "[%1, {%3,%4,%5,%6,%7}], [%2], %8;" ::"r"(to),
                 "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(w), "r"(v), "h"(mask)
                 : "memory");
}
/* So many bytes of shared memory to that of another block, where they complete on its barrier; both as mapa gives them. */
PTX void cp_async_bulk_to_block(uint32_t to, uint32_t from, uint32_t bytes, uint32_t barrier) {
    asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "r"(from), "r"(bytes), "r"(barrier)
                 : "memory");
}
/* The other way; parts of the box outside the tensor are not written. */
PTX void cp_async_bulk_tensor_5d_store(const attn_tensor_map *map, uint32_t from, int x, int y, int z, int w, int v) {
    asm volatile("cp.async.bulk.tensor.5d.global.shared::cta.bulk_group [%0, {%2,%3,%4,%5,%6}], [%1];" ::"l"(map),
                 "r"(from), "r"(x), "r"(y), "r"(z), "r"(w), "r"(v)
                 : "memory");
}
/* So many bytes of shared memory to memory, or added to the floats there; both begin at multiples of 16. */
PTX void cp_async_bulk_store(void *to, uint32_t from, uint32_t bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes) : "memory");
}
PTX void cp_reduce_async_bulk_add_f32(void *to, uint32_t from, uint32_t bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to), "r"(from),
                 "r"(bytes)
                 : "memory");
}
/* The other way; the bytes complete on the barrier. */
PTX void cp_async_bulk_load(uint32_t to, const void *from, uint32_t bytes, uint32_t barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(barrier)
                 : "memory");
}
/* So many bytes to L2, a multiple of 16. */
PTX void cp_async_bulk_prefetch_l2(const void *from, uint32_t bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}
PTX void cp_async_bulk_commit_group(void) { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
/* Until the stores of this thread have read shared memory; until they are complete. */
PTX void cp_async_bulk_wait_group_read(void) { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
PTX void cp_async_bulk_wait_group(void) { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
/* What this thread wrote to shared memory is seen by cp.async.bulk and wgmma. */
PTX void fence_proxy_async(void) { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
/* The same for global memory, both ways. */
PTX void fence_proxy_async_global(void) { asm volatile("fence.proxy.async.global;" ::: "memory"); }

/* Four 8x8 matrices of 16-bit numbers to shared memory; the counterpart of ldmatrix_x4. */
PTX void stmatrix_x4(uint32_t to, const uint32_t r[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(to), "r"(r[0]), "r"(r[1]), "r"(r[2]),
                 "r"(r[3])
                 : "memory");
}

/* ---- registers of a warpgroup ---- */

#define setmaxnreg_inc(count) asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"((int)(count)))
#define setmaxnreg_dec(count) asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"((int)(count)))

#endif
