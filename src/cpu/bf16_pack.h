/*
 * A part of bf16_amx.c and of bf16_neon.c: the loops that pack operands (bf16.h), square by square of 32 x 32 elements. What is done with
 * a square is theirs; so is `words`, a vector of 16-bit numbers.
 */
#ifndef ATTN_CPU_BF16_PACK_H
#define ATTN_CPU_BF16_PACK_H

#include "bf16.h"
#include "compiler.h"

/* 32 x 32 elements to be packed, some of which may have to be made up: then they are a copy, with zeros. */
typedef struct square {
    const uint16_t *data;
    int64_t row;
    uint16_t copy[32 * 32];
} square;

/* The square at `from`, of which so many rows and dims are there, 32 of each at most. */
static inline void take_square(square *q, const uint16_t *from, int64_t row, int32_t rows, int32_t dims);

/*
 * Packs one square into its tiles, of which the first is at `to`; the second one of m or n is a panel on, and is left alone where
 * n has none (!both). *most, where it is wanted, becomes the larger of itself and the elements, doubled, which drops their signs.
 */
typedef void pack_square(uint16_t *to, int64_t panel, const square *q, bool both, words *most);

/* Packs square after square. k_is_dims: k runs over dims, and m or n over rows; otherwise the other way round. */
INLINE void pack(pack_square *one, const bool k_is_dims, uint16_t *to, const uint16_t *from, int64_t row, int32_t rows,
                 int32_t dim, words *most) {
    int64_t panel = attn__ceil_div(k_is_dims ? dim : rows, 32) * ATTN_BF16_TILE;
    square q;
    for (int32_t i = 0; i < rows; i += 32) {
        for (int32_t x = 0; x < dim; x += 32) {
            int32_t n = k_is_dims ? i : x, k = k_is_dims ? x : i;
            take_square(&q, from + i * row + x, row, rows - i, dim - x);
            one(to + n / 16 * panel + k / 32 * ATTN_BF16_TILE, panel, &q, n + 16 < (k_is_dims ? rows : dim), most);
        }
    }
}

/* Elements, doubled, from here on are NaN or infinity. */
enum { TWICE_INFINITY = 2 * 0x7f80 };

#endif
