/*
 * Rotary embedding of a row by one warp: append, rotate_q and rotary are this with different ways to a row. Numbers pass through
 * double and are rounded once, where the host rounds (rotate.h).
 */
#ifndef ATTN_ROTATE_CUH
#define ATTN_ROTATE_CUH

#include "rotate.h"
#include "warp.cuh"

/* A row in memory. */
typedef struct row_at {
    attn_dtype dtype;
    void *data;
    int64_t at; /* element offset */
} row_at;

DEVICE row_at make_row(attn_dtype dtype, void *data, int64_t at) {
    row_at row = {dtype, data, at};
    return row;
}

/*
 * The rotation of the row that lies `steps` positions after the first new key of its sequence; a position outside of the tables
 * is brought into them and reported. False when the tables are empty: then nothing can be rotated.
 */
DEVICE bool rotation_at(const attn_cuda_args &a, const attn_seq &s, int32_t steps, attn_rotation *r) {
    int flaw = a.p.flags & ATTN_ROTARY_POS ? ATTN_FLAW_ROTARY_POS : ATTN_FLAW_USED_KV;
    if (a.p.rotary_len == 0) {
        report(a, flaw, s.b);
        return false;
    }
    int64_t pos = (int64_t)attn__rotary_pos(&a.p, &a.f, &s) + steps;
    *r = attn__rotation(&a.p, &a.f, clamped(a, pos, 0, a.p.rotary_len - 1, flaw, s.b));
    return true;
}

/* Row `from`, divided by descale, becomes row `to`; its first rotary_dim numbers are rotated unless r is NULL. It may be the same. */
DEVICE void rotate_row(const attn_rotation *r, row_at to, row_at from, int32_t dim, double descale) {
    int32_t rotated = r ? r->rotary_dim : 0;
    for (int32_t n = lane_index(); n < rotated / 2; n += 32) {
        attn_pair pair = attn__rotate_pair(r, n);
        double x = attn__load(from.dtype, from.data, from.at + pair.first);
        double y = attn__load(from.dtype, from.data, from.at + pair.second);
        attn__rotate_two(r, n, &x, &y);
        attn__store(to.dtype, to.data, to.at + pair.first, x / descale);
        attn__store(to.dtype, to.data, to.at + pair.second, y / descale);
    }
    for (int32_t n = rotated + lane_index(); n < dim; n += 32)
        attn__store(to.dtype, to.data, to.at + n, attn__load(from.dtype, from.data, from.at + n) / descale);
}

#endif
