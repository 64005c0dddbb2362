/*
 * Rotary embedding of a row by one warp: append, rotate_q and rotary are this with different ways to a row. Numbers pass through
 * double and are rounded once, where the host rounds (rotate.h).
 */
#ifndef ATTN_ROTATE_CUH
#define ATTN_ROTATE_CUH

#include "device.cuh"
#include "rotate.h"

/* A row in memory. */
typedef struct placed_row {
    attn_dtype dtype;
    void *data;
    int64_t at; /* element offset */
} placed_row;

DEVICE placed_row make_row(attn_dtype dtype, void *data, int64_t at) {
    placed_row row = {dtype, data, at};
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

/* Numbers of 16 bits, rotated in float as attn__rotate_two does it: two pairs of a lane are on their way at once. Not by tables of doubles. */
DEVICE float half_number(bool bf16, uint32_t bits) {
    return bf16 ? attn__from_bf16((uint16_t)bits) : attn__from_f16((uint16_t)bits);
}
DEVICE uint16_t half_bits(bool bf16, float x) { return bf16 ? attn__to_bf16(x) : attn__to_f16(x); }
DEVICE void rotate_halves(const attn_rotation &r, bool bf16, uint16_t *to, const uint16_t *from, int32_t dim) {
    const int32_t count = r.rotary_dim / 2;
    const bool wide = r.table_dtype == ATTN_F32, table_bf16 = r.table_dtype == ATTN_BF16;
#pragma unroll 1
    for (int32_t n0 = lane_index(); n0 < count; n0 += 64) {
        uint32_t x[2], y[2], c[2], s[2];
#pragma unroll
        for (int n = 0; n < 2; n++) {
            const int32_t number = attn__min32(n0 + 32 * n, count - 1); /* who has no second one has the last */
            const int64_t at = r.table_row + number;
            const attn_pair pair = attn__rotate_pair(&r, number);
            x[n] = from[pair.first];
            y[n] = from[pair.second];
            c[n] = wide ? ((const uint32_t *)r.cos)[at] : ((const uint16_t *)r.cos)[at];
            s[n] = wide ? ((const uint32_t *)r.sin)[at] : ((const uint16_t *)r.sin)[at];
        }
#pragma unroll
        for (int n = 0; n < 2; n++) {
            if (n0 + 32 * n >= count) continue;
            const attn_pair pair = attn__rotate_pair(&r, n0 + 32 * n);
            const float a = half_number(bf16, x[n]), b = half_number(bf16, y[n]);
            const float cosine = wide ? attn__float(c[n]) : half_number(table_bf16, c[n]);
            const float sine = (r.inverse ? -1.0f : 1.0f) * (wide ? attn__float(s[n]) : half_number(table_bf16, s[n]));
            to[pair.first] = half_bits(bf16, __fmul_rn(a, cosine) - __fmul_rn(b, sine));
            to[pair.second] = half_bits(bf16, __fmul_rn(b, cosine) + __fmul_rn(a, sine));
        }
    }
    for (int32_t n = 2 * count + lane_index(); n < dim; n += 32) to[n] = from[n];
}

/* Row `from`, divided by descale, becomes row `to`; its first rotary_dim numbers are rotated unless r is NULL. It may be the same. */
DEVICE void rotate_row(const attn_rotation *r, placed_row to, placed_row from, int32_t dim, double descale) {
    if (r && to.dtype == from.dtype && attn__dtype_bytes(to.dtype) == 2 && r->table_dtype != ATTN_F64) {
        rotate_halves(*r, to.dtype == ATTN_BF16, (uint16_t *)to.data + to.at, (const uint16_t *)from.data + from.at, dim);
        return;
    }
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
