/* The threads of a block as fibers: what the driver and the kernels know of fibers.c. */
#ifndef EMULATE_FIBERS_H
#define EMULATE_FIBERS_H

#include <stddef.h>
#include <stdint.h>

typedef struct emulate_index {
    unsigned x, y, z;
} emulate_index;

extern emulate_index threadIdx, blockIdx, gridDim;

/* Dynamic shared memory of the block that runs; kernels declare it by this name. */
enum { EMULATE_SHARED_BYTES = 227 * 1024, EMULATE_SHARED_BASE = 1024 /* added to offsets: 0 is no address */ };
extern uint8_t shared[EMULATE_SHARED_BYTES];
extern unsigned emulate_shared_bytes; /* how many of them the launch asked for */

/* Runs kernel(args) in every thread of the grid. */
void emulate_launch(void (*kernel)(const void *args), const void *args, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                    unsigned threads, unsigned shared_bytes);

/* Ends the process: the kernel has done what it must not. */
void emulate_fail(const char *format, ...) __attribute__((noreturn, format(printf, 1, 2)));

/* Lets others run first, now and then, with EMULATE_ORDER=random; called where a thread has told others something. */
void emulate_pause(void);

/* Waits for the warp, or for the block. */
void emulate_warp_barrier(void);
void emulate_block_barrier(void);

/* Something to wait for: the scheduler asks is_over for the thread threadIdx.x; describe is for the report of a deadlock. */
typedef struct emulate_wait {
    int (*is_over)(const struct emulate_wait *);
    void (*describe)(const struct emulate_wait *, char *text, size_t bytes);
    uint32_t what;
    unsigned until;
} emulate_wait;
void emulate_wait_for(emulate_wait wait);

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
