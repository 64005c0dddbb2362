/* The threads of a block as fibers; see emulate.h. Fibers are made once and stay; setjmp switches them, without a system call. */
#define _GNU_SOURCE
#include "fibers.h"
#include "hopper.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

enum { THREADS = 1024, STACK_BYTES = 128 * 1024, MARGIN = 1024 /* watched after shared memory */ };

enum { READY, AT_WARP_BARRIER, AT_BLOCK_BARRIER, AT_CLUSTER_BARRIER, AT_WAIT, DONE };

typedef struct fiber {
    ucontext_t start;
    jmp_buf at;
    int state, is_started;
    emulate_wait wait; /* AT_WAIT: for what */
    int phase;         /* which half of `exchanged` the next exchange uses: nobody can be two exchanges ahead */
} fiber;

emulate_index threadIdx, blockIdx, gridDim;
uint8_t shared[EMULATE_SHARED_PAGES] __attribute__((aligned(65536)));
unsigned emulate_shared_bytes, emulate_rank;
uint64_t emulate_grid_waits;

static fiber fibers[THREADS];
static jmp_buf scheduler;
static emulate_words exchanged[2][THREADS];
static int voted[THREADS];
static unsigned block_threads, cluster_blocks;
static unsigned base, first_block; /* first thread of the block in `fibers`; blockIdx.x of the cluster's first one */
static void (*body)(const void *args);
static const void *body_args;
static enum { FORWARD, REVERSE, RANDOM } order; /* in which threads run: EMULATE_ORDER */
static uint32_t luck;

/* A number below `count`. */
static unsigned draw(unsigned count) {
    luck = luck * 1664525 + 1013904223;
    return (luck >> 16) % count;
}

void emulate_fail(const char *format, ...) {
    va_list values;
    va_start(values, format);
    fprintf(stderr, "emulated GPU: block %u, thread %u: ", blockIdx.x, threadIdx.x);
    vfprintf(stderr, format, values);
    fputc('\n', stderr);
    va_end(values);
    abort();
}

static void yield(int state) {
    fiber *f = &fibers[base + threadIdx.x];
    f->state = state;
    if (!_setjmp(f->at)) _longjmp(scheduler, 1);
}

static void fiber_main(void) {
    for (;;) {
        body(body_args);
        yield(DONE);
    }
}

static void start(fiber *f) {
    f->is_started = 1;
    if (getcontext(&f->start)) emulate_fail("getcontext failed");
    f->start.uc_stack.ss_sp = malloc(STACK_BYTES);
    f->start.uc_stack.ss_size = STACK_BYTES;
    if (!f->start.uc_stack.ss_sp) emulate_fail("no memory for a stack");
    makecontext(&f->start, fiber_main, 0);
    setcontext(&f->start);
}

static void resume(unsigned thread) {
    fiber *f = &fibers[base + thread];
    threadIdx.x = thread;
    if (_setjmp(scheduler)) return;
    if (f->is_started) _longjmp(f->at, 1);
    start(f);
}

void emulate_pause(void) {
    if (order == RANDOM && draw(4) == 0) yield(READY);
}

void emulate_warp_barrier(void) { yield(AT_WARP_BARRIER); }
void emulate_block_barrier(void) { yield(AT_BLOCK_BARRIER); }
void emulate_cluster_barrier(void) { yield(AT_CLUSTER_BARRIER); }

void emulate_wait_for(emulate_wait wait) {
    if (wait.is_over(&wait)) return;
    fibers[base + threadIdx.x].wait = wait;
    yield(AT_WAIT);
}

const emulate_words *emulate_exchange(const uint32_t *words, int count) {
    unsigned thread = base + threadIdx.x;
    int phase = fibers[thread].phase;
    memcpy(exchanged[phase][thread].word, words, (size_t)count * sizeof *words);
    fibers[thread].phase = !phase;
    yield(AT_WARP_BARRIER);
    return exchanged[phase] + thread / 32 * 32;
}

int emulate_block_or(int x) {
    int result = 0;
    voted[base + threadIdx.x] = x;
    yield(AT_BLOCK_BARRIER);
    for (unsigned t = 0; t < block_threads; t++) result |= voted[base + t];
    yield(AT_BLOCK_BARRIER);
    return result != 0;
}

