/*
 * The products of the decode kernel: Q with a tile of K, P with a tile of V, of 16 bits or of 8 (NARROW), and what is not finite in V.
 */
#ifndef ATTN_DECODE_TILE_CUH
#define ATTN_DECODE_TILE_CUH

#include "decode.cuh"
#include "decode_score.cuh"

DEVICE void multiply(float c[4], const uint32_t a[4], uint32_t b0, uint32_t b1) {
    if (BF16)
        mma_m16n8k16_bf16(c, a, b0, b1);
    else
        mma_m16n8k16_f16(c, a, b0, b1);
}

/* The warp's dims of Q, K, V and O: all, or every other four pieces. */
DEVICE int first_piece(void) { return (threadIdx.x >> 5) % TEAM * 4; }
DEVICE int piece_of(int dt) { return TEAM == 1 ? dt : dt / 4 * 8 + dt % 4; } /* and so much more */

/* ---- of 16 bits ---- */

/* 16 keys and 16 dims at a time. */
DEVICE void product_qk(float s[EIGHTS * NT][4], const uint32_t q[EIGHTS][STEPS][2], uint32_t shared_k) {
    const int lane = here(threadIdx.x & 31);
    const uint32_t row = start_of_row(shared_k, lane & 15) ^ (first_piece() + (lane >> 4)) << 4;
#pragma unroll
    for (int n = 0; n < EIGHTS * NT * 4; n++) s[n / 4][n % 4] = 0;
#pragma unroll
    for (int kk = 0; kk < STEPS; kk++)
#pragma unroll
        for (int nt = 0; nt < NT; nt++) {
            uint32_t k[4];
            ldmatrix_x4(k, piece_at(row, piece_of(2 * kk)) + nt * 16 * ROW_BYTES);
#pragma unroll
            for (int e = 0; e < EIGHTS; e++) multiply(s[e * NT + nt], k, q[e][kk][0], q[e][kk][1]);
        }
}

/* 16 dims and 16 keys at a time. */
DEVICE void product_pv(float o[EIGHTS * STEPS][4], const uint32_t p[EIGHTS * NT][2], uint32_t shared_v, int first) {
    const int lane = here(threadIdx.x & 31);
    const uint32_t row = start_of_row(shared_v, (lane & 7) + (lane >> 4) * 8) ^ (first + (lane >> 3 & 1)) << 4;
#pragma unroll
    for (int nt = 0; nt < NT; nt++)
#pragma unroll
        for (int dt = 0; dt < STEPS; dt++) {
            uint32_t v[4];
            ldmatrix_x4_trans(v, piece_at(row, piece_of(2 * dt)) + nt * 16 * ROW_BYTES);
#pragma unroll
            for (int e = 0; e < EIGHTS; e++) multiply(o[e * STEPS + dt], v, p[e * NT + nt][0], p[e * NT + nt][1]);
        }
}

/* ---- of 8 bits ---- */

/* Two bytes that are the upper halves of 16 bits, e4m3, as float16. */
DEVICE uint32_t widen_e4m3(uint32_t x) {
    const uint32_t size = x & 0x7f007f00, nan = (size + 0x01000100) >> 1 & 0x40004000; /* all ones: so is the exponent */
    return mul_f16x2(size >> 1 | nan | (x & 0x80008000), 0x5c005c00);                  /* 2^8 */
}

/*
 * Four bytes as float16, exactly: bytes 0 and 1 to x[0], 2 and 3 to x[1]; or, ACROSS, 0 and 2, and 1 and 3.
 *   e5m2  is the upper half of float16
 *   e4m3  has an exponent that is 8 less, and one NaN; from sm_89 on there is an instruction
 *   i8    with 128 added it is the mantissa of a number from 1024 on
 */
