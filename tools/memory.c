/*
 * The other floor of this machine, measured: how fast memory can be read. For decoding, which reads each key once and does
 * little with it, this is what counts.
 *
 * Every thread has memory of its own, reads it from front to back with the widest vectors that the CPU has, and adds it up,
 * which costs less than the reading. Threads begin each pass together, and the clock is read at every megabyte. What counts is
 * the stretch of 16 MiB of the first thread, a millisecond or so, in which all of them together have read the most: that is
 * the rate of the machine, not a sum of rates that its parts have at different times, and a stretch in which something else
 * had one of the CPUs does not count. As long as every pass was disturbed in this way it goes on for up to twice as long.
 *
 * What is to be measured is memory and no cache. A buffer much larger than the last cache is not enough to be sure of that:
 * virtual machines report caches of hundreds of megabytes, which they share with strangers, and caches do not always drop
 * what was used longest ago. So each thread throws its memory out of all caches before each pass (memory_flush), and 64 MiB
 * of it will do. Where a program cannot do that, the buffer is as large as it may be, 1 GiB or a quarter of the machine's
 * memory.
 */
#define _GNU_SOURCE /* madvise */

#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "tool.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <emmintrin.h>
#endif

/* ---- flushing ---- */

#if defined(__x86_64__)

/* clflushopt, which unlike clflush does not wait for the one before it. gcc and clang know different names for it. */
static bool has_clflushopt(void) {
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & 1u << 23);
}

static bool can_flush(void) { return true; }

void memory_flush(const void *memory, size_t bytes) {
    enum { LINE = 64 };
    const char *at = (const char *)((uintptr_t)memory & ~(uintptr_t)(LINE - 1)), *end = (const char *)memory + bytes;
    if (has_clflushopt())
        for (; at < end; at += LINE) __asm__ volatile("clflushopt %0" : : "m"(*at) : "memory");
    else
        for (; at < end; at += LINE) _mm_clflush(at);
    _mm_mfence();
}

#elif defined(__aarch64__)

static bool can_flush(void) { return true; }

void memory_flush(const void *memory, size_t bytes) {
    uint64_t type;
    __asm__("mrs %0, ctr_el0" : "=r"(type)); /* bits 16 to 19: words of 4 bytes in the smallest line, as a power of two */
    uintptr_t line = (uintptr_t)4 << (type >> 16 & 15), end = (uintptr_t)memory + bytes;
    for (uintptr_t at = (uintptr_t)memory & ~(line - 1); at < end; at += line)
        __asm__ volatile("dc civac, %0" : : "r"(at) : "memory");
    __asm__ volatile("dsb ish" : : : "memory");
}

#else

static bool can_flush(void) { return false; }

void memory_flush(const void *memory, size_t bytes) {
    (void)memory;
    (void)bytes;
}

#endif

enum { LEAST_HUGE_BYTES = 4 << 20 }; /* holds at least one huge page of 2 MiB, wherever it begins */

void memory_prefer_huge(void *memory, size_t bytes) {
#ifdef MADV_HUGEPAGE
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), begin = ((uintptr_t)memory + page - 1) & ~(page - 1);
    uintptr_t end = ((uintptr_t)memory + bytes) & ~(page - 1);
    if (bytes >= LEAST_HUGE_BYTES)
        (void)madvise((void *)begin, end - begin, MADV_HUGEPAGE); /* a wish: refused, nothing is lost */
#else
    (void)memory;
    (void)bytes;
#endif
}

/* ---- reading ---- */

/* The sum of so many bytes, a multiple of 1024, aligned. The result keeps the loop from being left out. */
#define READ_LOOP(name, target, vector_bytes)                                                                              \
    target static uint64_t name(const void *memory, size_t bytes) {                                                        \
        typedef uint64_t vector __attribute__((vector_size(vector_bytes)));                                                \
        const vector *v = memory;                                                                                          \
        vector a = {0}, b = {0}, c = {0}, d = {0};                                                                         \
        for (size_t i = 0; i < bytes / sizeof *v; i += 4) {                                                                \
            a += v[i];                                                                                                     \
            b += v[i + 1];                                                                                                 \
            c += v[i + 2];                                                                                                 \
            d += v[i + 3];                                                                                                 \
        }                                                                                                                  \
        a += b + c + d;                                                                                                    \
        return a[0];                                                                                                       \
    }

READ_LOOP(read_16, , 16)
#if defined(__x86_64__)
READ_LOOP(read_32, __attribute__((target("avx2"))), 32)
READ_LOOP(read_64, __attribute__((target("avx512f"))), 64)
#endif

typedef uint64_t (*read_loop)(const void *memory, size_t bytes);

static read_loop choose_loop(void) {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f")) return read_64;
    if (__builtin_cpu_supports("avx2")) return read_32;
#endif
    return read_16;
}

/* ---- measuring ---- */

enum { ALIGN = 4096, STEP = 1 << 20, WINDOW = 16, LEAST_PASSES = 3, MOST_PASSES = 64, MOST_STEPS = 1024 };
static const size_t most_bytes = (size_t)1 << 30, thread_bytes = (size_t)64 << 20;
static const double seconds_of_passes = 0.4;

