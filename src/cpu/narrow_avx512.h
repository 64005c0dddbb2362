/*
 * Products of few rows by AVX-512, of float: 16 dot products at once, of 4 keys with 4 rows, 8 with 2 or 16 with one, and up to 4 rows of p against 4
 * vectors of v. Keys and values are read where they lie and widened in registers, and later ones are asked for on the way. micro.c's
 * dot_block() and narrow_block() say what they do; the bits are those of theirs.
 */
#ifndef ATTN_CPU_NARROW_AVX512_H
#define ATTN_CPU_NARROW_AVX512_H

enum { NARROW_ROWS = 4 };

/*
 * The sums of the lanes of 16 vectors, by halves as sum_of_lanes has them. Each step puts halves of two vectors side by side and adds the
 * others: one comes by a blend, which more units do than a shuffle. Vector 4 m + ORDER[i] ends up in lane 4 i + m.
 */
INLINE __m512 sums_of_16(__m512 *x) {
    const __m512i quarters = _mm512_setr_epi32(4, 5, 6, 7, 16, 17, 18, 19, 12, 13, 14, 15, 24, 25, 26, 27);
    UNROLL16 for (int i = 0; i < 8; i++) x[i] =
        _mm512_mask_blend_ps(0xff00, x[2 * i], x[2 * i + 1]) + _mm512_shuffle_f32x4(x[2 * i], x[2 * i + 1], 0x4e);
    UNROLL16 for (int i = 0; i < 4; i++) x[i] =
        _mm512_mask_blend_ps(0xf0f0, x[2 * i], x[2 * i + 1]) + _mm512_permutex2var_ps(x[2 * i], quarters, x[2 * i + 1]);
    UNROLL16 for (int i = 0; i < 2; i++) x[i] =
        _mm512_mask_blend_ps(0xcccc, x[2 * i], x[2 * i + 1]) + _mm512_shuffle_ps(x[2 * i], x[2 * i + 1], 0x4e);
    return _mm512_shuffle_ps(x[0], x[1], 0x88) + _mm512_shuffle_ps(x[0], x[1], 0xdd);
}

/* kb keys against rb rows, kb * rb = 16; distances in bytes. Lane rb * key + row of the result is theirs. */
INLINE __m512 dots_of_16(const attn_dtype of, const int kb, const int rb, const char *k, int64_t ldk, const char *next,
                         int64_t pitch, const float *const *q, int32_t dim) {
    static const int order[] = {0, 2, 1, 3};
    const int64_t size = dtype_bytes(of);
    __m512 x[16];
    UNROLL16 for (int i = 0; i < 16; i++) x[i] = _mm512_setzero_ps();
    for (int32_t n = 0; n < dim; n += 16) {
        __m512 row[4];
        UNROLL for (int r = 0; r < rb; r++) row[r] = _mm512_loadu_ps(q[r] + n);
        UNROLL16 for (int j = 0; j < kb; j++) {
            if (n * size % 64 == 0) __builtin_prefetch((const void *)((uintptr_t)next + (uintptr_t)(j * pitch + n * size)));
            __m512 key = load_any(of, k + j * ldk, n);
            UNROLL for (int r = 0; r < rb; r++) {
                const int lane = rb * j + r, at = 4 * (lane % 4) + order[lane / 4];
                x[at] = _mm512_fmadd_ps(key, row[r], x[at]);
            }
        }
    }
    return sums_of_16(x);
}

/* Keys [0, keys), a multiple of kb, against rb rows, of which `rows` count; s is 0 in the rest of its vectors. */
INLINE void dots_of(const attn_dtype of, const int kb, const int rb, float *s, int32_t width, const char *k, int64_t ldk,
                    const char *next, int64_t pitch, const float *const *q, int32_t rows, int32_t keys, int32_t dim) {
    const __mmask16 there = (__mmask16)((1 << rows) - 1);
    for (int32_t j0 = 0; j0 < keys; j0 += kb, k += kb * ldk, next += kb * pitch, s += kb * width) {
        __m512 x = dots_of_16(of, kb, rb, k, ldk, next, pitch, q, dim);
        UNROLL16 for (int j = 0; j < kb; j++) {
            __m512i lanes = _mm512_add_epi32(_mm512_setr_epi32(0, 1, 2, 3, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0),
                                             _mm512_set1_epi32(rb * j));
            _mm512_storeu_ps(s + j * width, _mm512_maskz_permutexvar_ps(there, lanes, x));
        }
    }
}

/*
 * Each kind of them is a function of its own: all in one, addresses would be kept in memory for want of registers.
 */
#define DOTS_OF(name, of, kb, rb)                                                                                          \
    static __attribute__((noinline)) void dots_##rb##_##name(float *s, int32_t width, const char *k, int64_t ldk,          \
                                                             const char *next, int64_t pitch, const float *const *q,       \
                                                             int32_t rows, int32_t keys, int32_t dim) {                    \
        dots_of(of, kb, rb, s, width, k, ldk, next, pitch, q, rows, keys, dim);                                            \
    }
#define OF_EACH_DTYPE(DO, ...)                                                                                             \
    DO(f32, ATTN_F32, __VA_ARGS__)                                                                                         \
    DO(f16, ATTN_F16, __VA_ARGS__)                                                                                         \
    DO(bf16, ATTN_BF16, __VA_ARGS__)                                                                                       \
    DO(e4m3, ATTN_E4M3, __VA_ARGS__)                                                                                       \
    DO(e5m2, ATTN_E5M2, __VA_ARGS__)                                                                                       \
    DO(i8, ATTN_I8, __VA_ARGS__)