template <int KIND, bool ACROSS> DEVICE void widen(uint32_t x[2], uint32_t bytes) {
#if __CUDA_ARCH__ >= 890
    if (KIND == ATTN_E4M3) {
        const uint32_t pairs = ACROSS ? prmt(bytes, 0, 0x3120) : bytes;
        cvt_rn_f16x2_e4m3x2(x, pairs);
        return;
    }
#endif
    if (KIND == ATTN_I8) {
        const uint32_t more = bytes ^ 0x80808080, minus_1152 = 0xe480e480;
        x[0] = add_f16x2(prmt(more, 0x64646464, ACROSS ? 0x4240 : 0x4140), minus_1152);
        x[1] = add_f16x2(prmt(more, 0x64646464, ACROSS ? 0x4341 : 0x4342), minus_1152);
        return;
    }
    x[0] = prmt(bytes, 0, ACROSS ? 0x2404 : 0x1404);
    x[1] = prmt(bytes, 0, ACROSS ? 0x3414 : 0x3424);
    if (KIND == ATTN_E5M2) return;
    x[0] = widen_e4m3(x[0]);
    x[1] = widen_e4m3(x[1]);
}

/* 16 keys and 32 dims at a time: a lane gets four dims that follow each other, where Q has them too. */
template <int KIND>
DEVICE void product_qk_of(float s[EIGHTS * NT][4], const uint32_t q[EIGHTS][STEPS][2], uint32_t shared_k) {
    const int lane = here(threadIdx.x & 31);
    const uint32_t row = start_of_row(shared_k, lane & 15) ^ (first_piece() + (lane >> 4)) << 4;
#pragma unroll
    for (int n = 0; n < EIGHTS * NT * 4; n++) s[n / 4][n % 4] = 0;
#pragma unroll
    for (int kk = 0; kk < STEPS; kk += 2)
#pragma unroll
        for (int nt = 0; nt < NT; nt++) {
            uint32_t k[4], x[4][2];
            ldmatrix_x4(k, piece_at(row, piece_of(kk)) + nt * 16 * ROW_BYTES);
#pragma unroll
            for (int n = 0; n < 4; n++) widen<KIND, false>(x[n], k[n]);
#pragma unroll
            for (int n = 0; n < 2; n++) {
                const uint32_t keys[4] = {x[2 * n][0], x[2 * n + 1][0], x[2 * n][1], x[2 * n + 1][1]};
#pragma unroll
                for (int e = 0; e < EIGHTS; e++) multiply(s[e * NT + nt], keys, q[e][kk + n][0], q[e][kk + n][1]);
            }
        }
}

/* 16 dims and 32 keys at a time. Two dims are moved as one number, so a lane gets both for two keys: even dims are the tile's first eight rows. */
template <int KIND>
DEVICE void product_pv_of(float o[EIGHTS * STEPS][4], const uint32_t p[EIGHTS * NT][2], uint32_t shared_v, int first) {
    const uint32_t row = start_of_row(shared_v, here(threadIdx.x & 31)) ^ first << 4;
#pragma unroll
    for (int nt = 0; nt < NT; nt += 2)
#pragma unroll
        for (int dt = 0; dt < STEPS; dt++) {
            uint32_t v[4], x[8];
            ldmatrix_x4_trans(v, piece_at(row, piece_of(dt)) + nt * 16 * ROW_BYTES);
#pragma unroll
            for (int n = 0; n < 4; n++) widen<KIND, true>(x + 2 * n, v[n]);
#pragma unroll
            for (int e = 0; e < EIGHTS; e++) {
                multiply(o[e * STEPS + dt], x, p[e * NT + nt][0], p[e * NT + nt][1]);
                multiply(o[e * STEPS + dt], x + 4, p[e * NT + nt + 1][0], p[e * NT + nt + 1][1]);
            }
        }
}

DEVICE void product_qk_narrow(float s[EIGHTS * NT][4], const uint32_t q[EIGHTS][STEPS][2], uint32_t shared_k,
                              attn_dtype kind) {
    if (kind == ATTN_E4M3)
        product_qk_of<ATTN_E4M3>(s, q, shared_k);
    else if (kind == ATTN_E5M2)
        product_qk_of<ATTN_E5M2>(s, q, shared_k);
    else
        product_qk_of<ATTN_I8>(s, q, shared_k);
}
DEVICE void product_pv_narrow(float o[EIGHTS * STEPS][4], const uint32_t p[EIGHTS * NT][2], uint32_t shared_v, int first,
                              attn_dtype kind) {
    if (kind == ATTN_E4M3)
        product_pv_of<ATTN_E4M3>(o, p, shared_v, first);
    else if (kind == ATTN_E5M2)
        product_pv_of<ATTN_E5M2>(o, p, shared_v, first);
    else
        product_pv_of<ATTN_I8>(o, p, shared_v, first);
}

