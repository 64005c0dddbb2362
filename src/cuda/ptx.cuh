/* PTX instructions as functions of the same name; nothing else. */
#ifndef ATTN_PTX_CUH
#define ATTN_PTX_CUH

#include <stdint.h>

#define PTX static __device__ __forceinline__

/* The same number, but computed anew: what follows from it is not kept in registers around a loop, where they are scarce. */
PTX int here(int x) {
    asm volatile("" : "+r"(x));
    return x;
}

/* threadIdx.x, read anew. */
PTX int thread_here(void) {
    int x;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
    return x;
}

PTX float here_float(float x) {
    asm volatile("" : "+f"(x));
    return x;
}

PTX const uint8_t *here_pointer(const uint8_t *x) {
    asm volatile("" : "+l"(x));
    return x;
}

/* The address of shared memory as the instructions below want it. */
PTX uint32_t cvta_shared(const void *p) { return (uint32_t)__cvta_generic_to_shared(p); }

/*
 * Where a block's dynamic shared memory begins if it has no other: behind the kilobyte that is the system's. The compiler knows,
 * but takes the address of an array from the block's number in its cluster, anew wherever it is used, and waits for that. Who uses
 * this number has to compare it with cvta_shared of the array first.
 */
PTX uint32_t shared_start(void) { return 1024; }
/* What is at such an address. */
PTX void *shared_pointer(uint32_t at) { return __cvta_shared_to_generic(at); }

/* 16 bytes to shared memory, past L1: nobody else on this SM wants them. */
PTX void cp_async_cg(uint32_t to, const void *from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
/* The same of what is read once: L2 gives it up before anything else. */
PTX void cp_async_cg_once(uint32_t to, const void *from) {
    uint64_t policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "l"(policy)
                 : "memory");
}
/* The same as the first; only `bytes` are read, the rest becomes zero. */
PTX void cp_async_cg_zfill(uint32_t to, const void *from, int bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
/* 4 bytes. */
PTX void cp_async_ca_4_zfill(uint32_t to, const void *from, int bytes) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
/* 16 bytes if `wanted`, else nothing. */
PTX void cp_async_cg_if(uint32_t to, const void *from, bool wanted) {
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %2, 0; @p cp.async.cg.shared.global [%0], [%1], 16; }" ::"r"(to),
                 "l"(from), "r"((int)wanted)
                 : "memory");
}
PTX void cp_async_commit_group(void) { asm volatile("cp.async.commit_group;" ::: "memory"); }
/* Until all groups have arrived but the last `left`. */
#define cp_async_wait_group(left) asm volatile("cp.async.wait_group %0;" ::"n"(left) : "memory")
PTX void cp_async_wait_all(void) { asm volatile("cp.async.wait_all;" ::: "memory"); }

PTX void prefetch_global_l2(const void *from) { asm volatile("prefetch.global.L2 [%0];" ::"l"(from)); }

/* Four 8x8 matrices of 16-bit numbers; lane l gives the address of row l % 8 of matrix l / 8. */
PTX void ldmatrix_x4(uint32_t r[4], uint32_t from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(from)
                 : "memory");
}
PTX void ldmatrix_x4_trans(uint32_t r[4], uint32_t from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(from)
                 : "memory");
}
/* 8 x 8 numbers of 16 bits: lane 4 g + t has 2t and 2t + 1 of row g, and gets those of column g. */
PTX uint32_t movmatrix_trans(uint32_t x) {
    uint32_t y;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}

PTX uint32_t ld_shared_b32(uint32_t from) {
    uint32_t x;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x) : "r"(from) : "memory");
    return x;
}
PTX uint2 ld_shared_v2(uint32_t from) {
    uint2 x;
    asm volatile("ld.shared.v2.b32 {%0,%1}, [%2];" : "=r"(x.x), "=r"(x.y) : "r"(from) : "memory");
    return x;
}
PTX uint4 ld_shared_v4(uint32_t from) {
    uint4 x;
    asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "r"(from)
                 : "memory");
    return x;
}
PTX void st_shared_v4(uint32_t to, uint4 x) {
    asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};" ::"r"(to), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w) : "memory");
}
PTX void st_shared_v2(uint32_t to, uint32_t x, uint32_t y) {
    asm volatile("st.shared.v2.b32 [%0], {%1,%2};" ::"r"(to), "r"(x), "r"(y) : "memory");
}
PTX void st_shared_b32(uint32_t to, uint32_t x) { asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(x) : "memory"); }

