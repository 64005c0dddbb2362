/*
 * The arithmetic peak of this machine, measured: a loop of fused multiply-adds on enough independent registers to hide their
 * latency, with the widest vectors that the CPU has, on as many threads as are to be compared with. memory.c has the other
 * floor, that of reading.
 */
#define _POSIX_C_SOURCE 200809L

#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "cpu/features.h"
#include "internal.h"
#include "tool.h"

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

/* Chains of multiply-adds that run side by side: as many as a latency of 4 and two units want, or four (Neoverse-V1). */
#define TWELVE(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11)
#if defined(__aarch64__)
#define EACH(X) TWELVE(X) X(12) X(13) X(14) X(15) X(16) X(17) X(18) X(19) X(20) X(21) X(22) X(23)
enum { ACCUMULATORS = 24 };
#else
#define EACH(X) TWELVE(X)
enum { ACCUMULATORS = 12 };
#endif
#define DECLARE(n) a##n = start,
#define STEP(n) a##n = FMA(a##n, x, y);
#define GATHER(n) sum = FMA(sum, x, a##n);

/*
 * `rounds` times ACCUMULATORS multiply-adds; every number stays small. The result keeps the loop from being left out, and `volatile` the
 * chains from being one: a compiler that knew them to be equal would compute the first.
 */
#define FMA_LOOP(name, target, vector, set1, first)                                                                        \
    target static double name(long rounds) {                                                                               \
        volatile vector start = set1(0.75);                                                                                \
        vector x = set1(0.5), y = set1(0.5), EACH(DECLARE) sum = set1(0);                                                  \
        for (long i = 0; i < rounds; i++) {                                                                                \
            EACH(STEP)                                                                                                     \
        }                                                                                                                  \
        EACH(GATHER)                                                                                                       \
        return (double)first(sum);                                                                                         \
    }

#define PLAIN(x) (x)
#define FMA(a, b, c) ((a) * (b) + (c))
FMA_LOOP(loop_plain_f32, , float, PLAIN, PLAIN)
FMA_LOOP(loop_plain_f64, , double, PLAIN, PLAIN)
#undef FMA

#if defined(__x86_64__)
#define TARGET_AVX2 __attribute__((target("avx2,fma")))
#define TARGET_AVX512 __attribute__((target("avx512f")))
#define FMA _mm256_fmadd_ps
FMA_LOOP(loop_avx2_f32, TARGET_AVX2, __m256, _mm256_set1_ps, _mm256_cvtss_f32)
#undef FMA
#define FMA _mm256_fmadd_pd
FMA_LOOP(loop_avx2_f64, TARGET_AVX2, __m256d, _mm256_set1_pd, _mm256_cvtsd_f64)
#undef FMA
#define FMA _mm512_fmadd_ps
FMA_LOOP(loop_avx512_f32, TARGET_AVX512, __m512, _mm512_set1_ps, _mm512_cvtss_f32)
#undef FMA
#define FMA _mm512_fmadd_pd
FMA_LOOP(loop_avx512_f64, TARGET_AVX512, __m512d, _mm512_set1_pd, _mm512_cvtsd_f64)
#undef FMA
#elif defined(                                                                                                             \
    __aarch64__) /* a + x y, which grows by 0.25 a step: a x + y would cost a copy of y, in the multipliers' time */
#define FIRST_F32(v) vgetq_lane_f32(v, 0)
#define FIRST_F64(v) vgetq_lane_f64(v, 0)
#define FMA(a, b, c) vfmaq_f32(a, b, c)
FMA_LOOP(loop_neon_f32, , float32x4_t, vdupq_n_f32, FIRST_F32)
#undef FMA
#define FMA(a, b, c) vfmaq_f64(a, b, c)
FMA_LOOP(loop_neon_f64, , float64x2_t, vdupq_n_f64, FIRST_F64)
#undef FMA

/* The same with vectors of SVE, whose length is the CPU's affair; in assembly, for the types want a compiler that was told. */
#define SVE_STEP(n) "fmla z" #n SVE_TYPE ", p0/m, z24" SVE_TYPE ", z25" SVE_TYPE "\n\t"
#define SVE_NAME(n) "v" #n,
#define SVE_CLEAR(n) "dup z" #n SVE_TYPE ", #0\n\t"
#define SVE_LOOP(name)                                                                                                     \
    static double name(long rounds) {                                                                                      \
        __asm__ volatile(".arch_extension sve\n\tptrue p0" SVE_TYPE "\n\tfdup z24" SVE_TYPE ", #0.5\n\tfdup z25" SVE_TYPE  \
                         ", #0.5\n\t" EACH(SVE_CLEAR) "0: " EACH(SVE_STEP) "subs %0, %0, #1\n\tb.ne 0b"                    \
                         : "+r"(rounds)                                                                                    \
                         :                                                                                                 \
                         : "cc", EACH(SVE_NAME) "v24", "v25");                                                             \
        return 0;                                                                                                          \
    }
