/*
 * Operands of wgmma in shared memory, as the 64-bit numbers that describe them.
 *
 * Tiles in shared memory are blocks of 64 columns (128 bytes) of all rows, as the tensor memory accelerator writes them with a
 * swizzle of 128 bytes; the 16-byte pieces of row r are permuted by an exclusive or with r % 8.
 */
#ifndef ATTN_OPERAND_CUH
#define ATTN_OPERAND_CUH

#include "ptx.cuh"

enum { WGMMA_SWIZZLE_128 = 1, WGMMA_ROWS_8 = 8 * 128 };

/* A K-major tile from this address on. 16 columns further on are 32 bytes more, another block of columns rows * 128. */
PTX uint64_t wgmma_k_major(uint32_t at) {
    return (uint64_t)(at >> 4 & 0x3fff) | (uint64_t)1 << 16 | (uint64_t)(WGMMA_ROWS_8 >> 4) << 32 |
           (uint64_t)WGMMA_SWIZZLE_128 << 62;
}
/* An MN-major tile whose blocks of 64 columns are `block` bytes apart. 16 rows further on are 2048 bytes more. */
PTX uint64_t wgmma_mn_major(uint32_t at, uint32_t block) {
    return (uint64_t)(at >> 4 & 0x3fff) | (uint64_t)(block >> 4) << 16 | (uint64_t)(WGMMA_ROWS_8 >> 4) << 32 |
           (uint64_t)WGMMA_SWIZZLE_128 << 62;
}
/* The same, n times so many bytes further on: shared memory ends before that would carry over into the upper word. */
PTX uint64_t wgmma_step(uint64_t tile, uint32_t n, uint32_t bytes) {
    return (tile >> 32) << 32 | (uint32_t)((uint32_t)tile + n * (bytes >> 4));
}

#endif
