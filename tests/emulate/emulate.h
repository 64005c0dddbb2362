/*
 * CUDA C on the CPU, for kernels that use nothing but threads, shared memory and the exchanges of a warp: enough to run the small
 * kernels of src/cuda, unchanged, where there is no GPU. Force-included (-include) before each .cu file, which g++ compiles as
 * C++. A block's threads are fibers that are switched at barriers and exchanges only, and blocks run one after the other; so
 * shared memory can be static. What is checked besides the results: that every lane comes to each exchange, and, with
 * EMULATE_ORDER=reverse, that nothing depends on which thread runs first between two barriers.
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
#define __shared__ static

typedef struct uint4 {
    uint32_t x, y, z, w;
} uint4;

extern "C" {
#include "fibers.h"
}

static inline void __syncthreads(void) { emulate_block_barrier(); }
static inline void __syncwarp(void) { emulate_warp_barrier(); }

static inline float __shfl_sync(unsigned, float x, int lane) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    bits = (uint32_t)emulate_exchange(bits, (unsigned)lane % 32);
    memcpy(&x, &bits, sizeof bits);
    return x;
}

static inline double __shfl_sync(unsigned, double x, int lane) {
    uint64_t bits;
    memcpy(&bits, &x, sizeof bits);
    bits = emulate_exchange(bits, (unsigned)lane % 32);
    memcpy(&x, &bits, sizeof bits);
    return x;
}

static inline float __shfl_xor_sync(unsigned mask, float x, int step) {
    return __shfl_sync(mask, x, (int)threadIdx.x ^ step);
}
static inline double __shfl_xor_sync(unsigned mask, double x, int step) {
    return __shfl_sync(mask, x, (int)threadIdx.x ^ step);
}

/* By as many exchanges as there are lanes: slow, and plainly right. */
static inline unsigned __ballot_sync(unsigned, int is_set) {
    unsigned result = 0;
    for (unsigned lane = 0; lane < 32; lane++) result |= (unsigned)emulate_exchange(is_set != 0, lane) << lane;
    return result;
}

static inline int __reduce_min_sync(unsigned, int x) {
    int result = x;
    for (unsigned lane = 0; lane < 32; lane++) {
        int other = (int)(uint32_t)emulate_exchange((uint32_t)x, lane);
        result = other < result ? other : result;
    }
    return result;
}

static inline int __reduce_max_sync(unsigned mask, int x) { return ~__reduce_min_sync(mask, ~x); }

static inline int __ffs(int x) { return __builtin_ffs(x); }

#endif