#define SVE_TYPE ".s"
SVE_LOOP(loop_sve_f32)
#undef SVE_TYPE
#define SVE_TYPE ".d"
SVE_LOOP(loop_sve_f64)
#undef SVE_TYPE
#endif

typedef struct fma_loop {
    double (*run)(long rounds);
    int lanes;
} fma_loop;

static fma_loop choose(bool wide) {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f")) return wide ? (fma_loop){loop_avx512_f64, 8} : (fma_loop){loop_avx512_f32, 16};
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        return wide ? (fma_loop){loop_avx2_f64, 4} : (fma_loop){loop_avx2_f32, 8};
#elif defined(__aarch64__)
    uint32_t features = attn__cpu_detect();
    int words = features & ATTN_CPU_SVE512 ? 16 : features & ATTN_CPU_SVE256 ? 8 : 0;
    if (words > 0) return wide ? (fma_loop){loop_sve_f64, words / 2} : (fma_loop){loop_sve_f32, words};
    return wide ? (fma_loop){loop_neon_f64, 2} : (fma_loop){loop_neon_f32, 4};
#endif
    return wide ? (fma_loop){loop_plain_f64, 1} : (fma_loop){loop_plain_f32, 1};
}

typedef struct worker {
    fma_loop loop;
    double gflops;
} worker;

/*
 * The rate of the fastest of some slices: one in which something else had the CPU says nothing about the CPU. The first and
 * the last ones do not count, since other threads may not yet, or no longer, want their share of a core then.
 */
static void work(void *arg) {
    enum { ROUNDS = 100000, SLICES = 160 };
    worker *w = arg;
    for (int slice = 0; slice < SLICES; slice++) {
        double begin = tool_seconds(), value = w->loop.run(ROUNDS), elapsed = tool_seconds() - begin;
        double rate = 2e-9 * ACCUMULATORS * w->loop.lanes * ROUNDS / elapsed;
        bool counts = slice >= SLICES / 4 && slice < SLICES - SLICES / 4 && isfinite(value);
        if (counts && rate > w->gflops) w->gflops = rate;
    }
}

double peak_gflops(int threads, bool wide) {
    threads = peak_threads(threads);
    worker *workers = tool_alloc(threads, sizeof *workers);
    double sum = 0;
    for (int i = 0; workers && i < threads; i++) workers[i] = (worker){.loop = choose(wide)};
    bool ran = workers && run_together(threads, work, workers, sizeof *workers);
    for (int i = 0; i < threads && ran; i++) sum += workers[i].gflops;
    free(workers);
    return ran ? sum : -1;
}

/* ---- threads ---- */

int peak_threads(int threads) {
    int cpus = attn__cpu_count();
    return threads < cpus ? threads : cpus;
}

enum { WAIT, GO, LEAVE };

typedef struct starter {
    pthread_t thread;
    const atomic_int *sign;
    void (*body)(void *);
    void *arg;
} starter;

static void *start(void *arg) {
    const starter *s = arg;
    while (atomic_load(s->sign) == WAIT) sched_yield();
    if (atomic_load(s->sign) == GO) s->body(s->arg);
    return NULL;
}

bool run_together(int threads, void (*body)(void *), void *args, size_t arg_bytes) {
    starter *starters = tool_alloc(threads, sizeof *starters);
    atomic_int sign = WAIT;
    int started = 0;
    for (; starters && started < threads; started++) {
        starter *s = &starters[started];
        *s = (starter){.sign = &sign, .body = body, .arg = (char *)args + (size_t)started * arg_bytes};
        if (attn__fault(ATTN_FAULT_THREAD) || pthread_create(&s->thread, NULL, start, s) != 0) break;
    }
    atomic_store(&sign, starters && started == threads ? GO : LEAVE);
    for (int i = 0; i < started; i++) pthread_join(starters[i].thread, NULL);
    free(starters);
    return atomic_load(&sign) == GO;
}
