#include <stdint.h>
#include <math_constants.h>
#define PTX static __device__ __forceinline__
#include "wgmma.cuh"
#ifndef DIM
#define DIM 128
#endif
#ifndef DV
#define DV DIM
#endif
#ifndef BN
#define BN 128
#endif
#ifndef CONSUMERS
#define CONSUMERS 2
#endif
#ifndef STAGES
#define STAGES 2
#endif
#ifndef QBUF
#define QBUF 2
#endif
#ifndef PINGPONG
#define PINGPONG 1
#endif
#define CAT_(a, b, c) a##b##c
#define CAT(a, b, c) CAT_(a, b, c)
#define QK_MMA CAT(wgmma_m64n, BN, k16_ss_bf16)
#define PV_MMA CAT(wgmma_m64n, DV, k16_rs_bf16)
enum { BM = 64 * CONSUMERS, THREADS = 128 * (CONSUMERS + 1), NC = BN / 8, DC = DV / 8,
       Q_BYTES = BM * DIM * 2, K_BYTES = BN * DIM * 2, V_BYTES = BN * DV * 2 };

typedef struct __align__(64) tmap { uint64_t x[16]; } tmap;
typedef struct args {
    tmap q, k, v, o;
    float *lse;
    int32_t batch, heads, ratio, sq, sk, causal, tiles, group;
    float scale;
} args;

PTX uint32_t cvta_shared(const void *p) { return (uint32_t)__cvta_generic_to_shared(p); }
PTX void mbarrier_init(uint32_t bar, int count) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory"); }
PTX void mbarrier_expect_tx(uint32_t bar, int bytes) { asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory"); }
PTX void mbarrier_arrive(uint32_t bar) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory"); }
PTX void mbarrier_wait(uint32_t bar, int parity) {
    asm volatile("{ .reg .pred p; W: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1; @!p bra W; }" ::"r"(bar), "r"(parity) : "memory");
}
PTX void tma_load(uint32_t to, const tmap *map, uint32_t bar, int x, int y, int z, int w) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3,%4,%5,%6}], [%2];" ::"r"(to), "l"(map), "r"(bar), "r"(x), "r"(y), "r"(z), "r"(w) : "memory");
}
PTX void tma_store(const tmap *map, uint32_t from, int x, int y, int z, int w) {
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2,%3,%4,%5}], [%1];" ::"l"(map), "r"(from), "r"(x), "r"(y), "r"(z), "r"(w) : "memory");
}
PTX void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
PTX void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
#define wgmma_wait(n) asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(n) : "memory")
#define setmaxnreg_inc(n) asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(n))
#define setmaxnreg_dec(n) asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(n))
PTX void bar_sync(int id, int n) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(n) : "memory"); }
PTX void bar_arrive(int id, int n) { asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(n) : "memory"); }
PTX float ex2(float x) { float y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
PTX uint32_t pack(float lo, float hi) { uint32_t x; asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(hi), "f"(lo)); return x; }

/* K-major, 128-byte swizzle: groups of 8 rows are 1024 bytes apart */
PTX uint64_t desc_k(uint32_t at) { return (uint64_t)(at >> 4 & 0x3fff) | (uint64_t)1 << 16 | (uint64_t)(1024 >> 4) << 32 | (uint64_t)1 << 62; }
/* MN-major: 64 columns of all rows are one block; the next 64 columns `block` bytes further on */
PTX uint64_t desc_mn(uint32_t at, int block) { return (uint64_t)(at >> 4 & 0x3fff) | (uint64_t)(block >> 4) << 16 | (uint64_t)(1024 >> 4) << 32 | (uint64_t)1 << 62; }

