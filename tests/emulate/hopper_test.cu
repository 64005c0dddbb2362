/* Kernels that use each instruction of sm90.cuh and wgmma.cuh, rightly and wrongly, for hopper_test.c. */
#include "wgmma.cuh"

#include "hopper_test.h"

#define DEVICE static __device__ __forceinline__
#define KERNEL extern "C" __global__ void

enum { TILE_BYTES = TEST_ROWS * 128, BARRIERS_AT = 4 * TILE_BYTES };

DEVICE uint32_t place(uint32_t tile, int row, int column) {
    return tile + row * 128 + (((column >> 3) ^ (row & 7)) << 4) + (column & 7) * 2;
}

DEVICE void make_barriers(uint32_t first, int count, int arrivals) {
    if (threadIdx.x == 0) {
        for (int n = 0; n < count; n++) mbarrier_init(first + 8 * n, n < TEST_STAGES ? 1 : arrivals);
        fence_mbarrier_init();
    }
    __syncthreads();
}

/* A box to shared memory, from there to raw, and to another tensor. */
KERNEL test_copy(const __grid_constant__ test_args x) {
    extern __shared__ __align__(1024) uint8_t shared[];
    const uint32_t tile = cvta_shared(shared), full = tile + BARRIERS_AT;
    make_barriers(full, 1, 1);
    if (threadIdx.x == 0) {
        mbarrier_arrive_expect_tx(full, x.rows * 128);
        cp_async_bulk_tensor_5d_load(tile, x.in, full, x.at_in[0], x.at_in[1], x.at_in[2], x.at_in[3], x.at_in[4]);
    }
    mbarrier_wait_parity(full, 0);
    for (int n = threadIdx.x; n < x.rows * 32; n += 128) ((uint32_t *)x.raw)[n] = ld_shared_b32(tile + 4 * n);
    if (threadIdx.x == 0) {
        cp_async_bulk_tensor_5d_store(x.out, tile, x.at_out[0], x.at_out[1], x.at_out[2], x.at_out[3], x.at_out[4]);
        cp_async_bulk_commit_group();
        cp_async_bulk_wait_group();
    }
}

/* TEST_LOADS boxes, a row of boxes each further down, through TEST_STAGES buffers: d[thread] is the sum of each row's column 0. */
KERNEL test_ring(const __grid_constant__ test_args x) {
    extern __shared__ __align__(1024) uint8_t shared[];
    const uint32_t tile = cvta_shared(shared), full = tile + BARRIERS_AT, empty = full + 8 * TEST_STAGES;
    make_barriers(full, 2 * TEST_STAGES, 128);
    if (threadIdx.x >= 128) {
        if (threadIdx.x > 128) return;
        for (int n = 0; n < TEST_LOADS; n++) {
            int stage = n % TEST_STAGES, phase = n / TEST_STAGES & 1;
            mbarrier_wait_parity(empty + 8 * stage, phase ^ 1);
            mbarrier_arrive_expect_tx(full + 8 * stage, TILE_BYTES);
            cp_async_bulk_tensor_5d_load(tile + stage * TILE_BYTES, x.in, full + 8 * stage, 0, n * TEST_ROWS, 0, 0, 0);
        }
        return;
    }
    float sum = 0;
    for (int n = 0; n < TEST_LOADS; n++) {
        int stage = n % TEST_STAGES, phase = n / TEST_STAGES & 1, row = threadIdx.x;
        mbarrier_wait_parity(full + 8 * stage, phase);
        sum += cvt_f32_f16((uint16_t)ld_shared_b32(place(tile + stage * TILE_BYTES, row, 0)));
        mbarrier_arrive(empty + 8 * stage);
    }
    x.d[threadIdx.x] = sum;
}

/* ---- products ---- */

DEVICE void put_tile(uint32_t tile, const uint16_t *from, int rows, int columns) {
    for (int n = threadIdx.x; n < rows * columns / 2; n += 128) {
        int row = 2 * n / columns, column = 2 * n % columns;
        uint32_t pair = from[2 * n] | (uint32_t)from[2 * n + 1] << 16;
        st_shared_b32(place(tile + column / 64 * rows * 128, row, column % 64), pair);
    }
}

