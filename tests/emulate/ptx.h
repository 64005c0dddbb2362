/*
 * The instructions of ptx.cuh on the CPU, under the same names; this file stands for that one. Shared memory is an array, and
 * an address in it an offset from its start plus a base, so that 0 is none of them; each access is checked.
 *
 * A cp.async takes effect when the thread waits for it. Until then its target holds NaN: who reads it too early, or still reads
 * what was there before, shows in the results.
 *
 * Products are exact and added up in double, then rounded once: the tensor core truncates instead.
 */
#ifndef EMULATE_PTX_H
#define EMULATE_PTX_H

#define ATTN_PTX_CUH /* not again */

#include "numeric.h"

enum { SHARED_BASE = EMULATE_SHARED_BASE, MOST_COPIES = 512, MOST_THREADS = 512 };

static inline int here(int x) { return x; }
static inline int thread_here(void) { return (int)threadIdx.x; }
static inline float here_float(float x) { return x; }
static inline const uint8_t *here_pointer(const uint8_t *x) { return x; }

static inline uint32_t cvta_shared(const void *p) { return (uint32_t)((const uint8_t *)p - shared) + SHARED_BASE; }

static inline uint32_t shared_start(void) { return SHARED_BASE; }
static inline void *shared_pointer(uint32_t at) { return shared + (at - SHARED_BASE); }

/* For copies and products of compute capability 9.0, which do not see at once what threads write. */
static inline void note_write(const uint8_t *to, uint32_t bytes) {
    if (emulate_tracks_writes) emulate_wrote(cvta_shared(to), bytes);
}

static inline uint8_t *shared_bytes_at(uint32_t at, uint32_t bytes) {
    if (at % bytes) emulate_fail("an address in shared memory that is not aligned");
    if (at < SHARED_BASE || at - SHARED_BASE + bytes > emulate_shared_bytes) emulate_fail("past the end of shared memory");
    return shared + (at - SHARED_BASE);
}

/* ---- cp.async ---- */

typedef struct pending_copy {
    uint8_t *to;
    uint32_t size;
    uint8_t data[16];
} pending_copy;

static pending_copy pending[MOST_THREADS][MOST_COPIES];
static int pending_count[MOST_THREADS];
static int group_end[MOST_THREADS][MOST_COPIES]; /* copies in a group under way and in those before it */
static int group_count[MOST_THREADS];

static inline void cp_async(uint32_t to, const void *from, int bytes, uint32_t size) {
    int *count = &pending_count[threadIdx.x];
    if (*count == MOST_COPIES) emulate_fail("more copies under way than there is room for");
    if ((uintptr_t)from % size) emulate_fail("cp.async from an address that is not a multiple of its size");
    if (bytes < 0 || bytes > (int)size) emulate_fail("cp.async of more bytes than its size");
    pending_copy *copy = &pending[threadIdx.x][(*count)++];
    copy->to = shared_bytes_at(to, size);
    copy->size = size;
    memset(copy->data, 0, sizeof copy->data);
    memcpy(copy->data, from, (size_t)bytes);
    memset(copy->to, 0xff, size);
    note_write(copy->to, size);
}
static inline void cp_async_cg_zfill(uint32_t to, const void *from, int bytes) { cp_async(to, from, bytes, 16); }
static inline void cp_async_ca_4_zfill(uint32_t to, const void *from, int bytes) { cp_async(to, from, bytes, 4); }
static inline void cp_async_cg(uint32_t to, const void *from) { cp_async_cg_zfill(to, from, 16); }
static inline void cp_async_cg_once(uint32_t to, const void *from) { cp_async_cg(to, from); }
static inline void cp_async_cg_if(uint32_t to, const void *from, bool wanted) {
    if (wanted) cp_async_cg(to, from);
}
static inline void cp_async_commit_group(void) {
    int *count = &group_count[threadIdx.x];
    if (*count == MOST_COPIES) emulate_fail("more groups of copies under way than there is room for");
    group_end[threadIdx.x][(*count)++] = pending_count[threadIdx.x];
}
/* The first `done` copies arrive; the others are still under way. */
static inline void finish_copies(int done, int groups) {
    pending_copy *copies = pending[threadIdx.x];
    int *ends = group_end[threadIdx.x];
    for (int n = 0; n < done; n++) {
        memcpy(copies[n].to, copies[n].data, copies[n].size);
        note_write(copies[n].to, copies[n].size);
    }
    pending_count[threadIdx.x] -= done;
    group_count[threadIdx.x] -= groups;
    memmove(copies, copies + done, (size_t)pending_count[threadIdx.x] * sizeof *copies);
    for (int n = 0; n < group_count[threadIdx.x]; n++) ends[n] = ends[n + groups] - done;
}
static inline void cp_async_wait_all(void) { finish_copies(pending_count[threadIdx.x], group_count[threadIdx.x]); }
static inline void cp_async_wait_group(int left) {
    const int groups = group_count[threadIdx.x] - left;
    if (groups > 0) finish_copies(group_end[threadIdx.x][groups - 1], groups);
}

