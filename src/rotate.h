/*
 * Rotary embedding of one pair of numbers, for C and CUDA: both round at the same places, so that a cache filled on a GPU holds
 * the same bytes as one filled on the host.
 */
#ifndef ATTN_ROTATE_H
#define ATTN_ROTATE_H

#include "numeric.h"
#include "schedule.h"

/* The rotation of one row: the tables' numbers of its position, and how pairs lie. */
typedef struct attn_rotation {
    attn_dtype dtype, table_dtype;
    const void *cos, *sin;
    int64_t table_row; /* element offset of the position in the tables */
    int32_t rotary_dim;
    int32_t interleaved, inverse;
} attn_rotation;

/* Where the two numbers of a pair are in their row. */
typedef struct attn_pair {
    int32_t first, second;
} attn_pair;

ATTN_HD attn_pair attn__rotate_pair(const attn_rotation *r, int32_t n) {
    attn_pair at;
    at.first = r->interleaved ? 2 * n : n;
    at.second = r->interleaved ? 2 * n + 1 : n + r->rotary_dim / 2;
    return at;
}

/* The rotation of a row of q or k_new for position pos. */
ATTN_HD attn_rotation attn__rotation(const attn_problem *p, const attn_buffers *f, int64_t pos) {
    attn_rotation r;
    r.dtype = p->dtype;
    r.table_dtype = p->rotary_dtype;
    r.cos = f->rotary_cos;
    r.sin = f->rotary_sin;
    r.table_row = pos * (p->rotary_dim / 2);
    r.rotary_dim = p->rotary_dim;
    r.interleaved = (p->flags & ATTN_ROTARY_INTERLEAVED) != 0;
    r.inverse = 0;
    return r;
}

/* Products that are rounded before they are added: left alone, nvcc would fuse the two. (C files are compiled without.) */
ATTN_HD float attn__product_float(float a, float b) {
#ifdef __CUDA_ARCH__
    return __fmul_rn(a, b);
#else
    return a * b;
#endif
}

ATTN_HD double attn__product(double a, double b) {
#ifdef __CUDA_ARCH__
    return __dmul_rn(a, b);
#else
    return a * b;
#endif
}

/* Rotates pair n of the row, (*a, *b), in float32, or in double for F64. */
ATTN_HD void attn__rotate_two(const attn_rotation *r, int32_t n, double *a, double *b) {
    double c = attn__load(r->table_dtype, r->cos, r->table_row + n),
           s = attn__load(r->table_dtype, r->sin, r->table_row + n);
    if (r->inverse) s = -s;
    if (r->dtype == ATTN_F64) {
        double ac = attn__product(*a, c), bs = attn__product(*b, s), bc = attn__product(*b, c), as = attn__product(*a, s);
        *a = ac - bs;
        *b = bc + as;
    } else {
        float fa = (float)*a, fb = (float)*b, fc = (float)c, fs = (float)s;
        float ac = attn__product_float(fa, fc), bs = attn__product_float(fb, fs);
        float bc = attn__product_float(fb, fc), as = attn__product_float(fa, fs);
        *a = ac - bs;
        *b = bc + as;
    }
}

#endif