typedef struct reader {
    struct readers *all;
    char *memory;
    uint64_t sum;
    int passes;
    double cpu_seconds;        /* of this pass, without the time that others had the CPU */
    double at[MOST_STEPS + 1]; /* when each step of this pass began; the last one: when all were done */
} reader;

typedef struct readers {
    read_loop loop;
    size_t bytes; /* of each */
    int threads, steps;
    atomic_int arrived; /* at any meeting so far */
    atomic_bool enough;
    bool undisturbed;   /* a pass has been */
    double began, best; /* bytes a second */
    reader each[];
} readers;

/* Waits until every thread has come as often as this one. */
static void meet(readers *all, int *meetings) {
    atomic_fetch_add(&all->arrived, 1);
    ++*meetings;
    while (atomic_load(&all->arrived) < *meetings * all->threads) sched_yield();
}

/* How many steps a thread had done at that time, parts of one included. */
static double steps_at(const reader *r, int steps, double time) {
    if (time <= r->at[0]) return 0;
    int low = 0, high = steps;
    while (high - low > 1) {
        int middle = (low + high) / 2;
        if (r->at[middle] <= time)
            low = middle;
        else
            high = middle;
    }
    double part = (time - r->at[low]) / (r->at[high] - r->at[low]);
    return low + (part < 1 ? part : 1);
}

/* The fastest stretch of the pass that all of them have just done. */
static double fastest_window(const readers *all) {
    const double *at = all->each[0].at;
    int window = all->steps < WINDOW ? all->steps : WINDOW;
    double fastest = 0;
    for (int first = 0; first + window <= all->steps; first++) {
        double begin = at[first], end = at[first + window], steps = window;
        for (int n = 1; n < all->threads; n++)
            steps += steps_at(&all->each[n], all->steps, end) - steps_at(&all->each[n], all->steps, begin);
        double rate = steps * STEP / (end - begin);
        if (rate > fastest) fastest = rate;
    }
    return fastest;
}

static double cpu_seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* After a pass, by the first thread: the rate, and whether another pass is wanted. */
static void judge_pass(readers *all, int passes) {
    double rate = fastest_window(all), elapsed = tool_seconds() - all->began;
    bool calm = true;
    for (int n = 0; n < all->threads; n++) {
        const reader *r = &all->each[n];
        calm = calm && r->cpu_seconds > 0.9 * (r->at[all->steps] - r->at[0]);
    }
    if (rate > all->best) all->best = rate;
    all->undisturbed = all->undisturbed || calm;
    if (passes >= LEAST_PASSES && elapsed > (all->undisturbed ? 1 : 2) * seconds_of_passes)
        atomic_store(&all->enough, true);
}

static void read_passes(void *arg) {
    reader *r = arg;
    readers *all = r->all;
    int meetings = 0;
    memset(r->memory, 1, all->bytes); /* the pages are there, near the one who reads them */
    for (; r->passes < MOST_PASSES; r->passes++) {
        memory_flush(r->memory, all->bytes);
        meet(all, &meetings);
        if (atomic_load(&all->enough)) break;
        double before = cpu_seconds();
        for (int step = 0; step < all->steps; step++) {
            r->at[step] = tool_seconds();
            r->sum += all->loop(r->memory + (size_t)step * STEP, STEP);
        }
        r->at[all->steps] = tool_seconds();
        r->cpu_seconds = cpu_seconds() - before;
        meet(all, &meetings);
        if (r == all->each)
            judge_pass(all, r->passes + 1); /* the others flush meanwhile, and see it after the next meeting */
    }
}

double read_gb_per_s(int threads) {
    threads = peak_threads(threads);
    size_t quarter = (size_t)sysconf(_SC_PHYS_PAGES) / 4 * (size_t)sysconf(_SC_PAGESIZE);
    size_t total = quarter < most_bytes ? quarter : most_bytes;
    size_t bytes = (total / (size_t)threads) & ~(size_t)(STEP - 1);
    if (can_flush() && bytes > thread_bytes) bytes = thread_bytes;
    if (bytes < STEP) bytes = STEP; /* a thousand threads */
    readers *all = tool_alloc(1, sizeof *all + (size_t)threads * sizeof *all->each);
    char *memory = all ? tool_alloc((int64_t)bytes * threads + ALIGN, 1) : NULL;
    double rate = -1;
    if (memory) {
        char *aligned = (char *)(((uintptr_t)memory + ALIGN - 1) & ~(uintptr_t)(ALIGN - 1));
        memset(all, 0, sizeof *all);
        all->loop = choose_loop();
        all->bytes = bytes;
        all->steps = (int)(bytes / STEP);
        all->threads = threads;
        all->began = tool_seconds();
        memory_prefer_huge(memory, bytes * (size_t)threads + ALIGN);
        for (int n = 0; n < threads; n++) all->each[n] = (reader){.all = all, .memory = aligned + (size_t)n * bytes};
        if (run_together(threads, read_passes, all->each, sizeof *all->each)) rate = 1e-9 * all->best;
    }
    free(memory);
    free(all);
    return rate;
}