/* ---- shared memory ---- */

static inline void prefetch_global_l2(const void *from) { (void)*(const volatile uint8_t *)from; } /* not past the end */

static inline uint32_t load_pair(uint32_t low_at, uint32_t high_at) {
    uint16_t low, high;
    memcpy(&low, shared_bytes_at(low_at, 2), 2);
    memcpy(&high, shared_bytes_at(high_at, 2), 2);
    return low | (uint32_t)high << 16;
}

/* Lane 4 g + t gets of each matrix the numbers 2t, 2t + 1 of row g; transposed, of column g. */
static inline void ldmatrix_x4(uint32_t r[4], uint32_t from) {
    const emulate_words *all = emulate_exchange(&from, 1);
    uint32_t g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    for (uint32_t n = 0; n < 4; n++) {
        uint32_t row = all[8 * n + g].word[0];
        shared_bytes_at(row, 16);
        r[n] = load_pair(row + 4 * t, row + 4 * t + 2);
    }
}
static inline void ldmatrix_x4_trans(uint32_t r[4], uint32_t from) {
    const emulate_words *all = emulate_exchange(&from, 1);
    uint32_t g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    for (uint32_t n = 0; n < 4; n++)
        r[n] = load_pair(all[8 * n + 2 * t].word[0] + 2 * g, all[8 * n + 2 * t + 1].word[0] + 2 * g);
}

static inline uint32_t movmatrix_trans(uint32_t x) {
    const emulate_words *all = emulate_exchange(&x, 1);
    const uint32_t g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, half = g % 2 * 16;
    const uint32_t low = all[8 * t + g / 2].word[0] >> half, high = all[8 * t + 4 + g / 2].word[0] >> half;
    return (low & 0xffff) | high << 16;
}

static inline uint32_t ld_shared_b32(uint32_t from) {
    uint32_t x;
    memcpy(&x, shared_bytes_at(from, 4), 4);
    return x;
}
static inline uint2 ld_shared_v2(uint32_t from) {
    uint2 x;
    memcpy(&x, shared_bytes_at(from, 8), 8);
    return x;
}
static inline uint4 ld_shared_v4(uint32_t from) {
    uint4 x;
    memcpy(&x, shared_bytes_at(from, 16), 16);
    return x;
}
static inline void st_shared(uint32_t to, const void *x, uint32_t bytes) {
    uint8_t *at = shared_bytes_at(to, bytes);
    memcpy(at, x, bytes);
    note_write(at, bytes);
}
static inline void st_shared_v4(uint32_t to, uint4 x) { st_shared(to, &x, 16); }
static inline void st_shared_v2(uint32_t to, uint32_t x, uint32_t y) {
    const uint32_t both[2] = {x, y};
    st_shared(to, both, 8);
}
static inline void st_shared_b32(uint32_t to, uint32_t x) { st_shared(to, &x, 4); }

/* ---- other blocks: they run one after the other, so what is not there yet never comes ---- */

typedef struct float4 {
    float x, y, z, w;
} float4;
static inline float4 ld_global_cg_v4(const float4 *from) { return *from; }
static inline void st_global_cg_v4(float4 *to, float x, float y, float z, float w) { *to = float4{x, y, z, w}; }
typedef struct float2 {
    float x, y;
} float2;
static inline uint64_t atom_add_acq_rel_gpu(uint64_t *at, uint64_t x) {
    const uint64_t before = *at;
    *at += x;
    return before;
}
static inline uint64_t atom_cas_acq_rel_gpu(uint64_t *at, uint64_t that, uint64_t x) {
    const uint64_t before = *at;
    if (before == that) *at = x;
    return before;
}
static inline void st_relaxed_gpu(uint64_t *at, uint64_t x) { *at = x; }
static inline float2 ld_global_cg_v2(const float *from) { return float2{from[0], from[1]}; }
static inline void st_global_cg_v2(float *to, float x, float y) { to[0] = x, to[1] = y; }
static inline uint32_t ld_acquire_gpu(const uint32_t *at) { return *at; }
static inline void wait_acquire_gpu(const uint32_t *at, uint32_t number) {
    if (*at != number) emulate_fail("waits for %u of a block that has left %u", number, *at);
}
static inline void st_release_gpu(uint32_t *at, uint32_t x) { *at = x; }

