/*
 * CUDA C on the CPU: threads, shared memory, the exchanges of a warp and, in ptx.h and sm90.h, the instructions of ptx.cuh,
 * sm90.cuh and wgmma.cuh: enough to run the kernels of src/cuda, unchanged, where there is no GPU. Force-included (-include)
 * before each .cu file, which g++ compiles as C++. A block's threads are fibers that are switched at barriers and exchanges
 * only, and blocks (or clusters of them) run one after the other; so shared memory can be static. What is checked besides the results:
 *
 *   - every lane comes to each exchange, and no threads wait for each other at different barriers (fibers.c);
 *   - an address in shared memory is aligned and within what the launch asked for, a cp.async reads from a multiple of 16, and
 *     nothing reads its target before the wait (ptx.h);
 *   - copies and products that run beside the threads are waited for, and nobody meddles with them (hopper.h);
 *   - nothing past the end of device memory is touched, or before its start (driver.c);
 *   - with EMULATE_ORDER=reverse or random, nothing depends on which thread runs first between two barriers.
 *
 * Not seen: races that no order of the threads shows, and between blocks; bank conflicts; the rounding of tensor cores and of
 * ex2.approx (ptx.h says how they are computed here).
 */
#ifndef EMULATE_H
#define EMULATE_H

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __cluster_dims__(...) /* driver.c knows */
#define __noinline__ __attribute__((noinline))
#define __align__(bytes) __attribute__((aligned(bytes)))
#ifdef VARIANT /* a forward kernel: shared memory is dynamic, a global array of fibers.c */
#define __shared__
#else
#define __shared__ static
#endif

typedef struct uint4 {
    uint32_t x, y, z, w;
} uint4;
typedef struct uint2 {
    uint32_t x, y;
} uint2;
static inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return uint4{x, y, z, w}; }

extern "C" {
#include "fibers.h"
#include "hopper.h"
}

static inline void __syncthreads(void) { emulate_block_barrier(); }
static inline void __syncwarp(void) { emulate_warp_barrier(); }

/* A lane of the warp has x; this is that of `lane`. Overloads by type. */
#define SHUFFLE(type)                                                                                                      \
    static inline type __shfl_sync(unsigned, type x, int lane) {                                                           \
        uint32_t words[2] = {0, 0};                                                                                        \
        memcpy(words, &x, sizeof x);                                                                                       \
        memcpy(&x, emulate_exchange(words, 2)[(unsigned)lane % 32].word, sizeof x);                                        \
        return x;                                                                                                          \
    }                                                                                                                      \
    static inline type __shfl_xor_sync(unsigned mask, type x, int step) {                                                  \
        return __shfl_sync(mask, x, (int)threadIdx.x ^ step);                                                              \
    }
SHUFFLE(float)
SHUFFLE(double)
SHUFFLE(uint64_t)
SHUFFLE(uint32_t)
SHUFFLE(int32_t)
#undef SHUFFLE

static inline void __threadfence(void) {}
static inline void __trap(void) { emulate_fail("trap"); }

/* Blocks run one after the other. */
static inline uint32_t atomicAdd(uint32_t *at, uint32_t x) {
    uint32_t before = *at;
    *at += x;
    return before;
}

static inline uint32_t atomicMax(uint32_t *at, uint32_t x) {
    uint32_t before = *at;
    if (x > before) *at = x;
    return before;
}

static inline unsigned __ballot_sync(unsigned, int is_set) {
    uint32_t mine = is_set != 0;
    const emulate_words *all = emulate_exchange(&mine, 1);
    unsigned result = 0;
    for (unsigned lane = 0; lane < 32; lane++) result |= all[lane].word[0] << lane;
    return result;
}
static inline int __any_sync(unsigned mask, int is_set) { return __ballot_sync(mask, is_set) != 0; }
static inline int __syncthreads_or(int is_set) { return emulate_block_or(is_set); }

static inline int __reduce_min_sync(unsigned, int x) {
    uint32_t mine = (uint32_t)x;
    const emulate_words *all = emulate_exchange(&mine, 1);
    for (unsigned lane = 0; lane < 32; lane++) x = (int)all[lane].word[0] < x ? (int)all[lane].word[0] : x;
    return x;
}

static inline int __reduce_max_sync(unsigned mask, int x) { return ~__reduce_min_sync(mask, ~x); }

/* The larger of each of the two halves. */
static inline uint32_t __vmaxu2(uint32_t a, uint32_t b) {
    uint32_t low = (a & 0xffff) > (b & 0xffff) ? a & 0xffff : b & 0xffff;
    return low | (a >> 16 > b >> 16 ? a >> 16 : b >> 16) << 16;
}

static inline int __ffs(int x) { return __builtin_ffs(x); }

static inline uint32_t __float_as_uint(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}
static inline float __uint_as_float(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fsub_rn(float a, float b) { return a - b; }
static inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }

/* grid.cuh: each thread of a kernel that is launched early has to wait, as driver.c sees. */
#define ATTN_GRID_CUH
static inline void griddepcontrol_wait(void) { emulate_grid_waits++; }
static inline void griddepcontrol_launch_dependents(void) {}

#ifdef VARIANT
#include "ptx.h"
#include "sm90.h"
#endif

#endif
