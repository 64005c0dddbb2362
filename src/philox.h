/*
 * The dropout generator, for C and CUDA: Philox4x32-10 (Salmon et al., SC 2011) as a pure function of position.
 *
 * Counter: (key / 4, row, batch * heads + head, low half of offset). Key: seed, its high half xored with that of offset.
 * One call serves four neighbouring keys. An element is dropped when its 32 random bits are below dropout * 2^32.
 */
#ifndef ATTN_PHILOX_H
#define ATTN_PHILOX_H

#include "mask.h"

typedef struct attn_philox {
    uint32_t key[10][2]; /* of each round */
    uint32_t offset;
    uint32_t threshold; /* drop when the random number is below; 0: nothing is dropped */
} attn_philox;

ATTN_HD attn_philox attn__philox_make(uint64_t seed, uint64_t offset, double dropout) {
    attn_philox g;
    for (uint32_t round = 0; round < 10; round++) {
        g.key[round][0] = (uint32_t)seed + round * UINT32_C(0x9E3779B9);
        g.key[round][1] = ((uint32_t)(seed >> 32) ^ (uint32_t)(offset >> 32)) + round * UINT32_C(0xBB67AE85);
    }
    g.offset = (uint32_t)offset;
    g.threshold = (uint32_t)(dropout * 4294967296.0);
    return g;
}

/* The product in full. In a loop nvcc adds zeros to the high half of what C says. */
ATTN_HD uint64_t attn__multiply(uint32_t a, uint32_t b) {
#ifdef __CUDA_ARCH__
    uint64_t x;
    asm("mul.wide.u32 %0, %1, %2;" : "=l"(x) : "r"(a), "r"(b));
    return x;
#else
    return (uint64_t)a * b;
#endif
}

/* Random numbers for the keys 4*group .. 4*group + 3 of one row. */
ATTN_HD void attn__philox4(const attn_philox *g, uint32_t batch_head, uint32_t row, uint32_t group, uint32_t out[4]) {
    uint32_t c0 = group, c1 = row, c2 = batch_head, c3 = g->offset;
    for (int round = 0; round < 10; round++) {
        uint64_t a = attn__multiply(c0, UINT32_C(0xD2511F53)), b = attn__multiply(c2, UINT32_C(0xCD9E8D57));
        c0 = (uint32_t)(b >> 32) ^ c1 ^ g->key[round][0];
        c2 = (uint32_t)(a >> 32) ^ c3 ^ g->key[round][1];
        c1 = (uint32_t)b;
        c3 = (uint32_t)a;
    }
    out[0] = c0;
    out[1] = c1;
    out[2] = c2;
    out[3] = c3;
}

ATTN_HD int attn__dropped(const attn_philox *g, uint32_t batch_head, uint32_t row, uint32_t key) {
    uint32_t r[4];
    attn__philox4(g, batch_head, row, key / 4, r);
    return r[key % 4] < g->threshold;
}

#endif