typedef struct work { int b, h, row, n; } work;
PTX bool find(const args &a, int i, work &w) {
    int g = gridDim.x, t = i * g + ((i & 1) ? g - 1 - blockIdx.x : blockIdx.x);
    int heads = a.batch * a.heads;
    if (t >= heads * a.tiles) return false;
    int head, tile;
    if (a.causal) {
        int first = t / (a.group * a.tiles), at = t % (a.group * a.tiles), size = min(a.group, heads - first * a.group);
        tile = a.tiles - 1 - at / size; head = first * a.group + at % size;
    } else { head = t / a.tiles; tile = t % a.tiles; }
    w.b = head / a.heads; w.h = head % a.heads; w.row = tile * BM;
    int end = a.causal ? min(a.sk, w.row + BM + a.sk - a.sq) : a.sk;
    w.n = (end + BN - 1) / BN;
    return true;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) hop(const __grid_constant__ args a) {
    extern __shared__ __align__(1024) uint8_t shared[];
    const uint32_t sq = cvta_shared(shared), sk = sq + QBUF * Q_BYTES, sv = sk + STAGES * K_BYTES, bars = sv + STAGES * V_BYTES;
    const uint32_t q_full = bars, q_empty = q_full + 8 * QBUF, k_full = q_empty + 8 * QBUF, k_empty = k_full + 8 * STAGES,
                   v_full = k_empty + 8 * STAGES, v_empty = v_full + 8 * STAGES;
    const int wg = threadIdx.x >> 7, warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    if (threadIdx.x == 0) {
        for (int n = 0; n < QBUF; n++) mbarrier_init(q_full + 8 * n, 1), mbarrier_init(q_empty + 8 * n, CONSUMERS);
        for (int n = 0; n < STAGES; n++) {
            mbarrier_init(k_full + 8 * n, 1), mbarrier_init(v_full + 8 * n, 1);
            mbarrier_init(k_empty + 8 * n, CONSUMERS), mbarrier_init(v_empty + 8 * n, CONSUMERS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    work w;
    if (wg == CONSUMERS) { /* producer */
        setmaxnreg_dec(CONSUMERS == 3 ? 32 : 24);
        if (warp != 4 * CONSUMERS || lane) return;
        int stage = 0, phase = 0;
        for (int i = 0; find(a, i, w); i++) {
            int qs = i % QBUF, qp = i / QBUF & 1;
            mbarrier_wait(q_empty + 8 * qs, qp ^ 1);
            mbarrier_expect_tx(q_full + 8 * qs, Q_BYTES);
            for (int c = 0; c < DIM / 64; c++) tma_load(sq + qs * Q_BYTES + c * BM * 128, &a.q, q_full + 8 * qs, c * 64, w.row, w.h, w.b);
            int kvh = w.h / a.ratio;
            for (int n = w.n - 1; n >= 0; n--) {
                mbarrier_wait(k_empty + 8 * stage, phase ^ 1);
                mbarrier_expect_tx(k_full + 8 * stage, K_BYTES);
                for (int c = 0; c < DIM / 64; c++) tma_load(sk + stage * K_BYTES + c * BN * 128, &a.k, k_full + 8 * stage, c * 64, n * BN, kvh, w.b);
                mbarrier_wait(v_empty + 8 * stage, phase ^ 1);
                mbarrier_expect_tx(v_full + 8 * stage, V_BYTES);
                for (int c = 0; c < DV / 64; c++) tma_load(sv + stage * V_BYTES + c * BN * 128, &a.v, v_full + 8 * stage, c * 64, n * BN, kvh, w.b);
                if (++stage == STAGES) stage = 0, phase ^= 1;
            }
        }
        return;
    }
    setmaxnreg_inc(CONSUMERS == 3 ? 160 : 240);
    float o[DV / 2], s[BN / 2], m[2], l[2];
    uint32_t p[BN / 4];
    const int g = lane >> 2, t = lane & 3;
    const bool first_lane = (threadIdx.x & 127) == 0;
    int ks = 0, kp = 0, vs = 0, vp = 0;
    if (PINGPONG && wg == CONSUMERS - 1) bar_arrive(1, 256);
#define TURN() do { if (PINGPONG) bar_sync(1 + wg, 256); } while (0)
#define PASS() do { if (PINGPONG) bar_arrive(1 + (wg + 1) % CONSUMERS, 256); } while (0)
#define PRODUCT_QK() do { wgmma_fence(); _Pragma("unroll") for (int c = 0; c < DIM / 16; c++)                              \
        QK_MMA(s, dq + ((c / 4 * BM * 128 + c % 4 * 32) >> 4), dk + ((ks * K_BYTES + c / 4 * BN * 128 + c % 4 * 32) >> 4), c > 0); wgmma_commit(); } while (0)
#define PRODUCT_PV() do { wgmma_fence(); _Pragma("unroll") for (int c = 0; c < BN / 16; c++)                                \
        PV_MMA(o, &p[4 * c], dv + ((vs * V_BYTES + c * 2048) >> 4), 1); wgmma_commit(); } while (0)
#define MASK(n) do { _Pragma("unroll") for (int r = 0; r < 2; r++) {                                                      \
        int last = w.row + wg * 64 + (warp & 3) * 16 + r * 8 + g + a.sk - a.sq; if (!a.causal || last > a.sk - 1) last = a.sk - 1; \
        int most = last - (n) * BN - 2 * t;                                                                                \
        _Pragma("unroll") for (int j = 0; j < NC; j++) _Pragma("unroll") for (int c = 0; c < 2; c++)                     \
            if (8 * j + c > most) s[4 * j + 2 * r + c] = -CUDART_INF_F; } } while (0)
    const uint64_t dk = desc_k(sk), dv = desc_mn(sv, BN * 128);
    for (int i = 0; find(a, i, w); i++) {
        int qs = i % QBUF;
        const uint64_t dq = desc_k(sq + qs * Q_BYTES + wg * 64 * 128);
        mbarrier_wait(q_full + 8 * qs, i / QBUF & 1);
        mbarrier_wait(k_full + 8 * ks, kp);
        TURN();
        PRODUCT_QK();
        PASS();
        wgmma_wait(0);
        if (first_lane) mbarrier_arrive(k_empty + 8 * ks);
        if (++ks == STAGES) ks = 0, kp ^= 1;
        int n = w.n - 1;
        int full = a.causal ? (w.row + wg * 64 + a.sk - a.sq + 1) / BN : a.sk / BN; /* tiles below it need no mask */
        if (n >= full) MASK(n);
#pragma unroll
        for (int j = 0; j < DV / 2; j++) o[j] = 0;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float x = s[2 * r];
#pragma unroll
            for (int j = 0; j < NC; j++) x = fmaxf(x, fmaxf(s[4 * j + 2 * r], s[4 * j + 2 * r + 1]));
            x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
            x = fmaxf(x, __shfl_xor_sync(~0u, x, 2));
            m[r] = fmaxf(x, -1e30f);
            float less = m[r] * a.scale, sum = 0;
#pragma unroll
            for (int j = 0; j < NC; j++) {
                float y0 = ex2(__fmaf_rn(s[4 * j + 2 * r], a.scale, -less)), y1 = ex2(__fmaf_rn(s[4 * j + 2 * r + 1], a.scale, -less));
                sum += y0 + y1;
                s[4 * j + 2 * r] = y0, s[4 * j + 2 * r + 1] = y1;
            }
            l[r] = sum;
        }
