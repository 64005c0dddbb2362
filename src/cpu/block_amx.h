/*
 * A part of bf16_amx.c: products of bf16 by tiles of AMX, step by step, so that something else can be done between the steps. `parts`
 * is how many bf16 a number is: 1, or of floats 3 and of halves 2 (bf16.h).
 */
#ifndef ATTN_CPU_BLOCK_AMX_H
#define ATTN_CPU_BLOCK_AMX_H

#include <immintrin.h>

#include "bf16.h"
#include "compiler.h"

/* Which parts are multiplied, in this order: each product has an operand in common with the one before. Small ones are first, as far as that allows. */
static const int8_t three_a[] = {2, 1, 1, 0, 0, 0}, three_b[] = {0, 0, 1, 1, 2, 0};
static const int8_t two_a[] = {1, 1, 0, 0}, two_b[] = {1, 0, 0, 1}; /* the first one where the product is exact */

/*
 * The work on one block of c, 2 x 2 tiles or (single) 2 x 1: steps of four parts each, one for each tile of c. A step multiplies
 * with 32 of k, the last one stores.
 */
typedef struct block {
    float *c;
    const uint16_t *a, *b;                  /* of the next step */
    int64_t ldc, c_panel, a_panel, b_panel; /* as in attn_bf16_product, ldc in bytes */
    int64_t a_part, b_part;
    int32_t left; /* steps that multiply */
    bool single, exact;
} block;

INLINE void start_block(block *x, const attn_bf16_product *p, int32_t i, int32_t j) {
    *x = (block){.c = p->c + 16 * i * p->ldc + j * p->c_panel,
                 .a = p->a + i * p->a_panel,
                 .b = p->b + j * p->b_panel,
                 .ldc = p->ldc * (int64_t)sizeof(float),
                 .c_panel = p->c_panel,
                 .a_panel = p->a_panel,
                 .b_panel = p->b_panel,
                 .a_part = p->a_part,
                 .b_part = p->b_part,
                 .left = p->k / 32,
                 .exact = p->exact,
                 .single = 16 * j + 16 >= p->n};
    if (!p->accumulate) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        return;
    }
    _tile_loadd(0, x->c, x->ldc);
    _tile_loadd(2, x->c + 4 * x->ldc, x->ldc);
    if (x->single) return;
    _tile_loadd(1, x->c + x->c_panel, x->ldc);
    _tile_loadd(3, x->c + 4 * x->ldc + x->c_panel, x->ldc);
}

/* Tiles 0 1 / 2 3 are c, 4 and 5 a, 6 and 7 b. */
INLINE void multiply_part(const block *x, const int part, const bool single) {
    if (part == 0) {
        _tile_loadd(6, x->b, 64);
        _tile_loadd(4, x->a, 64);
        _tile_dpbf16ps(0, 4, 6);
    } else if (part == 1 && !single) {
        _tile_loadd(7, x->b + x->b_panel, 64);
        _tile_dpbf16ps(1, 4, 7);
    } else if (part == 2) {
        _tile_loadd(5, x->a + x->a_panel, 64);
        _tile_dpbf16ps(2, 5, 6);
    } else if (part == 3 && !single) {
        _tile_dpbf16ps(3, 5, 7);
    }
}

INLINE void store_part(const block *x, const int part, const bool single) {
    if (part == 0) {
        _tile_stored(0, x->c, x->ldc);
    } else if (part == 1 && !single) {
        _tile_stored(1, x->c + x->c_panel, x->ldc);
    } else if (part == 2) {
        _tile_stored(2, x->c + 4 * x->ldc, x->ldc);
    } else if (part == 3 && !single) {
        _tile_stored(3, x->c + 4 * x->ldc + x->c_panel, x->ldc);
    }
}

/*
 * The same of numbers in parts: a fourth of the products [first, end) of these tables, tile after tile of c, as those of one tile would
 * wait for each other.
 */
INLINE void multiply_several(const block *x, const int part, const bool single, const int8_t *of_a, const int8_t *of_b,
                             const int first, const int end) {
    const int quarter = end - first;
    UNROLL for (int n = quarter * part; n < quarter * (part + 1); n++) {
        const int step = first + n / 4, tile = n % 4;
        const bool new_a = step == first || of_a[step] != of_a[step - 1];
        const bool new_b = step == first || of_b[step] != of_b[step - 1];
        const uint16_t *at_a = x->a + of_a[step] * x->a_part, *at_b = x->b + of_b[step] * x->b_part;
        if (tile == 0) {
            if (new_b) _tile_loadd(6, at_b, 64);
            if (new_a) _tile_loadd(4, at_a, 64);
            _tile_dpbf16ps(0, 4, 6);
        } else if (tile == 1 && !single) {
            if (new_b) _tile_loadd(7, at_b + x->b_panel, 64);
            _tile_dpbf16ps(1, 4, 7);
        } else if (tile == 2) {
            if (new_a) _tile_loadd(5, at_a + x->a_panel, 64);
            _tile_dpbf16ps(2, 5, 6);
        } else if (tile == 3 && !single) {
            _tile_dpbf16ps(3, 5, 7);
        }
    }
}

/* One of four parts of a step. */
INLINE void do_part(const block *x, const int part, const bool multiply, const bool single, const int parts) {
    if (!multiply)
        store_part(x, part, single);
    else if (parts == 1)
        multiply_part(x, part, single);
    else if (parts == 3)
        multiply_several(x, part, single, three_a, three_b, 0, 6);
    else if (x->exact)
        multiply_several(x, part, single, two_a, two_b, 0, 4);
    else
        multiply_several(x, part, single, two_a, two_b, 1, 4);
}

INLINE void next_step(block *x) {
    x->a += ATTN_BF16_TILE;
    x->b += ATTN_BF16_TILE;
    x->left--;
}

/* A step without anything in between. */
INLINE void plain_step(block *x, const bool multiply, const bool single, const int parts) {
    UNROLL16 for (int part = 0; part < 4; part++) do_part(x, part, multiply, single, parts);
    next_step(x);
}

INLINE void run_block(block *x, const bool single, const int parts) {
    while (x->left > 0) plain_step(x, true, single, parts);
    plain_step(x, false, single, parts);
}

#endif