/* The lane's first column of a span's accumulator dt; and how far its second is. */
DEVICE int column_of(int dt) {
    const int g = threadIdx.x >> 2 & 7;
    return NARROW ? (first_piece() + piece_of(dt)) * 16 + 2 * g : (first_piece() + piece_of(2 * dt)) * 8 + g;
}
enum { NEXT_COLUMN = NARROW ? 1 : 8 };

/* ---- infinities and NaN in V, where some rows do not see a key: 0 * NaN ---- */

/* Of 8 bits: bit n for byte n. */
DEVICE int nonfinite_bytes(uint32_t x, attn_dtype kind) {
    const uint32_t ones = kind == ATTN_E4M3 ? 0x7f : 0x7c;
    int found = 0;
    if (kind == ATTN_I8) return 0;
#pragma unroll
    for (int n = 0; n < 4; n++) found |= ((x >> 8 * n & ones) == ones) << n;
    return found;
}

DEVICE float number_of_byte(uint32_t x, attn_dtype kind) {
    return kind == ATTN_E4M3 ? NAN : cvt_f32_f16((uint16_t)(x << 8)); /* of what is not finite */
}

enum { EACH_WORD = 4 / BYTES }; /* elements */

/*
 * What is not finite in the warp's columns of V is taken out, and added to the rows with a weight for it: such a term is p * v = v
 * for any p > 0, and -v for p < 0, of a negative factor. Rare, so slow.
 */
static __device__ __noinline__ void add_nonfinite(float o[EIGHTS * STEPS][4], const uint32_t p[EIGHTS * NT][2],
                                                  uint32_t shared_v, int first, attn_dtype kind) {
    const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3, odd = g & 1;
#pragma unroll 1
    for (int j = 0; j < KEYS; j++) {
        uint32_t weight[2 * EIGHTS]; /* of the lane's rows */
#pragma unroll
        for (int n = 0; n < 2 * EIGHTS; n++) {
            const uint32_t pair = __shfl_sync(~0u, p[n / 2 * NT + j / 16][j / 8 % 2], (2 * t + n % 2) * 4 + j % 8 / 2);
            weight[n] = pair >> 16 * (j % 2) & 0xffff;
        }
#pragma unroll 1
        for (int n = 0; n < (NARROW ? 1 : 2) * STEPS; n++) { /* a piece; lanes read the same words */
            const uint32_t at = piece_at(start_of_row(shared_v, j), first + piece_of(n)) + g / 2 * 4,
                           word = ld_shared_b32(at);
            const int which = NARROW ? nonfinite_bytes(word, kind) : nonfinite_word(word);
            uint32_t kept = word;
            for (int i = 0; i < EACH_WORD; i++) {
                if (!(which >> i & 1)) continue;
                kept &= ~((NARROW ? 0xffu : 0xffffu) << 8 * BYTES * i);
                if (i / (EACH_WORD / 2) != odd) continue;
                const float number =
                    NARROW ? number_of_byte(word >> 8 * i & 0xff, kind) : number_of((uint16_t)(word >> 16 * i));
                for (int r = 0; r < 2 * EIGHTS; r++)
                    if (weight[r] & 0x7fff)
                        o[r / 2 * STEPS + (NARROW ? n : n / 2)][2 * (NARROW ? i % 2 : n % 2) + r % 2] +=
                            weight[r] >> 15 ? -number : number;
            }
            __syncwarp();
            if (which) st_shared_b32(at, kept);
        }
    }
    __syncwarp();
}

DEVICE bool holds_nonfinite(uint32_t shared_v, int first, attn_dtype kind) {
    enum { SOME = PIECES / TEAM };
    bool found = false;
#pragma unroll 4
    for (int n = threadIdx.x & 31; n < KEYS * SOME; n += 32) {
        const uint4 x = ld_shared_v4(piece_at(start_of_row(shared_v, n / SOME), first + piece_of(n % SOME)));
        if (NARROW)
            found |= (nonfinite_bytes(x.x, kind) | nonfinite_bytes(x.y, kind) | nonfinite_bytes(x.z, kind) |
                      nonfinite_bytes(x.w, kind)) != 0;
        else
            found |= (nonfinite_word(x.x) | nonfinite_word(x.y) | nonfinite_word(x.z) | nonfinite_word(x.w)) != 0;
    }
    return __any_sync(~0u, found);
}

#endif