OF_EACH_DTYPE(DOTS_OF, 4, 4)
OF_EACH_DTYPE(DOTS_OF, 8, 2)
OF_EACH_DTYPE(DOTS_OF, 16, 1)
#define BY_DTYPE(call, ...)                                                                                                \
    (of == ATTN_F32    ? call##_f32(__VA_ARGS__)                                                                           \
     : of == ATTN_F16  ? call##_f16(__VA_ARGS__)                                                                           \
     : of == ATTN_BF16 ? call##_bf16(__VA_ARGS__)                                                                          \
     : of == ATTN_E4M3 ? call##_e4m3(__VA_ARGS__)                                                                          \
     : of == ATTN_E5M2 ? call##_e5m2(__VA_ARGS__)                                                                          \
                       : call##_i8(__VA_ARGS__))

/* As many of the first keys as there is a way for; up to four rows. */
INLINE int32_t dots_by_hand(const attn_dtype of, float *s, int32_t width, const char *k, int64_t ldk, const char *next,
                            int64_t pitch, const float *q, int64_t ldq, int32_t rows, int32_t keys, int32_t dim) {
    const float *row[4]; /* in the place of a row that is not there comes the last one again */
    for (int32_t r = 0; r < 4; r++) row[r] = q + (r < rows ? r : rows - 1) * ldq;
    const int32_t first = rows == 1 ? keys / 16 * 16 : rows == 2 ? keys / 8 * 8 : 0, rest = (keys - first) / 4 * 4;
    if (rows == 1)
        BY_DTYPE(dots_1, s, width, k, ldk, next, pitch, row, rows, first, dim);
    else if (rows == 2)
        BY_DTYPE(dots_2, s, width, k, ldk, next, pitch, row, rows, first, dim);
    BY_DTYPE(dots_4, s + (int64_t)first * width, width, k + first * ldk, ldk, next + first * pitch, pitch, row, rows, rest,
             dim);
    return first + rest;
}

/* mr rows of c, four vectors of columns, go on with so many keys. */
INLINE void sums_of(const attn_dtype of, const int mr, float *c, int64_t ldc, const float *p, int32_t width, const char *v,
                    int64_t ldv, const char *next, int64_t pitch, int32_t keys) {
    __m512 sum[4][4], value[4];
    float *row[4];
    UNROLL for (int r = 0; r < mr; r++) {
        row[r] = c + r * ldc;
        __asm__("" : "+r"(row[r])); /* one address for four vectors, which the compiler would not see */
        UNROLL for (int x = 0; x < 4; x++) sum[r][x] = _mm512_loadu_ps(row[r] + 16 * x);
    }
    for (int32_t j = 0; j < keys; j++, v += ldv, next += pitch, p += width) {
        UNROLL for (int x = 0; x < 4; x++) {
            value[x] = load_any(of, v, 16 * x);
            if (16 * x * dtype_bytes(of) % 64 == 0) __builtin_prefetch(next + 16 * x * dtype_bytes(of));
        }
        UNROLL for (int r = 0; r < mr; r++) {
            __m512 weight = _mm512_set1_ps(p[r]);
            UNROLL for (int x = 0; x < 4; x++) sum[r][x] = _mm512_fmadd_ps(weight, value[x], sum[r][x]);
        }
    }
    UNROLL for (int r = 0; r < mr; r++) { UNROLL for (int x = 0; x < 4; x++) _mm512_storeu_ps(row[r] + 16 * x, sum[r][x]); }
}

#define SUMS_OF(name, of, mr)                                                                                              \
    static __attribute__((noinline)) void sums_##mr##_##name(float *c, int64_t ldc, const float *p, int32_t width,         \
                                                             const char *v, int64_t ldv, const char *next, int64_t pitch,  \
                                                             int32_t keys) {                                               \
        sums_of(of, mr, c, ldc, p, width, v, ldv, next, pitch, keys);                                                      \
    }
OF_EACH_DTYPE(SUMS_OF, 1)
OF_EACH_DTYPE(SUMS_OF, 2)
OF_EACH_DTYPE(SUMS_OF, 3)
OF_EACH_DTYPE(SUMS_OF, 4)

/* c[m][ldc], so many blocks of four vectors, goes on with some keys. */
INLINE void sums_by_hand(const attn_dtype of, float *c, int64_t ldc, const float *p, int32_t width, const char *v,
                         int64_t ldv, const char *next, int64_t pitch, int32_t m, int32_t blocks, int32_t keys) {
    const int64_t bytes = 64 * dtype_bytes(of);
    for (int32_t r = 0; r < m; r += 4, c += 4 * ldc, p += 4) {
        for (int32_t b = 0; b < blocks; b++) {
            const char *from = v + b * bytes, *ahead = next + b * bytes;
            float *to = c + 64 * b;
            switch (m - r) {
            case 1: BY_DTYPE(sums_1, to, ldc, p, width, from, ldv, ahead, pitch, keys); break;
            case 2: BY_DTYPE(sums_2, to, ldc, p, width, from, ldv, ahead, pitch, keys); break;
            case 3: BY_DTYPE(sums_3, to, ldc, p, width, from, ldv, ahead, pitch, keys); break;
            default: BY_DTYPE(sums_4, to, ldc, p, width, from, ldv, ahead, pitch, keys); break;
            }
        }
    }
}

#endif