#pragma unroll
        for (int j = 0; j < BN / 4; j++) p[j] = pack(s[2 * j], s[2 * j + 1]);
        for (n--; n >= 0; n--) {
            mbarrier_wait(k_full + 8 * ks, kp);
            TURN();
            PRODUCT_QK();
            mbarrier_wait(v_full + 8 * vs, vp);
            PRODUCT_PV();
            PASS();
            wgmma_wait(1);
            if (first_lane) mbarrier_arrive(k_empty + 8 * ks);
            if (++ks == STAGES) ks = 0, kp ^= 1;
            if (n >= full) MASK(n);
            float most[2], factor[2] = {1, 1};
            bool raise = false;
#pragma unroll
            for (int r = 0; r < 2; r++) {
                float x = s[2 * r];
#pragma unroll
                for (int j = 0; j < NC; j++) x = fmaxf(x, fmaxf(s[4 * j + 2 * r], s[4 * j + 2 * r + 1]));
                most[r] = x;
                raise |= x > m[r];
            }
            raise = __any_sync(~0u, raise);
            if (raise) {
#pragma unroll
                for (int r = 0; r < 2; r++) {
                    float x = most[r];
                    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
                    x = fmaxf(x, __shfl_xor_sync(~0u, x, 2));
                    x = fmaxf(x, m[r]);
                    factor[r] = ex2((m[r] - x) * a.scale);
                    m[r] = x;
                    l[r] *= factor[r];
                }
            }
#pragma unroll
            for (int r = 0; r < 2; r++) {
                float less = m[r] * a.scale, sum = 0;
#pragma unroll
                for (int j = 0; j < NC; j++) {
                    float y0 = ex2(__fmaf_rn(s[4 * j + 2 * r], a.scale, -less)), y1 = ex2(__fmaf_rn(s[4 * j + 2 * r + 1], a.scale, -less));
                    sum += y0 + y1;
                    s[4 * j + 2 * r] = y0, s[4 * j + 2 * r + 1] = y1;
                }
                l[r] += sum;
            }
            wgmma_wait(0);
            if (first_lane) mbarrier_arrive(v_empty + 8 * vs);
            if (++vs == STAGES) vs = 0, vp ^= 1;
#pragma unroll
            for (int j = 0; j < BN / 4; j++) p[j] = pack(s[2 * j], s[2 * j + 1]);
            if (raise) {
#pragma unroll
                for (int j = 0; j < DV / 2; j++) o[j] *= factor[j >> 1 & 1];
            }
        }
        mbarrier_wait(v_full + 8 * vs, vp);
        PRODUCT_PV();