/* Lets the threads [first, end) go on if all that still run wait in `state`. Did it? */
static int release(unsigned first, unsigned end, int state, int all) {
    unsigned waiting = 0, done = 0;
    for (unsigned t = first; t < end; t++) {
        waiting += fibers[base + t].state == state;
        done += fibers[base + t].state == DONE;
    }
    if (!waiting || waiting + done < end - first) return 0;
    threadIdx.x = first;
    if (all && done) emulate_fail("lanes of this warp have left, others exchange");
    for (unsigned t = first; t < end; t++)
        if (fibers[base + t].state == state) fibers[base + t].state = READY;
    return 1;
}

static int is_ready(unsigned thread) {
    const fiber *f = &fibers[base + thread];
    threadIdx.x = thread;
    return f->state == READY || (f->state == AT_WAIT && f->wait.is_over(&f->wait));
}

/* Lets a warp run until each of its lanes waits for others or is done. Did it move at all? */
static int run_warp(unsigned first) {
    int moved = 0, reverse = order == REVERSE || (order == RANDOM && draw(2));
    do {
        for (unsigned n = 0; n < 32; n++) {
            unsigned t = first + (reverse ? 31 - n : n);
            if (!is_ready(t)) continue;
            resume(t);
            moved = 1;
        }
    } while (release(first, first + 32, AT_WARP_BARRIER, 1));
    return moved;
}

static void describe(const fiber *f, char *text, size_t bytes) {
    if (f->state == AT_WARP_BARRIER) snprintf(text, bytes, "wait for their warp");
    if (f->state == AT_BLOCK_BARRIER) snprintf(text, bytes, "wait at __syncthreads");
    if (f->state == AT_CLUSTER_BARRIER) snprintf(text, bytes, "wait for the other blocks of the cluster");
    if (f->state == DONE) snprintf(text, bytes, "have left");
    if (f->state == AT_WAIT) f->wait.describe(&f->wait, text, bytes);
}

/* Nobody can go on: says what every thread of a block waits for. */
static void report_waits(unsigned threads) {
    char text[256] = "", next[256];
    for (unsigned t = 0, first = 0; t <= threads; t++) {
        if (t < threads) describe(&fibers[base + t], next, sizeof next);
        if (t == 0) memcpy(text, next, sizeof text);
        if (t < threads && strcmp(text, next) == 0) continue;
        fprintf(stderr, "emulated GPU: block %u, threads %u to %u %s\n", blockIdx.x, first, t - 1, text);
        memcpy(text, next, sizeof text);
        first = t;
    }
}

/* Lets each warp run once. Did any of them move? */
static int run_warps(unsigned count) {
    unsigned warps[THREADS / 32];
    int moved = 0;
    for (unsigned n = 0; n < count; n++) warps[n] = order == REVERSE ? count - 1 - n : n;
    for (unsigned n = 0; n < count; n++) {
        unsigned other = order == RANDOM ? n + draw(count - n) : n, warp = warps[other];
        warps[other] = warps[n];
        moved |= run_warp(warp * 32);
    }
    return moved;
}

/* ---- clusters ---- */

/* Blocks of a cluster have the same addresses: each has pages of a file, and those of the one that runs are mapped. */
static void map_shared(unsigned rank) {
    static int file = -1;
    if (file < 0) file = memfd_create("shared memory", 0);
    if (file < 0 || ftruncate(file, (off_t)EMULATE_CLUSTER * EMULATE_SHARED_PAGES) ||
        mmap(shared, EMULATE_SHARED_PAGES, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file,
             (off_t)rank * EMULATE_SHARED_PAGES) == MAP_FAILED)
        emulate_fail("no memory for a cluster");
}

void emulate_enter(unsigned rank) {
    if (rank >= cluster_blocks) emulate_fail("block %u of a cluster of %u", rank, cluster_blocks);
    blockIdx.x = first_block + rank;
    if (rank == emulate_rank) return;
    emulate_rank = rank;
    base = rank * block_threads;
    map_shared(rank);
    emulate_hopper_enter(rank);
}

