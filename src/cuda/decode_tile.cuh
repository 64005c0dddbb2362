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

/* 8 keys and 32 dims at a time, two steps of the product. */
DEVICE void product_qk(float s[NT][4], const uint32_t q[STEPS][4], uint32_t shared_k) {
    const int lane = here(threadIdx.x & 31);
    const uint32_t row = start_of_row(shared_k, lane & 7) ^ (first_piece() + (lane >> 3)) << 4;
#pragma unroll
    for (int n = 0; n < NT * 4; n++) s[n / 4][n % 4] = 0;
#pragma unroll
    for (int kk = 0; kk < STEPS; kk += 2)
#pragma unroll
        for (int nt = 0; nt < NT; nt++) {
            uint32_t k[4];
            ldmatrix_x4(k, piece_at(row, piece_of(2 * kk)) + nt * 8 * ROW_BYTES);
            multiply(s[nt], q[kk], k[0], k[1]);
            multiply(s[nt], q[kk + 1], k[2], k[3]);
        }
}

/* 32 keys and 8 dims at a time. */
DEVICE void product_pv(float o[DT_TEAM][4], const uint32_t p[NT / 2][4], uint32_t shared_v, int first) {
    const uint32_t row = start_of_row(shared_v, here(threadIdx.x & 31)) ^ first << 4;
#pragma unroll
    for (int n = 0; n < KEYS / 32; n++)
#pragma unroll
        for (int dt = 0; dt < DT_TEAM; dt++) {
            uint32_t v[4];
            ldmatrix_x4_trans(v, piece_at(row, piece_of(dt)) + n * 32 * ROW_BYTES);
            multiply(o[dt], p[2 * n], v[0], v[1]);
            multiply(o[dt], p[2 * n + 1], v[2], v[3]);
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

/* 8 keys and 64 dims at a time: a lane gets four dims that follow each other, where Q has them too. */
template <int KIND> DEVICE void product_qk_of(float s[NT][4], const uint32_t q[STEPS][4], uint32_t shared_k) {
    const int lane = here(threadIdx.x & 31);
    const uint32_t row = start_of_row(shared_k, lane & 7) ^ (first_piece() + (lane >> 3)) << 4;
#pragma unroll
    for (int n = 0; n < NT * 4; n++) s[n / 4][n % 4] = 0;
#pragma unroll
    for (int kk = 0; kk < STEPS; kk += 4)
#pragma unroll
        for (int nt = 0; nt < NT; nt++) {
            uint32_t k[4];
            ldmatrix_x4(k, piece_at(row, piece_of(kk)) + nt * 8 * ROW_BYTES);
#pragma unroll
            for (int n = 0; n < 4; n++) {
                uint32_t x[2];
                widen<KIND, false>(x, k[n]);
                multiply(s[nt], q[kk + n], x[0], x[1]);
            }
        }
}

/*
 * 32 keys and 16 dims at a time. Two dims are moved as one number, so a lane gets both for two keys: even dims are one tile of the product,
 * odd ones the next, and of its columns a lane has four that follow each other.
 */
template <int KIND>
DEVICE void product_pv_of(float o[DT_TEAM][4], const uint32_t p[NT / 2][4], uint32_t shared_v, int first) {
    const uint32_t row = start_of_row(shared_v, here(threadIdx.x & 31)) ^ first << 4;
#pragma unroll
    for (int k = 0; k < KEYS / 32; k++)
#pragma unroll
        for (int n = 0; n < DT_TEAM / 2; n++) {
            uint32_t v[4], x[4][2];
            ldmatrix_x4_trans(v, piece_at(row, piece_of(n)) + k * 32 * ROW_BYTES);
#pragma unroll
            for (int i = 0; i < 4; i++) widen<KIND, true>(x[i], v[i]);
#pragma unroll
            for (int odd = 0; odd < 2; odd++) {
                multiply(o[2 * n + odd], p[2 * k], x[0][odd], x[1][odd]);
                multiply(o[2 * n + odd], p[2 * k + 1], x[2][odd], x[3][odd]);
            }
        }
}

DEVICE void product_qk_narrow(float s[NT][4], const uint32_t q[STEPS][4], uint32_t shared_k, attn_dtype kind) {
    if (kind == ATTN_E4M3)
        product_qk_of<ATTN_E4M3>(s, q, shared_k);
    else if (kind == ATTN_E5M2)
        product_qk_of<ATTN_E5M2>(s, q, shared_k);
    else
        product_qk_of<ATTN_I8>(s, q, shared_k);
}
DEVICE void product_pv_narrow(float o[DT_TEAM][4], const uint32_t p[NT / 2][4], uint32_t shared_v, int first,
                              attn_dtype kind) {
    if (kind == ATTN_E4M3)
        product_pv_of<ATTN_E4M3>(o, p, shared_v, first);
    else if (kind == ATTN_E5M2)
        product_pv_of<ATTN_E5M2>(o, p, shared_v, first);
    else
        product_pv_of<ATTN_I8>(o, p, shared_v, first);
}

/* Which 8 columns accumulator dt of the warp are: NARROW, half of 16. */
DEVICE int tile_of(int dt) {
    return NARROW ? (first_piece() + piece_of(dt / 2)) * 2 + dt % 2 : first_piece() + piece_of(dt);
}

/* The lane's first column in columns 8 n to 8 n + 7 when the teams have met, counted from 8 n on. */
DEVICE int column_of(int n) {
    const int t = threadIdx.x & 3;
    return NARROW ? 4 * t - n % 2 * 6 : 2 * t;
}

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

/*
 * What is not finite in the warp's columns of V is taken out, and added to the rows with a weight for it: such a term is p * v = v
 * for any p > 0. Rare, so slow.
 */
static __device__ __noinline__ void add_nonfinite(float o[DT_TEAM][4], const uint32_t p[NT / 2][4], uint32_t shared_v,
                                                  int first, attn_dtype kind) {
    const int lane = threadIdx.x & 31, t = lane & 3;
#pragma unroll 1
    for (int j = 0; j < KEYS; j++) {
        uint32_t weight[2]; /* of rows g and g + 8 */
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const uint32_t pair = __shfl_sync(~0u, p[j / 16][j / 8 % 2 * 2 + half], (lane & ~3) + j % 8 / 2);
            weight[half] = pair >> 16 * (j % 2) & 0xffff;
        }
#pragma unroll 1
        for (int n = 0; NARROW && n < DT_TEAM / 2; n++) { /* columns as product_pv_of has them */
            const uint32_t at = piece_at(start_of_row(shared_v, j), first + piece_of(n)) + t * 4, word = ld_shared_b32(at);
            const int which = nonfinite_bytes(word, kind);
            uint32_t kept = word;
#pragma unroll 1
            for (int byte = 0; which >> byte; byte++) {
                if (!(which >> byte & 1)) continue;
                const float number = number_of_byte(word >> 8 * byte & 0xff, kind);
                for (int half = 0; half < 2; half++)
                    if (weight[half]) o[2 * n + byte % 2][2 * half + byte / 2] += number;
                kept &= ~(0xffu << 8 * byte);
            }
            __syncwarp(); /* lanes with the same t read the same word */
            if (which) st_shared_b32(at, kept);
        }
#pragma unroll 1
        for (int dt = 0; !NARROW && dt < DT_TEAM; dt++) {
            const uint32_t at = piece_at(start_of_row(shared_v, j), first + piece_of(dt)) + t * 4, word = ld_shared_b32(at);
            const int which = nonfinite_word(word);
#pragma unroll
            for (int half = 0; half < 2; half++) {
                if ((which & 1) && weight[half]) o[dt][2 * half] += number_of((uint16_t)word);
                if ((which & 2) && weight[half]) o[dt][2 * half + 1] += number_of((uint16_t)(word >> 16));
            }
            __syncwarp(); /* lanes with the same t read the same word */
            if (which) st_shared_b32(at, word & ((which & 1 ? 0 : 0xffffu) | (which & 2 ? 0 : 0xffff0000u)));
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