/* ---- numbers ---- */

static inline float ex2_approx(float x) {
    float y = exp2f(x);
    return y < 1.17549435e-38f ? 0 : y; /* .ftz */
}
static inline float rcp_approx(float x) { return 1 / x; }
static inline uint32_t prmt(uint32_t x, uint32_t y, uint32_t which) {
    const uint64_t both = x | (uint64_t)y << 32;
    uint32_t z = 0;
    for (int n = 0; n < 4; n++) {
        uint32_t digit = which >> 4 * n & 15, byte = (uint32_t)(both >> digit % 8 * 8) & 255;
        if (digit & 8) byte = byte & 128 ? 255 : 0;
        z |= byte << 8 * n;
    }
    return z;
}
static inline uint32_t cvt_rn_bf16x2(float low, float high) {
    return attn__to_bf16(low) | (uint32_t)attn__to_bf16(high) << 16;
}
static inline uint32_t cvt_rn_f16x2(float low, float high) {
    return attn__to_f16(low) | (uint32_t)attn__to_f16(high) << 16;
}
static inline float cvt_f32_f16(uint16_t x) { return attn__from_f16(x); }
static inline uint32_t add_f16x2(uint32_t x, uint32_t y) {
    return cvt_rn_f16x2(attn__from_f16((uint16_t)x) + attn__from_f16((uint16_t)y),
                        attn__from_f16((uint16_t)(x >> 16)) + attn__from_f16((uint16_t)(y >> 16)));
}
static inline uint32_t mul_f16x2(uint32_t x, uint32_t y) {
    return cvt_rn_f16x2(attn__from_f16((uint16_t)x) * attn__from_f16((uint16_t)y),
                        attn__from_f16((uint16_t)(x >> 16)) * attn__from_f16((uint16_t)(y >> 16)));
}

/* Ten bits of mantissa, ties away from zero. */
static inline uint32_t cvt_rna_tf32(float x) {
    uint32_t bits = attn__bits(x);
    return (bits & 0x7fffffff) > 0x7f800000 ? bits | 0x400000 : (bits + 0x1000) & ~0x1fffu;
}

/* ---- products ---- */

/* Number k of the two registers of 16-bit numbers (k below 16), or of 32-bit ones (below 8), that a row or a column has. */
static inline float operand(const emulate_words *quad, int k, int first, int second, int kind) {
    if (kind == ATTN_F32) return attn__float(quad[k % 4].word[k / 4 ? second : first]);
    uint16_t x = (uint16_t)(quad[k % 8 / 2].word[k / 8 ? second : first] >> 16 * (k % 2));
    return kind == ATTN_BF16 ? attn__from_bf16(x) : attn__from_f16(x);
}

/* a: registers 0, 2 have row g, 1, 3 row g + 8; b: registers 4, 5 have column g. */
static inline void multiply_fragments(float c[4], const uint32_t a[4], uint32_t b0, uint32_t b1, int kind) {
    const uint32_t words[6] = {a[0], a[1], a[2], a[3], b0, b1};
    const emulate_words *all = emulate_exchange(words, 6);
    int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, steps = kind == ATTN_F32 ? 8 : 16;
    for (int e = 0; e < 4; e++) {
        double sum = c[e];
        for (int k = 0; k < steps; k++)
            sum += (double)operand(all + 4 * g, k, e / 2, e / 2 + 2, kind) *
                   (double)operand(all + 4 * (2 * t + e % 2), k, 4, 5, kind);
        c[e] = (float)sum;
    }
}
static inline void mma_m16n8k16_f16(float c[4], const uint32_t a[4], uint32_t b0, uint32_t b1) {
    multiply_fragments(c, a, b0, b1, ATTN_F16);
}
static inline void mma_m16n8k16_bf16(float c[4], const uint32_t a[4], uint32_t b0, uint32_t b1) {
    multiply_fragments(c, a, b0, b1, ATTN_BF16);
}
static inline void mma_m16n8k8_tf32(float c[4], const uint32_t a[4], uint32_t b0, uint32_t b1) {
    multiply_fragments(c, a, b0, b1, ATTN_F32);
}

#endif