static void begin_block(void) {
    const unsigned room = EMULATE_SHARED_BYTES - emulate_shared_bytes, behind = room < MARGIN ? room : MARGIN;
    memset(shared, 0xff, emulate_shared_bytes + behind); /* NaN: what nobody has written */
    emulate_hopper_begin(block_threads);
    for (unsigned t = 0; t < block_threads; t++) fibers[base + t].state = READY;
}

static void end_block(void) {
    const unsigned room = EMULATE_SHARED_BYTES - emulate_shared_bytes, behind = room < MARGIN ? room : MARGIN;
    for (unsigned n = emulate_shared_bytes; n < emulate_shared_bytes + behind; n++)
        if (shared[n] != 0xff) emulate_fail("byte %u of shared memory was written, of %u", n, emulate_shared_bytes);
    emulate_hopper_end();
}

/* Threads of all blocks that are in this state; none is left in it then, if all are. */
static int release_cluster(void) {
    unsigned waiting = 0, done = 0, all = cluster_blocks * block_threads;
    for (unsigned t = 0; t < all; t++) {
        waiting += fibers[t].state == AT_CLUSTER_BARRIER;
        done += fibers[t].state == DONE;
    }
    if (!waiting || waiting + done < all) return 0;
    for (unsigned t = 0; t < all; t++)
        if (fibers[t].state == AT_CLUSTER_BARRIER) fibers[t].state = READY;
    return 1;
}

/* One warp goes as far as it can before the next one starts: what it does too early or too late then shows. */
static void run_cluster(void) {
    first_block = blockIdx.x;
    for (unsigned rank = 0; rank < cluster_blocks; rank++) {
        emulate_enter(rank);
        begin_block();
    }
    for (;;) {
        int moved = 0, done = 1;
        const unsigned from = order == REVERSE ? cluster_blocks - 1 : order == RANDOM ? draw(cluster_blocks) : 0;
        for (unsigned n = 0; n < cluster_blocks; n++) {
            emulate_enter((from + n) % cluster_blocks);
            moved |= run_warps(block_threads / 32);
            moved |= release(0, block_threads, AT_BLOCK_BARRIER, 0);
        }
        moved |= release_cluster();
        for (unsigned t = 0; t < cluster_blocks * block_threads; t++) done &= fibers[t].state == DONE;
        if (done) break;
        if (moved) continue;
        for (unsigned rank = 0; rank < cluster_blocks; rank++) {
            emulate_enter(rank);
            report_waits(block_threads);
        }
        emulate_fail("threads wait for each other at different barriers");
    }
    for (unsigned rank = cluster_blocks; rank-- > 0;) {
        emulate_enter(rank);
        end_block();
    }
}

void emulate_launch(void (*kernel)(const void *args), const void *args, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                    unsigned threads, unsigned shared_bytes, unsigned cluster) {
    const char *wish = getenv("EMULATE_ORDER");
    order = !wish ? FORWARD : strcmp(wish, "reverse") == 0 ? REVERSE : strcmp(wish, "random") == 0 ? RANDOM : FORWARD;
    if (threads % 32 || threads * cluster > THREADS) emulate_fail("want whole warps, and at most 1024 threads");
    if (cluster < 1 || cluster > EMULATE_CLUSTER || grid_x % cluster)
        emulate_fail("a grid of %u blocks in clusters of %u", grid_x, cluster);
    if (shared_bytes > EMULATE_SHARED_BYTES) emulate_fail("so much shared memory no block can have");
    emulate_shared_bytes = shared_bytes;
    block_threads = threads;
    cluster_blocks = cluster;
    if (cluster > 1) map_shared(0); /* blocks are entered from here on */
    body = kernel;
    body_args = args;
    gridDim.x = grid_x;
    gridDim.y = grid_y;
    gridDim.z = grid_z;
    for (blockIdx.z = 0; blockIdx.z < grid_z; blockIdx.z++)
        for (blockIdx.y = 0; blockIdx.y < grid_y; blockIdx.y++)
            for (blockIdx.x = 0; blockIdx.x < grid_x; blockIdx.x += cluster) run_cluster();
}