#define PRODUCT(n, type)                                                                                                   \
    do {                                                                                                                   \
        if (x.from_registers)                                                                                              \
            wgmma_m64n##n##k16_rs_##type(d, a[step], wgmma_step(mn, step, 2048), 1);                                       \
        else                                                                                                               \
            wgmma_m64n##n##k16_ss_##type(d, wgmma_step(ka, step, 32), wgmma_step(kb, step, 32), 1);                        \
    } while (0)
#define CASE(n)                                                                                                            \
    case n:                                                                                                                \
        if (x.is_bf16)                                                                                                     \
            PRODUCT(n, bf16);                                                                                              \
        else                                                                                                               \
            PRODUCT(n, f16);                                                                                               \
        break;

/* Registers of a, of step `step`: row g or g + 8 of the warp, columns 2t and 2t + 1 of 8 or of the next 8. */
DEVICE void get_a(uint32_t a[4], const uint16_t *from, int step) {
    const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    for (int r = 0; r < 4; r++) {
        const uint16_t *at = from + (row + r % 2 * 8) * TEST_DEPTH + step * 16 + r / 2 * 8 + 2 * t;
        a[r] = at[0] | (uint32_t)at[1] << 16;
    }
}

/* d[row][column] = 1 + column + a b, in two groups. */
KERNEL test_product(const __grid_constant__ test_args x) {
    extern __shared__ __align__(1024) uint8_t shared[];
    const uint32_t tile_a = cvta_shared(shared), tile_b = tile_a + 64 * 128;
    const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    float d[128];
    uint32_t a[TEST_DEPTH / 16][4];
    put_tile(tile_a, x.a, 64, TEST_DEPTH);
    put_tile(tile_b, x.b, x.from_registers ? TEST_DEPTH : x.columns, x.from_registers ? x.columns : TEST_DEPTH);
    for (int step = 0; step < TEST_DEPTH / 16; step++) get_a(a[step], x.a, step);
    for (int e = 0; e < x.columns / 2; e++) d[e] = 1 + e / 4 * 8 + 2 * t + e % 2;
    fence_proxy_async();
    __syncthreads();
    const uint64_t ka = wgmma_k_major(tile_a), kb = wgmma_k_major(tile_b), mn = wgmma_mn_major(tile_b, TEST_DEPTH * 128);
    wgmma_fence();
    for (int step = 0; step < TEST_DEPTH / 16; step++) {
        switch (x.columns) {
            CASE(64)
            CASE(80)
            CASE(96)
            CASE(112)
            CASE(128)
            CASE(144)
            CASE(160)
            CASE(176)
            CASE(192)
            CASE(256)
        }
        if (step == 1) wgmma_commit_group();
    }
    wgmma_commit_group();
    wgmma_wait_group(0);
    for (int e = 0; e < x.columns / 2; e++) x.d[(row + e / 2 % 2 * 8) * x.columns + e / 4 * 8 + 2 * t + e % 2] = d[e];
}

/* ---- faults ---- */

