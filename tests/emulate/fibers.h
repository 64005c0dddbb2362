/* The threads of a block as fibers: what the driver and the kernels know of fibers.c. */
#ifndef EMULATE_FIBERS_H
#define EMULATE_FIBERS_H

#include <stdint.h>

typedef struct emulate_index {
    unsigned x, y, z;
} emulate_index;

extern emulate_index threadIdx, blockIdx, gridDim;

/* Runs kernel(args) in every thread of the grid. */
void emulate_launch(void (*kernel)(const void *args), const void *args, unsigned grid_x, unsigned grid_y, unsigned threads);

/* Waits for the warp, or for the block. */
void emulate_warp_barrier(void);
void emulate_block_barrier(void);

/* Gives the lane's bits away and returns those of another lane of its warp. */
uint64_t emulate_exchange(uint64_t bits, unsigned lane);

#endif