/* Barrier of some warps of a block; 0 is that of __syncthreads. */
PTX void bar_sync(int barrier, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory"); }

/* What other blocks have written, past L1. */
PTX float4 ld_global_cg_v4(const float4 *from) {
    float4 x;
    asm volatile("ld.global.cg.v4.f32 {%0,%1,%2,%3}, [%4];"
                 : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
                 : "l"(from)
                 : "memory");
    return x;
}
PTX void st_global_cg_v4(float4 *to, float x, float y, float z, float w) {
    asm volatile("st.global.cg.v4.f32 [%0], {%1,%2,%3,%4};" ::"l"(to), "f"(x), "f"(y), "f"(z), "f"(w) : "memory");
}

PTX float2 ld_global_cg_v2(const float *from) {
    float2 x;
    asm volatile("ld.global.cg.v2.f32 {%0,%1}, [%2];" : "=f"(x.x), "=f"(x.y) : "l"(from) : "memory");
    return x;
}
PTX void st_global_cg_v2(float *to, float x, float y) {
    asm volatile("st.global.cg.v2.f32 [%0], {%1,%2};" ::"l"(to), "f"(x), "f"(y) : "memory");
}

/* Until another block has released this number; what was written before that is seen from here on. */
PTX uint32_t ld_acquire_gpu(const uint32_t *at) {
    uint32_t x;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(at) : "memory");
    return x;
}
PTX void wait_acquire_gpu(const uint32_t *at, uint32_t number) {
    while (ld_acquire_gpu(at) != number) continue;
}
PTX void st_release_gpu(uint32_t *at, uint32_t x) {
    asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(at), "r"(x) : "memory");
}

/* Adds; what this block wrote before (and behind a barrier, its threads) is seen by whoever adds later. Returns what was there. */
PTX uint64_t atom_add_acq_rel_gpu(uint64_t *at, uint64_t x) {
    uint64_t before;
    asm volatile("atom.acq_rel.gpu.global.add.u64 %0, [%1], %2;" : "=l"(before) : "l"(at), "l"(x) : "memory");
    return before;
}
/* The same; puts x there, if that is what was there. */
PTX uint64_t atom_cas_acq_rel_gpu(uint64_t *at, uint64_t that, uint64_t x) {
    uint64_t before;
    asm volatile("atom.acq_rel.gpu.global.cas.b64 %0, [%1], %2, %3;"
                 : "=l"(before)
                 : "l"(at), "l"(that), "l"(x)
                 : "memory");
    return before;
}
PTX void st_relaxed_gpu(uint64_t *at, uint64_t x) {
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(at), "l"(x) : "memory");
}

/* c += a b: a is 16x16 (tf32: 16x8), b two registers, c 16x8 in float. */
#define MMA(name, shape)                                                                                                   \
    PTX void name(float c[4], const uint32_t a[4], uint32_t b0, uint32_t b1) {                                             \
        asm("mma.sync.aligned." shape " {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"                             \
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                                               \
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));                                               \
    }
MMA(mma_m16n8k16_f16, "m16n8k16.row.col.f32.f16.f16.f32")
MMA(mma_m16n8k16_bf16, "m16n8k16.row.col.f32.bf16.bf16.f32")
MMA(mma_m16n8k8_tf32, "m16n8k8.row.col.f32.tf32.tf32.f32")
#undef MMA

/* 2^x to about 2 units in the last place; -inf gives 0. */
PTX float ex2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* 1/x to about 1 unit in the last place. */
PTX float rcp_approx(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* Four bytes of y:x, by the digits of `which`; with 8 added a byte is filled with its highest bit. */
PTX uint32_t prmt(uint32_t x, uint32_t y, uint32_t which) {
    uint32_t z;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(z) : "r"(x), "r"(y), "r"(which));
    return z;
}

/* Two floats rounded to 16-bit numbers, `low` in the low half. */
PTX uint32_t cvt_rn_bf16x2(float low, float high) {
    uint32_t x;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(high), "f"(low));
    return x;
}
PTX uint32_t cvt_rn_f16x2(float low, float high) {
    uint32_t x;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(high), "f"(low));
    return x;
}
/* Twice two numbers of e4m3 as float16; sm_89. */
PTX void cvt_rn_f16x2_e4m3x2(uint32_t y[2], uint32_t x) {
    asm("{ .reg .b16 low, high; mov.b32 {low, high}, %2; cvt.rn.f16x2.e4m3x2 %0, low; cvt.rn.f16x2.e4m3x2 %1, high; }"
        : "=r"(y[0]), "=r"(y[1])
        : "r"(x));
}
/* Of two numbers each. */
PTX uint32_t add_f16x2(uint32_t x, uint32_t y) {
    uint32_t z;
    asm("add.rn.f16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y));
    return z;
}
PTX uint32_t mul_f16x2(uint32_t x, uint32_t y) {
    uint32_t z;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y));
    return z;
}
PTX float cvt_f32_f16(uint16_t x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
    return y;
}
PTX uint32_t cvt_rna_tf32(float x) {
    uint32_t y;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"(x));
    return y;
}

#endif