/* A tile by a load, one product with itself, one more from registers, one store; or with something wrong. */
KERNEL test_fault(const __grid_constant__ test_args x) {
    extern __shared__ __align__(1024) uint8_t shared[];
    const uint32_t tile = cvta_shared(shared), full = tile + BARRIERS_AT, own = tile + TILE_BYTES;
    const int fault = x.fault, thread = threadIdx.x;
    const void *in = fault == FAULT_NO_MAP ? x.none : x.in;
    if (thread == 0) {
        mbarrier_init(full, 1);
        if (fault != FAULT_BARRIER_NOT_FENCED) fence_mbarrier_init();
    }
    __syncthreads();
    if (fault == FAULT_REGISTERS) setmaxnreg_inc(256), setmaxnreg_dec(256);
    if (fault == FAULT_BARRIER_MISSING && thread < 64) bar_sync(2, 128);
    if (fault == FAULT_BARRIER_COUNTS) bar_sync(2, thread < 64 ? 128 : 96);
    if (fault == FAULT_BARRIER_OVERWRITTEN && thread == 5) st_shared_b32(full, 7);
    if (thread == 0) {
        if (fault != FAULT_NO_ARRIVAL) mbarrier_arrive_expect_tx(full, TILE_BYTES + (fault == FAULT_WRONG_BYTES) * 16);
        cp_async_bulk_tensor_5d_load(tile, in, full, 0, 0, 0, 0, 0);
        if (fault == FAULT_TOO_MANY_ARRIVALS) mbarrier_arrive(full);
        if (fault == FAULT_LOAD_OVERWRITTEN) st_shared_b32(tile + 4, 7);
    }
    if (fault == FAULT_LOAD_NOT_WAITED) return;
    __syncthreads();
    if (fault != FAULT_NO_WAIT || thread < 96) mbarrier_wait_parity(full, 0);
    float d[32] = {}, e[32] = {};
    uint32_t a[4] = {1, 2, 3, 4};
    if (fault == FAULT_HALF_WARPGROUP && thread < 64) return;
    if (fault == FAULT_NO_FENCE_OF_PRODUCT && thread == 70) st_shared_b32(tile + 64 * 128, 0);
    if (fault == FAULT_NO_FENCE_OF_PRODUCT) __syncthreads();
    if (fault != FAULT_NO_FENCE_OF_REGISTERS) wgmma_fence();
    wgmma_m64n64k16_ss_f16(d, wgmma_k_major(tile), wgmma_k_major(tile + (fault == FAULT_DESCRIPTOR ? 256 : 64 * 128)), 0);
    wgmma_commit_group();
    wgmma_m64n64k16_rs_f16(e, a, wgmma_mn_major(tile, 0), 0);
    wgmma_commit_group();
    if (fault == FAULT_PRODUCT_NOT_WAITED) return;
    wgmma_wait_group(1);
    if (fault == FAULT_EARLY_RELEASE && thread == 0) {
        mbarrier_arrive_expect_tx(full, TILE_BYTES);
        cp_async_bulk_tensor_5d_load(tile, in, full, 0, 0, 0, 0, 0);
    }
    if (fault == FAULT_EARLY_REGISTERS && thread == 77) a[2] = 9;
    float early = e[0];
    wgmma_wait_group(0);
    x.d[thread] = fault == FAULT_EARLY_READ ? early : d[0] + e[0];
    st_shared_b32(own + thread * 4, thread);
    if (fault != FAULT_NO_FENCE_OF_STORE) fence_proxy_async();
    bar_sync(1, 128);
    if (thread) return;
    cp_async_bulk_tensor_5d_store(x.out, own, 0, 0, 0, 0, 0);
    cp_async_bulk_commit_group();
    if (fault == FAULT_STORE_OVERWRITTEN) st_shared_b32(own, 7);
    if (fault == FAULT_STORE_NOT_WAITED) return;
    cp_async_bulk_wait_group_read();
}

/*
 * Warp 4 waits for a load, fences, and arrives at a second barrier; the warpgroup waits for that one alone and multiplies, as consumers
 * do with a tile that has been through somebody's hands. Or one step of it is missing.
 */
KERNEL test_relay(const __grid_constant__ test_args x) {
    extern __shared__ __align__(1024) uint8_t shared[];
    const uint32_t tile = cvta_shared(shared), full = tile + BARRIERS_AT, relay = full + 8, other = full + 16;
    const int fault = x.fault, thread = threadIdx.x;
    make_barriers(full, 3, 1);
    if (thread == 128) {
        mbarrier_arrive_expect_tx(full, TILE_BYTES);
        cp_async_bulk_tensor_5d_load(tile, x.in, full, 0, 0, 0, 0, 0);
    }
    __syncthreads();
    if (thread >= 128) {
        if (thread > 128) return;
        if (fault == FAULT_RELAY_EARLY_FENCE) fence_proxy_async();
        if (fault != FAULT_RELAY_NO_WAIT) mbarrier_wait_parity(full, 0);
        if (fault != FAULT_RELAY_EARLY_FENCE && fault != FAULT_RELAY_NO_FENCE) fence_proxy_async();
        if (fault == FAULT_RELAY_ELSEWHERE) mbarrier_arrive(other);
        if (fault != FAULT_RELAY_ELSEWHERE) mbarrier_arrive(relay);
        if (fault == FAULT_RELAY_NO_WAIT) mbarrier_wait_parity(full, 0);
        return;
    }
    if (fault == FAULT_RELAY_ELSEWHERE && thread == 0) mbarrier_arrive(relay); /* who knows of nothing */
    mbarrier_wait_parity(relay, 0);
    float d[32] = {};
    wgmma_fence();
    wgmma_m64n64k16_ss_f16(d, wgmma_k_major(tile), wgmma_k_major(tile + 64 * 128), 0);
    wgmma_commit_group();
    wgmma_wait_group(0);
    x.d[thread] = d[0];
}
