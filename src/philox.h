/*
 * The dropout generator, for C and CUDA: Philox4x32-7 (Salmon et al., SC 2011) as a pure function of position. Seven rounds are the
 * fewest that pass every test of BigCrush.
 *
 * Counter: (key / 8, row, batch * heads + head, low half of offset). Key: seed, its high half xored with that of offset.
 * One call serves eight neighbouring keys, 16 bits to each, the low half of a word first. An element is dropped when the lower 15 of
 * them are below dropout * 2^15: so the probability is a multiple of 2^-15, and a word can be compared at once, both its halves.
 */
#ifndef ATTN_PHILOX_H
#define ATTN_PHILOX_H

#include "mask.h"

enum { ATTN_PHILOX_ROUNDS = 7, ATTN_PHILOX_KEYS = 8, ATTN_PHILOX_BITS = 0x7fff };
typedef struct attn_philox {
    uint32_t key[ATTN_PHILOX_ROUNDS][2]; /* of each round */
    uint32_t offset;
    uint32_t threshold; /* drop when the random number is below; 0: nothing is dropped */
} attn_philox;

ATTN_HD attn_philox attn__philox_make(uint64_t seed, uint64_t offset, double dropout) {
    attn_philox g;
    for (uint32_t round = 0; round < ATTN_PHILOX_ROUNDS; round++) {
        g.key[round][0] = (uint32_t)seed + round * UINT32_C(0x9E3779B9);
        g.key[round][1] = ((uint32_t)(seed >> 32) ^ (uint32_t)(offset >> 32)) + round * UINT32_C(0xBB67AE85);
    }
    g.offset = (uint32_t)offset;
    g.threshold = (uint32_t)(dropout * (ATTN_PHILOX_BITS + 1) + 0.5);
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

/* Random words for the keys 8 * group to 8 * group + 7 of one row. */
ATTN_HD void attn__philox4(const attn_philox *g, uint32_t batch_head, uint32_t row, uint32_t group, uint32_t out[4]) {
    uint32_t c0 = group, c1 = row, c2 = batch_head, c3 = g->offset;
    for (int round = 0; round < ATTN_PHILOX_ROUNDS; round++) {
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

/* Of the words for eight keys: is this one of them dropped? */
ATTN_HD int attn__drops(const attn_philox *g, const uint32_t words[4], uint32_t key) {
    return (words[key / 2 % 4] >> key % 2 * 16 & ATTN_PHILOX_BITS) < g->threshold;
}

ATTN_HD int attn__dropped(const attn_philox *g, uint32_t batch_head, uint32_t row, uint32_t key) {
    uint32_t words[4];
    attn__philox4(g, batch_head, row, key / ATTN_PHILOX_KEYS, words);
    return attn__drops(g, words, key);
}

#endif
