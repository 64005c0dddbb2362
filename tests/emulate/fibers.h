/* The threads of a block as fibers: what the driver and the kernels know of fibers.c. */
#ifndef EMULATE_FIBERS_H
#define EMULATE_FIBERS_H

#include <stddef.h>
#include <stdint.h>

typedef struct emulate_index {
    unsigned x, y, z;
} emulate_index;

extern emulate_index threadIdx, blockIdx, gridDim;

/* Dynamic shared memory of the block that runs; kernels declare it by this name. In whole pages: each block of a cluster has its own there. */
enum {
    EMULATE_SHARED_BYTES = 227 * 1024,
    EMULATE_SHARED_BASE = 1024, /* added to offsets: 0 is no address */
    EMULATE_SHARED_PAGES = 256 * 1024,
    EMULATE_CLUSTER = 2 /* most blocks of a cluster */
};
extern uint8_t shared[EMULATE_SHARED_PAGES];
extern unsigned emulate_shared_bytes; /* how many of them the launch asked for */

/* Runs kernel(args) in every thread of the grid, whose blocks come in clusters of so many along x. */
void emulate_launch(void (*kernel)(const void *args), const void *args, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                    unsigned threads, unsigned shared_bytes, unsigned cluster);

/* Number of the block in its cluster; and makes another one that which runs, with its shared memory, for what reaches over. */
extern unsigned emulate_rank;
void emulate_enter(unsigned rank);

/* Ends the process: the kernel has done what it must not. */
void emulate_fail(const char *format, ...) __attribute__((noreturn, format(printf, 1, 2)));

/* Lets others run first, now and then, with EMULATE_ORDER=random; called where a thread has told others something. */
void emulate_pause(void);

/* Waits for the warp, for the block, or for all blocks of the cluster. */
void emulate_warp_barrier(void);
void emulate_block_barrier(void);
void emulate_cluster_barrier(void);

/* Something to wait for: the scheduler asks is_over for the thread threadIdx.x; describe is for the report of a deadlock. */
typedef struct emulate_wait {
    int (*is_over)(const struct emulate_wait *);
    void (*describe)(const struct emulate_wait *, char *text, size_t bytes);
    uint32_t what;
    unsigned until;
} emulate_wait;
void emulate_wait_for(emulate_wait wait);

/* How often threads of the kernel have waited for the one before it. */
extern uint64_t emulate_grid_waits;

/* What a lane gives away in an exchange. */
enum { EMULATE_WORDS = 6 };
typedef struct emulate_words {
    uint32_t word[EMULATE_WORDS];
} emulate_words;

/* Gives away the lane's words and returns those of all 32 lanes of its warp, good until its next exchange but one. */
const emulate_words *emulate_exchange(const uint32_t *words, int count);

/* Is x set in any thread of the block? A barrier of the block. */
int emulate_block_or(int x);

#endif