#pragma unroll
        for (int r = 0; r < 2; r++) {
            l[r] += __shfl_xor_sync(~0u, l[r], 1);
            l[r] += __shfl_xor_sync(~0u, l[r], 2);
            int row = w.row + wg * 64 + (warp & 3) * 16 + r * 8 + g;
            if (t == 0 && row < a.sq) a.lse[((int64_t)w.b * a.heads + w.h) * a.sq + row] = (m[r] * a.scale + log2f(l[r])) * 0.69314718f;
            l[r] = l[r] == 0 ? 0 : __fdividef(1, l[r]);
        }
        wgmma_wait(0);
        if (first_lane) mbarrier_arrive(v_empty + 8 * vs);
        if (++vs == STAGES) vs = 0, vp ^= 1;
        /* O through the rows of Q that were this warp's */
        const uint32_t so = sq + qs * Q_BYTES;
        const int row = wg * 64 + (warp & 3) * 16 + g;
#pragma unroll
        for (int r = 0; r < 2; r++)
#pragma unroll
            for (int j = 0; j < DC; j++) {
                uint32_t at = so + j / 8 * BM * 128 + (row + 8 * r) * 128 + (((j & 7) ^ g) << 4) + t * 4;
                asm volatile("st.shared.b32 [%0], %1;" ::"r"(at), "r"(pack(o[4 * j + 2 * r] * l[r], o[4 * j + 2 * r + 1] * l[r])) : "memory");
            }
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        bar_sync(8 + wg, 128);
        if (first_lane) {
            for (int c = 0; c < DV / 64; c++) tma_store(&a.o, so + c * BM * 128 + wg * 64 * 128, c * 64, w.row + wg * 64, w.h, w.b);
            asm volatile("cp.async.bulk.commit_group;" ::: "memory");
            asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
            mbarrier_arrive(q_empty + 8 * qs);
        }
    }
    if (first_lane) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}
